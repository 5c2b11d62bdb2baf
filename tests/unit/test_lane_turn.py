"""A lane's turns at barriers: what each lane is given, and when the others go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.act.consumer.rules.lane_turn import BarrierReached, LaneTurn
from tailrace.act.consumer.rules.need import Pulled

MARK = {"_data": "F0"}


@dataclass
class Item:
    order: bytes
    is_barrier: bool = False
    is_invalidate: bool = False
    error: None = None

    @property
    def event(self) -> Any:
        return ("event", self.order)

    @property
    def token(self) -> Mapping[str, Any]:
        return {"_data": self.order.decode()}


def pulled(turn: LaneTurn, item: Item | None = None) -> Pulled:
    return turn.pull(item, lambda: MARK)


def test_a_change_is_given_as_it_is_and_without_one_how_far_the_stream_has_come() -> None:
    turn = LaneTurn(1, b"", lambda: [b"", b""])
    assert pulled(turn, Item(b"A1")) == Pulled(("event", b"A1"), {"_data": "A1"})
    assert pulled(turn) == Pulled(None, MARK)
    assert not turn.is_waiting


def test_a_lane_gives_the_barrier_s_token_once_and_waits_until_lane_0_is_past_it() -> None:
    places, ended = [b"A0", b"A0"], []
    turn = LaneTurn(1, b"A0", lambda: places, ended.append)
    reached = pulled(turn, Item(b"B0", is_barrier=True, is_invalidate=True))
    assert isinstance(reached.event, BarrierReached)
    assert (reached.event["_id"], reached.event["operationType"]) == ({"_data": "B0"}, "barrier")
    assert reached.token == {"_data": "B0"}
    for _ in range(2):
        assert turn.is_waiting
        assert pulled(turn) == Pulled(None, None)
    assert ended == []
    places[0] = b"B0"
    assert pulled(turn) == Pulled(None, None)
    assert not turn.is_waiting
    assert ended == [{"_data": "B0"}]


def test_a_lane_that_had_committed_the_barrier_does_not_give_it_again() -> None:
    turn = LaneTurn(1, b"B0", lambda: [b"A0", b"B0"])
    assert pulled(turn, Item(b"B0", is_barrier=True)) == Pulled(None, None)
    assert turn.is_waiting
    again = LaneTurn(1, b"AF", lambda: [b"A0", b"AF"])
    assert isinstance(pulled(again, Item(b"B0", is_barrier=True)).event, BarrierReached)


def test_lane_0_is_given_the_barrier_itself_once_all_others_are_there() -> None:
    places = [b"A0", b"B0", b"A9"]
    turn = LaneTurn(0, b"A0", lambda: places)
    assert pulled(turn, Item(b"B0", is_barrier=True, is_invalidate=True)) == Pulled(None, None)
    assert turn.is_waiting
    places[2] = b"B1"
    assert pulled(turn) == Pulled(("event", b"B0"), {"_data": "B0"}, invalidate=True)
    assert not turn.is_waiting
