"""The key by which a document is known, whatever the type of a number in it."""

from __future__ import annotations

from tailrace.core import raw_bson
from tailrace.core.event import keystring, keystring_number


def sortable_key(type_: int, value: bytes) -> bytes:
    """A value of ``_id`` as bytes that sort as the server sorts it: the server's own form of index keys. Equal numbers
    of different types have the same bytes."""
    if type_ == raw_bson.OBJECT_ID and len(value) == 12:
        return b"\x64" + value
    if (type_ == raw_bson.INT32 and len(value) == 4) or (type_ == raw_bson.INT64 and len(value) == 8):
        return keystring_number.encode_int(int.from_bytes(value, "little", signed=True))
    return keystring.encode(type_, value)[0]
