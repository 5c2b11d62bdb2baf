"""Comparisons on live servers: nothing is found where nothing is wrong, and each planted fault is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson.json_util import dumps

from tailrace.compare import ComparisonLimits, comparison, deployment
from tailrace.embedded import ReplicaSet
from tailrace.oplog.cluster_time import ClusterTime
from tests.compare import live
from tests.compare.planted import BEFORE_6, FAULTS, altered
from tests.compare.replay import replay_report
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.wire import Wire
from tests.differential.workload import Workload

OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("7.0.28", "5.0.4", "4.4.2")]


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
    replay_report(path)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_and_its_report_is_a_case(written: Written, fault: str, tmp_path: Path) -> None:
    find_fault(written, fault, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["7.0.28", "5.0.4", "4.4.2"])
def test_each_planted_fault_is_found_on_other_versions(version: str, tmp_path: Path) -> None:
    with ReplicaSet(version=version) as running:
        written = Written(running.uri, version)
        for fault in FAULTS if version.startswith("7") else BEFORE_6:
            find_fault(written, fault, tmp_path)


def test_where_nothing_is_wrong_nothing_is_found(written: Written) -> None:
    with live.deployment(written.uri, written.database, since=written.since, show_expanded_events=True) as (_, run):
        compared = run(ComparisonLimits(duration_s=0.0, resume_every_s=None))
    assert (compared.total, compared.left, compared.gaps) == (0, 0, {})
    assert compared.seen.operations == {
        "create": 2, "insert": 1, "update": 1, "replace": 1, "delete": 1, "rename": 1, "drop": 2, "dropDatabase": 1,
        "invalidate": 1,
    }  # fmt: skip


class _Writes(threading.Thread):
    """The random workload, until it is told to end."""

    def __init__(self, uri: str, version: str, seed: int, most: int) -> None:
        super().__init__(daemon=True)
        self._uri, self._workload, self._most = uri, Workload(seed, version), most
        self.ends = threading.Event()
        self.operations = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with Wire.to(self._uri) as wire:
                clear(wire, self._workload)
                start = note(wire, "workload begins")
                done = Executed(start, start)
                for operation in self._workload.operations(self._most):
                    if self.ends.is_set():
                        break
                    done.ends.append(run_operation(wire, operation, done))
                    self.operations += 1
        except BaseException as error:  # noqa: BLE001  raised by who waits for it
            self.failure = error
        finally:
            self.ends.set()


def compare_workload(uri: str, version: str, *, seed: int, most: int, seconds: float, **said: Any) -> Any:
    """The whole deployment compared while the random workload runs; what was compared."""
    writes = _Writes(uri, version, seed, most)
    if not version.startswith(("4.", "5.")):
        said = {"show_expanded_events": True, "full_document_before_change": "whenAvailable", **said}
    with live.deployment(uri, None, **said) as (found, run):
        timer = threading.Timer(seconds, writes.ends.set)
        timer.start()
        writes.start()
        stop = threading.Thread(target=lambda: (writes.join(), found.stop()), daemon=True)
        stop.start()
        compared = run(ComparisonLimits(resume_every_s=0.7))
        stop.join()
        timer.cancel()
        assert writes.failure is None, writes.failure
        assert compared.total == 0, dumps(found.report(show_names=True)["differences"])
    return compared


def test_a_random_workload_differs_in_nothing(replica_set: ReplicaSet) -> None:
    compared = compare_workload(replica_set.uri, replica_set.version, seed=41, most=150, seconds=60)
    assert compared.events > 50
    assert compared.resumes


@pytest.mark.slow
@pytest.mark.parametrize("version", ["6.0.27", "7.0.28", "5.0.4", "4.4.2"])
def test_minutes_of_a_random_workload_differ_in_nothing(version: str) -> None:
    from tests.differential.fuzz import PARAMETERS

    with ReplicaSet(version=version, enable_test_commands=True, parameters=PARAMETERS) as running:
        for seed, said in ((1, {}), (2, {"full_document": "updateLookup"})):
            compared = compare_workload(running.uri, version, seed=seed, most=1 << 30, seconds=60, **said)
            assert compared.events > 100
            assert compared.resumes > 3
