"""The memory for large messages: counted as they come, and shared fairly.

A message used to hold the memory that it announced from its first bytes on. The tests of clients that send slowly had
one such client and checked what becomes of it, but not who waits meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import bson
import pytest
from bson.int64 import Int64

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway import memory
from tailrace.watch.gateway.compression import COMPRESSORS
from tailrace.watch.gateway.frame import OP_COMPRESSED, OP_MSG, op_msg
from tailrace.watch.gateway.memory import COUNTED_BYTES_MIN, ClosedConnection, MemoryBudget, Share, large_message
from tests.differential.wire import Wire
from tests.gateway.gateways import RunningGateway, running_gateway

_LIMIT_S = 300.0
_MB = 1 << 20
DATABASE = "gatewayMemory"


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(_LIMIT_S):
            await work()

    asyncio.run(limited())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_is_only_announced_takes_nothing() -> None:
    async def work() -> None:
        budget = MemoryBudget(8 * _MB)
        reader = asyncio.StreamReader()
        async with budget.share("a") as share, asyncio.timeout(None) as limit:
            coming = asyncio.create_task(large_message(reader, b"head", 40 * _MB, share, limit))
            await settled()
            assert budget._held == 0
            reader.feed_data(bytes(100_000))
            await settled()
            assert budget._held == 100_000
            reader.feed_eof()
            with pytest.raises(ClosedConnection):
                await coming
        assert budget._held == 0

    run(work)


def test_there_is_always_room_for_one_who_comes() -> None:
    """However many messages one tenant sends, it has half of the memory; two of them have a third each."""

    async def work() -> None:
        budget = MemoryBudget(60)
        greedy = [Share(budget, "greedy") for _ in range(100)]
        assert sum(one.takes(1) for one in greedy) == 31  # half, and one more that may always go on
        other = [Share(budget, "other") for _ in range(100)]
        taken = sum(one.takes(1) for one in other)
        assert 12 <= taken <= 15
        assert Share(budget, "third").takes(5)

    run(work)


def test_one_message_goes_on_however_little_room_there_is_and_the_rest_follow() -> None:
    """Concurrent messages each hold a part of what they need: unless one may go on, none would end."""

    async def work() -> None:
        budget = MemoryBudget(10)
        done: list[int] = []

        async def message(number: int) -> None:
            async with budget.share("a") as share:
                for _ in range(8):
                    await share.take(1)
                    await asyncio.sleep(0)
                done.append(number)

        await asyncio.gather(*(message(number) for number in range(30)))
        assert sorted(done) == list(range(30))
        assert budget._held == 0
        assert not budget._by_tenant
        assert not budget._waiting

    run(work)


def test_room_goes_to_those_who_hold_least() -> None:
    async def work() -> None:
        budget = MemoryBudget(10)
        order: list[str] = []

        async def wait(tenant: str) -> None:
            async with budget.share(tenant) as share:
                await share.take(2)
                order.append(tenant)
                await asyncio.Event().wait()

        async with budget.share("large") as large, budget.share("exempt") as exempt:
            large.takes(5)
            exempt.takes(30)
            tasks = [asyncio.create_task(wait(tenant)) for tenant in ("large", "exempt", "new")]
            await settled()
            assert order == []
            assert large.is_wanted
            assert exempt.is_wanted
            exempt.give_back(29)
            await settled()
            assert order[:1] == ["new"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget._held == 0

    run(work)


def test_who_holds_little_is_not_closed_for_the_sake_of_one_who_holds_much() -> None:
    async def work() -> None:
        budget = MemoryBudget(10)
        async with budget.share("modest") as modest, budget.share("greedy") as greedy:
            modest.takes(1)
            greedy.takes(4)
            async with budget.share("greedy") as more:
                more.takes(30)
                waiting = asyncio.create_task(Share(budget, "greedy").take(1))
                await settled()
                assert greedy.is_wanted
                assert not modest.is_wanted
                waiting.cancel()

    run(work)


def test_who_sends_much_and_then_nothing_is_closed_if_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a client had a second for each megabyte that it announced, so 48 MB held everybody up for a minute."""
    monkeypatch.setattr(memory, "SLOW_S", 0.2)

    async def work() -> None:
        budget = MemoryBudget(8 * _MB)
        reader = asyncio.StreamReader(limit=1 << 26)
        async with budget.share("a") as share, asyncio.timeout(None) as limit:
            reader.feed_data(bytes(47 * _MB))
            coming = asyncio.create_task(large_message(reader, b"head", 48_000_000 + 2 * _MB, share, limit))
            while budget._held < 47 * _MB:
                await asyncio.sleep(0)
            other = asyncio.create_task(Share(budget, "b").take(1))
            with pytest.raises(ClosedConnection, match="too slowly"):
                await coming
        await other

    run(work)


def large_read(size: int) -> dict[str, Any]:
    """A command that the gateway has to read as a whole."""
    return {"aggregate": "c", "pipeline": [{"$match": {"text": "x" * size}}], "cursor": {}}


def announced(is_compressed: bool) -> bytes:
    """The first bytes of a message of nearly 48 MB that the gateway has to read as a whole."""
    if is_compressed:
        fields = struct.pack("<iiB", OP_MSG, 47_000_000, COMPRESSORS["zlib"])
        return struct.pack("<iiii", 47_000_000, 1, 0, OP_COMPRESSED) + fields
    whole = op_msg(bson.encode({**large_read(10_000), "$db": DATABASE}), request_id=1)[: memory.COUNTED_BYTES_MIN]
    return struct.pack("<i", 47_000_000) + whole[4:5000]


@pytest.mark.mongod
@pytest.mark.parametrize("is_compressed", [True, False])
def test_those_who_announce_much_and_send_nothing_hold_up_nobody(
    replica_set: ReplicaSet, is_compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SLOW_S", 3600.0)
    with running_gateway(replica_set.uri, stall_seconds=3600.0) as running, Wire.to(running.uri()) as honest:
        honest.run("admin", {"ping": 1})
        idle = [socket.create_connection((running.host, running.port), timeout=_LIMIT_S) for _ in range(23)]
        try:
            for one in idle:
                one.sendall(announced(is_compressed))
            while running.call(lambda: sum(one.identification.last is not None for one in connections(running))) < 23:
                pass  # until then they have not reached their message
            assert honest.run(DATABASE, large_read(COUNTED_BYTES_MIN))["ok"] == 1
            assert running.call(lambda: len(connections(running))) == 24
            assert running.call(lambda: running.gateway._surroundings.memory._held) < COUNTED_BYTES_MIN
        finally:
            for one in idle:
                one.close()


def connections(running: RunningGateway) -> list[Any]:
    return list(running.gateway._connections)


@pytest.mark.mongod
def test_a_large_get_more_does_not_wait_for_events(replica_set: ReplicaSet) -> None:
    """It held its memory as long as it waited: up to ten minutes, if its client wanted."""
    with running_gateway(replica_set.uri) as running, Wire.to(running.uri()) as wire:
        stream = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}}
        cursor = Int64(wire.run(DATABASE, stream)["cursor"]["id"])
        read = {"getMore": cursor, "collection": "c", "maxTimeMS": 3_600_000, "comment": "x" * COUNTED_BYTES_MIN}
        assert wire.run(DATABASE, read)["cursor"]["nextBatch"] == []
        wire.run(DATABASE, {"insert": "c", "documents": [{"_id": 1}]})
        found = wire.run(DATABASE, {**read, "comment": "small"})["cursor"]["nextBatch"]
        assert [event["documentKey"]["_id"] for event in found] == [1]
