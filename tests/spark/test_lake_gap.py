"""A lake whose place is no longer in the oplog: the way out after error 286, on a real oplog that was truncated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.spark.store.gap import find_gap
from tailrace.lake.store.layout import cluster_time_of
from tests.spark.streams import newest

pytestmark = [pytest.mark.spark, pytest.mark.mongod]
PATIENCE_S = 300


def truncate(uri: str, beyond: ClusterTime) -> None:
    """Write until the oplog no longer reaches back to ``beyond``."""
    deadline = time.monotonic() + PATIENCE_S
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        while True:
            oldest = client["local"]["oplog.rs"].find(sort=[("$natural", 1)]).limit(1).next()["ts"]
            if ClusterTime.from_timestamp(oldest) > beyond:
                return
            assert time.monotonic() < deadline, "the oplog is not truncated"
            for _ in range(5):
                client["fill"]["c"].insert_many([{"pad": os.urandom(50_000)} for _ in range(20)])
            time.sleep(0.5)


def test_after_lost_history_the_gap_is_accepted_by_a_flag_written_down_and_shown(
    start_replica_set: Callable[..., ReplicaSet], tailrace_run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """The hint was "new checkpoint, startingFrom=oldest", which cannot work for a lake: it goes on after its last event
    and fails again. No test had gone on after a 286."""
    replica_set = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    uri, lake = replica_set.uri, tmp_path / "lake"
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        "source: {uri: '${TEST_URI}', database: shop, startingFrom: oldest}\n"
        "lake: {path: lake, columns: [event, token, wall_time]}\n"
    )
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        orders = client["shop"]["orders"]
        orders.insert_many([{"_id": n} for n in range(10)])
        code, _, err = tailrace_run(path, "--available-now", uri=uri)
        assert code == 0, err
        last = bson.decode(list(lake_events(lake))[-1])["_id"]["_data"]
        orders.insert_one({"_id": "lost"})
        truncate(uri, newest(uri))
        orders.insert_one({"_id": "after"})

        code, _, err = tailrace_run(path, "--available-now", uri=uri)
        assert code == 1
        assert "286 ChangeStreamHistoryLost" in err
        assert "--accept-gap" in err
        assert "startingFrom" not in err
        code, _, err = tailrace_run(path, "--available-now", "--accept-gap", uri=uri)
        assert code == 0, err
        assert [bson.decode(event)["documentKey"]["_id"] for event in lake_events(lake)] == [*range(10), "after"]
    report = verify(lake, full=True)
    assert report.problems == []
    (gap,) = report.gaps
    assert gap.after_token == last
    assert cluster_time_of(last) <= gap.after < gap.until
    assert len(list(tmp_path.glob("lake.checkpoint.before-*"))) == 1
    code, out, _ = tailrace_run(path, "--verify", uri=uri)
    assert code == 0
    assert f"accepted gap: {gap}" in out
    assert ": sound" in out
    source = {"uri": uri, "database": "shop"}
    assert find_gap(lake, tmp_path / "lake.checkpoint", source) is None
    held = json.loads((lake / "_tailrace" / "head.json").read_text())
    assert held["newest"]["lastToken"] > last
