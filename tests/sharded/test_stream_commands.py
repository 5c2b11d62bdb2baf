"""What a cluster's stream tells command listeners, and what becomes of its failures.

Streams of clusters told command listeners nothing, and waited silently for a shard however long it took; no test had
checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.errors import RESUMABLE_LABEL, SourceError
from tests.sharded.waiting import PATIENCE_S, take, wait_for
from tests.sharded.workload import spread
from tests.spec.test_prose import Commands

pytestmark = pytest.mark.mongod
Start = Callable[..., ShardedCluster]
_LOOK_MS = 200


def test_listeners_are_told_of_the_commands_of_a_router_s_stream(sharded_cluster: ShardedCluster) -> None:
    namespace = spread(sharded_cluster, "told")
    database, _, collection = namespace.partition(".")
    commands = Commands()
    with tailrace.connect(sharded_cluster.uri, event_listeners=[commands]) as client:
        with client[database][collection].watch(
            [{"$match": {"operationType": "insert"}}], comment="c", max_await_time_ms=_LOOK_MS, batch_size=3
        ) as stream:
            (opened,) = commands.sent
            assert opened["aggregate"] == collection
            assert opened["pipeline"] == [{"$changeStream": {}}, {"$match": {"operationType": "insert"}}]
            assert (opened["cursor"], opened["comment"], opened["$db"]) == ({"batchSize": 3}, "c", database)
            assert commands.replies[0]["cursor"]["firstBatch"] == []
            assert stream.resume_token == commands.replies[0]["cursor"]["postBatchResumeToken"]
            sharded_cluster.router.insert_one(namespace, {"_id": 1, "region": "a"})
            (event,) = take(stream, 1)
            assert commands.replies[-1]["cursor"]["nextBatch"] == [event]
            assert commands.named("getMore")[-1]["maxTimeMS"] == _LOOK_MS
            looks = len(commands.named("getMore"))
            assert stream.try_next() is None
            assert len(commands.named("getMore")) == looks + 1
            token = stream.resume_token
        assert len(commands.named("killCursors")) == 1
        with client.watch(resume_after=token):
            assert commands.stages[-1] == {"allChangesForCluster": True, "resumeAfter": token}
        with pytest.raises(OperationFailure):
            client[database][collection].watch(resume_after={"_data": "no token"})
        assert commands.failed_names == ["aggregate"]


def test_a_shard_that_stays_away_fails_the_resume_and_the_stream_goes_on_when_it_is_back(
    start_sharded_cluster: Start,
) -> None:
    cluster = start_sharded_cluster(2)
    namespace = spread(cluster, "away")
    commands = Commands()
    with (
        tailrace.connect(cluster.uri, event_listeners=[commands], serverSelectionTimeoutMS=1500) as client,
        client["away"].watch(max_await_time_ms=_LOOK_MS) as stream,
    ):
        cluster.router.insert_one(namespace, {"_id": 1, "region": "a"})
        assert [event["documentKey"]["_id"] for event in take(stream, 1)] == [1]
        cluster.kill("shard1")
        error = _error_of(stream)
        assert isinstance(error, SourceError)
        assert isinstance(error, AutoReconnect)
        assert "shard1" in str(error)
        assert error.has_error_label(RESUMABLE_LABEL)
        assert stream.alive
        assert commands.failed_names == ["getMore", "getMore"]  # reads do not wait for the attempt
        assert list(commands.stages[-1]) == ["resumeAfter"]
        cluster.restart("shard1")
        cluster.router.insert_one(namespace, {"_id": 2, "region": "a"})
        cluster.router.insert_one(namespace, {"_id": 3, "region": "z"})
        wait_for(lambda: stream.statistics.shards["shard1"].trouble is None, "the shard that is back is not noticed")
        assert [event["documentKey"]["_id"] for event in take(stream, 2)] == [2, 3]


def _error_of(stream: Any) -> Exception:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            stream.try_next()
        except SourceError as error:
            return error
    raise AssertionError("no error came")
