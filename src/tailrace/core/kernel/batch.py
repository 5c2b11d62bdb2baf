"""The Python side of the kernel: settings in, numpy arrays out. Imported by ``tailrace.core.kernel`` on first use."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tailrace.core.event.event_block import Bytes, EventBlock, Offsets
from tailrace.core.kernel import delta, event_record, fragments, job, key_string, oplog_entry, transform
from tailrace.core.kernel.lent import lend
from tailrace.core.kernel.namespace import CLUSTER, COLLECTION, DATABASE
from tailrace.core.kernel.runs import copy_runs
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import Answer, Request
from tailrace.errors import UsageError

SKIPPED = job.SKIPPED
EVENT = job.EVENT
PLAIN = job.PLAIN
CHAIN_ENTRY = job.CHAIN_ENTRY
MEMBER_ENTRY = job.MEMBER_ENTRY

#: Room for the last event to be written and the fixed parts of the first ones; the buffer grows when it is not enough.
_MARGIN = 1 << 16
#: The first guess: how many times larger events are than their oplog entries, and how small an operation of a
#: transaction is.
_GROWTH = 4
_OPERATION_BYTES = 96
#: No valid entry is shorter.
_ENTRY_BYTES = 64
#: The buffer for a batch's events is not made larger than twice this; of 16 MB of oplog the events are 60 MB at most
#: where none of them is much longer than its entry.
_EVENTS_BYTES_MAX = 128 << 20
_SCRATCH_PARTS = {
    "table": oplog_entry.TABLE_SIZE,
    "operation_table": oplog_entry.TABLE_SIZE,
    "member_table": oplog_entry.TABLE_SIZE,
    "chain": 8 * job.CHAIN_MAX,
    "writer": key_string.WRITER_SIZE,
    "stack": key_string.STACK_SIZE,
    "delta": delta.DELTA_SIZE,
    "key_string": job.KEY_STRING_MAX,
    "key_document": job.KEY_DOCUMENT_MAX,
    "areas": delta.AREAS_SIZE,
}
_KINDS = {"cluster": CLUSTER, "database": DATABASE, "collection": COLLECTION}
_TEXT = np.frombuffer(fragments.TEXT, np.uint8)


class KernelSettings(NamedTuple):
    """What the stream shows. Entries before ``start`` are skipped; ``token_version`` is 1 or 2; ``wall_time``: events
    carry it (6.0 and later); ``collection_uuid``: showExpandedEvents; ``raw_updates``: showRawUpdateDescription;
    ``disambiguated_paths``: showExpandedEvents from 6.1 on; the last three as in ``ServerProfile``."""

    scope: Scope
    start: ClusterTime = ZERO
    token_version: int = 1
    wall_time: bool = True
    collection_uuid: bool = False
    raw_updates: bool = False
    disambiguated_paths: bool = False
    unwinds_apply_ops_without_session: bool = False
    multi_op_is_no_transaction: bool = False
    ns_type: bool = False
    refuses_old_updates: bool = False
    replacements_may_have_v: bool = False

    @property
    def flags(self) -> int:
        """The settings as the bits of a job. ``UsageError`` for a version of resume tokens that is not 1 or 2."""
        if self.token_version not in (1, 2):
            raise UsageError(f"the kernel writes resume tokens of version 1 and 2, not {self.token_version}")
        flags = {
            job.VERSION_2: self.token_version == 2,
            job.WITH_WALL_TIME: self.wall_time,
            job.WITH_COLLECTION_UUID: self.collection_uuid,
            job.RAW_UPDATES: self.raw_updates,
            job.UNWINDS_WITHOUT_SESSION: self.unwinds_apply_ops_without_session,
            job.MULTI_OP_IS_NO_TRANSACTION: self.multi_op_is_no_transaction,
            job.WITH_NS_TYPE: self.ns_type,
            job.REFUSES_OLD_UPDATES: self.refuses_old_updates,
            job.REPLACEMENTS_MAY_HAVE_V: self.replacements_may_have_v,
        }
        return sum(flag for flag, is_set in flags.items() if is_set)

    @property
    def scope_bytes(self) -> bytes:
        """What an entry's namespace is compared with: all of it, or its beginning."""
        if self.scope.kind == "collection":
            return f"{self.scope.database}.{self.scope.collection}".encode()
        return b"" if self.scope.kind == "cluster" else f"{self.scope.database}.".encode()


@dataclass(frozen=True, slots=True, eq=False)
class KernelBatch:
    """What became of the entries of a batch, and the events that were made of them.

    ``raw``                   the entries' BSON, one after another
    ``kind``                  uint8[n]: what became of each entry, ``SKIPPED``, ``EVENT`` or ``PLAIN``. Straight from
                              ``transform_batch`` also ``MEMBER_ENTRY``: skipped, but a transaction that is committed
                              later may refer to it; and ``CHAIN_ENTRY``: it commits a transaction of which earlier
                              entries are not in the batch
    ``entry_start``           int64[n], and ``entry_end``: offsets into ``raw``
    ``events``                uint8: a buffer that holds the events' BSON
    ``records``               int64[m, K]: a row for each event, in stream order; the columns below

    One entry may give any number of events. A step that removes or rewrites events returns another batch; it never
    changes these arrays.
    """

    raw: Bytes
    kind: Bytes
    entry_start: Offsets
    entry_end: Offsets
    events: Bytes
    records: Offsets

    def __len__(self) -> int:
        """How many events there are."""
        return len(self.records)

    def column(self, slot: int) -> Offsets:
        """A column of ``records`` by its slot in ``event_record``: int64[m], a view."""
        found: Offsets = self.records[:, slot // 8]
        return found

    @property
    def entry_number(self) -> Offsets:
        """int64[m]: the number of the entry that each event is made of; never falls."""
        return self.column(event_record.ENTRY)

    @property
    def start(self) -> Offsets:
        """int64[m]: event ``i`` is ``events[start[i] : end[i]]``. There may be other bytes between two events."""
        return self.column(event_record.START)

    @property
    def end(self) -> Offsets:
        """For each event the place in the buffer after it."""
        return self.column(event_record.END)

    def entry(self, index: int) -> bytes:
        """The BSON of entry ``index``."""
        return self.raw[self.entry_start[index] : self.entry_end[index]].tobytes()

    def event(self, index: int) -> bytes:
        """The BSON of event ``index``."""
        return self.events[self.start[index] : self.end[index]].tobytes()

    def token(self, index: int) -> bytes:
        """The resume token of event ``index``, as BSON."""
        row = self.records[index]
        return self.events[row[event_record.TOKEN_START // 8] : row[event_record.TOKEN_END // 8]].tobytes()

    def kept(self, events: npt.NDArray[np.bool_]) -> KernelBatch:
        """The batch with only those events for which ``events`` (bool[m]) is true; the others are not shown."""
        return self if events.all() else replace(self, records=self.records[events])

    def left_plain(self, entries: npt.NDArray[np.bool_]) -> KernelBatch:
        """The batch with the entries for which ``entries`` (bool[n]) is true left to the plain stages, and without
        their events."""
        if not entries.any():
            return self
        kind = np.where(entries, np.uint8(PLAIN), self.kind)
        return replace(self, kind=kind, records=self.records[~entries[self.entry_number]])

    def left_plain_by_event(self, events: npt.NDArray[np.bool_]) -> KernelBatch:
        """As ``left_plain``, for the entries of those events for which ``events`` (bool[m]) is true."""
        entries = np.zeros(self.kind.size, np.bool_)
        entries[self.entry_number[events]] = True
        return self.left_plain(entries)

    def rewritten(self, events: Bytes, records: Offsets) -> KernelBatch:
        """The batch with its events rewritten elsewhere."""
        return replace(self, events=events, records=records)

    def block(self, first: int = 0, last: int | None = None) -> EventBlock:
        """The events [first, last); without a copy of their bytes where they lie one after another."""
        records = self.records[first:last]
        columns = np.ascontiguousarray(records[:, _KNOWN].T)
        start, end, times, operations = columns[:4]
        places = columns[4:]
        buffer = self.events
        if bool((start[1:] == end[:-1]).all()):
            offsets = np.append(start, end[-1:]) if start.size else np.zeros(1, np.int64)
        else:
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - start)])
            buffer = moved(self.events, start, end, offsets)
            places = np.where(places > 0, places + (offsets[:-1] - start), 0)
        return EventBlock(
            buffer,
            offsets,
            times.view(np.uint64),
            operations.astype(np.uint8),
            places[0],
            places[1],
            places[2],
            places[3],
            np.ascontiguousarray(records[:, NOTED]),
        )


#: The columns of ``records`` that an ``EventBlock`` takes: the event's own place, then the others in the block's order;
#: and the words that ``event_parts`` notes.
_KNOWN: Final = slice(event_record.START // 8, event_record.NS_END // 8 + 1)
NOTED: Final = slice(event_record.PLACES // 8, event_record.RECORD_SIZE // 8)

#: The steps between the transform and the finished blocks, in order: ``tailrace.core.kernel.fast_path``.
KernelStep: TypeAlias = Callable[[KernelBatch], Generator[Request, Answer, KernelBatch]]


def moved(buffer: Bytes, start: Offsets, end: Offsets, offsets: Offsets) -> Bytes:
    """The runs [start, end) of ``buffer`` one after another; ``offsets`` (int64[m + 1]) says where each goes."""
    gathered = lend(int(offsets[-1]))
    runs = [np.ascontiguousarray(array, np.int64) for array in (start, end, offsets)]
    starts, ends, places = map(address, runs)
    job = np.array([runs[0].size, address(buffer), starts, ends, address(gathered), places], np.int64)
    copy_runs(address(job))
    return gathered


def as_signed(number: int) -> int:
    """The int64 with the bits of a number of 64 bits without a sign."""
    return (number & 0xFFFFFFFFFFFFFFFF) - ((number & 1 << 63) << 1)


def address(array: npt.NDArray[np.generic]) -> int:
    """Where an array's data lies. The caller keeps the array until compiled code is done with it."""
    found: int = array.__array_interface__["data"][0]
    return found


def as_bytes(buffer: bytes | bytearray | memoryview | Bytes) -> Bytes:
    """The buffer as a contiguous uint8 array, without a copy."""
    if isinstance(buffer, np.ndarray):
        return np.ascontiguousarray(buffer, np.uint8)
    return np.frombuffer(buffer, np.uint8)


def transform_batch(raw: bytes | bytearray | memoryview | Bytes, settings: KernelSettings) -> KernelBatch:
    """Turn those entries of a run that are the common case into change events.

    Raises nothing for bad bytes: such entries, and all others that are not the common case, are marked ``PLAIN``.
    """
    data = as_bytes(raw)
    starts = _entry_starts(data)
    work = _Job(data, starts, settings)
    while transform.transform(address(work.slots)):
        if work.events.size > _EVENTS_BYTES_MAX:
            # Short entries that make long events: the plain stages give them on as they are made.
            work.kind[int(work[job.INDEX]) :] = PLAIN
            break
        work.grow()
    return work.made()


class Piece(NamedTuple):
    """A part of a transaction: operations of one of its entries.

    ``made``     a batch of that one entry with their events
    ``end``      the number of the operation, in its entry, before which the piece ends
    ``is_last``  whether these were all
    """

    made: KernelBatch
    end: int
    is_last: bool


def transform_operations(
    member: bytes, commit: bytes, settings: KernelSettings, *, index: int, first: int = 0
) -> Piece:
    """The events of the operations of a transaction's entry ``member``, from number ``first`` on and as far as the
    kernel can make them. ``commit`` is the entry that commits the transaction; ``index`` says how many operations it
    has in the entries before ``member``.
    """
    data, committing = as_bytes(member), as_bytes(commit)
    work = _Job(data, _entry_starts(data), settings)
    work[job.COMMIT] = address(committing)
    work[job.INDEX_BASE] = index
    work[job.FIRST] = first
    transform.transform(address(work.slots))
    is_last = bool(work.kind[0] == EVENT)
    work.kind[:] = EVENT
    return Piece(work.made(), int(work[job.POSITION]), is_last)


def _entry_starts(data: Bytes) -> Offsets:
    """Where each document of a run begins, and where the last one ends: addresses."""
    start = address(data)
    # Entries are longer than that, so the bytes are scanned once; if there are more, they are first only counted, and
    # then noted.
    room = data.size // _ENTRY_BYTES + 2
    while True:
        starts = np.empty(room, np.int64)
        count = transform.frame(start, start + data.size, address(starts), room)
        if count < room:
            return starts[: count + 1]
        room = count + 1


class _Job:
    """A job's slots, and the memory that they point to. What was written is copied when its memory grows."""

    def __init__(self, data: Bytes, starts: Offsets, settings: KernelSettings) -> None:
        count = starts.size - 1
        self._data, self._starts = data, starts
        self.kind: Bytes = np.empty(count, np.uint8)
        self.events: Bytes = np.empty(0, np.uint8)
        self._records: Offsets = np.empty((0, event_record.RECORD_SIZE // 8), np.int64)
        times = np.empty(count, np.int64)
        scope = np.frombuffer(settings.scope_bytes + b"\0", np.uint8)
        scratch, places = _scratch(settings)
        self._kept = (times, scope, scratch)
        self.slots: Offsets = np.zeros(job.JOB_SLOTS, np.int64)
        slots = {
            job.ENTRY_STARTS: address(starts),
            job.COUNT: count,
            job.KINDS: address(self.kind),
            job.TIMES: address(times),
            job.RAW: address(data),
            job.SCOPE_KIND: _KINDS[settings.scope.kind],
            job.SCOPE: address(scope),
            job.SCOPE_SIZE: scope.size - 1,
            job.START: as_signed(settings.start),
            job.FLAGS: settings.flags,
            job.FRAGMENTS: address(_TEXT),
            job.ENTRY_TABLE: places["table"],
            job.OPERATION_TABLE: places["operation_table"],
            job.MEMBER_TABLE: places["member_table"],
            job.CHAIN: places["chain"],
            job.WRITER: places["writer"],
            job.STACK: places["stack"],
            job.DELTA: places["delta"],
            job.KEY_STRING: places["key_string"],
            job.KEY_DOCUMENT: places["key_document"],
        }
        for slot, value in slots.items():
            self[slot] = value
        # Only what is written to is ever backed by memory.
        self._place(lend(_GROWTH * data.size + _MARGIN), count + data.size // _OPERATION_BYTES + 1, 0, 0)

    def __getitem__(self, slot: int) -> int:
        return int(self.slots[slot // 8])

    def __setitem__(self, slot: int, value: int) -> None:
        self.slots[slot // 8] = value

    def _place(self, events: Bytes, records_count: int, written: int, made: int) -> None:
        records = lend(records_count * event_record.RECORD_SIZE).view(np.int64).reshape(records_count, -1)
        events[:written] = self.events[:written]
        records[:made] = self._records[:made]
        self.events, self._records = events, records
        self[job.EVENTS] = address(events)
        self[job.EVENT_NEXT] = address(events) + written
        self[job.EVENTS_END] = address(events) + events.size
        self[job.RECORD_NEXT] = address(records) + made * event_record.RECORD_SIZE
        self[job.RECORDS_END] = address(records) + records.nbytes

    def _written(self) -> tuple[int, int]:
        """Bytes of events, and how many events."""
        written = self[job.RECORD_NEXT] - address(self._records)
        return self[job.EVENT_NEXT] - address(self.events), written // event_record.RECORD_SIZE

    def grow(self) -> None:
        """Double the room."""
        self._place(lend(2 * self.events.size), 2 * len(self._records), *self._written())

    def made(self) -> KernelBatch:
        """The events written so far, as a batch that shares these buffers."""
        size, count = self._written()
        starts = self._starts - address(self._data)
        return KernelBatch(self._data, self.kind, starts[:-1], starts[1:], self.events[:size], self._records[:count])


def _scratch(settings: KernelSettings) -> tuple[Bytes, dict[str, int]]:
    """Scratch memory and the address of each of its parts. Untouched pages of it cost nothing."""
    scratch = np.empty(sum(_SCRATCH_PARTS.values()) + 8 * len(_SCRATCH_PARTS), np.uint8)
    places: dict[str, int] = {}
    place = address(scratch)
    for name, size in _SCRATCH_PARTS.items():
        places[name] = place
        place += size + -size % 8
    state = np.frombuffer(scratch, np.int64, delta.DELTA_SIZE // 8, places["delta"] - address(scratch))
    state[delta.TEXT // 8] = address(_TEXT)
    state[delta.AREAS // 8] = places["areas"]
    state[delta.DISAMBIGUATES // 8] = settings.disambiguated_paths
    return scratch, places
