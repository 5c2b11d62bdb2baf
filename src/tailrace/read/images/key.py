"""The key of a document in the state: its collection's UUID, and its ``_id`` in one form for all equal values."""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from bson.decimal128 import Decimal128

from tailrace.core import raw_bson
from tailrace.core.event.keystring import encode
from tailrace.core.raw_bson import DECIMAL128, DOUBLE, INT32, INT64, OBJECT_ID, STRING
from tailrace.errors import OplogFormatError

#: LMDB's keys have up to 511 bytes. Longer ones are kept as their hash.
_KEY_MAX: Final = 480
_NUMBER: Final = b"\x29"
_INT64 = struct.Struct(">q")
_DOUBLE = struct.Struct("<d")


def state_key(uuid: bytes, document: bytes) -> bytes:
    """The key of the document whose ``_id`` stands in ``document``: a whole one, or a document key.

    Args:
        uuid: 16 bytes

    Values of ``_id`` that the server considers equal (1 and 1.0) give the same bytes. Collations are ignored: the
    server's index on ``_id`` compares by them, and the oplog names each document by its own value.
    """
    identifier = raw_bson.find(document, b"_id")
    if identifier is None:
        raise OplogFormatError("a document has no _id, so it can have no image")
    type_ = identifier.type
    value = document[identifier.value_start : identifier.end]
    if type_ == OBJECT_ID:
        return uuid + b"\x64" + value
    key = uuid + (b"\x3c" + value[4:-1] if type_ == STRING else _canonical(type_, value))
    if len(key) <= _KEY_MAX:
        return key
    return uuid + b"\xff" + hashlib.blake2b(key, digest_size=32).digest()


def is_in_share(checksum: int, share: tuple[int, int]) -> bool:
    """Whether a document belongs to worker ``share[0]`` of ``share[1]``. ``checksum``: CRC-32 of its key, whose lower
    bits choose the bucket within the worker's state."""
    return (checksum >> 16) % share[1] == share[0]


def _canonical(type_: int, value: bytes) -> bytes:
    number = _whole_number(type_, value)
    if number is not None:
        return _NUMBER + _INT64.pack(number)
    if type_ == raw_bson.SYMBOL:
        return b"\x3c" + value[4:-1]
    return b"\x01" + encode(type_, value)[0]


def _whole_number(type_: int, value: bytes) -> int | None:
    """A number of any type as int64, if it is a whole number in that range."""
    if type_ in (INT32, INT64):
        return int.from_bytes(value, "little", signed=True)
    if type_ == DOUBLE:
        double = _DOUBLE.unpack(value)[0]
        return int(double) if double.is_integer() and -(2.0**63) <= double < 2.0**63 else None
    if type_ == DECIMAL128:
        decimal = Decimal128.from_bid(value).to_decimal()
        if decimal.is_finite() and -(2**63) <= decimal < 2**63 and decimal == int(decimal):
            return int(decimal)
    return None
