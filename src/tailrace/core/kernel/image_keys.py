"""Keys of documents in the image state, made in compiled code for all events of a batch at once.

The keys are those of ``tailrace.read.images.key.state_key``: the collection's UUID, then the ``_id``. Only the common
types of ``_id`` are done here: ObjectId, string, and integers of 32 and 64 bits, and only where ``_id`` is the first
field of the document key. For all others the caller asks ``state_key``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace.core.kernel import event_record
from tailrace.core.kernel.batch import KernelBatch, address
from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store32, store64, store64_big_endian
from tailrace.core.kernel.scan import INT32, INT64, OBJECT_ID, STRING, load_signed32

#: ``state_key`` makes the key of a longer ``_id``.
_VALUE_MAX: Final = 256
_UUID_SIZE: Final = 16
#: The most bytes that a key has besides those of ``_id``.
_ROOM: Final = 32
_ID: Final = int.from_bytes(b"_id\0", "little")
_VALUE: Final = 9  # where the value of a document's first element ``_id`` begins

# Slots of the job, as byte offsets.
_COUNT = 0
_RECORDS = 8
_EVENTS = 16
_OUT = 24
_ENDS = 32
_CHECKSUMS = 40
_TABLE = 48
_SLOTS = 7


@inner
def _put_value(out: int, key: int, size: int) -> int:
    """Write the ``_id`` of the document key at ``key``, of ``size`` bytes, to ``out``. Returns the address after what
    was written; 0 for an ``_id`` that is not done here."""
    if size < _VALUE + 5 or load32(key + 5) != _ID:
        return 0
    type_ = load8(key + 4)
    if type_ == OBJECT_ID:
        store8(out, 0x64)
        copy(out + 1, key + _VALUE, 12)
        return out + 13
    if type_ == STRING:
        length = load32(key + _VALUE) - 1
        if length < 0 or length > _VALUE_MAX or _VALUE + 4 + length >= size:
            return 0
        store8(out, 0x3C)
        copy(out + 1, key + _VALUE + 4, length)
        return out + 1 + length
    if type_ == INT32:
        store8(out, 0x29)
        store64_big_endian(out + 1, load_signed32(key + _VALUE))
        return out + 9
    if type_ == INT64:
        store8(out, 0x29)
        store64_big_endian(out + 1, load64(key + _VALUE))
        return out + 9
    return 0


@inner
def _checksum(start: int, end: int, table: int) -> int:
    """CRC-32, as zlib computes it."""
    checksum = 0xFFFFFFFF
    for place in range(start, end):
        checksum = load32(table + 4 * ((checksum ^ load8(place)) & 0xFF)) ^ (checksum >> 8)
    return checksum ^ 0xFFFFFFFF


def _make_keys(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def make(job: int) -> int:
        """Write the keys one after another; a key that is not made here has no bytes. Returns the bytes written."""
        if sources == 0:
            return 0
        out, base, events = load64(job + _OUT), load64(job + _OUT), load64(job + _EVENTS)
        for index in range(load64(job + _COUNT)):
            record = load64(job + _RECORDS) + event_record.RECORD_SIZE * index
            key = events + load64(record + event_record.KEY_START)
            size = events + load64(record + event_record.KEY_END) - key
            store64(out, load64(record + event_record.UUID_FIRST))
            store64(out + 8, load64(record + event_record.UUID_LAST))
            after = _put_value(out + _UUID_SIZE, key, size)
            if after != 0:
                store32(load64(job + _CHECKSUMS) + 4 * index, _checksum(out, after, load64(job + _TABLE)))
                out = after
            store64(load64(job + _ENDS) + 8 * index, out - base)
        return out - base

    return make


_keys = _make_keys(fingerprint(__name__))


def _table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(0xEDB88320), table >> np.uint32(1))
    return table.astype(np.uint32)


_TABLE_OF_BYTES: Final = _table()


def image_keys(made: KernelBatch) -> tuple[bytes, npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """The keys of a batch's events.

    Returns the keys one after another, the offset where each key ends (int64), and the CRC-32 of each key, its UUID
    included (uint32). A key without bytes was not made: ``state_key`` makes it.
    """
    records = np.ascontiguousarray(made.records)
    count = len(records)
    sizes = np.minimum(made.column(event_record.KEY_END) - made.column(event_record.KEY_START), _VALUE_MAX)
    out = np.empty(int(sizes.sum()) + _ROOM * count, np.uint8)
    ends, checksums = np.empty(count, np.int64), np.zeros(count, np.uint32)
    job = np.zeros(_SLOTS, np.int64)
    job[:] = [
        count,
        address(records),
        address(made.events),
        address(out),
        address(ends),
        address(checksums),
        address(_TABLE_OF_BYTES),
    ]
    written = _keys(address(job))
    return out[:written].tobytes(), ends, checksums
