"""Events of a cluster that cannot be written."""

from __future__ import annotations

import bson
import pytest

from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.errors import TailraceError
from tests.sharded import native
from tests.spark.test_lake_quarantine import DIVIDE, read, span

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


def test_on_a_cluster_each_shard_puts_aside_what_fails_there(sharded_cluster: ShardedCluster) -> None:
    router = sharded_cluster.router
    first, second, *_ = sharded_cluster.shards
    router.create_database("quarantined", first)
    router.shard_collection("quarantined.c", {"_id": 1})
    router.split("quarantined.c", {"_id": 10})
    router.move_chunk("quarantined.c", {"_id": 10}, to=second)
    start = router.fence()
    router.insert_many("quarantined.c", [{"_id": number, "n": number % 4} for number in range(20)])
    end = router.fence()
    router.drop_database("quarantined")
    low, high = ClusterTime.from_timestamp(start), ClusterTime.from_timestamp(end)
    union = native.union(sharded_cluster, "quarantined", "c", start, end)
    bad = [event for event in union if bson.decode(event)["fullDocument"]["n"] == 0]
    assert (len(union), len(bad)) == (20, 5)
    options = span(sharded_cluster.uri, low, high, database="quarantined", collection="c", pipeline=DIVIDE)
    aside: list[QuarantinedEvent] = []
    rows = read(options, aside=aside)
    assert sorted(one.event for one in aside) == sorted(bad)
    good = [event for event in union if event not in bad]
    assert [row["token"] for row in rows] == [bson.decode(event)["_id"]["_data"] for event in good]
    with pytest.raises(TailraceError, match="divide by zero"):
        read(options, aside=None)
