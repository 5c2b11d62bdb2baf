"""The command line on a cluster."""

from __future__ import annotations

import json

import pytest

from tailrace.cli.main import main
from tailrace.embedded import ShardedCluster
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod


def test_watch_gives_what_is_there_by_now_and_ends(
    sharded_cluster: ShardedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    namespace = spread(sharded_cluster, "shown")
    start = sharded_cluster.router.fence()
    for number, region in enumerate("azbz"):
        sharded_cluster.router.insert_one(namespace, {"_id": number, "region": region})
    arguments = ["--format", "json", "--until", "now", "--start-at-operation-time", f"{start.time},{start.inc}"]
    assert main(["watch", sharded_cluster.uri, namespace, *arguments]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["documentKey"]["_id"] for line in lines] == [0, 1, 2, 3]


def test_doctor_looks_at_every_shard(sharded_cluster: ShardedCluster, capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", sharded_cluster.uri, "--format", "json"])
    found = {finding["check"]: finding for finding in json.loads(capfd.readouterr().out)}
    assert found["cluster"]["found"] == "3 shards: shard0, shard1, shard2"
    assert {f"{shard}: oplog window" for shard in sharded_cluster.shards} <= set(found)
    assert status == 0
