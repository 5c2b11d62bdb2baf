"""The merge: many shards' events in one order, each as soon as no shard can give an earlier one.

docs/design/sharded-merge.md gives the reasons. The merged order is the byte order of the resume tokens. A heap
holds the first waiting event of every shard; the smallest leaves when each shard of which nothing waits has promised to
be past its cluster time. Equal tokens of two shards (a sharded collection dropped everywhere at the same time) both
leave, one after the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Final

from tailrace.errors import TailraceError, invariant, on_shard
from tailrace.event.change_event import ChangeEvent
from tailrace.event.resume_token import ResumeToken, token_order
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.pipeline.participant import ShardStream
from tailrace.pipeline.router import RouterPipeline, must_search
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import Plan, build_plan
from tailrace.plan.request import Answer, Emit, NeedShard, OplogBatch, Request, Running
from tailrace.stage.handle_topology_change import HandleTopologyChange

#: The participant that follows ``config.shards`` in the config server's oplog. No shard can be called so.
CONFIG_SHARDS: Final = "config.shards"
#: A shard of which this much waits is not read further until the others are past it.
BUFFER_BYTES_MAX: Final = 32 * 1024 * 1024
#: So many events pass the router's stages together.
_RUN_EVENTS_MAX: Final = 1_000
#: Later than every cluster time: what a shard promises that gives nothing more.
_NEVER: Final = ClusterTime((1 << 64) - 1)


class MergedChangeStream:
    """One change stream over the oplogs of a sharded cluster.

    Feed each shard's batches in oplog order (``process``), tell what is known beyond them (``promise``), and ``take``
    what may leave. ``process`` and ``take`` are generators of requests, as a pipeline over one oplog is; requests that
    ``process(shard, ...)`` yields are that shard's to answer (``NeedDocuments``: the document may have moved on to any
    shard of the cluster). One generator of a shard runs at a time; ``take`` may run between two steps of any of them.

    ``plan``          the stream as it was asked for, with a start; every shard reads from there
    ``shards``        names of the shards in ``config.shards`` when the stream is opened; of equal tokens the shard that
                      is named first goes first
    ``config_after``  read the config server's oplog after this cluster time, known *before* ``shards`` was read;
                      feed it as the shard ``CONFIG_SHARDS``. ``None``: no shard is added
    ``mid_stream``    a later slice of a stream whose start another slice has found
    """

    def __init__(
        self,
        plan: Plan,
        shards: Iterable[str],
        *,
        config_after: ClusterTime | None = None,
        mid_stream: bool = False,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        invariant(plan.start is not None, "a merged stream is built from a plan without a start")
        self.plan = plan
        self.invalidated = False
        self._shard_plan = replace(plan, options=replace(plan.options, needs_merge=True))
        self._token = plan.first_token
        self._buffer_bytes_max = buffer_bytes_max
        self._shards: dict[str, ShardStream] = {}
        self._opened = 0
        self._heads: list[tuple[bytes, int, ShardStream]] = []
        self._end: ResumeToken | None = None
        for name in shards:
            self._open(ShardStream(name, self._shard_plan, self._opened, mid_stream=mid_stream))
        self._topology = HandleTopologyChange(self._shards)
        if config_after is not None:
            config_plan = _config_plan(plan, config_after)
            self._open(ShardStream(CONFIG_SHARDS, config_plan, self._opened, topology=True))
        ensures = must_search(plan) and not mid_stream
        self._router = RouterPipeline(plan, ensures=ensures, topology=self._topology)

    # -- what a driver asks ---------------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[str, ...]:
        """The participants that are open, ``CONFIG_SHARDS`` among them, in the order in which they were opened."""
        return tuple(self._shards)

    @property
    def leaving(self) -> tuple[str, ...]:
        """The shards that are known to be removed from the cluster, and still have to be read up to their removal. A
        removal that has been reached is forgotten with its shard."""
        config = self._shards.get(CONFIG_SHARDS)
        names = () if config is None else map(self._topology.removed_by, config.events)
        return tuple(name for name in names if name in self._shards)

    @property
    def resume_token(self) -> ResumeToken:
        """The post-batch resume token: where a new stream goes on after all that ``take`` gave. It never goes back and
        never stands after an event that was not given.

        Every participant counts, the config server too: after a shard that is not known yet nothing is promised.
        """
        return self._token

    @property
    def searching(self) -> bool:
        """The event resumed from has not been met yet."""
        return self._router.searching

    @property
    def high_water(self) -> ClusterTime:
        """Everything at or before this cluster time has come in, from every participant."""
        return min((_reached(shard) for shard in self._shards.values()), default=_NEVER)

    @property
    def awaited_time(self) -> ClusterTime | None:
        """The cluster time of the event that waits for other shards' promises; ``None`` when none waits. A promise of
        this time from each shard in ``waiting_for`` lets it leave."""
        if self.invalidated:
            return None
        if self._heads and not self._is_past_end():
            return self._heads[0][2].events[0].cluster_time
        return None if self._end is None else self._end.cluster_time

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The shards that hold back the next event; when no event waits, those that hold back the resume token."""
        if self.invalidated:
            return ()
        awaited = self.awaited_time
        if awaited is None:
            limit = self._limit()
            return tuple(s.name for s in self._shards.values() if s.holds_back and s.promised == limit)
        return tuple(s.name for s in self._shards.values() if s.holds_back and s.promised < awaited)

    def wants(self, shard: str) -> bool:
        """Whether more of this shard should be read: it is neither over nor far enough ahead of the others."""
        stream = self._shards.get(shard)
        return stream is not None and not stream.is_over and stream.buffered_bytes < self._buffer_bytes_max

    def promised(self, shard: str) -> ClusterTime:
        """Up to which cluster time the shard was read. Read on after it."""
        return self._get(shard).promised

    @property
    def unknown_operations(self) -> dict[str, int]:
        """How many entries were skipped for an operation letter that is not known, by letter, over all shards."""
        total: dict[str, int] = {}
        for shard in self._shards.values():
            for letter, count in shard.unknown_operations.items():
                total[letter] = total.get(letter, 0) + count
        return total

    # -- what a driver tells --------------------------------------------------------------------------------------

    def process(self, shard: str, batch: OplogBatch) -> Running:
        """Run a batch of one shard's oplog through the shard's stages; its events wait for ``take``.

        Yields requests, and an empty ``Emit`` whenever events were added: a good moment to ``take``, and to put the
        generator aside while ``wants(shard)`` is false, since a transaction may hold any number of events. Raises
        nothing: what a stage raises comes out of ``take``, in its place.
        """
        stream = self._get(shard)
        running = stream.process(batch)
        answer: Answer = None
        failure: TailraceError | None = None
        while True:
            waited = bool(stream.events)
            try:
                request = running.send(answer) if failure is None else running.throw(failure)
            except StopIteration:
                break
            answer = failure = None
            if not waited:
                self._push(stream)
            try:
                answer = yield request
            except TailraceError as error:
                failure = error
        if stream.invalidated_by is not None and (self._end is None or stream.invalidated_by < self._end):
            self._end = stream.invalidated_by

    def promise(self, shard: str, cluster_time: ClusterTime) -> None:
        """Everything of the shard's oplog at or before ``cluster_time`` was processed; what comes is later."""
        self._get(shard).promise(cluster_time)

    def fail(self, shard: str, error: TailraceError) -> None:
        """The shard cannot be read any further. ``take`` gives what comes before in the merged order, then raises the
        error with the shard's name. The first error of a shard counts."""
        stream = self._get(shard)
        if not stream.is_over:
            stream.failure = error

    def open_shard(self, name: str, start: ClusterTime) -> None:
        """A further shard takes part from ``start``, inclusive. For shards that ``take`` asks for (``NeedShard``) this
        was done already. A shard that is open stays as it is."""
        if name in self._shards:
            return
        plan = self._shard_plan
        if plan.start is None or start > plan.start:
            plan = replace(plan, start=start, start_token=None)
        self._topology.shards.add(name)
        self._open(ShardStream(name, plan, self._opened))

    # -- what comes out -------------------------------------------------------------------------------------------

    def take(self) -> Running:
        """Everything that may leave now, through the router's stages: yields ``Emit`` and ``NeedShard``.

        Raises the error of a shard, named, when everything that comes before it has left, and what a router's stage
        raises (280, 10334) at its event.
        """
        while not self.invalidated:
            run = self._next_run()
            if not run:
                break
            yield from self._route(run)
        if not self.invalidated:
            self._settle()

    def _route(self, run: list[ChangeEvent]) -> Generator[Request | Emit, Answer, None]:
        out: list[ChangeEvent] = []
        failure: TailraceError | None = None
        try:
            yield from self._follow_topology(run, out)
        except TailraceError as error:
            failure = error
        if out:
            self._token = out[-1].token
            yield Emit(out)
        if failure is not None:
            raise failure

    def _follow_topology(self, run: list[ChangeEvent], out: list[ChangeEvent]) -> Generator[Request, Answer, None]:
        routing = self._router.process(run, out)
        answer: Answer = None
        while True:
            try:
                request = routing.send(answer)
            except StopIteration:
                break
            if isinstance(request, NeedShard):
                self.open_shard(request.name, request.start)
            answer = yield request
        while self._topology.removed:
            self._let_go(self._topology.removed.pop())

    def _next_run(self) -> list[ChangeEvent]:
        """The next events that may leave. After one of the config server's the run ends: it may add a shard."""
        run: list[ChangeEvent] = []
        limit = self._limit()
        while self._heads and len(run) < _RUN_EVENTS_MAX:
            _, _, shard = self._heads[0]
            if shard.events[0].cluster_time > limit or self._is_past_end():
                break
            heappop(self._heads)
            run.append(shard.pop())
            if shard.events:
                self._push(shard)
            elif shard.closed:
                if shard.invalidated_by is None:
                    del self._shards[shard.name]
            else:
                limit = min(limit, shard.promised)
            if shard.name == CONFIG_SHARDS:
                break
        return run

    def _settle(self) -> None:
        """Nothing may leave: the stream is over, or failed, or has reached what all shards promise."""
        limit = self._limit()
        if self._end is not None and limit >= self._end.cluster_time and (not self._heads or self._is_past_end()):
            self.invalidated = True
            self._token = self._end
            return
        for shard in self._shards.values():
            if shard.failure is not None and not shard.events and shard.promised <= limit:
                raise on_shard(shard.failure, shard.name)
        reached = self._token.cluster_time
        if limit != _NEVER and (limit > reached or (limit == reached and self._token.is_high_water_mark)):
            self._token = ResumeToken.high_water_mark(limit, version=self.plan.token_version)

    def _limit(self) -> ClusterTime:
        """Up to which cluster time events may leave: the smallest promise of the shards of which nothing waits."""
        return min((shard.promised for shard in self._shards.values() if shard.holds_back), default=_NEVER)

    def _is_past_end(self) -> bool:
        """Whether the next event stands after the invalidate that ends the stream."""
        return self._end is not None and self._heads[0][0] > token_order(self._end.to_bson())

    def _push(self, shard: ShardStream) -> None:
        if shard.events:
            heappush(self._heads, (token_order(shard.events[0].token_bson), shard.order, shard))

    def _open(self, shard: ShardStream) -> None:
        invariant(shard.name not in self._shards, f"the shard {shard.name} is opened twice")
        self._shards[shard.name] = shard
        self._opened += 1

    def _let_go(self, name: str) -> None:
        """End the part of a shard whose removal has left the merge: all that it wrote as a shard was given. It was
        drained, so what it may write from then on (the drop of what lies on it still) is none of the cluster's."""
        shard = self._shards.pop(name, None)
        if shard is None:
            return
        shard.discard()
        self._heads = [head for head in self._heads if head[2] is not shard]
        heapify(self._heads)
        ends = (one.invalidated_by for one in self._shards.values())
        self._end = min((end for end in ends if end is not None), default=None)

    def _get(self, name: str) -> ShardStream:
        shard = self._shards.get(name)
        invariant(shard is not None, f"the shard {name} is not open")
        return shard  # type: ignore[return-value]


def _reached(shard: ShardStream) -> ClusterTime:
    return _NEVER if shard.closed else shard.promised


def _config_plan(plan: Plan, after: ClusterTime) -> Plan:
    """The stream on ``config.shards``, with tokens that can be compared with those of ``plan``.

    5.0 and 6.0 log a removal in an ``applyOps`` without a session, which their own change streams pass over.
    """
    options = StreamOptions(
        scope=Scope.of_collection("config", "shards"),
        start_at_operation_time=after.tick(),
        allow_to_run_on_config_db=True,
        needs_merge=True,
        generate_v2_tokens=plan.token_version == 2,
    )
    return build_plan(options, replace(plan.profile, unwinds_apply_ops_without_session=True))
