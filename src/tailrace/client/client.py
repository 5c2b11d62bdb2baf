"""``connect()``: a deployment whose changes can be watched, with PyMongo's names, so that code moves by one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collation import Collation

from tailrace.client.change_stream import ChangeStream, OplogChangeStream, checked_options
from tailrace.client.request import WatchRequest
from tailrace.client.server_stream import ServerChangeStream
from tailrace.client.sharded_stream import ShardedChangeStream
from tailrace.errors import UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.profile import chosen_profile
from tailrace.source.connection import open_client
from tailrace.source.mongod import MongodSource
from tailrace.source.topology import Cluster
from tailrace.source.uri import URI_EXAMPLE, ClientOptions, ConnectionString, hide

Engine = Literal["oplog", "server"]
ENGINES: tuple[Engine, ...] = ("oplog", "server")


def connect(
    uri: str | ConnectionString | Sequence[str | ConnectionString],
    engine: Engine = "oplog",
    *,
    server_version: str | None = None,
    **options: Any,
) -> Client:
    """A client for the replica set or the sharded cluster at ``uri``.

    ``uri``      of a replica set; of a cluster's config server or of its mongos, and its shards are found and followed;
                 or a list of URIs, one for each shard of a cluster (docs/how-to/sharded-clusters.md)
    ``engine``   "oplog": the events are made here, from the oplog; "server": the server's own change stream is read
    ``server_version``  engine "oplog": whose events to make, such as "7.0"; by default those of the deployment's own
                        version (docs/reference/server-versions.md)
    ``options``  PyMongo's client options (``tz_aware``, ``serverSelectionTimeoutMS``, ``tls``, ...)

    Like PyMongo's, it connects at first use. Raises UsageError where the URI or an option cannot be used; it never
    holds the password.
    """
    uri, options = _hidden(uri), ClientOptions(options)
    return Client(uri, engine, server_version=server_version, **options)


def _hidden(uri: Any) -> Any:
    """The URI or URIs without their secrets showing: what a traceback prints of a frame's locals holds none then."""
    if isinstance(uri, (str, ConnectionString)):
        return hide(uri)
    if isinstance(uri, Sequence) and uri and all(isinstance(one, (str, ConnectionString)) for one in uri):
        return [hide(one) for one in uri]
    raise UsageError(
        "the connection URI must be a string, or a list of strings with one for each shard", hint=URI_EXAMPLE
    )


class _Watchable:
    """What can be watched: a cluster, a database, a collection."""

    def __init__(self, client: Client, scope: Scope, codec_options: CodecOptions[Any]) -> None:
        self._client = client
        self._scope = scope
        self._codec_options = codec_options

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """How events are decoded where ``watch`` does not say otherwise."""
        return self._codec_options

    def watch(
        self,
        pipeline: Sequence[Mapping[str, Any]] | None = None,
        full_document: str | None = None,
        *,
        full_document_before_change: str | None = None,
        resume_after: Mapping[str, Any] | None = None,
        start_after: Mapping[str, Any] | None = None,
        start_at_operation_time: Timestamp | None = None,
        max_await_time_ms: int | None = None,
        batch_size: int | None = None,
        collation: Collation | Mapping[str, Any] | None = None,
        comment: Any = None,
        show_expanded_events: bool | None = None,
        document_class: type[Any] | None = None,
        codec_options: CodecOptions[Any] | None = None,
        session: ClientSession | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChangeStream:
        """A change stream, with PyMongo's parameters.

        ``document_class``     of the events; the client's (``dict``) by default. ``RawBSONDocument`` gives exact bytes
        ``max_await_time_ms``  how long ``try_next`` waits for an event (default 1000)
        ``batch_size``         how many oplog entries are read at a time (engine "server": events)
        ``options``            further options of the ``$changeStream`` stage by the server's own names, such as
                               ``{"showSystemEvents": True}``
        ``collation``          how the stages of ``pipeline`` compare strings; one other than the simple one needs the
                               extra ``icu``, and engine "oplog": PyMongo does not send it with a change stream
        ``session``            engine "server" only

        Raises what the server's ``aggregate`` would raise, by its code, and SourceError where the oplog cannot be read.
        """
        chosen = codec_options or self._codec_options
        if not isinstance(chosen, CodecOptions):
            raise UsageError(f"codec_options must be CodecOptions, not {type(chosen).__name__}")
        if document_class is not None:
            try:
                chosen = chosen.with_options(document_class=document_class)
            except (TypeError, ValueError) as error:
                raise UsageError(str(error)) from None
        return self._client._open(
            WatchRequest(
                scope=self._scope,
                codec_options=chosen,
                pipeline=[] if pipeline is None else pipeline,
                full_document=full_document,
                full_document_before_change=full_document_before_change,
                resume_after=resume_after,
                start_after=start_after,
                start_at_operation_time=start_at_operation_time,
                show_expanded_events=show_expanded_events,
                max_await_time_ms=max_await_time_ms,
                batch_size=batch_size,
                collation=collation,
                comment=comment,
                session=session,
                options=options,
            )
        )


class Client(_Watchable):
    """A replica set or a cluster. ``client["shop"]`` or ``client.shop`` is a database, ``client["shop"]["orders"]`` a
    collection.

    A client and its streams belong to one thread; ``pymongo`` is PyMongo's client for everything else, and may be
    used from any.
    """

    def __init__(
        self,
        uri: str | ConnectionString | Sequence[str | ConnectionString],
        engine: Engine = "oplog",
        *,
        server_version: str | None = None,
        **options: Any,
    ) -> None:
        uri, options = _hidden(uri), ClientOptions(options)
        self._uris: list[ConnectionString] = uri if isinstance(uri, list) else [uri]  # type: ignore[list-item]
        self._one_uri = not isinstance(uri, list)
        if engine not in ENGINES:
            raise UsageError(f"there is no engine {engine!r}", hint=f"One of: {', '.join(ENGINES)}")
        if server_version is not None and engine == "server":
            raise UsageError(
                "a server version cannot be chosen for the server's own streams",
                hint='Leave it out, or use engine="oplog"',
            )
        if not self._one_uri and engine == "server":
            raise UsageError("a server's own stream is opened at one URI", hint="Give that of the mongos")
        self._options = options if isinstance(options, ClientOptions) else ClientOptions(options)
        self._cluster: Cluster | None = None
        self._discovered = False
        self._profile = None if server_version is None else chosen_profile(server_version)
        self.engine: Engine = engine
        self.pymongo: MongoClient[Any] = open_client(self._uris[0], **options)
        self._native: MongoClient[Any] | None = None
        if engine == "server":
            self._native = open_client(self._uris[0], **{**options, "document_class": RawBSONDocument})
        self._source = MongodSource(self.pymongo)
        super().__init__(self, Scope.cluster(), self.pymongo.codec_options)

    def __repr__(self) -> str:
        if "pymongo" not in vars(self):
            return f"{type(self).__name__}(...)"
        inside = repr(self.pymongo).partition("(")[2].removesuffix(")")
        return f"{type(self).__name__}({inside}, engine={self.engine!r})"

    def get_database(self, name: str, codec_options: CodecOptions[Any] | None = None) -> Database:
        """A database to watch, with codec options of its own if given."""
        return Database(self, Scope.of_database(name), codec_options or self._codec_options)

    def __getitem__(self, name: str) -> Database:
        return self.get_database(name)

    def __getattr__(self, name: str) -> Database:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get_database(name)

    def _open(self, request: WatchRequest) -> ChangeStream:
        if self._native is not None:
            return ServerChangeStream(self._native, request)
        checked_options(request)  # what is wrong with the call is said without connecting
        if self.cluster is not None:
            return ShardedChangeStream(self.cluster, self.pymongo, request, self._profile)
        return OplogChangeStream(self._source, request, self._profile)

    def operation_time(self) -> ClusterTime:
        """A cluster time that everything written before this call, to any shard, is at or before."""
        if self._native is None and self.cluster is not None:
            return self.cluster.open_view().time
        return self._source.operation_time()

    @property
    def cluster(self) -> Cluster | None:
        """The sharded cluster that this is, ``None`` for a replica set. The first use connects."""
        if not self._discovered:
            if self._one_uri:
                self._cluster = Cluster.discover(self.pymongo, self._uris[0], self._options)
            else:
                self._cluster = Cluster.of_shards(self._uris, self._options)
            self._discovered = True
        return self._cluster

    def close(self) -> None:
        """Close the connections. Streams still open end with an error."""
        if self._cluster is not None:
            self._cluster.close()
        self.pymongo.close()
        if self._native is not None:
            self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Database(_Watchable):
    """A database of the replica set."""

    def __repr__(self) -> str:
        return f"Database({self._client!r}, {self.name!r})"

    @property
    def name(self) -> str:
        return str(self._scope)

    def get_collection(self, name: str, codec_options: CodecOptions[Any] | None = None) -> Collection:
        """A collection to watch, with codec options of its own if given."""
        return Collection(self._client, Scope.of_collection(self.name, name), codec_options or self._codec_options)

    def __getitem__(self, name: str) -> Collection:
        return self.get_collection(name)

    def __getattr__(self, name: str) -> Collection:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get_collection(name)


class Collection(_Watchable):
    """A collection of the replica set. ``orders["archive"]`` is the collection ``orders.archive``."""

    def __repr__(self) -> str:
        database = Database(self._client, Scope.of_database(self._scope.database or ""), self._codec_options)
        return f"Collection({database!r}, {self._scope.collection!r})"

    @property
    def full_name(self) -> str:
        return str(self._scope)

    def __getitem__(self, name: str) -> Collection:
        scope = Scope.of_collection(self._scope.database or "", f"{self._scope.collection}.{name}")
        return Collection(self._client, scope, self._codec_options)
