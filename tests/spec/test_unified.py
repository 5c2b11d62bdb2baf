"""The drivers' own test files for change streams, run against each engine.

The files come from the source distribution of PyMongo at test time. Its client runs the same cases: what it passes, the
runner understands. Nothing had checked which commands a stream sends, nor what fail points do to it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

import tailrace
from tailrace.embedded import ReplicaSet
from tests.pymongo_source import NotFetchedError, pymongo_source
from tests.spec.runner import Case, Flavour, cases_in, run

pytestmark = pytest.mark.mongod

_SERVER_VERSION = (6, 0, 27)
#: The cases for later servers, which our engine makes the events of; one version for each file that needs one.
_LATER = ("7.0", "8.1")
_GAPS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "known_gaps.toml").read_text())


def _cases() -> list[Case]:
    try:
        return cases_in(pymongo_source() / "test" / "change_streams" / "unified")
    except NotFetchedError:
        return []


_CASES = _cases()


#: A server that says that it is no primary any more is looked at again after this time; by default after 10 s.
_HEARTBEAT_MS = 500


def flavour_named(name: str, uri: str) -> Flavour:
    uri = f"{uri}&heartbeatFrequencyMS={_HEARTBEAT_MS}"
    if name == "pymongo":
        return Flavour(name, lambda **options: MongoClient[Any](uri, **options))
    engine, _, version = name.partition(" ")
    more = {"server_version": version} if version else {}
    return Flavour(name, lambda **options: tailrace.connect(uri, engine=engine, **more, **options))  # type: ignore[arg-type]


def _parameters() -> Iterator[Any]:
    for flavour in ("pymongo", "server", "oplog"):
        for case in _CASES:
            if case.runs_on(_SERVER_VERSION, "replicaset"):
                yield pytest.param(flavour, case, id=f"{flavour}-{case.name}")
    for version in _LATER:
        asked = (*map(int, version.split(".")), 0)
        for case in _CASES:
            # Those that only a later server runs.
            if case.runs_on(asked, "replicaset") and not case.runs_on(_SERVER_VERSION, "replicaset"):
                yield pytest.param(f"oplog {version}", case, id=f"oplog {version}-{case.name}")


@pytest.fixture(scope="module")
def admin(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](replica_set.uri) as client:
        yield client


def test_the_files_hold_the_cases_that_we_know_of() -> None:
    if not _CASES:
        with pytest.raises(NotFetchedError) as refused:
            pymongo_source()
        pytest.skip(str(refused.value))
    assert len(_CASES) == 89
    assert sum(case.runs_on(_SERVER_VERSION, "replicaset") for case in _CASES) == 64


@pytest.mark.parametrize(("flavour", "case"), list(_parameters()))
def test_a_unified_case_holds(flavour: str, case: Case, replica_set: ReplicaSet, admin: MongoClient[Any]) -> None:
    reason = _GAPS.get(flavour, {}).get(case.name)
    if reason is None:
        run(flavour_named(flavour, replica_set.uri), case, admin)
        return
    try:
        run(flavour_named(flavour, replica_set.uri), case, admin)
    except Exception as error:  # noqa: BLE001  whatever it is, the gap is known
        pytest.xfail(f"{reason} ({type(error).__name__})")
    pytest.fail(f"a known gap passes: take it out of known_gaps.toml ({reason})")


def test_every_known_gap_is_a_case_that_is_run() -> None:
    if not _CASES:
        pytest.skip("the files could not be fetched")
    run_here = {(one.values[0], one.values[1].name) for one in _parameters()}
    assert {(flavour, name) for flavour, names in _GAPS.items() for name in names} <= run_here
