"""Shards that are removed: the streams that are open, and those that begin before the removal.

No test had removed a shard from a live cluster, and the merge's own tests fed the deletion that 4.4 logs; 5.0 and 6.0
log a command, which a change stream on ``config.shards`` does not show.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import bson
import pymongo
import pytest

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.errors import SourceError
from tailrace.watch.client.patience import try_next_patiently
from tailrace.watch.client.sharded_stream import ShardedChangeStream
from tests.server_in_use import SERVER_VERSION
from tests.sharded.waiting import take, wait_for
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod
Start = Callable[..., ShardedCluster]

#: How each version logs a removal is also tested in tests/property/test_merge.py.
VERSIONS = [SERVER_VERSION, *(pytest.param(older, marks=pytest.mark.slow) for older in ("5.0.4", "4.4.2"))]


class Writes:
    """Documents with ascending numbers, in one region or another, which a stream gives in this order."""

    def __init__(self, cluster: ShardedCluster, namespace: str) -> None:
        self._router = cluster.router
        self._namespace = namespace
        self.count = 0

    def __call__(self, *regions: str) -> None:
        for region in regions:
            self.count += 1
            self._router.insert_one(self._namespace, {"_id": self.count, "region": region})


def ids(events: list[Any]) -> list[int]:
    return [event["documentKey"]["_id"] for event in events]


def config_changes(cluster: ShardedCluster) -> list[dict[str, Any]]:
    with pymongo.MongoClient(cluster.config.uri) as client:
        removed = {"ns": "config.shards", "op": "d"}  # from 7.0 on in a transaction, as an addition is
        removals = {"$or": [removed, {"o.applyOps": {"$elemMatch": removed}}]}
        return list(client.local["oplog.rs"].find(removals))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_shard_that_is_removed_and_replaced_under_its_name_loses_nothing(
    version: str, start_sharded_cluster: Start
) -> None:
    cluster = start_sharded_cluster(3, version=version)
    namespace = spread(cluster, "removed")
    router, write = cluster.router, Writes(cluster, namespace)
    router.move_chunk(namespace, {"region": "a"}, to="shard2")
    start = router.fence()
    with tailrace.connect(cluster.uri) as client:
        live = client["removed"]["orders"].watch(max_await_time_ms=200)
        assert isinstance(live, ShardedChangeStream)
        with live:
            write("a", "z", "a")
            assert ids(take(live, 3)) == [1, 2, 3]
            before = live.resume_token
            write("a")
            # Its servers go on running, but what happens there no longer belongs to the cluster.
            former = cluster.remove_shard("shard2")
            with pymongo.MongoClient(former.uri) as alone, alone.start_session() as session:
                session.advance_cluster_time(router.connections.clock.document)  # later than the removal
                alone["removed"]["orders"].insert_one({"_id": "stray", "region": "a"}, session=session)
                alone.drop_database("removed", session=session)
            write("a", "z")
            assert ids(take(live, 3)) == [4, 5, 6]
            wait_for(lambda: live.try_next() is None and "shard2" not in live.statistics.shards, "it is read still")
            assert cluster.add_shard("shard2") == "shard2"
            router.move_chunk(namespace, {"region": "a"}, to="shard2")
            write("a", "z", "a")
            assert ids(take(live, 3)) == [7, 8, 9]
            assert router.owner(namespace, {"region": "a", "_id": 9}) == "shard2"
        # Streams that begin before the removal read the servers that were the shard then.
        with client["removed"]["orders"].watch(start_at_operation_time=start) as whole:
            assert ids(take(whole, 9)) == list(range(1, 10))
        with client["removed"]["orders"].watch(resume_after=before) as rest:
            assert ids(take(rest, 6)) == [4, 5, 6, 7, 8, 9]
    former.close()
    write("a")
    with tailrace.connect(cluster.uri, serverSelectionTimeoutMS=5000) as client:
        with pytest.raises(SourceError, match=r"shard2 was removed from the cluster at .* cannot be read") as caught:
            client["removed"]["orders"].watch(resume_after=before)
        assert "ignoreRemovedShards" in str(caught.value)
        ignoring = {"ignoreRemovedShards": True}
        with client["removed"]["orders"].watch(start_at_operation_time=start, options=ignoring) as without:
            assert ids(take(without, 7)) == [2, 5, 6, 7, 8, 9, 10]
    (removal,) = config_changes(cluster)
    assert removal["op"] == ("d" if version.startswith("4") else "c")
    in_session = version.startswith("7")
    assert ("lsid" in removal, "txnNumber" in removal) == (in_session, in_session)


def test_a_removed_shard_that_is_shut_down_holds_nobody_back(start_sharded_cluster: Start) -> None:
    cluster = start_sharded_cluster(3)
    namespace = spread(cluster, "shut")
    write = Writes(cluster, namespace)
    cluster.router.move_chunk(namespace, {"region": "a"}, to="shard2")
    with (
        tailrace.connect(cluster.uri) as client,
        client["shut"].watch(max_await_time_ms=200, full_document="updateLookup") as stream,
    ):
        assert isinstance(stream, ShardedChangeStream)
        write("a")
        former = cluster.remove_shard("shard2")
        assert ids(take(stream, 1)) == [1]
        wait_for(lambda: stream.try_next() is None and "shard2" not in stream.statistics.shards, "it is read still")
        former.close()
        write("a", "z")
        cluster.router.update_one(namespace, {"_id": 1, "region": "a"}, {"$set": {"v": 1}})
        assert ids(take(stream, 3)) == [2, 3, 1]
        token = stream.resume_token
    with tailrace.connect(cluster.uri) as client, client["shut"].watch(resume_after=token) as stream:
        write("a")
        assert ids(take(stream, 1)) == [4]


def test_one_that_is_shut_down_before_it_was_read_is_waited_for_and_the_log_says_what_to_do(
    start_sharded_cluster: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.watch.client.sharded_stream._REPORT_S", 0.5)
    cluster = start_sharded_cluster(3)
    namespace = spread(cluster, "early")
    write = Writes(cluster, namespace)
    cluster.router.move_chunk(namespace, {"region": "a"}, to="shard2")
    with (
        caplog.at_level(logging.WARNING, logger="tailrace"),
        tailrace.connect(cluster.uri) as client,
        client["early"].watch(max_await_time_ms=200) as stream,
    ):
        assert isinstance(stream, ShardedChangeStream)
        write("a")
        assert ids(take(stream, 1)) == [1]
        reader = stream._source.reader("shard2")
        assert reader is not None
        # Nobody reads the stream until the shard is gone, so the shard is not asked for a promise.
        former = cluster.remove_shard("shard2")
        number = former.kill()
        write("a")
        wait_for(
            lambda: (
                try_next_patiently(stream) is None and "shard shard2 was removed from the cluster, and" in caplog.text
            ),
            "the log does not say that it was removed",
        )
        assert "shard2" in stream.statistics.waiting_for
        former.restart(number)
        assert ids(take(stream, 1)) == [2]
    assert bson.encode(stream.resume_token)
