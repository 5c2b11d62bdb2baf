"""PyMongo's own tests of change streams, and the drivers' unified cases, through the gateway: the results are those on
the server itself, and the server opens no stream meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import DEFAULT_VERSION, ReplicaSet
from tests.gateway.running import GatewayProcess, streams_of_the_server
from tests.gateway.side_by_side import VERSIONS
from tests.ported.test_pymongo_suite import _SLICE_OF, _WITH_PYMONGO, names, outcomes
from tests.spec.runner import Case, run
from tests.spec.test_unified import _CASES, flavour_named

pytestmark = pytest.mark.mongod


@contextmanager
def no_stream_at(server: ReplicaSet) -> Iterator[None]:
    before = streams_of_the_server(server.uri)
    yield
    assert streams_of_the_server(server.uri) == before, "the test went past the gateway"


def through(
    flavour: str, gateway: GatewayProcess, server: ReplicaSet, directory: Path, select: str = ""
) -> dict[str, str]:
    """What became of each test; none has failed."""
    with no_stream_at(server):
        found = outcomes("pymongo", flavour, gateway.uri, directory, select)
    assert names(found, "FAILED") | names(found, "ERROR") == set()
    return found


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_part_of_pymongo_s_tests_passes(
    flavour: str, gateway: GatewayProcess, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    assert len(through(flavour, gateway, replica_set, tmp_path, _SLICE_OF[flavour])) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_pymongo_s_tests_give_what_they_give_on_the_server(
    flavour: str,
    gateway: GatewayProcess,
    replica_set: ReplicaSet,
    start_replica_set: Callable[..., ReplicaSet],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    found = through(flavour, gateway, replica_set, tmp_path_factory.mktemp("through"))
    # Of its own: the server's fail points would strike the gateway's read, too.
    other = start_replica_set(1, enable_test_commands=True)
    assert found == outcomes("pymongo", flavour, other.uri, tmp_path_factory.mktemp("directly"))
    counts = len(names(found, "PASSED")), len(names(found, "SKIPPED"))
    assert replica_set.version != DEFAULT_VERSION or counts == _WITH_PYMONGO[flavour]
    print(f"{flavour} on {replica_set.version}: {counts[0]} passed, 0 failed, {counts[1]} skipped")


@pytest.fixture(scope="module")
def admin(gateway: GatewayProcess) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](gateway.uri) as client:
        yield client


def runs_on(case: Case, version: str) -> bool:
    return case.runs_on(tuple(map(int, version.split("."))), "replicaset")


@pytest.mark.parametrize("flavour", ["pymongo", pytest.param("pymongo async", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [case for case in _CASES if any(runs_on(case, each) for each in VERSIONS)], ids=lambda case: case.name
)
def test_a_unified_case_holds(
    flavour: str, case: Case, gateway: GatewayProcess, admin: MongoClient[Any], replica_set: ReplicaSet
) -> None:
    if not runs_on(case, replica_set.version):
        pytest.skip("the case is of other versions")
    with no_stream_at(replica_set):
        run(flavour_named(flavour, gateway.uri), case, admin)
