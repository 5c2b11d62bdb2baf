"""Columns out of finished events, as numpy arrays. Imported by ``tailrace.kernel`` on first use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.errors import OplogFormatError, UsageError
from tailrace.kernel import columns, extended_json, fragments, number_text, variant
from tailrace.kernel.batch import Bytes, Offsets, address, as_bytes

#: The parts of an event that ``locate`` finds, by the names of the Spark columns.
PARTS: Final[dict[str, int]] = {
    "token": columns.TOKEN,
    "operation_type": columns.OPERATION_TYPE,
    "cluster_time": columns.CLUSTER_TIME,
    "wall_time": columns.WALL_TIME,
    "database": columns.DATABASE,
    "collection": columns.COLLECTION,
    "document_key": columns.DOCUMENT_KEY,
    "full_document": columns.FULL_DOCUMENT,
    "full_document_before_change": columns.FULL_DOCUMENT_BEFORE_CHANGE,
    "update_description": columns.UPDATE_DESCRIPTION,
    "session": columns.SESSION,
    "txn_number": columns.TXN_NUMBER,
    "to_database": columns.TO_DATABASE,
    "to_collection": columns.TO_COLLECTION,
}
#: ``database`` and ``collection`` are found together, inside ``ns``; those of a rename's target inside ``to``.
_FOUND_BY: Final = {columns.COLLECTION: columns.DATABASE, columns.TO_COLLECTION: columns.TO_DATABASE}

_TEXT = np.frombuffer(fragments.TEXT, np.uint8)


class Part(NamedTuple):
    """One part of each of ``n`` events.

    ``start``, ``end``  int64[n], offsets into the buffer: of the text for ``token``, ``operation_type``, ``database``,
                        ``collection`` and those of ``to``; of the 16 UUID bytes for ``session``; of the BSON
                        value for the documents.
                        0 and 0 where the part is absent. For ``cluster_time`` (packed), ``wall_time`` (milliseconds)
                        and ``txn_number``, ``start`` holds the number itself.
    ``type``            int64[n], the BSON type of the value; 0 where the part is absent or of another type than usual
                        (the four document parts: absent)
    """

    start: Offsets
    end: Offsets
    type: Offsets


@dataclass(frozen=True, slots=True)
class VariantColumn:
    """``n`` values as VARIANT: two binary columns in Arrow's layout (data, int32 offsets of length n + 1).

    Where ``ok`` is false, a VARIANT null holds the place of a value that the Python encoder has to make.
    """

    value: Bytes
    value_offsets: npt.NDArray[np.int32]
    metadata: Bytes
    metadata_offsets: npt.NDArray[np.int32]
    ok: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """``n`` values as text: one string column in Arrow's layout (data, int32 offsets of length n + 1).

    Where ``ok`` is false, an empty text holds the place of one that ``json_util`` has to make.
    """

    text: Bytes
    offsets: npt.NDArray[np.int32]
    ok: npt.NDArray[np.bool_]


def locate(buffer: bytes | memoryview | Bytes, offsets: Offsets, wanted: Iterable[str] = PARTS) -> dict[str, Part]:
    """The wanted parts of the events in ``buffer``; event ``i`` is ``[offsets[i], offsets[i + 1])``.

    Of equal names at the top of an event the last one counts, inside ``_id`` and ``ns`` too. Raises
    ``OplogFormatError`` where an event is no BSON document, ``UsageError`` for a part that does not exist.
    """
    data = as_bytes(buffer)
    ends = np.ascontiguousarray(offsets, np.int64)
    count = ends.size - 1
    names = list(wanted)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise UsageError(f"an event has no part '{unknown[0]}'", hint=f"Parts: {', '.join(PARTS)}")
    if count and (int(ends.min()) < 0 or int(ends.max()) > data.size):
        raise OplogFormatError("the events' offsets lead outside their buffer")
    places = {name: PARTS[name] for name in names}
    mask = sum({1 << _FOUND_BY.get(part, part) for part in places.values()})
    result = np.empty((columns.PARTS, 3, count), np.int64)
    failed = columns.locate(address(data), address(ends), count, mask, address(result))
    if failed >= 0:
        raise OplogFormatError("corrupt BSON: an event does not hold together", position=f"event {failed}")
    return {name: Part(*result[part]) for name, part in places.items()}


def gather(buffer: bytes | memoryview | Bytes, start: Offsets, end: Offsets) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """The runs [start, end) of ``buffer`` one behind the other, and their int32 offsets: an Arrow binary column."""
    data, starts, ends = _checked(buffer, start, end)
    size = int((ends - starts).sum())
    _check_offsets(size)
    gathered = np.empty(size, np.uint8)
    offsets = np.empty(starts.size + 1, np.int32)
    places = [address(data), address(starts), address(ends), starts.size, address(gathered), address(offsets)]
    job = np.array(places, np.int64)
    columns.gather(address(job))
    return gathered, offsets


def is_utf8(buffer: bytes | memoryview | Bytes) -> bool:
    """Whether all bytes together are valid UTF-8 (what an Arrow string column must hold)."""
    data = as_bytes(buffer)
    return bool(columns.is_utf8(address(data), address(data) + data.size))


def encode_variants(buffer: bytes | memoryview | Bytes, part: Part) -> VariantColumn:
    """One VARIANT for each value of a document part (``locate``); see ``VariantColumn`` for what is left over.

    Absent values are a VARIANT null with ``ok`` true: the caller masks them by ``part.type == 0``.
    """
    data, starts, ends = _checked(buffer, part.start, part.end)
    types = np.ascontiguousarray(part.type, np.int64)
    count = starts.size
    sizes = ends - starts
    largest = int(sizes.max(initial=0))
    room = 4 * int(sizes.sum()) + variant.ROW_ROOM * (count + 1) + 8 * largest
    _check_offsets(room)
    # Only what is written to is ever backed by memory.
    values, metadata = np.empty(room, np.uint8), np.empty(room, np.uint8)
    value_offsets, metadata_offsets = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
    ok = np.empty(count, np.uint8)
    state, kept = _variant_state(largest)
    job = np.array(
        [address(a) for a in (state, data, starts, ends, types)]
        + [count]
        + [address(a) for a in (values, value_offsets, metadata, metadata_offsets, ok)],
        np.int64,
    )
    variant.encode(address(job))
    del kept
    return VariantColumn(
        values[: value_offsets[-1]],
        value_offsets,
        metadata[: metadata_offsets[-1]],
        metadata_offsets,
        ok.view(np.bool_),
    )


def encode_json(buffer: bytes | memoryview | Bytes, part: Part) -> JsonColumn:
    """The relaxed Extended JSON of each value of a document part (``locate``); ``JsonColumn`` says what is left over.

    Absent values are an empty text with ``ok`` true: the caller masks them by ``part.type == 0``.
    """
    data, starts, ends = _checked(buffer, part.start, part.end)
    types = np.ascontiguousarray(part.type, np.int64)
    count = starts.size
    room = extended_json.GROWTH * int((ends - starts).sum()) + extended_json.ROW_ROOM * (count + 1)
    _check_offsets(room)
    # Only what is written to is ever backed by memory.
    text, offsets, ok = np.empty(room, np.uint8), np.empty(count + 1, np.int32), np.empty(count, np.uint8)
    state, kept = _json_state()
    job = np.array(
        [address(a) for a in (state, data, starts, ends, types)] + [count] + [address(a) for a in (text, offsets, ok)],
        np.int64,
    )
    extended_json.encode(address(job))
    del kept
    return JsonColumn(text[: offsets[-1]], offsets, ok.view(np.bool_))


def _check_offsets(size: int) -> None:
    if size > np.iinfo(np.int32).max:
        raise UsageError("a column of one batch is limited to 2 GiB", hint="Make smaller batches")


def _checked(buffer: bytes | memoryview | Bytes, start: Offsets, end: Offsets) -> tuple[Bytes, Offsets, Offsets]:
    """The three as arrays for compiled code, every run inside the buffer."""
    data = as_bytes(buffer)
    starts, ends = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
    if starts.size != ends.size or (
        starts.size and (int(starts.min()) < 0 or int(ends.max()) > data.size or bool((starts > ends).any()))
    ):
        raise UsageError("the runs to gather lead outside their buffer")
    return data, starts, ends


def _variant_state(largest: int) -> tuple[Offsets, list[npt.NDArray[np.generic]]]:
    """The encoder's state, and the memory that it points to, which the caller keeps."""
    state = np.zeros(variant.STATE_SIZE // 8, np.int64)
    memory: dict[int, npt.NDArray[np.generic]] = {
        variant.RECORDS: np.empty(variant.RECORDS_SIZE, np.uint8),
        variant.NAMES: np.empty(variant.NAMES_SIZE, np.uint8),
        variant.TABLE: np.zeros(variant.TABLE_SIZE, np.uint8),
        variant.FRAMES: np.empty(variant.FRAMES_SIZE, np.uint8),
        variant.SORTED: np.empty(4 * largest + variant.ROW_ROOM, np.uint8),
        variant.FRAGMENTS: _TEXT,
    }
    for slot, array in memory.items():
        state[slot // 8] = address(array)
    return state, list(memory.values())


def _json_state() -> tuple[Offsets, list[npt.NDArray[np.generic]]]:
    """The same for the writer of JSON."""
    state = np.zeros(extended_json.STATE_SIZE // 8, np.int64)
    memory: dict[int, npt.NDArray[np.generic]] = {
        extended_json.FRAGMENTS: _TEXT,
        extended_json.POWERS: number_text.POWERS,
        extended_json.PAIRS: number_text.DIGIT_PAIRS,
        extended_json.TABLE: np.zeros(extended_json.TABLE_SIZE, np.uint8),
        extended_json.FRAMES: np.empty(extended_json.FRAMES_SIZE, np.uint8),
    }
    for slot, array in memory.items():
        state[slot // 8] = address(array)
    return state, list(memory.values())
