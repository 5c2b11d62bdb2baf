"""Comparisons on a sharded cluster: our merged stream beside the server's, whose events were read before.

No wheel holds a mongos. What a mongos gives is here what the shards' own streams give together, in the order of their
tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.compare import ComparisonLimits, DeploymentComparison, Streams
from tailrace.core.event.resume_token import encode_high_water_mark
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.errors import SourceError, UsageError
from tailrace.watch.client.statistics import StreamStatistics
from tailrace.watch.compare import comparison
from tailrace.watch.compare.comparison import Compared, StreamComparison
from tailrace.watch.compare.evidence import Evidence
from tests.compare.planted import altered
from tests.compare.replay import cases
from tests.differential.beside import wait_until
from tests.patience import PATIENCE_S
from tests.sharded import native
from tests.sharded.mongos import Mongos
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
            ComparisonLimits(duration_s=PATIENCE_S, resume_every_s=0.4),
            evidence=Evidence(deployment._ours, images=False),
            seed=3,
        )
        deployment.compared = running.compared

        def stop() -> None:  # how much a busy machine compares in that time is not known
            wait_until(lambda: running.compared.resumes > 1, "both are resumed")
            running.stop()

        stops = threading.Thread(target=stop, daemon=True)
        stops.start()
        found = running.run()
        stops.join()
        return found, deployment.report()


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


def test_the_events_of_migrations_are_compared_where_they_are_asked_for(sharded_cluster: ShardedCluster) -> None:
    router, namespace = sharded_cluster.router, spread(sharded_cluster, "comparedMoves")
    for number in range(12):
        router.insert_one(namespace, {"region": REGIONS[number % len(REGIONS)], "_id": number})
    start = router.fence()
    owner = router.catalog.table(namespace).owner({"region": REGIONS[0], "_id": 0})
    other = next(name for name in sharded_cluster.shards if name != owner)
    router.move_chunk(namespace, {"region": REGIONS[0], "_id": 0}, to=other)
    router.insert_one(namespace, {"region": REGIONS[0], "_id": 100})
    end = router.fence()
    counts = []
    for shown in (False, True):
        said = {"showMigrationEvents": True} if shown else {}
        events = native.union(sharded_cluster, "comparedMoves", "orders", start, end, **said)
        counts.append(len(events))
        found, report = compare_recorded(sharded_cluster, namespace, events, start, end, show_migration_events=shown)
        assert (found.events, found.total) == (len(events), 0), report["differences"][:1]
    assert counts[1] > counts[0], "the documents that were moved are inserts and deletes"


def test_a_mongos_own_stream_is_compared() -> None:
    """The server's side is opened by the router, with the parameters that it takes, and resumed there."""
    with ShardedCluster(2, enable_test_commands=True) as cluster, Mongos(cluster) as mongos:
        router, namespace = cluster.router, spread(cluster, "comparedByMongos")
        start = router.fence()
        for number in range(12):
            key = {"region": REGIONS[number % len(REGIONS)], "_id": number}
            router.insert_one(namespace, key)
            router.update_one(namespace, key, {"$set": {"n": number}})
        for pace_ms in (150, 300, 600, 1200, 2400, 4800):
            with mongos.paced(pace_ms) as survives, DeploymentComparison(mongos.uri, "comparedByMongos") as found:
                compared = compared_by_mongos(found, start, router.fence)
            if survives():
                break
        else:
            pytest.fail("the router ended each time")
        assert (compared.events, compared.total) == (24, 0), found.report()["differences"]
        assert compared.seen.operations == {"insert": 12, "update": 12}


def compared_by_mongos(found: DeploymentComparison, start: Timestamp, fence: Callable[[], Timestamp]) -> Compared:
    times = iter([start])
    running = found.prepare(ComparisonLimits(events=24, resume_every_s=3.0))
    running.now = lambda: ClusterTime.from_timestamp(next(times, None) or fence())
    with suppress(SourceError):  # the router has ended, as the next call finds
        assert found.is_cluster
        found.try_to_open()
        running.run()
    return running.compared


def test_a_config_server_is_no_mongos(sharded_cluster: ShardedCluster) -> None:
    with DeploymentComparison(sharded_cluster.uri) as deployment, pytest.raises(UsageError, match="its mongos"):
        deployment.run(ComparisonLimits(duration_s=0))


@pytest.mark.slow
def test_the_servers_own_merge_differs_in_nothing(sharded_cluster: ShardedCluster) -> None:
    """A router does not read a shard that was removed, and ours does; so no shard is removed here."""
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
