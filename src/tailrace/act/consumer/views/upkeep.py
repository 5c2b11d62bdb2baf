"""Keeping a view: the handlers of both directions, the rebuild, and the verification."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal, Inexact, InvalidOperation
from itertools import islice
from math import isfinite
from typing import Any, Final, TypeVar

import bson
from bson.codec_options import CodecOptions
from bson.decimal128 import Decimal128
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError, WriteError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from tailrace.act.consumer.change import Change
from tailrace.act.consumer.views.raw_value import SHOWN, RawValue, fields_of, one_of, value_at
from tailrace.act.consumer.views.view import VERSIONS_FIELD, View, overlaps, parents
from tailrace.core import raw_bson
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import SinkError, UsageError
from tailrace.read.snapshot import SnapshotReader
from tailrace.read.source.connection import clock_session
from tailrace.read.source.failure import Backoff, is_transient, source_error
from tailrace.watch.client.client import Client, operation_time, readers_of

#: So many targets of one source are updated at a time.
BATCH: Final = 1_000
_RETRY_S: Final = 120.0
#: A mongos has an old routing table, and has tried in vain: chunks are moving (StaleShardVersion, StaleEpoch,
#: StaleConfig).
_STALE: Final = frozenset({63, 150, 13388})
#: What ``operationType`` of a document that was there before the first change is.
_OF_COPY: Final = RawValue.of("snapshot")
#: Documents are read and written as the bytes that they are.
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="backslashreplace"
)

_log = logging.getLogger("tailrace.consumer")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ViewDifference:
    """A field of a target that differs from its source. A missing value is ``view.MISSING``. If ``path`` is the view's
    version, ``found`` is ahead of the deployment's time, which is ``wanted``: no keeper has written this version, and
    none can overwrite it."""

    document_key: Any
    path: str
    found: Any
    wanted: Any


class ViewUpkeep:
    """Writes a view. Every method may run beside every other, in as many processes as there are: the versions decide.

    ``client``  of ``tailrace.connect()``: one deployment holds target and source, a cluster is written by a mongos
    ``batch``   so many targets of one source are updated by one command
    """

    def __init__(self, client: Client[Any], view: View, *, batch: int = BATCH) -> None:
        if batch < 1:
            raise UsageError("a batch holds one target or more")
        self.view = view
        self._client = client
        self._batch = batch
        self._is_sharded = True
        self._told_array = False
        self._clock: Mapping[str, Any] | None = None
        self._target = self._collection(view.target)
        self._source = self._collection(view.source).with_options(read_concern=ReadConcern("majority"))

    def _collection(self, namespace: str) -> Collection[RawBSONDocument]:
        database, _, name = namespace.partition(".")
        client: MongoClient[Any] = self._client
        return client.get_database(
            database,
            codec_options=_RAW,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern("majority"),
        ).get_collection(name)

    def check_deployment(self) -> None:
        """Raises UsageError if the view cannot be written: a cluster that is not reached through a mongos, a
        hidden member, or a field of the view that is part of the target's shard key."""
        self._is_sharded = readers_of(self._client).cluster is not None
        hello = self._retried(lambda: self._client.admin.command("hello"))
        if hello.get("hidden"):
            raise UsageError(
                "a view is written, and this is a hidden member, which takes no writes",
                hint="Connect to the replica set",
            )
        if not self._is_sharded:
            return
        if hello.get("msg") != "isdbgrid":
            raise UsageError(
                "a view of a sharded cluster is written through a mongos, and this is its config server or a shard",
                hint="Connect to a mongos",
            )
        collections = self._collection("config.collections")
        found = self._retried(lambda: collections.find_one({"_id": self.view.target, "dropped": {"$ne": True}}))
        for path in () if found is None else bson.decode(raw_bson.bytes_of(found)).get("key") or ():
            for field in (*self.view.fields, VERSIONS_FIELD):
                if overlaps(path, field):
                    raise UsageError(
                        f"the view writes {field!r} of {self.view.target}, and {path!r} is part of its shard key",
                        hint="Carry the field under another name",
                    )

    def check_targets(self) -> None:
        """Raises UsageError if a target has an array in the field that names its source: which of several sources it
        would get the fields of is not said. Reads the targets until it has found one."""
        found = self._retried(lambda: self._target.find_one(self.view.with_array, {"_id": 1}))
        if found is not None:
            identity = id_of(raw_bson.bytes_of(found)).shown
            raise UsageError(
                f"the document with _id {identity!r} of {self.view.target} has an array in {self.view.on!r}, and a "
                "view carries the fields of one source",
                hint="Let each document name one, or keep such documents in another collection",
            )

    def _tell_array(self, document: bytes) -> None:
        """Once: a document that has come later is no reason to stop for the others."""
        if self._told_array or not self.view.has_array(document):
            return
        self._told_array = True
        _log.warning(
            "the document with _id %r of %s has an array in %r: it names no source of the view %s, and gets no fields",
            id_of(document).shown,
            self.view.target,
            self.view.on,
            self.view.name,
        )

    # The two directions

    def source_changed(self, change: Change) -> None:
        """The handler for changes of the source: all targets that name it get its fields, in batches. Where the source
        was dropped, renamed or replaced, all targets do."""
        event = bson.decode(change.raw, SHOWN)
        if self._is_replaced(change, event, self.view.source) or not self.view.concerns_source(event):
            return
        key = value_at(change.raw, "documentKey._id")
        if key is None or key.is_null:
            return  # nobody can name it: null stands for none
        version = event["clusterTime"]
        self.refresh(key, version, check=change.check)

    def _is_replaced(self, change: Change, event: Mapping[str, Any], namespace: str) -> bool:
        """Whether the change ends a collection, as a drop, a rename and $out do; then the view is rebuilt. What takes
        its place has no events of its own, and what is gone has none either."""
        if event.get("operationType") != "invalidate":
            return False
        _log.warning(
            "%s was dropped, renamed or replaced: the view %s of %s is rewritten from what is there now",
            namespace,
            self.view.name,
            self.view.target,
        )
        self.rebuild(check=change.check, every=True)
        return True

    def refresh(self, key: Any, version: Timestamp, *, check: Callable[[], None] = lambda: None) -> int:
        """Give all targets that name the source ``key`` (a value of Python, or a RawValue) its fields as of ``version``
        or later; how many were older."""
        key = key if isinstance(key, RawValue) else RawValue.of(key)
        update = self.view.update(self._look_up(key, version), version)
        outdated = self.view.outdated(key, version)
        count = 0
        with self._session(version) as session:
            while True:
                check()
                # Majority-committed: a target that another process has written on a primary that is about to be
                # rolled back still counts as older.
                committed = self._target.with_options(read_concern=ReadConcern("majority"))
                found = self._retried(
                    lambda: [
                        id_of(raw_bson.bytes_of(one))
                        for one in committed.find(outdated, {"_id": 1}, limit=self._batch, session=session)  # noqa: B023
                    ]
                )
                if not found:
                    return count
                matched = self._update(outdated, found, update, session)
                count += matched
                # On a cluster an update of many can pass by a document whose chunk is moving.
                if matched == len(found) < self._batch and not self._is_sharded:
                    return count

    def _update(self, outdated: dict[str, Any], keys: list[RawValue], update: Any, session: ClientSession) -> int:
        """Update the targets with these ``_id``s; how many matched. One that the server refuses does not hold up the
        others; then SinkError is raised."""

        def update_many(some: list[RawValue]) -> int:
            query = {"$and": [outdated, {"_id": one_of(some)}]}
            return self._retried(lambda: self._target.update_many(query, update, session=session).matched_count)

        try:
            return update_many(keys)
        except WriteError:
            matched, refused = 0, []
        for key in keys:
            try:
                matched += update_many([key])
            except WriteError as error:
                refused.append((key.shown, str((error.details or {}).get("errmsg", error))))
        if refused:
            raise self._refused(refused)
        return matched

    def _refused(self, refused: Sequence[tuple[Any, str]]) -> SinkError:
        key, said = refused[0]
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        return SinkError(
            f"{self.view.target} does not accept the fields of the view for the document with _id {key!r}{more}: "
            f"{said}",
            hint="The other documents of this update were written",
        )

    def target_changed(self, change: Change) -> None:
        """The handler for changes of the target: the document gets the fields of the source that it names. Where the
        target was dropped, renamed or replaced, all documents that are there now do."""
        found = self._target_of(change)
        if found is None:
            return
        identity, document, version = found
        key = self.view.key_of(document)
        if key is None and not any(self.view.differences(document, None)):
            return
        source = None if key is None else self._look_up(key, version)
        query = self._one(identity, key, version)
        change.check()
        try:
            self._retried(lambda: self._target.update_one(query, self.view.update(source, version)))
        except WriteError as error:
            said = str((error.details or {}).get("errmsg", error))
            raise self._refused([(id_of(identity).shown, said)]) from None

    def targets_changed(self, changes: Sequence[Change]) -> int:
        """As ``target_changed``, for several changes: their sources are read together, and their targets written
        together. How many are done, from the first; raises what is wrong with the first."""
        wanted = [found for change in changes if (found := self._target_of(change)) is not None]
        if not wanted:
            return len(changes)
        newest = max(version for _, _, version in wanted)
        writes = []
        # The targets of a copy have one version, and many of them one source.
        updates: dict[tuple[bytes | None, Timestamp], list[dict[str, Any]]] = {}
        found_sources = self._with_sources([document for _, document, _ in wanted], newest)
        for (identity, _, version), (document, source) in zip(wanted, found_sources, strict=True):
            key = self.view.key_of(document)
            if key is not None or any(self.view.differences(document, None)):
                update = updates.get((source, version))
                if update is None:
                    update = updates[source, version] = self.view.update(source, version)
                writes.append(UpdateOne(self._one(identity, key, version), update))
        changes[0].check()
        try:
            if writes:
                self._retried(lambda: self._target.bulk_write(writes, ordered=False))
        except BulkWriteError:
            return self._one_by_one(changes)
        return len(changes)

    def _one_by_one(self, changes: Sequence[Change]) -> int:
        for place, change in enumerate(changes):
            try:
                self.target_changed(change)
            except SinkError:
                if place == 0:
                    raise
                return place  # then it comes first, and is judged
        return len(changes)

    def _target_of(self, change: Change) -> tuple[bytes, bytes, Timestamp] | None:
        """The document key, the document and the version for a change of a target that asks for its fields."""
        raw, version = change.raw, value_at(change.raw, "clusterTime")
        if value_at(raw, "operationType") != _OF_COPY:  # else all of it, and it need not be decoded
            event = bson.decode(raw, SHOWN)
            if self._is_replaced(change, event, self.view.target) or not self.view.concerns_target(event):
                return None
        whole, identity = value_at(raw, "fullDocument"), value_at(raw, "documentKey")
        if whole is None or whole.is_null or identity is None or version is None:
            return None  # it is gone, and its deletion needs nothing
        self._tell_array(whole.data)
        return identity.data, whole.data, version.shown

    def _one(
        self, document_key: bytes, key: RawValue | None, version: Timestamp, ahead: Timestamp | None = None
    ) -> dict[str, Any]:
        """The filter of one target that names ``key`` and has an older version, or the version ``ahead``.
        ``document_key`` holds the shard key too, and the field ``on`` may be part of it."""
        exactly = {path: value.condition() for path, value in fields_of(document_key).items()}
        return {"$and": [exactly, self.view.outdated(key, version, ahead=ahead)]}

    @contextmanager
    def _session(self, version: Timestamp) -> Iterator[ClientSession]:
        """A session whose reads see what was written up to ``version``."""
        if self._is_sharded:
            self._hear_of(version)
        with self._client.start_session(causal_consistency=True) as session:
            session.advance_operation_time(version)
            if self._clock is not None:
                session.advance_cluster_time(self._clock)
            yield session

    def _hear_of(self, version: Timestamp) -> None:
        """A mongos refuses to read after a time that it does not know of yet. Our events come from the shards
        themselves: so one of them is asked for the cluster's time, signed, and the mongos is told."""
        self._is_reached(version)

    def _is_reached(self, version: Timestamp) -> bool:
        """Whether some server's clock has reached ``version``. No keeper can have written a later version."""
        cluster = readers_of(self._client).cluster
        servers = (cluster.client(shard.name) for shard in cluster.shards()) if cluster else iter([self._client])
        while self._clock is None or self._clock["clusterTime"] < version:
            client = next(servers, None)
            if client is None:
                return False
            with clock_session(client) as session:
                self._retried(lambda: client.admin.command("ping", session=session))  # noqa: B023
                told = session.cluster_time
            if told is not None and (self._clock is None or told["clusterTime"] > self._clock["clusterTime"]):
                self._clock = told
        return True

    def _ahead(self, target: bytes, now: Timestamp) -> Timestamp | None:
        """The version of a target if no keeper can have written it. ``now``: a time after the target was read."""
        found = self.view.version_of(target)
        return found if found is not None and found > now and not self._is_reached(found) else None

    def _look_up(self, key: RawValue, version: Timestamp) -> bytes | None:
        """The source as it was at ``version`` or later, majority-committed."""
        # One after the other: in one list, equal values of two types count as one.
        for spelled in _spellings(key) if self._is_sharded else [key]:
            for found in self._sources([spelled], version):
                return found
        return None

    def _sources(self, keys: Sequence[RawValue], version: Timestamp) -> list[bytes]:
        wanted = set(self.view.fields.values())
        projection = {path: 1 for path in wanted if wanted.isdisjoint(parents(path))}
        query = {"_id": keys[0].condition() if len(keys) == 1 else one_of(keys)}

        def read() -> list[bytes]:
            with self._session(version) as session:
                return [raw_bson.bytes_of(one) for one in self._source.find(query, projection, session=session)]

        return self._retried(read)

    def _retried(self, work: Callable[[], _T]) -> _T:
        """The result of ``work``, tried again while a primary is away. All our work may be done twice. A write that the
        server refuses for its content raises PyMongo's error."""
        backoff = Backoff(give_up_s=_RETRY_S)
        while True:
            try:
                return work()
            except PyMongoError as error:
                passes = is_transient(error) or (isinstance(error, OperationFailure) and error.code in _STALE)
                if isinstance(error, (WriteError, BulkWriteError)) and not passes:
                    raise
                if not passes or backoff.exhausted:
                    raise source_error(error, self._client) from None
                backoff.wait()

    # All of it

    def _chunks(self) -> Iterator[list[bytes]]:
        """All targets."""
        readers = readers_of(self._client)
        reader = SnapshotReader(readers.cluster or readers.client, Scope.parse(self.view.target))
        for chunk in reader:
            yield [bytes(document) for document in chunk.documents]
            reader.done(chunk)

    def _with_sources(self, targets: Sequence[bytes], version: Timestamp) -> Iterator[tuple[bytes, bytes | None]]:
        """Targets beside their sources, read at ``version`` or later."""
        named = [self.view.key_of(target) for target in targets]
        keys = {key.identity: key for key in named if key is not None}
        found: dict[RawValue | int, bytes | None] = {}
        waiting = iter(keys.items())
        while part := dict(islice(waiting, self._batch)):
            for source in self._sources(list(part.values()), version):
                found[id_of(source).identity] = source
        for identity, key in keys.items():
            if identity not in found:  # there is none, or it is equal in another type or under a collation
                found[identity] = self._look_up(key, version)
        for target, named_key in zip(targets, named, strict=True):
            yield target, None if named_key is None else found.get(named_key.identity)

    def _now(self) -> Timestamp:
        return operation_time(self._client).to_timestamp()

    def rebuild(self, *, check: Callable[[], None] = lambda: None, every: bool = False) -> int:
        """Write the fields of its source to every target. Returns how many targets had other fields, or a version ahead
        of the deployment's time. May run beside keepers. Raises SinkError at the end if the server refused some.

        ``every``  targets with the right fields get the version too, and are counted: nothing that a process has
                   computed before can be written from then on
        """
        self.check_deployment()
        changed = 0
        refused: list[tuple[Any, str]] = []
        for targets in self._chunks():
            check()
            version = self._now()
            writes, keys = [], []
            for target, source in self._with_sources(targets, version):
                ahead = self._ahead(target, version)
                if every or ahead is not None or any(self.view.differences(target, source)):
                    key = id_of(target)
                    query = self._one(key.under("_id"), self.view.key_of(target), version, ahead)
                    writes.append(UpdateOne(query, self.view.update(source, version)))
                    keys.append(key.shown)
            if writes:
                try:
                    changed += self._retried(lambda: self._target.bulk_write(writes, ordered=False).matched_count)  # noqa: B023
                except BulkWriteError as error:
                    details = error.details or {}
                    changed += details.get("nMatched", 0)
                    refused += [(keys[one["index"]], str(one.get("errmsg"))) for one in details.get("writeErrors", ())]
                    if not refused:
                        raise source_error(error, self._client) from None
        if refused:
            raise self._refused(refused)
        return changed

    def verify(self, *, grace_s: float = 5.0) -> Iterator[ViewDifference]:
        """Recompute the view and give what differs. A target that differs is looked at again after ``grace_s``, for the
        listeners may not have come to it yet."""
        self.check_deployment()
        waiting: list[tuple[float, RawValue]] = []
        for targets in self._chunks():
            version = self._now()
            for target, source in self._with_sources(targets, version):
                if self._ahead(target, version) is not None or any(self.view.differences(target, source)):
                    waiting.append((time.monotonic() + grace_s, id_of(target)))
        for until, key in waiting:
            time.sleep(max(0.0, until - time.monotonic()))
            yield from self._differences(key)

    def _differences(self, key: RawValue) -> list[ViewDifference]:
        def read() -> bytes | None:
            document = self._target.find_one({"_id": key.condition()})
            return None if document is None else raw_bson.bytes_of(document)

        for _ in range(3):
            found = self._retried(read)
            if found is None:
                return []
            now = self._now()
            ((target, source),) = self._with_sources([found], now)
            differences = [ViewDifference(key.shown, *one) for one in self.view.differences(target, source)]
            ahead = self._ahead(target, now)
            if ahead is not None:
                differences.append(ViewDifference(key.shown, self.view.version_path, ahead, now))
            if self._retried(read) == found:
                return differences
        return []  # it changes all the time: whoever writes it is followed by the listeners

    def is_empty(self) -> bool:
        """Whether there is no target at all."""
        return self._retried(lambda: self._target.find_one({}, {"_id": 1})) is None

    def has_index(self) -> bool:
        """Whether the targets of a source are found by an index."""
        indexes = self._retried(self._target.index_information)
        return any(index["key"][0][0] == self.view.on for index in indexes.values() if index.get("key"))

    @property
    def without_index(self) -> tuple[str, ...]:
        """What the log says where there is no such index."""
        said = "%s has no index on %r: each change of %s reads the whole collection"
        return said, self.view.target, self.view.on, self.view.source


def id_of(document: bytes) -> RawValue:
    """The ``_id`` of a document."""
    found = value_at(document, "_id")
    assert found is not None
    return found


def _spellings(raw: RawValue) -> list[RawValue]:
    """A number with a fraction as the types in which it can be stored: a hashed shard key has one hash for a double and
    another for the equal decimal, so a mongos asks the one shard or the other."""
    if raw.type not in (raw_bson.DOUBLE, raw_bson.DECIMAL128):
        return [raw]
    key = raw.shown
    with suppress(Inexact, InvalidOperation, OverflowError):
        if isinstance(key, Decimal128):
            exact = key.to_decimal()
            if exact.is_finite() and exact % 1 and Decimal(float(exact)) == exact:
                return [raw, RawValue.of(float(exact))]
        elif isfinite(key) and key % 1:
            return [raw, RawValue.of(Decimal128(Decimal(key)))]
    return [raw]
