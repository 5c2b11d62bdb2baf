"""The copy: every document of the source onto the target, in ranges of ``_id``, several at a time.

A chunk of documents and the bound up to which its range is copied are written in one transaction, which the owner's
epoch fences. So a process may die at any moment: its successor reads the bounds and misses nothing, and a late
transaction of an old owner does nothing. Documents are not decoded: what came from the source as one piece of memory
goes to the target as one.

A document is read as it was at the beginning or as it is now. The follower makes it what it was at one time: it applies
the changes since the beginning, and is tolerant up to ``hold``, the time when the copy ended.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from bson.binary import Binary
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from tailrace.act.sync import indexes
from tailrace.act.sync.at_rest import catalog_at_rest
from tailrace.act.sync.capped import CappedCopy
from tailrace.act.sync.catalog import (
    CLUSTERED,
    CatalogCollection,
    DeploymentCatalog,
    OnSource,
    OnTarget,
    name_of,
    read_catalog,
    version_of,
)
from tailrace.act.sync.inserting import Inserter, pieces_of
from tailrace.act.sync.ownership import SyncOwnership
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.shard_keys import chosen_key, keys_of, refused_key, source_keys
from tailrace.act.sync.state import SyncDocument, SyncedCollection, SyncState
from tailrace.act.sync.target import answered
from tailrace.act.sync.undamaged import typed, undamaged
from tailrace.errors import SinkError
from tailrace.read.snapshot.chunk import ChunkReader, id_alone
from tailrace.read.snapshot.documents import RunOfDocuments
from tailrace.read.snapshot.reader import SnapshotChunk, Throttle, places_of, range_reader
from tailrace.read.snapshot.state import KeyRange, key_ranges
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.topology import Cluster

#: How many ranges are copied at a time, if the ownership has as many lanes.
PARALLEL: Final = 4
#: About how many documents a range of a collection has; there are no more than ``_RANGES_MAX`` ranges.
_RANGE_DOCUMENTS: Final = 50_000
_RANGES_MAX: Final = 64
_DUPLICATE: Final = 11000
#: A name with a dollar, where an insert takes none.
_DOLLAR: Final = 52
#: One ``_id`` on two shards may be a document that is moving. If it is still there after these tries, it is not.
_DUPLICATE_TRIES: Final = 6
_DUPLICATE_PAUSE_S: Final = 0.5
_log = logging.getLogger("tailrace.sync")


@dataclass(frozen=True, slots=True)
class SyncCopyProgress:
    """Documents and bytes copied, about how many documents there are, collections of which nothing is left to copy, and
    about how many seconds the rest takes (``None``: not known)."""

    documents: int = 0
    bytes: int = 0
    estimate_documents: int = 0
    collections_done: int = 0
    collections: int = 0
    seconds_left: float | None = None


class _CopyEndedError(Exception):
    """The copy is to end before it has begun."""


class Copy:
    """The copy of one sync, from its beginning or from where another process left it.

    ``ownership``  a range is copied for each of its lanes, up to ``PARALLEL``
    ``stopped``    once it is set, the copy ends where it is
    """

    def __init__(
        self,
        source: MongoClient[Any] | Cluster,
        state: SyncState,
        ownership: SyncOwnership,
        settings: SyncSettings,
        *,
        stopped: threading.Event | None = None,
    ) -> None:
        self._source = source
        self._state = state
        self._target = state.client
        self._ownership = ownership
        self._settings = settings
        self._stopped = stopped or threading.Event()
        self._throttle = Throttle(settings.documents_per_second)
        self._counts = _Counts()

    def stop(self) -> None:
        """Let the copy end where it is. From any thread."""
        self._stopped.set()

    @property
    def progress(self) -> SyncCopyProgress:
        """How far it is."""
        return self._counts.progress()

    def run(self, on_progress: Callable[[SyncCopyProgress], None] = lambda _: None) -> bool:
        """Copy what is left, and build the indexes that need not wait. Returns whether all is done: the phase is
        "catchUp" then. Raises SourceError, SinkError and LeaseLost."""
        document = self._document()
        if document.phase != "copy":
            return True
        if not document.extra.get("prepared"):
            try:
                self._prepare(document)
            except _CopyEndedError:
                return False
        ranges = self._ranges()
        self._counts = _Counts.of(ranges)
        if not self._all([one for one in ranges if not one.done], on_progress):
            return False
        if not self._copy_capped():
            return False
        self._build_indexes()
        hold = places_of(self._source, RETRY_SECONDS).now()
        copies = list(self._state.copies())

        def end(session: ClientSession) -> None:
            for uuid in copies:
                self._state.forget_copy(uuid, session)

        self._ownership.run(
            end,
            sets={"phase": "catchUp", "hold": hold.to_timestamp(), "copied": hold.to_timestamp()},
            what="end the copy",
        )
        on_progress(self.progress)
        return True

    def _document(self) -> SyncDocument:
        found = self._state.read()
        if found is None:
            raise SinkError(f"the state of the sync {self._state.name!r} is gone from the target")
        return found

    # -- beginning ---------------------------------------------------------------------------------------------------

    def _prepare(self, document: SyncDocument) -> None:
        """Make the collections and views, all of one time, and note what is to be copied. What a process that died
        before has made is made again: nothing is in it yet."""
        for namespace in reversed(document.extra.get("making", ())):
            indexes.drop(self._target, namespace, ownership=self._ownership)
        keys = source_keys(self._source) if self._state.cluster is not None else {}
        catalog, begun = catalog_at_rest(self._source, OnSource(self._settings), wait=self._pause)
        wanted = self._under_new_names(catalog)
        self._check_free(wanted)
        making = sorted(wanted, key=lambda one: one.kind != "collection")  # views after what they show
        self._ownership.run(_nothing, sets={"making": [one.namespace for one in making]}, what="begin the copy")
        version = version_of(self._state.deployment)
        made: list[tuple[CatalogCollection, str, bytes]] = []
        before = {self._settings.target_of(name): name for name in catalog.collections}
        for one in making:
            uuid = indexes.create(self._target, one, version, ownership=self._ownership)
            if one.kind == "collection":
                indexes.build_early(self._target, one, version, check=self._ownership.check)
                uuid = self._sharded(one, before[one.namespace], uuid, keys)
                made.append((one, before[one.namespace], uuid))
        cut = [self._cut(one, namespace) for one, namespace, _ in made]

        def note(session: ClientSession) -> None:
            for (one, namespace, uuid), ranges in zip(made, cut, strict=True):
                known = SyncedCollection(one.uuid, namespace, one.namespace, uuid, capped=one.is_capped)
                self._state.set_collection(known, session)
                self._note_indexes(one, session)
                self._state.set_copy(one.uuid, {**_copy_fields(one), "ranges": len(ranges)}, session)
                if ranges:
                    self._state.ranges.insert_many(ranges, session=session)

        at = begun.to_timestamp()
        sets = {"prepared": True, "making": [], "time": at, "hold": at}
        self._ownership.run(note, sets=sets, what="note what is to be copied")

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._stopped.is_set():
            raise _CopyEndedError

    def _sharded(
        self, one: CatalogCollection, namespace: str, uuid: bytes, keys: Mapping[bytes, Mapping[str, Any]]
    ) -> bytes:
        """Shard a collection of a target that is a cluster while it is empty. Returns its UUID there."""
        key = chosen_key(one, namespace, self._settings.shard_keys, keys) if self._state.cluster is not None else {}
        if not key:
            return uuid
        for refused in refused_key(replace(one, namespace=namespace), key):
            raise SinkError(refused)
        return indexes.shard(self._target, one, key, version_of(self._state.deployment), self._ownership)

    def _under_new_names(self, catalog: DeploymentCatalog) -> list[CatalogCollection]:
        moved = catalog.renamed(self._settings.target_of)
        if len(moved.collections) < len(catalog.collections):
            raise SinkError(
                "two collections would have one name on the target", hint="Choose other new names (--rename)"
            )
        return list(moved.collections.values())

    def _check_free(self, wanted: Iterable[CatalogCollection]) -> None:
        there = read_catalog(self._state.deployment, OnTarget(self._settings)).collections
        taken = sorted(one.namespace for one in wanted if one.namespace in there)
        if taken:
            more = f" and {len(taken) - 1:,} more" if len(taken) > 1 else ""
            raise SinkError(
                f"the target has a collection {taken[0]}{more} already",
                hint="Drop it, leave it out (--except) or give the copy another name (--rename)",
            )

    def _note_indexes(self, one: CatalogCollection, session: ClientSession) -> None:
        for spec in one.indexes:
            if indexes.waits(spec) or indexes.expires(spec):
                there = not indexes.waits(spec)
                self._state.note_index(one.uuid, name_of(spec), indexes.noted(spec, there=there), session)
        if (limit := indexes.clustered_limit(one.options)) is not None:
            self._state.note_index(one.uuid, CLUSTERED, indexes.noted(limit, there=True), session)

    def _cut(self, one: CatalogCollection, namespace: str) -> list[dict[str, Any]]:
        """The ranges of a collection, as they are noted. ``namespace`` is its name on the source."""
        reader = ChunkReader(retry_seconds=RETRY_SECONDS)
        placement = places_of(self._source, RETRY_SECONDS).placement(one.uuid, namespace.partition(".")[0])
        if placement is None or one.is_capped:
            return []  # dropped a moment ago, as the follower will see; or copied as a whole
        estimate = reader.estimate(placement)
        bounds = reader.ranges(placement, min(_RANGES_MAX, estimate // _RANGE_DOCUMENTS))
        ranges = key_ranges(bounds)
        return [
            _CopyRange(
                {"sync": self._state.name, "uuid": Binary(one.uuid, 4), "range": number},
                namespace,
                one.namespace,
                wanted,
                estimate=estimate // len(ranges),
            ).document()
            for number, wanted in enumerate(ranges)
        ]

    # -- documents ---------------------------------------------------------------------------------------------------

    def _ranges(self) -> list[_CopyRange]:
        query = {"_id.sync": self._state.name}
        found = answered("read the copy's ranges", lambda: list(self._state.ranges.find(query)))
        with undamaged(f"what is noted about the copy of the sync {self._state.name!r}"):
            ranges = [_CopyRange.of(one) for one in found]
            self._check_whole(ranges)
        return ranges

    def _check_whole(self, ranges: Sequence[_CopyRange]) -> None:
        """Raise ValueError if something that was to be copied is no longer noted: its documents or its indexes would be
        left out, and nobody would notice."""
        copies, waiting = self._state.copies(), {(one.uuid, name_of(one.spec)) for one in indexes.waiting(self._state)}
        counts = Counter(one.uuid for one in ranges)
        collections = self._state.collections()
        if collections.keys() != copies.keys():
            raise ValueError(f"of {len(copies)} collections that are copied, {len(collections)} are noted")
        for uuid, known in collections.items():
            if counts[uuid] != copies[uuid].get("ranges", counts[uuid]):
                raise ValueError(f"{known.namespace} has {counts[uuid]} of its {copies[uuid]['ranges']} ranges")
            for spec in map(bytes, copies[uuid]["specs"]):
                if (indexes.waits(spec) or indexes.expires(spec)) and (uuid, name_of(spec)) not in waiting:
                    raise ValueError(f"the index {name_of(spec)} of {known.namespace} is no longer noted")

    def _all(self, left: Sequence[_CopyRange], on_progress: Callable[[SyncCopyProgress], None]) -> bool:
        """Copy ranges, several at a time. Returns whether all of them are copied."""
        waiting: queue.SimpleQueue[_CopyRange] = queue.SimpleQueue()
        for one in sorted(left, key=lambda one: -one.estimate):
            waiting.put(one)
        lanes = range(1, self._ownership.lanes) if self._ownership.lanes > 1 else range(1)
        lanes = lanes[: min(PARALLEL, max(1, len(left)))]
        # A member that is late gives an early time, and may be read: what it has not heard of yet comes with no entry.
        start = max(self._document().time, places_of(self._source, RETRY_SECONDS).now())
        failed = threading.Event()

        def work(lane: int) -> None:
            try:
                worker = _RangeCopier(self, start, lane, lambda: failed.is_set() or self._stopped.is_set())
                with suppress(queue.Empty):
                    while not failed.is_set() and not self._stopped.is_set():
                        worker.copy(waiting.get_nowait())
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(len(lanes), thread_name_prefix="tailrace-copy") as pool:
            working = [pool.submit(work, lane) for lane in lanes]
            while not all(one.done() for one in working):
                on_progress(self.progress)
                time.sleep(0.1)
            for future in working:
                future.result()
        on_progress(self.progress)
        return not self._stopped.is_set()

    def _copy_capped(self) -> bool:
        """Copy the capped collections, each as a whole. Returns whether all of them are copied."""
        capped = CappedCopy(self._source, self._state, self._ownership)
        collections = self._state.collections()
        for uuid, kept in self._state.copies().items():
            if self._stopped.is_set():
                return False
            if kept["capped"] and not kept.get("whole"):
                self._counts.add(capped.copy(collections[uuid], kept), 0)
        return True

    # -- indexes -----------------------------------------------------------------------------------------------------

    def _build_indexes(self) -> None:
        """Build the indexes that need not wait. One that a document is in the way of waits all the same."""
        version = version_of(self._state.deployment)
        collections = self._state.collections()
        for uuid, copy in self._state.copies().items():
            specs = [bytes(one) for one in copy["specs"]]
            specs = [spec for spec in specs if not indexes.waits(spec)]
            target = collections[uuid].target
            make = partial(
                indexes.build,
                self._target,
                target,
                version=version,
                has_collation=bool(copy["collated"]),
                check=self._ownership.check,
            )
            try:
                make(specs=specs)
            except SinkError as error:
                _log.info("%s: its indexes are built one by one: %s", target, error)
                self._build_each(uuid, specs, make)

    def _build_each(self, uuid: bytes, specs: Sequence[bytes], make: Callable[..., None]) -> None:
        for spec in specs:
            try:
                make(specs=[spec])
            except SinkError as error:
                if error.code is None:
                    raise
                _log.info("the index %s waits: %s", name_of(spec), error)
                note = partial(self._state.note_index, uuid, name_of(spec), indexes.noted(spec, there=False))
                self._ownership.run(note, what="note an index that waits")


class _RangeCopier:
    """Copies ranges, one after another, in one thread."""

    def __init__(self, copy: Copy, start: Any, lane: int, stopped: Callable[[], bool]) -> None:
        self._copy = copy
        self._state = copy._state
        self._lane = lane
        self._stopped = stopped
        self._source = copy._source
        self._start = start
        self._read = range_reader(copy._source, start)
        cluster = self._state.cluster
        self._inserter = Inserter(copy._target, routed=cluster is not None)
        collections = self._state.collections() if cluster is not None else {}
        keys = keys_of(cluster) if cluster is not None else {}
        #: The paths of the shard keys that collections have on the target, by their UUIDs on the source.
        self._keys = {uuid: tuple(keys.get(one.target_uuid, ())) for uuid, one in collections.items()}

    def copy(self, wanted: _CopyRange) -> None:
        """Copy what is left of a range. Where its collection is gone, nothing is left."""
        while not wanted.done:
            for chunk in self._read(wanted.namespace, wanted.uuid, wanted.range):
                if self._stopped():
                    return
                wanted = self._keep(wanted, chunk)
                self._copy._throttle.spend(len(chunk.documents), self._stopped)
            if not wanted.done:
                wanted = self._note(wanted, wanted.ended(), ())
        self._copy._counts.ended(wanted)

    def _keep(self, wanted: _CopyRange, chunk: SnapshotChunk) -> _CopyRange:
        for left in reversed(range(_DUPLICATE_TRIES)):
            pieces = pieces_of(chunk.documents)
            try:
                if self._keys.get(wanted.uuid) and isinstance(self._source, Cluster):
                    _refuse_twice(chunk)
                return self._note(wanted, wanted.after(chunk.to, chunk.documents), pieces)
            except SinkError as error:
                if error.code == _DOLLAR and not self._inserter.looks_at_ids:
                    self._inserter.looks_at_ids = True
                    continue
                if error.code != _DUPLICATE:
                    raise
                if not left or not isinstance(self._source, Cluster):
                    raise _duplicate(error, chunk, isinstance(self._source, Cluster)) from None
            time.sleep(_DUPLICATE_PAUSE_S)  # a document that has gone from shard to shard was read on both
            chunk = self._again(wanted, chunk)
        raise AssertionError

    def _again(self, wanted: _CopyRange, chunk: SnapshotChunk) -> SnapshotChunk:
        once_more = range_reader(self._source, places_of(self._source, RETRY_SECONDS).now(), whole=True)
        within = KeyRange(wanted.range.at, chunk.to)
        return next(iter(once_more(wanted.namespace, wanted.uuid, within)), chunk)

    def _note(self, before: _CopyRange, after: _CopyRange, pieces: Sequence[bytes]) -> _CopyRange:
        """Write documents and the range's new bound."""

        def body(session: ClientSession) -> None:
            if pieces:
                self._inserter.insert(before.target, pieces, session, self._keys.get(before.uuid, ()))
            found = self._state.ranges.replace_one(
                {"_id": before.id, "at": Binary(before.range.at)}, after.document(), session=session
            )
            if not found.matched_count:
                raise SinkError(f"the copy of {before.target} is not where this process left it")

        self._copy._ownership.run(body, lane=self._lane, what=f"write documents of {before.target}")
        self._copy._counts.add(after.documents - before.documents, after.size - before.size)
        return after


@dataclass(frozen=True, slots=True)
class _CopyRange:
    """A range of ``_id``, and how much of it is copied. ``id`` is that of its document in the state."""

    id: Mapping[str, Any]
    namespace: str
    target: str
    range: KeyRange
    done: bool = False
    documents: int = 0
    size: int = 0
    estimate: int = 0

    @property
    def uuid(self) -> bytes:
        return bytes(self.id["uuid"])

    def after(self, to: bytes, documents: Sequence[bytes]) -> _CopyRange:
        """After a chunk that ends before ``to``."""
        size = len(documents.buffer) if isinstance(documents, RunOfDocuments) else sum(map(len, documents))
        return _CopyRange(
            self.id,
            self.namespace,
            self.target,
            KeyRange(to, self.range.to),
            to == self.range.to,
            self.documents + len(documents),
            self.size + size,
            self.estimate,
        )

    def ended(self) -> _CopyRange:
        """Its collection is gone: nothing is left."""
        return self.after(self.range.to, ())

    def document(self) -> dict[str, Any]:
        return {
            "_id": dict(self.id),
            "namespace": self.namespace,
            "target": self.target,
            "at": Binary(self.range.at),
            "to": Binary(self.range.to),
            "done": self.done,
            "documents": Int64(self.documents),
            "bytes": Int64(self.size),
            "estimate": Int64(self.estimate),
        }

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> _CopyRange:
        return cls(
            {**found["_id"], "uuid": Binary(bytes(found["_id"]["uuid"]), 4)},
            typed(found, "namespace", str),
            typed(found, "target", str),
            KeyRange(bytes(typed(found, "at", bytes)), bytes(typed(found, "to", bytes))),
            typed(found, "done", bool),
            int(found["documents"]),
            int(found["bytes"]),
            int(found["estimate"]),
        )


class _Counts:
    """How much is copied, over all threads."""

    def __init__(self, documents: int = 0, size: int = 0, estimate: int = 0) -> None:
        self._lock = threading.Lock()
        self._documents, self._bytes, self._estimate = documents, size, estimate
        self._begun, self._first = time.monotonic(), documents
        self._left: dict[bytes, int] = {}
        self._collections = 0

    @classmethod
    def of(cls, ranges: Sequence[_CopyRange]) -> _Counts:
        counts = cls(
            sum(one.documents for one in ranges),
            sum(one.size for one in ranges),
            sum(one.documents if one.done else max(one.estimate, one.documents) for one in ranges),
        )
        for one in ranges:
            counts._left[one.uuid] = counts._left.get(one.uuid, 0) + (not one.done)
        counts._collections = len(counts._left)
        return counts

    def add(self, documents: int, size: int) -> None:
        with self._lock:
            self._documents += documents
            self._bytes += size

    def ended(self, wanted: _CopyRange) -> None:
        with self._lock:
            self._left[wanted.uuid] = self._left.get(wanted.uuid, 1) - 1

    def progress(self) -> SyncCopyProgress:
        with self._lock:
            copied = self._documents - self._first
            estimate = max(self._estimate, self._documents)
            elapsed = time.monotonic() - self._begun
            left = elapsed / copied * (estimate - self._documents) if copied else None
            done = sum(not ranges for ranges in self._left.values())
            return SyncCopyProgress(self._documents, self._bytes, estimate, done, self._collections, left)


def _refuse_twice(chunk: SnapshotChunk) -> None:
    """Raise SinkError where a chunk has two documents of one ``_id``: a target that is sharded might take both."""
    seen = {id_alone(one) for one in chunk.documents}
    if len(seen) < len(chunk.documents):
        raise SinkError("two of the documents that were read have the same _id", code=_DUPLICATE)


def _duplicate(error: SinkError, chunk: SnapshotChunk, sharded: bool) -> SinkError:
    if sharded:
        return SinkError(
            f"two shards have documents with the same _id in {chunk.namespace}, and a sync tells documents apart by "
            f"_id: {error.message}",
            code=error.code,
            hint="Remove or renumber one of the two, or leave the collection out (--except)",
        )
    return SinkError(
        f"the target's {chunk.namespace} has documents that this sync did not write: {error.message}",
        code=error.code,
        hint="Nothing else may write there. Drop the target's collections, and begin the sync again",
    )


def _copy_fields(one: CatalogCollection) -> dict[str, Any]:
    """What is kept of a collection until its copy ends."""
    return {
        "specs": [Binary(spec) for spec in one.indexes],
        "collated": one.has_collation,
        "capped": one.is_capped,
        "options": Binary(one.options),
        "idIndex": None if one.id_index is None else Binary(one.id_index),
    }


def _nothing(session: ClientSession) -> None:
    """A transaction that writes only the fence and the fields next to it."""
