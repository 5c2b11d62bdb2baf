"""The deployment as the driver's side sees it: where its oplogs begin and end, and what a stream starts with.

The modules ``replica_set`` and ``cluster`` are the two kinds there are; ``opening`` finds out which one it is.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.profile import for_people, profile_for
from tailrace.errors import UsageError
from tailrace.lake.spark.planning.backlog import Backlog
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.planning.planner import Limits, batch_end, cuts, parts_of_full, slices
from tailrace.lake.spark.planning.snapshot import SnapshotPlanner
from tailrace.lake.spark.query.offset import Offset, Resume, StreamIdentity
from tailrace.lake.spark.query.options import SNAPSHOT, ReadOptions, Start
from tailrace.lake.spark.query.snapshot_position import SnapshotPosition
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.compatibility import ASK_AGAIN_S
from tailrace.read.source.connection import RETRY_SECONDS
from tailrace.read.source.live import LiveSource
from tailrace.read.source.member_version import PresentMember, present_member
from tailrace.read.source.outline import MOST, Bucket, Outline
from tailrace.read.source.replica_set_oplog import ReplicaSetOplog
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import check_witness, newest_mark

if TYPE_CHECKING:
    from tailrace.lake.spark.planning.exact import ExactStates, StateOf


S = TypeVar("S")
T = TypeVar("T")
_log = logging.getLogger("tailrace.spark")
_OTHER_HISTORY: Final = (
    "The deployment was restored from an older backup, or a rollback took entries away, so what was read is no longer "
    "part of its history. Begin again with a new checkpointLocation and a new sink; for a lake, with a new lake"
)
#: How often a check is made whether a time is majority-committed.
_LOOK_S: Final = 0.01


class Look(NamedTuple):
    """``has_news``: an entry could give an event, and ``time`` is the newest cluster time anywhere. Otherwise ``time``
    is that up to which nothing more will appear, as things stand."""

    time: ClusterTime
    has_news: bool


class Deployment(ABC):
    """What a stream is read from: one oplog, or those of all shards."""

    identity: StreamIdentity
    server_version: str

    def __init__(self, options: ReadOptions, client: MongoClient[Any]) -> None:
        self._options = options
        self._client = client
        self._snapshots: SnapshotPlanner | None = None
        self._states: ExactStates | None = None
        #: The members' processes that were known when the version was asked last.
        self._asked_of: frozenset[PresentMember | None] = frozenset()
        self._asked_at_s = 0.0

    @property
    @abstractmethod
    def outline(self) -> Outline: ...

    @abstractmethod
    def newest(self) -> ClusterTime:
        """The newest majority-committed entry's cluster time, anywhere."""

    @abstractmethod
    def settle(self, until: ClusterTime) -> None:
        """See that nothing more will appear at or before ``until``, a time that some member has reached."""

    @abstractmethod
    def look(self, after: ClusterTime) -> Look:
        """What there is after ``after``."""

    @abstractmethod
    def oldest(self) -> ClusterTime:
        """The cluster time from which on all history is there."""

    @property
    @abstractmethod
    def oplogs(self) -> Sequence[ReplicaSetOplog]:
        """Those that are read now."""

    def backlog(self, after: ClusterTime) -> Backlog:
        """What a query that stands at ``after`` has not read yet."""
        newest = self.newest()
        answers = self._asked_all(self.oplogs, lambda one: (one.bytes_behind(after, newest), one.source.oldest()))
        found = [size for size, _ in answers]
        left = [after.seconds - oldest.seconds for _, (oldest, whole) in answers if not whole]
        return Backlog(
            max(0, newest.seconds - after.seconds),
            None if None in found else sum(one for one in found if one is not None),
            min(left, default=None),
        )

    @abstractmethod
    def at(self, time: ClusterTime) -> Offset:
        """The offset of a stream that has come to ``time``."""

    @abstractmethod
    def require_history(self, position: Offset) -> None:
        """Raises 286 where entries after ``position`` may be gone."""

    @abstractmethod
    def _marked_sources(self, position: Offset) -> Mapping[str, LiveSource]:
        """The oplogs after ``position`` that marks may be of, by name."""

    def require_same_history(self, position: Offset) -> None:
        """Raises OtherHistoryError where an oplog does not hold what was read of it: it was restored from an older
        backup. The deployment's ids were compared before (``StreamIdentity``)."""
        self.require_marked(dict(position.entries), position)

    def require_marked(self, marks: Mapping[str, EntryMark], position: Offset) -> None:
        """The same for marks that were kept elsewhere."""
        if marks:
            sources = self._marked_sources(position)
            _require_marked(marks, sources, lambda check, names: self._asked_all(list(names), check))

    def _marked(self, position: Offset, offset: Offset) -> Offset:
        """``offset`` with an entry of each oplog at or before it: for an oplog that has none after ``position``, the
        entry of ``position``."""
        sources = {name: one for name, one in self._marked_sources(position).items() if name in offset.shard_names}
        after, until = position.cluster_time, offset.cluster_time
        before = dict(position.entries)
        found = self._asked_all(list(sources.values()), lambda one: one.mark_between(after, until))
        # After a copy there is a mark that is newer than the position.
        known = {name: [before[name]] if name in before else [] for name in sources}
        for name, mark in zip(sources, found, strict=True):
            known[name] += [] if mark is None else [mark]
        return replace(offset, entries=tuple(sorted((name, max(marks)) for name, marks in known.items() if marks)))

    def copying(self, position: Offset, planned: SnapshotPosition) -> Offset:
        """The offset after the next chunks of a copy. It knows the newest entries that there are, which are no older
        than what earlier micro-batches have copied: the entry of the copy's beginning says nothing of that."""
        sources = {name: one for name, one in self._marked_sources(position).items() if name in position.shard_names}
        found = dict(zip(sources, self._asked_all(list(sources.values()), newest_mark), strict=True))
        entries = tuple(sorted((name, mark) for name, mark in found.items() if mark is not None))
        return replace(position, snapshot=planned, entries=entries)

    def _asked_all(self, of: Sequence[S], ask: Callable[[S], T]) -> list[T]:
        """The answers of several oplogs, at once where there are several."""
        return [ask(one) for one in of]

    @abstractmethod
    def first_invalidating(self, start: Offset, until: ClusterTime) -> ClusterTime | None:
        """The cluster time of the entry that ends the stream after ``start``, where it lies at or before ``until``."""

    @abstractmethod
    def advanced(self, position: Offset, to: ClusterTime, *, invalidated: bool) -> Offset:
        """``position`` moved on to a time that was settled."""

    @abstractmethod
    def _state_members(self, after: ClusterTime | None) -> Sequence[StateOf]:
        """The oplogs that have a state of exact images: those of a stream that stands at ``after``, or all there are
        now."""

    @abstractmethod
    def _confirm_history(self, plan: Plan) -> None:
        """Raises 286 where the oplogs do not reach back to the plan's start."""

    @abstractmethod
    def _slice(self, start: Offset, end: Offset, low: ClusterTime, high: ClusterTime) -> OplogSlice:
        """The slice (``low``, ``high``] of the range between two offsets, with the version of the end."""

    def start(self, default: str) -> Offset:
        """Where a new stream starts; ``default`` is ``oldest`` or ``now``. Raises 286 where the oplog is too short."""
        start = self._options.start or Start(default)
        if start.option in (SNAPSHOT, "now"):
            self._seed_states()
        if start.option == SNAPSHOT:
            return self.copied(self.snapshots.begin())
        if start.option == "oldest":
            start = Start("startAtOperationTime", time=self.oldest())
        elif start.option == "now":
            now = self.newest()
            self.settle(now)  # a write that comes after this is later
            start = Start("startAtOperationTime", time=now.tick())
        plan = self._options.plan(self._options.stream_options(start), profile_for(self.server_version))
        self._confirm_history(plan)
        resume = None
        if plan.start_token is not None and not plan.start_token.is_high_water_mark:
            resume = Resume(start.option, plan.start_token)
        at = self.at(plan.read_after or ClusterTime(0))
        if 0 < at.cluster_time <= self.newest():  # a start may lie in the future
            at = self._marked(replace(at, cluster_time=ClusterTime(at.cluster_time - 1)), at)
        return self._with_states(replace(at, token_version=plan.token_version, resume=resume))

    @property
    def states(self) -> ExactStates | None:
        """Those that exact images are computed from; ``None`` if none are requested."""
        if self._states is None and self._options.exact:
            self._states = _exact_states(self._options, self.server_version, sharded=self._is_sharded)
        return self._states

    @property
    @abstractmethod
    def _is_sharded(self) -> bool: ...

    def _seed_states(self) -> None:
        """Copy what is there, before a stream from now on begins: each new state is brought forward to its start."""
        if self.states is None:
            return
        begun = max(map(self.states.seed, self._state_members(None)))
        while self.newest() < begun:  # not majority-committed yet
            time.sleep(_LOOK_S)

    def _with_states(self, offset: Offset) -> Offset:
        """The offset of a new stream, with exact images only once their states have begun there."""
        states = self.states
        if states is None:
            return offset
        for member in self._state_members(offset.cluster_time):
            states.begin(member, offset.cluster_time)
        return states.marked(offset)

    @property
    def snapshots(self) -> SnapshotPlanner:
        """Plans the copy of what is there."""
        if self._snapshots is None:
            options = self._options
            self._snapshots = SnapshotPlanner(
                self._copied_from(), options.scope, options.snapshot_rate, options.selection
            )
        return self._snapshots

    def _copied_from(self) -> MongoClient[Any] | Cluster:
        return self._client

    def copied(self, snapshot: SnapshotPosition) -> Offset:
        """The offset of a stream in the middle of a copy: it is at the copy's time."""
        start = Start("startAtOperationTime", time=snapshot.start.tick())
        plan = self._options.plan(self._options.stream_options(start), profile_for(self.server_version))
        at = replace(self.at(snapshot.start), token_version=plan.token_version, snapshot=snapshot)
        return self._with_states(at)

    def offset(self, value: dict[str, object]) -> Offset:
        """An offset from a checkpoint. ``UsageError`` where it belongs to another stream."""
        offset = Offset.from_json(value)
        self.identity.require_same(offset.stream)
        # The first checkpoint of a server that hid its id, read where the id is seen, is written with it from then on.
        offset = replace(offset, stream=self.identity)
        states = self.states
        if states is None:
            return offset
        return states.checked(offset, partial(self._state_members, offset.cluster_time))

    def collections(self, selection: Selection | None) -> list[str]:
        """The namespaces that are there now of ``selection``; ``None``: of what the options watch."""
        places = places_of(self._copied_from(), RETRY_SECONDS)
        scopes = (self._options.scope,) if selection is None else selection.scopes
        return sorted({one.namespace for scope in scopes for one in places.collections(scope, selection)})

    @property
    @abstractmethod
    def clients(self) -> Sequence[MongoClient[Any]]:
        """Those of the replica sets that hold the documents. Their version counts."""

    @abstractmethod
    def _asked_version(self) -> str:
        """The server version whose events are made, as it is now."""

    def _follow_upgrade(self) -> None:
        """The events of a micro-batch are those of the version that the servers have when it is planned, which is after
        its last entry was written: its end says which. They are asked again where PyMongo learns of another process,
        and as often as a stream asks for the feature compatibility version."""
        present = frozenset(map(present_member, self.clients))
        now = time.monotonic()
        if present == self._asked_of and now - self._asked_at_s < ASK_AGAIN_S:
            return
        self._asked_at_s = now
        version = self._asked_version()
        if self._asked_of and version != self.server_version:
            _log.info("the next micro-batches hold the events of MongoDB %s", for_people(version))
        self._asked_of, self.server_version = present, version
        if self._states is not None:
            self._states.server_version = version

    def end(self, position: Offset, newest: ClusterTime, limits: Limits | None) -> Offset:
        """Where the micro-batch after ``position`` ends: at ``newest``, which was settled, or before, by ``limits``
        or by what ends the stream."""
        self._follow_upgrade()
        end = newest
        if limits is not None:
            floor = position.cluster_time
            if position.resume is not None:
                floor = min(max(floor, position.resume.token.cluster_time), newest)
            end = self._limited(floor, newest, limits)
        invalidating = self.first_invalidating(position, end)
        until = end if invalidating is None else invalidating
        reached = self.advanced(position, until, invalidated=invalidating is not None)
        return self._marked(position, replace(reached, server_version=self.server_version))

    def _limited(self, floor: ClusterTime, newest: ClusterTime, limits: Limits) -> ClusterTime:
        outline = self.outline
        if limits.events is None and (limits.bytes is None or outline.is_smaller_than(limits.bytes)):
            return newest
        if limits.is_rough and outline.mostly_matches(floor, newest):
            return batch_end(outline.even_buckets(floor, newest), lambda bucket: [bucket], limits) or newest
        return batch_end(outline.buckets(floor, newest), outline.entries, limits) or newest

    def slices(self, start: Offset, end: Offset) -> Sequence[OplogSlice]:
        """The range between two offsets as ascending slices of about the same weight."""
        after, until = start.cluster_time, end.cluster_time
        if until <= after:
            return []
        if end.server_version is None:  # planned by an earlier release
            self._follow_upgrade()
            end = replace(end, server_version=self.server_version)
        floor = after
        if start.resume is not None:
            # The token is searched for in the first slice, so that one must hold its time.
            floor = max(after, ClusterTime(min(start.resume.token.cluster_time, until)))
        weights = self.outline.weigh(floor, until)
        # Asking each entry costs the server four times what giving it costs, so where most would pass all are taken.
        # That is where ``source.filter_choice`` comes to over a network of 1 Gbit/s with entries of some 500 bytes. It
        # is not asked itself: how far the workers are from the server is not known here, nor what entries weigh.
        filtered = (bool(self._options.stages) or weights.matching < MOST) and not self._options.exact
        cut_at = self._cuts(weights.buckets) if self._may_cut(start) else []
        return [
            replace(self._slice(start, end, low, high), filtered=filtered, images=start.images)
            for low, high in slices(after, until, cut_at)
        ]

    def _cuts(self, buckets: Sequence[Bucket]) -> list[ClusterTime]:
        options = self._options
        limits = Limits(options.max_events, options.max_bytes)
        least = parts_of_full(buckets, limits, options.partitions) if options.partitions_named else 1
        return cuts(buckets, options.partitions, refine=self.outline.entries, least=least)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _may_cut(self, start: Offset) -> bool:
        # A state of exact images goes forward in order, so one task reads all of a micro-batch.
        return self._options.partitions > 1 and not self._options.exact

    @property
    def _shows_migrations(self) -> bool:
        return bool(self._options.stage.get("showMigrationEvents"))


def _require_marked(
    marks: Mapping[str, EntryMark],
    sources: Mapping[str, LiveSource],
    asked: Callable[[Callable[[str], None], Iterable[str]], Iterable[object]],
) -> None:
    witness, nobody = Witness(DeploymentIdentity(), marks), DeploymentIdentity()
    check_witness(witness, nobody, sources, what="the events so far", hint=_OTHER_HISTORY, asked=asked)


def _exact_states(options: ReadOptions, server_version: str, *, sharded: bool) -> ExactStates:
    try:
        from tailrace.lake.spark.planning.exact import ExactStates  # noqa: PLC0415  not without lmdb
    except ModuleNotFoundError as error:
        raise UsageError(
            f"exact images need the package {error.name}", hint="Install tailrace[images], on the workers too"
        ) from None
    return ExactStates(options, server_version, sharded=sharded)
