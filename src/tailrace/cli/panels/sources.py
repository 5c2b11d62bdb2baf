"""The readers of the panels. Each gives JSON values, by the functions that the commands of the same matter use."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from pymongo import MongoClient

from tailrace.base.threads import CheckedThread
from tailrace.cli.dead_letters import shown
from tailrace.cli.examination import examine_deployment
from tailrace.cli.handler_argument import LETTERS, STORE, store_namespace
from tailrace.cli.lease_lines import lease_lines, without_sealed
from tailrace.cli.panels.difference import shown_event
from tailrace.cli.panels.panel import Panel
from tailrace.cli.streams import ask_streams, state_of
from tailrace.errors import TailraceError
from tailrace.read.source.connection import open_client
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tailrace.read.source.uri import ConnectionString

if TYPE_CHECKING:
    from tailrace.lake.store.lake_root import LakeRoot
    from tailrace.lake.store.place import TablePlace
    from tailrace.read.archive.place import ArchivePlace
    from tailrace.read.archive.verification import OplogReport
    from tailrace.watch.client.client import Client

#: A member that is away is said so after this time; the next look tries again.
_RETRY_S: Final = 5.0
_LETTERS_MAX: Final = 50
_STREAMS_MAX: Final = 1_000
_LETTERS_COUNTED_MAX: Final = 10_000


@dataclass(frozen=True)
class Targets:
    """What is read in addition to the deployment: ``gateway`` is a gateway's URI, ``syncs`` the URIs of targets, and
    the rest directories, and the collections of leases and dead letters."""

    store: str = STORE
    letters: str = LETTERS
    gateway: ConnectionString | None = None
    lakes: Sequence[LakeRoot] = ()
    tables: Sequence[TablePlace] = ()
    archives: Sequence[ArchivePlace] = ()
    syncs: Sequence[ConnectionString] = ()
    state_db: str = "tailrace_sync"
    #: What the service that the console belongs to says about itself.
    service: Callable[[], Any] | None = field(default=None, repr=False)


def panels_of(client: Client[Any], uri: ConnectionString, targets: Targets) -> list[Panel]:
    """The panels of a deployment, but for its activity."""
    shards = Shards(client)
    store, letters = store_namespace(targets.store), store_namespace(targets.letters)
    gateway = GatewayStreams(targets.gateway or uri)
    found = [
        Panel("shards", 5.0, shards.read, client),
        Panel("streams", 3.0, gateway.read, close=gateway.close),
        Panel("leases", 3.0, lambda: leases(client, store, shards), client),
        Panel("letters", 10.0, lambda: dead_letters(client, letters), client),
        Panel("doctor", 60.0, lambda: doctor(uri)),
    ]
    if targets.lakes:
        found.append(Panel("lakes", 10.0, lambda: each_lake(targets)))
    if targets.tables:
        found.append(Panel("tables", 10.0, lambda: _each(targets.tables, tables)))
    if targets.archives:
        found.append(Panel("archives", 10.0, lambda: _each(targets.archives, archive)))
    if targets.syncs:
        found.append(Panel("syncs", 5.0, lambda: _each(targets.syncs, lambda target: syncs(uri, target, targets))))
    if targets.service is not None:
        found.append(Panel("service", 3.0, targets.service))
    return found


def _each(places: Sequence[Any], read: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """What each of several places gives; one that fails harms no other."""
    return [{"place": str(place)} | Panel(str(place), 0, lambda place=place: read(place)).look() for place in places]  # type: ignore[misc]


# -- the deployment -------------------------------------------------------------------------------------------------


class Shards:
    """How each oplog of the deployment is: its newest and oldest entries, and by how much its majority lags."""

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._sources: dict[str, MongodSource] = {}
        #: For how long the shortest oplog reaches back, and whether none has dropped an entry yet.
        self.reach_s: float | None = None
        self.are_complete = False

    def read(self) -> dict[str, Any]:
        """An entry for each shard, or the one of the replica set; what cannot be read of one is said there."""
        from tailrace.watch.client.client import deployment_of  # noqa: PLC0415  so that --help does not load it

        deployment = deployment_of(self._client) or self._client
        is_cluster = isinstance(deployment, Cluster)
        found = [self._shard(name, client) for name, client in _oplogs(deployment)]
        reaches = [one["reach"] for one in found if one.get("reach") is not None]
        self.reach_s = min(reaches, default=None)
        self.are_complete = all(one.get("complete", False) for one in found)
        return {
            "kind": "sharded cluster" if is_cluster else "replica set",
            "version": str(self._client.server_info()["version"]),
            "shards": found,
        }

    def _shard(self, name: str, client: MongoClient[Any]) -> dict[str, Any]:
        source = self._sources.get(name)
        if source is None or source.client is not client:
            source = self._sources[name] = MongodSource(client, retry_seconds=_RETRY_S, waits=False)
        try:
            newest, (oldest, complete), applied = source.newest(), source.oldest(), source.operation_time()
        except TailraceError as error:
            return {"name": name, "error": str(error.message), "hint": error.hint}
        return {
            "name": name or source.name,
            "newest": newest.seconds,
            "lag": max(0, applied.seconds - newest.seconds),
            "quiet": max(0, round(time.time() - newest.seconds)),
            "reach": max(0, newest.seconds - oldest.seconds),
            "complete": complete,
        }


def _oplogs(deployment: MongoClient[Any] | Cluster) -> Iterator[tuple[str, MongoClient[Any]]]:
    if isinstance(deployment, Cluster):
        for shard in deployment.shards():
            yield shard.name, deployment.client(shard.name)
    else:
        yield "", deployment


def doctor(uri: ConnectionString) -> list[dict[str, Any]]:
    """What ``tailrace doctor`` says."""
    with closing(MongodSource(uri, retry_seconds=_RETRY_S)) as source:
        return [asdict(finding) for finding in examine_deployment(source, uri)]


# -- who reads ------------------------------------------------------------------------------------------------------


class GatewayStreams:
    """What a gateway serves, asked over a connection that stays."""

    def __init__(self, uri: ConnectionString) -> None:
        self._uri = uri
        self._client: MongoClient[Any] | None = None

    def read(self) -> dict[str, Any]:
        """Raises UsageError where the URI does not lead to a gateway."""
        if self._client is None:
            self._client = open_client(self._uri)
        return _served(ask_streams(self._client))

    def close(self) -> None:
        """Close the connection."""
        client = self._client
        if client is None:
            return
        if client.topology_description.has_readable_server():
            client.close()
        else:  # it would look for the gateway for seconds, to tell it that a session has ended
            CheckedThread(client.close, "tailrace-close").start()


def _served(reply: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC)
    every = reply["streams"]
    return {
        "gateway": {name: value for name, value in reply["gateway"].items() if name != "processes"},
        "processes": [dict(one) for one in reply["gateway"]["processes"]],
        "count": len(every),
        "streams": [
            {
                "ns": one["ns"],
                "users": list(one["users"]),
                "seconds": round((now - one["openedAt"].replace(tzinfo=UTC)).total_seconds()),
                "events": one["events"],
                "state": state_of(one),
                "cursor": str(one["cursor"]),  # 64 bits are more than a number of JavaScript's holds
            }
            for one in every[:_STREAMS_MAX]
        ],
    }


def leases(client: Client[Any], store: tuple[str, str], shards: Shards) -> dict[str, Any]:
    """The leases of listeners, each with the seconds of oplog that its position still has."""
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore  # noqa: PLC0415  as in Shards.read()
    from tailrace.watch.client.client import operation_time  # noqa: PLC0415

    kept = MongoLeaseStore(client[store[0]][store[1]])
    every = lease_lines(kept.examine(), kept.now(), operation_time(client))
    lines = without_sealed(every)
    reach = shards.reach_s
    return {
        "store": ".".join(store),
        "sealed": len(every) - len(lines),
        "leases": [
            {
                **line.to_json(),
                "left": None if reach is None or line.lag is None else max(0, round(reach - line.lag)),
                "complete": shards.are_complete,
            }
            for line in lines
        ],
    }


def dead_letters(client: Client[Any], where: tuple[str, str]) -> dict[str, Any]:
    """The oldest dead letters, each with its event."""
    from tailrace.act.consumer.dead_letters import DeadLetters  # noqa: PLC0415  as in Shards.read()

    collection = client[where[0]][where[1]]
    found = list(islice(DeadLetters(collection).letters(), _LETTERS_MAX))
    return {
        "collection": ".".join(where),
        "count": collection.count_documents({}, limit=_LETTERS_COUNTED_MAX),
        "letters": [{**shown(letter), "event": shown_event(letter.raw) if letter.raw else None} for letter in found],
    }


# -- what is kept ---------------------------------------------------------------------------------------------------


def each_lake(targets: Targets) -> list[dict[str, Any]]:
    """The panel of lakes."""
    return _each(targets.lakes, lake)


def lake(root: LakeRoot) -> dict[str, Any]:
    """As ``tailrace lake status``."""
    from tailrace.lake.store.status import lake_status  # noqa: PLC0415  loads Arrow

    return lake_status(root).to_json()


def tables(root: TablePlace) -> dict[str, Any]:
    """As ``tailrace tables status``."""
    from tailrace.lake.tables.report import report  # noqa: PLC0415  loads Arrow

    tables_report = report(root)
    time_ = tables_report.time
    return {
        "time": None if time_ is None else {"t": time_.seconds, "i": time_.increment},
        "lag": None if time_ is None else max(0, round(time.time() - time_.seconds)),
        "tables": [asdict(one) for one in tables_report.tables],
    }


def archive(root: ArchivePlace) -> list[dict[str, Any]]:
    """As ``tailrace archive status``."""
    from tailrace.read.archive.verification import status  # noqa: PLC0415  loads Arrow

    return [_oplog_shown(one) for one in status(root)]


def _oplog_shown(one: OplogReport) -> dict[str, Any]:
    return asdict(one) | {
        "after": None if one.after is None else one.after.seconds,
        "until": None if one.until is None else one.until.seconds,
    }


def syncs(source: ConnectionString, target: ConnectionString, targets: Targets) -> list[dict[str, Any]]:
    """As ``tailrace sync status``, of every sync to a target."""
    from tailrace.act.sync.channel import Sync  # noqa: PLC0415  as in Shards.read()

    with open_client(target) as client:
        names = [str(one["_id"]) for one in client[targets.state_db]["syncs"].find({}, {"_id": 1})]
    found = []
    for name in sorted(names):
        with Sync(source, target, name=name, state_db=targets.state_db) as sync:
            found.append(json.loads(json.dumps(sync.status().to_json(), default=str)))
    return found
