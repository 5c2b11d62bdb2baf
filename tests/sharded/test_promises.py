"""Promises on demand: idle shards are asked only while somebody waits, and without any right to write."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pymongo
import pytest
from bson.timestamp import Timestamp

import tailrace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.read.source.promise import PromiseRequester
from tailrace.watch.client.sharded_stream import ShardedChangeStream
from tests.sharded.waiting import take, wait_for
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod


def newest(uri: str) -> dict[str, object]:
    with pymongo.MongoClient(uri) as client:
        return client.local["oplog.rs"].find_one({}, sort=[("$natural", -1)])


def test_no_promise_is_asked_for_while_nobody_waits(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "asked")
    with tailrace.connect(sharded_cluster.uri) as client, client["asked"].watch(max_await_time_ms=1) as stream:
        assert isinstance(stream, ShardedChangeStream)
        wait_for(lambda: stream.try_next() is None and stream.resume_token is not None, "the stream is not quiet")
        before = stream.statistics.forced_noops
        sharded_cluster.router.insert_one(namespace, {"_id": 1, "region": "a"})
        at = ClusterTime.from_timestamp(newest(sharded_cluster.shards["shard0"].uri)["ts"])  # type: ignore[arg-type]
        wait_for(lambda: stream.statistics.shards["shard0"].read_up_to >= at, "the event is not read")
        assert stream.statistics.forced_noops == before
        take(stream, 1)
        assert stream.statistics.forced_noops > before


def test_closing_a_stream_ends_its_threads_and_twice_does_no_harm(sharded_cluster: ShardedCluster) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("tailrace-")]

    spread(sharded_cluster, "closed")
    wait_for(lambda: not threads(), "another stream is open")
    with tailrace.connect(sharded_cluster.uri) as client:
        stream = client["closed"].watch()
        assert {f"tailrace-read-{name}" for name in (*sharded_cluster.shards, "config.shards")} <= set(threads())
        stream.close()
        stream.close()
        assert not stream.alive
        assert stream.try_next() is None
        wait_for(lambda: not threads(), "threads of the closed stream go on")
        forgotten = client["closed"].watch()
        del forgotten
        wait_for(lambda: not threads(), "threads of the forgotten stream go on")


@pytest.mark.parametrize("reads_only", [False, True])
def test_both_ways_make_an_idle_shard_write_after_the_time_asked_for(
    sharded_cluster: ShardedCluster, reads_only: bool
) -> None:
    with (
        pymongo.MongoClient(sharded_cluster.shards["shard0"].uri) as busy,
        pymongo.MongoClient(sharded_cluster.shards["shard2"].uri) as idle,
        busy.start_session() as session,
    ):
        with idle.start_session() as other:  # so that the write is later than anything the idle shard has written
            idle.admin.command("ping", session=other)
            assert other.cluster_time is not None
            session.advance_cluster_time(other.cluster_time)
        busy["ways"]["x"].insert_one({}, session=session)
        assert session.operation_time is not None
        assert session.cluster_time is not None
        until = ClusterTime.from_timestamp(session.operation_time)
        requester = PromiseRequester(idle, "shard2", reads_only=reads_only)
        requester.ask(until, session.cluster_time)
        written = newest(sharded_cluster.shards["shard2"].uri)
        assert isinstance(written["ts"], Timestamp)
        assert ClusterTime.from_timestamp(written["ts"]) >= until
        assert written["op"] == "n"
        forced = requester.forced
        requester.ask(until, session.cluster_time)
        assert requester.forced == forced == 1


def test_a_user_who_may_only_read_gets_promises_and_events(
    start_sharded_cluster: Callable[..., ShardedCluster],
) -> None:
    """With access control cluster times are signed, and every member checks them."""
    cluster = start_sharded_cluster(2, root_password="it's a p@ss/word")
    namespace = spread(cluster, "rights")
    for part in (cluster.config, *cluster.shards.values()):
        with pymongo.MongoClient(part.uri) as root:
            root.admin.command(
                "createUser",
                "reader",
                pwd="p@ss/word",
                roles=[{"role": "read", "db": "local"}, {"role": "read", "db": "config"}],
            )
    hosts = ",".join(member.host for member in cluster.config.members)
    uri = f"mongodb://reader:p%40ss%2Fword@{hosts}/?replicaSet={cluster.config.name}&authSource=admin"
    with tailrace.connect(uri) as client, client["rights"].watch() as stream:
        assert isinstance(stream, ShardedChangeStream)
        cluster.router.insert_one(namespace, {"_id": 1, "region": "a"})
        cluster.router.insert_one(namespace, {"_id": 2, "region": "z"})
        assert [event["documentKey"]["_id"] for event in take(stream, 2)] == [1, 2]
        assert stream.statistics.forced_noops > 0
