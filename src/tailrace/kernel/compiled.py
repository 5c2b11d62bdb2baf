"""How the kernel's functions are compiled, and where numba is met: nowhere else is it imported by name.

Only the entry points are cached on disk. Their inner functions are compiled into them, so one file holds each entry
point whole and a warm start compiles nothing. numba checks the cache against the entry point's own source file alone;
``fingerprint`` therefore goes into every entry point as a constant, and a change in any module of this package that the
entry point's module imports compiles it anew.

The directory is numba's affair: ``NUMBA_CACHE_DIR`` where the process that starts us sets it (this package does no I/O
of its own), otherwise beside the source or the user's cache directory. Where none can be written, and where the source
lies in a zip file, each process compiles for itself.
"""

from __future__ import annotations

import gc
import re
import zlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

#: ``from tailrace.kernel.scan import ...`` and ``from tailrace.kernel import delta, fragments``.
_IMPORT = re.compile(r"^from tailrace\.kernel(?:\.(\w+)| import ([\w, ]+))", re.MULTILINE)


def fingerprint(module: str) -> int:
    """A checksum of a module of this package and of all that it imports from it, so that no cached code outlives a
    change in what it was built from.

    Never 0: entry points compare it with 0, only to make it a part of themselves.
    """
    package = files("tailrace.kernel")
    sources: dict[str, bytes] = {}
    waiting = [module.rpartition(".")[2]]
    while waiting:
        name = waiting.pop()
        path = package / f"{name}.py"
        if name in sources or not path.is_file():
            continue
        sources[name] = path.read_bytes()
        for one, several in _IMPORT.findall(sources[name].decode()):
            waiting += [one] if one else re.findall(r"\w+", several)
    checksum = zlib.crc32(numba.__version__.encode())
    for name in sorted(sources):
        checksum = zlib.crc32(sources[name], checksum)
    return checksum or 1


#: Python never calls these, so the wrappers that it would need are not compiled (a quarter of the time to compile).
_INNER: dict[str, Any] = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _once() -> dict[str, Any]:
    """numba's option to optimise an inner function only where an entry point takes it in.

    By itself numba optimises every function together with all that it calls, and makes machine code of it, once more on
    each level. That is a third of the time to compile, half of it where calls go ten levels deep. The hooks are numba's
    own affair: where a version does not have them, everything is compiled as it would be.
    """
    try:
        from numba.core.codegen import JITCodeLibrary  # noqa: PLC0415
        from numba.core.compiler import Compiler  # noqa: PLC0415
    except ImportError:
        return {}
    if not all(hasattr(JITCodeLibrary, name) for name in _HOOKS):
        return {}

    class Codegen:
        """Without the slots for Python objects, which compiled code of integers has no use for."""

        def __init__(self, codegen: Any) -> None:
            self._codegen = codegen

        def set_env(self, name: str, env: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._codegen, name)

    class Library(JITCodeLibrary):
        @property
        def codegen(self) -> Any:
            return Codegen(self._codegen)

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self: Any) -> None:
            self._finalize_dynamic_globals()
            self._finalized = True

        def get_pointer_to_function(self: Any, name: str) -> int:
            self._ensure_finalized()
            return 0  # what numba gives for a function without a wrapper

    class Pipeline(Compiler):
        def define_pipelines(self) -> Any:
            create: Any = Library
            self.state.library = create(self.state.targetctx.codegen(), "inner")
            self.state.library.enable_object_caching()
            return cast(Any, super()).define_pipelines()

    return {"pipeline_class": Pipeline}


_HOOKS = (
    "codegen",
    "get_pointer_to_function",
    "_optimize_final_module",
    "_finalize_final_module",
    "_finalize_dynamic_globals",
    "_ensure_finalized",
)
_INNER |= _once()


def inner(function: F) -> F:
    """A function that only compiled code calls; compiled into its callers when they are.

    Compiled code knows no keyword-only parameters, so a few of these take more than five.
    """
    return cast(F, numba.njit(**_INNER)(function))


def entry_point(signature: str) -> Callable[[F], F]:
    """A function that Python calls, with one signature, compiled when its module is imported."""

    def compile_(function: F) -> F:
        try:
            return cast(F, numba.njit(signature, nogil=True, cache=True)(function))
        except RuntimeError as error:
            # numba's words when neither the source's directory nor the user's cache can be written.
            if "no locator available" not in str(error):
                raise
        return cast(F, numba.njit(signature, nogil=True)(function))

    def without_collecting(function: F) -> F:
        """numba keeps most of what it makes for a function until the end, and the collector goes through it again and
        again: a tenth of the time."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            return compile_(function)
        finally:
            if was_on:
                gc.enable()

    return without_collecting
