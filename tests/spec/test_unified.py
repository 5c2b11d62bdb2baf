"""The drivers' own test files for change streams, run against each engine.

The files come from the source distribution of PyMongo at test time. Its client runs the same cases, which shows that
the runner understands them. No earlier test had checked which commands a stream sends, nor what fail points do to it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

import tailrace
from tailrace.embedded import ReplicaSet
from tests.pymongo_source import NotFetchedError, pymongo_source
from tests.server_in_use import SERVER_VERSION
from tests.spec.runner import Case, Flavour, cases_in, run

pytestmark = pytest.mark.mongod

_IN_USE = tuple(map(int, SERVER_VERSION.split(".")))
#: How many of the files' 89 cases are for a server of each series.
_CASES_OF = {"7.0": 66, "6.0": 64, "5.0": 45, "4.4": 44}
#: The cases for later servers, which our engine makes the events of; one version for each file that needs one.
_LATER = ("7.0", "8.1")
_GAPS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "known_gaps.toml").read_text())


def _cases() -> list[Case]:
    try:
        return cases_in(pymongo_source() / "test" / "change_streams" / "unified")
    except NotFetchedError:
        return []


_CASES = _cases()


#: By engine: the commands that open a stream and that resume one. The oplog engine asks for the time with one command.
_OPENS_BY = {"server": ("aggregate", "aggregate"), "oplog": ("ping", "find")}
#: Ends the name of a flavour whose calls are awaited.
_ASYNC = " async"
#: A server that reports that it is no longer primary is checked again after this time; by default after 10 s.
_HEARTBEAT_MS = 500


def flavour_named(name: str, uri: str) -> Flavour:
    uri = f"{uri}&heartbeatFrequencyMS={_HEARTBEAT_MS}"
    name, awaited, _ = name.partition(_ASYNC)
    engine, _, version = name.partition(" ")
    if engine == "pymongo":
        kind: Any = AsyncMongoClient if awaited else MongoClient
        return Flavour(name + awaited, partial(kind, uri))
    more = {"server_version": version} if version else {}
    kind = tailrace.AsyncClient if awaited else tailrace.connect
    return Flavour(name + awaited, partial(kind, uri, engine=engine, **more), _OPENS_BY[engine])


def _parameters() -> Iterator[Any]:
    for awaited in ("", _ASYNC):
        for engine in ("pymongo", "server", "oplog"):
            # What PyMongo's own client does says something about the runner, and nothing about our client.
            marks = pytest.mark.slow if engine == "pymongo" else ()
            for case in _CASES:
                if case.runs_on(_IN_USE, "replicaset"):
                    yield pytest.param(engine + awaited, case, id=f"{engine}{awaited}-{case.name}", marks=marks)
        for version in _LATER:
            asked = (*map(int, version.split(".")), 0)
            for case in _CASES:
                # Those that only a later server runs.
                if case.runs_on(asked, "replicaset") and not case.runs_on(_IN_USE, "replicaset"):
                    yield pytest.param(f"oplog {version}{awaited}", case, id=f"oplog {version}{awaited}-{case.name}")


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
    assert sum(case.runs_on(_IN_USE, "replicaset") for case in _CASES) == _CASES_OF[SERVER_VERSION[:3]]


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


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["pymongo", "server", "server async", "oplog", "oplog async"])
@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_the_cases_of_an_older_server_hold_on_it(
    flavour: str, version: str, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    """45 cases on 5.0, 44 on 4.4."""
    asked = tuple(map(int, version.split(".")))
    cases = [case for case in _CASES if case.runs_on(asked, "replicaset")]
    if not cases:
        pytest.skip("the files could not be fetched")
    running = start_replica_set(version=version, enable_test_commands=True)
    failed = {}
    with MongoClient[Any](running.uri) as admin:
        for case in cases:
            try:
                run(flavour_named(flavour, running.uri), case, admin)
            except Exception as error:  # noqa: BLE001  all of them are told together
                failed[case.name] = repr(error)
    assert failed == {}


def test_every_known_gap_is_a_case_that_is_run() -> None:
    if not _CASES:
        pytest.skip("the files could not be fetched")
    run_here = {(one.values[0], one.values[1].name) for one in _parameters()}
    assert {(flavour, name) for flavour, names in _GAPS.items() for name in names} <= run_here
