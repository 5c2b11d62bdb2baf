"""Compiles the kernel's functions with numba and caches the result. No other module asks numba to compile.

Inner functions are compiled into the entry points that use them, so only entry points are cached: one file holds an
entry point whole, and a process that finds it compiles nothing.

numba takes a cached entry point for current as long as the source file of that entry point has not changed. It does not
look at the modules of the inner functions. So each entry point contains ``fingerprint`` of its module as a constant: a
change in any kernel module that it imports changes the constant, and the entry point is compiled again.

Where the cache lies is numba's choice: in ``NUMBA_CACHE_DIR`` if the process that starts us sets it (this package does
no I/O of its own), else beside the source, else in the user's cache directory. Where no directory can be written, each
process compiles for itself. A cache that is damaged counts as empty.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core.errors import NumbaError

from tailrace.core.kernel.native import checksum_of

F = TypeVar("F", bound=Callable[..., Any])


def fingerprint(module: str) -> int:
    """The checksum of a kernel module's source, of those that it imports, and of numba's version; never 0."""
    return zlib.crc32(numba.__version__.encode(), checksum_of(module)) or 1


#: Python never calls inner functions, so the wrappers for such calls are left out: a quarter of the time to compile.
_INNER: dict[str, Any] = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _once() -> dict[str, Any]:
    """Options by which numba optimises an inner function once, as a part of its entry point.

    Without them numba optimises each function together with everything that it calls, and makes machine code of the
    result: once for every level of calls. This takes a third of the time to compile, and half of it where calls are ten
    levels deep. The hooks are private to numba. In a version that lacks one of them these options are empty, and numba
    compiles in its usual way.
    """
    try:
        from numba.core.codegen import JITCodeLibrary  # noqa: PLC0415
        from numba.core.compiler import Compiler  # noqa: PLC0415
    except ImportError:
        return {}
    if not all(hasattr(JITCodeLibrary, name) for name in _HOOKS):
        return {}

    class Codegen:
        """A code generator that makes no slots for Python objects: functions of integers need none."""

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

    class InnerPipeline(Compiler):
        def define_pipelines(self) -> Any:
            create: Any = Library
            self.state.library = create(self.state.targetctx.codegen(), "inner")
            self.state.library.enable_object_caching()
            return cast(Any, super()).define_pipelines()

    return {"pipeline_class": InnerPipeline}


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
    """A function that only compiled code calls. It is compiled together with each entry point that uses it.

    Compiled code knows no keyword-only parameters, so a few of these take more than five parameters.
    """
    return cast(F, numba.njit(**_INNER)(function))


def _empty_cache(function: Callable[..., Any]) -> None:
    """Write an empty index for the function, so that no process reads the damaged one again. Raises where there is no
    cache, or where it cannot be written."""
    dispatcher: Any = numba.njit(nogil=True, cache=True)(function)
    dispatcher._cache.flush()


def entry_point(signature: str) -> Callable[[F], F]:
    """A function that Python calls, with one signature. It is compiled, or loaded from the cache, when its module is
    imported."""

    uncached = numba.njit(signature, nogil=True)
    cached = numba.njit(signature, nogil=True, cache=True)

    def compile_(function: F) -> F:
        try:
            return cast(F, cached(function))
        except NumbaError:
            raise  # the function cannot be compiled
        except Exception:  # noqa: BLE001  no cache can be written, or it cannot be read: a damaged pickle raises anything
            pass
        try:
            _empty_cache(function)
            return cast(F, cached(function))
        except Exception:  # noqa: BLE001
            return cast(F, uncached(function))

    def without_collecting(function: F) -> F:
        """Compile with the garbage collector off. numba keeps most of its objects until a function is done, and
        searching them again and again takes a tenth of the time to compile."""
        was_on = gc.isenabled()
        gc.disable()
        try:
            return compile_(function)
        finally:
            if was_on:
                gc.enable()

    return without_collecting
