"""Members that die, step down and stay away: the stream waits, says for whom, and loses nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.errors import ChangeStreamHistoryLost, SourceError
from tailrace.watch.client.patience import try_next_patiently
from tailrace.watch.client.sharded_stream import ShardedChangeStream
from tests.sharded.waiting import take, wait_for
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod
Start = Callable[..., ShardedCluster]
_LOOK_MS = 200


@pytest.mark.parametrize("streams_of_one_client", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_killed_shard_is_waited_for_and_named_and_nothing_is_lost(
    start_sharded_cluster: Start, caplog: pytest.LogCaptureFixture, streams_of_one_client: int
) -> None:
    """Several streams of one client share the read of each shard; faults had only been tried with a single stream."""
    cluster = start_sharded_cluster(2)
    namespace = spread(cluster, "faults")
    router = cluster.router
    with (
        caplog.at_level(logging.WARNING, logger="tailrace"),
        tailrace.connect(cluster.uri) as client,
        ExitStack() as stack,
    ):
        watching: dict[str, Any] = {"full_document": "updateLookup", "max_await_time_ms": _LOOK_MS}
        streams = [stack.enter_context(client["faults"].watch(**watching)) for _ in range(streams_of_one_client)]
        if streams_of_one_client > 1:  # on two shards and the config server
            wait_for(lambda: client.tail_statistics.joined == 3 * streams_of_one_client, "they do not read together")
        router.insert_one(namespace, {"_id": 1, "region": "a"})
        router.insert_one(namespace, {"_id": 2, "region": "z"})
        for stream in streams:
            assert [event["documentKey"]["_id"] for event in take(stream, 2)] == [1, 2]
        # An update whose document will have moved to the shard that is away: the look-up waits as well.
        router.update_one(namespace, {"_id": 1, "region": "a"}, {"$set": {"v": 1}})
        router.move_chunk(namespace, {"region": "a"}, to="shard1")
        cluster.kill("shard1")
        for stream in streams:
            _await_trouble(stream, "shard1", is_there=True)
        router.insert_one(namespace, {"_id": 3, "region": "g"})
        for stream in streams:
            _await_waiting(stream, "shard1")
        if streams_of_one_client == 1:
            assert "shard shard1 cannot be read" in caplog.text
        with (
            tailrace.connect(cluster.uri, serverSelectionTimeoutMS=5000) as other,
            pytest.raises(SourceError, match="shard1"),
        ):
            other["faults"].watch()
        cluster.restart("shard1")
        router.insert_one(namespace, {"_id": 4, "region": "z"})
        for stream in streams:
            events = take(stream, 3)
            assert [event["documentKey"]["_id"] for event in events] == [1, 3, 4]
            assert events[0]["fullDocument"] == {"_id": 1, "region": "a", "v": 1}
            _await_trouble(stream, "shard1", is_there=False)


def _await_trouble(stream: Any, shard: str, *, is_there: bool) -> None:
    assert isinstance(stream, ShardedChangeStream)
    wait_for(lambda: (stream.statistics.shards[shard].trouble is not None) == is_there, "trouble is not noticed")


def _await_waiting(stream: Any, shard: str) -> None:
    wait_for(
        lambda: try_next_patiently(stream) is None and shard in stream.statistics.waiting_for, f"{shard} is waited for"
    )


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
@pytest.mark.parametrize("streams_of_one_client", [1, 3])
def test_a_shard_that_steps_down_again_and_again_costs_nothing(
    start_sharded_cluster: Start, streams_of_one_client: int
) -> None:
    cluster = start_sharded_cluster(2, members=[3, 1])
    namespace = spread(cluster, "elections")
    with tailrace.connect(cluster.uri) as client, ExitStack() as stack:
        streams = [stack.enter_context(client["elections"].watch()) for _ in range(streams_of_one_client)]
        expected = []
        for number in range(0, 40, 2):
            if number % 10 == 0:
                cluster.step_down("shard0")
            if number == 20:
                cluster.restart("shard0", cluster.kill("shard0"))
            for offset, region in enumerate("az"):
                cluster.router.insert_one(namespace, {"_id": number + offset, "region": region})
                expected.append(number + offset)
        for stream in streams:
            assert [event["documentKey"]["_id"] for event in take(stream, len(expected))] == expected


@pytest.mark.parametrize(("streams_of_one_client", "code"), [(1, 237), (3, 237), (1, 11601)])
def test_what_somebody_kills_while_it_waits_ends_the_stream_and_names_the_shard(
    sharded_cluster: ShardedCluster, streams_of_one_client: int, code: int
) -> None:
    """A mongos passes on the error that ends a shard's cursor. Ours opened the read again, and nobody was told."""
    shard = sharded_cluster.shards["shard1"]
    with tailrace.connect(sharded_cluster.uri) as client, MongoClient[Any](shard.uri) as admin, ExitStack() as stack:
        streams = [stack.enter_context(client["killed"].watch()) for _ in range(streams_of_one_client)]
        if streams_of_one_client > 1:
            wait_for(lambda: client.tail_statistics.joined == 4 * streams_of_one_client, "they do not read together")

        def waiting() -> list[Any]:
            operations = admin.admin.aggregate([{"$currentOp": {"allUsers": True}}])
            return [one for one in operations if one.get("cursor", {}).get("tailable") and "planSummary" in one]

        assert [stream.try_next() for stream in streams] == [None] * streams_of_one_client
        wait_for(lambda: bool(waiting()), "nothing waits")
        with ThreadPoolExecutor(streams_of_one_client) as pool:
            waited = [pool.submit(stream.next) for stream in streams]

            def all_have_ended() -> bool:
                """A kill between two waits, or before a stream is in its call, ends nothing; then it is repeated."""
                for one in waiting():
                    if code == 237:
                        admin.local.command("killCursors", "oplog.rs", cursors=[one["cursor"]["cursorId"]])
                    else:
                        admin.admin.command("killOp", op=one["opid"])
                return all(each.done() for each in waited)

            wait_for(all_have_ended, "a stream goes on")
            for stream, each in zip(streams, waited, strict=True):
                error = each.exception(300)
                assert isinstance(error, OperationFailure)
                assert error.code == code
                assert "shard1" in str(error)
                assert not stream.alive
