"""``connect()``: PyMongo's client, with streams of our own. What is not about streams is PyMongo's implementation.

Client, Database and Collection derive from PyMongo's classes: ``watch`` is ours, and methods that return a database or
a collection return one of ours. docs/reference/pymongo.md lists every public name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, cast

from bson.codec_options import CodecOptions, TypeRegistry
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collation import Collation
from pymongo.read_concern import ReadConcern
from pymongo.synchronous import collection as pymongo_collection
from pymongo.synchronous import database as pymongo_database
from pymongo.typings import _DocumentType
from pymongo.write_concern import WriteConcern

from tailrace.core.expression.stages.pipeline import CompiledPipeline
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.read.snapshot.stages import compiled_for
from tailrace.read.source.driver_error import driver_errors
from tailrace.read.source.topology import Cluster
from tailrace.read.source.uri import ClientOptions, ConnectionString
from tailrace.read.tail.shared_tail import WINDOW_BYTES, TailStatistics
from tailrace.watch.client.arguments import Arguments
from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.deployment import EngineName, Readers, WatchedDeployment
from tailrace.watch.client.request import WatchRequest, watch_codec_options
from tailrace.watch.client.watchable import Watchable, WatchableClient, WatchableCollection, WatchableDatabase

Host = str | ConnectionString | Sequence[str | ConnectionString] | None
Pipeline = Sequence[Mapping[str, Any]]
Codec = CodecOptions[Any] | None


def connect(  # noqa: PLR0917  PyMongo's order
    host: Host = None,
    port: int | None = None,
    document_class: type[Any] | None = None,
    tz_aware: bool | None = None,
    connect: bool | None = None,
    type_registry: TypeRegistry | None = None,
    *,
    engine: EngineName = "oplog",
    server_version: str | None = None,
    tail_window_bytes: int = WINDOW_BYTES,
    archive: str | Path | None = None,
    images: str | Path | None = None,
    **kwargs: Any,
) -> Client[Any]:
    """A client for a replica set or a sharded cluster: takes what ``pymongo.MongoClient`` takes, in the same order.

    Args:
        host: a URI, a host, or a list of hosts: of a replica set, or of a cluster's config server or mongos, whose
            shards are then found and followed; or a list of URIs, one for each shard of a cluster
            (docs/how-to/sharded-clusters.md). By default ``localhost``
        engine: "oplog": the events are made here, from the oplog; "server": the server's own change stream is read
        server_version: engine "oplog": whose events to make, such as "7.0"; by default those of the deployment's own
            version (docs/reference/server-versions.md)
        tail_window_bytes: how much of an oplog's end is kept in memory for streams that read it together
            (docs/design/tail.md)
        archive: engine "oplog": the directory of the deployment's archive (``tailrace archive``); a stream that starts
            before the oplog does reads from it. Not with a list of shards
        images: engine "oplog": the directory where streams keep what they compute exact images from
            (``full_document="exact"``; docs/reference/exact-images.md)
        kwargs: PyMongo's client options (``serverSelectionTimeoutMS``, ``tls``, ``event_listeners``, ...)

    Raises what PyMongo raises if the URI or an option cannot be used; the error is a UsageError too. No error holds a
    password.
    """
    host, kwargs = Arguments.hidden(host), ClientOptions(kwargs)
    return Client(
        host,
        port,
        document_class,
        tz_aware,
        connect,
        type_registry,
        engine=engine,
        server_version=server_version,
        tail_window_bytes=tail_window_bytes,
        archive=archive,
        images=images,
        **kwargs,
    )


class _Watchable(Watchable):
    """What can be watched: a deployment, a database, a collection."""

    def watch(  # noqa: PLR0917
        self,
        pipeline: Pipeline | None = None,
        full_document: str | None = None,
        resume_after: Mapping[str, Any] | None = None,
        max_await_time_ms: int | None = None,
        batch_size: int | None = None,
        collation: Collation | Mapping[str, Any] | None = None,
        start_at_operation_time: Timestamp | None = None,
        session: ClientSession | None = None,
        start_after: Mapping[str, Any] | None = None,
        comment: Any | None = None,
        full_document_before_change: str | None = None,
        show_expanded_events: bool | None = None,
        *,
        document_class: type[Any] | None = None,
        codec_options: CodecOptions[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_ms: int | None = None,
        start: str | None = None,
        snapshot_documents_per_second: float | None = None,
    ) -> ChangeStream:
        """A change stream, with PyMongo's parameters in PyMongo's order. Those from ``document_class`` on are ours, and
        are given by name.

        Args:
            max_await_time_ms: how long ``try_next`` waits for an event (default 1000)
            batch_size: how many oplog entries are read at a time (engine "server": events)
            collation: how the stages of ``pipeline`` compare strings; with engine "oplog", any but the simple one needs
                the extra ``icu``
            session: a session of this client that has not ended. The oplog is read without it, but its
                ``operation_time`` advances with what has been read
            document_class: the class of the events; by default that of the client, database or collection.
                ``RawBSONDocument`` gives exact bytes
            codec_options: how events are decoded, in place of those of the client, database or collection
            options: further options of the ``$changeStream`` stage under the server's own names, such as
                ``{"showSystemEvents": True}``
            timeout_ms: how long ``watch`` and each call on the stream may take, in place of the client's ``timeoutMS``;
                0: as long as it takes. More than ``max_await_time_ms``
            start: "snapshot": first an event for each existing document (operation type ``snapshot``), then every
                change since before the copy began; from any ``resume_token`` of the stream it can be continued
                (docs/how-to/snapshot.md)
            snapshot_documents_per_second: how many documents are copied per second at most

        Raises what PyMongo's ``watch`` raises; the error is a TailraceError too. It has the server's code where the
        server's ``aggregate`` would refuse the stream, and is a SourceError where the oplog cannot be read.
        """
        request = self._request(
            pipeline=pipeline,
            full_document=full_document,
            full_document_before_change=full_document_before_change,
            resume_after=resume_after,
            start_after=start_after,
            start_at_operation_time=start_at_operation_time,
            show_expanded_events=show_expanded_events,
            max_await_time_ms=max_await_time_ms,
            timeout_ms=timeout_ms,
            batch_size=batch_size,
            collation=collation,
            comment=comment,
            session=session,
            options=options,
            start=start,
            snapshot_documents_per_second=snapshot_documents_per_second,
            document_class=document_class,
            codec_options=codec_options,
        )
        client: Client[Any] = self._watched_client()
        return client._deployment.open(client, request)


class Client(WatchableClient, _Watchable, MongoClient[_DocumentType], Generic[_DocumentType]):  # type: ignore[misc]
    """``pymongo.MongoClient`` whose ``watch``, and that of its databases and collections, is ours.

    ``connect`` says what it takes. Use it from any thread; a stream belongs to one thread at a time.
    """

    def __init__(  # noqa: PLR0917
        self,
        host: Host = None,
        port: int | None = None,
        document_class: type[_DocumentType] | None = None,
        tz_aware: bool | None = None,
        connect: bool | None = None,
        type_registry: TypeRegistry | None = None,
        *,
        engine: EngineName = "oplog",
        server_version: str | None = None,
        tail_window_bytes: int = WINDOW_BYTES,
        archive: str | Path | None = None,
        images: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        host, kwargs = Arguments.hidden(host), ClientOptions(kwargs)
        arguments = Arguments(host, port, kwargs)
        self._deployment = WatchedDeployment(arguments, engine, server_version, tail_window_bytes, archive, images)
        self._construct(
            arguments,
            super().__init__,
            document_class=document_class,
            tz_aware=tz_aware,
            connect=connect,
            type_registry=type_registry,
        )

    def __getitem__(self, name: str) -> Database[_DocumentType]:
        return Database(self, name)

    def __getattr__(self, name: str) -> Database[_DocumentType]:
        return cast(Database[_DocumentType], super().__getattr__(name))

    def get_database(
        self,
        name: str | None = None,
        codec_options: Codec = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> Database[Any]:
        """As PyMongo's."""
        return Database._of(super().get_database(name, codec_options, read_preference, write_concern, read_concern))

    def get_default_database(
        self,
        default: str | None = None,
        codec_options: Codec = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> Database[Any]:
        """As PyMongo's."""
        return Database._of(
            super().get_default_database(default, codec_options, read_preference, write_concern, read_concern)
        )

    @property
    def tail_statistics(self) -> TailStatistics:
        """How this client's streams share the reading of oplogs."""
        return self._deployment.tail_statistics

    def close(self) -> None:
        """As PyMongo's. Streams that are still open end with an error."""
        if "_deployment" in vars(self):
            self._deployment.close()
        super().close()

    def __enter__(self) -> Self:
        return self


Client.__name__ = MongoClient.__name__  # PyMongo's texts and ``repr`` name the class


class Database(WatchableDatabase, _Watchable, pymongo_database.Database[_DocumentType], Generic[_DocumentType]):  # type: ignore[misc]
    """``pymongo.database.Database`` whose ``watch``, and that of its collections, is ours."""

    def __getitem__(self, name: str) -> Collection[_DocumentType]:
        return Collection(self, name)

    def __getattr__(self, name: str) -> Collection[_DocumentType]:
        return cast(Collection[_DocumentType], super().__getattr__(name))

    def get_collection(
        self,
        name: str,
        codec_options: Codec = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> Collection[Any]:
        """As PyMongo's."""
        return Collection(self, name, False, codec_options, read_preference, write_concern, read_concern)

    def with_options(
        self,
        codec_options: Codec = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> Database[Any]:
        """As PyMongo's."""
        return Database._of(super().with_options(codec_options, read_preference, write_concern, read_concern))

    def create_collection(  # noqa: PLR0917
        self,
        name: str,
        codec_options: Codec = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
        session: ClientSession | None = None,
        check_exists: bool | None = True,
        **kwargs: Any,
    ) -> Collection[Any]:
        """As PyMongo's."""
        return Collection._of(
            self,
            super().create_collection(
                name, codec_options, read_preference, write_concern, read_concern, session, check_exists, **kwargs
            ),
        )


class Collection(WatchableCollection, _Watchable, pymongo_collection.Collection[_DocumentType], Generic[_DocumentType]):  # type: ignore[misc]
    """``pymongo.collection.Collection`` whose ``watch`` is ours. ``orders["archive"]`` is the collection
    ``orders.archive``."""

    def __getitem__(self, name: str) -> Collection[_DocumentType]:
        return Collection._of(self.database, super().__getitem__(name))

    def __getattr__(self, name: str) -> Collection[_DocumentType]:
        return cast(Collection[_DocumentType], super().__getattr__(name))

    def with_options(
        self,
        codec_options: Codec = None,
        read_preference: Any = None,
        write_concern: WriteConcern | None = None,
        read_concern: ReadConcern | None = None,
    ) -> Collection[Any]:
        """As PyMongo's."""
        theirs = super().with_options(codec_options, read_preference, write_concern, read_concern)
        return Collection._of(self.database, theirs)


def operation_time(client: Client[Any]) -> ClusterTime:
    """A cluster time that everything written before this call, to any shard of the client's deployment, is at or
    before."""
    return client._deployment.operation_time(client)


def client_of(watchable: Any) -> Client[Any] | None:
    """The client of a client, database or collection of ours; ``None`` for anything else."""
    return watchable._watched_client() if isinstance(watchable, _Watchable) else None


def readers_of(client: Client[Any]) -> Readers:
    """The connections by which the client's oplog is read. Raises SourceError if the deployment cannot be reached."""
    with driver_errors():
        return client._deployment.readers(client)


def deployment_of(client: Client[Any]) -> MongoClient[Any] | Cluster | None:
    """What the client's oplogs are read from, a replica set or a cluster; ``None`` with ``engine="server"``. Raises
    SourceError if it cannot be reached."""
    if client._deployment.engine == "server":
        return None
    readers = readers_of(client)
    return readers.cluster or readers.client


def compiled_as_watched(
    watchable: Any, stages: Sequence[bytes], *, collation: bytes | None = None, show_expanded_events: bool = False
) -> CompiledPipeline:
    """The stages in the language that a stream of ``watchable`` has. Raises UsageError and SourceError."""
    client = client_of(watchable)
    deployment = None if client is None else deployment_of(client) or client
    profile = None if client is None else client._deployment.profile
    return compiled_for(
        deployment, stages, collation=collation, show_expanded_events=show_expanded_events, profile=profile
    )


def watch_scope(client: Client[Any], scope: Scope, **parameters: Any) -> ChangeStream:
    """``watch`` of a scope whose name the server takes and PyMongo's objects do not ("a$b", names that end in a dot).

    ``parameters``  those of ``watch``, by name
    """
    codec_options = watch_codec_options(
        client.codec_options, parameters.pop("codec_options", None), parameters.pop("document_class", None)
    )
    parameters["pipeline"] = parameters.get("pipeline") or []
    with driver_errors():
        request = WatchRequest(scope=scope, codec_options=codec_options, target=client, client=client, **parameters)
    return client._deployment.open(client, request)
