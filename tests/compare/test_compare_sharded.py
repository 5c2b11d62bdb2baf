"""Comparisons on a sharded cluster: our merged stream beside the server's, whose events were read before.

No wheel holds a mongos. What a mongos gives is here what the shards' own streams give together, in the order of their
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.client.statistics import StreamStatistics
from tailrace.compare import ComparisonLimits, DeploymentComparison, Streams, comparison
from tailrace.compare.comparison import Compared, StreamComparison
from tailrace.compare.evidence import Evidence
from tailrace.embedded import ShardedCluster
from tailrace.errors import UsageError
from tailrace.event.resume_token import encode_high_water_mark
from tailrace.oplog.cluster_time import ClusterTime
from tests.compare.planted import altered
from tests.compare.replay import cases
from tests.sharded import native
from tests.sharded.native_router import NativeRouter
from tests.sharded.random_workload import RandomWorkload
from tests.sharded.workload import REGIONS, spread

pytestmark = pytest.mark.mongod


class RecordedStream:
    """The events of a stream up to a time, from where it is opened."""

    def __init__(self, events: list[bytes], end: Timestamp, start: Mapping[str, Any]) -> None:
        tokens = [bson.decode(event)["_id"] for event in events]
        after = next((start[name] for name in ("resume_after", "start_after") if name in start), None)
        first = 0 if after is None else sum(token["_data"] <= after["_data"] for token in tokens)
        self._events, self._end = events[first:], end
        self.alive, self.has_next, self.statistics = True, False, StreamStatistics()

    def try_next(self) -> Any:
        return RawBSONDocument(self._events.pop(0)) if self._events else None

    @property
    def resume_token(self) -> Any:
        return bson.decode(encode_high_water_mark(ClusterTime.from_timestamp(self._end).tick()))

    def close(self) -> None:
        self.alive = False


def compare_recorded(
    cluster: ShardedCluster, namespace: str | None, events: list[bytes], start: Timestamp, end: Timestamp, **said: Any
) -> tuple[Compared, dict[str, Any]]:
    """Ours from ``start`` to ``end``, with a lost event where ``loses`` says so, beside the events; and the report."""
    lost = said.pop("lost", None)

    def alter(raw: bytes) -> Any:
        if raw != lost:
            yield raw

    with DeploymentComparison(cluster.uri, namespace, Streams(**said)) as deployment:
        times = iter([ClusterTime.from_timestamp(start)])
        running = StreamComparison(
            lambda begin: RecordedStream(events, end, begin),
            altered(deployment.opener_of_ours(), alter),
            lambda: next(times, ClusterTime.from_timestamp(end)),
            ComparisonLimits(duration_s=1.5, resume_every_s=0.4),
            evidence=Evidence(deployment._ours, images=False),
            seed=3,
        )
        deployment.compared = running.compared
        return running.run(), deployment.report()


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_LOOK_S", 0.05)


def test_the_merged_stream_of_a_cluster_is_compared_and_its_report_is_a_case(sharded_cluster: ShardedCluster) -> None:
    router, namespace = sharded_cluster.router, spread(sharded_cluster, "comparedThere")
    start = router.fence()
    keys = [{"region": REGIONS[number % len(REGIONS)], "_id": number} for number in range(40)]
    for number, key in enumerate(keys):
        router.insert_one(namespace, {**key, "n": number})
    for key in keys[::3]:
        router.update_one(namespace, key, {"$set": {"n": -1}})
    end = router.fence()
    events = native.union(sharded_cluster, "comparedThere", "orders", start, end)
    assert len(events) == 54
    found, report = compare_recorded(sharded_cluster, namespace, events, start, end)
    assert (found.events, found.total, found.left) == (54, 0, 0), report["differences"][:1]
    assert found.resumes
    found, report = compare_recorded(sharded_cluster, namespace, events, start, end, lost=events[47])
    assert [one.difference.kind for one in found.differences] == ["missing"]
    assert report["deployment"] == "sharded cluster"
    assert [one["shard"] in sharded_cluster.shards for one in report["differences"][0]["entries"]] == [True]
    assert [case.difference() for case in cases(report)] == [None]


def test_a_config_server_is_no_mongos(sharded_cluster: ShardedCluster) -> None:
    with DeploymentComparison(sharded_cluster.uri) as deployment, pytest.raises(UsageError, match="its mongos'"):
        deployment.run(ComparisonLimits(duration_s=0))


@pytest.mark.slow
def test_the_servers_own_merge_differs_in_nothing(sharded_cluster: ShardedCluster) -> None:
    """A router does not read a shard that has gone, and ours does, so all of them stay."""
    workload = RandomWorkload(
        sharded_cluster, 5, steps=40, adds_shard=False, removes_shard=False, database="comparedNatively"
    )
    start = workload.prepare()
    workload.run(start)
    end = sharded_cluster.router.fence()
    with NativeRouter(sharded_cluster) as router:
        for database, collection, namespace, expanded in (
            ("admin", 1, None, True),
            (workload.database, 1, workload.database, False),
            (workload.database, "orders", f"{workload.database}.orders", False),
        ):
            expected = router.read(
                database,
                collection,
                end,
                startAtOperationTime=start,
                **({"showExpandedEvents": True} if expanded else {}),
            )
            assert expected.error is None
            assert len(expected.events) > 20
            found, report = compare_recorded(
                sharded_cluster, namespace, expected.events, start, end, show_expanded_events=expanded
            )
            assert (found.events, found.total) == (len(expected.events), 0), report["differences"][:1]
