"""What a process with lanes asks of its lease store, need by need: when it looks again, what it writes, and what it
gives back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.errors import LaneHistoryLost, LeaseLost, LeaseStoreUnavailable, OwnerNotUnique
from tailrace.act.consumer.rules.lane_group import GroupSteps, LaneGroupLogic
from tailrace.act.consumer.rules.lane_need import (
    FindBeginning,
    GiveLease,
    HoldLease,
    ReadRecords,
    Record,
    RunLanes,
    TakeLease,
    WriteRecord,
)
from tailrace.act.consumer.rules.lanes import LanePlan, seal
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.need import Outcome, Pause
from tailrace.act.consumer.rules.position import StreamPosition

BEGIN = StreamPosition(at=Timestamp(9, 1))
PLAN = LanePlan(2, BEGIN)
ALL = ReadRecords(("orders", "orders/member.0", "orders/member.1", "orders/1.0", "orders/1.1"))
MEMBER = Lease("orders/member.0", "one", 1)
NOTHING: frozenset[int] = frozenset()


def logic(lanes: int | None = 2, *, plan: LanePlan | None = PLAN) -> LaneGroupLogic:
    made = LaneGroupLogic("orders", "one", lanes, 6.0)
    made.plan = plan
    return made


def talk(steps: GroupSteps, *turns: tuple[Any, Any]) -> Any:
    """Each of the needs is asked in its turn, and answered; what is asked then."""
    need = next(steps)
    for expected, answer in turns:
        assert need == expected
        failed = isinstance(answer, Exception)
        need = steps.send(Outcome(0.0, 0.0, None if failed else answer, answer if failed else None))
    return need


def own(plan: LanePlan = PLAN, **fields: Any) -> Record:
    return Record(Lease("orders", None, 1, plan.to_document(), **fields), is_free=True)


def lane(number: int, owner: str | None = None, *, reserved: bool = False, **fields: Any) -> Record:
    record = Lease(f"orders/1.{number}", owner, 1, **fields)
    return Record(record, is_free=owner is None, is_reserved=reserved)


def soon() -> Pause:
    return Pause(0.1, "until the next look at the leases")


def later() -> Pause:
    return Pause(1.0, "until the next look at the leases")


def test_a_first_process_writes_the_plan_and_looks_again_soon() -> None:
    group = logic(plan=None)
    lease = Lease("orders", "one", 1, BEGIN.to_document())
    needs = [
        (ReadRecords(("orders",)), (None,)),
        (TakeLease("orders"), lease),
        (WriteRecord(lease, PLAN.to_document()), None),
        (GiveLease(lease), None),
    ]
    assert talk(group.steps(), *needs) == soon()
    assert group.plan == PLAN


@pytest.mark.parametrize("position", [None, {"at": Timestamp(9, 1), "snapshot": {}}], ids=["none", "a copy"])
def test_without_a_position_the_beginning_is_looked_for_first(position: Any) -> None:
    group = logic(plan=None)
    lease = Lease("orders", "one", 1, position)
    needs = [
        (ReadRecords(("orders",)), (None,)),
        (TakeLease("orders"), lease),
        (GiveLease(lease), None),
        (FindBeginning(), None),
    ]
    assert talk(group.steps(), *needs) == soon()
    assert group.plan is None


def test_a_plan_that_is_there_is_taken_as_it_is_and_asked_to_change_where_another_number_is_wanted() -> None:
    for lanes in (2, None):
        assert talk(logic(lanes, plan=None).steps(), (ReadRecords(("orders",)), (own(),))) == soon()
    group, lease = logic(3, plan=None), Lease("orders", "one", 2, PLAN.to_document())
    asked = PLAN.with_request(3)
    needs = [
        (ReadRecords(("orders",)), (own(),)),
        (TakeLease("orders"), lease),
        (WriteRecord(lease, asked.to_document()), None),
        (GiveLease(lease), None),
    ]
    assert talk(group.steps(), *needs) == soon()
    assert group.plan == asked


def test_a_resource_that_is_held_still_is_looked_at_seldom_and_one_that_others_change_soon() -> None:
    group = logic(plan=None)
    paused = Record(Lease("orders", None, 1, None, paused_at=datetime(2026, 1, 1, tzinfo=UTC)), is_free=True)
    steps = group.steps()
    assert talk(steps, (ReadRecords(("orders",)), (paused,))) == later()
    assert group.paused_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert talk(logic(plan=None).steps(), (ReadRecords(("orders",)), (None,)), (TakeLease("orders"), None)) == soon()


def test_a_process_takes_part_and_takes_its_share_of_the_lanes() -> None:
    group = logic()
    steps = group.steps()
    taken = [(ALL, (own(), None, None, lane(0), lane(1))), (TakeLease("orders/member.0"), MEMBER)]
    assert talk(steps, *taken, (RunLanes(PLAN, frozenset({0, 1})), NOTHING)) == soon()
    member = Record(MEMBER, is_free=False)
    turns = [
        (ALL, (own(), member, None, lane(0), lane(1))),
        (HoldLease(MEMBER), None),
        (RunLanes(PLAN, frozenset({0, 1})), frozenset({0, 1})),
    ]
    assert talk(steps, *turns) == soon()  # until their leases say so
    turns[0] = (ALL, (own(), member, None, lane(0, "one"), lane(1, "one")))
    assert talk(steps, *turns) == later()


def test_a_process_for_which_no_slot_is_left_runs_nothing() -> None:
    others = [Record(Lease(f"orders/member.{slot}", owner, 1), is_free=False) for slot, owner in enumerate(("a", "b"))]
    turns = [(ALL, (own(), *others, lane(0, "a"), lane(1, "b"))), (RunLanes(PLAN, NOTHING), NOTHING)]
    assert talk(logic().steps(), *turns) == later()


def test_lanes_that_an_operator_keeps_from_it_are_left_alone_and_those_left_to_it_are_taken() -> None:
    group = logic()
    group._member = MEMBER
    until = datetime(2027, 1, 1, tzinfo=UTC)
    records = (
        lane(0, reserved=True, reserved_for="other", reserved_until=until),
        lane(1, reserved=True, reserved_for="one", reserved_until=until),
    )
    turns = [(ALL, (own(), Record(MEMBER, is_free=False), None, *records)), (HoldLease(MEMBER), None)]
    assert talk(group.steps(), *turns) == RunLanes(PLAN, frozenset({1}))
    held = lane(0, paused_at=until)
    group = logic()
    group._member = MEMBER
    turns[0] = (ALL, (own(), Record(MEMBER, is_free=False), None, held, lane(1)))
    assert talk(group.steps(), *turns) == RunLanes(PLAN, frozenset({1}))


def test_another_plan_is_followed_once_all_lanes_of_this_one_have_ended() -> None:
    group, later_plan = logic(), PLAN.with_request(3)
    records = (own(later_plan), None, None, None, None)
    steps = group.steps()
    assert talk(steps, (ALL, records), (RunLanes(PLAN, NOTHING), frozenset({1}))) == soon()
    assert group.plan == PLAN
    assert talk(steps, (ALL, records), (RunLanes(PLAN, NOTHING), NOTHING)) == soon()
    assert group.plan == later_plan


def test_a_change_of_the_number_seals_every_lane_and_writes_the_next_plan() -> None:
    asked = PLAN.with_request(1)
    group = logic(plan=asked)
    first, second = Lease("orders/1.0", "one", 2, BEGIN.to_document()), Lease("orders/1.1", "one", 2)
    lease = Lease("orders", "one", 5, asked.to_document())
    records = (ALL, (own(asked), None, None, lane(0), lane(1)))
    turns = [
        records,
        (RunLanes(asked, NOTHING), NOTHING),
        (TakeLease("orders"), lease),
        (TakeLease("orders/1.0"), first),
        (WriteRecord(first, seal(first.position)), None),
        (GiveLease(first), None),
        (TakeLease("orders/1.1"), second),
        (WriteRecord(second, seal(None)), None),
        (GiveLease(second), None),
        (WriteRecord(lease, asked.next_generation([BEGIN, None]).to_document()), None),
        (GiveLease(lease), None),
    ]
    assert talk(group.steps(), *turns) == soon()
    still_held = [*turns[:3], (TakeLease("orders/1.0"), None), (GiveLease(lease), None)]
    assert talk(logic(plan=asked).steps(), *still_held) == soon()
    assert talk(logic(plan=asked).steps(), records, (RunLanes(asked, NOTHING), frozenset({0}))) == soon()
    assert talk(logic(plan=asked).steps(), *turns[:2], (TakeLease("orders"), None)) == soon()


def test_what_an_operator_wants_left_out_is_left_out_before_the_number_changes() -> None:
    asked = PLAN.with_request(1)
    group = logic(plan=asked)
    group._member = MEMBER
    records = (own(asked), Record(MEMBER, is_free=False), None, lane(0, skip={"letters": "d"}), lane(1))
    assert talk(group.steps(), (ALL, records)) == HoldLease(MEMBER)
    is_sealed_already = (*records[:4], lane(1, position=seal(None)))
    assert talk(logic(plan=asked).steps(), (ALL, is_sealed_already)) == RunLanes(asked, NOTHING)
    copies = PLAN.with_copy_request()
    records = (own(copies), *records[1:])
    assert talk(logic(plan=copies).steps(), (ALL, records)) == RunLanes(copies, NOTHING)


def test_lost_history_is_followed_by_a_copy_that_is_asked_for_once() -> None:
    group = logic()
    group._member = MEMBER
    lease = Lease("orders", "one", 5, PLAN.to_document())
    records = (ALL, (own(), Record(MEMBER, is_free=False), None, lane(0, "one"), lane(1, "one")))
    run = (RunLanes(PLAN, frozenset({0, 1})), frozenset({0, 1}))
    steps = group.steps()
    assert talk(steps, records, (HoldLease(MEMBER), None), (run[0], LaneHistoryLost("lost"))) == soon()
    turns = [
        records,
        (HoldLease(MEMBER), None),
        run,
        (TakeLease("orders"), lease),
        (WriteRecord(lease, PLAN.with_copy_request().to_document()), None),
        (GiveLease(lease), None),
    ]
    assert talk(steps, *turns) == soon()
    assert talk(steps, *turns[:3]) == later()


@pytest.mark.parametrize("plan", [LanePlan(2, BEGIN, 2), LanePlan(2, BEGIN, beginning={})], ids=["later", "copied"])
def test_a_copy_is_not_asked_for_where_another_process_was_there_first(plan: LanePlan) -> None:
    group = logic()
    group._member, group._lost = MEMBER, PLAN.generation
    lease = Lease("orders", "one", 5, plan.to_document())
    turns = [
        (ALL, (own(), Record(MEMBER, is_free=False), None, lane(0, "one"), lane(1, "one"))),
        (HoldLease(MEMBER), None),
        (RunLanes(PLAN, frozenset({0, 1})), frozenset({0, 1})),
        (TakeLease("orders"), lease),
        (GiveLease(lease), None),
    ]
    steps = group.steps()
    assert talk(steps, *turns) == soon()
    assert talk(steps, *turns[:3]) == later()


def test_while_the_beginning_is_copied_nobody_runs_a_lane() -> None:
    plan = LanePlan(2, BEGIN, beginning={})
    turns = [(ALL, (own(plan), None, None, None, None)), (FindBeginning(), None)]
    assert talk(logic(plan=plan).steps(), *turns) == later()


def test_a_process_stays_a_member_while_the_resource_is_held_still() -> None:
    group = logic()
    group._member = MEMBER
    records = (own(paused_at=datetime(2026, 1, 1, tzinfo=UTC)), None, None, None, None)
    turns = [(ALL, records), (RunLanes(PLAN, NOTHING), NOTHING), (HoldLease(MEMBER), None)]
    assert talk(group.steps(), *turns) == later()


def test_a_second_process_of_the_same_id_ends_it_unless_it_is_long_ago() -> None:
    def stolen_and_then(calm: int) -> LaneGroupLogic:
        group = logic()
        steps = group.steps()
        for _ in range(2):
            assert talk(steps, (ALL, OwnerNotUnique("same id"))) == soon()
        for _ in range(calm):
            assert talk(steps, (ALL, LeaseStoreUnavailable("away"))) == later()
        assert talk(steps, (ALL, OwnerNotUnique("same id"))) == soon()
        return group

    with pytest.raises(OwnerNotUnique):
        stolen_and_then(10)
    assert stolen_and_then(11)._stolen == 1


def test_a_member_s_lease_that_is_lost_is_taken_again() -> None:
    group = logic()
    group._member = MEMBER
    taken = Lease("orders/member.1", "one", 1)
    other = Record(Lease("orders/member.0", "other", 2), is_free=False)
    turns = [
        (ALL, (own(), other, None, lane(0), lane(1))),
        (HoldLease(MEMBER), LeaseLost("taken")),
        (TakeLease("orders/member.1"), taken),
    ]
    assert isinstance(talk(group.steps(), *turns), RunLanes)
    assert (group._member, group._slot) == (taken, 1)


def test_a_process_that_is_stopped_waits_for_its_lanes_and_gives_its_lease_back() -> None:
    group = logic()
    group._member, group.stopping = MEMBER, True
    waits = Pause(0.1, "until the lanes have ended")
    turns = [
        (RunLanes(PLAN, NOTHING), frozenset({1})),
        (waits, None),
        (RunLanes(PLAN, NOTHING), LaneHistoryLost("the next owner finds it too")),
        (waits, None),
        (RunLanes(PLAN, NOTHING), NOTHING),
    ]
    steps = group.steps()
    assert talk(steps, *turns) == GiveLease(MEMBER)
    with pytest.raises(StopIteration):
        steps.send(Outcome(0.0, 0.0))
