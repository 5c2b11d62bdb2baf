"""What a listener's statistics say about its progress: on a quiet stream, and while others hold the lease.

Tests had only looked at the lag of listeners with changes to handle. That of a quiet one grew to half a minute between
two commits of its position, and one that had lost its lease kept its position from that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.act.consumer.metrics import ListenerCollector
from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.consumer.rules.need import CommitPosition, ListenerNeed, PullChange, Pulled
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.settings import ListenerStatistics
from tailrace.act.consumer.standing import ListenerLag
from tests.unit.test_listener_losses import World, token


def statistics_after(pulls: Sequence[Pulled | Exception], stored: StreamPosition) -> list[int]:
    """``position_time`` before each pull."""
    seen: list[int] = []
    left = list(pulls)

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, PullChange):
            seen.append(world.logic.statistics.position_time)
            if not left:
                world.logic.stopping = True
                return Pulled(None, None)
            given = left.pop(0)
            if isinstance(given, Exception):
                raise given
            return given
        return None

    world = World(stored, answers)
    world.run()
    seen.append(len(world.of(CommitPosition)))
    return seen


def test_a_quiet_stream_moves_on_what_is_told_though_nothing_is_committed() -> None:
    pulls = [Pulled(None, token(110)), Pulled(None, token(120)), Pulled(None, None)]
    assert statistics_after(pulls, StreamPosition(token(100))) == [100, 110, 120, 120, 0]


def test_a_change_after_a_quiet_time_moves_it_further_and_nothing_moves_it_back() -> None:
    pulls = [Pulled(None, token(110)), Pulled({}, token(105)), Pulled({}, token(130))]
    assert statistics_after(pulls, StreamPosition(token(100)))[:4] == [100, 110, 110, 130]


def test_where_it_begins_is_known_before_the_first_change() -> None:
    assert statistics_after([], StreamPosition(at=Timestamp(90, 1)))[0] == 90


def test_one_that_has_lost_its_lease_knows_of_no_position() -> None:
    seen: list[int] = []

    def answers(need: ListenerNeed) -> Any:
        if isinstance(need, PullChange):
            if not world.logic.statistics.leases_lost:
                ownership = world.logic.ownership
                assert ownership is not None
                ownership.lose(LeaseLost("gone"))
                return Pulled(None, token(200))
            world.logic.stopping = True
        elif world.logic.statistics.leases_lost:
            seen.append(world.logic.statistics.position_time)
        return Pulled(None, None)

    world = World(StreamPosition(token(100)), answers)
    world.run()
    assert 200 not in seen


@pytest.mark.parametrize(
    ("lag", "shown"),
    [
        (ListenerLag(7.0, holds=True), 7.0),
        (ListenerLag(600.0, holds=False), 600.0),
        (ListenerLag(None, holds=False), None),
    ],
)
def test_the_lag_is_that_of_who_looks_and_none_where_it_is_unknown(lag: ListenerLag, shown: float | None) -> None:
    listener = SimpleNamespace(resource="r", statistics=ListenerStatistics(position_time=1))
    families = {family.name: family for family in ListenerCollector([listener], lambda _: lag).collect()}
    samples = [sample.value for sample in families["tailrace_listener_lag_seconds"].samples]
    assert samples == ([] if shown is None else [shown])
    (holds,) = families["tailrace_listener_holds_lease"].samples
    assert holds.value == (1.0 if lag.holds else 0.0)
