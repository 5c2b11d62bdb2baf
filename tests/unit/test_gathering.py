"""Which commits wait for those of other lanes, played on a clock of the test's own."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import pytest

from tailrace.act.consumer.rules.gathering import Gathering

_REQUEST_S = 0.01


def acquainted(lanes: Sequence[str], pause: float) -> Gathering:
    """After ten requests that all lanes shared; the last was answered at 10."""
    gathering = Gathering()
    for turn in range(1, 11):
        for lane in lanes:
            gathering.note_commit(lane, turn - _REQUEST_S)
        gathering.note_sent(lanes)
        gathering.note_answered(lanes, turn - _REQUEST_S, turn)
        for lane in lanes:
            gathering.note_commit(lane, turn + pause)
    gathering.note_sent(lanes)
    gathering.note_answered(lanes, 10, 10 + _REQUEST_S)
    return gathering


def test_the_first_commits_wait_for_nobody() -> None:
    gathering = Gathering()
    gathering.note_commit("a", 1.0)
    assert gathering.wait(1.0, 1.0) <= 0
    gathering.note_sent(["a"])
    gathering.note_commit("b", 1.001)
    assert gathering.wait(1.001, 1.001) <= 0


def test_a_quick_lane_is_waited_for_but_not_for_long() -> None:
    gathering = acquainted("ab", 0.0005)
    now = 10 + _REQUEST_S + 0.0005
    gathering.note_commit("a", now)
    left = gathering.wait(now, now)
    assert 0 < left < _REQUEST_S
    assert gathering.wait(now, now + left) <= 0
    gathering.note_commit("b", now + left / 2)
    assert gathering.wait(now, now + left / 2) <= 0


def test_a_lane_whose_handler_takes_as_long_as_a_request_is_not_waited_for() -> None:
    gathering = acquainted("ab", _REQUEST_S)
    now = 10 + 2 * _REQUEST_S
    gathering.note_commit("a", now)
    assert gathering.wait(now, now) <= 0


def test_requests_without_an_answer_do_not_make_lanes_patient() -> None:
    gathering = acquainted("ab", 0.0005)
    gathering.note_commit("a", 11.0)
    gathering.note_sent("a")
    gathering.note_answered("a", None, 1000.0)
    gathering.note_commit("a", 1000.0005)
    gathering.note_sent("a")
    gathering.note_commit("b", 1000.0006)
    assert gathering.wait(1000.0006, 1000.0006) < _REQUEST_S


def test_slow_requests_do_not_make_lanes_wait_for_seconds() -> None:
    gathering = Gathering()
    for turn in range(100, 200, 10):
        for lane in "ab":
            gathering.note_commit(lane, turn + 0.001)
        gathering.note_sent("ab")
        gathering.note_answered("ab", turn + 0.001, turn + 10)
    gathering.note_commit("a", 200.001)
    assert 0 < gathering.wait(200.001, 200.001) <= 0.03


def played(
    pauses: Sequence[Callable[[], float]], request: Callable[[], float], requests: int
) -> tuple[list[int], list[float], list[int]]:
    """Lanes that work and commit again and again. Returns how many commits each request had, how long the first of them
    waited, and whose it was."""
    gathering, waiting, sizes, waits = Gathering(), dict[int, float](), list[int](), list[float]()
    firsts: list[int] = []
    events = [(random.Random(lane).random() * _REQUEST_S, "came", (lane,), 0.0) for lane in range(len(pauses))]
    heapq.heapify(events)
    while len(sizes) < requests:
        now, what, lanes, begun = heapq.heappop(events)
        if what == "came":
            gathering.note_commit(str(lanes[0]), now)
            waiting[lanes[0]] = now
        elif what == "answered":
            gathering.note_answered(map(str, lanes), begun, now)
            for lane in lanes:
                heapq.heappush(events, (now + pauses[lane](), "came", (lane,), 0.0))
        if not waiting:
            continue
        since = min(waiting.values())
        left = gathering.wait(since, now)
        if left > 0:
            heapq.heappush(events, (now + left, "look", (), 0.0))
            continue
        gathering.note_sent(map(str, waiting))
        sizes.append(len(waiting))
        waits.append(now - since)
        firsts.append(min(waiting, key=waiting.__getitem__))
        heapq.heappush(events, (now + request(), "answered", tuple(waiting), now))
        waiting.clear()
    return sizes, waits, firsts


@pytest.mark.parametrize("seed", range(20))
def test_quick_lanes_that_are_out_of_step_come_together(seed: int) -> None:
    """The lanes begin at any time. An earlier rule left them in two groups for ever, each of which waited for the
    other."""
    rng = random.Random(seed)
    lanes = rng.randrange(2, 9)
    pauses = [lambda: rng.uniform(0.02, 0.1) * _REQUEST_S] * lanes
    sizes, waits, _ = played(pauses, lambda: rng.uniform(0.7, 1.4) * _REQUEST_S, 200)
    assert sum(size == lanes for size in sizes[100:]) >= 95
    assert max(waits) < 2 * _REQUEST_S


@pytest.mark.parametrize("pause", [(0.65, 0.9), (1, 3), (5, 200), (0.65, 200)])
@pytest.mark.parametrize("lanes", [2, 4, 16])
def test_where_all_lanes_are_slow_none_waits_for_another(lanes: int, pause: tuple[float, float]) -> None:
    """In units of a request. Earlier only four lanes with pauses of one to three requests were tried."""
    rng = random.Random(lanes)
    pauses = [lambda: rng.uniform(*pause) * _REQUEST_S] * lanes
    _, waits, _ = played(pauses, lambda: rng.uniform(0.7, 1.4) * _REQUEST_S, 400)
    assert max(waits) == 0


@pytest.mark.parametrize("slow", [1, 3, 15])
def test_a_quick_lane_waits_for_none_of_the_slow_ones(slow: int) -> None:
    """The previous test's name promises this too, but it only plays slow lanes."""
    rng = random.Random(slow)
    pauses = [lambda: 0.05 * _REQUEST_S] + [lambda: rng.uniform(1, 30) * _REQUEST_S] * slow
    _, waits, firsts = played(pauses, lambda: _REQUEST_S, 600)
    of_quick = [wait for wait, first in zip(waits, firsts, strict=True) if first == 0]
    assert len(of_quick) > 50
    assert max(of_quick) == 0


def test_a_slow_lane_does_not_hold_up_the_quick_ones() -> None:
    rng = random.Random(1)
    pauses = [lambda: 0.05 * _REQUEST_S] * 3 + [lambda: rng.uniform(2, 5) * _REQUEST_S]
    sizes, waits, _ = played(pauses, lambda: _REQUEST_S, 300)
    assert sum(size >= 3 for size in sizes[100:]) >= 100
    assert sum(waits) / len(waits) < 0.3 * _REQUEST_S
