"""A listener's stream: opened at a position, pulled from, opened again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from bson.codec_options import DEFAULT_CODEC_OPTIONS, CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo.errors import PyMongoError

from tailrace.client.change_stream import ChangeStream
from tailrace.client.client import Client, client_of, operation_time, readers_of
from tailrace.consumer.lease import LeaseStore
from tailrace.consumer.rules.need import CloseStream, FindStart, Need, OpenStream, PullChange, Pulled, TakeSnapshot
from tailrace.consumer.rules.position import StreamPosition
from tailrace.errors import InternalError, InvalidResumeToken, UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.connection import MAJORITY
from tailrace.source.failure import source_error
from tailrace.source.mongod import MongodSource

#: How long one look at a quiet stream waits: a listener that is stopped ends after that at the latest.
_AWAIT_MS: Final = 500
_POSITIONS: Final = {"resume_after", "start_after", "start_at_operation_time"}


class Watched(Protocol):
    """What a listener watches: a client, a database or a collection of ``tailrace.connect()``."""

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """How events are decoded."""

    def watch(self, pipeline: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> ChangeStream:
        """A change stream."""


class Watching:
    """Performs what ``rules.listener`` needs of a stream. ``options`` are those of ``watch()``."""

    def __init__(self, watchable: Any, store: LeaseStore, **options: Any) -> None:
        if not callable(getattr(watchable, "watch", None)):
            raise UsageError(
                f"a listener watches a client, a database or a collection, not {type(watchable).__name__}",
                hint='For example tailrace.connect(uri)["shop"]["orders"]',
            )
        if _POSITIONS & options.keys():
            raise UsageError(
                f"{min(_POSITIONS & options.keys())} cannot be given: a listener keeps its position itself",
                hint='Choose start="oldest" or "now" for the first time',
            )
        self._watchable = watchable
        self._store = store
        self._options = {"max_await_time_ms": _AWAIT_MS, **options}
        self._stream: ChangeStream | None = None

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """How handlers see events."""
        chosen: CodecOptions[Any] = getattr(self._watchable, "codec_options", DEFAULT_CODEC_OPTIONS)
        return chosen

    def perform(self, need: Need) -> Any:
        """The answer to a need of the stream."""
        match need:
            case PullChange():
                return self._pull()
            case OpenStream():
                return self._open(need.position)
            case CloseStream():
                return self._close()
            case FindStart():
                return self._find_start(need)
            case TakeSnapshot():
                raise UsageError('start="snapshot" is not available yet', hint='start="oldest"')
            case _:
                raise InternalError(f"nobody answers {type(need).__name__}")

    def _open(self, position: StreamPosition) -> None:
        self._close()
        try:
            self._stream = self._watchable.watch(
                document_class=RawBSONDocument, **self._options, **position.watch_arguments()
            )
        except InvalidResumeToken as error:
            raise InvalidResumeToken(
                f"the committed position does not fit what is watched: {error.message}",
                code=error.code,
                hint="Was the lease used for another collection or pipeline? Use a resource of its own",
            ) from error

    def _pull(self) -> Pulled:
        stream = self._stream
        if stream is None:
            raise InternalError("there is no stream to pull from")
        event = stream.try_next()
        if event is None:
            return Pulled(None, stream.resume_token, alive=stream.alive)
        return Pulled(event, event["_id"], invalidate=event["operationType"] == "invalidate")

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _find_start(self, need: FindStart) -> Timestamp:
        client = client_of(self._watchable)
        if client is None:
            raise UsageError(f"cannot tell where the {need.start} entry of {type(self._watchable).__name__} is")
        if need.start == "now":
            # One tick later begins what was not there yet.
            return operation_time(client).tick().to_timestamp()
        return oldest_time(client)


def oldest_time(client: Client[Any]) -> Timestamp:
    """The cluster time of the oldest entry that is no no-op; of a cluster, the oldest time from which on no shard's
    oplog lacks anything. Where there is nothing but no-ops: the present."""
    readers = readers_of(client)
    if readers.cluster is None:
        members = [readers.client]
    else:
        members = [readers.cluster.client(shard.name) for shard in readers.cluster.shards()]
    whole: list[ClusterTime] = []
    cut: list[ClusterTime] = []
    for member in members:
        source = MongodSource(member)
        first, is_whole = source.oldest()
        oplog = member.get_database("local", read_concern=MAJORITY).get_collection("oplog.rs")
        try:
            entry = oplog.find_one({"op": {"$ne": "n"}}, {"ts": 1}, sort=[("$natural", 1)])
        except PyMongoError as error:
            raise source_error(error, member) from error
        time = first if entry is None else ClusterTime.from_timestamp(entry["ts"])
        if entry is not None or not is_whole:
            (whole if is_whole else cut).append(time)
    if cut:
        return max(cut).to_timestamp()
    return (min(whole) if whole else operation_time(client)).to_timestamp()
