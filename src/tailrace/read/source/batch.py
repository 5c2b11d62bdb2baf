"""Runs of oplog entries as bytes: where the entries lie and when they happened, without decoding them."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.write_head import time_of_write
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import OplogFormatError

#: What one reply of the server holds at most, so nothing is cut by default.
BATCH_BYTES_MAX: Final = 48 << 20

#: For less the compiled code takes longer, for the fixed work of a call.
_COMPILED_BYTES_MIN: Final = 2_048

_LENGTH = struct.Struct("<i")


def entry_time(raw: bytes, start: int = 0) -> ClusterTime:
    """The ``ts`` of the oplog entry at ``start``. Raises OplogFormatError where it has none."""
    time = time_of_write(raw, start)
    if time is not None:
        return ClusterTime.from_bytes_le(time)
    element = raw_bson.find(raw, b"ts", start)
    if element is None or element.type != raw_bson.TIMESTAMP:
        raise OplogFormatError("an oplog entry without the timestamp field ts", position=f"byte {start} of the batch")
    return ClusterTime.from_bytes_le(raw[element.value_start : element.end])


def cut(raw: bytes, bytes_max: int) -> Iterator[tuple[OplogBatch, bytes]]:
    """``raw`` as batches of at most ``bytes_max`` bytes (a single larger entry stands alone), and the last entry of
    each. Only the lengths are read on the way."""
    unpack, size = _LENGTH.unpack_from, len(raw)
    compiled = getattr(sys.modules.get("tailrace.core.kernel.reply"), "last_document", None)
    if compiled is not None and _COMPILED_BYTES_MIN <= size <= bytes_max and (place := compiled(raw)) is not None:
        yield OplogBatch(raw, entry_time(raw, place)), raw[place:]
        return
    piece = last = pos = 0
    while pos < size:
        end = pos + unpack(raw, pos)[0] if pos + 5 <= size else size + 1
        if not pos + 5 <= end <= size:
            raise OplogFormatError("an oplog entry leads outside its batch", position=f"byte {pos} of the batch")
        if end - piece > bytes_max and pos > piece:
            yield OplogBatch(raw[piece:pos], entry_time(raw, last)), raw[last:pos]
            piece = pos
        last, pos = pos, end
    if piece < size:
        yield OplogBatch(raw[piece:] if piece else raw, entry_time(raw, last)), raw[last:]


def is_initiating_set(entry: bytes) -> bool:
    """Whether the entry is the no-op that a replica set's oplog begins with: nothing was ever written before it."""
    operation = raw_bson.find(entry, b"op")
    body = raw_bson.find(entry, b"o")
    if operation is None or body is None or body.type != raw_bson.OBJECT:
        return False
    message = raw_bson.find(entry, b"msg", body.value_start)
    return (
        raw_bson.value(entry, operation) == raw_bson.encode_string("n")
        and message is not None
        and raw_bson.value(entry, message) == raw_bson.encode_string("initiating set")
    )
