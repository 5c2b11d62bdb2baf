"""All oplogs of a deployment, read together up to one cluster time, for all that follow its collections.

A window takes every member up to one time T that all of them have promised. An idle shard is asked for the promise
(``tailrace.read.source.promise``), but only if something of interest happened, since its answer is an oplog entry too.

What a window leaves of the time up to T is read ahead in a thread: all of it is already promised, so it is a closed
range that is the same whenever it is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core.kernel.change_rows import ChangeRows, change_rows
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.entry import OplogEntry, applied_at_once, parse_entry
from tailrace.core.oplog.history import history_lost
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stage.oplog_match import OplogMatch
from tailrace.core.stage.unwind_transaction import UnwindTransaction, is_commit, operations_of
from tailrace.errors import OplogFormatError, OtherHistoryError, SourceError, TailraceError, on_shard
from tailrace.read.archive.layout import CONFIG_OPLOG
from tailrace.read.source.advice import told_how_to_begin
from tailrace.read.source.base import OplogSource
from tailrace.read.source.connection import Connection
from tailrace.read.source.membership import Removed, changes, removed_shards
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.promise import PromiseRequester
from tailrace.read.source.topology import Cluster, ShardAddress
from tailrace.read.source.witness import check_witness, identity_of, replica_set_id
from tailrace.read.window.read_ahead import ReadAhead

#: After about how many bytes of entries, over all members, a window ends.
WINDOW_BYTES: Final = 32 << 20
#: Seconds: how often the position moves on when nothing of interest happens, so that the oplog does not overtake it.
_IDLE_S: Final = 10.0
_LOOK_S: Final = 0.005
_CONFIG: Final = "the config server"
_UNAUTHORIZED: Final = 13
#: What follows the name of a removed shard while another one has its name.
_FORMER: Final = " (removed)"
#: What is to be done with a store of another history. Then comes what begins it anew.
OTHER_HISTORY: Final = "Name the deployment that they were read from. Or "


class EntryRun(NamedTuple):
    """Entries of one member, in oplog order."""

    member: OplogMember
    raw: bytes
    rows: ChangeRows


@dataclass(frozen=True, slots=True)
class OplogWindow:
    """Everything after ``after`` up to ``until``: runs of entries, and their order. ``settled``: so far there may be
    more, and it can be read at once."""

    after: ClusterTime
    until: ClusterTime
    runs: tuple[EntryRun, ...]
    settled: ClusterTime

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to read at once."""
        return self.until >= self.settled

    @property
    def size(self) -> int:
        """The bytes of the entries."""
        return sum(int(run.rows.start[-1]) for run in self.runs)

    @property
    def entries(self) -> int:
        """How many entries there are."""
        return sum(len(run.rows.time) for run in self.runs)

    @property
    def marks(self) -> dict[str, EntryMark]:
        """The last entry of each member that has any, by the member's name."""
        last = {run.member.name: run for run in self.runs if len(run.rows.time)}
        return {name: EntryMark.of(*_last_entry(run)) for name, run in last.items()}

    def in_order(self) -> Iterator[tuple[EntryRun, range | list[int]]]:
        """Ranges of entries in the order of their cluster times: a run, and which of its entries."""
        if len({run.member.name for run in self.runs}) < 2:
            for run in self.runs:
                yield run, range(len(run.rows.time))
            return
        times = np.concatenate([run.rows.time.view(np.uint64) for run in self.runs])
        whose = np.repeat(np.arange(len(self.runs)), [len(run.rows.time) for run in self.runs])
        index = np.concatenate([np.arange(len(run.rows.time)) for run in self.runs])
        order = np.argsort(times, kind="stable")
        whose, index = whose[order], index[order]
        cuts = np.flatnonzero(np.diff(whose)) + 1
        for first, last in zip((0, *cuts.tolist()), (*cuts.tolist(), len(whose)), strict=True):
            if last > first:
                yield self.runs[int(whose[first])], index[first:last].tolist()


class OplogMember:
    """One oplog whose entries are read: a replica set's, a shard's, or the part that an archive keeps. ``read`` may be
    called in another thread than the rest, if it has a ``reader`` of its own; otherwise it reads from ``source``."""

    def __init__(self, name: str, source: OplogSource, version: str, *, reader: OplogSource | None = None) -> None:
        self.name = name
        self.source = source
        self._reader = reader or source
        self._interrupted = False
        options = StreamOptions(Scope.cluster(), show_expanded_events=True, show_system_events=True)
        # Collections hold what was written, whatever events it gives. Entries of every version are read as they are,
        # those of a later one too, which a member writes that was upgraded meanwhile.
        profile = replace(profile_for(version), unwinds_apply_ops_without_session=True, multi_op_is_no_transaction=True)
        self._match = OplogMatch(options, profile, passes_unknown=True)
        self._unwind = UnwindTransaction(self._match, multi_op_is_no_transaction=True)

    def read(self, after: ClusterTime, until: ClusterTime, bytes_max: int) -> tuple[list[EntryRun], ClusterTime]:
        """Entries after ``after``, and the time up to which they were read: ``until``, or earlier if they exceed
        ``bytes_max`` bytes."""
        runs: list[EntryRun] = []
        size = 0
        reached = after
        for batch in self._batches(after, until):
            reached = max(after, batch.high_water)
            if batch.raw:
                rows = change_rows(batch.raw)
                if rows is None:
                    raise OplogFormatError("the oplog holds invalid BSON", position=f"after {after}")
                run = EntryRun(self, batch.raw, rows)
                self._was_read(run)
                if (left := _from(run, after)) is not None:
                    runs.append(left)
                size += len(batch.raw)
            if size >= bytes_max:
                break
            if self._interrupted:
                raise SourceError(f"reading {self.name} was interrupted")
        return runs, reached

    def _batches(self, after: ClusterTime, until: ClusterTime) -> Iterator[OplogBatch]:
        return self._reader.read(after, until)

    def _was_read(self, run: EntryRun) -> None:
        """Called with each run."""

    def interrupt(self) -> None:
        """End ``read`` soon and for good, from any thread."""
        self._interrupted = True

    def operations(self, raw: bytes) -> Iterator[OplogEntry]:
        """A command entry, or the operations of the transaction that it commits, in order."""
        entry = parse_entry(raw)
        if entry.operation != "c" or not is_commit(entry):
            yield entry
            return
        if entry.lsid is None and b"applyOps" in entry.command_fields():
            yield from applied_at_once(entry)
            return
        if not self._match.matches(entry):
            return
        yield from operations_of(self._unwind.process([entry]), self.source.entries)


#: Makes the source of the oplog that a client leads to.
Longer = Callable[[MongoClient[Any]], MongodSource]


class LiveOplog(OplogMember):
    """An oplog that grows: its server can be asked for a promise. ``longer``: makes its source, where that is to reach
    back further than the oplog."""

    def __init__(
        self, name: str, client: MongoClient[Any], version: str, *, anew: str, longer: Longer = MongodSource
    ) -> None:
        self.client = client
        self._anew = anew
        self._ahead, self.live = longer(client), longer(client)
        #: The last entry that was read: the oplog must hold it still when reading goes on.
        self._last: tuple[ClusterTime, bytes] | None = None
        super().__init__(name, self.live, version, reader=self._ahead)
        self._connection = Connection(client)
        self._requester = PromiseRequester(client, name)

    def interrupt(self) -> None:
        super().interrupt()
        self._ahead.interrupt()

    def _batches(self, after: ClusterTime, until: ClusterTime) -> Iterator[OplogBatch]:
        last = self._last
        if last is not None and last[0] <= after:
            return self._ahead.read(last[0], until, entry=last[1])
        return self._ahead.read(after, until)

    def _was_read(self, run: EntryRun) -> None:
        time, entry = _last_entry(run)
        self._last = time, entry

    def read(self, after: ClusterTime, until: ClusterTime, bytes_max: int) -> tuple[list[EntryRun], ClusterTime]:
        try:
            with told_how_to_begin(self._anew):
                return super().read(after, until, bytes_max)
        except OtherHistoryError as error:
            raise OtherHistoryError(error.message, hint=OTHER_HISTORY + self._anew) from None

    def goes_on_from(self, mark: EntryMark) -> None:
        """The next read is to find the entry of ``mark`` where it was, if the oplog still has it."""
        [entry] = self.live.entries([mark.time])
        if entry is not None and EntryMark.of(mark.time, entry) == mark:
            self._last = mark.time, entry

    def newest(self) -> ClusterTime:
        """The time of the newest entry that a majority has committed."""
        return self.source.newest()

    def mark(self) -> EntryMark | None:
        """The mark of the newest entry."""
        newest = self.newest()
        [found] = self.source.entries([newest])
        return None if found is None else EntryMark.of(newest, found)

    def reach(self, until: ClusterTime, clock: Mapping[str, Any]) -> None:
        """Make sure that there is a majority-committed entry at or after ``until``."""
        while self.newest() < until:
            self._connection.retrying(lambda: self._requester.ask(until, clock))
            if self.newest() < until:
                time.sleep(_LOOK_S)

    def clock(self) -> Mapping[str, Any] | None:
        """The largest ``$clusterTime`` that the server knows, as it sent it."""

        client = self._connection.client

        def ping() -> Mapping[str, Any] | None:
            # Without a session of ours: a hidden member offers none to a direct connection. PyMongo's reply keeps the
            # clock as the server sent it.
            reply: Mapping[str, Any] = client.admin.command("ping", read_preference=client.read_preference)
            clock: Mapping[str, Any] | None = reply.get("$clusterTime")
            return clock

        return self._connection.retrying(ping)

    def happened(self, after: ClusterTime) -> bool:
        """Whether there is any entry after ``after`` that is not a no-op or part of a migration."""
        query = {
            "ts": {"$gt": after.to_timestamp()},
            "op": {"$ne": "n"},
            "ns": {"$not": {"$regex": r"^(config|local|admin\.system)\b"}},
            "fromMigrate": {"$ne": True},
        }
        oplog = self._connection.majority("local", "oplog.rs")
        return self._connection.retrying(lambda: oplog.find_one(query, {"ts": 1})) is not None


class Oplogs:
    """The oplogs of a replica set, or of all shards of a cluster. Not for several threads at a time.

    ``members``  name -> host of the shards that were read before this process
    ``witness``  of what was read before: raises OtherHistoryError if this is another history
    ``what``     who reads them, in the plural: "the tables in DIR"
    ``anew``     what lets these start again, at the end of a sentence: "remove the directory"
    ``stopped``  when it is set, a read that is under way is no longer waited for
    ``archive``  the directory of an archive that goes on where the oplogs no longer reach back
    """

    def __init__(
        self,
        client: MongoClient[Any],
        cluster: Cluster | None,
        members: Mapping[str, str],
        stopped: threading.Event | None = None,
        *,
        witness: Witness | None = None,
        what: str,
        anew: str,
        archive: Path | None = None,
    ) -> None:
        self._stopped = stopped
        self._archive = archive
        self._what, self._anew = what, anew
        #: Shards that were added since the last look, with whatever they held before.
        self.joined: set[str] = set()
        self._cluster = cluster
        self._client = client
        self._hosts: dict[str, str] = dict(members)
        self._members: dict[str, LiveOplog] = {}
        #: The window that is being read, and after which time.
        self._ahead: tuple[ClusterTime, ReadAhead[OplogWindow]] | None = None
        #: Of what was read last.
        self._witness: Witness | None = None
        self._idle_since = time.monotonic()
        if cluster is None:
            source = MongodSource(client)
            self.version = source.server_version
            self._members[source.name] = self._oplog(source.name, client, source.server_version, None)
        else:
            self.version = cluster.server_version()
            self._config = self._oplog(_CONFIG, cluster.config_client(), self.version, CONFIG_OPLOG)
            for name, host in self._hosts.items():
                self._add(ShardAddress(name, host))
        self.identity = self._identity()
        if witness is not None:
            self.check(witness)
        if cluster is not None:
            self._list(None)
            if not members:
                self.joined = set()

    def _oplog(self, name: str, client: MongoClient[Any], version: str, archived: str | None) -> LiveOplog:
        """A member. ``archived``: what its oplog is called in a cluster's archive."""
        longer: Longer = MongodSource
        if self._archive is not None:
            from tailrace.read.window.archived import ArchivedOplog  # noqa: PLC0415  it needs pyarrow

            longer = partial(ArchivedOplog, folder=self._archive, oplog=archived, stopped=self._stopped)
        return LiveOplog(name, client, version, anew=self._anew, longer=longer)

    @property
    def live(self) -> Sequence[OplogMember]:
        """The members, for reading closed ranges."""
        return list(self._members.values())

    def _identity(self) -> DeploymentIdentity:
        """Whose oplogs they are. A user who may not know it is told apart by entries alone."""
        try:
            return identity_of(self.deployment)
        except SourceError as error:
            if error.code != _UNAUTHORIZED:
                raise
            return DeploymentIdentity(dict.fromkeys(self._members, "") if self._cluster is None else {})

    @property
    def deployment_id(self) -> str:
        """What distinguishes the deployment from others; ``""`` where it does not say."""
        ids = [one for one in self.identity.replica_sets.values() if one]
        return self.identity.cluster or "+".join(sorted(ids))

    def check(self, witness: Witness) -> None:
        """Raise OtherHistoryError unless what ``witness`` is of was read from this deployment's history."""
        self._witness = witness
        sources = {name: member.live for name, member in self._known().items()}
        check_witness(witness, self.identity, sources, what=self._what, hint=OTHER_HISTORY + self._anew)
        for name, mark in witness.entries.items():
            if name in self._members:
                self._members[name].goes_on_from(mark)

    def witness(self, before: Witness | None = None, read: Mapping[str, EntryMark] | None = None) -> Witness:
        """The witness of a position: the entries that were ``read`` last, or those of the witness ``before`` where they
        are newer, as after a copy. If neither is given, the newest entries."""
        if before is None and read is None:
            newest = {name: _named(member, LiveOplog.mark) for name, member in self._known().items()}
            found = {name: mark for name, mark in newest.items() if mark is not None}
        else:
            found = {} if before is None else dict(before.entries)
            for name, mark in (read or {}).items():
                found[name] = max(mark, found.get(name, mark))  # by their times
            found = {name: mark for name, mark in found.items() if name in self._known()}
        self._witness = Witness(self.identity, found)
        return self._witness

    def _known(self) -> dict[str, LiveOplog]:
        """The members, and the config server, whose list of shards is part of the history."""
        return self._members if self._cluster is None else {**self._members, _CONFIG: self._config}

    @property
    def deployment(self) -> MongoClient[Any] | Cluster:
        """The deployment that a snapshot is read from."""
        return self._cluster or self._client

    @property
    def members(self) -> Mapping[str, str]:
        """The shards that are read: name -> host."""
        return dict(self._hosts)

    def window(self, after: ClusterTime, *, at_once: bool = False, at_least: ClusterTime = ZERO) -> OplogWindow | None:
        """What comes after ``after``; ``None`` if nothing of interest does. ``at_once``: a window even then.
        ``at_least``: a time that the window reaches even if nothing happens, unless it becomes too large before. Then a
        thread begins to read the next window, which the call with the time that this one has reached returns. It
        returns ``None`` if it is stopped while it waits for that."""
        if self._ahead is not None and not self._ahead[1].wait(self._stopped):
            return None
        window = self._was_read_ahead(after)
        if window is None:
            until = self._settled(after, at_once, at_least)
            if until is None or until <= after:
                return None
            window = read_window(list(self._members.values()), after, until, WINDOW_BYTES)
        if not window.is_last:
            self._read_ahead(window.until, window.settled)
        elif self._cluster is not None:
            self._drop_removed()
        return window

    def close(self) -> None:
        """Give up what is being read."""
        if self._ahead is not None:
            self._ahead[1].give_up()
            self._ahead = None

    def _read_ahead(self, after: ClusterTime, until: ClusterTime) -> None:
        members = list(self._members.values())

        def interrupt() -> None:
            for member in members:
                member.interrupt()

        self._ahead = after, ReadAhead(lambda: read_window(members, after, until, WINDOW_BYTES), interrupt)

    def _was_read_ahead(self, after: ClusterTime) -> OplogWindow | None:
        """The window after ``after``, if it was read ahead. Raises the error that reading came to."""
        if self._ahead is None:
            return None
        (begins, ahead), self._ahead = self._ahead, None
        return ahead.result() if begins == after else None  # the caller has gone back

    def _settled(self, after: ClusterTime, at_once: bool, at_least: ClusterTime) -> ClusterTime | None:
        """The time up to which a window can be read now."""
        members = list(self._members.values())
        if self._cluster is None:
            found: ClusterTime = members[0].newest()
            if found < after and self._witness is not None:
                self.check(self._witness)  # a member that is late, or another history
            while found < at_least:
                time.sleep(_LOOK_S)
                found = members[0].newest()
            return found
        idle = time.monotonic() - self._idle_since
        if not at_once and not at_least and idle < _IDLE_S and not any(one.happened(after) for one in members):
            return None
        self._idle_since = time.monotonic()
        until: ClusterTime = max([at_least, *(_named(member, LiveOplog.newest) for member in members)])
        clock = next(
            (found for found in (_named(one, LiveOplog.clock) for one in members) if _knows(found, until)), None
        )
        if clock is None:
            return None  # ask the first member again
        self._config.reach(until, clock)
        self._list(until)
        self.add_removed(after)
        for member in self._members.values():
            _named(member, lambda one: one.reach(until, clock))
        return until

    def _list(self, after: ClusterTime | None) -> None:
        assert self._cluster is not None
        self._listed = {shard.name: shard.host for shard in self._cluster.shards(after=after)}
        for name, host in self._listed.items():
            if name in self._members and host != self._hosts[name]:
                self._move(name, host)
            if name not in self._members:
                self._add(ShardAddress(name, host))
                self.joined.add(name)
        if not self._members:
            raise SourceError("the cluster has no shard yet", hint="Add one: sh.addShard('<replica set>/<host:port>')")

    def add_removed(self, since: ClusterTime) -> None:
        """Add the shards that were removed after ``since``: the list has them no longer, and one that had been added
        after ``since``, too, was never on a list that was read. What they wrote until then is only in their oplogs.

        Raises SourceError for one that cannot be read, and 286 where the config server's oplog begins later.
        """
        if self._cluster is None:
            return
        oldest, is_first = self._config.live.oldest()
        if oldest > since and not is_first:
            raise history_lost(f"the config server's oplog begins at {oldest}: which shards there were is not known")
        config = Connection(self._config.client)
        history = changes(config, since)
        again = {change.name for change in history if change.host is not None}
        for shard in removed_shards(config, history):
            if not self._is_read(shard, again):
                name = shard.name
                while name in self._members:
                    name += _FORMER
                self._add(ShardAddress(name, self._readable(shard)))
                self.joined.add(name)

    def _is_read(self, shard: Removed, again: Collection[str]) -> bool:
        """Whether a removed shard is one of those that are read. ``again``: names that were given to a shard since."""
        if shard.host is not None:
            return any(same_replica_set(shard.host, host) for host in self._hosts.values())
        return f"{shard.name}{_FORMER}" in self._hosts or (shard.name in self._hosts and shard.name not in again)

    def _readable(self, shard: Removed) -> str:
        """Where a removed shard is, which can be read. Raises SourceError."""
        assert self._cluster is not None
        what = (
            f"the shard {shard.name} was removed from the cluster at {shard.until}, and {self._what} have not read it"
        )
        hint = f"Start its servers again until {shard.until} is passed. If they are gone for good, {self._anew}"
        if shard.host is None:
            raise SourceError(f"{what}; config.changelog does not say where it was", hint=hint)
        try:
            MongodSource(self._cluster.client_at(ShardAddress(shard.name, shard.host)), retry_seconds=0).oldest()
        except TailraceError as error:
            raise on_shard(
                SourceError(f"{what}; it cannot be read at {shard.host}: {error.message}", hint=hint), shard.name
            ) from None
        return shard.host

    def _add(self, shard: ShardAddress) -> None:
        assert self._cluster is not None
        client = self._cluster.client_at(shard) if shard.host else self._cluster.client(shard.name)
        self._hosts[shard.name] = shard.host
        self._members[shard.name] = self._oplog(shard.name, client, self.version, shard.name)

    def _move(self, name: str, host: str) -> None:
        """A shard has other servers now. If they are another replica set, which was given the name of a removed shard,
        what that one wrote last is read under another name."""
        assert self._cluster is not None
        now = replica_set_id(Connection(self._cluster.client_at(ShardAddress(name, host))))
        if now == replica_set_id(Connection(self._members[name].client)):
            self._hosts[name] = host
            return
        former = f"{name}{_FORMER}"
        while former in self._members:
            former += _FORMER
        self._members[former] = self._members.pop(name)
        self._members[former].name = former
        self._hosts[former] = self._hosts.pop(name)

    def _drop_removed(self) -> None:
        """Forget shards that are no longer listed; they have been read up to a time after their removal."""
        for name in [name for name in self._members if name not in self._listed]:
            del self._members[name]
            del self._hosts[name]


def same_replica_set(one: str, other: str) -> bool:
    """Whether two hosts as in ``config.shards`` (``<replica set>/<host:port>,...``) are of one replica set: its members
    come and go."""
    (name, _, servers), (other_name, _, others) = one.partition("/"), other.partition("/")
    return name == other_name and not set(servers.split(",")).isdisjoint(others.split(","))


def read_window(members: Sequence[OplogMember], after: ClusterTime, until: ClusterTime, bytes_max: int) -> OplogWindow:
    """What some members hold after ``after`` up to ``until``, or less if that is more than ``bytes_max``."""
    runs: list[EntryRun] = []
    reached = until
    for member in members:
        found, up_to = _named(member, lambda one: one.read(after, until, bytes_max // len(members)))
        runs += found
        reached = min(reached, up_to)
    return OplogWindow(after, reached, tuple(one for run in runs if (one := _up_to(run, reached)) is not None), until)


def _last_entry(run: EntryRun) -> tuple[ClusterTime, bytes]:
    """The last entry of a run: its time and its bytes."""
    return ClusterTime(int(run.rows.time.view(np.uint64)[-1])), run.raw[run.rows.start[-2] : run.rows.start[-1]]


def _from(run: EntryRun, after: ClusterTime) -> EntryRun | None:
    """A run without the entries up to ``after``."""
    count = int(np.searchsorted(run.rows.time.view(np.uint64), np.uint64(int(after)), side="right"))
    if not count:
        return run
    if count == len(run.rows.time):
        return None
    return EntryRun(run.member, run.raw, ChangeRows(*(column[count:] for column in run.rows)))


def _up_to(run: EntryRun, until: ClusterTime) -> EntryRun | None:
    """A run without the entries after ``until``."""
    count = int(np.searchsorted(run.rows.time.view(np.uint64), np.uint64(int(until)), side="right"))
    if count == len(run.rows.time):
        return run
    if not count:
        return None
    rows = ChangeRows(run.rows.start[: count + 1], *(column[:count] for column in run.rows[1:]))
    return EntryRun(run.member, run.raw, rows)


def _knows(clock: Mapping[str, Any] | None, until: ClusterTime) -> bool:
    return clock is not None and ClusterTime.from_timestamp(clock["clusterTime"]) >= until


def _named(member: OplogMember, ask: Any) -> Any:
    """What a member answers; an error names the member."""
    try:
        return ask(member)
    except TailraceError as error:
        raise on_shard(error, member.name) from None
    except PyMongoError as error:
        raise SourceError(f"{member.name} cannot be read: {error}") from None
