"""What a listener is given ahead of its stream: the documents that exist (``start="snapshot"``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import bson
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo.collation import Collation as DriversCollation
from pymongo.errors import PyMongoError

from tailrace.act.consumer.copied import CopiedDocument
from tailrace.act.consumer.rules.need import Pulled
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core import raw_bson
from tailrace.core.expression.stages.pipeline import CompiledPipeline
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import ChangeStreamHistoryLost, UsageError
from tailrace.read.snapshot import SnapshotChunk, SnapshotReader, SnapshotState, begin
from tailrace.read.source.connection import MAJORITY
from tailrace.read.source.failure import source_error
from tailrace.read.source.mongod import MongodSource
from tailrace.watch.client.client import Client, client_of, compiled_as_watched, operation_time, readers_of

#: While a copy runs, the oplog is asked this often whether it still reaches back to the copy's time.
_LOOK_S: Final = 30.0


def _watched(watchable: Any) -> tuple[Client[Any], Any, Scope]:
    """The client, what is read (of a cluster, the cluster), and the scope."""
    client = client_of(watchable)
    if client is None:
        raise UsageError(
            f"a snapshot cannot be taken of {type(watchable).__name__}",
            hint='Watch what tailrace.connect() gives, such as tailrace.connect(uri)["shop"]["orders"]',
        )
    readers = readers_of(client)
    return client, readers.cluster or readers.client, watchable._watched_scope()


def take_snapshot(watchable: Any, before: StreamPosition | None) -> StreamPosition:
    """The position at the beginning of a new snapshot; gaps that are written down in ``before`` stay."""
    _, deployment, scope = _watched(watchable)
    state = begin(deployment, scope)
    gaps = () if before is None else before.gaps
    deployment = None if before is None else before.deployment
    return StreamPosition(at=state.start.to_timestamp(), gaps=gaps, snapshot=state.to_document(), deployment=deployment)


class Copying:
    """A snapshot that goes on at a position: its events, one by one, and with the last one of each chunk the position
    after it. A crash hands the chunk out again.

    The stages of the stream's pipeline are applied to the events, whose ``operationType`` is ``snapshot``.
    """

    def __init__(self, watchable: Any, position: StreamPosition, options: Mapping[str, Any]) -> None:
        self._client, deployment, scope = _watched(watchable)
        self._position = position
        state = SnapshotState.from_document(position.snapshot or {})
        self._reader = SnapshotReader(deployment, scope, state=state)
        self._pipeline: CompiledPipeline | None = None
        if options.get("pipeline"):
            stages = [bson.encode(stage) for stage in options["pipeline"]]
            collation = options.get("collation")
            if isinstance(collation, DriversCollation):
                collation = collation.document
            order = None if collation is None else bson.encode(collation)
            self._pipeline = compiled_as_watched(watchable, stages, collation=order)
        self._looked = time.monotonic()
        self._events = self._pulled()

    def pull(self) -> Pulled:
        """The next event, or the position at which the stream goes on when there is none left. Raises
        ChangeStreamHistoryLost where the oplog has lost that position meanwhile."""
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._refuse_lost_history()
        return next(self._events)

    def _pulled(self) -> Iterator[Pulled]:
        for chunk in self._reader:
            waiting: RawBSONDocument | CopiedDocument | None = None
            for event in self._events_of(chunk):
                if waiting is not None:
                    yield self._of(waiting)
                waiting = event
            state = self._reader.done(chunk).to_document()
            self._position = replace(self._position, snapshot=state)
            if waiting is not None:
                yield self._of(waiting)
        witness = self._reader.state.witness
        entries = {} if witness is None else witness.entries
        yield Pulled(None, None, position=replace(self._position, snapshot=None, entries=entries))

    def _events_of(self, chunk: SnapshotChunk) -> Iterator[RawBSONDocument | CopiedDocument]:
        if self._pipeline is None:
            for document in chunk.documents:
                yield CopiedDocument(document, chunk)
            return
        for event in chunk.events():
            shown = self._pipeline.apply(event)
            if shown is not None:
                yield RawBSONDocument(shown)

    def _of(self, event: RawBSONDocument | CopiedDocument) -> Pulled:
        if isinstance(event, CopiedDocument):
            return Pulled(event, event.token, position=self._position, size=len(event.document))
        data = raw_bson.bytes_of(event)
        element = raw_bson.find(data, b"_id")
        # The event is not decoded for it. A stage may have removed it, or made it something else.
        if element is None or element.type != raw_bson.OBJECT:
            return Pulled(event, event["_id"], position=self._position, size=len(data))
        token = RawBSONDocument(raw_bson.value(data, element))
        return Pulled(event, token, position=self._position, size=len(data))

    def _refuse_lost_history(self) -> None:
        oldest, start = oldest_time(self._client), self._position.at
        if start is not None and oldest > start and not self._oplogs_reach_back():
            raise ChangeStreamHistoryLost(
                f"the oplog now begins at {oldest}, after the time of the snapshot ({start}), "
                "and the copy is not complete",
                hint="Enlarge the oplog, so that it reaches back for as long as a copy takes",
            )

    def _oplogs_reach_back(self) -> bool:
        """Whether the oplogs reach back to their own beginnings: then nothing is lost, whatever their times."""
        readers = readers_of(self._client)
        cluster = readers.cluster
        members = [readers.client] if cluster is None else [cluster.client(one.name) for one in cluster.shards()]
        return all(MongodSource(member).oldest()[1] for member in members)


def oldest_reachable(client: Client[Any]) -> ClusterTime | None:
    """The oldest time that a stream can begin at: from it on no oplog lacks anything. ``None`` where no oplog has lost
    anything yet."""
    readers = readers_of(client)
    cluster = readers.cluster
    members = [readers.client] if cluster is None else [cluster.client(shard.name) for shard in cluster.shards()]
    found = [MongodSource(member).oldest() for member in members]
    return max((first for first, is_whole in found if not is_whole), default=None)


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
