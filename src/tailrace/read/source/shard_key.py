"""The value of a shard key in a document, as the chunks in ``config.chunks`` are bounded by it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any, Final

from bson.decimal128 import Decimal128

from tailrace.core import raw_bson
from tailrace.core.expression.values.compare import RANK

_INT64_MAX: Final = (1 << 63) - 1
_DOUBLE = struct.Struct("<d")


def shard_key(document: bytes, pattern: Mapping[str, Any], *, whole: bool) -> bytes | None:
    """The fields of ``pattern`` (``key`` of ``config.collections``) in ``document``, under their dotted names and with
    the hashes of those that are hashed.

    A field that is missing counts as null; with ``whole``, ``None`` is given then.
    """
    parts = []
    for name, kind in pattern.items():
        found = _find(document, name.encode())
        if found is None:
            if whole:
                return None
            found = raw_bson.NULL, b""
        type_, value = found
        if kind == "hashed":
            type_, value = raw_bson.INT64, raw_bson.encode_int64(hashed(type_, value))
        parts.append(raw_bson.encode_element(type_, name.encode(), value))
    return raw_bson.encode_document(*parts)


def _find(document: bytes, name: bytes) -> tuple[int, bytes] | None:
    """The value at a dotted name; a document key has it under the whole name."""
    element = raw_bson.find(document, name)
    if element is not None:
        return element.type, raw_bson.value(document, element)
    first, dot, rest = name.partition(b".")
    outer = raw_bson.find(document, first) if dot else None
    if outer is None or outer.type != raw_bson.OBJECT:
        return None
    return _find(raw_bson.value(document, outer), rest)


def hashed(type_: int, value: bytes) -> int:
    """The 64-bit hash of a BSON value in a hashed index, seed 0. Equal numbers of every type have the same one."""
    md5 = hashlib.md5(b"".join([bytes(4), *_hashed_parts(type_, value)]), usedforsecurity=False)
    return int.from_bytes(md5.digest()[:8], "little", signed=True)


def _hashed_parts(type_: int, value: bytes, name: bytes = b"") -> Iterator[bytes]:
    yield raw_bson.encode_int32(RANK[type_])
    yield name
    if type_ in (raw_bson.DOUBLE, raw_bson.INT32, raw_bson.INT64, raw_bson.DECIMAL128):
        yield raw_bson.encode_int64(_whole_number(type_, value))
    elif type_ in (raw_bson.OBJECT, raw_bson.ARRAY):
        for element in raw_bson.elements(value):
            yield from _hashed_parts(element.type, raw_bson.value(value, element), element.name + b"\0")
        yield raw_bson.encode_int32(0)  # the end of a document has a type too
    else:
        yield value


def _whole_number(type_: int, value: bytes) -> int:
    if type_ in (raw_bson.INT32, raw_bson.INT64):
        return int.from_bytes(value, "little", signed=True)
    is_double = type_ == raw_bson.DOUBLE
    number = Decimal(_DOUBLE.unpack(value)[0]) if is_double else Decimal128.from_bid(value).to_decimal()
    if number.is_nan():
        return 0
    if abs(number) > _INT64_MAX:
        return _INT64_MAX if number > 0 else -_INT64_MAX - 1
    # A double loses its fraction, a decimal is rounded (6.0.27).
    return int(number if is_double else number.to_integral_value(ROUND_HALF_EVEN))
