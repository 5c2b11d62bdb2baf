"""Our merged stream over a recorded cluster's oplogs held in memory, and a shard's part alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from tailrace.errors import TailraceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.merge import CONFIG_SHARDS, MergedChangeStream
from tailrace.pipeline.plan import build_plan
from tailrace.pipeline.profile import profile_for
from tailrace.pipeline.request import Answer, Emit, NeedShard, NeedShardKeys, OplogBatch, Request, Running
from tailrace.pipeline.stream import ChangeStreamPipeline
from tests.golden.replay import MemoryOplog, options_of
from tests.golden.sharded_recording import CONFIG_SERVER, ShardedRecording


def memory_of(recording: ShardedRecording, member: str) -> MemoryOplog:
    """One member's oplog. The collections are gone when the streams with ``updateLookup`` were recorded."""
    return MemoryOplog(recording.oplogs[member], (), lambda lookups: [None] * len(lookups))


class ShardPart:
    """A stream over one shard's oplog, as the shard's own ``aggregate`` gives it."""

    def __init__(
        self, oplog: MemoryOplog, server: str, database: str, command: Mapping[str, Any], keys: Mapping[bytes, bytes]
    ) -> None:
        plan = build_plan(options_of(database, command), profile_for(server))
        self._pipeline = ChangeStreamPipeline(plan, on_shard=True)
        self._keys = keys
        self._oplog = oplog
        self._position = plan.read_after or ClusterTime(0)
        self.events: list[bytes] = []

    @property
    def closed(self) -> bool:
        return self._pipeline.invalidated

    @property
    def resume_token(self) -> bytes:
        return self._pipeline.resume_token.to_bson()

    def advance(self, until: ClusterTime, *, entries_max: int) -> None:
        for batch in self._oplog.batches(self._position, until, entries_max):
            for emit in answered(self._pipeline.process(batch), self._oplog, self._keys):
                assert isinstance(emit, Emit)
                self.events.extend(event.to_bson() for event in emit.events)
        self._position = until


def answered(running: Running, oplog: MemoryOplog, keys: Mapping[bytes, bytes]) -> Iterator[Request | Emit]:
    """Drive a generator: what cannot be answered from an oplog is yielded."""
    answer: Answer = None
    while True:
        try:
            request = running.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(request, Emit | NeedShard):
            yield request
        elif isinstance(request, NeedShardKeys):
            answer = [keys.get(uuid) for uuid in request.uuids]
        else:
            answer = oplog.answer(request)


class MergedReplay:
    """A merged stream over the recorded oplogs, read in any interleaving.

    ``shards``        those that are known when the stream is opened; others are opened when the merge asks for them
    ``config_after``  where the reading of the config server's oplog begins
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
    ) -> None:
        plan = build_plan(options_of(database, command), profile_for(recording.server))
        self.merged = MergedChangeStream(plan, shards, config_after=config_after)
        self._oplogs = {name: memory_of(recording, name) for name in recording.shards}
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
        for _ in answered(self.merged.process(shard, batch), self._oplogs[shard], self._keys):
            self.take()
        self.take()

    def take(self) -> None:
        for given in answered(self.merged.take(), self._oplogs[CONFIG_SHARDS], self._keys):
            if isinstance(given, NeedShard):
                self.opened.append(given)
            elif isinstance(given, Emit):
                self.events.extend(event.to_bson() for event in given.events)
                self.tokens.extend(event.token_bson for event in given.events)

    def run(self, end: ClusterTime, choose: Callable[[Sequence[str]], str], stride: int) -> None:
        """Read all shards to ``end`` in steps of about ``stride`` increments, the next shard chosen by ``choose``."""
        while not self.merged.invalidated:
            behind = [name for name in self.merged.shards if self.merged.promised(name) < end]
            behind = [name for name in behind if self.merged.wants(name)]
            if not behind:
                return
            name = choose(behind)
            self.step(name, min(end, self._next_time(name, stride)))

    def _next_time(self, name: str, stride: int) -> ClusterTime:
        times = self._oplogs[name].times
        position = self.merged.promised(name)
        later = [time for time in times if time > position]
        return later[min(stride, len(later)) - 1] if later else ClusterTime((1 << 63) - 1)


def random_choice(seed: int) -> Callable[[Sequence[str]], str]:
    return Random(seed).choice
