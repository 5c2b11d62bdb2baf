"""Other people's applications see through the gateway what they see without it, event by event.

Each program in ``applications/`` opens the application's change streams on both sides at once, writes one workload, and
prints what each stream gave, tokens and times included. The tests are slow: they fetch packages when first run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.embedded import ReplicaSet
from tests.gateway.packaged import APPLICATIONS
from tests.gateway.programs import Unavailable
from tests.gateway.running import GatewayProcess, streams_of_the_server

#: The least number of events on each side: without it, a workload that does nothing would pass.
EVENTS_MIN = {"mongoose": 69, "rxdb": 40, "parse": 30, "socketio": 18, "motor": 120, "beanie": 36, "debezium": 70}


def differences(direct: list[Any], gateway: list[Any]) -> list[str]:
    """A line for the first event of each stream that differs."""
    found = (
        [] if len(direct) == len(gateway) else [f"{len(direct)} streams directly, {len(gateway)} through the gateway"]
    )
    for number, (left, right) in enumerate(zip(direct, gateway, strict=False)):
        if left == right:
            continue
        place = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
        shown = "" if place is None else f"; event {place}: {left[place][:2000]} and {right[place][:2000]}"
        found.append(f"stream {number}: {len(left)} and {len(right)} events{shown}")
    return found


@pytest.mark.slow
@pytest.mark.mongod
@pytest.mark.parametrize("application", list(APPLICATIONS))
def test_an_application_is_given_the_same_events_one_by_one(
    application: str, replica_set: ReplicaSet, gateway: GatewayProcess, server_version: str, tmp_path: Path
) -> None:
    if application in {"debezium", "rxdb"} and int(server_version.partition(".")[0]) < 6:
        pytest.skip(f"the streams of {application} ask for pre-images, which servers before 6.0 do not have")
    before = streams_of_the_server(replica_set.uri)
    try:
        found = APPLICATIONS[application](application, replica_set.uri, gateway.uri, f"app_{application}", tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    given = found["given"]
    assert differences(given["direct"], given["gateway"]) == []
    assert sum(map(len, given["gateway"])) >= EVENTS_MIN[application]
    assert streams_of_the_server(replica_set.uri) > before, "nothing was read from the server itself"
    if "seen" in found:
        direct, through = found["seen"]
        assert json.dumps(direct) == json.dumps(through)
    print(f"{application}: {sum(map(len, given['gateway']))} events in {len(given['gateway'])} streams, all equal")


def test_an_event_that_differs_or_is_missing_is_told() -> None:
    assert differences([["a", "b"]], [["a", "b"]]) == []
    assert differences([["a", "b"]], [["a", "c"]]) == ["stream 0: 2 and 2 events; event 1: b and c"]
    assert differences([["a", "b"]], [["a"]]) == ["stream 0: 2 and 1 events"]
    assert differences([["a"], []], [["a"]]) == ["2 streams directly, 1 through the gateway"]
