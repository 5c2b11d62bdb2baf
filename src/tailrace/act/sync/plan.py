"""What a sync would do, and what prevents it: found out before anything is written.

Each refusal is a sentence that says what to do. A warning does not stop a sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.act.sync.at_rest import in_the_making
from tailrace.act.sync.catalog import (
    CatalogCollection,
    DeploymentCatalog,
    OnSource,
    OnTarget,
    name_of,
    number_of,
    read_catalog,
    shown,
    version_of,
)
from tailrace.act.sync.rights import (
    GRANT_BY_UUID,
    NOT_BY_UUID,
    SOURCE,
    TARGET,
    may_read_by_uuid,
    missing_rights,
    unreadable,
)
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.shard_keys import CLUSTER_SINCE, chosen_key, refused_key, source_keys
from tailrace.act.sync.sizes import disk_of, in_time, in_units, reach_of, sizes_of
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.views import collections_shown
from tailrace.core.plan.profile import knowledge_of
from tailrace.core.printable import in_a_line
from tailrace.errors import TailraceError
from tailrace.read.source.compatibility import compatibility_of
from tailrace.read.source.connection import Connection
from tailrace.read.source.shard_identity import shard_name
from tailrace.read.source.topology import Cluster
from tailrace.read.source.witness import identity_if_allowed, oplogs_of

#: What the copy makes on the machine that it was measured on. It is a guess for any other.
COPY_DOCUMENTS: Final = 60_000
COPY_BYTES: Final = 30 << 20
#: An oplog that reaches back less than this many times the estimate is mentioned.
_WINDOW_SHARE: Final = 2
_RETRY_S: Final = 10.0
_NAMED_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What would be done.

    Attributes:
        refusals: sentences; the sync may begin only if there are none
        seconds: about how long the copy takes
        oplog_seconds: how far the oplog reaches back; ``None``: not known
        goes_on: a sync of this name already exists, and would continue
    """

    source: str
    target: str
    collections: int = 0
    views: int = 0
    documents: int = 0
    bytes: int = 0
    seconds: float = 0.0
    oplog_seconds: float | None = None
    goes_on: bool = False
    keeps_uuids: bool = True
    refusals: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "source": self.source,
            "target": self.target,
            "goesOn": self.goes_on,
            "collections": self.collections,
            "views": self.views,
            "documents": self.documents,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 1),
            "oplogSeconds": None if self.oplog_seconds is None else round(self.oplog_seconds, 1),
            "keepsUuids": self.keeps_uuids,
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        lines = [f"source: {self.source}", f"target: {self.target}"]
        if self.goes_on:
            lines.append("the sync exists already, and continues")
        lines.append(
            f"copy: {self.collections:,} collections, {self.views:,} views, about {self.documents:,} documents, "
            f"{in_units(self.bytes)}: about {in_time(self.seconds)}"
        )
        if self.oplog_seconds is not None:
            lines.append(f"oplog: reaches back {in_time(self.oplog_seconds)}")
        lines += [f"warning: {one}" for one in self.warnings]
        lines += [f"refused: {one}" for one in self.refusals]
        if not self.refusals:
            lines.append("nothing stands in its way")
        return "\n".join(lines)


def make_plan(
    source: MongoClient[Any] | Cluster,
    target: MongoClient[Any],
    settings: SyncSettings,
    cluster: Cluster | None = None,
) -> SyncPlan:
    """Examine both sides. Writes nothing. Raises TailraceError only where neither side can be reached."""
    return _Examination(source, SyncState(target, settings, cluster), settings).plan()


@dataclass
class _Parties:
    """The two sides, who they are, and what was found so far."""

    source: MongoClient[Any] | Cluster
    state: SyncState
    settings: SyncSettings
    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    keeps_uuids: bool = True

    @property
    def target(self) -> MongoClient[Any]:
        """The target, or a mongos of it."""
        return self.state.client

    @property
    def there(self) -> MongoClient[Any] | Cluster:
        """The target as a whole."""
        return self.state.deployment

    def _guarded(self, check: Callable[[], None]) -> None:
        """A check whose own failure is a refusal."""
        try:
            check()
        except TailraceError as error:
            self.refusals.append(str(error))
        except PyMongoError as error:
            self.refusals.append(f"a server did not answer: {error}")

    # -- who they are -------------------------------------------------------------------------------------------------

    def _source_kind(self) -> None:
        """A replica set, or a cluster whose shards are. Raises SourceError for a standalone server."""
        clients = [self.source] if isinstance(self.source, MongoClient) else self._shards(self.source)
        for client in clients:
            Connection(client, retry_seconds=_RETRY_S).wait_for_hello()
        name = shard_name(self.source) if isinstance(self.source, MongoClient) else None
        if name is not None:
            self.refusals.append(
                f"the source is shard {name} of a cluster, so only its part would be copied. "
                "Name the cluster: its config server or a mongos"
            )

    def _shards(self, cluster: Cluster) -> list[MongoClient[Any]]:
        return [cluster.client(one.name) for one in cluster.shards()]

    def _target_kind(self) -> None:
        hello = self.target.admin.command("hello")
        if hello.get("msg") == "isdbgrid":
            if version_of(self.there) < CLUSTER_SINCE:
                self.refusals.append(
                    "the target is a cluster of MongoDB 4.4, which does not rename sharded collections. "
                    "Upgrade it to 5.0 or later"
                )
            self.warnings.append(
                "no sync to a sharded cluster was measured with a mongos itself: verify before a cut-over"
            )
        elif "configsvr" in hello or shard_name(self.target) is not None:
            self.refusals.append(
                "the target is a config server or a shard of a cluster, which takes no writes but those of a mongos. "
                "Name a mongos of the cluster"
            )
        elif "setName" not in hello:
            self.refusals.append(
                "the target is a standalone server, which has no transactions. Start it with --replSet and run "
                "rs.initiate(): one member is enough"
            )

    def _not_the_same(self) -> None:
        theirs = identity_if_allowed(self.there)
        mine = identity_if_allowed(self.source)
        sets = set(mine.replica_sets.items())
        if isinstance(self.source, Cluster):
            clients = {one.name: self.source.client(one.name) for one in self.source.shards()}
            sets = {pair for client in clients.values() for pair in identity_if_allowed(client).replica_sets.items()}
            processes = {_process(client) for client in clients.values()}
        else:
            processes = {_process(self.source)}
        known = {pair for pair in theirs.replica_sets.items() if pair[1]}
        for one in self._members(self.there) if isinstance(self.there, Cluster) else ():
            known |= {pair for pair in identity_if_allowed(one).replica_sets.items() if pair[1]}
        if known & sets or _process(self.target) in processes - {None}:
            self.refusals.append("source and target are the same deployment. Check the two connection strings")

    def _versions(self) -> None:
        mine, theirs = version_of(self.source), version_of(self.there)
        if theirs < mine:
            self.refusals.append(
                f"the target runs MongoDB {_dotted(theirs)} and the source {_dotted(mine)}: a sync goes to the same or "
                "a newer version. Upgrade the target"
            )
            return
        lowest = [one for client in self._members(self.there) if (one := self._compatibility(client)) is not None]
        lower = min(lowest, key=_numbers, default=None)
        higher = [self._compatibility(client) for client in self._members_of_source()]
        for one in higher:
            if one is not None and lower is not None and _numbers(lower) < _numbers(one):
                self.refusals.append(
                    f"the target's feature compatibility version is {lower} and the source's {one}. "
                    f'Run setFeatureCompatibilityVersion: "{one}" on the target, or a higher one'
                )
                break
        if lower is not None and _numbers(lower) < theirs:
            self.warnings.append(
                f"the target runs MongoDB {_dotted(theirs)} with feature compatibility version {lower}"
            )
        for which, version in (("source", mine), ("target", theirs)):
            if knowledge_of(f"{_dotted(version)}.0") != "measured":
                self.warnings.append(f"no sync was measured on MongoDB {_dotted(version)}, which the {which} runs")

    def _members_of_source(self) -> list[MongoClient[Any]]:
        return self._members(self.source)

    def _members(self, deployment: MongoClient[Any] | Cluster) -> list[MongoClient[Any]]:
        return [deployment] if isinstance(deployment, MongoClient) else self._shards(deployment)

    def _compatibility(self, client: MongoClient[Any]) -> str | None:
        try:
            return compatibility_of(client)
        except PyMongoError:
            return None


@dataclass
class _Examination(_Parties):
    """What a sync would meet."""

    def plan(self) -> SyncPlan:
        source, target = _described(self.source), _described(self.there)
        for checks in (
            (self._source_kind, self._target_kind),
            (self._not_the_same,),
            (self._versions, self._rights),
        ):
            for check in checks:
                self._guarded(check)
            if self.refusals:
                return SyncPlan(source, target, refusals=self.refusals, warnings=self.warnings)
        catalog = self._catalog()
        if catalog is None:
            return SyncPlan(source, target, refusals=self.refusals, warnings=self.warnings)
        goes_on = self.state.read() is not None
        for collection in catalog.collections.values():
            self.refusals += self._refused(collection)
        if not goes_on:
            self._guarded(partial(self._shard_keys, catalog))
            self._guarded(self._in_the_making)
        self._guarded(partial(self._names, catalog, goes_on=goes_on))
        names = [one.namespace for one in catalog.collections.values() if one.kind == "collection"]
        self._guarded(partial(self._readable, names))
        documents, size, stored = sizes_of(self._members_of_source(), names)
        rate = min(COPY_DOCUMENTS, self.settings.documents_per_second or math.inf)
        seconds = max(documents / rate, size / COPY_BYTES)
        reach = self._reach()
        if not goes_on:
            self._guarded(partial(self._space, stored))
            self._window(seconds, reach)
        kinds = [one.kind for one in catalog.collections.values()]
        return SyncPlan(
            source,
            target,
            collections=kinds.count("collection"),
            views=kinds.count("view"),
            documents=documents,
            bytes=size,
            seconds=seconds,
            oplog_seconds=reach,
            goes_on=goes_on,
            keeps_uuids=self.keeps_uuids,
            refusals=self.refusals,
            warnings=self.warnings,
        )

    # -- what they may ------------------------------------------------------------------------------------------------

    def _rights(self) -> None:
        for source in oplogs_of(self.source).values():
            source.oldest()
        databases = OnTarget(self.settings).databases
        needed = missing_rights(self.target, self.settings.state_db, databases)
        self.refusals += needed.refusals
        self.warnings += needed.warnings
        self.keeps_uuids = needed.keeps_uuids and isinstance(self.there, MongoClient)
        sides = {SOURCE: self._members_of_source(), TARGET: self._members(self.there)}
        for side, clients in sides.items():
            if not all(may_read_by_uuid(client) for client in clients):
                self.warnings.append(f"{NOT_BY_UUID.format(side)}. {GRANT_BY_UUID}")

    def _readable(self, names: Sequence[str]) -> None:
        """What a user may list and not read would be missed by the copy alone."""
        found = sorted({one for client in self._members_of_source() for one in unreadable(client, names)})
        if found:
            more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
            self.refusals.append(
                f"the source's user may not read {found[0]}{more}. Grant it the role read on each database that is "
                "synced, or leave the collections out (--only, --except)"
            )

    # -- what is there ------------------------------------------------------------------------------------------------

    def _catalog(self) -> DeploymentCatalog | None:
        try:
            return read_catalog(self.source, OnSource(self.settings))
        except TailraceError as error:
            self.refusals.append(str(error))
            return None

    def _in_the_making(self) -> None:
        found = next(in_the_making(self.source, OnSource(self.settings)), None)
        if found is not None:
            self.warnings.append(f"{found}: the copy waits until that is done, for a minute at most")

    def _refused(self, one: CatalogCollection) -> Iterator[str]:
        """Why a collection cannot be synced."""
        leave = "Leave it out (--except)"
        if one.kind == "timeseries":
            yield f"{one.namespace} is a time-series collection, whose buckets no sync keeps equal. {leave}"
        if one.is_capped and not self.keeps_uuids:
            if isinstance(self.there, Cluster):
                yield f"{one.namespace} is capped, and a mongos does not let a sync write to it as it has to. {leave}"
                return
            yield (
                f"{one.namespace} is capped, and the target's user may not write to it as a sync has to. Grant it the "
                "actions applyOps, forceUUID and useUUID on the cluster, or leave it out (--except)"
            )
        if one.is_encrypted:
            yield f"{one.namespace} is a collection of Queryable Encryption, which only drivers may write. {leave}"
        if one.kind == "view":
            yield from self._refused_view(one)
        target = version_of(self.there)
        for spec in one.indexes:
            name = f"the index {name_of(spec)} of {one.namespace}"
            expiry = number_of(spec, b"expireAfterSeconds")
            if expiry is not None and math.isnan(expiry):
                yield f"{name} has NaN as expireAfterSeconds, which versions treat differently. Set it with collMod"
            if target >= (5, 0) and b"geoHaystack" in spec:
                yield f"{name} is a geoHaystack index, which MongoDB 5.0 and later do not have. Drop it"

    def _shard_keys(self, catalog: DeploymentCatalog) -> None:
        """By which keys collections are sharded there."""
        chosen = self.settings.shard_keys
        if not isinstance(self.there, Cluster):
            if chosen:
                self.refusals.append("the target is a replica set, and shards nothing: leave --shard-key out")
            return
        self.refusals += [
            f"--shard-key: the source has no {one}" for one in sorted(chosen.keys() - catalog.collections.keys())
        ]
        keys = source_keys(self.source)
        for namespace, one in catalog.collections.items():
            self.refusals += refused_key(one, chosen_key(one, namespace, chosen, keys))

    def _refused_view(self, one: CatalogCollection) -> Iterator[str]:
        """A view names collections of its database, and nobody rewrites it."""
        database = one.namespace.partition(".")[0]
        there = self.settings.target_of(one.namespace).partition(".")[0]
        for name in collections_shown(one.options):
            if self.settings.target_of(f"{database}.{name}") != f"{there}.{name}":
                yield (
                    f"the view {one.namespace} shows {database}.{name}, which has another name on the target: "
                    f"{shown(one.options)}. Leave the view out (--except), and create it on the target yourself"
                )

    def _names(self, catalog: DeploymentCatalog, *, goes_on: bool) -> None:
        wanted: dict[str, str] = {}
        for namespace in catalog.collections:
            name = self.settings.target_of(namespace)
            if name in wanted:
                self.refusals.append(
                    f"{wanted[name]} and {namespace} would both be {name} on the target. Choose another name (--rename)"
                )
            wanted[name] = namespace
        self._database_names({name.partition(".")[0] for name in wanted})
        if goes_on:
            return
        there = read_catalog(self.there, OnTarget(self.settings)).collections
        taken = sorted(name for name in wanted if name in there)
        if taken:
            names = ", ".join(taken[:_NAMED_MAX]) + (
                f" and {len(taken) - _NAMED_MAX:,} more" if taken[_NAMED_MAX:] else ""
            )
            self.refusals.append(
                f"the target already holds {names}. Drop what is there, leave it out (--except) or give the copy "
                "another name (--rename)"
            )
        others = sorted(there.keys() - wanted.keys())
        if others:
            self.refusals.append(
                f"the target holds {others[0]}"
                + (f" and {len(others) - 1:,} more" if others[1:] else "")
                + ", which the source does not have: it would be synced if the source had it. Drop it, or choose "
                "what is synced (--only, --except)"
            )

    def _database_names(self, wanted: set[str]) -> None:
        """A server takes no two databases whose names differ in upper and lower case alone."""
        try:
            there = {str(one["name"]) for one in self.target.admin.command("listDatabases", nameOnly=True)["databases"]}
        except OperationFailure:
            return  # this user may not: the server says it then
        for name in sorted(wanted - there):
            same = next((one for one in there if one.lower() == name.lower()), None)
            if same is not None:
                self.refusals.append(
                    f"the target has a database {same}, so it cannot have another called {name}. "
                    f"Give the copy another name (--rename {name}=...)"
                )

    # -- how much, how long -------------------------------------------------------------------------------------------

    def _space(self, stored: int) -> None:
        disks = [disk_of(client, self.settings.state_db) for client in self._members(self.there)]
        total, used = sum(one[0] for one in disks), sum(one[1] for one in disks)
        if not total:
            return
        free = total - used
        if free < stored:
            self.refusals.append(
                f"the target's disk has {in_units(free)} left, and the source holds {in_units(stored)} with its "
                "indexes. Make room, or copy less (--only)"
            )
        elif free < 2 * stored:
            self.warnings.append(
                f"the target's disk has {in_units(free)} left, for {in_units(stored)} of documents and indexes "
                "and the oplog of copying them"
            )

    def _reach(self) -> float | None:
        """How many seconds the oplog reaches back once it is full, at the pace so far; the least of the shards'."""
        found = [reach_of(source) for source in oplogs_of(self.source).values()]
        return min((one for one in found if one is not None), default=None)

    def _window(self, seconds: float, reach: float | None) -> None:
        if reach is None:
            return
        if reach < seconds and self.settings.archive is not None:
            self.warnings.append(
                f"the copy takes about {in_time(seconds)}, and the oplog reaches back {in_time(reach)} at the "
                f"pace so far: {in_a_line(str(self.settings.archive))} keeps what the sync needs after that"
            )
        elif reach < seconds:
            self.refusals.append(
                f"the copy takes about {in_time(seconds)}, and the oplog reaches back {in_time(reach)} at the "
                "pace so far: the sync could not go on after the copy. Keep what the oplog loses (--archive DIR), "
                "enlarge it with replSetResizeOplog, copy less (--only), or raise --documents-per-second"
            )
        elif reach < _WINDOW_SHARE * seconds:
            self.warnings.append(
                f"the copy takes about {in_time(seconds)}, and the oplog reaches back {in_time(reach)} at the "
                "pace so far. To be safe, enlarge the oplog with replSetResizeOplog"
            )


def _described(deployment: MongoClient[Any] | Cluster) -> str:
    try:
        version = _dotted(version_of(deployment))
        if isinstance(deployment, Cluster):
            return f"cluster of {len(deployment.shards())} shards, MongoDB {version}"
        return f"replica set {Connection(deployment, retry_seconds=_RETRY_S).name}, MongoDB {version}"
    except (TailraceError, PyMongoError) as error:
        return f"not reached: {error.message if isinstance(error, TailraceError) else error}"


def _process(client: MongoClient[Any]) -> Any:
    version: Mapping[str, Any] = client.admin.command("hello").get("topologyVersion", {})
    return version.get("processId")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _numbers(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)
