"""What one stream over a sharded cluster reads: the shared tail of each shard, and promises where one is idle."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Final

import bson
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.base.threads import told
from tailrace.core.cursor import Members, OldestEntry, OplogRead, ReadOplog, StreamStart
from tailrace.core.cursor.action import Position
from tailrace.core.oplog.cluster_clock import ClusterClock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import NeedShard, OplogBatch
from tailrace.core.stream.merge import CONFIG_SHARDS
from tailrace.core.stream.stream import Need
from tailrace.read.source.drive import answer_request
from tailrace.read.source.membership import Beginning, beginning
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.promise import PromiseRequester
from tailrace.read.source.routing import OwnerLookup
from tailrace.read.source.topology import Cluster, OpenView, ShardAddress
from tailrace.read.tail.shard_tails import ScopedReads, ShardTails
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.read.tail.tailed_source import TailedSource
from tailrace.watch.client.sharded_stream import refuse_view_in
from tailrace.watch.gateway.reading import OWN_AWAIT_MS, Reading, in_thread, now_ms

#: A shard is asked for a promise this often at most.
_PROMISE_S: Final = 0.02

_log = logging.getLogger("tailrace.gateway")


class _Part:
    """One participant's part: its source, and what asks it for promises."""

    def __init__(self, name: str, client: MongoClient[Any], reads: ScopedReads) -> None:
        self.client = client
        self.source: TailedSource = reads.source(name, client)
        self.source.expect_present_version()
        self.requester = PromiseRequester(client, name, lately=reads.asked(client))
        self.batches: Generator[OplogBatch, None, None] | None = None
        self.asking: Future[None] | None = None
        self.asked_s = 0.0

    def next_own(self, after: ClusterTime) -> OplogBatch:
        """What the participant's own read gives next."""
        if self.batches is None:
            self.batches = self.source.tail(after, await_ms=OWN_AWAIT_MS)
        return next(self.batches)


class ClusterReading(Reading):
    """The reads over a sharded cluster. Commands name the participants; each is opened when it is first named.

    ``keep``  is notified of each tail that is read; it keeps that tail going while there are streams
    """

    def __init__(
        self,
        pool: Executor,
        wake: Callable[[Callable[[], object]], None],
        cluster: Cluster,
        tails: ShardTails,
        scope: Scope,
        *,
        keep: Callable[[MongoClient[Any], SharedTail], None],
    ) -> None:
        super().__init__(pool, wake)
        self._tails = tails
        self._keep = keep
        self._cluster = cluster
        self._reads = tails.of_scope(scope)
        self._owners = OwnerLookup(cluster)
        self._clients: dict[str, MongoClient[Any]] = {}
        self._parts: dict[str, _Part] = {}
        self._view: OpenView | None = None
        self._clock = ClusterClock()

    # -- opening ----------------------------------------------------------------------------------------------------

    async def version_read(self) -> str:
        return await in_thread(self.pool, self._cluster.server_version)

    async def _start(self, scope: Scope) -> StreamStart:
        return await in_thread(self.pool, self._started, scope)

    def _started(self, scope: Scope) -> StreamStart:
        refuse_view_in(self._cluster, scope)
        view = self._view = self._cluster.open_view()
        self._clients = {name: self._cluster.client(name) for name in view.shards}
        if view.config_after is not None:
            self._clients[CONFIG_SHARDS] = self._cluster.config_client()
        return StreamStart(view.time, shards=view.shards, config_after=view.config_after, knows_past=True)

    async def _members(self, after: ClusterTime) -> Members:
        begun: Beginning = await in_thread(self.pool, self._begun, after)
        self._clients.update((member.name, member.client) for member in begun.members)
        return Members(tuple((member.name, member.after) for member in begun.members), begun.config_after)

    def _begun(self, after: ClusterTime) -> Beginning:
        assert self._view is not None
        return beginning(self._cluster, self._view, after)

    async def _oldest(self, participant: str) -> OldestEntry:
        source = MongodSource(self._clients[participant])
        return OldestEntry(*await in_thread(self.pool, source.oldest))

    # -- reading ----------------------------------------------------------------------------------------------------

    def _part(self, name: str) -> _Part:
        part = self._parts.get(name)
        if part is None:
            client = self._clients[name]
            self._keep(client, self._tails.shard(client)[0])
            part = self._parts[name] = _Part(name, client, self._reads)
            part.source.on_ready(self._wake)
        return part

    async def _next(self, action: ReadOplog) -> OplogRead:
        news: OplogRead | None = None
        for position in action.positions:
            batch = await self._batch(position, action.awaited)
            read = OplogRead(batch, False, now_ms(), position.participant)
            if batch.raw:
                return read
            if batch.high_water > position.after and news is None:
                news = read
        first = action.positions[0]
        empty = OplogRead(OplogBatch(b"", first.after), True, now_ms(), first.participant)
        return empty if news is None else news._replace(at_end=True)

    async def _batch(self, position: Position, awaited: ClusterTime | None) -> OplogBatch:
        part = self._part(position.participant)
        if awaited is not None and position.after < awaited:
            part.source.await_time(awaited)
        batch = part.source.poll()
        return batch if batch is not None else await in_thread(self.pool, part.next_own, position.after)

    def _is_news(self, action: ReadOplog, read: OplogRead) -> bool:
        # A promise brings the merge forward as entries do.
        after = next(one.after for one in action.positions if one.participant == read.participant)
        return bool(read.batch.raw) or read.batch.high_water > after

    def _is_joined(self, action: ReadOplog) -> bool:
        return all(self._part(position.participant).source.is_joined for position in action.positions)

    async def _wait(self, action: ReadOplog, seconds: float) -> None:
        if action.awaited is not None:
            self._ask_for_promises(action)
            seconds = min(seconds, _PROMISE_S)
        await super()._wait(action, seconds)

    def _ask_for_promises(self, action: ReadOplog) -> None:
        """Have the shards that hold an event back write a no-op after its time."""
        awaited = action.awaited
        assert awaited is not None
        document = self._clock_document(awaited)
        now = time.monotonic()
        for position in action.positions:
            part = self._part(position.participant)
            if document is None or position.after >= awaited or now < part.asked_s + _PROMISE_S:
                continue
            if part.asking is None or part.asking.done():
                part.asked_s = now
                part.asking = told(
                    self.pool.submit(_ask, part.requester, awaited, document), "a promise could not be asked for"
                )

    def _clock_document(self, until: ClusterTime) -> Mapping[str, Any] | None:
        """The largest ``$clusterTime`` that a member sent, as it was sent; ``None`` while it is before ``until``."""
        for part in self._parts.values():
            document = part.source.clock_document
            if document is not None:
                self._clock.gossip(bson.encode(document))
        if self._clock.document is None or self._clock.now < until:
            return None
        return bson.decode(self._clock.document)

    # -- needs ------------------------------------------------------------------------------------------------------

    async def _look_up(self, need: Need) -> Any:
        request = need.request
        if isinstance(request, NeedShard):
            self._drop(request.name)
            self._clients[request.name] = self._cluster.client_at(ShardAddress(request.name, request.host))
            return None
        source = MongodSource(self._clients[need.participant], retry_seconds=math.inf)
        return await in_thread(self.pool, answer_request, request, source, self._owners)

    def _drop(self, name: str) -> None:
        part = self._parts.pop(name, None)
        if part is None:
            return
        part.source.interrupt()
        if part.batches is not None:
            with suppress(RuntimeError):  # the pool has ended, and with it every read
                told(self.pool.submit(part.batches.close), "a read could not be closed")

    def close(self) -> None:
        self._owners.interrupt()
        for name in list(self._parts):
            self._drop(name)


def _ask(requester: PromiseRequester, until: ClusterTime, document: Mapping[str, Any]) -> None:
    try:
        requester.ask(until, document)
    except PyMongoError as error:
        # The reader of the shard meets the same trouble and reports it; the stream asks again as long as it waits.
        _log.debug("a request for a promise failed: %s", type(error).__name__)
