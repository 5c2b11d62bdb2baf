"""What pyproject.toml cannot say: the kernel is compiled, and a wheel fits every Python 3 of its platform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

#: ``required``: no wheel without compiled code. ``none``: do not build it.
CHOICE = os.environ.get("TAILRACE_KERNEL", "")
#: The machine that the library is for, if it is not this one.
MACHINE = os.environ.get("TAILRACE_KERNEL_FOR") or os.uname().machine
FILE = "libkernel.so.1"
#: The page of the repository that a release is made from: its workflow knows, and no file here names a host.
HOME = os.environ.get("TAILRACE_PROJECT_URL", "")
URLS = {
    "Source": HOME,
    "Documentation": f"{HOME}/blob/main/docs/index.md",
    "Changes": f"{HOME}/blob/main/CHANGELOG.md",
    "Issues": f"{HOME}/issues",
}


class BuildKernel(build_ext):
    """Builds the library of compiled code with ``build_kernel.py``. Without a C compiler the package works too, with
    numba or slowly: then a warning is all that comes of it."""

    built = False

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], FILE)

    def build_extension(self, ext: Extension) -> None:
        if CHOICE == "none":
            return
        # In a process of its own: the settings of numba are those of the process that imports it first.
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        command = [sys.executable, str(Path(__file__).with_name("build_kernel.py")), str(target)]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if CHOICE == "required":
                raise
            self.warn(f"the kernel was not compiled, and numba is needed for speed: {error}")
            return
        BuildKernel.built = True

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class Wheel(bdist_wheel):
    """The library knows nothing of Python: one wheel for all versions of it."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2].replace(f"linux_{os.uname().machine}", f"linux_{MACHINE}")
        platform = platform.replace("linux_", "manylinux_2_17_", 1)  # it calls nothing but memcpy
        return ("py3", "none", platform if BuildKernel.built else "any")


setup(
    ext_modules=[Extension("tailrace.core.kernel.libkernel", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": Wheel},
    project_urls=URLS if HOME else {},
)
