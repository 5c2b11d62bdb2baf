"""The command line on a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.cli.main import main
from tailrace.cli.one_shard import warn_of_one_shard_at
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


def test_a_uri_of_one_shard_is_told_by_every_command_that_reads_it(
    sharded_cluster: ShardedCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything looked healthy, but only that shard's part was read. No test had used a shard's URI."""
    one = sharded_cluster.shards["shard1"].uri
    said = "this is shard shard1 of a cluster: only its part is seen"
    main(["doctor", one, "--format", "json"])
    findings = {finding["check"]: finding for finding in json.loads(capfd.readouterr().out)}
    assert findings["cluster"] == {
        "check": "cluster",
        "status": "warn",
        "found": said,
        "advice": "Give the URI of the cluster's config server or of a mongos to see all of it",
    }
    for command in (
        ["watch", one, "--until", "now"],
        ["archive", one, str(tmp_path / "archive"), "--once", "--from", "now"],
        ["tables", "write", one, str(tmp_path / "tables"), "nothing.*", "--once"],
    ):
        assert main(command) == 0
        assert said in capfd.readouterr().err
    # Its first change, the lease itself, is not a number.
    assert main(["listen", "builtins:int", "--uri", one, "--resource", "part", "--store", "of_a_shard.leases"]) == 1
    assert said in capfd.readouterr().err
    warn_of_one_shard_at(one)  # like run and gateway, whose clients are elsewhere
    assert said in capfd.readouterr().err
    warn_of_one_shard_at(sharded_cluster.uri)
    assert main(["watch", sharded_cluster.uri, "--until", "now"]) == 0
    assert "only its part" not in capfd.readouterr().err
