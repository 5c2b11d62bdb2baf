"""Loads, stores and copies at plain addresses: what the kernel is written with.

An address is an int64, so every function of the kernel takes and gives int64 only: one specialisation each, quick to
compile, and no array headers are passed about. Nothing here checks bounds. A caller of ``load`` has compared the
address with the end of what it reads; a caller of ``store`` or ``copy`` has made sure of the room. The Python side
keeps the arrays alive while compiled code holds their addresses.

Python has no such operations. ``jit_memory`` says in LLVM what they are, for compilation; if the compiled code came
with the installation, nothing calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from tailrace.core.kernel.compiled import LIBRARY

if TYPE_CHECKING or LIBRARY is None:
    from tailrace.core.kernel.jit_memory import (
        as_bits,
        as_double,
        copy,
        leading_zeros,
        load8,
        load16,
        load32,
        load64,
        load64_big_endian,
        move,
        multiply_high,
        store8,
        store16,
        store32,
        store32_big_endian,
        store64,
        store64_big_endian,
        trailing_zeros,
    )
else:

    def _compiled_only(*_: Any) -> NoReturn:
        raise NotImplementedError("only compiled code reads and writes memory")

    as_bits = as_double = leading_zeros = trailing_zeros = multiply_high = _compiled_only
    load8 = load16 = load32 = load64 = load64_big_endian = _compiled_only
    store8 = store16 = store32 = store64 = store32_big_endian = store64_big_endian = _compiled_only
    copy = move = _compiled_only

__all__: Final = [
    "as_bits",
    "as_double",
    "copy",
    "leading_zeros",
    "load8",
    "load16",
    "load32",
    "load64",
    "load64_big_endian",
    "move",
    "multiply_high",
    "store8",
    "store16",
    "store32",
    "store32_big_endian",
    "store64",
    "store64_big_endian",
    "trailing_zeros",
]
