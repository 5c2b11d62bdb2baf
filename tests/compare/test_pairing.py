"""Which events of two streams belong together, and what is said of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bson
import pytest

from tailrace.core.event.resume_token import encode_event_token
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.watch.compare.pairing import OURS, SERVER, EventDifference, Pair, Pairing, differing_place

_UUID = bytes(range(16))
_FAR = ClusterTime.of(1_000_000, 0)


def event(number: int, *, time: int | None = None, operation: str = "insert", **fields: Any) -> bytes:
    """The event of one document; ``time`` is its second, by default ``number``."""
    token = encode_event_token(
        ClusterTime.of(1000 + (number if time is None else time), 1),
        version=1,
        txn_op_index=0,
        from_invalidate=False,
        uuid=_UUID,
        identifier=bson.encode({"_id": number}),
    )
    body = {"operationType": operation, "documentKey": {"_id": number}, **fields}
    return bson.encode({"_id": bson.decode(token), **body})


def paired(
    server: list[bytes], ours: list[bytes], *, bytes_max: int = 1 << 20, looks_up: bool = False
) -> tuple[int, list[EventDifference]]:
    """How many events are equal, and the differences, of two streams that have both gone on."""
    pairing = Pairing(bytes_max=bytes_max, looks_up=looks_up)
    found: list[Pair | EventDifference] = []
    for side, events in ((SERVER, server), (OURS, ours)):
        for raw in events:
            pairing.put(side, raw)
        pairing.promise(side, _FAR)
    found += pairing.results()
    assert not pairing.waiting(SERVER)
    assert not pairing.waiting(OURS)
    return sum(isinstance(one, Pair) for one in found), [one for one in found if isinstance(one, EventDifference)]


EVENTS = [event(number) for number in range(6)]


def _with_another_token(events: list[bytes]) -> list[bytes]:
    moved = bson.decode(event(2, operation="update"))
    other = bson.decode(event(77, time=2))
    raw = bson.encode({**bson.decode(events[2]), "_id": other["_id"]})
    assert moved["_id"] != other["_id"]
    return [*events[:2], raw, *events[3:]]


@pytest.mark.parametrize(
    ("alter", "kind", "equal"),
    [
        (lambda events: [*events[:2], event(2, n=1), *events[3:]], "bytes", 5),
        (lambda events: [*events[:2], event(2, operation="delete"), *events[3:]], "bytes", 5),
        (_with_another_token, "token", 5),
        (lambda events: events[:2] + events[3:], "missing", 5),
        (lambda events: events[:-1], "missing", 5),
        (lambda events: events[:3] + events[2:], "twice", 6),
        (lambda events: [*events, events[-1]], "twice", 6),
        (lambda events: [*events[:3], event(40, time=2), *events[3:]], "extra", 6),
        (lambda events: [*events[:2], events[3], events[2], *events[4:]], "order", 6),
    ],
)
def test_each_kind_of_difference_is_told_once(
    alter: Callable[[list[bytes]], list[bytes]], kind: str, equal: int
) -> None:
    found_equal, differences = paired(EVENTS, alter(EVENTS))
    assert [one.kind for one in differences] == [kind]
    assert found_equal == equal


def test_events_of_one_token_may_come_in_either_order() -> None:
    """If events of two shards have the same token, either may come first. This was reported as a difference; it had
    never been tried with a real mongos, which may choose the other order."""
    first, second = event(2, shard="a"), event(2, shard="b")
    server, ours = ([*EVENTS[:2], *both, *EVENTS[3:]] for both in ((first, second), (second, first)))
    assert paired(server, ours) == (7, [])
    assert [one.kind for one in paired(server, [*ours[:3], *ours[4:]])[1]] == ["missing"]
    assert [one.kind for one in paired(server, [*ours[:4], second, *ours[4:]])[1]] == ["twice"]


def test_equal_streams_differ_in_nothing() -> None:
    assert paired(EVENTS, EVENTS) == (6, [])


def test_what_one_side_has_not_reached_yet_is_no_difference() -> None:
    pairing = Pairing(bytes_max=1 << 20)
    for raw in EVENTS:
        pairing.put(SERVER, raw)
    assert list(pairing.results()) == []
    pairing.promise(OURS, ClusterTime.of(1000, 1))  # everything before the first event: nothing is missing yet
    assert list(pairing.results()) == []
    pairing.put(OURS, EVENTS[0])
    pairing.put(OURS, EVENTS[1])
    assert len(list(pairing.results())) == 2
    pairing.promise(OURS, ClusterTime.of(1002, 2))
    assert [one.kind for one in pairing.results() if isinstance(one, EventDifference)] == ["missing"]
    assert pairing.waiting(SERVER) == 3


def test_a_transaction_of_one_time_waits_for_its_end() -> None:
    many = [event(number, time=5) for number in range(4)]
    pairing = Pairing(bytes_max=1 << 20)
    pairing.put(SERVER, many[0])
    pairing.put(SERVER, many[1])
    pairing.put(OURS, many[1])
    pairing.promise(SERVER, ClusterTime.of(1005, 1))
    pairing.promise(OURS, ClusterTime.of(1005, 1))
    assert list(pairing.results()) == []
    assert [one.kind for one in paired(many, [many[1], many[0], *many[2:]])[1]] == ["order"]
    assert [one.kind for one in paired(many, [many[0], *many[2:]])[1]] == ["missing"]


def test_a_late_event_is_an_order_not_a_new_event() -> None:
    late = [EVENTS[0], *EVENTS[2:], EVENTS[1]]
    assert [one.kind for one in paired(EVENTS, late)[1]] == ["missing", "order"]


def test_events_that_differ_in_everything_at_one_time_are_a_pair() -> None:
    rename = event(3, operation="rename")
    other = event(99, time=3, operation="renamed")
    equal, differences = paired([*EVENTS[:3], rename, *EVENTS[4:]], [*EVENTS[:3], other, *EVENTS[4:]])
    assert (equal, [(one.kind, one.operation, one.place) for one in differences]) == (5, [("bytes", "rename", "_id")])


def test_a_document_that_was_looked_up_at_another_moment_is_no_difference() -> None:
    server = [event(1, operation="update", fullDocument={"a": 1}, updateDescription={"updatedFields": {"a": 1}})]
    later = [event(1, operation="update", fullDocument={"a": 2}, updateDescription={"updatedFields": {"a": 1}})]
    other = [event(1, operation="update", fullDocument={"a": 2}, updateDescription={"updatedFields": {"a": 3}})]
    assert paired(server, later, looks_up=True) == (1, [])
    assert [one.kind for one in paired(server, later)[1]] == ["bytes"]
    assert [one.place for one in paired(server, other, looks_up=True)[1]] == ["fullDocument"]
    inserted = [event(1, fullDocument={"a": 1})], [event(1, fullDocument={"a": 2})]
    assert len(paired(*inserted, looks_up=True)[1]) == 1


def test_a_side_that_is_far_ahead_waits_and_one_with_a_hole_is_compared_all_the_same() -> None:
    """A hole larger than the buffer: what the full side has before the other's next event is missing there."""
    pairing = Pairing(bytes_max=1000)
    assert pairing.has_room(SERVER)
    events = [event(number, text="x" * 100) for number in range(60)]
    found: list[Pair | EventDifference] = []
    pending = {SERVER: events[:], OURS: [events[0], *events[50:]]}
    for _ in range(200):
        for side in (SERVER, OURS):
            if pending[side] and pairing.has_room(side):
                pairing.put(side, pending[side].pop(0))
        found += pairing.results()
    for side in (SERVER, OURS):
        assert not pending[side], "a side waits for ever"
        pairing.promise(side, _FAR)
    found += pairing.results()
    kinds = [one.kind if isinstance(one, EventDifference) else "pair" for one in found]
    assert kinds == ["pair", *["missing"] * 49, *["pair"] * 10]


def test_the_place_of_a_difference_names_no_field_of_a_user() -> None:
    def update(**description: Any) -> bytes:
        return event(1, operation="update", updateDescription=description)

    assert differing_place(update(updatedFields={"secret": 1}), update(updatedFields={"secret": 2})) == (
        "updateDescription.updatedFields"
    )
    assert differing_place(event(1, fullDocument={"secret": 1}), event(1, fullDocument={})) == "fullDocument"
    assert differing_place(event(1), event(1, nsType="collection")) == "nsType"
