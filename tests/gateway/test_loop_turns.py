"""The event loop is shared among users: one with thousands of plain streams does not keep another's single one waiting.

Steps were done in the order in which they came, which no test had looked at: every test of fairness had stages that
compute.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import bson
import pymongo
import pytest
from bson.int64 import Int64

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway import loop_turns
from tailrace.watch.gateway.frame import HEADER_SIZE, OpMsg, op_msg, parse_header
from tailrace.watch.gateway.loop_turns import STEPS, LoopTurns
from tests.gateway.gateways import RunningGateway, running_gateway

STREAMS = 80
GREEDY_EACH = 12
MODEST_EACH = 8


def order_of(asked: list[tuple[str, int]], charges: dict[str, float] | None = None) -> list[str]:
    """The order in which steps are done if each tenant of ``asked`` wants so many at once."""

    async def work() -> list[str]:
        turns, order = LoopTurns(asyncio.get_running_loop()), list[str]()

        def step(tenant: str) -> None:
            order.append(tenant)
            turns.charge(tenant, (charges or {}).get(tenant, 0.0))

        for tenant, count in asked:
            for _ in range(count):
                turns.call(tenant, lambda tenant=tenant: step(tenant))
        while len(order) < sum(count for _, count in asked):
            await asyncio.sleep(0)
        return order

    return asyncio.run(work())


def test_who_wants_one_step_waits_for_one_pass_at_most() -> None:
    order = order_of([("greedy", 5_000), ("modest", 1)])
    assert order.index("modest") <= STEPS


def test_tenants_who_all_want_more_get_as_much_each() -> None:
    order = order_of([("greedy", 5_000), ("modest", 500), ("other", 500)])
    begun = order[STEPS : STEPS + 900]
    assert all(begun.count(tenant) >= 280 for tenant in ("modest", "other"))


def test_a_step_that_takes_long_counts_for_as_long() -> None:
    order = order_of([("long", 1_000), ("short", 1_000)], {"long": 0.000_5})
    both = order[STEPS + 10 * STEPS :][:330]  # after those of the first pass
    assert 25 <= both.count("long") <= 35


def test_who_did_nothing_for_a_while_has_no_claim_from_then() -> None:
    async def work() -> list[str]:
        turns, order = LoopTurns(asyncio.get_running_loop()), list[str]()
        for _ in range(2_000):
            turns.call("busy", lambda: order.append("busy"))
        for _ in range(10):
            await asyncio.sleep(0)
        before = len(order)
        for _ in range(1_000):
            turns.call("late", lambda: order.append("late"))
        while len(order) < 3_000:
            await asyncio.sleep(0)
        return order[before : before + 400]

    after = asyncio.run(work())
    assert 180 <= after.count("late") <= 220


def test_who_worked_while_nobody_waited_owes_nothing_for_it() -> None:
    async def work() -> list[str]:
        turns, order = LoopTurns(asyncio.get_running_loop()), list[str]()
        for _ in range(200):
            for _ in range(10):
                turns.call("busy", lambda: None)
            await asyncio.sleep(0)
        for tenant in ("busy", "late"):
            for _ in range(1_000):
                turns.call(tenant, lambda tenant=tenant: order.append(tenant))
        while len(order) < 2_000:
            await asyncio.sleep(0)
        return order[STEPS : STEPS + 600]

    after = asyncio.run(work())
    assert 200 <= after.count("busy") <= 400


def test_whoever_waits_no_longer_holds_up_nobody() -> None:
    async def work() -> bool:
        turns, done = LoopTurns(asyncio.get_running_loop()), asyncio.Event()
        while turns.goes("a"):
            pass
        waiting = [asyncio.create_task(turns.wait("a")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        turns.call("b", done.set)
        async with asyncio.timeout(60):
            await done.wait()
        return all(task.cancelled() or task.done() for task in waiting)

    assert asyncio.run(work())


class Pipelined:
    """A connection that asks for everything at once."""

    def __init__(self, gateway: RunningGateway, source: str) -> None:
        self._socket = socket.create_connection((gateway.host, gateway.port), source_address=(source, 0))
        self._number = 0

    def send(self, *commands: dict[str, Any]) -> None:
        frames = bytearray()
        for command in commands:
            self._number += 1
            frames += op_msg(bson.encode(command), request_id=self._number)
        self._socket.sendall(frames)

    def reply(self) -> dict[str, Any]:
        head = self._read(HEADER_SIZE)
        frame = head + self._read(parse_header(head).length - HEADER_SIZE)
        return bson.decode(OpMsg.parse(frame).document)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the gateway has closed the connection"
            data += more
        return data

    def open(self, collection: str, after: bson.Timestamp) -> None:
        stage = {"$changeStream": {"startAtOperationTime": after}}
        command = {"aggregate": collection, "pipeline": [stage], "cursor": {"batchSize": 0}, "$db": "turns"}
        self.send({"hello": 1, "$db": "admin"}, command)
        self.reply()
        self._cursor = self.reply()["cursor"]["id"]
        # A stream's first getMore waits until the log has been read, however long this machine takes for it.
        self.ask(collection, 1)
        self.reply()

    def ask(self, collection: str, times: int) -> None:
        one = {"getMore": Int64(self._cursor), "collection": collection, "batchSize": 1, "$db": "turns"}
        self.send(*[one] * times)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def running(replica_set: ReplicaSet) -> Iterator[RunningGateway]:
    with running_gateway(replica_set.uri) as running:
        yield running


@pytest.mark.mongod
@pytest.mark.parametrize("is_fair", [True, False])
def test_a_user_with_one_stream_does_not_wait_for_another_s_hundreds(
    is_fair: bool, running: RunningGateway, replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two addresses, since there are no users: one has hundreds of streams, each with many getMores waiting. With the
    fault (everything in order of arrival) all of these are answered before the other's."""
    if not is_fair:
        monkeypatch.setattr(loop_turns.LoopTurns, "goes", lambda self, tenant: True)
    with pymongo.MongoClient[Any](replica_set.uri) as direct:
        before = direct.admin.command("ping")["operationTime"]
        direct.turns.notes.insert_many([{} for _ in range(GREEDY_EACH + 5)])
    engine = running.gateway.engine
    served: list[Any] = []
    get_more = engine.get_more

    def counted(stream: Any, *args: Any) -> Any:
        served.append(stream.tenant)
        return get_more(stream, *args)

    standing, all_asked = threading.Event(), threading.Event()

    def stand_still() -> None:
        standing.set()
        all_asked.wait()

    monkeypatch.setattr(loop_turns, "STEPS", 16)
    greedy, modest = list[Pipelined](), Pipelined(running, "127.0.0.2")
    try:
        modest.open("notes", before)
        for _ in range(STREAMS):
            greedy.append(Pipelined(running, "127.0.0.1"))
            greedy[-1].open("notes", before)
        monkeypatch.setattr(engine, "get_more", counted)
        threading.Thread(target=running.call, args=[stand_still]).start()
        standing.wait()
        for each in greedy:
            each.ask("notes", GREEDY_EACH)
        modest.ask("notes", MODEST_EACH)
        all_asked.set()
        replies = [modest.reply() for _ in range(MODEST_EACH)]
        assert all(reply["ok"] and len(reply["cursor"]["nextBatch"]) == 1 for reply in replies)
        for each in greedy:
            for _ in range(GREEDY_EACH):
                assert each.reply()["ok"]
    finally:
        for each in [*greedy, modest]:
            each.close()
        with pymongo.MongoClient[Any](replica_set.uri) as direct:
            direct.drop_database("turns")
    places = [place for place, tenant in enumerate(served) if tenant == "127.0.0.2"]
    assert len(places) == MODEST_EACH
    # How many of the first one's steps come before the other's last: a pass or two for each of its own, or with the
    # fault all that were asked for earlier.
    before_last = places[-1] + 1 - MODEST_EACH
    assert (before_last <= 2 * 16 * MODEST_EACH) is is_fair, before_last
