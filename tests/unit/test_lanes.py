"""Lanes: to which one an event belongs, who holds which, and what a change of their number leaves to do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.regex import Regex
from bson.timestamp import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.act.consumer.rules.errors import LeaseDocumentError, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lane_group import LaneGroupLogic
from tailrace.act.consumer.rules.lane_key import PlacedEvent, key_hash, known_lane_key, lane_key, lane_keys, outline
from tailrace.act.consumer.rules.lane_need import GiveLease, RunLanes
from tailrace.act.consumer.rules.lane_shares import moves, share
from tailrace.act.consumer.rules.lanes import Floor, LanePlan, all_at, order_of
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.need import Outcome
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.consumer.messages import Outbox
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.errors import UsageError

UUID = bytes(range(16))


def hash_of(value: Any) -> int:
    document = bson.encode({"_id": value})
    element = raw_bson.find(document, b"_id")
    assert element is not None
    return key_hash(element.type, raw_bson.value(document, element))


def event(key: Any, operation: str = "insert", *, version: int = 1, **more: Any) -> bytes:
    identifier: dict[str, Any] = {"_id": key}
    if version == 2:
        identifier = {"operationType": operation, "documentKey": identifier}
    token = ResumeToken(7 << 32, version=version, uuid=UUID, event_identifier=bson.encode(identifier))
    return bson.encode(
        {
            "_id": bson.decode(token.to_bson()),
            "operationType": operation,
            "clusterTime": Timestamp(7, 0),
            **more,
            "ns": {"db": "shop", "coll": "orders"},
            "documentKey": {"_id": key},
        }
    )


@pytest.mark.parametrize(
    "equal",
    [
        (1, 1.0, Int64(1), Decimal128("1"), Decimal128("1.000")),
        (1.5, Decimal128("1.5"), Decimal128("15E-1")),
        (0, -0.0, Decimal128("-0"), Decimal128("0E+3")),
        (float("nan"), Decimal128("NaN"), Decimal128("-NaN")),
        (float("inf"), Decimal128("Infinity")),
        (2.0**63, Decimal128("9223372036854775808")),
        (2**53, 2.0**53, Decimal128(str(2**53))),
        ({"a": 1, "b": {"c": 2.0}}, {"a": 1.0, "b": {"c": Decimal128("2")}}),
    ],
)
def test_keys_that_compare_equal_have_one_lane(equal: tuple[Any, ...]) -> None:
    assert len({hash_of(value) for value in equal}) == 1


def test_the_hash_is_the_same_in_every_version() -> None:
    """A change of this by a release would move documents between lanes while the leases still hold the old
    positions."""
    oid = bson.ObjectId("6b016ba00000000000000001")
    keys = [oid, 1, "order-1", None, Regex("a"), b"\x01", {"region": "eu", "n": 7}]
    assert [hash_of(key) for key in keys] == [
        179785285,
        3651636922,
        2843302682,
        3369614320,
        3487463304,
        4080102011,
        2966036575,
    ]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("operation", ["insert", "update", "replace", "delete"])
def test_the_short_way_reads_what_the_long_way_does(operation: str, version: int) -> None:
    key = bson.ObjectId()
    short = outline(event(key, operation, version=version))
    # A field in front of operationType leads the long way.
    document = bson.decode(event(key, operation, version=version))
    shuffled = {"_id": document["_id"], "wallTime": 1, **document}
    assert outline(bson.encode(shuffled)) == short
    assert short == PlacedEvent(document["_id"]["_data"].encode(), hash_of(key))


def test_fields_of_users_with_our_names_choose_no_lane() -> None:
    ours = {"documentKey": {"_id": 5}, "_id": "x", "lane": 3, "token": 1, "version": 2, "operationType": "drop"}
    plain, named = event(1), event(1, fullDocument={"_id": 1, **ours})
    assert outline(plain) == outline(named)


def test_the_shard_key_does_not_move_a_document() -> None:
    document = bson.decode(event(1))
    for key in ({"region": "eu", "_id": 1}, {"_id": 1}, {"_id": 1.0, "region": "us", "tier": 2}):
        assert outline(bson.encode({**document, "documentKey": key})).hash == outline(event(1)).hash


@pytest.mark.parametrize("operation", ["drop", "rename", "dropDatabase", "invalidate", "create", "shardCollection"])
def test_what_is_no_change_of_a_document_is_a_barrier(operation: str) -> None:
    document = bson.decode(event(1, operation))
    del document["documentKey"]
    assert outline(bson.encode(document)).hash is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_later_fragment_has_the_lane_of_the_first(version: int) -> None:
    whole = bson.decode(event("big", version=version))
    del whole["documentKey"]
    fragment = {**whole, "splitEvent": {"fragment": 2, "of": 3}}
    assert outline(bson.encode(fragment)).hash == hash_of("big")


@pytest.mark.parametrize("missing", ["documentKey", "operationType", "_id"])
def test_a_pipeline_that_takes_away_the_key_is_refused(missing: str) -> None:
    document = bson.decode(event(1))
    del document[missing]
    with pytest.raises(UsageError, match="documentKey"):
        outline(bson.encode(document))


# --- a key of one's own ---------------------------------------------------------------------------------------------


def outbox_insert(number: int, **document: Any) -> bytes:
    return event(number, fullDocument={"_id": number, "topic": "t", "payload": "p", **document})


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.integers(-2, 2), st.floats(-2, 2), st.text("ab1{", max_size=2), st.just({"a": 1})),
        min_size=2,
        max_size=8,
    )
)
def test_messages_of_one_key_have_one_lane(keys: list[Any]) -> None:
    """Lanes were chosen by the outbox document's ``_id``, and a third of a key's messages came out of order. No test
    had published an outbox from several lanes."""
    outbox = Outbox()
    lanes: dict[str | None, int | None] = {}
    for number, key in enumerate(keys):
        raw = outbox_insert(number, **({} if key is None else {"key": key}))
        message = outbox(SimpleNamespace(raw=raw))
        assert message is not None
        hash_ = outbox.lane_key.place(raw).hash
        assert hash_ is not None
        assert lanes.setdefault(message.key, hash_) == hash_


def test_an_outbox_s_other_changes_hold_no_lane_up() -> None:
    outbox = Outbox(key="to.whom")
    deleted = outbox.lane_key.place(event(1, "delete"))
    assert deleted == outline(event(1, "delete"))
    assert (
        outbox.lane_key.place(outbox_insert(1, to={"whom": "k"})).hash
        == outbox.lane_key.place(outbox_insert(2, to={"whom": "k"})).hash
    )
    assert outbox.lane_key.name == "outbox:to.whom"


def by_customer(event: Mapping[str, Any]) -> Any:
    return (event.get("fullDocument") or {}).get("customer")


@pytest.mark.parametrize("choice", ["fullDocument.customer", by_customer], ids=["path", "function"])
def test_a_path_or_a_function_chooses_the_lane(choice: Any) -> None:
    key = lane_key(choice)
    ann, again = (event(n, fullDocument={"customer": value}) for n, value in ((1, 7), (2, 7.0)))
    assert key.place(ann).hash == key.place(again).hash == hash_of(7)
    assert key.place(ann).order == outline(ann).order
    assert key.place(event(1, fullDocument={"customer": 8})).hash != hash_of(7)
    assert key.place(event(1, "delete")).hash is None, "all lanes wait for a change without a key"
    assert key.place(event(1, fullDocument={"customer": 7}).replace(b"insert", b"rename")).hash is None
    damaged = event(1, fullDocument={"customer": "xx"}).replace(b"xx", b"\xff\xfe")
    assert key.place(damaged).hash is not None
    assert known_lane_key(key.name, (key,)) == key


def test_the_id_by_its_path_is_the_id() -> None:
    assert lane_key("documentKey._id") is lane_key(None)


@pytest.mark.parametrize("choice", ["", "a..b", 5, lambda event: 1], ids=["empty", "gap", "number", "lambda"])
def test_a_lane_key_that_other_processes_could_not_name_is_refused(choice: Any) -> None:
    with pytest.raises(UsageError, match=r"path|name"):
        lane_key(choice)


async def by_awaiting(event: Mapping[str, Any]) -> int:
    return 1


def by_failing(event: Mapping[str, Any]) -> int:
    raise KeyError("customer")


@pytest.mark.parametrize("function", [by_awaiting, by_failing])
def test_a_lane_key_that_fails_says_so(function: Any) -> None:
    with pytest.raises(UsageError, match="lane_key"):
        lane_key(function).place(event(1))


def test_a_function_of_another_process_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="chosen by"):
        known_lane_key(lane_key(by_customer).name, lane_keys(None))


# --- shares ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 24), st.lists(st.sampled_from("abcdefgh"), max_size=40), st.randoms(use_true_random=False))
def test_shares_settle_and_are_fair(lanes: int, joins: list[str], rng: random.Random) -> None:
    """Members come and go (a name again means it leaves); between, each acts on what it sees in random order."""
    members: set[str] = set()
    owners: dict[int, str] = {}
    for name in joins:
        members ^= {name}
        owners = {lane: owner for lane, owner in owners.items() if owner in members}
    for _ in range(4 * lanes + 4):
        for member in sorted(members, key=lambda _: rng.random()):
            move = moves(member, members, owners, lanes)
            for lane in move.give_up:
                assert owners.pop(lane) == member
            for lane in move.take:
                assert owners.setdefault(lane, member) == member
    if members:
        held = [list(owners.values()).count(member) for member in members]
        assert sum(held) == lanes
        assert max(held) - min(held) <= 1
        assert all(moves(member, members, owners, lanes) == ((), ()) for member in members)


def test_few_lanes_move_when_a_process_joins_or_goes() -> None:
    owners = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
    assert moves("a", "abc", owners, 6).give_up == (2,)
    assert moves("b", "abc", owners, 6).give_up == (5,)
    owners = {0: "a", 1: "a", 3: "b"}
    assert moves("a", "ab", owners, 4) == ((), ())
    assert moves("b", "ab", owners, 4) == ((2,), ())


def test_a_remainder_stays_with_those_who_have_it() -> None:
    assert share("b", "ab", {"b": 3, "a": 2}, 5) == 3
    assert share("a", "ab", {"b": 3, "a": 2}, 5) == 2


# --- generations -----------------------------------------------------------------------------------------------------


def at(place: int) -> StreamPosition:
    return StreamPosition(bson.decode(ResumeToken(place << 32, uuid=UUID).to_bson()))


BEGIN = StreamPosition(at=Timestamp(1, 0))


def stored(plan: LanePlan) -> LanePlan:
    return LanePlan.from_document(bson.decode(bson.encode(plan.to_document())), "orders")


def placed(event: PlacedEvent, key: str) -> PlacedEvent:
    """Under the key "path:half" two documents share a lane."""
    return event if key == "" or event.hash is None else PlacedEvent(event.order, event.hash // 2)


def run_lanes(plan: LanePlan, events: list[PlacedEvent], rng: random.Random) -> tuple[list[int], list[Any]]:
    """Each lane handles some of what it has left: the numbers of the events handled, and the positions then."""
    handled: list[int] = []
    positions: list[Any] = [None] * plan.lanes
    for lane in range(plan.lanes):
        for number in range(rng.randrange(len(events) + 1)):
            event = events[number]
            mine = placed(event, plan.key)
            if event.order > order_of(plan.start) and mine.hash is not None and mine.hash % plan.lanes == lane:
                if not plan.is_done(mine, lambda key: placed(event, key)):  # noqa: B023
                    handled.append(number)
                positions[lane] = at(number + 2)
    return handled, positions


@settings(deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_changes_of_their_number_lose_nothing_and_repeat_nothing(seed: int, numbers: list[int]) -> None:
    rng = random.Random(seed)
    events = [PlacedEvent(order_of(at(n + 2)), rng.randrange(12)) for n in range(60)]
    plan, handled = LanePlan(numbers[0], BEGIN), []
    for wanted in [*numbers[1:], 1, 2]:
        done, positions = run_lanes(plan, events, rng)
        handled += done
        key = rng.choice(("", "path:half"))
        asked = plan.with_request(wanted, key)
        plan = stored(
            (asked if asked.next_lanes else plan.with_request(plan.lanes + 1, key)).next_generation(positions)
        )
        assert plan.key == key
    handled += [
        n
        for n, e in enumerate(events)
        if e.order > order_of(plan.start) and not plan.is_done(placed(e, plan.key), lambda key: placed(e, key))  # noqa: B023
    ]
    assert sorted(handled) == list(range(60))
    for key in range(12):
        of_key = [n for n in handled if events[n].hash == key]
        assert of_key == sorted(of_key)


def test_a_time_is_before_every_event_of_that_time() -> None:
    assert order_of(StreamPosition(at=Timestamp(5, 0))) < order_of(at(5)) < order_of(StreamPosition(at=Timestamp(5, 1)))


def test_a_later_generation_s_owner_has_the_larger_fencing_token() -> None:
    plan = LanePlan(4, BEGIN)
    later = plan.with_request(6).next_generation([None] * 4)
    assert later.fencing_token(0) > plan.fencing_token(1_000_000) > 1_000_000


def test_a_floor_that_all_lanes_are_past_is_forgotten() -> None:
    plan = LanePlan(2, BEGIN).with_request(3).next_generation([at(3), at(9)])
    assert plan.floors == (Floor((order_of(at(3)), order_of(at(9)))),)
    assert plan.floor_end == order_of(at(9)), "the last of a floor's places"
    assert plan.start == at(3)
    assert len(plan.with_request(2).next_generation([at(9), at(10), at(12)]).floors) == 1
    assert plan.with_request(2).next_generation([at(9)] * 3).floors == ()


def test_lane_0_waits_at_a_barrier_for_all_others() -> None:
    barrier = order_of(at(9))
    assert all_at(barrier, [order_of(at(9)), order_of(at(10))])
    assert not all_at(barrier, [order_of(at(9)), order_of(at(8))])


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": 0},
        {"lanes": "x"},
        {"floors": [[1]]},
        {"floors": None},
        {"start": 5},
        {"start": {"token": {"_data": "zz"}}},
        {"generation": None},
        {"nextLanes": "6"},
        {"key": 5},
        {"floors": [{"orders": ["82"]}]},
    ],
)
def test_a_plan_changed_by_hand_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(LeaseDocumentError, match="'orders'"):
        LanePlan.from_document({**LanePlan(4, BEGIN).to_document(), **change}, "orders")


@pytest.mark.parametrize("lanes", [0, -1, 1025, True, 2.0, "4", None])
def test_a_number_of_partitions_that_cannot_be_is_refused(lanes: Any) -> None:
    with pytest.raises(UsageError, match="partitions"):
        LanePlan(lanes, BEGIN)


def test_nothing_is_below_the_floors_of_a_plan_without_any() -> None:
    assert LanePlan(2, BEGIN).floor_end == b""


def test_a_plan_is_changed_by_the_positions_of_all_its_lanes_and_no_earlier() -> None:
    with pytest.raises(UsageError, match="2 positions do not stop 2 lanes"):
        LanePlan(2, BEGIN).next_generation([None, None])
    with pytest.raises(UsageError, match="1 positions do not stop 2 lanes"):
        LanePlan(2, BEGIN).with_request(3).next_generation([None])


def leaving() -> LaneGroupLogic:
    logic = LaneGroupLogic("orders", "one", 2, 30.0)
    logic.plan = LanePlan(2, StreamPosition(at=Timestamp(1, 1)))
    logic._member = Lease("orders", "one", 1)
    return logic


def test_a_group_that_is_given_up_while_it_leaves_asks_for_nothing_more() -> None:
    """A process that is interrupted at this moment drops the generator. That still yielded one more need, which Python
    reports as an ignored GeneratorExit; no test had interrupted a group in its last moments."""
    steps = leaving().leave()
    assert isinstance(next(steps), RunLanes)
    steps.close()


def test_a_group_whose_last_look_fails_gives_its_lease_back_before_it_tells() -> None:
    steps = leaving().leave()
    assert isinstance(next(steps), RunLanes)
    assert isinstance(steps.send(Outcome(0.0, 0.0, None, LeaseStoreUnavailable("away"))), GiveLease)
    with pytest.raises(LeaseStoreUnavailable, match="away"):
        steps.send(Outcome(0.0, 0.0, None))
