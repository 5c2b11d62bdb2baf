"""What streams share at the gateway, and how streams without a task wait: the parts, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import bson
import pytest

from tailrace.core.cursor.reply import cursor_reply
from tailrace.core.cursor.reply_events import ReplyEvents
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.watch.gateway import shared_steps
from tailrace.watch.gateway.deadlines import Deadlines
from tailrace.watch.gateway.reading import now_ms
from tailrace.watch.gateway.shared_steps import SharedSteps, Sharing, asked_by

_ID = 0x0123456789ABCDEF
_SESSION = {"id": bson.Binary(b"s" * 16, 4)}


def aggregate(
    stages: Any = (), options: Any = (), database: str = "shop", collection: str = "orders", **fields: Any
) -> bytes:
    pipeline = [{"$changeStream": dict(options)}, *stages]
    return bson.encode({"aggregate": collection, "pipeline": pipeline, "cursor": {}, **fields, "$db": database})


def asked(command: bytes, user: str = "ann", version: str = "6.0.27", namespace: str = "shop.orders") -> Any:
    return asked_by(namespace, command, frozenset({(user, "admin")}), version)


SAME = {
    "another start": aggregate(options={"resumeAfter": {"_data": "82"}}),
    "a later time": aggregate(options={"startAtOperationTime": bson.Timestamp(5, 1)}),
    "another session": aggregate(lsid=_SESSION),
    "another cluster time": aggregate(**{"$clusterTime": {"clusterTime": bson.Timestamp(9, 1)}}),
}
OTHER = {
    "stages": aggregate([{"$match": {"operationType": "insert"}}]),
    "options": aggregate(options={"fullDocument": "updateLookup"}),
    "comment": aggregate(comment="mine"),
    "read preference": aggregate(**{"$readPreference": {"mode": "secondary"}}),
    "read concern": aggregate(readConcern={"level": "majority"}),
    "collation": aggregate(collation={"locale": "de"}),
    "collection": aggregate(collection="items"),
    "database": aggregate(database="blog"),
    "API version": aggregate(apiVersion="1"),
}


@pytest.mark.parametrize("command", SAME.values(), ids=SAME)
def test_where_a_stream_begins_is_no_part_of_what_it_asks(command: bytes) -> None:
    assert asked(command) == asked(aggregate())


@pytest.mark.parametrize("command", OTHER.values(), ids=OTHER)
def test_what_could_be_seen_is_part_of_what_a_stream_asks(command: bytes) -> None:
    assert asked(command) != asked(aggregate())


def test_users_and_server_versions_share_with_none_but_themselves() -> None:
    assert asked(aggregate(), user="ben") != asked(aggregate())
    assert asked(aggregate(), version="7.0.28") != asked(aggregate())
    after = aggregate(readConcern={"level": "majority", "afterClusterTime": bson.Timestamp(5, 1)})
    assert asked(after) == asked(aggregate(readConcern={"level": "majority"}))


def settled(steps: SharedSteps, count: int, what: str = "all") -> list[Sharing]:
    """So many streams that ask the same and are between two replies."""
    sharings = [Sharing(what, form=b"2B02", is_settled=True) for _ in range(count)]
    for sharing in sharings:
        steps.joined(sharing)
    return sharings


def entries(number: int, size: int = 100) -> OplogBatch:
    return OplogBatch(bson.encode({"op": "i", "o": {"_id": number, "text": "x" * size}}), ClusterTime(number << 32))


def reply(number: int) -> bytes:
    token = ResumeToken.high_water_mark(ClusterTime(number << 32)).to_bson()
    events = ReplyEvents("nextBatch", None)
    return cursor_reply(events, token, cursor_id=_ID, namespace="shop.orders", invalidated=False)


def test_what_one_has_made_is_found_by_others_that_stand_there_alone() -> None:
    steps = SharedSteps()
    one, two = settled(steps, 2)
    (stranger,) = settled(steps, 1, "another")
    steps.add(one, entries(1), None, _ID, reply(1))
    step = steps.found(two, entries(1), None)
    assert step is not None
    assert step.reply(_ID) == reply(1)
    assert step.reply(7) == reply(1).replace(_ID.to_bytes(8, "little"), (7).to_bytes(8, "little"))
    assert steps.found(two, entries(2), None) is None
    assert steps.found(two, entries(1), 10) is None
    assert steps.found(two, entries(1)._replace(high_water=ClusterTime(2 << 32)), None) is None
    assert steps.found(stranger, entries(1), None) is None
    two.form = b"2B04"
    assert steps.found(two, entries(1), None) is None
    two.form, two.is_settled = b"2B02", False
    assert steps.found(two, entries(1), None) is None


def test_commands_large_batches_and_streams_that_are_alone_are_not_shared() -> None:
    steps = SharedSteps()
    one, two = settled(steps, 2)
    command = OplogBatch(bson.encode({"op": "c", "o": {"drop": "orders"}}), ClusterTime(1 << 32))
    for batch in (command, entries(2, size=20_000)):
        steps.add(one, batch, None, _ID, reply(1))
        assert steps.found(two, batch, None) is None
    steps.add(one, entries(3), None, _ID + 1, reply(3))  # not the cursor that gave the token
    assert steps.found(two, entries(3), None) is None
    steps.left(two)
    steps.add(one, entries(4), None, _ID, reply(4))
    assert steps.held == 0


def test_what_is_kept_is_bounded_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_steps, "_STEPS_MAX", 3)
    steps = SharedSteps()
    one, two, three = settled(steps, 3)
    sizes = []
    for number in range(1, 11):
        steps.add(one, entries(number), None, _ID, reply(number))
        sizes.append(steps.held)
        if number == 2:
            step = steps.found(two, entries(2), None)
            assert step is not None
            steps.give(two, step)
            steps.give(three, step)
    each = sizes[0]
    assert sizes[2] == 3 * each
    assert sizes[-1] == 4 * each  # two and three still have to do theirs
    steps.left(two)
    assert steps.held == 4 * each
    step = steps.found(three, entries(10), None)
    assert step is not None
    steps.give(three, step)  # no earlier one any more
    assert steps.held == 3 * each
    monkeypatch.setattr(shared_steps, "_BYTES_MAX", steps.held - 1)
    steps.add(one, entries(11), None, _ID, reply(11))
    assert steps.found(three, entries(11), None) is None


class _Waiter:
    def __init__(self, over: list[_Waiter]) -> None:
        self._over = over

    def is_over(self) -> None:
        self._over.append(self)


def test_who_waits_is_told_at_his_time_and_one_timer_does_for_many() -> None:
    async def run() -> None:
        deadlines, over = Deadlines(asyncio.get_running_loop()), list[_Waiter]()
        many = [_Waiter(over) for _ in range(100)]
        begun = now_ms()
        for waiter in many:
            deadlines.add(waiter, 30)
        longer = _Waiter(over)
        deadlines.add(longer, 10_000)
        assert len(deadlines._timers) == 2
        deadlines.discard(many[0], 30)
        while len(over) < 99:
            await asyncio.sleep(0.005)
        assert now_ms() - begun >= 30
        assert over == many[1:]
        deadlines.discard(longer, 10_000)
        assert not deadlines._timers
        assert not deadlines._waiting
        deadlines.add(many[0], 1)  # after all have gone
        while len(over) < 100:
            await asyncio.sleep(0.005)
        assert not deadlines._timers

    asyncio.run(run())
