"""Copying the existing documents, in chunks that a crash may come between: the one reader for listeners, Spark and the
lake."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SourceError, UsageError
from tailrace.read.snapshot.beginning import beginning
from tailrace.read.snapshot.chunk import ChunkRead, ChunkReader, not_given
from tailrace.read.snapshot.event import snapshot_event
from tailrace.read.snapshot.places import ClusterPlaces, Found, Placement, Places, ReplicaSetPlaces
from tailrace.read.snapshot.state import CollectionCopy, KeyRange, SnapshotState, key_ranges
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import (
    check_witness,
    compared_oplogs,
    identity_if_allowed,
    newest_marks,
    oplogs_of,
    witness_of,
)

#: How many documents, at most, a chunk holds, and about how many bytes.
CHUNK_DOCUMENTS: Final = 2_000
CHUNK_BYTES: Final = 4 << 20
#: The size of a collection's first chunk: nothing is known of its documents yet.
_FIRST_CHUNK: Final = 100
#: How often, at most, the state learns of a newer entry: two reads of each oplog added to those of a second's chunks.
_MARK_S: Final = 1.0
#: How often the name of a collection may go to another one while it is copied.
_TRIES: Final = 20
_PAUSE_S: Final = 0.02
_PAUSE_MAX_S: Final = 0.2

_log = logging.getLogger("tailrace.snapshot")


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Documents of one collection. ``copied`` and ``number`` say which range they are of, ``to`` where it goes on.

    ``namespace``  what the collection was called when the snapshot began: so the stream calls it until it shows a
                   rename
    ``in_order``   whether the documents come in the order of the index: those of several shards do not
    """

    collection: int
    number: int
    to: bytes
    namespace: str
    uuid: bytes
    documents: Sequence[bytes]
    start: ClusterTime
    key: Mapping[str, Any] | None
    in_order: bool = True

    def events(self, position: int = 0) -> Iterator[bytes]:
        """The event of each document (``snapshot_event``)."""
        for document in self.documents:
            yield snapshot_event(document, self.namespace, self.uuid, self.start, self.key, position=position)


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """Documents copied, about how many there are, and about how many seconds the rest takes (``None``: not known)."""

    documents: int
    estimate: int
    seconds_left: float | None

    def __str__(self) -> str:
        share = 100.0 if not self.estimate else min(100.0, 100.0 * self.documents / self.estimate)
        left = "" if self.seconds_left is None else f", about {self.seconds_left:.0f} s left"
        return f"{self.documents:,} of about {self.estimate:,} documents ({share:.0f} %){left}"


class SnapshotReader:
    """Every document of a scope that was there at ``state.start``, in chunks; a document that changes meanwhile is seen
    as it was or as it is. A stream that starts at ``state.start`` shows every change since, so that the two together
    miss nothing, and may show a document twice.

    ``client``   of the replica set, or the cluster
    ``state``    goes on where another reader was (``SnapshotState.from_document``)
    ``ranges``   how many ranges a collection is cut into, each of which can be read apart from the others
    ``parallel``  how many ranges are read at a time
    ``documents_per_second``  no more than that are read
    ``stopped``  asked between chunks: true ends the iteration

    Iterating gives chunks; ``done(chunk)`` says that a chunk has arrived, and only then ``state`` moves on. What is
    not reported as done is read again when the copy continues from the state. Raises SourceError and ServerError 166.
    """

    def __init__(
        self,
        client: MongoClient[Any] | Cluster,
        scope: Scope,
        *,
        state: SnapshotState | None = None,
        ranges: int | None = None,
        parallel: int = 1,
        chunk_documents: int = CHUNK_DOCUMENTS,
        documents_per_second: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        if parallel < 1 or chunk_documents < 1 or (documents_per_second is not None and documents_per_second <= 0):
            raise UsageError("parallel, chunk_documents and documents_per_second must be larger than 0")
        self._client = client
        self._retry_seconds = retry_seconds
        self._parallel = parallel
        self._chunk_documents = chunk_documents
        self._throttle = Throttle(documents_per_second)
        self._stopped = stopped
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._read = 0
        self._marked = -math.inf if state is not None else time.monotonic()
        self._state = state or begin(client, scope, ranges=ranges or parallel, retry_seconds=retry_seconds)
        if self._state.scope != scope:
            raise UsageError(
                f"the state is of a snapshot of {self._state.scope}, not of {scope}", hint="Begin a new snapshot"
            )
        if state is not None:
            check_origin(client, state)

    @property
    def state(self) -> SnapshotState:
        """How far everything has come that was said to be done."""
        return self._state

    @property
    def progress(self) -> SnapshotProgress:
        """How much is copied, and how long the rest takes at the pace so far."""
        copied = sum(one.documents for one in self._state.collections)
        known = sum(
            one.documents if one.outcome else max(one.estimate, one.documents) for one in self._state.collections
        )
        elapsed = time.monotonic() - self._begun
        left = None if not self._read else elapsed / self._read * (known - copied)
        return SnapshotProgress(copied, known, left)

    def done(self, chunk: SnapshotChunk) -> SnapshotState:
        """The chunk has arrived for good: the state after it."""
        with self._lock:
            collection = self._state.collections[chunk.collection]
            if collection.uuid == chunk.uuid and collection.outcome is None:
                self._read += len(chunk.documents)
                moved = collection.advanced(chunk.number, chunk.to, len(chunk.documents))
                self._replace(chunk.collection, moved)
            return self._state

    def __iter__(self) -> Iterator[SnapshotChunk]:
        for index, collection in enumerate(self._state.collections):
            uuid = None
            while (now := self._state.collections[index]).outcome is None and now.uuid != uuid and not self._stopped():
                uuid = now.uuid
                yield from self._collection(index)
            if self._state.collections[index].outcome == "dropped" and collection.outcome is None:
                _log.warning("%s was dropped before all of it was copied", collection.namespace)

    def _collection(self, index: int) -> Iterator[SnapshotChunk]:
        """The chunks of one collection until it is copied, gone, or another one has its name."""
        copy = self._state.collections[index]
        left = [number for number, one in enumerate(copy.ranges) if not one.done]
        if self._parallel == 1 or len(left) < 2:
            worker = self._worker()
            for number in left:
                for chunk in worker.chunks(index, number, copy):
                    self._mark()
                    yield chunk
                    if self._state.collections[index].uuid != copy.uuid:
                        return
        else:
            for chunk in _in_threads(self._parallel, self._worker, index, left, copy):
                self._mark()
                yield chunk
        self._settle(index, copy)

    def _worker(self) -> _Worker:
        places = places_of(self._client, self._retry_seconds)
        reader = ChunkReader(retry_seconds=self._retry_seconds)
        return _Worker(
            places,
            reader,
            start=self._state.start,
            throttle=self._throttle,
            chunk_documents=self._chunk_documents,
            stopped=self._stopped,
            retry_seconds=self._retry_seconds,
        )

    def _settle(self, index: int, copy: CollectionCopy) -> None:
        """After the last chunk: was the collection there to the end?"""
        if self._stopped() or self._state.collections[index].outcome is not None:
            return
        places = places_of(self._client, self._retry_seconds)
        database = copy.namespace.partition(".")[0]
        if places.placement(copy.uuid, database) is not None:
            return
        successor = places.named(copy.namespace)
        with self._lock:
            if successor is None or successor.uuid == copy.uuid:
                self._replace(index, self._state.collections[index].ended("dropped"))
                return
            if copy.restarts >= _TRIES:
                raise SourceError(
                    f"{copy.namespace} was replaced by another collection {copy.restarts} times while it was copied",
                    hint="Begin a snapshot when the collection is no longer being replaced",
                )
            _log.warning("%s is another collection now: it is copied from its beginning", copy.namespace)
            self._replace(index, replace(copy, uuid=successor.uuid, ranges=key_ranges(()), restarts=copy.restarts + 1))

    def _mark(self) -> None:
        """Let the state know an entry that is no older than what was read last. The entry of the copy's beginning stays
        where it was when the deployment is restored from a backup that was made in the middle of the copy."""
        witness = self._state.witness
        if witness is None or time.monotonic() - self._marked < _MARK_S:
            return
        entries = newest_marks(oplogs_of(self._client))
        with self._lock:
            self._state = replace(self._state, witness=replace(witness, entries={**witness.entries, **entries}))
        self._marked = time.monotonic()

    def _replace(self, index: int, collection: CollectionCopy) -> None:
        self._state = self._state.having(index, collection)


def places_of(client: MongoClient[Any] | Cluster, retry_seconds: float) -> Places:
    """The places of a deployment, for one thread."""
    if isinstance(client, Cluster):
        return ClusterPlaces(client, retry_seconds=retry_seconds)
    return ReplicaSetPlaces(client, retry_seconds=retry_seconds)


def range_reader(
    client: MongoClient[Any] | Cluster,
    start: ClusterTime,
    *,
    whole: bool = False,
    retry_seconds: float = RETRY_SECONDS,
) -> Callable[[str, bytes, KeyRange], Iterator[SnapshotChunk]]:
    """Reads ranges of ``_id`` that others have planned, each in chunks, for one thread: the collection's namespace and
    UUID, and the range. Fewer chunks come if the collection is gone. ``whole``: each range is small enough to be one
    chunk, and comes in several only if chunks of the collection move meanwhile."""
    worker = _Worker(
        places_of(client, retry_seconds),
        ChunkReader(retry_seconds=retry_seconds),
        start=start,
        throttle=Throttle(None),
        chunk_documents=CHUNK_DOCUMENTS,
        stopped=lambda: False,
        retry_seconds=retry_seconds,
        whole=whole,
    )

    def read(namespace: str, uuid: bytes, wanted: KeyRange) -> Iterator[SnapshotChunk]:
        return worker.chunks(0, 0, CollectionCopy(namespace, uuid, (wanted,)))

    return read


def begin(
    client: MongoClient[Any] | Cluster,
    scope: Scope,
    *,
    selection: Selection | None = None,
    ranges: int = 1,
    retry_seconds: float = RETRY_SECONDS,
) -> SnapshotState:
    """The state of a snapshot of which nothing is copied yet, of those collections in the scope that are selected. Its
    time is taken first: a collection that is made later is in the stream from its beginning."""
    scope.check_names()
    places = places_of(client, retry_seconds)
    witness = witness_of(client, oplogs_of(client))
    start, chosen = beginning(client, places, partial(_chosen, places, scope, selection))
    reader = ChunkReader(retry_seconds=retry_seconds)
    copies = []
    for found in chosen:
        placement = places.placement(found.uuid, found.namespace.partition(".")[0])
        if placement is None:
            continue  # dropped a moment ago, as the stream will show
        bounds = reader.ranges(placement, ranges)
        copies.append(CollectionCopy(found.namespace, found.uuid, key_ranges(bounds), reader.estimate(placement)))
    return SnapshotState(scope, start, tuple(copies), witness)


def check_origin(client: MongoClient[Any] | Cluster, state: SnapshotState) -> None:
    """Raise OtherHistoryError where a snapshot that is to go on was begun on another deployment, or in a history that
    this one no longer has. A state of an earlier version does not tell."""
    if state.witness is not None:
        check_witness(
            state.witness,
            identity_if_allowed(client),
            compared_oplogs(client, entries, oplogs_of(client)) if (entries := state.witness.entries) else {},
            what=f"the documents of the snapshot of {state.start}",
            hint="Connect to the deployment that the snapshot was begun on, or begin it again here",
        )


def _chosen(places: Places, scope: Scope, selection: Selection | None) -> list[Found]:
    if selection is None:
        return places.collections(scope)
    found = {one.namespace: one for scope in selection.scopes for one in places.collections(scope, selection)}
    return [found[name] for name in sorted(found)]


class _Worker:
    """Reads ranges, one after another, in one thread. ``whole``: a range is small enough to be one chunk."""

    def __init__(
        self,
        places: Places,
        reader: ChunkReader,
        *,
        start: ClusterTime,
        throttle: Throttle,
        chunk_documents: int,
        stopped: Callable[[], bool],
        retry_seconds: float,
        whole: bool = False,
    ) -> None:
        self._retry_seconds = retry_seconds
        self._whole = whole
        self._places = places
        self._reader = reader
        self._start = start
        self._throttle = throttle
        self._chunk_documents = chunk_documents
        self._stopped = stopped

    def chunks(self, index: int, number: int, copy: CollectionCopy) -> Iterator[SnapshotChunk]:
        """The chunks of range ``number``; fewer where the collection is gone."""
        wanted = copy.ranges[number]
        size = None if self._whole else min(_FIRST_CHUNK, self._chunk_documents)
        placement: Placement | None = None
        while not wanted.done and not self._stopped():
            found, placement = self._settled(copy, wanted, size, placement)
            if found is None or placement is None:
                return
            found = not_given(found, wanted.behind)
            if not self._whole:
                self._throttle.spend(len(found.documents), self._stopped)
            yield SnapshotChunk(
                index,
                number,
                found.to,
                copy.namespace,
                copy.uuid,
                found.documents,
                self._start,
                placement.key,
                len(placement.members) < 2,
            )
            wanted = replace(wanted, at=found.to, done=found.to == wanted.to)
            if not self._whole and found.documents:
                average = sum(map(len, found.documents)) / len(found.documents)
                size = max(1, min(self._chunk_documents, int(CHUNK_BYTES / average)))

    def _settled(
        self, copy: CollectionCopy, wanted: KeyRange, size: int | None, placement: Placement | None
    ) -> tuple[ChunkRead | None, Placement | None]:
        """The chunk, read while the collection stayed where it was."""
        database = copy.namespace.partition(".")[0]
        placement = placement or self._places.placement(copy.uuid, database)
        deadline = time.monotonic() + self._retry_seconds
        for attempt in count():
            if placement is None:
                return None, None
            found = self._reader.read(placement, wanted, self._start, size)
            now = self._places.placement(copy.uuid, database)
            if now == placement:
                return found, placement
            if time.monotonic() > deadline or self._stopped():
                break
            placement = now
            size = (
                self._chunk_documents if size is None else max(1, size // 2)
            )  # what takes less time is less often in the way of a move
            time.sleep(min(_PAUSE_S * attempt, _PAUSE_MAX_S))
        raise SourceError(
            f"{copy.namespace} moved whenever a chunk of it was copied, for {self._retry_seconds:.0f} s",
            hint="Continue the snapshot when the balancer has finished",
        )


class Throttle:
    """At most this many documents a second, over all threads; ``None``: no limit."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, documents: int, stopped: Callable[[], bool]) -> None:
        """Wait until these documents fit."""
        if self._per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + documents / self._per_second
            until = self._free_at
        while (left := until - time.monotonic()) > 0 and not stopped():
            time.sleep(min(left, 0.2))


def _in_threads(
    parallel: int, worker: Callable[[], _Worker], index: int, numbers: list[int], copy: CollectionCopy
) -> Iterator[SnapshotChunk]:
    """The chunks of several ranges as they come, those of one range in order. At most ``parallel`` wait."""
    results: queue.Queue[SnapshotChunk | BaseException | None] = queue.Queue(parallel)
    over = threading.Event()

    def put(result: SnapshotChunk | BaseException | None) -> None:
        while not over.is_set():
            try:
                results.put(result, timeout=0.1)
            except queue.Full:
                continue
            return

    def read(number: int) -> None:
        try:
            for chunk in worker().chunks(index, number, copy):
                put(chunk)
                if over.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - the reader's thread raises it
            put(error)

    with ThreadPoolExecutor(parallel, thread_name_prefix="tailrace-snapshot") as pool:
        try:
            for number in numbers:
                pool.submit(read, number)
            left = len(numbers)
            while left:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    left -= 1
                else:
                    yield result
        finally:
            over.set()
            pool.shutdown(wait=True, cancel_futures=True)
