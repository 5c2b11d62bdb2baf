"""Makes the library of compiled code (``tailrace.core.kernel.native``): numba's machine code behind a C interface.

    python build_kernel.py src/tailrace/core/kernel/libkernel.so.1    does nothing where it is of this source already

numba compiles each entry point for any processor of this architecture and gives LLVM's code of it, which calls nothing
but memcpy and memmove. A function around it has C's calling convention. LLVM makes an object file of the two, and the
C compiler links all of these. It takes half a minute, numba and a C compiler; who uses the library needs neither.
``TAILRACE_KERNEL_FOR=aarch64`` (or ``x86_64``) makes the library of another machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

SOURCE = Path(__file__).parent / "src"
#: What processors of the last fifteen years have, as numpy asks too. AVX2 brought nothing: the kernel reads bytes.
PROCESSORS = {"x86_64": "x86-64-v2", "aarch64": "generic"}
#: For which of these machines; another than this one needs its own C compiler, as ``gcc-aarch64-linux-gnu`` of Debian.
MACHINE = os.environ.get("TAILRACE_KERNEL_FOR") or os.uname().machine
IS_ANOTHER = os.uname().machine != MACHINE
#: LLVM's types of what entry points give, and how that becomes an i64.
RESULTS = {
    "int64": ("i64", "%value = load i64, ptr %result"),
    "boolean": ("i8", "%byte = load i8, ptr %result\n  %value = zext i8 %byte to i64"),
    "void": ("ptr", "%value = add i64 0, 0"),
}
WRAPPER = """
target triple = "{triple}"
target datalayout = "{layout}"
declare i32 @"{inside}"(ptr, ptr, {types})
define i64 @{symbol}({parameters}) {{
  %result = alloca {type}
  %error = alloca ptr
  %status = call i32 @"{inside}"(ptr %result, ptr %error, {parameters})
  %good = icmp eq i32 %status, 0
  br i1 %good, label %done, label %failed
done:
  {convert}
  ret i64 %value
failed:
  ret i64 {failure}
}}
"""


class EntryPoint(NamedTuple):
    """A function that numba has compiled: where it is, how many int64 it takes, what it gives."""

    module: str
    function: str
    arguments: int
    result: str
    compiled: Any


def build(target: Path) -> None:
    """Write the library to ``target``. Raises ImportError without numba, OSError or CalledProcessError without a C
    compiler."""
    with tempfile.TemporaryDirectory() as folder:
        objects = list(_objects(Path(folder), list(_compiled())))
        own = sysconfig.get_config_var("CC") or "cc"
        compiler = shlex.split(f"{MACHINE}-linux-gnu-gcc" if IS_ANOTHER else os.environ.get("CC") or own)[:1]
        made = Path(folder) / "library.so"
        flags = ["-shared", "-nostdlib", "-Wl,-s", "-Wl,-z,noexecstack", "-Wl,-z,relro", "-Wl,-z,now"]
        subprocess.run([*compiler, *flags, "-o", str(made), *objects], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_bytes(import_module("tailrace.core.kernel.native").sealed(made.read_bytes()))
        part.chmod(0o755)
        part.replace(target)  # a process that has loaded the one before keeps it


def is_current(target: Path) -> bool:
    """Whether the library at ``target`` was made from the source that is here."""
    sys.path.insert(0, str(SOURCE))
    native = import_module("tailrace.core.kernel.native")
    try:
        found: bool = native.CompiledLibrary(str(target)).is_current
    except (OSError, AttributeError, ValueError):
        return False
    return found


def _compiled() -> Iterator[EntryPoint]:
    """All entry points of the package, compiled."""
    os.environ |= {"NUMBA_CPU_NAME": PROCESSORS[os.uname().machine], "NUMBA_CPU_FEATURES": ""}
    import numba  # noqa: PLC0415  after the environment was set

    sys.path.insert(0, str(SOURCE))
    native = import_module("tailrace.core.kernel.native")
    native.use(None)
    kernel, compiled = import_module("tailrace.core.kernel"), import_module("tailrace.core.kernel.compiled")
    found: list[EntryPoint] = []

    def entry_point(signature: str) -> Callable[[Any], Any]:
        def compile_(function: Any) -> Any:
            made = numba.njit(signature, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
            result, arguments = re.fullmatch(r"(\w+)\((.*)\)", signature).groups()  # type: ignore[union-attr]
            count = arguments.count("int64")
            assert arguments == ", ".join(["int64"] * count), f"{function.__qualname__} takes more than int64"
            [how] = made.overloads.values()
            found.append(EntryPoint(function.__module__, function.__name__, count, result, how))
            return made

        return compile_

    compiled.entry_point = entry_point
    for module in iter_modules(kernel.__path__):
        import_module(f"{kernel.__name__}.{module.name}")
    return iter(found)


def _objects(folder: Path, points: list[EntryPoint]) -> Iterator[str]:
    """The object files: one for each entry point, and one with the manifest."""
    import llvmlite.binding as llvm  # noqa: PLC0415

    native = import_module("tailrace.core.kernel.native")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = f"{MACHINE}-unknown-linux-gnu" if IS_ANOTHER else llvm.get_default_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=PROCESSORS[MACHINE], features="", opt=3, reloc="pic", codemodel="default"
    )
    for point in points:
        path = folder / f"{len(list(folder.iterdir()))}.o"
        path.write_bytes(machine.emit_object(_with_wrapper(point, native, triple, str(machine.target_data))))
        yield str(path)
    entry_points = {
        f"{point.module.rpartition('.')[2]}:{point.function}": {
            "checksum": native.checksum_of(point.module),
            "arguments": point.arguments,
        }
        for point in points
    }
    manifest = {"source": native.checksum_of_all(), "entry_points": entry_points}
    text = json.dumps(manifest).encode() + b"\0"
    escaped = "".join(f"\\{byte:02x}" for byte in text)
    module = llvm.parse_assembly(f'@{native.MANIFEST} = constant [{len(text)} x i8] c"{escaped}"')
    module.triple, module.data_layout = triple, str(machine.target_data)
    path = folder / "manifest.o"
    path.write_bytes(machine.emit_object(module))
    yield str(path)


def _with_wrapper(point: EntryPoint, native: Any, triple: str, layout: str) -> Any:
    """LLVM's module of an entry point, in which only the function that C may call can be seen from outside.

    numba wrote it for this machine. Nothing in it is of one machine (int64 of 8 bytes, the lowest byte first, are the
    same on all of PROCESSORS), so it says that it is for the one that is wanted.
    """
    import llvmlite.binding as llvm  # noqa: PLC0415

    module = llvm.parse_assembly(point.compiled.library.get_llvm_str())
    module.triple, module.data_layout = triple, layout
    inside = point.compiled.fndesc.llvm_func_name
    kind, convert = RESULTS[point.result]
    wrapper = WRAPPER.format(
        triple=triple,
        layout=layout,
        inside=inside,
        types=", ".join(["i64"] * point.arguments),
        parameters=", ".join(f"i64 %a{number}" for number in range(point.arguments)),
        symbol=native.symbol_of(point.module, point.function),
        type=kind,
        convert=convert,
        failure=native.FAILED,
    )
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != inside:
            each.linkage = "internal"
    module.link_in(llvm.parse_assembly(wrapper))
    module.get_function(inside).linkage = "internal"
    module.verify()
    own = ("llvm.x86.", "llvm.aarch64.")  # what only one machine has
    outside = {
        each.name
        for each in module.functions
        if each.is_declaration and (each.name.startswith(own) or not each.name.startswith("llvm."))
    }
    assert not outside, f"{point.module}.{point.function} calls {', '.join(sorted(outside))}"
    return module


def main(target: Path) -> None:
    """Have the library at ``target``: left alone, copied from beside the source, or built."""
    beside = SOURCE / "tailrace" / "core" / "kernel" / "libkernel.so.1"
    if IS_ANOTHER:  # this machine cannot load it, so it cannot ask it either
        build(target)
    elif is_current(target):
        return
    elif is_current(beside):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(beside, target)
    else:
        build(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
