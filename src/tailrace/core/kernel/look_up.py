"""Look-ups in bulk: the ``$in`` that asks for many documents by ``_id``, and the assignment of the reply's documents to
their keys. Both are made in compiled code, without an object for a key or a document.

Whether keys that are equal but have other bytes match (3 and 3.0, collations, regular expressions in a key) is not
decided here: ``Keys.types`` says what the keys are, and a document with an ``_id`` that was not asked for ends the
attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace.core.event.image import DocumentRuns, FoundDocuments
from tailrace.core.kernel.compiled import entry_point, fingerprint, inner
from tailrace.core.kernel.delta import put_decimal
from tailrace.core.kernel.memory import copy, load8, load32, load64, store8, store64
from tailrace.core.kernel.scan import OBJECT, document_end, equal, find_nul, name_word, value_end, word_of

# Slots of a job, as byte offsets.
COUNT = 0
KEYS = 8
KEY_START = 16  # int64[count], and KEY_END: the keys, offsets from KEYS
KEY_END = 24
TABLE = 32  # int64[mask + 1], zeros: one more than the number of an id, at a place that its hash chooses
MASK = 40
NUMBER = 48  # int64[count]: the number of each key's id among the different ones
FIRST = 56  # int64[count]: the key that brought each of these
OUT = 64  # the elements of the query's array
TYPES = 72  # int64: bit t is set where an id is of BSON type t
DIFFERENT = 80  # how many ids there are
RUN = 88  # the reply's documents, one after another
RUN_END = 96
WITHIN = 104  # the image is the field ``preImage`` of the document, not the document
FOUND_START = 112  # int64[different], and FOUND_END: where the images are, offsets from RUN; -1 at first
FOUND_END = 120
JOB_SIZE = 128

_FACTOR: Final = -0x61C8864680B583EB
#: ``_id`` and its NUL, and the place of the value after a document's length and the element's type.
_ID: Final = int.from_bytes(b"_id\0", "little")
_ID_VALUE: Final = 9
_IMAGE: Final = word_of(b"preImage")
_IMAGE_SIZE: Final = len(b"preImage")
_TYPE_MAX: Final = 0x13


@inner
def _id_end(document: int, end: int) -> int:
    """After the value of the ``_id`` that a document (which ends at ``end``) begins with; -1 where there is none."""
    if end - document < _ID_VALUE + 1 or load32(document + 5) != _ID or load8(document + 4) > _TYPE_MAX:
        return -1
    return value_end(load8(document + 4), document + _ID_VALUE, end - 1)


@inner
def _place(job: int, document: int, size: int) -> int:
    """The place in the table of the ``_id`` that a document begins with: where it is, or where it would go."""
    value, type_ = document + _ID_VALUE, load8(document + 4)
    found = type_ * _FACTOR
    done = 0
    while done + 8 <= size:
        found = (found ^ load64(value + done)) * _FACTOR
        found ^= found >> 32
        done += 8
    while done < size:
        found = (found ^ load8(value + done)) * _FACTOR
        done += 1
    found ^= found >> 29
    table, mask = load64(job + TABLE), load64(job + MASK)
    place = table + 8 * (found & mask)
    while True:
        number = load64(place) - 1
        if number < 0:
            return place
        key = load64(load64(job + FIRST) + 8 * number)
        other = load64(job + KEYS) + load64(load64(job + KEY_START) + 8 * key)
        other_size = load64(job + KEYS) + load64(load64(job + KEY_END) + 8 * key) - 1 - other - _ID_VALUE
        if other_size == size and load8(other + 4) == type_ and equal(other + _ID_VALUE, value, size):
            return place
        found += 1
        place = table + 8 * (found & mask)


def _make_ask(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def ask(job: int) -> int:
        """Number the different ids of the keys and write them as elements of an array; how many bytes were written. -1
        where a key is more than an ``_id``."""
        if sources == 0:
            return 0
        out = load64(job + OUT)
        different = 0
        for index in range(load64(job + COUNT)):
            key = load64(job + KEYS) + load64(load64(job + KEY_START) + 8 * index)
            end = load64(job + KEYS) + load64(load64(job + KEY_END) + 8 * index)
            if _id_end(key, end) != end - 1:
                return -1
            size = end - 1 - key - _ID_VALUE
            place = _place(job, key, size)
            if load64(place) == 0:
                store64(load64(job + FIRST) + 8 * different, index)
                store8(out, load8(key + 4))
                store64(job + TYPES, load64(job + TYPES) | (1 << load8(key + 4)))
                out = put_decimal(out + 1, different)
                copy(out, key + _ID_VALUE, size)
                out += size
                different += 1
                store64(place, different)
            store64(load64(job + NUMBER) + 8 * index, load64(place) - 1)
        store64(job + DIFFERENT, different)
        return out - load64(job + OUT)

    return ask


@inner
def _pre_image(start: int, limit: int) -> int:
    """The value of the field ``preImage`` among the elements from ``start`` on, a document; -1 where there is none."""
    pos = start
    while pos < limit:
        nul = find_nul(pos + 1, limit)
        if nul < 0:
            return -1
        if nul - pos - 1 == _IMAGE_SIZE and name_word(pos + 1, _IMAGE_SIZE) == _IMAGE:
            return nul + 1 if load8(pos) == OBJECT and document_end(nul + 1, limit) >= 0 else -1
        pos = value_end(load8(pos), nul + 1, limit)
        if pos < 0:
            return -1
    return -1


def _make_match(sources: int) -> Callable[[int], int]:
    @entry_point("int64(int64)")
    def match(job: int) -> int:
        """Assign a reply's documents to the ids. Returns 0, or -1 if one has an id that was not asked for, or another
        shape."""
        if sources == 0:
            return 0
        run, limit = load64(job + RUN), load64(job + RUN_END)
        document = run
        while document < limit:
            end = document_end(document, limit)
            id_end = -1 if end < 0 else _id_end(document, end)
            if id_end < 0:
                return -1
            number = load64(_place(job, document, id_end - document - _ID_VALUE)) - 1
            if number < 0:
                return -1
            image, image_end = document, end
            if load64(job + WITHIN) != 0:
                image = _pre_image(id_end, end - 1)
                if image < 0:
                    return -1
                image_end = document_end(image, end - 1)
            store64(load64(job + FOUND_START) + 8 * number, image - run)
            store64(load64(job + FOUND_END) + 8 * number, image_end - run)
            document = end
        return 0

    return match


_ask = _make_ask(fingerprint(__name__))
_match = _make_match(fingerprint(__name__))


class Keys:
    """The ids of document keys ``{_id: ...}``, ready to be asked for. At least one key.

    ``decided``    whether every key is an ``_id`` alone, of a usual type; else the rest says nothing
    ``different``  how many different ones there are
    ``elements``   the elements of an array of these
    ``types``      their BSON types
    """

    def __init__(self, keys: DocumentRuns) -> None:
        keys = DocumentRuns(keys.data, np.ascontiguousarray(keys.start), np.ascontiguousarray(keys.end))
        count = len(keys)
        slots = 4 << count.bit_length()
        table, first = np.zeros(slots, np.int64), np.empty(count, np.int64)
        # An element of an array is shorter than a key of its own: its name has at most seven digits.
        out = np.empty(int((keys.end - keys.start).sum()), np.uint8)
        self._number = np.empty(count, np.int64)
        self._kept = keys, table, first
        self._job = np.zeros(JOB_SIZE // 8, np.int64)
        self._set(
            {
                COUNT: count,
                KEYS: _address(keys.data),
                KEY_START: _address(keys.start),
                KEY_END: _address(keys.end),
                TABLE: _address(table),
                MASK: slots - 1,
                NUMBER: _address(self._number),
                FIRST: _address(first),
                OUT: _address(out),
            }
        )
        size = _ask(_address(self._job))
        self.decided = size >= 0
        self.different = int(self._job[DIFFERENT // 8])
        self.elements = out[: max(size, 0)].tobytes()
        types = int(self._job[TYPES // 8])
        self.types = frozenset(type_ for type_ in range(_TYPE_MAX + 1) if types >> type_ & 1)

    def _set(self, slots: dict[int, int]) -> None:
        for slot, value in slots.items():
            self._job[slot // 8] = value

    def among(self, run: bytes | npt.NDArray[np.uint8], *, within: bool = False) -> FoundDocuments | None:
        """Each key's document among those of a reply, or with ``within`` its field ``preImage``. ``None`` if the bytes
        alone do not decide."""
        data = np.frombuffer(run if len(run) else b"\0", np.uint8)
        start, end = np.full(self.different, -1, np.int64), np.full(self.different, -1, np.int64)
        place = _address(data)
        self._set({RUN: place, RUN_END: place + len(run), WITHIN: int(within)})
        self._set({FOUND_START: _address(start), FOUND_END: _address(end)})
        if _match(_address(self._job)) < 0:
            return None
        return FoundDocuments(data, start[self._number], end[self._number])


def _address(array: npt.NDArray[np.generic]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
