"""The merge: many shards' events in one order, each as soon as no shard can give an earlier one.

docs/design/sharded-merge.md gives the reasons. The merged order is the byte order of the resume tokens. Each
participant has a bound, up to where nothing of it is missing: its promise, or the last of its events that wait.
Everything at or before the smallest bound leaves, in one run. Equal tokens of two shards (a sharded collection dropped
everywhere at the same time) both leave, one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.event_block import EventBlock
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.pipeline.quarantine import Aside
from tailrace.core.pipeline.router import RouterPipeline, must_search
from tailrace.core.pipeline.task import Need, Task, Working
from tailrace.core.pipeline.waiting import EventsPiece, Place, merged_events
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.request import Emit, NeedShard, OplogBatch
from tailrace.core.stage.handle_topology_change import HandleTopologyChange
from tailrace.core.stream.kernel_choice import KernelUse, merge_with
from tailrace.core.stream.participant import Participant
from tailrace.core.stream.stream import Statistics, Stream
from tailrace.errors import TailraceError, invariant, on_shard

#: The participant that follows ``config.shards`` in the config server's oplog. No shard can have that name.
CONFIG_SHARDS: Final = "config.shards"
#: A shard of which this much waits is not worked on further until the others are past it.
BUFFER_BYTES_MAX: Final = 32 * 1024 * 1024
#: Later than every cluster time: what a shard promises that gives nothing more.
_NEVER: Final = ClusterTime((1 << 64) - 1)


class MergedStream(Stream):
    """One change stream over the oplogs of a sharded cluster.

    A need of a shard is that shard's to answer (``NeedDocuments``: the document may have moved on to any shard of the
    cluster); ``NeedShard`` is answered with ``None`` when the shard's oplog is being read.

    ``plan``          the stream as one asks for it, with a start; every shard reads from there
    ``shards``        names of the shards in ``config.shards`` when the stream is opened; of equal tokens the shard that
                      is named first goes first
    ``config_after``  read the config server's oplog after this cluster time, known *before* ``shards`` was read;
                      feed it as the participant ``CONFIG_SHARDS``. ``None``: no shard is added
    ``mid_stream``    a later slice of a stream whose start another slice has found
    ``kernel``        whether the kernel works on the batches
    """

    def __init__(
        self,
        plan: Plan,
        shards: Iterable[str],
        *,
        config_after: ClusterTime | None = None,
        mid_stream: bool = False,
        kernel: KernelUse = "auto",
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        invariant(plan.start is not None, "a merged stream is built from a plan without a start")
        self.plan = plan
        self.invalidated = False
        self._shard_plan = replace(plan, options=replace(plan.options, needs_merge=True))
        self._token = plan.first_token
        self._buffer_bytes_max = buffer_bytes_max
        self._mid_stream = mid_stream
        self._kernel: KernelUse = kernel
        self._participants: dict[str, Participant] = {}
        self._end: ResumeToken | None = None
        self._has_failed = False
        self._unknown_operations: Counter[str] = Counter()
        self._forgotten: list[QuarantinedEvent] = []  # put aside by participants that are gone
        for name in shards:
            self._open(name, self._shard_plan)
        self._topology = HandleTopologyChange(self._participants)
        if config_after is not None:
            self._open(CONFIG_SHARDS, _config_plan(plan, config_after), topology=True)
        ensures = must_search(plan) and not mid_stream
        self._router = RouterPipeline(plan, ensures=ensures, topology=self._topology)
        self._routing = Task(CONFIG_SHARDS)

    # -- what a driver asks ---------------------------------------------------------------------------------------

    @property
    def participants(self) -> tuple[str, ...]:
        return tuple(self._participants)

    @property
    def leaving(self) -> tuple[str, ...]:
        """A removal that has been reached is forgotten with its shard."""
        config = self._participants.get(CONFIG_SHARDS)
        names = () if config is None else map(self._topology.removed_by, config.events.events())
        return tuple(name for name in names if name in self._participants)

    @property
    def token(self) -> ResumeToken:
        """Every participant counts, the config server too: past a shard that is not known yet, nothing is promised."""
        return self._token

    @property
    def searching(self) -> bool:
        return self._router.searching

    @property
    def high_water(self) -> ClusterTime:
        return min((_NEVER if one.closed else one.promised for one in self._participants.values()), default=_NEVER)

    @property
    def awaited_time(self) -> ClusterTime | None:
        if self.invalidated:
            return None
        first = self._first()
        if first is not None and (self._end is None or first <= Place.of(self._end)):
            return first.time
        return None if self._end is None else self._end.cluster_time

    @property
    def waiting_for(self) -> tuple[str, ...]:
        if self.invalidated:
            return ()
        awaited = self.awaited_time
        held = [one for one in self._participants.values() if one.holds_back]
        if awaited is None:
            limit = self._limit()
            return tuple(one.name for one in held if one.promised == limit)
        return tuple(one.name for one in held if one.promised < awaited)

    def wants(self, participant: str) -> bool:
        one = self._participants.get(participant)
        if one is None or one.is_over or self.invalidated or self._has_failed:
            return False
        return not one.task.is_busy and one.events.bytes < self._buffer_bytes_max

    def promised(self, participant: str) -> ClusterTime:
        return self._get(participant).promised

    @property
    def statistics(self) -> Statistics:
        total = Counter(self._unknown_operations)
        for one in self._participants.values():
            total.update(one.pipeline.unknown_operations)
        return Statistics(dict(total))

    @property
    def oplog_filter(self) -> bytes | None:
        """The shards' one, not the config server's. A source that leaves entries out still promises what lies after
        them."""
        shards = [one for one in self._participants.values() if one.name != CONFIG_SHARDS]
        return shards[0].pipeline.oplog_filter if shards else None

    def _tasks(self) -> Iterable[Task]:
        return (self._routing, *(one.task for one in self._participants.values()))

    def _asides(self) -> Iterable[Aside]:
        parts = (one.pipeline.quarantined for one in self._participants.values())
        return (self._router.quarantined, self._forgotten, *parts)

    # -- what a driver tells --------------------------------------------------------------------------------------

    def feed(self, participant: str, batch: OplogBatch) -> None:
        self._get(participant).feed(batch)

    def promise(self, participant: str, cluster_time: ClusterTime) -> None:
        self._get(participant).promise(cluster_time)

    def fail(self, participant: str, error: TailraceError) -> None:
        one = self._get(participant)
        if not one.is_over:
            one.failure = error

    def open_shard(self, name: str, start: ClusterTime) -> None:
        """A shard that is open stays as it is."""
        if name in self._participants:
            return
        plan = self._shard_plan
        if plan.start is None or start > plan.start:
            plan = replace(plan, start=start, start_token=None)
        self._topology.shards.add(name)
        self._open(name, plan, mid_stream=False)

    # -- what comes out -------------------------------------------------------------------------------------------

    def next_output(self) -> EventBlock | Need | None:
        while not self.invalidated and not self._has_failed:
            need = self._work()
            if need is not None:
                return need
            try:
                out = self._routed()
            except TailraceError:
                self._has_failed = True
                raise
            if out is not None:
                return out
            if self._routing.need is not None or not any(self._can_go_on(one) for one in self._participants.values()):
                break
        return None

    def _can_go_on(self, one: Participant) -> bool:
        return one.task.can_go_on and one.events.bytes < self._buffer_bytes_max

    def _work(self) -> Need | None:
        """Let every participant go on as far as it can."""
        for one in self._participants.values():
            need = one.work(self._buffer_bytes_max)
            if need is not None:
                return need
            token = one.invalidated_by
            if token is not None and (self._end is None or token < self._end):
                self._end = token
        return None

    def _routed(self) -> EventBlock | Need | None:
        """The next of what may leave."""
        if not self._routing.is_busy:
            self._routing.start(self._leaving())
        out = self._routing.step()
        invariant(not isinstance(out, Emit), "the merge gives blocks")
        if isinstance(out, Need) and isinstance(out.request, NeedShard):
            # It counts from now on: nothing later than its start may leave before it was read.
            self.open_shard(out.request.name, out.request.start)
        return out  # type: ignore[return-value]

    def _leaving(self) -> Working:
        """Everything that may leave now, through the router's stages. Raises the error of a shard, named, when
        everything that comes before it has left, and what a router's stage raises (280, 10334) at its event."""
        while (run := self._next_run()) is not None:
            if isinstance(run, EventBlock):
                self._token = ResumeToken.from_trusted(run.token(len(run) - 1))
                yield run
            else:
                yield from self._route(run)
        self._settle()

    def _route(self, run: list[ChangeEvent]) -> Working:
        out: list[ChangeEvent] = []
        failure: TailraceError | None = None
        try:
            yield from self._router.process(run, out)
        except TailraceError as error:
            failure = error
        while failure is None and self._topology.removed:
            self._let_go(self._topology.removed.pop())
        if out:
            self._token = out[-1].token
            yield EventBlock.of(out)
        if failure is not None:
            raise failure

    def _next_run(self) -> EventBlock | list[ChangeEvent] | None:
        """The events that may leave next, as a list where a stage of the router's has to see them. After one of the
        config server's the run ends: it may add a shard."""
        bound = self._bound()
        parts: list[list[EventsPiece]] = []
        for one in list(self._participants.values()):
            pieces = one.events.take(bound)
            if pieces:
                parts.append(pieces)
            if one.closed and not one.events and one.invalidated_by is None:
                self._forget(one.name)
        if not parts:
            return None
        blocks = [EventBlock.join(own) for own in map(_blocks_of, parts) if own is not None]
        if len(blocks) < len(parts) or self._router.sees_events:
            return merged_events(parts)
        return merge_with(blocks, self._kernel)

    def _bound(self) -> Place:
        """Up to where nothing is missing of any participant, and not after the stream's end."""
        bounds = [bound for one in self._participants.values() if (bound := one.bound) is not None]
        config = self._participants.get(CONFIG_SHARDS)
        if config is not None and config.events:
            bounds.append(config.events.first)
        if self._end is not None:
            bounds.append(Place.of(self._end))
        return min(bounds, default=Place.after(_NEVER))

    def _settle(self) -> None:
        """Nothing may leave: the stream is over, or failed, or has reached what all shards promise."""
        limit, first = self._limit(), self._first()
        if self._end is not None and limit >= self._end.cluster_time and (first is None or first > Place.of(self._end)):
            self.invalidated = True
            self._token = self._end
            return
        for one in self._participants.values():
            if one.failure is not None and not one.events and one.promised <= limit:
                raise on_shard(one.failure, one.name)
        reached = self._token.cluster_time
        if limit != _NEVER and (limit > reached or (limit == reached and self._token.is_high_water_mark)):
            self._token = ResumeToken.high_water_mark(limit, version=self.plan.token_version)

    def _limit(self) -> ClusterTime:
        """The smallest promise of the participants of which nothing waits."""
        return min((one.promised for one in self._participants.values() if one.holds_back), default=_NEVER)

    def _first(self) -> Place | None:
        return min((one.events.first for one in self._participants.values() if one.events), default=None)

    # -- who takes part -------------------------------------------------------------------------------------------

    def _open(self, name: str, plan: Plan, *, topology: bool = False, mid_stream: bool | None = None) -> None:
        invariant(name not in self._participants, f"the shard {name} is opened twice")
        later = self._mid_stream if mid_stream is None else mid_stream
        self._participants[name] = Participant(name, plan, mid_stream=later, kernel=self._kernel, topology=topology)

    def _let_go(self, name: str) -> None:
        """End the part of a shard whose removal has left the merge: all that it wrote as a shard was given. It was
        drained, so what it may write from then on (the drop of what lies on it still) is none of the cluster's."""
        one = self._participants.get(name)
        if one is None:
            return
        one.discard()
        self._forget(name)
        ends = (other.invalidated_by for other in self._participants.values())
        self._end = min((end for end in ends if end is not None), default=None)

    def _forget(self, name: str) -> None:
        pipeline = self._participants.pop(name).pipeline
        self._unknown_operations.update(pipeline.unknown_operations)
        self._forgotten += pipeline.quarantined or ()

    def _get(self, name: str) -> Participant:
        one = self._participants.get(name)
        invariant(one is not None, f"the shard {name} is not open")
        return one  # type: ignore[return-value]


def _blocks_of(pieces: list[EventsPiece]) -> list[EventBlock] | None:
    """The pieces where all of them are blocks."""
    blocks = [piece for piece in pieces if isinstance(piece, EventBlock)]
    return blocks if len(blocks) == len(pieces) else None


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
    reads_all = replace(plan.profile, unwinds_apply_ops_without_session=True, multi_op_is_no_transaction=True)
    return build_plan(options, reads_all)
