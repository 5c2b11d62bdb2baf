"""The chaos of the consumers (``make kills``): a slice, faults put back that it must find, and what its checks find."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.embedded import ReplicaSet
from tests.kills.chaos import PARAMETERS, Chaos, Result
from tests.kills.leases import LeaseHistory, applied
from tests.server_in_use import SERVER_VERSION


def chaos(start_replica_set: Callable[..., ReplicaSet], folder: Path, seconds: float, **options: Any) -> Result:
    deployment = start_replica_set(3, oplog_size_mb=1000, parameters=PARAMETERS)
    result = Chaos(deployment, folder, 31, seconds, **options).run()
    print(result.told())
    return result


# Kills and stops: tests/consumer/test_ordeal.py. Clocks, pauses and lost answers: tests/simulation. A lost majority:
# tests/consumer/test_lease_in_force.py.
@pytest.mark.slow
@pytest.mark.mongod
def test_every_promise_is_kept_through_each_kind_of_fault(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    # Handling changes costs most, on three members: so there are few changes, but many pauses and harms.
    options: dict[str, Any] = {"changes_min": 40, "between_changes_s": 0.4, "pauses_one_in": 2, "processes": 3}
    result = chaos(start_replica_set, tmp_path, 15, **options, rest_s=0.5, harms_s=(2.5, 4.0))
    assert result.violations == []
    assert result.missing == []


@pytest.mark.slow
@pytest.mark.mongod
@pytest.mark.parametrize("version", [SERVER_VERSION, "5.0.4", "4.4.2"])
def test_every_promise_is_kept_for_longer(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    def start(members: int, **options: Any) -> ReplicaSet:
        return start_replica_set(members, version=version, **options)

    result = chaos(start, tmp_path, 300, changes_min=500, hits_min=3)
    assert result.violations == []
    assert result.missing == []


#: For each planted fault, the harms and the listeners in which it shows.
SHOWN_BY = {
    "no fence": (["stop"], ["fenced", "alone"]),
    "commits past a batch": (["kill"], ["fenced", "alone"]),
    "the client's clock": (["restart", "clock"], ["lanes", "alone"]),
    "no owner looked at": (["stop"], ["fenced", "alone"]),
    "effects outside the transaction": (["kill"], ["lanes"]),
    "lanes by number": ([], ["lanes"]),
}


@pytest.mark.slow
@pytest.mark.mongod
@pytest.mark.parametrize("planted", sorted(SHOWN_BY))
def test_a_planted_fault_is_found(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, planted: str) -> None:
    faults, listeners = SHOWN_BY[planted]
    options: dict[str, Any] = {"faults": faults, "listeners": listeners, "planted": planted, "hits_min": 4}
    result = chaos(start_replica_set, tmp_path, 30, **options, rest_s=0.5, patience_s=60, pauses_one_in=10)
    assert result.violations


HELD = {"owner": "a-1-x", "version": 3, "expiresAt": datetime(2026, 1, 1), "position": {"token": {"_data": "8265"}}}
BEFORE = HELD["expiresAt"] - timedelta(seconds=1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"position": {"token": {"_data": "8266"}}}, []),
        ({"position": {"token": {"_data": "8264"}}}, ["the position went back from 8265 to 8264"]),
        ({"position": {"at": Timestamp(1, 1)}}, ["the position went back"]),
        ({"version": 2}, ["version 2 after version 3"]),
        ({"owner": None, "expiresAt": None}, []),
        ({"owner": "b-2-x"}, ["belongs to two owners", "who holds it until"]),
        ({"owner": "b-2-x", "version": 4}, ["who holds it until"]),
        ({"version": 4}, []),
    ],
)
def test_what_a_lease_must_not_do_is_told(changes: dict[str, Any], found: list[str]) -> None:
    history = LeaseHistory()
    history.put("orders", HELD)
    history.put("orders", HELD | changes, BEFORE)
    assert len(history.violations) == len(found)
    assert all(what in violation for what, violation in zip(found, history.violations, strict=True))


def test_a_lease_that_has_run_out_is_taken_over() -> None:
    history = LeaseHistory()
    history.put("orders", HELD)
    history.put("orders", HELD | {"owner": "b-2-x", "version": 4}, HELD["expiresAt"])
    assert (history.violations, history.taken_from(1), history.held_by(2)) == ([], 1, ["orders"])


def test_an_update_is_applied_to_what_is_known() -> None:
    described = {"updatedFields": {"version": 4, "position.token._data": "8270"}, "removedFields": ["expiresAt"]}
    after = applied(HELD, described)
    assert after == {"owner": "a-1-x", "version": 4, "position": {"token": {"_data": "8270"}}}
    assert HELD["position"] == {"token": {"_data": "8265"}}


def test_what_is_violated_or_missing_is_told_and_does_not_hold() -> None:
    assert Result().holds
    for result in (Result(violations=["a position went back"]), Result(missing=["kill hit 0 times"])):
        assert not result.holds
        assert (result.violations + result.missing)[0] in result.told()
