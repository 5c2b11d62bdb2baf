"""A slice of the siege (``make gateway-siege``): every honest event comes despite hostile tenants. How soon is measured
by the command, on a machine of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.embedded import ReplicaSet
from tests.gateway.running import GatewayProcess
from tests.gateway.siege import KINDS, Progress, Seen, besieged, honest, make_users, report, uri_of_root

pytestmark = pytest.mark.mongod


@pytest.mark.slow  # each kind by itself: test_hostile.py, test_hostile_stages.py
def test_every_honest_event_comes_beside_hostile_tenants(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    deployment = start_replica_set(1, root_password="root")
    gateway = start_gateway(deployment.uri, "--stage-seconds", "1", "--stage-memory-mb", "400")
    uri = uri_of_root(deployment.uri, gateway)
    make_users(uri, list(KINDS), 1)
    with besieged(uri, list(KINDS), 1, 300, seed=5):
        seen = honest(uri, 4)
    assert seen.is_whole
    assert gateway.process.poll() is None


@pytest.mark.parametrize(
    ("streams", "slow"),
    [([[0, 1], [0]], 0.001), ([[0, 1], [0, 1, 1]], 0.001), ([[1, 0], [0, 1]], 0.001), ([[0, 1], [0, 1]], 0.011)],
    ids=["lost", "twice", "out of order", "slow"],
)
def test_the_siege_finds_faults(streams: list[list[int]], slow: float) -> None:
    good = Seen([0.001], [0.001], [[0, 1], [0, 1]], 2)
    assert report(good, good)
    assert not report(good, Seen([slow], [0.001], streams, 2))


def test_the_progress_of_the_last_half_minute_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    progress, seen = Progress("besieged", 3600), Seen([0.5], [0.5], [[0, 1], [0]], 2)
    progress.tell(seen)
    progress._told -= 31
    progress.tell(seen)
    seen.pings.append(0.001)
    progress._told -= 31
    progress.tell(seen)
    first, second = capsys.readouterr().err.splitlines()
    assert "of 3600 s, 2 events written, 1 on their way; 99th percentiles: ping 500.0 ms, event 500.0 ms" in first
    assert second.endswith("ping 1.0 ms, event none")
