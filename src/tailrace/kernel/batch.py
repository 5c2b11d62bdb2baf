"""The Python side of the kernel: settings in, numpy arrays out. Imported by ``tailrace.kernel`` on first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tailrace.errors import UsageError
from tailrace.kernel import delta, fragments, key_string, oplog_entry, transform
from tailrace.kernel.namespace import CLUSTER, COLLECTION, DATABASE
from tailrace.oplog.cluster_time import ZERO, ClusterTime
from tailrace.oplog.namespace import Scope

Bytes: TypeAlias = npt.NDArray[np.uint8]
Offsets: TypeAlias = npt.NDArray[np.int64]

SKIPPED = transform.SKIPPED
EVENT = transform.EVENT
PLAIN = transform.PLAIN

#: Room for the last event to be written and the fixed parts of the first ones; the buffer grows when it is not enough.
_MARGIN = 1 << 16
#: The buffer for a batch's events is not made larger than twice this; of 16 MB of oplog the events are 60 MB at most
#: where none of them is much longer than its entry.
_EVENTS_BYTES_MAX = 128 << 20
_SCRATCH_PARTS = {
    "table": oplog_entry.TABLE_SIZE,
    "writer": key_string.WRITER_SIZE,
    "stack": key_string.STACK_SIZE,
    "delta": delta.DELTA_SIZE,
    "key_string": transform.KEY_STRING_MAX,
    "key_document": transform.KEY_DOCUMENT_MAX,
    "areas": delta.AREAS_SIZE,
}
_KINDS = {"cluster": CLUSTER, "database": DATABASE, "collection": COLLECTION}
_TEXT = np.frombuffer(fragments.TEXT, np.uint8)


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """What the stream shows. Entries before ``start`` are skipped; ``token_version`` is 1 or 2; ``wall_time``: events
    carry it (6.0 and later); ``collection_uuid``: showExpandedEvents; ``raw_updates``: showRawUpdateDescription;
    ``disambiguated_paths``: showExpandedEvents from 6.1 on."""

    scope: Scope
    start: ClusterTime = ZERO
    token_version: int = 1
    wall_time: bool = True
    collection_uuid: bool = False
    raw_updates: bool = False
    disambiguated_paths: bool = False

    @property
    def flags(self) -> int:
        if self.token_version not in (1, 2):
            raise UsageError(f"the kernel writes resume tokens of version 1 and 2, not {self.token_version}")
        chosen = transform.VERSION_2 if self.token_version == 2 else 0
        chosen |= transform.WITH_WALL_TIME if self.wall_time else 0
        chosen |= transform.WITH_COLLECTION_UUID if self.collection_uuid else 0
        return chosen | (transform.RAW_UPDATES if self.raw_updates else 0)

    @property
    def scope_bytes(self) -> bytes:
        """What an entry's namespace is compared with: all of it, or its beginning."""
        if self.scope.kind == "collection":
            return f"{self.scope.database}.{self.scope.collection}".encode()
        return b"" if self.scope.kind == "cluster" else f"{self.scope.database}.".encode()


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """What became of each entry of a batch; see ``tailrace.kernel``."""

    raw: Bytes
    kind: Bytes
    entry_start: Offsets
    entry_end: Offsets
    events: Bytes
    event_start: Offsets

    def entry(self, index: int) -> bytes:
        """The BSON of entry ``index``."""
        return self.raw[self.entry_start[index] : self.entry_end[index]].tobytes()

    @property
    def offsets(self) -> Offsets:
        """The offsets of the events alone, without places for the other entries: what ``locate`` takes."""
        return np.append(self.event_start[:-1][self.kind == EVENT], self.event_start[-1])

    def event(self, index: int) -> bytes:
        """The event made of entry ``index``; empty unless its kind is ``EVENT``."""
        return self.events[self.event_start[index] : self.event_start[index + 1]].tobytes()


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
    """Turn a run of oplog entries into change events where they are the common case.

    Raises nothing for bad bytes: such entries, and all others that are not the common case, are marked ``PLAIN``.
    """
    data = as_bytes(raw)
    start = address(data)
    count = transform.frame(start, start + data.size, 0)
    starts = np.empty(count + 1, np.int64)
    transform.frame(start, start + data.size, address(starts))
    kind = np.empty(count, np.uint8)
    event_start = np.empty(count + 1, np.int64)
    scope = np.frombuffer(settings.scope_bytes + b"\0", np.uint8)
    scratch, places = _scratch(settings)
    job = np.zeros(transform.JOB_SLOTS, np.int64)
    events = np.empty(2 * data.size + _MARGIN, np.uint8)
    slots = {
        transform.ENTRY_STARTS: address(starts),
        transform.COUNT: count,
        transform.KINDS: address(kind),
        transform.EVENT_STARTS: address(event_start),
        transform.SCOPE_KIND: _KINDS[settings.scope.kind],
        transform.SCOPE: address(scope),
        transform.SCOPE_SIZE: scope.size - 1,
        transform.START: as_signed(settings.start),
        transform.FLAGS: settings.flags,
        transform.FRAGMENTS: address(_TEXT),
        transform.TABLE: places["table"],
        transform.WRITER: places["writer"],
        transform.STACK: places["stack"],
        transform.DELTA: places["delta"],
        transform.KEY_STRING: places["key_string"],
        transform.KEY_DOCUMENT: places["key_document"],
        transform.EVENTS: address(events),
        transform.EVENT_NEXT: address(events),
        transform.EVENTS_END: address(events) + events.size,
    }
    for slot, value in slots.items():
        job[slot // 8] = value
    while transform.transform(address(job)):
        if events.size > _EVENTS_BYTES_MAX:
            # Short entries that make long events: the plain stages give them on as they are made.
            index, place = int(job[transform.INDEX // 8]), int(job[transform.EVENT_NEXT // 8])
            kind[index:], event_start[index:] = PLAIN, place - address(events)
            break
        events = _grown(events, job)
    del scratch
    written = int(job[transform.EVENT_NEXT // 8]) - address(events)
    starts -= start
    return KernelBatch(data, kind, starts[:-1], starts[1:], events[:written], event_start)


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


def _grown(events: Bytes, job: Offsets) -> Bytes:
    """A larger event buffer with what is written so far, put into the job."""
    written = int(job[transform.EVENT_NEXT // 8]) - address(events)
    larger = np.empty(2 * events.size, np.uint8)
    larger[:written] = events[:written]
    job[transform.EVENTS // 8] = address(larger)
    job[transform.EVENT_NEXT // 8] = address(larger) + written
    job[transform.EVENTS_END // 8] = address(larger) + larger.size
    return larger
