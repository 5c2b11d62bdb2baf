"""Our merged stream against the server's own merge, as in the recordings, but live.

Slow, and not in ``make test-landing``: the server's merge runs very slowly in a place where it was not meant to run.
"""

from __future__ import annotations

import bson
import pytest

from tailrace.embedded import ShardedCluster
from tests.sharded import native
from tests.sharded.fuzz import Case, read_ours, stream_difference, tied
from tests.sharded.native_router import NativeRouter
from tests.sharded.one_time import drop_at_one_time
from tests.sharded.random_workload import RandomWorkload

pytestmark = [pytest.mark.mongod, pytest.mark.slow]


def test_the_merged_stream_is_the_server_s_own_until_a_collection_is_dropped_on_all_shards(
    sharded_cluster: ShardedCluster,
) -> None:
    # A router does not read a shard that was removed, and ours does; so none is removed
    # (docs/reference/differences.md).
    workload = RandomWorkload(
        sharded_cluster, 5, steps=40, adds_shard=False, removes_shard=False, database="routed_natively"
    )
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


def test_a_resume_after_a_token_of_several_events_skips_them_all(sharded_cluster: ShardedCluster) -> None:
    """Events that shards log at the same time may have the same token. The stream gives each of them, here of different
    databases, and no resume leads between them."""
    start = sharded_cluster.router.fence()
    names = drop_at_one_time(sharded_cluster, "routed_at_one_time_")
    sharded_cluster.router.create_database("routed_at_one_time", "shard0")
    sharded_cluster.router.insert_one("routed_at_one_time.c", {"_id": 1})
    end = sharded_cluster.router.fence()
    case = Case("admin", 1, {})
    with NativeRouter(sharded_cluster) as router:
        events = tied(router.read(case.database, case.collection, end, startAtOperationTime=start).events)
        dropped = [bson.decode(event)["ns"] in [{"db": name} for name in names] for event in events]
        drops = [event for event, is_one in zip(events, dropped, strict=True) if is_one]
        rest = events[len(dropped) - dropped[::-1].index(True) :]
        assert (len(drops), len({native.token(event).data for event in drops}), len(rest)) == (3, 1, 1)
        token = {"_data": native.token(drops[0]).data}
        assert router.read(case.database, case.collection, end, resumeAfter=token).events == rest
        assert router.read(case.database, case.collection, end, startAfter=token).events == rest
    assert tied(read_ours(sharded_cluster.uri, case, end, start_at_operation_time=start).events) == events
    assert read_ours(sharded_cluster.uri, case, end, resume_after=token).events == rest
    assert read_ours(sharded_cluster.uri, case, end, start_after=token).events == rest
