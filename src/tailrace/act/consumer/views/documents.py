"""What keeping a view reads: its targets and their sources, majority-committed, as they were at a version or later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal, Inexact, InvalidOperation
from itertools import islice
from math import isfinite
from typing import Any, Final, TypeVar

import bson
from bson.codec_options import CodecOptions
from bson.decimal128 import Decimal128
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError, WriteError
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from tailrace.act.consumer.views.raw_value import RawValue, one_of, value_at
from tailrace.act.consumer.views.view import VERSIONS_FIELD, View, overlaps, parents
from tailrace.core import raw_bson
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import UsageError
from tailrace.read.snapshot import SnapshotReader
from tailrace.read.source.connection import clock_session
from tailrace.read.source.failure import Backoff, is_transient, source_error
from tailrace.watch.client.client import Client, operation_time, readers_of

#: How many targets of one source are updated at a time.
BATCH: Final = 1_000
_RETRY_S: Final = 120.0
#: A mongos has an old routing table, and has tried in vain: chunks are moving (StaleShardVersion, StaleEpoch,
#: StaleConfig).
_STALE: Final = frozenset({63, 150, 13388})
#: Documents are read and written as the bytes that they are.
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="backslashreplace"
)

_T = TypeVar("_T")


class ViewDocuments:
    """The documents of a view, for the code that keeps it.

    Args:
        client: from ``tailrace.connect()``: one deployment holds target and source; a cluster is written to through a
            mongos
        batch: how many sources are read by one command
    """

    def __init__(self, client: Client[Any], view: View, *, batch: int = BATCH) -> None:
        if batch < 1:
            raise UsageError("a batch holds one target or more")
        self.view = view
        self._client = client
        self._batch = batch
        self._is_sharded = True
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
                "a view has to be written, and this is a hidden member, which takes no writes",
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
        document = self._retried(lambda: collections.find_one({"_id": self.view.target, "dropped": {"$ne": True}}))
        for path in () if document is None else bson.decode(raw_bson.bytes_of(document)).get("key") or ():
            for field in (*self.view.fields, VERSIONS_FIELD):
                if overlaps(path, field):
                    raise UsageError(
                        f"the view writes {field!r} of {self.view.target}, and {path!r} is part of its shard key",
                        hint="Carry the field under another name",
                    )

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

    def _chunks(self) -> Iterator[list[bytes]]:
        """All targets."""
        readers = readers_of(self._client)
        reader = SnapshotReader(readers.cluster or readers.client, Scope.parse(self.view.target))
        for chunk in reader:
            yield [bytes(document) for document in chunk.documents]
            reader.done(chunk)

    def _with_sources(
        self, targets: Sequence[bytes], version: Timestamp
    ) -> Iterator[tuple[bytes, RawValue | None, bytes | None]]:
        """Targets with what they name and their sources, read at ``version`` or later."""
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
            yield target, named_key, None if named_key is None else found.get(named_key.identity)

    # -- sources as of a version --------------------------------------------------------------------------------------

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

    # -- the deployment's time ----------------------------------------------------------------------------------------

    def _ahead(self, target: bytes, now: Timestamp) -> Timestamp | None:
        """The version of a target if no keeper can have written it. ``now``: a time after the target was read."""
        version = self.view.version_of(target)
        return version if version is not None and version > now and not self._is_reached(version) else None

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

    def _hear_of(self, version: Timestamp) -> None:
        """A mongos refuses to read after a time that it does not know of yet. Our events come from the shards
        themselves: so one of them is asked for the cluster's time, signed, and the mongos is told."""
        self._is_reached(version)

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

    def _now(self) -> Timestamp:
        return operation_time(self._client).to_timestamp()

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


def id_of(document: bytes) -> RawValue:
    """The ``_id`` of a document."""
    value = value_at(document, "_id")
    assert value is not None
    return value


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
