"""A cluster that is read only from hidden members, over direct connections: of the config server, or of each shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.options import parse
from tailrace.watch.client.sharded_stream import ShardedChangeStream
from tests.differential.hidden import hide_a_member
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION
from tests.sharded.waiting import take
from tests.sharded.workload import spread

pytestmark = [pytest.mark.mongod, pytest.mark.slow]


@pytest.mark.parametrize("version", [SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def test_a_cluster_is_read_from_hidden_members(
    start_sharded_cluster: Callable[..., ShardedCluster], version: str
) -> None:
    """The cluster's clock used explicit sessions, which PyMongo refuses there, and promises used a write, which such a
    member does not accept. Only replica sets had been read from hidden members."""
    cluster = start_sharded_cluster(2, members=2, config_members=2, version=version)
    namespace = spread(cluster, "hidden")
    config = hide_a_member(cluster.config)
    shards = [hide_a_member(shard) for shard in cluster.shards.values()]
    roads: list[Any] = [cluster.uri, config, shards]
    found: list[Any] = []
    with tailrace.connect(cluster.uri) as client:
        start = client._deployment.operation_time(client).tick().to_timestamp()
    for number in range(20):
        cluster.router.insert_one(namespace, {"_id": number, "region": "agnt"[number % 4]})
    for uri in roads:
        with (
            tailrace.connect(uri) as client,
            client["hidden"].watch(start_at_operation_time=start) as stream,
        ):
            assert isinstance(stream, ShardedChangeStream)
            found.append([event["_id"] for event in take(stream, 20)])
            cluster.router.insert_one(namespace, {"_id": 100 + len(found), "region": "a"})
            (last,) = take(stream, 1) if len(found) == 1 else take(stream, len(found))[-1:]
            assert last["documentKey"]["_id"] == 100 + len(found)
            assert stream.statistics.forced_noops > 0
    assert found[1:] == found[:1] * 2
    for more in ({}, {"startingFrom": "snapshot"}):
        open_deployment(parse({"uri": config, "database": "hidden", **more})).close()
