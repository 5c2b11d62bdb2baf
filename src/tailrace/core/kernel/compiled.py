"""Entry points and inner functions: what a function of the kernel is marked as, whatever compiles it.

``entry_point`` marks the functions that Python calls; ``inner`` marks those that only compiled code calls. They are in
the library that came with the installation (``native``). Where there is none, or it was made from another source,
numba compiles them (``jit``): in an installation from source without a C compiler, and for those who work on the
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from tailrace.core.kernel.native import CompiledLibrary, library

F = TypeVar("F", bound=Callable[..., Any])

#: The library of this process; ``None``: numba compiles.
LIBRARY: Final[CompiledLibrary | None] = library()

if LIBRARY is None:
    from tailrace.core.kernel import jit


def fingerprint(module: str) -> int:
    """A checksum over the source of a kernel module and of every kernel module that it imports, directly or not.

    Never 0. An entry point compares it with 0, so that it is a part of what numba compiles, and caches.
    """
    return jit.fingerprint(module) if LIBRARY is None else 1


def inner(function: F) -> F:
    """A function that only compiled code calls. It is compiled together with each entry point that uses it.

    Compiled code knows no keyword-only parameters, so a few of these take more than five parameters.
    """
    return jit.inner(function) if LIBRARY is None else function


def entry_point(signature: str) -> Callable[[F], F]:
    """A function that Python calls, with one signature, of int64 alone: ``"int64(int64, int64)"``. It comes from the
    library; otherwise numba compiles it, or loads it from its cache, when its module is imported."""
    if LIBRARY is None:
        return jit.entry_point(signature)
    compiled = LIBRARY

    def find(function: F) -> F:
        return cast(F, compiled.entry_point(function.__module__, function.__name__))

    return find
