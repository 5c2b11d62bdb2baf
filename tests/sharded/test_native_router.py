"""Our merged stream against the server's own merge, live: what the recordings hold, on today's cluster.

Slow, and apart from ``make test``: the server's merge is run where nobody meant it to run, at a crawl.
"""

from __future__ import annotations

import bson
import pytest

from tailrace.embedded import ShardedCluster
from tests.sharded.fuzz import Case, read_ours, stream_difference
from tests.sharded.native_router import NativeRouter
from tests.sharded.random_workload import RandomWorkload

pytestmark = [pytest.mark.mongod, pytest.mark.slow]


def test_the_merged_stream_is_the_server_s_own_until_a_collection_is_dropped_on_all_shards(
    sharded_cluster: ShardedCluster,
) -> None:
    workload = RandomWorkload(sharded_cluster, 5, steps=40, adds_shard=False, database="routed_natively")
    start = workload.prepare()
    workload.run(start)
    sharded_cluster.router.drop_collection(f"{workload.database}.orders")
    end = sharded_cluster.router.fence()
    images = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
    cases = [
        Case("admin", 1, {"showExpandedEvents": True}),
        Case(workload.database, 1, {}),
        Case(workload.database, "orders", images),
        Case(workload.database, "items", {"showExpandedEvents": True}),
    ]
    with NativeRouter(sharded_cluster) as router:
        for case in cases:
            expected = router.read(case.database, case.collection, end, startAtOperationTime=start, **case.stage)
            assert expected.error is None
            assert len(expected.events) > 20
            ours = read_ours(sharded_cluster.uri, case, end, start_at_operation_time=start)
            assert stream_difference(expected.events, ours) is None, case
            if expected.invalidated:
                kinds = [bson.decode(event)["operationType"] for event in ours.events[-2:]]
                assert kinds[-1] == "invalidate"
