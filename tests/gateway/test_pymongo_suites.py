"""PyMongo's own tests of change streams, and the drivers' unified cases, through the gateway: they give what they give
on the server itself, and the server opens no stream meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.gateway.running import GatewayProcess, streams_of_the_server
from tests.ported.test_pymongo_suite import _SLICE_OF, _WITH_PYMONGO, names, outcomes
from tests.spec.runner import Case, run
from tests.spec.test_unified import _CASES, _SERVER_VERSION, flavour_named

pytestmark = pytest.mark.mongod


@pytest.fixture(autouse=True)
def _the_server_opens_no_stream(replica_set: ReplicaSet) -> Iterator[None]:
    before = streams_of_the_server(replica_set.uri)
    yield
    assert streams_of_the_server(replica_set.uri) == before, "the test went past the gateway"


def through(flavour: str, gateway: GatewayProcess, directory: Path, select: str = "") -> dict[str, str]:
    """What became of each test; none has failed."""
    found = outcomes("pymongo", flavour, gateway.uri, directory, select)
    assert names(found, "FAILED") | names(found, "ERROR") == set()
    return found


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_part_of_pymongo_s_tests_passes(flavour: str, gateway: GatewayProcess, tmp_path: Path) -> None:
    assert len(through(flavour, gateway, tmp_path, _SLICE_OF[flavour])) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_pymongo_s_tests_give_what_they_give_on_the_server(
    flavour: str, gateway: GatewayProcess, tmp_path: Path
) -> None:
    found = through(flavour, gateway, tmp_path)
    passed, skipped = _WITH_PYMONGO[flavour]
    assert (len(names(found, "PASSED")), len(names(found, "SKIPPED"))) == (passed, skipped)


@pytest.fixture(scope="module")
def admin(gateway: GatewayProcess) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](gateway.uri) as client:
        yield client


@pytest.mark.parametrize(
    "case", [case for case in _CASES if case.runs_on(_SERVER_VERSION, "replicaset")], ids=lambda case: case.name
)
def test_a_unified_case_holds(case: Case, gateway: GatewayProcess, admin: MongoClient[Any]) -> None:
    run(flavour_named("pymongo", gateway.uri), case, admin)
