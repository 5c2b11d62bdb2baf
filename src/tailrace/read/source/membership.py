"""Which replica sets were shards at which time, according to the config server's oplog: for streams that begin in the
past.

``config.shards`` says who is a shard now. A stream that begins before a shard was removed needs that shard's oplog up
to the removal, or events are missing from it. The name alone does not help: another replica set may bear it by now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from pymongo import DESCENDING, MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost
from tailrace.errors import SourceError, TailraceError, on_shard
from tailrace.read.source.connection import Connection
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster, OpenView, ShardAddress

_SHARDS: Final = "config.shards"
#: 5.0 and 6.0 remove a shard in a command of ``config``; newer servers add and remove shards in transactions.
_COMMANDS: Final = ("admin.$cmd", "config.$cmd")

_log = logging.getLogger("tailrace.source")


class ShardChange(NamedTuple):
    """A shard was added, at ``host``, or removed (``host`` is ``None``). ``wall`` is the config server's own clock."""

    time: ClusterTime
    name: str
    host: str | None
    wall: datetime | None


class Removed(NamedTuple):
    """A replica set that was the shard ``name`` up to ``until``, and no longer is.

    ``host``   ``None`` where nobody remembers
    ``since``  when it was added; ``None``: before the time that was asked about
    """

    name: str
    host: str | None
    since: ClusterTime | None
    until: ClusterTime


class Member(NamedTuple):
    """A shard that a stream begins with: read at ``client`` after ``after``."""

    name: str
    client: MongoClient[Any]
    after: ClusterTime


class Beginning(NamedTuple):
    """What a stream begins with; it follows ``config.shards`` after ``config_after``, as ``OpenView`` says."""

    members: tuple[Member, ...]
    config_after: ClusterTime | None


def changes(config: Connection, after: ClusterTime) -> list[ShardChange]:
    """What happened to ``config.shards`` after ``after``, as far back as the config server's oplog reaches."""
    query = {
        "ts": {"$gt": after.to_timestamp()},
        "$or": [
            {"ns": _SHARDS, "op": {"$in": ["i", "d"]}},
            {"ns": {"$in": _COMMANDS}, "o.applyOps.ns": _SHARDS},
        ],
    }

    def read() -> list[dict[str, Any]]:
        fields = {"ts": 1, "op": 1, "o": 1, "wall": 1}
        return list(config.majority("local", "oplog.rs").find(query, fields))

    found = []
    for entry in config.retrying(read):
        operations = entry["o"]["applyOps"] if entry["op"] == "c" else [{**entry, "ns": _SHARDS}]
        for operation in operations:
            if operation.get("ns") == _SHARDS and operation["op"] in ("i", "d"):
                host = str(operation["o"]["host"]) if operation["op"] == "i" else None
                time = ClusterTime.from_timestamp(entry["ts"])
                found.append(ShardChange(time, str(operation["o"]["_id"]), host, entry.get("wall")))
    return found


def added_shards(found: Iterable[ShardChange]) -> dict[str, ClusterTime]:
    """The cluster time at which each shard was added; the first one where it was added several times. One whose entry
    has left the config server's oplog is not in it."""
    added: dict[str, ClusterTime] = {}
    for change in found:
        if change.host is not None:
            added.setdefault(change.name, change.time)
    return added


def removed_shards(config: Connection, found: Iterable[ShardChange]) -> list[Removed]:
    """The shards that were removed, in the order of their removals."""
    removed: list[Removed] = []
    open_: dict[str, ShardChange] = {}
    for change in found:
        if change.host is not None:
            open_.setdefault(change.name, change)
            continue
        since = open_.pop(change.name, None)
        host = remembered_host(config, change.name, change.wall) if since is None else since.host
        removed.append(Removed(change.name, host, None if since is None else since.time, change.time))
    return removed


def remembered_host(config: Connection, name: str, before: datetime | None = None) -> str | None:
    """Where a shard was that has been removed: ``config.shards`` has forgotten it, the change log has not. Where
    several had the name, the one that was added last, up to ``before`` by the config server's own clock."""
    query: dict[str, Any] = {"what": "addShard", "details.name": name}
    if before is not None:
        query["time"] = {"$lte": before}

    def read() -> Mapping[str, Any] | None:
        log = config.majority("config", "changelog")
        found: Mapping[str, Any] | None = log.find_one(query, {"details.host": 1}, sort=[("time", DESCENDING)])
        return found

    found = config.retrying(read)
    host = None if found is None else found.get("details", {}).get("host")
    return host if isinstance(host, str) else None


def beginning(cluster: Cluster, view: OpenView, after: ClusterTime, *, ignore_removed: bool = False) -> Beginning:
    """What a stream that reads after ``after`` begins with.

    Raises SourceError for a shard that was removed after ``after`` and cannot be read any more, and 286 where its
    oplog no longer reaches back. With ``ignore_removed`` such shards are left out, and the log says so.
    """
    listed = tuple(Member(name, cluster.client(name), after) for name in view.shards)
    if cluster.config is None or view.config_after is None or after >= view.config_after:
        return Beginning(listed, view.config_after)
    config = Connection(cluster.config)
    history = changes(config, after)
    removed = removed_shards(config, history)
    if not removed:
        return Beginning(listed, view.config_after)
    names = {shard.name for shard in removed}
    members = tuple(member for member in listed if member.name not in names)
    if ignore_removed:
        for shard in removed:
            begin = after if shard.since is None else shard.since
            _log.warning(
                "the shard %s was removed at %s: what it wrote after %s is not given", shard.name, shard.until, begin
            )
        # The last of several of one name is the one that is a shard now.
        last = {change.name: change.time for change in history if change.host is not None}
        again = [member for member in listed if member.name in names]
        members += tuple(member._replace(after=last[member.name]) for member in again)
        return Beginning(tuple(sorted(members, key=_name)), view.config_after)
    for shard in removed:
        client = reachable(cluster, shard, after)
        if shard.since is None:
            members += (Member(shard.name, client, after),)
    return Beginning(tuple(sorted(members, key=_name)), ClusterTime(history[0].time - 1))


def _name(member: Member) -> str:
    return member.name


def reachable(cluster: Cluster, shard: Removed, after: ClusterTime) -> MongoClient[Any]:
    """A client for a removed shard, which can be read and whose oplog reaches back to ``after``. Raises otherwise."""
    hint = (
        f"Start its servers again until the stream has passed {shard.until}. If they are gone for good, "
        "ignoreRemovedShards leaves out what it wrote up to then"
    )
    what = f"the shard {shard.name} was removed from the cluster at {shard.until}, after the stream's start ({after})"
    if shard.host is None:
        raise SourceError(f"{what}, and config.changelog does not say where it was", hint=hint)
    client = cluster.client_at(ShardAddress(shard.name, shard.host))
    try:
        oldest, _ = MongodSource(client, retry_seconds=0).oldest()
    except TailraceError as error:
        raise on_shard(
            SourceError(f"{what}, and cannot be read at {shard.host}: {error.message}", hint=hint), shard.name
        ) from None
    # One that was a shard then has an oplog that is older.
    if shard.since is None and oldest > after:
        raise on_shard(history_lost(f"{what}, and its oplog begins at {oldest}"), shard.name)
    return client
