"""The server's own merged stream: mongod 6.0 or 7.0 with the code of a mongos in it, made to run it.

From 6.0 on mongod has the commands of a mongos under other names (``clusterAggregate``, ``clusterGetMore``) for shards
that have to act as one. A ``--shardsvr`` replica set that knows its cluster, while the cluster does not know it, routes
and merges with them as a mongos does. This use is not intended, and has one weakness: an empty batch of a shard that
arrives while a ``clusterGetMore`` still waits ends the process. So the shards' replies are held back by a fail point
until the router's own reply is out, and the router's reads are paced. On a machine too busy for that, the router is
started again and the stream is read once more, at half the pace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

import pymongo
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tests.differential.native import NativeStream
from tests.differential.wire import CommandError, Wire
from tests.golden.recording import token_time
from tests.server_in_use import major

_NAME: Final = "router"
_PACE_MS: Final = 150
_ATTEMPTS_MAX: Final = 6
_PATIENCE_S: Final = 300.0
_MAJORITY: Final = {"w": "majority"}


class NativeRouter:
    """A router for a cluster of mongod 6.0 or 7.0 that was started with ``enable_test_commands``."""

    def __init__(self, cluster: ShardedCluster) -> None:
        assert major(cluster.version) >= 6, "mongod has the commands from 6.0 on"
        self._cluster = cluster
        self._replica_set = ReplicaSet(name=_NAME, role="shardsvr", version=cluster.version)

    def __enter__(self) -> Self:
        try:
            self._replica_set.start()
            self._introduce()
        except BaseException:
            self._replica_set.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._replica_set.close()

    def read(
        self, database: str, collection: str | int, until: Timestamp, pipeline: tuple[Any, ...] = (), **stage: Any
    ) -> NativeStream:
        """A stream until its token has passed ``until``, or until it is closed or fails."""
        command = cluster_aggregate(database, collection, stage, pipeline)
        for attempt in range(_ATTEMPTS_MAX):
            try:
                with Wire.to(self._replica_set.uri) as wire, self._held_back(_PACE_MS << attempt) as pace_s:
                    return _read(wire, database, command, ClusterTime.from_timestamp(until), pace_s)
            except ConnectionError:
                self._replica_set.kill(0)  # its guard may not have noticed yet that it has died
                self._replica_set.restart(0)
        raise AssertionError(f"the router ended {_ATTEMPTS_MAX} times")

    def _introduce(self) -> None:
        """Tell it which cluster it belongs to: that is enough to make it route."""
        with pymongo.MongoClient(self._cluster.config.uri) as config:
            deadline = time.monotonic() + _PATIENCE_S
            while not (version := config.config.version.find_one() or {}).get("clusterId"):
                assert time.monotonic() < deadline, "the config server does not name its cluster"
                time.sleep(0.05)
        hosts = ",".join(member.host for member in self._cluster.config.members)
        identity = {
            "shardName": _NAME,
            "clusterId": version["clusterId"],
            "configsvrConnectionString": f"{self._cluster.config.name}/{hosts}",
        }
        update = {"q": {"_id": "shardIdentity"}, "u": {"$set": identity}, "upsert": True}
        with pymongo.MongoClient(self._replica_set.uri) as client:
            number = major(self._cluster.version)
            confirmed = {"confirm": True} if number >= 7 else {}
            client.admin.command("setFeatureCompatibilityVersion", f"{number}.0", **confirmed)
            client.admin.command("update", "system.version", updates=[update], writeConcern=_MAJORITY)

    @contextmanager
    def _held_back(self, pace_ms: int) -> Iterator[float]:
        """Every member's replies to a getMore are late by ``pace_ms``; what the router has to wait between its reads,
        in seconds."""
        data = {
            "failCommands": ["getMore"],
            "blockConnection": True,
            "blockTimeMS": pace_ms,
            "failInternalCommands": True,
        }
        parts = [self._cluster.config, *self._cluster.shards.values()]
        members = [member for part in parts for member in part.members if member.is_running]
        try:
            for member in members:
                _fail_point(member.uri, "alwaysOn", data)
            yield 2.3 * pace_ms / 1000
        finally:
            for member in members:
                _fail_point(member.uri, "off", {})


def cluster_aggregate(
    database: str, collection: str | int, stage: Mapping[str, Any], pipeline: Sequence[Any] = ()
) -> dict[str, Any]:
    """The command that opens a stream at the router."""
    if database == "admin" and collection == 1:
        stage = {"allChangesForCluster": True, **stage}
    return {"clusterAggregate": collection, "pipeline": [{"$changeStream": stage}, *pipeline]}


def _fail_point(uri: str, mode: str, data: Mapping[str, Any]) -> None:
    with pymongo.MongoClient(uri) as client:
        client.admin.command("configureFailPoint", "failCommand", mode=mode, data=data)


def _read(wire: Wire, database: str, command: Mapping[str, Any], until: ClusterTime, pace_s: float) -> NativeStream:
    stream = NativeStream()
    try:
        reply = wire.run(database, {**command, "cursor": {"batchSize": 0}})
        stream.take(reply)
        cursor_id, collection = reply["cursor"]["id"], reply["cursor"]["ns"].partition(".")[2]
        more = {"clusterGetMore": Int64(cursor_id), "collection": collection, "maxTimeMS": 50}
        deadline = time.monotonic() + _PATIENCE_S
        while not stream.invalidated and token_time(stream.resume_token) < until:
            assert time.monotonic() < deadline, "the router's stream does not reach its end"
            stream.take(wire.run(database, more))
            time.sleep(pace_s)
    except CommandError as error:
        stream.fail(error)
    else:
        if not stream.invalidated:
            with suppress(CommandError):
                wire.run(database, {"killCursors": collection, "cursors": [Int64(cursor_id)]})
    return stream
