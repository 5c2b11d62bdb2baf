"""A listener's stream: opened at a position, pulled from, opened again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from bson.codec_options import DEFAULT_CODEC_OPTIONS, CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.act.consumer.event_stream import WholeEventStream
from tailrace.act.consumer.lane_stream import LaneStream, LaneWatchable
from tailrace.act.consumer.lease import LeaseStore
from tailrace.act.consumer.rules.large_events import Refused, as_raw, operation_and_token
from tailrace.act.consumer.rules.need import (
    CloseStream,
    FindStart,
    ListenerNeed,
    MarkEntries,
    OpenStream,
    PullChange,
    Pulled,
    TakeSnapshot,
)
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.snapshots import Copying, oldest_time, take_snapshot
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.errors import (
    InternalError,
    InvalidResumeToken,
    OtherHistoryError,
    SourceError,
    UsageError,
)
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import check_witness, compared_oplogs, identity_if_allowed
from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.client import Client, client_of, deployment_of, operation_time
from tailrace.watch.client.patience import try_next_patiently

#: How long one read of a quiet stream waits: a listener that is stopped ends after that at the latest.
_AWAIT_MS: Final = 500
_UNAUTHORIZED: Final = 13
#: How far before a position to search for an entry that stands for it.
_LOOKS_BACK_S: Final = (1, 4, 12)
_EXAMPLE: Final = 'For example tailrace.connect(uri)["shop"]["orders"]'
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
                hint=_EXAMPLE,
            )
        if type(watchable).__module__.partition(".")[0] == "pymongo":
            raise UsageError(
                f"a listener watches what tailrace.connect() gives, not PyMongo's own {type(watchable).__name__}",
                hint=_EXAMPLE,
            )
        if _POSITIONS & options.keys():
            raise UsageError(
                f"{min(_POSITIONS & options.keys())} cannot be given: a listener keeps its position itself",
                hint='Choose start="oldest" or "now" for the first time',
            )
        self._watchable = watchable
        self._store = store
        self._options = {"max_await_time_ms": _AWAIT_MS, **options}
        self._stream: WholeEventStream | LaneStream | None = None
        self._copy: Copying | None = None

    @property
    def _client(self) -> Client[Any] | None:
        watchable = self._watchable.watched if isinstance(self._watchable, LaneWatchable) else self._watchable
        return client_of(watchable)

    @property
    def codec_options(self) -> CodecOptions[Any]:
        """How handlers see events."""
        chosen: CodecOptions[Any] = getattr(self._watchable, "codec_options", DEFAULT_CODEC_OPTIONS)
        return chosen

    def perform(self, need: ListenerNeed) -> Any:
        """The answer to a need of the stream."""
        match need:
            case PullChange():
                return self._pull(need.wait)
            case OpenStream():
                return self._open(need.position)
            case MarkEntries():
                return self._mark_entries(need)
            case CloseStream():
                return self._close()
            case FindStart():
                return self._find_start(need)
            case TakeSnapshot():
                # A lane's own. Asked of the class: a collection has an attribute of every name.
                take = getattr(type(self._watchable), "take_snapshot", take_snapshot)
                return take(self._watchable, need.position)
            case _:
                raise InternalError(f"nobody answers {type(need).__name__}")

    def _open(self, position: StreamPosition) -> str | None:
        self._close()
        deployment = self._checked_deployment(position)
        if position.snapshot is not None:
            # The positions of a copy are made of this one: they know the deployment too.
            known = replace(position, deployment=deployment or position.deployment)
            self._copy = Copying(self._watchable, known, self._options)
            return deployment
        try:
            if isinstance(self._watchable, LaneWatchable):
                self._stream = self._watchable.watch(**position.watch_arguments())
            else:
                self._stream = WholeEventStream(self._watchable, self._options, position)
        except InvalidResumeToken as error:
            raise InvalidResumeToken(
                f"the committed position does not fit what is watched: {error.message}",
                code=error.code,
                hint="Was the lease used for another collection or pipeline? Use a resource of its own",
            ) from error
        return deployment

    def _checked_deployment(self, position: StreamPosition) -> str | None:
        """What is watched now, if it is what the position is of. A position says nothing of its deployment otherwise:
        a time or a high-water mark of one is taken by all."""
        client = self._client
        deployment = None if client is None else deployment_of(client)
        if deployment is None:
            return None
        identity = identity_if_allowed(deployment, waits=False).name_and_id
        before = position.deployment
        if before is not None and identity is not None and before != identity and _kind(before) == _kind(identity):
            raise OtherHistoryError(
                f"the committed position is of another deployment: it was read from {before}, and this is {identity}",
                hint="Connect to the deployment that the listener has followed, or give this one a resource of its own",
            )
        self._check_entries(position, deployment)
        return identity

    def _check_entries(self, position: StreamPosition, deployment: MongoClient[Any] | Cluster) -> None:
        """Raise OtherHistoryError where the deployment has another history than the one that the position is of."""
        if not position.entries:
            return
        nobody = DeploymentIdentity()
        check_witness(
            Witness(nobody, position.entries),
            nobody,
            compared_oplogs(deployment, position.entries, oplogs_of(deployment)),
            what="the changes before the committed position",
            hint="The effects of changes that the restore has undone are still there. Correct the targets, and give "
            "the listener a resource of its own",
        )

    def _mark_entries(self, need: MarkEntries) -> Mapping[str, EntryMark] | None:
        client = self._client
        deployment = None if client is None else deployment_of(client)
        if deployment is None:
            return None
        until = need.position.cluster_time
        try:
            found = {name: _newest_mark(source, need.after, until) for name, source in oplogs_of(deployment).items()}
        except SourceError as error:
            if error.code != _UNAUTHORIZED:
                raise
            return None
        return {name: mark for name, mark in found.items() if mark is not None}

    def _pull(self, wait: bool) -> Pulled:
        if self._copy is not None:
            pulled = self._copy.pull()
            if pulled.event is None and pulled.position is not None:
                self._open(pulled.position)
            return pulled
        stream = self._stream
        if stream is None:
            raise InternalError("there is no stream to pull from")
        if not wait and not stream.has_next:
            return Pulled(None, None)
        event = try_next_patiently(stream)
        if event is None:
            return Pulled(None, stream.resume_token, alive=stream.alive)
        if isinstance(event, Refused):
            is_last = ResumeToken.parse(event.token).from_invalidate
            return Pulled(as_raw(event.event), event.token, is_last, alone=True, error=event.error)
        if not isinstance(event, RawBSONDocument):  # of a lane at a barrier
            return Pulled(event, event["_id"], alone=True)
        raw = raw_bson.bytes_of(event)
        token, kind = operation_and_token(raw)
        return Pulled(event, token, kind == "invalidate", size=len(raw), alone=kind in ("invalidate", "barrier"))

    def _close(self) -> None:
        stream, self._stream, self._copy = self._stream, None, None
        if stream is not None:
            stream.close()

    def _find_start(self, need: FindStart) -> Timestamp:
        client = self._client
        if client is None:
            raise UsageError(f"cannot tell where the {need.start} entry of {type(self._watchable).__name__} is")
        if need.start == "now":
            # One tick later begins what was not there yet.
            return operation_time(client).tick().to_timestamp()
        return oldest_time(client)


def _newest_mark(source: MongodSource, after: ClusterTime, until: ClusterTime) -> EntryMark | None:
    """The entry at ``until``. Where there is none, as on a shard that others were ahead of, one that is not much older:
    an idle primary writes every ten seconds. (The last one before a time cannot be found by a seek.)"""
    for seconds in _LOOKS_BACK_S:
        begin = max(after, ClusterTime(max(0, until - (seconds << 32))))
        mark = source.mark_between(begin, until)
        if mark is not None:
            return mark
    return source.mark_between(after, until)


def oplogs_of(deployment: MongoClient[Any] | Cluster) -> dict[str, MongodSource]:
    """The deployment's oplogs by name. A member that is away is not waited for: the listener tries again on its own."""
    if isinstance(deployment, Cluster):
        clients = {shard.name: deployment.client(shard.name) for shard in deployment.shards()}
        return {name: MongodSource(client, retry_seconds=0, waits=False) for name, client in clients.items()}
    source = MongodSource(deployment, retry_seconds=0, waits=False)
    return {source.name: source}


def _kind(deployment: str) -> bool:
    """Whether it is a cluster. A replica set may become one, and its history goes on."""
    return deployment.startswith("cluster/")
