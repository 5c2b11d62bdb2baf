"""The target follows the source: windows of its oplogs, segment after segment, each a transaction with its position.

At each committed position without a barrier the target equals the source at that time, once the position has reached
``hold``: until then the copy may be newer in places, and changes are applied as ones that may already have been
applied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Self

from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from tailrace.act.sync import indexes
from tailrace.act.sync.definitions import TargetDefinitions
from tailrace.act.sync.deltas import DeltaEncoder, takes_deltas
from tailrace.act.sync.fold import ChangeSegment, DocumentChanges, SyncFold
from tailrace.act.sync.folded_catalog import Definition
from tailrace.act.sync.halves import TOO_LARGE, write_in_parts, write_lane
from tailrace.act.sync.index_definitions import Note
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.shard_keys import keys_of
from tailrace.act.sync.sizes import DocumentSizes
from tailrace.act.sync.state import COMMITS_KEPT, Committed, SyncDocument, SyncedCollection, SyncState
from tailrace.act.sync.statements import NO_STATEMENTS, SegmentStatements, segment_statements
from tailrace.act.sync.writer import ANEW, ANEW_WHOLE, NAMES_SINCE, ChangesWriter, OtherWayError
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import SinkError, UsageError
from tailrace.read.source.topology import Cluster
from tailrace.read.window.oplogs import Oplogs, OplogWindow
from tailrace.read.window.read_ahead import ReadAhead

_POLL_S: Final = 0.05
#: Seconds after which the last position is noted with the target's time, if nothing else is written.
_FLUSH_S: Final = 1.0
#: Changes of a segment: at first, at least, at most; it grows while a segment's documents are so small, and shrinks
#: when they are so large or the transaction took so long. The server ends one after a minute.
_FIRST, _LEAST, _MOST = 256, 8, 8_000
_SMALL_BYTES, _LARGE_BYTES = 8 << 20, 48 << 20
_SLOW_S: Final = 15.0
#: Seconds for which the shard keys of a target that is a cluster are believed: somebody may shard a collection.
_KEYS_S: Final = 5.0
_CAPPED: Final = ("write", "capped collections")
WHAT: Final = "the collections of the sync"

_log = logging.getLogger("tailrace.sync")

_PreparedStep = tuple[ChangeSegment | Definition, SegmentStatements]


def open_oplogs(
    client: MongoClient[Any], cluster: Cluster | None, document: SyncDocument | None, stopped: threading.Event
) -> Oplogs:
    """The source's oplogs. Raises OtherHistoryError if they are not those that the sync was read from."""
    members = {} if document is None else document.members
    witness = None if document is None else document.witness
    return Oplogs(client, cluster, members, stopped, witness=witness, what=WHAT, anew=ANEW)


class Follower:
    """Brings the target on. Not for several threads at a time; ``stop`` from any.

    ``changes``      how many were written by this process; ``definitions`` carried out
    ``time``         the position
    """

    def __init__(
        self,
        oplogs: Oplogs,
        state: SyncState,
        ownership: SyncOwnership,
        settings: SyncSettings,
        *,
        stopped: threading.Event | None = None,
    ) -> None:
        self._oplogs = oplogs
        self._state = state
        self._settings = settings
        self._ownership = ownership
        self._stopped = stopped or threading.Event()
        self._definitions = TargetDefinitions(state, ownership)
        self._encoder = DeltaEncoder(
            takes_names=self._definitions.version >= NAMES_SINCE,
            takes_deltas=state.cluster is None and takes_deltas(state.client, state.database),
        )
        self._sizes = DocumentSizes(state.client)
        #: Collections where a unique index was in the way: least often it is of changes in the order of their times.
        self._in_time: set[bytes] = set()
        self._most = _FIRST
        self._uncommitted: Committed | None = None
        self._flushed = time.monotonic()
        self.changes = self.definitions = 0
        #: What is being carried out now, for who shows progress.
        self.blocking: str | None = None
        self._load()

    def _load(self) -> None:
        """Go on from what the target says."""
        document = self._state.read()
        if document is None:
            raise UsageError(f"there is no sync {self._state.name!r} on the target")
        #: As of the segment that is written; what comes after it is read meanwhile.
        self.collections: Mapping[bytes, SyncedCollection] = self._state.collections()
        self._gone = self._state.gone() if isinstance(self._oplogs.deployment, Cluster) else None
        self.time, self.hold, self.phase = document.time, document.hold, document.phase
        self._batch, self._witness = document.batch, document.witness
        self._barrier = document.barrier is not None
        self._keys, self._keys_read = _keys(self._state, self._definitions), time.monotonic()
        #: Whether changes of capped collections may have been written after the position.
        self._capped_begun = (
            document.barrier is not None and (document.barrier["command"], document.barrier["namespace"]) == _CAPPED
        )
        self._loaded = True

    def stop(self) -> None:
        """End after the segment that is being written."""
        self._stopped.set()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Note the last position with the target's time, for comparisons of both ends."""
        if kind is None:
            self._flush(at_once=True)

    @property
    def is_consistent(self) -> bool:
        """Whether the target equals the source at ``time``."""
        return self.phase == "follow" and not self._barrier and self.time >= self.hold

    # -- following --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Follow until ``stop``. Raises TailraceError."""
        while not self._stopped.is_set():
            if not self.step():
                self._stopped.wait(_POLL_S)

    def run_until(self, until: ClusterTime) -> ClusterTime:
        """Bring the target to ``until`` at least. Returns the position, which is earlier only after ``stop``."""
        while not self._stopped.is_set() and self.time < max(until, self.hold):
            if not self.step(at_once=True, at_least=max(until, self.hold)):
                self._stopped.wait(_POLL_S)
        return self.time

    def step(self, *, at_once: bool = False, at_least: ClusterTime = ZERO, max_wait_s: float = 0.0) -> bool:
        """Write one window, if there is anything in one; waits for it so long. ``at_once``, ``at_least``: as of
        ``Oplogs.window``."""
        end = time.monotonic() + max_wait_s
        while not (did := self._step(at_once=at_once, at_least=at_least)):
            if self._stopped.is_set() or time.monotonic() >= end:
                break
            self._stopped.wait(_POLL_S)
        return did

    def _step(self, *, at_once: bool, at_least: ClusterTime) -> bool:
        if not self._loaded:
            self._load()
        self._ownership.check()
        self._look_at_hold()
        hold = self.hold if self.time < self.hold else ZERO
        window = self._oplogs.window(self.time, at_once=at_once, at_least=max(at_least, hold))
        if window is None:
            self._flush()
            return False
        self._loaded = False
        self._write(window)
        self._loaded = True
        return True

    def _write(self, window: OplogWindow) -> None:
        if time.monotonic() - self._keys_read > _KEYS_S:
            self._keys, self._keys_read = _keys(self._state, self._definitions), time.monotonic()
        fold = SyncFold(self._settings, self.collections, self._most, gone=self._gone, size_of=self._sizes)
        notes: list[Note] = []
        with _StepsAhead(self, fold, window) as ahead:
            for step, made in ahead:
                if isinstance(step, Definition):
                    notes += self._define(step)
                    continue
                self.collections = fold.collections
                fold.most = self._most
                ahead.begin()
                if step.until > self.time or step.changes or notes or self._barrier:
                    self._segment(step, notes, window, made)
                notes = []
                if self._stopped.is_set():
                    self._oplogs.close()
                    break

    def _look_at_hold(self) -> None:
        """Once the target equals the source for the first time, unique indexes can be built; they are never left out
        again."""
        if self.phase == "follow" or self._barrier or self.time < self.hold:
            return
        self.blocking = "indexes"
        indexes.build_waiting(self._state, self._ownership)
        self._ownership.run(lambda session: None, sets={"phase": "follow"}, what="note that the target is equal")
        self.blocking, self.phase = None, "follow"
        self._uncommitted, self._flushed = Committed(self.time, self._ownership.committed_at), time.monotonic()

    # -- definitions ------------------------------------------------------------------------------------------------

    def _define(self, definition: Definition) -> list[Note]:
        name = definition.name.decode("latin-1")
        collection = definition.before or definition.after
        self._block(definition.time, name, "" if collection is None else collection.namespace)
        notes = self._definitions.carry_out(definition, consistent=self.phase == "follow")
        self.definitions += 1
        if not notes or not self._definitions.notes_at_once:
            return notes

        def body(session: ClientSession) -> None:
            for note in notes:
                note(session)

        self._ownership.run(body, what="note what was defined")
        return []

    def _block(self, at: ClusterTime, command: str, namespace: str) -> None:
        """Note that the target is between two positions. The next position takes that back."""
        self.blocking = f"{command} {namespace}".strip()
        barrier = {"time": at.to_timestamp(), "command": command, "namespace": namespace}
        self._ownership.run(lambda session: None, sets={"barrier": barrier}, what="note a definition")
        self._barrier = True

    # -- segments ---------------------------------------------------------------------------------------------------

    def _segment(self, segment: ChangeSegment, notes: list[Note], window: OplogWindow, made: SegmentStatements) -> None:
        begun = time.monotonic()
        if segment.capped:
            again = self._capped_begun
            self._block(segment.until, *_CAPPED)
            self._capped_begun = True
            self._definitions.capped.write(segment.capped, self.collections, again=again)
        tolerant = self.time < self.hold
        if len(segment.documents) > 1 and self._ownership.lanes > 2:
            documents, tolerant = self._in_lanes(segment, tolerant=tolerant), True
        else:
            documents = segment.documents
        writer = self._writer()
        ways: dict[bytes, int] = {}
        sets = self._position(segment, window)

        def body(session: ClientSession) -> None:
            for note in notes:
                note(session)
            writer.write(session, documents, self.collections, tolerant=tolerant, ways=ways, made=made)

        while True:
            try:
                self._ownership.run(body, sets=sets, what="write changes")
                break
            except OtherWayError as error:
                _log.debug("written another way: %s", error)
                ways[error.uuid] = error.way
                if error.way == ANEW_WHOLE:
                    self._in_time.add(error.uuid)
            except SinkError as error:
                if error.code != TOO_LARGE or len(documents) < 2:
                    raise
                self._hold_to(segment.until)
                write_in_parts(documents, self._write_part, error)
                self.hold, documents, tolerant = max(self.hold, segment.until), [], True
        self._committed(segment)
        self._look_at_hold()
        self._most = _adapted(self._most, segment.changes, writer.written_bytes, time.monotonic() - begun)

    def _writer(self) -> ChangesWriter:
        return ChangesWriter(self._state.client, self.hold, self._definitions.version, self._encoder, self._keys)

    def _position(self, segment: ChangeSegment, window: OplogWindow) -> dict[str, Any]:
        """What the sync's document says with the segment."""
        sets: dict[str, Any] = {
            "time": segment.until.to_timestamp(),
            "batch": Int64(self._batch + 1),
            "barrier": None,
            **self._commits(),
        }
        if segment.until == window.until:
            self._witness = self._oplogs.witness(self._witness, window.marks)
            sets["witness"] = self._witness.to_document()
            sets["members"] = [{"name": name, "host": host} for name, host in self._oplogs.members.items()]
        return sets

    def _commits(self) -> dict[str, Any]:
        """The position before, with the target's time right after it."""
        if self._uncommitted is None:
            return {}
        one = {"time": self._uncommitted.time.to_timestamp(), "at": self._uncommitted.at.to_timestamp()}
        return {"$push": {"commits": {"$each": [one], "$slice": -COMMITS_KEPT}}}

    def _committed(self, segment: ChangeSegment) -> None:
        self.time, self._barrier, self.blocking = segment.until, False, None
        self._capped_begun = False
        self._batch += 1
        self.changes += segment.changes
        # While lanes that were cut off may have written what comes later, the target equals the source at no position.
        reached = self.time >= self.hold
        self._uncommitted = Committed(segment.until, self._ownership.committed_at) if reached else None
        self._flushed = time.monotonic()

    def _flush(self, *, at_once: bool = False) -> None:
        """Note the last position's time on the target, if nothing is written that could take it along."""
        if self._uncommitted is not None and (at_once or time.monotonic() - self._flushed > _FLUSH_S):
            self._ownership.run(lambda session: None, sets=self._commits(), what="note a position")
            self._uncommitted = None

    # -- lanes ------------------------------------------------------------------------------------------------------

    def _in_lanes(self, segment: ChangeSegment, *, tolerant: bool) -> list[DocumentChanges]:
        """Write a segment by several transactions at once. Before, ``hold`` goes to its end: until the position is
        there, the target may be newer in places. Returns what is left for the last transaction."""
        self._hold_to(segment.until)
        count = self._ownership.lanes - 1
        parts: list[list[DocumentChanges]] = [[] for _ in range(count)]
        for one in segment.documents:
            parts[_lane(one, count)].append(one)
        failed: list[DocumentChanges] = []
        threads = [
            CheckedThread(
                partial(self._write_lane, lane, part, failed, tolerant=tolerant),
                "tailrace-sync-lane",
                failed=lambda error: None,
            )
            for lane, part in enumerate(parts, 1)
            if part
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for thread in threads:
            thread.check()
        self.hold = max(self.hold, segment.until)
        return segment.documents if failed else []

    def _hold_to(self, until: ClusterTime) -> None:
        """Note that the target may be newer in places, up to a time."""
        if until > self.hold:
            self._ownership.run(lambda _: None, sets={"hold": until.to_timestamp()}, what="note what it may hold")

    def _write_part(
        self, documents: Sequence[DocumentChanges], ways: Mapping[bytes, int], lane: int = 0, *, tolerant: bool = True
    ) -> None:
        writer = self._writer()

        def body(session: ClientSession) -> None:
            writer.write(session, documents, self.collections, tolerant=tolerant, ways=ways)

        self._ownership.run(body, lane=lane, what="write changes")

    def _write_lane(
        self, lane: int, documents: list[DocumentChanges], failed: list[DocumentChanges], *, tolerant: bool
    ) -> None:
        whole, parts = (partial(self._write_part, lane=lane, tolerant=one) for one in (tolerant, True))
        if not write_lane(documents, whole, parts):
            failed += documents  # another lane has to be first: all is written in one transaction instead


class _StepsAhead:
    """The steps of a window, with their statements. ``begin``: find the next one in a thread, while this one is carried
    out."""

    def __init__(self, follower: Follower, fold: SyncFold, window: OplogWindow) -> None:
        self._follower = follower
        self._steps = fold.steps(window)
        self._ahead: ReadAhead[_PreparedStep | None] | None = None

    def begin(self) -> None:
        self._ahead = ReadAhead(self._next, lambda: None)

    def _next(self) -> _PreparedStep | None:
        step = next(self._steps, None)
        if step is None:
            return None
        return step, NO_STATEMENTS if isinstance(step, Definition) else self._statements(step)

    def _statements(self, segment: ChangeSegment) -> SegmentStatements:
        """The statements of a segment, where they are written without a look at the target's documents."""
        to = self._follower
        if to.time < to.hold or to._keys or to._ownership.lanes > 2:
            return NO_STATEMENTS
        return segment_statements(segment.documents, to._encoder, to._in_time)

    def __iter__(self) -> Iterator[_PreparedStep]:
        while True:
            ahead, self._ahead = self._ahead, None
            step = self._next() if ahead is None else ahead.result()
            if step is None:
                return
            yield step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ahead is not None:
            self._ahead.give_up()


def _keys(state: SyncState, definitions: TargetDefinitions) -> dict[bytes, dict[str, Any]]:
    """The shard keys of the target's collections, by the UUIDs that this process knows them by."""
    if state.cluster is None:
        return {}
    keys = keys_of(state.cluster)
    return keys | {before: keys[there] for before, there in definitions.chosen.items() if there in keys}


def _adapted(most: int, changes: int, size: int, seconds: float) -> int:
    """How many changes the next segment may have, from the changes, bytes and duration of the last one."""
    if size > _LARGE_BYTES or seconds > _SLOW_S:
        return max(_LEAST, most // 2)
    return min(_MOST, most * 2) if changes >= most and size < _SMALL_BYTES else most


def _lane(one: DocumentChanges, count: int) -> int:
    return int.from_bytes(blake2b(one.uuid + one.key, digest_size=4).digest()) % count
