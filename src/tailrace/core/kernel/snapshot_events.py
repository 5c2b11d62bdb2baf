"""The events of a snapshot, in compiled code: ``tailrace.read.snapshot.event.snapshot_event`` of many documents at
once.

What the events of a chunk have in common comes as finished bytes; each document contributes its ``_id``, for the token
and the document key, and itself. Documents that the plain way has to make are left undone: those with a large ``_id``,
or one of a rare type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.core.kernel.batch import address
from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.fragments import DOCUMENT_KEY, TEXT
from tailrace.core.kernel.key_string import (
    STACK_SIZE,
    WRITER_SIZE,
    put_bits,
    put_byte,
    put_bytes,
    put_document,
    writer_open,
)
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store32, store64
from tailrace.core.kernel.oplog_entry import find_id
from tailrace.core.kernel.scan import document_end, value_end
from tailrace.core.kernel.token_element import put_constant, put_token_element

#: A larger ``_id`` is left to the plain way; so an event is larger than its document by this much at most.
_KEY_MAX: Final = 256
_MORE: Final = 8 * _KEY_MAX
# Slots of the job, as byte offsets.
_DOCUMENTS = 0
_END = 8
_OUT = 16
_OFFSETS = 24
_FRAGMENTS = 32
_WRITER = 40
_KEY_STRING = 48
_STACK = 56
_KEY = 64
_PREFIX = 72  # of the key string: address and size
_HEAD = 88  # between the token and the document
_MIDDLE = 104  # between the document and the document key's name
_SLOTS = 15


class ChunkConstants(NamedTuple):
    """What the events of a chunk have in common, as bytes.

    ``key_string``  of a token up to the fields of the document key
    ``head``        the elements between ``_id`` and the value of ``fullDocument``
    ``middle``      the elements between ``fullDocument`` and ``documentKey``
    """

    key_string: bytes
    head: bytes
    middle: bytes


@inner
def _put_bytes_of(out: int, job: int, slot: int) -> int:
    size = load64(job + slot + 8)
    copy(out, load64(job + slot), size)
    return out + size


@inner
def _put_event(out: int, job: int, document: int, size: int) -> int:
    """The event of a document; its end, or 0 where the plain way must make it."""
    element = find_id(document)
    if element <= 0:
        return 0
    end = value_end(load8(element), element + 5, document + size - 1)
    key_size = end - element
    if end < 0 or key_size > _KEY_MAX:
        return 0
    key = load64(job + _KEY)
    store32(key, key_size + 5)
    copy(key + 4, element, key_size)
    store8(key + 4 + key_size, 0)
    writer = load64(job + _WRITER)
    writer_open(writer, load64(job + _KEY_STRING))
    put_bytes(writer, load64(job + _PREFIX), load64(job + _PREFIX + 8))
    put_bits(writer, 0, 7)
    if not put_document(writer, key, key + key_size + 5, load64(job + _STACK)):
        return 0
    put_byte(writer, 0)
    put_byte(writer, 0x04)
    event = out
    out = put_token_element(out + 4, load64(job + _FRAGMENTS), load64(job + _WRITER), load64(job + _KEY_STRING))
    out = _put_bytes_of(out, job, _HEAD)
    copy(out, document, size)
    out = _put_bytes_of(out + size, job, _MIDDLE)
    out = put_constant(out, load64(job + _FRAGMENTS), DOCUMENT_KEY)
    copy(out, key, key_size + 5)
    out += key_size + 5
    store8(out, 0)
    store32(event, out + 1 - event)
    return out + 1


def _make_events(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def make(job: int) -> int:
        """Make events until the documents end or one is left to the plain way. Returns how many were made."""
        if sources == 0:
            return 0
        pos, limit = load64(job + _DOCUMENTS), load64(job + _END)
        out, offsets, begin = load64(job + _OUT), load64(job + _OFFSETS), load64(job + _OUT)
        made = 0
        while pos < limit:
            end = document_end(pos, limit)
            if end < 0:
                break
            after = _put_event(out, job, pos, load32(pos))
            if after == 0:
                break
            out = after
            made += 1
            store64(offsets + 8 * made, out - begin)
            pos = end
        store64(job + _DOCUMENTS, pos)
        return made

    return make


def _make_count(sources: int) -> Callable[[int, int], int]:
    @entry_point("int64(int64, int64)")
    def count(start: int, limit: int) -> int:
        """How many documents lie in [start, limit), up to one whose length leads astray."""
        if sources == 0:
            return 0
        found = 0
        while start < limit:
            start = document_end(start, limit)
            if start < 0:
                break
            found += 1
        return found

    return count


_events = _make_events(fingerprint(__name__))
_count = _make_count(fingerprint(__name__))


def snapshot_events(
    documents: bytes, constants: ChunkConstants
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], bool]:
    """The events of documents that lie one after another, and where each begins: as many as there are up to
    the first one that is left to the plain way. And whether these are all."""
    raw = np.frombuffer(documents, np.uint8)
    count = _count(address(raw), address(raw) + raw.size)
    parts = [np.frombuffer(part, np.uint8) for part in (*constants, TEXT)]
    more = _MORE + 2 * len(constants.key_string) + len(constants.head) + len(constants.middle)
    out = np.empty(len(documents) + count * more, np.uint8)
    offsets = np.zeros(count + 1, np.int64)
    scratch = np.empty(WRITER_SIZE + STACK_SIZE + 4 * _KEY_MAX + 2 * len(constants.key_string) + 1024, np.uint8)
    writer = address(scratch)
    stack = writer + WRITER_SIZE
    key = stack + STACK_SIZE
    job = np.zeros(_SLOTS, np.int64)
    job[:9] = [
        address(raw),
        address(raw) + raw.size,
        address(out),
        address(offsets),
        address(parts[3]),
        writer,
        key + _KEY_MAX + 16,
        stack,
        key,
    ]
    for number in range(3):
        job[9 + 2 * number : 11 + 2 * number] = [address(parts[number]), parts[number].size]
    made = _events(address(job))
    ended = int(job[_DOCUMENTS // 8]) == address(raw) + raw.size
    return out[: offsets[made]], offsets[: made + 1], ended
