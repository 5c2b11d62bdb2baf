"""The compiled code that came with the installation: one shared library, made from this package when it was built.

Every entry point takes int64 and gives int64, so the library needs no headers, knows nothing of Python and serves all
versions of it; ``ctypes`` calls it, without the interpreter's lock. ``build_kernel.py``, at the root of the repository,
makes it. Nothing is compiled on a machine that has it, and nothing is written.

The library says from which source it was made. Where that has changed, as while somebody works on it, the library is
left alone, and numba compiles what is needed (``compiled``).
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import zlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

#: The library's name, next to this module, and its symbol that says what it holds: a JSON object with ``source``, the
#: checksum of the whole source, and ``entry_points``: of each, its source's checksum and how many arguments it takes.
FILE: Final = "libkernel.so.1"
MANIFEST: Final = "tailrace_manifest"
#: What an entry point gives whose Python would have raised an error: no address, length or count is that.
FAILED: Final = -(1 << 63)

_SEAL: Final = struct.Struct("<I8s")
_MARK: Final = b"tailrace"
#: Patterns that are compiled only when they are needed: a process that loads a current library needs none.
_ENTRY_POINT: Final = rb"(?m)^ *@entry_point\("
#: Modules on which no machine code depends.
_NO_MACHINE_CODE: Final = ("compiled", "native")
_PACKAGE: Final = "tailrace.core.kernel"
_DIRECTORY: Final = __file__.removesuffix("native.py")
#: ``from tailrace.core.kernel.scan import ...`` and ``from tailrace.core.kernel import delta, fragments``.
_IMPORT: Final = r"(?m)^from tailrace\.core\.kernel(?:\.(\w+)| import ([\w, ]+))"


def checksum_of(module: str) -> int:
    """A checksum over the source of a kernel module, of every kernel module that it imports, directly or not, and of
    how numba is asked."""
    sources = dict.fromkeys(_NO_MACHINE_CODE, b"")
    waiting = [module.rpartition(".")[2], "jit"]
    while waiting:
        name = waiting.pop()
        source = None if name in sources else _source(name)
        if source is None:
            continue
        sources[name] = source
        for one, several in re.findall(_IMPORT, source.decode()):
            waiting += [one] if one else re.findall(r"\w+", several)
    checksum = 0
    for name in sorted(sources):
        checksum = zlib.crc32(sources[name], checksum)
    return checksum


def checksum_of_all() -> int:
    """A checksum over the source of all modules on which machine code may depend. It costs a tenth of asking for each
    entry point's, and every process that loads the library asks."""
    checksum = 0
    for name in sorted(_modules().difference(_NO_MACHINE_CODE)):
        checksum = zlib.crc32(_source(name) or b"", zlib.crc32(name.encode(), checksum))
    return checksum


def _modules_with_entry_points() -> set[str]:
    return {name for name in _modules() if re.search(_ENTRY_POINT, _source(name) or b"")}


def _modules() -> set[str]:
    return {path.name.removesuffix(".py") for path in _folder().iterdir() if path.name.endswith(".py")}


@cache
def _source(name: str) -> bytes | None:
    # Every process that loads the library reads all sources. Going by way of ``Traversable`` would cost 3 ms.
    try:
        with open(f"{_DIRECTORY}{name}.py", "rb", buffering=0) as file:
            return file.read()
    except OSError:  # there is none, or the package is in a zip file
        path = _folder() / f"{name}.py"
        return path.read_bytes() if path.is_file() else None


@cache
def _folder() -> Traversable:
    return files(_PACKAGE)


def symbol_of(module: str, function: str) -> str:
    """The name of an entry point in the library."""
    return f"tailrace_{module.rpartition('.')[2]}_{function}"


def sealed(library: bytes) -> bytes:
    """A library's file: the library, and a checksum of it at the end, where no loader looks. The system ends a process
    that loads a library whose file was cut short."""
    return library + _SEAL.pack(zlib.crc32(library), _MARK)


class CompiledLibrary:
    """A shared library of entry points, by its path. Raises OSError where it cannot be loaded."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            content = file.read()
        if sealed(content[: -_SEAL.size]) != content:
            raise OSError(f"{path} is damaged, or is not a library of compiled code")
        self._loaded = ctypes.CDLL(path)
        manifest = ctypes.cast(getattr(self._loaded, MANIFEST), ctypes.c_char_p).value or b"{}"
        found = json.loads(manifest)
        self._source: int | None = found.get("source")
        self._entry_points: dict[str, dict[str, int]] = found.get("entry_points", {})

    @property
    def is_current(self) -> bool:
        """Whether it was made from the source that is here, and has the entry points of each module that has some."""
        if self._source == checksum_of_all():
            return True
        # While somebody works on a module that no entry point depends on, the library stays of use.
        made = {name.partition(":")[0]: one["checksum"] for name, one in self._entry_points.items()}
        return made.keys() == _modules_with_entry_points() and all(checksum_of(name) == made[name] for name in made)

    def entry_point(self, module: str, function: str) -> Callable[..., int]:
        """What the library has for an entry point: a function of int64 that gives int64."""
        arguments = self._entry_points[f"{module.rpartition('.')[2]}:{function}"]["arguments"]
        compiled = getattr(self._loaded, symbol_of(module, function))
        compiled.argtypes = [ctypes.c_int64] * arguments
        compiled.restype = ctypes.c_int64
        compiled.errcheck = _checked
        found: Callable[..., int] = compiled
        return found


def _checked(result: int, function: Any, arguments: Any) -> int:
    if result == FAILED:
        raise ArithmeticError(f"{function.__name__} failed in compiled code")
    return result


class _Choice:
    """Which library this process uses: the one next to this module, unless another one or none was named."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.none = False


_choice: Final = _Choice()


def use(path: str | None) -> None:
    """From now on use the library at ``path``, or none (``None``): for a package inside a zip file, from which no
    library can be loaded, and for tests. Must be called before any entry point is imported."""
    _choice.path, _choice.none = path, path is None
    library.cache_clear()


@cache
def library() -> CompiledLibrary | None:
    """The library, if there is one that this machine can load and that is of this source."""
    if _choice.none:
        return None
    try:
        found = CompiledLibrary(_choice.path or str(_folder() / FILE))
    except (OSError, AttributeError, ValueError):
        return None  # there is none, or it is another machine's
    return found if found.is_current else None
