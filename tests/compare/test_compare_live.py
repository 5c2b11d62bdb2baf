"""Comparisons on live servers: nothing is found where nothing is wrong, and each planted fault is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.compare import ComparisonLimits, read_report
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.watch.compare import comparison, deployment
from tests.compare import live
from tests.compare.honest import compare_workload
from tests.compare.planted import BEFORE_6, FAULTS, altered
from tests.compare.replay import replay_report
from tests.differential.fuzz import PARAMETERS

OTHERS = ("7.0.28", "5.0.4", "4.4.2")


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_AWAIT_MS", 50)
    monkeypatch.setattr(comparison, "_LOOK_S", 0.05)


class Written:
    """A server on which one of each event was written, and since when."""

    def __init__(self, uri: str, version: str) -> None:
        self.uri, self.version = uri, version
        self.database = "comparedEach"
        with pymongo.MongoClient[Any](uri) as client:
            reply = client.admin.command("ping")
            self.since = ClusterTime.from_timestamp(reply["operationTime"]).tick()
        live.write_one_of_each(uri, self.database)


@pytest.fixture(scope="module")
def written(replica_set: ReplicaSet) -> Written:
    return Written(replica_set.uri, replica_set.version)


def find_fault(written: Written, fault: str, tmp_path: Path) -> None:
    alter, expected = FAULTS[fault]
    expanded = not written.version.startswith(("4.", "5."))
    with live.deployment(written.uri, written.database, since=written.since, show_expanded_events=expanded) as (
        found,
        run,
    ):
        compared = run(
            ComparisonLimits(duration_s=0.0, resume_every_s=None), ours=lambda opener: altered(opener, alter())
        )
        assert {one.difference.key for one in compared.differences} == {expected}
        assert compared.events >= 5
        path = tmp_path / "report.json"
        found.write_report(path)
    assert replay_report(path) == (0 if fault == "twice" else 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_and_its_report_is_a_case(written: Written, fault: str, tmp_path: Path) -> None:
    find_fault(written, fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_each_planted_fault_is_found_on_other_versions(version: str, tmp_path: Path) -> None:
    with ReplicaSet(version=version) as running:
        written = Written(running.uri, version)
        for fault in FAULTS if version.startswith("7") else BEFORE_6:
            find_fault(written, fault, tmp_path)


def compared_update(replica_set: ReplicaSet, tmp_path: Path, **said: Any) -> dict[str, Any]:
    """The report of an altered update of a collection with images, whose documents were looked up later."""
    database = f"comparedUpdates{len(said)}"
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        shop = client[database]
        shop.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
        since = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"]).tick()
        shop.c.insert_one({"_id": 1, "n": 1})
        shop.c.update_one({"_id": 1}, {"$set": {"n": 2}})
        shop.c.update_one({"_id": 1}, {"$set": {"n": 7}})
        shop.c.delete_one({"_id": 1})
        with live.deployment(replica_set.uri, database, since=since, **said) as (found, run):
            run(
                ComparisonLimits(duration_s=0.0, resume_every_s=None),
                ours=lambda opener: altered(opener, FAULTS["update"][0]()),
            )
            found.write_report(tmp_path / "report.json")
        client.drop_database(database)
    report = read_report(tmp_path / "report.json")
    assert [one["operation"] for one in report["differences"]] == ["update"]
    return report["differences"][0]


def test_what_was_looked_up_cannot_be_replayed_and_the_report_says_so(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """The report said that it could, and its replay always failed."""
    assert compared_update(replica_set, tmp_path, full_document="updateLookup")["replayable"] is False
    assert replay_report(tmp_path / "report.json") == 0


@pytest.mark.parametrize("said", [{"full_document": "required"}, {"full_document": "whenAvailable"}])
def test_images_that_make_the_document_are_in_the_report(
    replica_set: ReplicaSet, tmp_path: Path, said: dict[str, Any]
) -> None:
    difference = compared_update(replica_set, tmp_path, **said, full_document_before_change=None)
    assert difference["replayable"]
    assert len(difference["preImages"]) == 1
    assert replay_report(tmp_path / "report.json") == 1


def test_events_of_system_collections_are_compared_where_they_are_asked_for(replica_set: ReplicaSet) -> None:
    database = "comparedSystem"
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        since = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"]).tick()
        client[database].create_collection("v", viewOn="c", pipeline=[])
        client[database]["system.js"].insert_one({"_id": "f", "value": 1})
        client.drop_database(database)
    for switch, inserts in ((False, 0), (True, 1)):
        asked = {"show_expanded_events": not switch, "show_system_events": switch, "show_migration_events": switch}
        with live.deployment(replica_set.uri, database, since=since, **asked) as (found, run):
            compared = run(ComparisonLimits(duration_s=0.0, resume_every_s=None))
            assert compared.total == 0, found.report(show_names=True)["differences"]
            assert compared.seen.operations["insert"] == inserts
            names = ["showSystemEvents", "showMigrationEvents"] if switch else ["showExpandedEvents"]
            assert found.report()["stage"] == dict.fromkeys(names, True)


@pytest.fixture(scope="module")
def roomy() -> Iterator[ReplicaSet]:
    """A write of 9 MB and its pre-image may not fit the dirty part of a cache of 256 MB: a new server then tried the
    write again and again, for five minutes (6.0.27)."""
    with ReplicaSet(1, cache_gb=1) as running:
        yield running


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_events_just_before_one_that_is_too_large_are_compared(roomy: ReplicaSet, before: int) -> None:
    """An event of ours was blamed. The random workload showed this only if a leg began an odd number of events before
    it."""
    database = f"comparedLarge{before}"
    with pymongo.MongoClient[Any](roomy.uri) as client:
        shop = client[database]
        shop.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
        shop.c.insert_one({"_id": 1, "x": "x" * 9_000_000})
        since = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"]).tick()
        for number in range(before):
            shop.c.insert_one({"n": number})
        shop.c.update_one({"_id": 1}, {"$set": {"x": "y" * 9_000_000}})
        said = {"show_expanded_events": True, "full_document_before_change": "required"}
        with live.deployment(roomy.uri, database, since=since, **said) as (_, run):
            compared = run(ComparisonLimits(duration_s=0.0, resume_every_s=None))
        client.drop_database(database)
    assert (compared.events, compared.total) == (before, 0)
    # The comparison goes on where both ended in it, or is at its end.
    assert set(compared.gaps) <= {"both streams ended with error 10334"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["7.0.28"])
def test_the_rows_of_7_0_that_need_system_events_can_be_measured(version: str) -> None:
    with ReplicaSet(version=version) as running, pymongo.MongoClient[Any](running.uri) as client:
        since = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"]).tick()
        client.shop.c.insert_many([{"n": number} for number in range(100)])
        client.shop.c.create_index("n")
        with live.deployment(running.uri, "shop", since=since, show_expanded_events=True, show_system_events=True) as (
            _,
            run,
        ):
            compared = run(ComparisonLimits(duration_s=0.0, resume_every_s=None))
    assert compared.total == 0
    assert compared.seen.operations["startIndexBuild"] == 1


def test_where_nothing_is_wrong_nothing_is_found(written: Written) -> None:
    with live.deployment(written.uri, written.database, since=written.since, show_expanded_events=True) as (_, run):
        compared = run(ComparisonLimits(duration_s=0.0, resume_every_s=None))
    assert (compared.total, compared.left, compared.gaps) == (0, 0, {})
    assert compared.seen.operations == {
        "create": 2, "insert": 1, "update": 1, "replace": 1, "delete": 1, "rename": 1, "drop": 2, "dropDatabase": 1,
        "invalidate": 1,
    }  # fmt: skip


def test_a_random_workload_differs_in_nothing(replica_set: ReplicaSet) -> None:
    # A quick machine writes so little in a second.
    compared = compare_workload(
        replica_set.uri, replica_set.version, seed=41, most=150, seconds=60, resume_every_s=0.05
    )
    assert compared.events > 50
    assert compared.resumes


@pytest.mark.slow
@pytest.mark.parametrize("version", ["6.0.27", *OTHERS])
def test_minutes_of_a_random_workload_differ_in_nothing(version: str) -> None:
    with ReplicaSet(version=version, enable_test_commands=True, parameters=PARAMETERS) as running:
        for seed, said in ((1, {}), (2, {"full_document": "updateLookup"})):
            compared = compare_workload(running.uri, version, seed=seed, most=1 << 30, seconds=60, **said)
            assert compared.events > 100
            assert compared.resumes > 3
