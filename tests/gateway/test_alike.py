"""GetMores that wait for the same and are called together: each is given what has come for it, or does its own step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import bson
import pymongo
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.read.source.batch import entry_time
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.entry_index import index_entries
from tailrace.read.tail.segment import Segment
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.watch.gateway.alike import WaitingAlike
from tailrace.watch.gateway.loop_turns import STEPS, LoopTurns
from tailrace.watch.gateway.reading import Waker

START = ClusterTime.of(10, 0)
ORDERS = Scope.parse("shop.orders")


class Tail:
    """A shared read without a server."""

    def __init__(self) -> None:
        self._client = pymongo.MongoClient[Any](connect=False)
        self.shared = SharedTail(self._client, streams_min=1, make_reader=lambda *_: self)  # type: ignore[arg-type, return-value]
        place = self.shared.enter(ORDERS, START)
        self.shared.reached(place, START, 0)
        self.shared.begun(self, START)  # type: ignore[arg-type]
        self.number = 0
        self.source = self

    def start(self) -> None:
        """As a reader's."""

    def interrupt(self) -> None:
        """As a reader's source."""

    def comes(self, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            one = {"op": "i", "ns": "shop.orders", "o": {"_id": self.number}, "ts": bson.Timestamp(10, self.number)}
            raw = bson.encode(one)
            after = ClusterTime.of(10, self.number - 1)
            self.shared.received(self, Segment(raw, index_entries(raw, Chains()), after, entry_time(raw)))  # type: ignore[arg-type]

    def close(self) -> None:
        self.shared.close()
        self._client.close()


class GetMore:
    """What is given to it, and its own steps, as numbers of entries that it got."""

    def __init__(self, tail: Tail, alike: WaitingAlike, makes: bool) -> None:
        self.place = tail.shared.enter(ORDERS, ClusterTime.of(10, tail.number), alike.called)
        self.own: list[int] = []
        self.given: list[int] = []
        self.shared: Any = None
        self._tail, self._alike, self._makes = tail, alike, makes
        alike.members[self] = None

    def step(self) -> None:
        self.shared = None
        batch = self._tail.shared.poll(self.place)
        assert batch is not None
        if batch.raw:
            self.own.append(bson.decode_all(batch.raw)[-1]["o"]["_id"])
            self.shared = ("step", self.own[-1]) if self._makes else None
            self._alike.members.pop(self, None)

    def give_in_turn(self, step: Any, now: int) -> None:
        self.given.append(step[1])
        self._alike.members.pop(self, None)

    def again(self) -> None:
        self._alike.members[self] = None
        if self.place.pending:
            self.step()


@pytest.fixture
def tail() -> Iterator[Tail]:
    tail = Tail()
    yield tail
    for place in list(tail.shared._places):  # nobody is called any more: the loop has ended
        place.on_ready = None
    tail.close()


def looped(tail: Tail, work: Callable[[LoopTurns, Callable[[str], WaitingAlike]], Any]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        turns = LoopTurns(loop)
        waker = Waker(loop, turns)
        await work(turns, lambda tenant: WaitingAlike(turns, waker, tail.shared, tenant))

    asyncio.run(run())


async def passes(count: int = 1) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_makes_and_the_others_are_given(tail: Tail) -> None:
    async def work(turns: LoopTurns, alike: Callable[[str], WaitingAlike]) -> None:
        waiting = alike("ann")
        members = [GetMore(tail, waiting, makes=True) for _ in range(5)]
        for number in range(1, 4):
            tail.comes()
            await passes(2)
            assert [one.own + one.given for one in members] == [list(range(1, number + 1))] * 5
            assert sum(len(one.own) for one in members) == number
            for one in members:
                one.again()

    looped(tail, work)


def test_what_cannot_be_shared_each_makes_itself(tail: Tail) -> None:
    async def work(turns: LoopTurns, alike: Callable[[str], WaitingAlike]) -> None:
        waiting = alike("ann")
        members = [GetMore(tail, waiting, makes=False) for _ in range(5)]
        tail.comes()
        await passes(2)
        assert [(one.own, one.given) for one in members] == [([1], [])] * 5

    looped(tail, work)


def test_who_has_more_or_less_to_take_is_not_given_another_s(tail: Tail) -> None:
    """One has something left from before; another came later than the entry."""

    async def work(turns: LoopTurns, alike: Callable[[str], WaitingAlike]) -> None:
        waiting = alike("ann")
        first, behind, second = (GetMore(tail, waiting, makes=True) for _ in range(3))
        for one in (first, behind, second):
            waiting.members.pop(one)
        tail.comes()
        for one in (first, second):
            one.step()
        late = GetMore(tail, waiting, makes=True)
        waiting.members[first] = waiting.members[behind] = waiting.members[second] = None
        tail.comes()
        await passes(2)
        assert (first.own + first.given, second.own + second.given) == ([1, 2], [1, 2])
        assert (behind.own, behind.given) == ([2], [])
        assert late.own + late.given == [2]

    looped(tail, work)


def test_a_pass_serves_so_many_and_the_rest_follow(tail: Tail) -> None:
    async def work(turns: LoopTurns, alike: Callable[[str], WaitingAlike]) -> None:
        waiting = alike("ann")
        members = [GetMore(tail, waiting, makes=True) for _ in range(3 * STEPS)]
        tail.comes()
        served = sum(bool(one.own or one.given) for one in members)
        assert served == STEPS
        while served < len(members):
            before = served
            await passes()
            served = sum(bool(one.own or one.given) for one in members)
            assert before < served <= before + STEPS

    looped(tail, work)


def test_another_user_is_served_between(tail: Tail) -> None:
    """The many of one user do not all come before another's only one."""

    async def work(turns: LoopTurns, alike: Callable[[str], WaitingAlike]) -> None:
        many, one = alike("ann"), alike("ben")
        members = [GetMore(tail, many, makes=True) for _ in range(10 * STEPS)]
        modest = GetMore(tail, one, makes=True)
        tail.comes()
        await passes(2)
        assert modest.own == [1]
        assert sum(bool(each.own or each.given) for each in members) <= 3 * STEPS

    looped(tail, work)
