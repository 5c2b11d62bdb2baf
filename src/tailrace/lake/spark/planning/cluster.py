"""A sharded cluster as the driver's side sees it: one common cluster time for all shards, and who takes part.

A micro-batch takes every shard up to one time T: the newest that any of them has reached. For the others that is a time
before which nothing more may come from them, so each shard whose oplog ends before T learns about T and is asked for a
no-op (``tailrace.read.source.promise``); when that is majority-committed, everything at or before T can be read. So is
the config server, since a shard that nobody has heard of may have been added before T. Nobody is asked for anything
while nothing happens that could give an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.history import reaches_back
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.profile import profile_for
from tailrace.errors import ChangeStreamHistoryLost, SourceError, TailraceError, UsageError, on_shard
from tailrace.lake.spark.planning.deployment import Deployment, Look
from tailrace.lake.spark.planning.input_partition import OplogSlice, ShardRange
from tailrace.lake.spark.planning.planner import Limits
from tailrace.lake.spark.query.offset import Offset, StreamIdentity
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.read.source.connection import Connection, clock_session
from tailrace.read.source.live import LiveSource
from tailrace.read.source.membership import Removed, ShardChange, added_shards, changes, reachable, removed_shards
from tailrace.read.source.merged_outline import MergedOutline
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.promise import PromiseRequester
from tailrace.read.source.replica_set_oplog import ReplicaSetOplog
from tailrace.read.source.topology import Cluster, ShardAddress

if TYPE_CHECKING:
    from tailrace.lake.spark.planning.exact import StateOf
    from tailrace.read.archive.cluster_hybrid import ArchivedShards

#: No-ops are asked for at most this often; this often they are checked for being majority-committed.
_SETTLE_INTERVAL_S: Final = 0.1
_COMMIT_LOOK_S: Final = 0.002
#: How often ``config.shards`` is read while nothing happens.
_LIST_INTERVAL_S: Final = 0.5
#: How many shards are asked at once; for news, which the first ones usually have, fewer.
_THREADS: Final = 32
_AT_ONCE: Final = 8

_S = TypeVar("_S")
_T = TypeVar("_T")


class _Member:
    """The config server, or a shard."""

    def __init__(self, address: ShardAddress, client: MongoClient[Any]) -> None:
        self.address = address
        self.connection = Connection(client)
        self.source = MongodSource(client)
        self._requester = PromiseRequester(client, address.name)

    def newest(self) -> ClusterTime:
        return self.source.newest()

    def reach(self, until: ClusterTime, clock_document: Mapping[str, Any]) -> None:
        """See that the oplog holds a majority-committed entry at or after ``until``."""
        while self.newest() < until:
            self.connection.retrying(partial(self._requester.ask, until, clock_document))
            if self.newest() < until:
                time.sleep(_COMMIT_LOOK_S)

    def clock_document(self) -> Mapping[str, Any] | None:
        """The largest ``$clusterTime`` that it knows, with its signature as it sent it."""

        def ping() -> Mapping[str, Any] | None:
            client = self.connection.client
            with clock_session(client) as session:
                client.admin.command("ping", session=session)
                return session.cluster_time

        return self.connection.retrying(ping)


class _History(NamedTuple):
    """What became of the cluster's shards after a time; read when everything up to ``settled`` was."""

    after: ClusterTime
    settled: ClusterTime
    changes: Sequence[ShardChange]
    removed: Sequence[Removed]

    def first_removed(self, name: str) -> Removed | None:
        """The first shard of that name that was removed."""
        return next((shard for shard in self.removed if shard.name == name), None)


class _Shard(_Member):
    """A shard and its oplog for the stream's scope; with an archive, both together."""

    def __init__(
        self, address: ShardAddress, client: MongoClient[Any], scope: Scope | Selection, archive: ArchivedShards | None
    ) -> None:
        super().__init__(address, client)
        self.oplog = ReplicaSetOplog(client, scope) if archive is None else archive.oplog(address.name, client, scope)

    def is_archived(self, after: ClusterTime) -> bool:
        """Whether what comes after ``after`` begins before the live oplog does."""
        return not reaches_back(after, *self.source.oldest())


class ClusterDeployment(Deployment):
    """All shards of a cluster, those that are added while the stream runs too."""

    def __init__(self, options: ReadOptions, cluster: Cluster, client: MongoClient[Any]) -> None:
        super().__init__(options, client)
        self._cluster = cluster
        if options.exact and options.archive is not None:
            raise UsageError(
                "exact images of a sharded cluster cannot be computed from an archive",
                hint="Leave out the option 'archive' or the images",
            )
        self._archive = _archived(options)
        self._pool = ThreadPoolExecutor(_THREADS, "tailrace-shard")
        self._config = _Member(ShardAddress("the config server", ""), cluster.config_client())
        self._shards: dict[str, _Shard] = {}
        #: Those that were removed from the cluster and are read up to their removal still.
        self._former: dict[ShardAddress, _Shard] = {}
        self._history: _History | None = None
        self._in_range: list[_Shard] | None = None
        self._listed_s = 0.0
        self._asked_s = 0.0
        self._settled = ZERO
        try:
            self._list()
            self.server_version = self._asked_version()
            self.identity = StreamIdentity.of(options, {}, self._cluster_id())
        except BaseException:
            self._close()
            raise

    @property
    def clients(self) -> Sequence[MongoClient[Any]]:
        return [shard.oplog.connection.client for shard in self._shards.values()]

    def _asked_version(self) -> str:
        """That of the oldest shard."""
        versions: list[str] = self._each(list(self._shards.values()), lambda shard: shard.oplog.live.server_version)
        return min(versions, key=lambda version: profile_for(version).rank)

    def _copied_from(self) -> Cluster:
        return self._cluster

    def _cluster_id(self) -> str:
        read = self._cluster.config_collection("version").find_one
        document = self._config.connection.retrying(lambda: read({}, {"clusterId": 1}))
        if document is None:
            raise SourceError("the cluster has no id (config.version is empty)", hint="Add a shard to it first")
        return str(document["clusterId"])

    # -- its members ------------------------------------------------------------------------------------------------

    def _list(self, after: ClusterTime | None = None) -> None:
        """Read ``config.shards``, what was written to it up to ``after`` included."""
        listed = self._cluster.shards(after=after)
        if not listed:
            raise SourceError("the cluster has no shard yet", hint="Add one: sh.addShard('<replica set>/<host:port>')")
        self._listed_s = time.monotonic()
        known = {shard.address: shard for shard in self._shards.values()}
        shards = {address.name: known.get(address) or self._shard(address) for address in listed}
        self._shards = dict(sorted(shards.items()))

    def _shard(self, address: ShardAddress) -> _Shard:
        client = self._cluster.client_at(address)
        return _named(address.name, partial(_Shard, address, client, self._options.watched, self._archive))

    def _history_after(self, position: ClusterTime) -> _History:
        """What has become of the cluster's shards after ``position``, up to what was settled at least."""
        if self._history is None or self._history[:2] != (position, self._settled):
            history = changes(self._config.connection, position)
            removed = removed_shards(self._config.connection, history)
            self._history = _History(position, self._settled, history, removed)
        return self._history

    def _member(self, name: str, position: ClusterTime) -> _Shard:
        """The shard that has a name in an offset, or after it: the first one that bore it there."""
        removed = self._history_after(position).first_removed(name)
        if removed is not None:
            try:
                client = reachable(self._cluster, removed, position)
            except ChangeStreamHistoryLost:
                if self._archive is not None:
                    self._archive.confirm_members(position)  # as the client does
                raise
            address = ShardAddress(name, str(removed.host))
            former = self._former.get(address)
            if former is None:
                former = _named(name, partial(_Shard, address, client, self._options.watched, self._archive))
                self._former[address] = former
            return former
        member = self._shards.get(name)
        if member is None:
            raise SourceError(
                f"the shard {name} was removed from the cluster before this stream had read all of its oplog, and "
                "config.shards no longer says where it is",
                hint=f"Begin a new checkpointLocation with startAtOperationTime={position.seconds},"
                f"{position.increment + 1}; what was written on {name} since then is not in it",
            )
        return member

    def _each(self, members: Sequence[_Member], ask: Callable[[Any], _T]) -> list[_T]:
        """The answers of all members, asked at once; an error names the member."""
        return list(self._pool.map(lambda member: _named(member.address.name, partial(ask, member)), members))

    # -- its time ---------------------------------------------------------------------------------------------------

    @property
    def oplogs(self) -> Sequence[ReplicaSetOplog]:
        return [shard.oplog for shard in self._shards.values()]

    @property
    def outline(self) -> MergedOutline:
        members = self._shards.values() if self._in_range is None else self._in_range
        return MergedOutline([shard.oplog.outline for shard in members])

    def newest(self) -> ClusterTime:
        self._list()
        return max(self._each(list(self._shards.values()), _Member.newest))

    def look(self, after: ClusterTime) -> Look:
        if time.monotonic() - self._listed_s >= _LIST_INTERVAL_S:
            self._list()
        shards = list(self._shards.values())
        *newest, config = self._each([*shards, self._config], _Member.newest)
        times = dict(zip(shards, newest, strict=True))
        later = [shard for shard in shards if times[shard] > after]
        # The first ones first: usually one of them has news, and the others need not be asked.
        groups = (later[start : start + _AT_ONCE] for start in range(0, len(later), _AT_ONCE))
        has_news = any(any(self._each(some, lambda one: one.oplog.has_news(after, times[one]))) for some in groups)
        return Look(max(newest) if has_news else min(*newest, config), has_news)

    def settle(self, until: ClusterTime) -> None:
        if until <= self._settled:
            return
        self._reach(until, [self._config, *self._shards.values()])
        # Now no shard can be added at or before `until` any more.
        while True:
            known = dict(self._shards)
            self._list(after=until)
            added = [shard for name, shard in self._shards.items() if known.get(name) is not shard]
            if not added:
                break
            self._reach(until, added)
        self._settled = until

    def _reach(self, until: ClusterTime, members: Sequence[_Member]) -> None:
        newest = self._each(members, _Member.newest)
        behind = [member for member, time_ in zip(members, newest, strict=True) if time_ < until]
        if not behind:
            return
        time.sleep(max(0.0, self._asked_s + _SETTLE_INTERVAL_S - time.monotonic()))
        self._asked_s = time.monotonic()
        ahead = [member for member, time_ in zip(members, newest, strict=True) if time_ >= until]
        document = _clock_document(until, (*ahead, *self._shards.values(), self._config))
        self._each(behind, lambda member: member.reach(until, document))

    def oldest(self) -> ClusterTime:
        found: list[tuple[ClusterTime, bool]] = self._each(
            list(self._shards.values()), lambda shard: shard.oplog.source.oldest()
        )
        cut_off = [oldest for oldest, complete in found if not complete]
        oldest = max(cut_off) if cut_off else min(oldest for oldest, _ in found)
        # Of a shard that is gone nothing up to its removal is there.
        for removed in self._history_after(oldest).removed:
            try:
                reachable(self._cluster, removed, oldest)
            except TailraceError:
                oldest = removed.until.tick()
        return oldest

    # -- streams ----------------------------------------------------------------------------------------------------

    def at(self, time: ClusterTime) -> Offset:
        removed = self._history_after(time).removed
        names = set(self._shards).difference(shard.name for shard in removed)
        names.update(shard.name for shard in removed if shard.since is None)
        return Offset(time, tuple((name, time) for name in sorted(names)), self.identity)

    def _marked_sources(self, position: Offset) -> Mapping[str, LiveSource]:
        # A shard that was removed since may have left its name to another one.
        history = self._history_after(position.cluster_time)
        return {name: one.source for name, one in self._shards.items() if history.first_removed(name) is None}

    def _asked_all(self, of: Sequence[_S], ask: Callable[[_S], _T]) -> list[_T]:
        return list(self._pool.map(ask, of))

    def require_history(self, position: Offset) -> None:
        after = position.cluster_time
        members = self._members(self._given(position.shard_names, after), after)
        self._confirm_members(members, after)
        self._each(members, lambda shard: shard.oplog.require_history(after))

    def _confirm_history(self, plan: Plan) -> None:
        after = plan.read_after or ZERO
        members = self._members(self._given(self.at(after).shard_names, after), after)
        self._confirm_members(members, after)
        self._each(members, lambda shard: shard.oplog.confirm_history(plan))

    def _confirm_members(self, members: Sequence[_Shard], after: ClusterTime) -> None:
        """For a stream that begins in the archive: check which shards the cluster has had since."""
        if self._archive is not None and any(self._each(members, lambda shard: shard.is_archived(after))):
            self._archive.confirm_members(after)

    def _members(self, names: Iterable[str], position: ClusterTime) -> list[_Shard]:
        return [self._member(name, position) for name in sorted(names)]

    def _given(self, names: Iterable[str], position: ClusterTime) -> set[str]:
        """Those whose events are given: with ``ignoreRemovedShards`` not the ones that were removed since."""
        ignored = self._options.stage.get("ignoreRemovedShards") is True
        return {name for name in names if not ignored or self._history_after(position).first_removed(name) is None}

    def end(self, position: Offset, newest: ClusterTime, limits: Limits | None) -> Offset:
        """As in any deployment. With the removal of a shard a micro-batch ends: the shard takes part up to there."""
        newest = min([newest, *(removed.until for removed in self._history_after(position.cluster_time).removed)])
        with self._outlining(position, self._opened(position, newest)):
            return super().end(position, newest, limits)

    @property
    def _is_sharded(self) -> bool:
        return True

    def _state_members(self, after: ClusterTime | None) -> Sequence[StateOf]:
        if after is None:
            self._list()
            return [_state_of(shard) for shard in self._shards.values()]
        return [_state_of(shard) for shard in self._members(self._given(self.at(after).shard_names, after), after)]

    def slices(self, start: Offset, end: Offset) -> Sequence[OplogSlice]:
        states = self.states
        for name, after in end.opened if states is not None else ():
            # A shard that joins the cluster has a new state.
            if states is not None and name in self._given([name], start.cluster_time):
                states.begin(_state_of(self._member(name, start.cluster_time)), after)
        with self._outlining(start, dict(end.opened)):
            return super().slices(start, end)

    @contextmanager
    def _outlining(self, start: Offset, opened: Mapping[str, ClusterTime]) -> Iterator[None]:
        """What is counted inside is counted of the shards that take part after ``start``."""
        self._in_range = self._members(self._ranges(start, opened), start.cluster_time)
        try:
            yield
        finally:
            self._in_range = None

    def first_invalidating(self, start: Offset, until: ClusterTime) -> ClusterTime | None:
        ranges = self._ranges(start, self._opened(start, until))
        members = {name: self._member(name, start.cluster_time) for name in ranges}

        def ask(name: str) -> ClusterTime | None:
            find = members[name].oplog.outline.first_invalidating
            shown = partial(find, until=until, show_migration_events=self._shows_migrations)
            return _first_invalidating(name, ranges[name], start, shown)

        found = self._asked_all(list(ranges), ask)
        return min((time for time in found if time is not None), default=None)

    def advanced(self, position: Offset, to: ClusterTime, *, invalidated: bool) -> Offset:
        after = position.cluster_time
        opened = self._opened(position, to)
        closed = {shard.name for shard in self._history_after(after).removed if shard.until <= to}
        # What a removed shard has given since the position is given in this micro-batch, its last.
        self._reach(to, self._members(self._given(closed & {*position.shard_names, *opened}, after), after))
        return position.advanced(to, invalidated=invalidated, opened=opened, closed=closed)

    def _opened(self, position: Offset, until: ClusterTime) -> dict[str, ClusterTime]:
        """The shards that take part since a time after ``position``, and the cluster time after which they do."""
        times = added_shards(self._history_after(position.cluster_time).changes)
        for name in self._shards:
            times.setdefault(name, position.cluster_time)  # its adding has left the config server's oplog
        unknown = set(times).difference(position.shard_names)
        return {name: times[name] for name in unknown if times[name] < until}

    def _ranges(self, start: Offset, opened: Mapping[str, ClusterTime]) -> dict[str, ClusterTime]:
        """Every shard that takes part after ``start``, and the time after which it is read."""
        ranges = {**dict.fromkeys(start.shard_names, start.cluster_time), **opened}
        return {name: ranges[name] for name in sorted(self._given(ranges, start.cluster_time))}

    def _slice(self, start: Offset, end: Offset, low: ClusterTime, high: ClusterTime) -> OplogSlice:
        ranges = self._ranges(start, dict(end.opened))
        shards = tuple(
            ShardRange(name, self._member(name, start.cluster_time).address.host, max(low, after))
            for name, after in ranges.items()
            if after < high
        )
        resume = start.resume if low == start.cluster_time else None
        version = end.server_version or self.server_version
        return OplogSlice(low, high, version, start.token_version, resume, shards=shards)

    def _may_cut(self, start: Offset) -> bool:
        # Each shard leaves out its first invalidate: only where the range is read in one can it be known which that is.
        starts_after_invalidate = start.resume is not None and start.resume.token.from_invalidate
        return super()._may_cut(start) and not starts_after_invalidate

    def close(self) -> None:
        self._close()
        super().close()

    def _close(self) -> None:
        self._pool.shutdown(wait=False)
        self._cluster.close()


def _clock_document(until: ClusterTime, members: Iterable[_Member]) -> Mapping[str, Any]:
    """What the first of ``members`` that has heard of ``until`` knows of the time."""
    for member in members:
        document = _named(member.address.name, member.clock_document)
        if document is not None and ClusterTime.from_timestamp(document["clusterTime"]) >= until:
            return document
    raise SourceError(f"no member of the cluster has reached {until} yet", hint="Name a time that has passed")


def _first_invalidating(
    name: str, after: ClusterTime, start: Offset, find: Callable[[ClusterTime], ClusterTime | None]
) -> ClusterTime | None:
    """What ends the stream after ``start`` on the shard ``name``, in which ``find`` looks."""
    if start.resume is None or not start.resume.token.from_invalidate:
        return _named(name, partial(find, after))
    # A stream that starts after an invalidate leaves out the first one of every shard.
    first = _named(name, partial(find, max(after, ClusterTime(start.resume.token.cluster_time - 1))))
    return None if first is None else _named(name, partial(find, first))


def _archived(options: ReadOptions) -> ArchivedShards | None:
    if options.archive is None:
        return None
    from tailrace.read.archive.cluster_hybrid import ArchivedShards  # noqa: PLC0415  Arrow and Parquet

    return ArchivedShards(options.archive)


def _state_of(shard: _Shard) -> StateOf:
    from tailrace.lake.spark.planning.exact import StateOf  # noqa: PLC0415  not without lmdb

    return StateOf(shard.address.name, shard.oplog.source, shard.connection.client)


def _named(name: str, ask: Callable[[], _T]) -> _T:
    """The answer of a member, whose errors name it."""
    try:
        return ask()
    except TailraceError as error:
        raise on_shard(error, name) from None
