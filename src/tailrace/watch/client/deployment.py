"""What a client's streams are opened on: the oplog, by connections of their own, or the server's own stream."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pymongo import MongoClient
from pymongo.errors import ConfigurationError, InvalidOperation

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import chosen_profile
from tailrace.errors import ChangeStreamHistoryLost, ServerError, UsageError
from tailrace.read.source.connection import Reader
from tailrace.read.source.driver_error import driver_errors
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.time_limit import time_limit_of
from tailrace.read.source.topology import Cluster
from tailrace.read.tail.shard_tails import ShardTails
from tailrace.read.tail.shared_tail import SharedTail, TailStatistics
from tailrace.read.tail.tailed_source import TailedSource
from tailrace.watch.client import kernel_loader
from tailrace.watch.client.arguments import Arguments, refused
from tailrace.watch.client.change_stream import ChangeStream, OplogChangeStream
from tailrace.watch.client.checked import checked_options
from tailrace.watch.client.commands import telling_refusals
from tailrace.watch.client.exact_request import asks_for_exact, with_server_names
from tailrace.watch.client.request import WatchRequest, depends_on_version
from tailrace.watch.client.server_stream import ServerChangeStream
from tailrace.watch.client.session import StreamSession
from tailrace.watch.client.sharded_stream import ShardedChangeStream
from tailrace.watch.client.snapshot_stream import SnapshotChangeStream, copies_first

if TYPE_CHECKING:
    from tailrace.read.archive.cluster_hybrid import ArchivedShards

EngineName = Literal["oplog", "server"]
ENGINES: Final[tuple[EngineName, ...]] = ("oplog", "server")


class Readers:
    """The connections that one read preference needs, made at its first stream.

    ``client``   of the replica set, or of the config server or mongos; ``source`` reads its oplog
    ``tail``     reads its oplog for all streams together; ``shard_tails`` do so on the shards of a cluster
    ``cluster``  the sharded cluster that this is; ``None`` for a replica set
    """

    def __init__(self, client: MongoClient[Any], window_bytes: int) -> None:
        self.client = client
        self.source = MongodSource(client)
        self.tail = SharedTail(client, window_bytes=window_bytes, on_read=kernel_loader.is_ready)
        self.shard_tails = ShardTails(window_bytes=window_bytes, on_read=kernel_loader.is_ready)
        self.cluster: Cluster | None = None


class WatchedDeployment:
    """The replica set or cluster that a client was made for.

    ``arguments``  of the client
    ``seeds``      the addresses that PyMongo has found in them
    ``window_bytes``  of the oplog's end for streams that read it together

    Connects at the first stream, by clients of its own: neither the user's pool nor the user's listeners see the oplog
    being read. May be used from several threads.
    """

    def __init__(  # noqa: PLR0917
        self,
        arguments: Arguments,
        engine: EngineName,
        server_version: str | None,
        window_bytes: int,
        archive: str | Path | None = None,
        images: str | Path | None = None,
    ) -> None:
        if engine not in ENGINES:
            raise refused(f"there is no engine {engine!r}", ValueError, f"One of: {', '.join(ENGINES)}")
        if server_version is not None and engine == "server":
            raise refused(
                "a server version cannot be chosen for the server's own streams",
                ConfigurationError,
                'Leave it out, or use engine="oplog"',
            )
        if arguments.shards and engine == "server":
            raise refused("a server's own stream is opened at one URI", ConfigurationError, "Give that of the mongos")
        if archive is not None and (arguments.shards or engine == "server"):
            raise refused(
                "an archive cannot be used with engine='server', nor with a list of shards",
                ConfigurationError,
                "Leave it out",
            )
        self._archive = archive
        self._images = images
        with driver_errors():
            self.profile = None if server_version is None else chosen_profile(server_version)
        self.engine: EngineName = engine
        self._arguments = arguments
        self._window_bytes = window_bytes
        self._client: MongoClient[Any] | None = None
        self._readers: dict[str, Readers] = {}
        self._lock = threading.Lock()
        self._closed = False

    def open(self, client: MongoClient[Any], request: WatchRequest) -> ChangeStream:
        """The stream that was asked of ``client``."""
        with driver_errors(), time_limit_of(client, request.timeout_ms):  # rule 31
            if copies_first(request):
                return self._open_snapshot(client, request)
            if self.engine == "server":
                return ServerChangeStream(client, request)
            if client.options.auto_encryption_opts is not None:
                raise refused(
                    "the oplog holds encrypted fields as they are, and this client decrypts what it reads",
                    ConfigurationError,
                    'Use engine="server"',
                )
            check_read_concern(request.target)
            exact = asks_for_exact(request)
            if exact:
                request = with_server_names(request)
            with telling_refusals(request):
                StreamSession(request.session).check_aggregate()
                self._check_call(request)
            readers = self.readers(client, request.read_preference)
            if exact:
                return self._open_exact(readers, request)
            if readers.cluster is not None:
                shared = readers.shard_tails.of_scope(request.scope)
                archive = None if self._archive is None else _archived_shards(self._archive)
                return ShardedChangeStream(
                    readers.cluster, readers.client, request, self.profile, shared, archive=archive
                )
            if self._archive is not None:
                live = MongodSource(readers.client, waits=False, reads_ahead=True)
                return _open_with_archive(
                    live, self._archive, lambda source: OplogChangeStream(source, request, self.profile)
                )
            source = TailedSource(readers.client, readers.tail, request.scope, waits=False, reads_ahead=True)
            return OplogChangeStream(source, request, self.profile)

    def _check_call(self, request: WatchRequest) -> None:
        """Say what is wrong with the call without connecting, unless the error depends on the server's version."""
        try:
            checked_options(request, self.profile)
        except UsageError:
            if self.profile is not None or not depends_on_version(request):
                raise

    def _open_snapshot(self, client: MongoClient[Any], request: WatchRequest) -> ChangeStream:
        if asks_for_exact(request):
            raise refused(
                "exact images and a snapshot do not go together: the image state belongs to the present",
                ConfigurationError,
                "Leave out the images, or start=",
            )
        if client.options.auto_encryption_opts is not None:
            raise refused(
                "a snapshot copies encrypted fields as they are, and this client decrypts what it reads",
                ConfigurationError,
                "Watch without start=, and read the documents with the client",
            )
        readers = self.readers(client, request.read_preference)
        return SnapshotChangeStream(
            client,
            readers.cluster or readers.client,
            request,
            lambda following: self.open(client, following),
            self.profile,
        )

    def _open_exact(self, readers: Readers, request: WatchRequest) -> ChangeStream:
        try:
            from tailrace.watch.client.exact_sharded import ExactShardedStream  # noqa: PLC0415  not without lmdb
            from tailrace.watch.client.exact_stream import open_exact  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise refused(
                f"exact images need the package {error.name}", ConfigurationError, "Install tailrace[images]"
            ) from None
        if readers.cluster is not None:
            if self._archive is not None:
                raise refused(
                    "exact images of a sharded cluster cannot be computed from an archive",
                    ConfigurationError,
                    "Leave out archive or images",
                )
            return ExactShardedStream(readers.cluster, readers.client, request, self.profile, self._images)
        live = MongodSource(readers.client, waits=False, reads_ahead=True)
        if self._archive is None:
            return open_exact(live, self._images, request, self.profile)
        return _open_with_archive(
            live, self._archive, lambda source: open_exact(source, self._images, request, self.profile, recover=True)
        )

    def operation_time(self, client: MongoClient[Any]) -> ClusterTime:
        """A cluster time that everything written before this call, to any shard, is at or before."""
        with driver_errors():
            if self.engine == "server":
                return MongodSource(client).operation_time()
            readers = self.readers(client)
            return readers.source.operation_time() if readers.cluster is None else readers.cluster.open_view().time

    def readers(self, client: MongoClient[Any], read_preference: Any = None) -> Readers:
        """Those of ``read_preference``, the client's by default. The first use connects."""
        preference = client.read_preference if read_preference is None else read_preference
        with self._lock:
            if self._closed:
                raise InvalidOperation("Cannot use MongoClient after close")
            found = self._readers.get(repr(preference))
            if found is None:
                found = self._readers[repr(preference)] = self._connected(client, preference)
            return found

    def _connected(self, client: MongoClient[Any], preference: Any) -> Readers:
        uri, options = self._arguments.uri(client.eq_props()[0]), self._arguments.of_readers
        if preference != client.read_preference:
            options["read_preference"] = preference
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's client has warned already
            made = Readers(Reader.opened(uri, self._arguments.port, options), self._window_bytes)
        try:
            if self._arguments.shards:
                made.cluster = Cluster.of_shards(self._arguments.shards, options)
            else:
                made.cluster = Cluster.discover(made.client, uri, options)
        except BaseException:
            made.client.close()
            raise
        return made

    @property
    def tail_statistics(self) -> TailStatistics:
        """How the streams share the reading of oplogs."""
        with self._lock:
            readers = list(self._readers.values())
        tails = (each.tail if each.cluster is None else each.shard_tails for each in readers)
        return TailStatistics.total(tail.statistics for tail in tails)

    def close(self) -> None:
        """Close the connections. Streams still open end with an error."""
        with self._lock:
            self._closed = True
            readers = list(self._readers.values())
        for each in readers:
            each.tail.close()
            each.shard_tails.close()
            if each.cluster is not None:
                each.cluster.close()
            each.client.close()


def check_read_concern(target: Any) -> None:
    """Raises the server's error if the read concern of what is watched is not majority: ServerError 72, or 9 for an
    unknown level."""
    level = None if target is None else target.read_concern.level
    if level in (None, "majority"):
        return
    if level not in ("local", "available", "linearizable", "snapshot"):
        raise ServerError(
            "readConcern.level must be either 'local', 'majority', 'linearizable', 'available', or 'snapshot'", code=9
        )
    raise ServerError(
        f'Command aggregate does not support {{ readConcern: {{ level: "{level}", provenance: "clientSupplied" }} }} '
        ":: caused by :: Aggregation stage $changeStream cannot run with a readConcern other than 'majority'. Current "
        f"readConcern: {level}",
        code=72,
    )


def _archived_shards(folder: str | Path) -> ArchivedShards:
    from tailrace.read.archive.cluster_hybrid import ArchivedShards  # noqa: PLC0415  not without pyarrow

    return ArchivedShards(folder)


def _open_with_archive(
    live: MongodSource, folder: str | Path, opened: Callable[[LiveSource], ChangeStream]
) -> ChangeStream:
    """A stream whose start may lie before the oplog's beginning. Raises 286 with the hole's two ends where the archive
    and the oplog do not meet."""
    from tailrace.read.archive.hybrid import HybridSource  # noqa: PLC0415  not without pyarrow
    from tailrace.read.archive.source import ArchiveSource  # noqa: PLC0415

    source = HybridSource(live, ArchiveSource(folder))
    try:
        return opened(source)
    except ChangeStreamHistoryLost:
        source.refuse_hole()
        raise
