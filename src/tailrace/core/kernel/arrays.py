"""Columns out of finished events, as numpy arrays. Imported by ``tailrace.core.kernel`` on first use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.kernel import columns, event_parts
from tailrace.core.kernel.batch import address, as_bytes
from tailrace.core.kernel.lent import lend
from tailrace.errors import OplogFormatError, UsageError, invariant

#: The parts of an event that ``locate`` finds, by the names of the Spark columns.
PARTS: Final[dict[str, int]] = {
    "token": event_parts.TOKEN,
    "operation_type": event_parts.OPERATION_TYPE,
    "cluster_time": event_parts.CLUSTER_TIME,
    "wall_time": event_parts.WALL_TIME,
    "database": event_parts.DATABASE,
    "collection": event_parts.COLLECTION,
    "document_key": event_parts.DOCUMENT_KEY,
    "full_document": event_parts.FULL_DOCUMENT,
    "full_document_before_change": event_parts.FULL_DOCUMENT_BEFORE_CHANGE,
    "update_description": event_parts.UPDATE_DESCRIPTION,
    "session": event_parts.SESSION,
    "txn_number": event_parts.TXN_NUMBER,
    "to_database": event_parts.TO_DATABASE,
    "to_collection": event_parts.TO_COLLECTION,
}
#: ``database`` and ``collection`` are found together, inside ``ns``; those of a rename's target inside ``to``.
_FOUND_BY: Final = {event_parts.COLLECTION: event_parts.DATABASE, event_parts.TO_COLLECTION: event_parts.TO_DATABASE}


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


def locate(
    buffer: bytes | memoryview | Bytes,
    offsets: Offsets,
    wanted: Iterable[str] = PARTS,
    noted: Offsets | None = None,
) -> dict[str, Part]:
    """The wanted parts of the events in ``buffer``; event ``i`` is ``[offsets[i], offsets[i + 1])``.

    Of equal names at the top of an event the last one counts, inside ``_id`` and ``ns`` too. ``noted`` is what is known
    about the events (``EventBlock.places``): without it the result is the same, but takes longer. Raises
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
    rows = None if noted is None else np.ascontiguousarray(noted, np.int64)
    invariant(rows is None or rows.shape == (count, event_parts.PARTS), "places are noted of other events")
    places = {name: PARTS[name] for name in names}
    mask = sum({1 << part for part in places.values()} | {1 << _FOUND_BY.get(part, part) for part in places.values()})
    result = np.empty((event_parts.PARTS, 3, count), np.int64)
    job = np.empty(columns.JOB_SLOTS, np.int64)
    job[columns.BASE // 8] = address(data)
    job[columns.OFFSETS // 8] = address(ends)
    job[columns.COUNT // 8] = count
    job[columns.WANTED // 8] = mask
    job[columns.RESULT // 8] = address(result)
    job[columns.NOTED // 8] = 0 if rows is None else address(rows)
    failed = columns.locate(address(job))
    if failed >= 0:
        raise OplogFormatError("corrupt BSON: an event does not hold together", position=f"event {failed}")
    return {name: Part(*result[part]) for name, part in places.items()}


def gather(buffer: bytes | memoryview | Bytes, start: Offsets, end: Offsets) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """The runs [start, end) of ``buffer`` one after another, and their int32 offsets: an Arrow binary column."""
    data, starts, ends = checked_runs(buffer, start, end)
    size = int((ends - starts).sum())
    check_offsets(size)
    gathered = lend(size)
    offsets = np.empty(starts.size + 1, np.int32)
    places = [address(data), address(starts), address(ends), starts.size, address(gathered), address(offsets)]
    job = np.array(places, np.int64)
    columns.gather(address(job))
    return gathered, offsets


def is_utf8(buffer: bytes | memoryview | Bytes) -> bool:
    """Whether all bytes together are valid UTF-8 (what an Arrow string column must hold)."""
    data = as_bytes(buffer)
    return bool(columns.is_utf8(address(data), address(data) + data.size))


def check_offsets(size: int) -> None:
    """Refuse a column whose offsets would not fit into int32."""
    if size > np.iinfo(np.int32).max:
        raise UsageError("a column of one batch is limited to 2 GiB", hint="Make smaller batches")


def checked_runs(buffer: bytes | memoryview | Bytes, start: Offsets, end: Offsets) -> tuple[Bytes, Offsets, Offsets]:
    """The three as arrays for compiled code, every run inside the buffer."""
    data = as_bytes(buffer)
    starts, ends = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
    if starts.size != ends.size or (
        starts.size and (int(starts.min()) < 0 or int(ends.max()) > data.size or bool((starts > ends).any()))
    ):
        raise UsageError("the runs to gather lead outside their buffer")
    return data, starts, ends
