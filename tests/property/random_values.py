"""Random BSON values of every type as raw bytes, with more weight on the places where numbers change their encoding."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

from tailrace.core import raw_bson as rb

Value = tuple[int, bytes]

_EDGES = (0, -1022, -1023, -1074, -255, -256, -254, 53, 54, 55, 56, 62, 63, 64, 31, 32, 1023, 1, -1)


def double(rng: random.Random) -> Value:
    kind = rng.randrange(6)
    if kind == 0:
        return rb.DOUBLE, rng.randbytes(8)
    if kind == 1:
        number = float(rng.randint(-(2 ** rng.randint(1, 63)), 2 ** rng.randint(1, 63)))
    elif kind == 2:
        number = rng.uniform(-1, 1) * 10.0 ** rng.randint(-320, 308)
    elif kind == 3:
        number = round(rng.uniform(-1000, 1000), rng.randint(0, 6))
    elif kind == 4:
        number = math.ldexp(1.0, rng.choice(_EDGES)) * rng.choice((1, -1))
        for _ in range(rng.randrange(3)):
            number = math.nextafter(number, rng.choice((0.0, math.inf)))
    else:
        number = rng.choice((0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308))
    return rb.DOUBLE, struct.pack("<d", number)


def integer(rng: random.Random) -> int:
    bits = rng.randint(1, 63)
    number = rng.randrange(2**bits) if rng.random() < 0.7 else min(2**63 - 1, 2**bits - rng.randint(0, 2))
    return -number if rng.random() < 0.5 else number


def int32(rng: random.Random) -> Value:
    number = integer(rng)
    return rb.INT32, struct.pack("<i", (number + 2**31) % 2**32 - 2**31)


def int64(rng: random.Random) -> Value:
    return rb.INT64, struct.pack("<q", rng.choice((-(2**63), integer(rng), integer(rng), integer(rng))))


def pack_decimal(negative: bool, coefficient: int, exponent: int) -> bytes:
    """A decimal128 in its binary integer form."""
    return (int(negative) << 127 | (exponent + 6176) << 113 | coefficient).to_bytes(16, "little")


def decimal(rng: random.Random) -> Value:
    negative = rng.random() < 0.5
    kind = rng.randrange(9)
    if kind == 0:
        special = rng.choice((0x78, 0x7C, 0x7E, 0xF8, 0xFC))
        return rb.DECIMAL128, (special << 120 | rng.choice((0, 0, 7))).to_bytes(16, "little")
    if kind == 1:
        return rb.DECIMAL128, pack_decimal(negative, 0, rng.randint(-6176, 6111))
    digits = rng.randint(1, 34)
    coefficient = rng.randrange(1, 10**digits)
    if kind == 2:
        exponent = rng.randint(-6176, 6111)
    elif kind == 3:
        exponent = rng.randint(-40, 20)
    elif kind == 4:
        coefficient, exponent = rng.randrange(1, 1000), rng.randint(-6, 3)
    elif kind == 5:
        exponent = rng.randint(-380, -280) - digits
    elif kind == 6:
        exponent = rng.choice((-77, -308, -324, 308, 16, 19)) - digits + rng.randint(-2, 2)
    else:
        coefficient, exponent = _near_a_double(rng)
    if rng.random() < 0.1:
        zeros = rng.randint(0, 34 - len(str(coefficient)))
        coefficient, exponent = coefficient * 10**zeros, exponent - zeros
    return rb.DECIMAL128, pack_decimal(negative, coefficient, max(-6176, min(6111, exponent)))


def _near_a_double(rng: random.Random) -> tuple[int, int]:
    """A decimal equal to a double truncated to some digits, or a few units away from it."""
    number = abs(struct.unpack("<d", double(rng)[1])[0])
    if not math.isfinite(number) or number == 0:
        number = 0.1
    digits = rng.choice((15, 15, 16, 17, 18, 34, 33))
    exponent = math.floor(math.log10(number)) - digits + 1
    ratio = Fraction(number)
    scaled = ratio * 10**-exponent if exponent <= 0 else ratio / 10**exponent
    coefficient = (math.floor if rng.random() < 0.5 else math.ceil)(scaled) + rng.choice((0, 0, 1, -1, 2))
    return max(1, min(10**34 - 1, coefficient)), exponent


def text(rng: random.Random) -> str:
    alphabet = "ab\0\x01é\u20ac\U0001f600 zÿ" if rng.random() < 0.5 else "abcdefgh"
    return "".join(rng.choice(alphabet) for _ in range(rng.choice((0, 1, 2, 5, 12, 300 if rng.random() < 0.1 else 3))))


def _name(rng: random.Random) -> bytes:
    return text(rng).replace("\0", "").encode()


def binary(rng: random.Random) -> Value:
    data = rng.randbytes(rng.choice((0, 1, 3, 16, 254, 255, 256, 300)) if rng.random() < 0.4 else rng.randrange(20))
    subtype = rng.choice((0, 0, 1, 2, 3, 4, 5, 6, 128, 255))
    if subtype == 2:
        data = struct.pack("<i", len(data)) + data
    return rb.BINARY, struct.pack("<iB", len(data), subtype) + data


def string(rng: random.Random) -> Value:
    return rng.choice((rb.STRING, rb.STRING, rb.SYMBOL, rb.CODE)), rb.encode_string(text(rng))


def regex(rng: random.Random) -> Value:
    return rb.REGEX, _name(rng) + b"\0" + rng.choice((b"", b"i", b"im", b"imsx")) + b"\0"


def db_pointer(rng: random.Random) -> Value:
    return rb.DB_POINTER, rb.encode_string(_name(rng)) + rng.randbytes(12)


def document(rng: random.Random, depth: int = 0) -> bytes:
    parts = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        type_, data = value(rng, depth + 1)
        parts.append(rb.encode_element(type_, _name(rng), data))
    return rb.encode_document(*parts)


def array(rng: random.Random, depth: int = 0) -> Value:
    parts = []
    for index in range(rng.choice((0, 1, 1, 2, 3, 12))):
        type_, data = value(rng, depth + 1)
        parts.append(rb.encode_element(type_, b"%d" % index, data))
    return rb.ARRAY, rb.encode_document(*parts)


def code_with_scope(rng: random.Random, depth: int = 0) -> Value:
    body = rb.encode_string(text(rng)) + document(rng, depth + 1)
    return rb.CODE_WITH_SCOPE, rb.encode_int32(len(body) + 4) + body


_SIMPLE: tuple[Callable[[random.Random], Value], ...] = (
    lambda rng: (rb.OBJECT_ID, rng.randbytes(12)),
    lambda rng: (rb.BOOL, bytes([rng.randrange(2)])),
    lambda rng: (rb.DATE, struct.pack("<q", integer(rng))),
    lambda rng: (rb.TIMESTAMP, rng.randbytes(8)),
    lambda _: (rb.NULL, b""),
    lambda _: (rb.MIN_KEY, b""),
    lambda _: (rb.MAX_KEY, b""),
)


def value(rng: random.Random, depth: int = 0) -> Value:
    """One value of any type. At depth 0 it can be an ``_id``: no array, regex or undefined."""
    kind = rng.randrange(20)
    if kind < 4:
        return decimal(rng)
    if kind < 7:
        return double(rng)
    if kind < 10:
        return rng.choice((int32, int64))(rng)
    if kind < 12:
        return string(rng)
    if kind < 14:
        return rng.choice((binary, db_pointer))(rng)
    if kind < 16 or depth > 3:
        return rng.choice(_SIMPLE)(rng)
    if kind == 16:
        return code_with_scope(rng, depth)
    if kind == 17 and depth > 0:
        return rng.choice((array(rng, depth), regex(rng), (rb.UNDEFINED, b"")))
    return rb.OBJECT, document(rng, depth)
