"""The commands that install Tailrace, as the README and docs/how-to/install.md print them, in fresh environments.

Without the network: the packages that Tailrace needs are lent by the environment of the tests, and so is the one that
builds it. What is shown is that the commands work, that the wheel holds everything, and that the extras exist.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tailrace.core.kernel import native
from tests.docs.snippets import ROOT, commands, snippets

#: What the kernel is compiled with, where no library of this source is at hand.
_COMPILES = ("numba*", "llvmlite*", "numpy*", "pcre2*", "_pcre2*", "bson", "pymongo*", "dns*")
PACKAGES = Path(sysconfig.get_paths()["purelib"])


def printed(page: str) -> str:
    """The page's commands that install, as one script."""
    lines = []
    for snippet in snippets(ROOT / page):
        if "pip " in snippet.text and snippet.language in {"console", "sh"}:
            found = [command.text for command in commands(snippet)] or [snippet.text.strip()]
            lines += found
    return "\n".join(lines)


def lent(folder: Path) -> Path:
    """A folder with what builds a wheel, and nothing else."""
    folder.mkdir()
    for pattern in ("setuptools*", "_distutils_hack", "wheel*", *_COMPILES):
        for found in PACKAGES.glob(pattern):
            (folder / found.name).symlink_to(found)
    return folder


@pytest.mark.slow  # what is printed: test_pages.py; what is packed: test_release.py, and make dist
@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/how-to/install.md", marks=pytest.mark.slow)])
def test_the_printed_commands_install_it(page: str, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in subprocess.check_output(
        ["git", "ls-files", "-z", "src", "*.toml", "README.md", "LICENSE", "*.in", "setup.py", "build_kernel.py"],
        cwd=ROOT,
        text=True,
    ).split("\0"):
        if name:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    if page == "README.md":  # the other one compiles it, for a minute
        shutil.copy2(native.library().path, clone / "src/tailrace/core/kernel")
    script = printed(page)
    assert "pip install ." in script
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("tailrace --version", ":")],
        cwd=clone,
        env={**os.environ, **offline, "PYTHONPATH": str(lent(tmp_path / "lent"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = (clone / "env" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(f"{PACKAGES}\n")
    run = subprocess.run(
        [
            clone / "env" / "bin" / "python",
            "-c",
            "from tailrace.core import kernel; print('compiled:', kernel.comes_compiled());"
            "import tailrace.cli.main as m; print(m.__file__); m.main(['--version'])",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert str(packages / "tailrace") in run.stdout, run.stderr
    assert "compiled: True" in run.stdout
    assert "tailrace 0.1.0" in run.stdout


def test_the_page_names_every_extra_that_users_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    rows = dict(re.findall(r"(?m)^\| `?([\w-]+)`? \| ([^|(]*)", (ROOT / "docs" / "how-to" / "install.md").read_text()))
    assert set(rows) - {"extra", "none"} == set(extras) - {"dev"}
    for name in ("none", "spark"):
        needed = project["dependencies"] if name == "none" else extras[name]
        assert set(rows[name].strip().split(", ")) == {re.split(r"[<>=;]", each)[0] for each in needed}
