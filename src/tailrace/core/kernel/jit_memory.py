"""What ``memory`` has, in LLVM: the one module that speaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def _pointer(builder: Any, address: Any, width: int) -> Any:
    return builder.inttoptr(address, ir.IntType(width).as_pointer())


def _make_load(width: int, *, big_endian: bool = False) -> Callable[[int], int]:
    """Reads an unsigned integer of ``width`` bits at any address, aligned or not (64 bits come as they are)."""

    def load(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], width), align=1)
            value = builder.bswap(value) if big_endian else value
            return value if width == 64 else builder.zext(value, _I64)

        return types.int64(types.int64), generate

    return cast(Callable[[int], int], intrinsic(load))


def _make_store(width: int, *, big_endian: bool = False) -> Callable[[int, int], None]:
    """Writes the low ``width`` bits of a value at any address."""

    def store(context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = args[1] if width == 64 else builder.trunc(args[1], ir.IntType(width))
            word = builder.bswap(word) if big_endian else word
            builder.store(word, _pointer(builder, args[0], width), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return cast(Callable[[int, int], None], intrinsic(store))


def _make_copy(name: str) -> Callable[[int, int, int], None]:
    """``copy(target, source, size)``; memmove also where the two overlap."""

    def copy(context: Any, target: Any, source: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to, of = _pointer(builder, args[0], 8), _pointer(builder, args[1], 8)
            call = cgutils.raw_memmove if name == "memmove" else cgutils.raw_memcpy
            call(builder, to, of, args[2], 1)  # type: ignore[no-untyped-call]
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return cast(Callable[[int, int, int], None], intrinsic(copy))


load8 = _make_load(8)
load16 = _make_load(16)
load32 = _make_load(32)
load64 = _make_load(64)
load64_big_endian = _make_load(64, big_endian=True)
store8 = _make_store(8)
store16 = _make_store(16)
store32 = _make_store(32)
store64 = _make_store(64)
store32_big_endian = _make_store(32, big_endian=True)
store64_big_endian = _make_store(64, big_endian=True)
copy = _make_copy("memcpy")
move = _make_copy("memmove")


def _trailing_zeros(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


def _leading_zeros(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


def _as_double(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


def _as_bits(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I64)

    return types.int64(types.float64), generate


def _multiply_high(context: Any, left: Any, right: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _I64)

    return types.int64(types.int64, types.int64), generate


#: The upper 64 bits of the product of two numbers without sign.
multiply_high = cast(Callable[[int, int], int], intrinsic(_multiply_high))
trailing_zeros = cast(Callable[[int], int], intrinsic(_trailing_zeros))
leading_zeros = cast(Callable[[int], int], intrinsic(_leading_zeros))
as_double = cast(Callable[[int], float], intrinsic(_as_double))
as_bits = cast(Callable[[float], int], intrinsic(_as_bits))
