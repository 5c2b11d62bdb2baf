"""``tailrace streams`` and ``--metrics``: what a gateway says of itself from outside."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pymongo
import pytest
from pymongo.errors import OperationFailure

from tailrace.embedded import ReplicaSet
from tests import commands
from tests.gateway.running import GatewayProcess, eventually, lines_of

pytestmark = pytest.mark.mongod


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return commands.run_text("streams", *words)


def test_open_streams_are_listed_and_counted(gateway: GatewayProcess) -> None:
    with (
        pymongo.MongoClient[Any](gateway.uri) as client,
        client.listed.orders.watch(max_await_time_ms=100) as stream,
        client.listed.watch() as _,
    ):
        before = gateway.statistics()
        client.listed.orders.insert_many([{"_id": number} for number in range(3)])
        for _number in range(3):
            next(stream)
        client.listed.orders.drop()
        found = json.loads(command(gateway.uri, "--format", "json").stdout)
        shown = {one["ns"]: one for one in found["streams"]}
        assert shown["listed.orders"]["events"] == 3
        assert shown["listed.$cmd.aggregate"]["events"] == 0
        assert found["gateway"]["pid"] == gateway.pid
        said = command(gateway.uri)
        assert "listed.orders" in said.stdout
        assert "2 streams" in said.stdout
        after = gateway.statistics()
        assert after["streams"] == 2
        assert after["events_total"] - before["events_total"] == 3
        assert after["event_bytes_total"] - before["event_bytes_total"] > 300
        assert after["upstream_reads_total"] > before["upstream_reads_total"]
        with pytest.raises(OperationFailure):
            client.listed.command("getMore", 99, collection="orders")
    eventually(lambda: gateway.statistics()["streams"] == 0, "the streams stay")


def test_an_address_that_is_none_is_told_before_anybody_can_connect(replica_set: ReplicaSet) -> None:
    """If only the address of its statistics was wrong, the gateway began to listen and ended at once."""
    words = ["gateway", "--upstream", replica_set.uri, "--listen", "127.0.0.1:0", "--metrics", "here"]
    refused = commands.run_text(*words)
    assert refused.returncode == 1
    assert "--metrics: 'here' is not an address" in refused.stderr
    assert "listening" not in refused.stderr


def test_a_server_is_told_from_a_gateway(replica_set: ReplicaSet) -> None:
    refused = command(replica_set.uri)
    assert refused.returncode == 1
    assert "that is a server, not a gateway" in refused.stderr


def test_who_may_not_see_operations_may_not_see_streams(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    guarded = start_replica_set(1, root_password="r00t")
    with pymongo.MongoClient[Any](guarded.uri) as root:
        root.admin.command("createUser", "alice", pwd="pw", roles=["readAnyDatabase"])
        root.admin.command("createUser", "bob", pwd="pw", roles=["clusterMonitor"])
    gateway = start_gateway(guarded.uri, "--log", "json")
    options = f"replicaSet={guarded.name}&authSource=admin"
    with pymongo.MongoClient[Any](f"mongodb://alice:pw@{gateway.address}/?{options}") as alice, alice.shop.c.watch():
        with pytest.raises(OperationFailure) as unseen:
            alice.admin.command("tailraceStreams")
        assert unseen.value.code == 13
        unseen_by = command(f"mongodb://alice:pw@{gateway.address}/?{options}")
        assert (unseen_by.returncode, "read on admin" in unseen_by.stderr) == (1, False), "that shows password hashes"
        assert "actions: ['inprog']" in unseen_by.stderr
        found = json.loads(command(f"mongodb://bob:pw@{gateway.address}/?{options}", "--format", "json").stdout)
        assert [(one["ns"], one["users"]) for one in found["streams"]] == [("shop.c", ["alice@admin"])]
    nobody = command(f"mongodb://{gateway.address}/?{options}")
    assert nobody.returncode == 1
    assert nobody.stderr.count("\n") <= 2
    assert gateway.stop() == 0
    lines = list(lines_of(gateway.log))
    opened = [line for line in lines if line["event"] == "stream opened"]
    assert [(line["ns"], line["users"]) for line in opened] == [("shop.c", ["alice@admin"])]
    assert [line["event"] for line in lines if line.get("ns") == "shop.c"] == ["stream opened", "stream closed"]
    assert {"time", "level", "event", "cursor", "ns", "users"} == opened[0].keys()
    assert "r00t" not in gateway.log.read_text()
