"""Our merged stream over a recorded cluster's oplogs held in memory, and a shard's part alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson
from tailrace.core.cursor import (
    Action,
    NeedOldest,
    NeedStart,
    OldestEntry,
    OplogRead,
    Position,
    ReadOplog,
    StreamStart,
)
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.update_delta import apply_diff
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import (
    Answer,
    DocumentLookup,
    NeedShard,
    NeedShardKeys,
    OplogBatch,
    Request,
)
from tailrace.core.stream.merge import CONFIG_SHARDS, MergedStream
from tailrace.core.stream.stream import ONE_OPLOG, Need, open_stream
from tailrace.errors import TailraceError
from tailrace.read.source.drive import drive
from tests.golden.replay import MemoryOplog, options_of
from tests.golden.sharded_recording import CONFIG_SERVER, ShardedRecording
from tests.property.working import drive_by


def memory_of(recording: ShardedRecording, member: str, images: Images | None = None) -> MemoryOplog:
    """One member's oplog. Without ``images`` the collections are gone, as when most streams were recorded."""
    if images is None:
        return _oplog_of(recording, member)
    return MemoryOplog(recording.oplogs[member], images.pre_images[member], images.documents)


@lru_cache(maxsize=32)
def _oplog_of(recording: ShardedRecording, member: str) -> MemoryOplog:
    return MemoryOplog(recording.oplogs[member], (), lambda lookups: [None] * len(lookups))


class Images:
    """What a cluster's collections hold at a time, and the pre-images up to there, from nothing but the oplogs: every
    write of every shard, those of migrations too, one after the other."""

    def __init__(self, recording: ShardedRecording, until: ClusterTime) -> None:
        self.pre_images: dict[str, list[bytes]] = {}
        self._held: dict[tuple[str, bytes, bytes], bytes] = {}
        self._uuids: dict[str, bytes] = {}
        stage = {"startAtOperationTime": bson.Timestamp(1, 1), "showMigrationEvents": True}
        plan = build_plan(StreamOptions.parse(Scope.cluster(), stage), profile_for(recording.server))
        for shard in recording.shards:
            oplog = memory_of(recording, shard)
            self.pre_images[shard] = []
            for batch in oplog.batches(ClusterTime(0), until, 1 << 30):
                for events in drive_by(ChangeStreamPipeline(plan).process(batch), oplog.answer):
                    for event in events:
                        self._apply(shard, event)

    def _apply(self, shard: str, event: ChangeEvent) -> None:
        if event.document_key is None:
            return
        uuid = event.token.uuid
        assert uuid is not None
        self._uuids[f"{event.database}.{event.collection}"] = uuid
        identifier = raw_bson.find(event.document_key, b"_id")
        assert identifier is not None
        place = (shard, uuid, event.document_key[identifier.start : identifier.end])
        before = self._held.pop(place, None)
        if before is not None and event.image_key is not None:
            key = event.image_key
            filed = {
                "nsUUID": bson.Binary(key.collection_uuid, 4),
                "ts": key.cluster_time.to_timestamp(),
                "applyOpsIndex": bson.Int64(key.apply_ops_index),
            }
            self.pre_images[shard].append(bson.encode({"_id": filed, "preImage": RawBSONDocument(before)}))
        if event.operation_type in ("insert", "replace"):
            assert event.full_document is not None
            self._held[place] = _stored(event.full_document)
        elif event.operation_type == "update" and before is not None:
            assert event.raw_update is not None
            diff = raw_bson.find(event.raw_update, b"diff")
            assert diff is not None
            self._held[place] = apply_diff(before, raw_bson.value(event.raw_update, diff))

    def documents(self, lookups: Sequence[DocumentLookup]) -> list[bytes | None]:
        return [self._document(lookup) for lookup in lookups]

    def _document(self, lookup: DocumentLookup) -> bytes | None:
        """The document that has all fields of the key, on whichever shard it is."""
        uuid = self._uuids[f"{lookup.database}.{lookup.collection}"]
        wanted = {lookup.document_key[e.start : e.end] for e in raw_bson.elements(lookup.document_key)}
        found = [
            document
            for (_, held_in, _), document in self._held.items()
            if held_in == uuid and wanted <= {document[e.start : e.end] for e in raw_bson.elements(document)}
        ]
        assert len(found) <= 1
        return found[0] if found else None


def _stored(document: bytes) -> bytes:
    """A document as the server keeps it, with ``_id`` first: in a replacement's entry it may come later."""
    parts = [(e.name != b"_id", document[e.start : e.end]) for e in raw_bson.elements(document)]
    return raw_bson.encode_document(*(part for _, part in sorted(parts, key=lambda one: one[0])))


class ShardPart:
    """A stream over one shard's oplog, as the shard's own ``aggregate`` gives it."""

    def __init__(
        self, oplog: MemoryOplog, server: str, database: str, command: Mapping[str, Any], keys: Mapping[bytes, bytes]
    ) -> None:
        plan = build_plan(options_of(database, command), profile_for(server))
        self._stream = open_stream(plan, on_shard=True)
        self._keys = keys
        self._oplog = oplog
        self._position = plan.read_after or ClusterTime(0)
        self.events: list[bytes] = []

    @property
    def closed(self) -> bool:
        return self._stream.invalidated

    @property
    def resume_token(self) -> bytes:
        return self._stream.token.to_bson()

    def advance(self, until: ClusterTime, *, entries_max: int) -> None:
        for batch in self._oplog.batches(self._position, until, entries_max):
            self._stream.feed(ONE_OPLOG, batch)
            for block in drive(self._stream, lambda need: answer_of(need.request, self._oplog, self._keys)):
                self.events += block.events()
        self._position = until


def answer_of(request: Request, oplog: MemoryOplog, keys: Mapping[bytes, bytes]) -> Answer:
    """The answer from an oplog, and for shard keys from the catalog."""
    if isinstance(request, NeedShardKeys):
        return [keys.get(uuid) for uuid in request.uuids]
    return oplog.answer(request)


class MergedReplay:
    """A merged stream over the recorded oplogs, read in any interleaving.

    ``shards``        those that are known when the stream is opened; others are opened when the merge asks for them
    ``config_after``  where the reading of the config server's oplog begins
    ``images``        the documents and pre-images; without them the collections are gone
    ``keys``          what the catalog says of shard keys; by default what it said while the collections existed
    """

    def __init__(
        self,
        recording: ShardedRecording,
        database: str,
        command: Mapping[str, Any],
        *,
        shards: Sequence[str],
        config_after: ClusterTime,
        keys: Mapping[bytes, bytes] | None = None,
        images: Images | None = None,
    ) -> None:
        plan = build_plan(options_of(database, command), profile_for(recording.server))
        self.merged = MergedStream(plan, shards, config_after=config_after)
        self._oplogs = {name: memory_of(recording, name, images) for name in recording.shards}
        self._oplogs[CONFIG_SHARDS] = memory_of(recording, CONFIG_SERVER)
        self._keys = recording.shard_keys if keys is None else keys
        self.events: list[bytes] = []
        self.tokens: list[bytes] = []
        self.error: TailraceError | None = None
        self.opened: list[NeedShard] = []

    def step(self, shard: str, until: ClusterTime) -> None:
        """Read one shard up to ``until``, then take what may leave."""
        if until > self.merged.promised(shard):
            for batch in self._oplogs[shard].batches(self.merged.promised(shard), until, 1 << 30):
                self.feed(shard, batch)

    def feed(self, shard: str, batch: OplogBatch) -> None:
        self.merged.feed(shard, batch)
        for block in drive(self.merged, self._answer):
            self.events += block.events()
            self.tokens += block.tokens()

    def _answer(self, need: Need) -> Answer:
        if isinstance(need.request, NeedShard):
            self.opened.append(need.request)
            return None
        return answer_of(need.request, self._oplogs[need.participant], self._keys)

    def run(self, end: ClusterTime, choose: Callable[[Sequence[str]], str], stride: int) -> None:
        """Read all shards to ``end`` in steps of about ``stride`` increments, the next shard chosen by ``choose``."""
        while not self.merged.invalidated:
            behind = [name for name in self.merged.participants if self.merged.promised(name) < end]
            behind = [name for name in behind if self.merged.wants(name)]
            if not behind:
                return
            name = choose(behind)
            self.step(name, min(end, self._next_time(name, stride)))

    def _next_time(self, name: str, stride: int) -> ClusterTime:
        times = self._oplogs[name].times
        later = bisect_right(times, self.merged.promised(name))
        return times[min(later + stride, len(times)) - 1] if later < len(times) else ClusterTime((1 << 63) - 1)


def random_choice(seed: int) -> Callable[[Sequence[str]], str]:
    return Random(seed).choice


class ClusterSource:
    """Answers a cursor over a recorded cluster, whose oplogs are read up to ``end``, ``entries_max`` entries a time.

    ``shards`` and ``config_after`` are what the stream is opened with; ``opened`` are the shards asked for later
    """

    def __init__(
        self,
        recording: ShardedRecording,
        end: ClusterTime,
        shards: Sequence[str],
        config_after: ClusterTime,
        *,
        entries_max: int,
    ) -> None:
        self._oplogs = {name: memory_of(recording, name) for name in recording.shards}
        self._oplogs[CONFIG_SHARDS] = memory_of(recording, CONFIG_SERVER)
        self._keys = recording.shard_keys
        self._start = StreamStart(end, shards=tuple(shards), config_after=config_after)
        self._end, self._entries_max = end, entries_max
        self.opened: list[str] = []
        self.confirmed: list[str] = []

    def __call__(self, action: Action) -> Any:
        match action:
            case NeedStart():
                return self._start
            case NeedOldest(participant):
                self.confirmed.append(participant)
                return OldestEntry(ClusterTime(0), history_complete=True)
            case ReadOplog(positions, deadline_ms):
                return self._read(positions, deadline_ms or 0)
            case Need(request=NeedShard() as shard):
                self.opened.append(shard.name)
                return None
            case Need(participant, request):
                return answer_of(request, self._oplogs[participant], self._keys)

    def _read(self, positions: Sequence[Position], now_ms: int) -> OplogRead:
        """A batch of the first participant that is not at its end. If there is none, the clock has reached the
        deadline."""
        for name, after in positions:
            if after < self._end:
                batch = next(iter(self._oplogs[name].batches(after, self._end, self._entries_max)))
                return OplogRead(batch, False, 0, name)
        return OplogRead(OplogBatch(b"", self._end), True, now_ms, positions[0].participant)
