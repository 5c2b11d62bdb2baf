"""Lanes under the scheduler of ``lanes_world``: rebalancing, changes of their number, barriers, crashes, pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tailrace.act.consumer.rules import lane_group, lease
from tailrace.act.consumer.rules.errors import HandlerFailed
from tailrace.act.consumer.rules.lane_group import GroupSteps, LaneGroupLogic
from tailrace.act.consumer.rules.lane_turn import LaneTurn
from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.listener import ListenerLogic, Steps
from tailrace.act.consumer.rules.need import Pulled
from tailrace.act.consumer.rules.ownership import Ownership
from tests.amounts import amount
from tests.simulation.lanes_world import DECISIONS, InvariantBrokenError, Rules, World


def failing_seed(
    seeds: range,
    rules: Rules | None = None,
    *,
    caught_by: type[Exception] = InvariantBrokenError,
    **options: Any,
) -> tuple[int, str] | None:
    """``caught_by``: an error that counts as finding the fault, beside a broken invariant."""
    for seed in seeds:
        for in_transaction in (False, True):
            try:
                World(seed, in_transaction=in_transaction, rules=rules, **options).run()
            except (InvariantBrokenError, caught_by) as error:
                return seed, str(error)
    return None


def test_lanes_hold_their_promises() -> None:
    assert failing_seed(range(amount(12, 40))) is None


def test_lanes_hold_their_promises_while_what_they_are_chosen_by_changes() -> None:
    assert failing_seed(range(amount(6, 40)), changes_keys=True) is None


def test_lanes_hold_their_promises_by_a_key_of_their_own() -> None:
    assert failing_seed(range(amount(6, 40)), lane_key="path:half") is None


def test_lanes_by_the_id_where_another_key_is_wished_for_are_found() -> None:
    """Lanes of an outbox were once like this: messages of one key came out of order."""
    rules = Rules(placed=lambda event, _key: event.placed(""))
    found = failing_seed(range(1000), rules, lane_key="path:half")
    assert found is not None
    assert "its lane key" in found[1]


def test_processes_with_one_owner_id_do_not_go_on_beside_each_other() -> None:
    assert failing_seed(range(amount(6, 40)), twins=True) is None


def test_processes_that_take_each_other_s_leases_for_ever_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_group, "_STOLEN_MAX", 1 << 30)
    found = failing_seed(range(1000), twins=True)
    assert found is not None
    assert "one owner id" in found[1]


class GoesOnWhereItIsToStop(ListenerLogic):
    """The position is written after the change that the policy stops at."""

    def _handle(self, owned: Ownership, batch: Sequence[Pulled]) -> Steps:
        first = self._changes(owned, batch)[0]
        try:
            return (yield from super()._handle(owned, batch))
        except HandlerFailed:
            self._moved(first.position)
            raise


def test_lanes_that_pass_over_where_the_policy_says_stop_are_found() -> None:
    assert failing_seed(range(1000), Rules(logic=GoesOnWhereItIsToStop)) is not None


def test_error_policies_say_everything_in_some_runs() -> None:
    judged: Counter[str] = Counter()
    for seed in range(20):
        world = World(seed, in_transaction=False)
        world.run()
        judged += world.judged
    assert min(judged[decision] for decision in DECISIONS) > 2, judged


def test_floors_that_are_judged_by_another_lane_key_are_found() -> None:
    rules = Rules(is_done=lambda plan, event, _placed_by: plan.is_done(event))
    assert failing_seed(range(1000), rules, changes_keys=True) is not None


@pytest.mark.slow
@pytest.mark.parametrize("changes_keys", [False, True])
def test_lanes_hold_their_promises_over_many_seeds(changes_keys: bool) -> None:
    assert failing_seed(range(5000), changes_keys=changes_keys) is None


class NoBarriers(LaneTurn):
    """Lane 0 does not wait for the others, nor they for it."""

    def __init__(self, lane: int, done: bytes, places: Any, ends: Any = None) -> None:
        def all_far(*_: object) -> Sequence[bytes]:
            return [b"\xff"] * 1100

        super().__init__(lane, done, all_far, ends)


class OthersDoNotWait(LaneTurn):
    """Lane 0 waits for the others, but they go on after the barrier."""

    def _at_barrier(self, barrier: Any) -> Any:
        pulled = super()._at_barrier(barrier)
        self._barrier = None
        return pulled


@pytest.mark.parametrize(
    ("rules", "first"),
    [
        (Rules(turn=NoBarriers), 0),
        (Rules(turn=OthersDoNotWait), 0),
        (Rules(is_done=lambda *_: False), 0),
        (Rules(fences_generations=False), 730),
        (Rules(answers_each=False), 105),
    ],
    ids=[
        "no barriers",
        "the others do not wait",
        "no floors",
        "no generation in the fence",
        "one answer for all",
    ],
)
def test_a_planted_fault_is_found(rules: Rules, first: int) -> None:
    """A simulation that finds nothing shows nothing. ``first``: the search begins shortly before a seed that found the
    fault, since hundreds that do not find it take 20 s of processor. If that seed's run has changed, the search finds
    another one."""
    assert failing_seed(range(first, first + 1000), rules) is not None


def test_lanes_share_requests_in_most_runs() -> None:
    """No earlier run had lanes share a request, so none lost one that several lanes waited for."""
    shared = []
    for seed in range(20):
        world = World(seed, in_transaction=False)
        world.run()
        shared.append(world.shared)
    assert sum(count > 0 for count in shared) > 10


def test_everything_is_copied_again_in_some_runs() -> None:
    """A simulation without lost history would show nothing about it."""
    copies = []
    for seed in range(40):
        world = World(seed, in_transaction=False)
        world.run()
        copies.append(world.copies)
    assert sum(copies) >= 5


class AsksForACopyAgain(LaneGroupLogic):
    """The need for a copy outlives the generation that lost its history."""

    def _ask_for_copy(self, lost: int) -> GroupSteps:
        assert self.plan is not None
        return (yield from super()._ask_for_copy(self.plan.generation))


def test_a_second_copy_of_everything_is_found() -> None:
    """In the simulation each lane lost its history separately, so no process asked late for a copy that another had
    made. On a real server all lanes lose it at once, and a busy machine copied everything twice."""
    found = failing_seed(range(1000), Rules(group=AsksForACopyAgain))
    assert found is not None
    assert "has lost nothing" in found[1]


def test_lanes_that_are_no_newer_than_the_copy_before_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence can find it too: it tells a lane that holds its lease about a newer owner, which ends the listener."""
    after_copy = LanePlan.after_copy

    def same_generation(plan: LanePlan, position: Any, resource: str) -> LanePlan:
        return replace(after_copy(plan, position, resource), generation=plan.generation)

    monkeypatch.setattr(LanePlan, "after_copy", same_generation)
    # From shortly before a seed that finds it, as in ``test_a_planted_fault_is_found``.
    assert failing_seed(range(116, 1116), caught_by=HandlerFailed) is not None


def test_lanes_whose_late_commits_set_the_position_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In earlier tests no commit arrived after its time-out: a request was lost, or carried out at once."""
    monkeypatch.setattr(lease, "is_behind", lambda position, record: False)
    found = failing_seed(range(1000))
    assert found is not None
    assert "went back" in found[1]


def test_lanes_that_are_not_sealed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_group, "seal", lambda position: position)
    monkeypatch.setattr(lane_group, "is_sealed", lambda position: position is None)
    assert failing_seed(range(19, 1019)) is not None
