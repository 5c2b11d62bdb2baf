"""Members that die, step down and stay away: the stream waits, says for whom, and loses nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import tailrace
from tailrace.client.sharded_stream import ShardedChangeStream
from tailrace.embedded import ShardedCluster
from tailrace.errors import ChangeStreamHistoryLost, SourceError
from tests.sharded.waiting import take, wait_for
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod
Start = Callable[..., ShardedCluster]
_LOOK_MS = 200


def test_a_killed_shard_is_waited_for_and_named_and_nothing_is_lost(
    start_sharded_cluster: Start, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start_sharded_cluster(2)
    namespace = spread(cluster, "faults")
    router = cluster.router
    with (
        caplog.at_level(logging.WARNING, logger="tailrace"),
        tailrace.connect(cluster.uri) as client,
        client["faults"].watch(full_document="updateLookup", max_await_time_ms=_LOOK_MS) as stream,
    ):
        assert isinstance(stream, ShardedChangeStream)
        router.insert_one(namespace, {"_id": 1, "region": "a"})
        router.insert_one(namespace, {"_id": 2, "region": "z"})
        assert [event["documentKey"]["_id"] for event in take(stream, 2)] == [1, 2]
        # An update whose document will have moved to the shard that is away: the look-up waits as well.
        router.update_one(namespace, {"_id": 1, "region": "a"}, {"$set": {"v": 1}})
        router.move_chunk(namespace, {"region": "a"}, to="shard1")
        cluster.kill("shard1")
        wait_for(lambda: stream.statistics.shards["shard1"].trouble is not None, "the dead shard is not noticed")
        router.insert_one(namespace, {"_id": 3, "region": "g"})
        wait_for(
            lambda: stream.try_next() is None and "shard1" in stream.statistics.waiting_for, "shard1 is not waited for"
        )
        assert "shard shard1 cannot be read" in caplog.text
        with (
            tailrace.connect(cluster.uri, serverSelectionTimeoutMS=500) as other,
            pytest.raises(SourceError, match="shard1"),
        ):
            other["faults"].watch()
        cluster.restart("shard1")
        router.insert_one(namespace, {"_id": 4, "region": "z"})
        events = take(stream, 3)
        assert [event["documentKey"]["_id"] for event in events] == [1, 3, 4]
        assert events[0]["fullDocument"] == {"_id": 1, "region": "a", "v": 1}
        wait_for(lambda: stream.statistics.shards["shard1"].trouble is None, "the shard that is back is not noticed")


def test_an_error_that_waiting_cannot_mend_ends_the_stream_and_names_the_shard(
    sharded_cluster: ShardedCluster,
) -> None:
    with tailrace.connect(sharded_cluster.uri) as client, client["history"].watch() as stream:
        assert isinstance(stream, ShardedChangeStream)
        reader = stream._source.reader("shard1")
        assert reader is not None
        reader._fail(ChangeStreamHistoryLost("the oplog was truncated"))
        with pytest.raises(ChangeStreamHistoryLost, match="shard1") as caught:
            take(stream, 1)
        assert caught.value.code == 286
        assert not stream.alive


@pytest.mark.slow
def test_a_shard_that_steps_down_again_and_again_costs_nothing(start_sharded_cluster: Start) -> None:
    cluster = start_sharded_cluster(2, members=[3, 1])
    namespace = spread(cluster, "elections")
    with tailrace.connect(cluster.uri) as client, client["elections"].watch() as stream:
        expected = []
        for number in range(0, 40, 2):
            if number % 10 == 0:
                cluster.step_down("shard0")
            if number == 20:
                cluster.restart("shard0", cluster.kill("shard0"))
            for offset, region in enumerate("az"):
                cluster.router.insert_one(namespace, {"_id": number + offset, "region": region})
                expected.append(number + offset)
        assert [event["documentKey"]["_id"] for event in take(stream, len(expected))] == expected
