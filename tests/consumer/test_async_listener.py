"""Listeners with ``async def`` handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import AsyncMongoClient

import tailrace
from tailrace.consumer import AsyncChange, AsyncListener, Fenced, HandlerFailed, MongoLeaseStore
from tailrace.embedded import ReplicaSet

pytestmark = pytest.mark.mongod


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"async_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        database = client[name]
        database["orders"].insert_many([{"_id": number} for number in range(3)])
        database.create_collection("copies")
        yield client[name]["orders"], database, MongoLeaseStore(database["leases"]), replica_set.uri
        client.drop_database(name)


def test_each_change_is_awaited_in_order_and_fenced_writes_too(shop: Any) -> None:
    watched, database, store, uri = shop
    seen: list[Any] = []

    async def main() -> None:
        async with AsyncMongoClient(uri) as other:
            copies = other[database.name]["copies"]

            async def handle(change: AsyncChange) -> None:
                key = change.document_key
                assert key is not None
                await asyncio.sleep(0)
                await change.fence.update_one(copies, key, {"$set": {"seen": 1}}, upsert=True)
                await change.fence.update_one(database["copies"], key, {"$set": {"again": 1}})
                seen.append(key["_id"])
                if len(seen) == 3:
                    listener.stop()

            listener = AsyncListener(watched, handle, resource="orders", store=store)
            await listener.run()

    asyncio.run(main())
    assert seen == [0, 1, 2]
    assert database["copies"].count_documents({"seen": 1, "again": 1, "_fence": {"orders": 1}}) == 3
    assert store.read("orders").owner is None


def test_a_transaction_is_awaited(shop: Any) -> None:
    watched, database, store, uri = shop

    async def main() -> None:
        async with AsyncMongoClient(uri) as other:
            copies = other[database.name]["copies"]

            async def handle(change: AsyncChange) -> None:
                key = change.document_key
                assert key is not None
                async with change.transaction(other) as session:
                    await copies.update_one(key, {"$inc": {"times": 1}}, upsert=True, session=session)
                if key["_id"] == 2:
                    listener.stop()

            listener = AsyncListener(watched, handle, resource="orders", store=store)
            async with listener:
                await listener.join()

    asyncio.run(main())
    assert database["copies"].count_documents({"times": 1}) == 3


def test_a_handler_is_cancelled_when_its_lease_is_lost(shop: Any) -> None:
    watched, _, store, _ = shop
    cancelled: list[Any] = []

    async def main() -> None:
        async def handle(change: AsyncChange) -> None:
            if cancelled:
                listener.stop()
                return
            store.revoke("orders")
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.append(change.document_key)
                raise

        listener = AsyncListener(watched, handle, resource="orders", store=store, lease_seconds=6)
        await asyncio.wait_for(listener.run(), 300)
        assert listener.statistics.leases_lost == 1

    asyncio.run(main())
    assert cancelled == [{"_id": 0}]


def test_a_cancelled_listener_leaves_the_change_in_hand_and_releases_its_lease(shop: Any) -> None:
    watched, _, store, _ = shop
    seen: list[Any] = []

    async def main() -> None:
        hangs = asyncio.Event()

        async def handle(change: AsyncChange) -> None:
            seen.append(change.document_key)
            if len(seen) == 2:
                hangs.set()
                await asyncio.sleep(600)

        listener = AsyncListener(watched, handle, resource="orders", store=store).start()
        await hangs.wait()
        assert listener._task is not None
        listener._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener.join()

        async def rest(change: AsyncChange) -> None:
            seen.append(change.document_key)
            if change.document_key == {"_id": 2}:
                second.stop()

        assert store.read("orders").owner is None
        second = AsyncListener(watched, rest, resource="orders", store=store)
        await second.run()

    asyncio.run(main())
    assert [key["_id"] for key in seen] == [0, 1, 1, 2]


def test_an_error_goes_to_the_policy_which_may_be_awaited(shop: Any) -> None:
    watched, database, store, _ = shop
    database["copies"].insert_one({"_id": 0, "_fence": {"orders": 99}})

    async def judge(change: AsyncChange, error: Exception, attempt: int) -> str:
        await asyncio.sleep(0)
        return "skip" if change.document_key != {"_id": 2} else "stop"

    async def fails(change: AsyncChange) -> None:
        raise ValueError("no")

    async def is_fenced(change: AsyncChange) -> None:
        await change.fence.delete_one(database["copies"], {"_id": 0})

    async def main() -> None:
        with pytest.raises(HandlerFailed, match="ValueError"):
            await AsyncListener(watched, fails, resource="orders", store=store, on_error=judge).run()
        with pytest.raises(HandlerFailed) as raised:
            await AsyncListener(watched, is_fenced, resource="orders", store=store).run()
        assert isinstance(raised.value.__cause__, Fenced)

    asyncio.run(main())


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_handler_in_which_something_was_cancelled_has_failed_and_the_listener_goes_on(
    shop: Any, partitions: int
) -> None:
    """run() raised CancelledError. To a task group or a gather, the listener ended for no reason."""
    watched, _, store, _ = shop
    asked: list[str] = []
    seen: list[Any] = []

    async def handle(change: AsyncChange) -> None:
        if (change.document_key or {})["_id"] == 1:
            task = asyncio.ensure_future(asyncio.sleep(300))
            task.cancel()
            await task
        seen.append((change.document_key or {})["_id"])
        if len(seen) + len(asked) == 3:
            listener.stop()

    def judge(_change: AsyncChange, error: Exception, _attempt: int) -> Any:
        asked.append(type(error).__name__)
        if len(seen) == 2:
            listener.stop()
        return "skip"

    async def main() -> None:
        nonlocal listener
        listener = AsyncListener(watched, handle, resource="orders", store=store, on_error=judge, partitions=partitions)
        await asyncio.wait_for(listener.run(), 300)

    listener: Any = None
    asyncio.run(main())
    assert asked == ["HandlerCancelled"]
    assert sorted(seen) == [0, 2]


def test_lanes_run_side_by_side_in_one_loop_each_in_order(shop: Any) -> None:
    """Partitions were refused to asyncio handlers."""
    watched, database, store, uri = shop
    count, lanes = 60, 3
    seen: list[tuple[int, str, int]] = []
    at_once: set[str] = set()
    most = 0
    watched.update_many({}, {"$set": {"v": 1}})

    async def main() -> None:
        nonlocal most
        async with AsyncMongoClient(uri) as other:
            copies = other[database.name]["copies"]

            async def handle(change: AsyncChange) -> None:
                nonlocal most
                key, number = change.document_key, len(seen)
                assert key is not None
                at_once.add(change.resource)
                most = max(most, len(at_once))
                async with change.transaction(other) as session:
                    fence = change.fence.bound_to(session)
                    await fence.update_one(copies, key, {"$inc": {"times": 1}}, upsert=True)
                at_once.remove(change.resource)
                seen.append((key["_id"], change.operation_type, number))
                if len(seen) == count + 6:
                    listener.stop()

            listener = AsyncListener(watched, handle, resource="orders", store=store, partitions=lanes)
            async with listener:
                await asyncio.to_thread(watched.insert_many, [{"_id": 100 + number} for number in range(count)])
                await asyncio.wait_for(listener.join(), 300)
            assert listener.statistics.handled == count + 6

    asyncio.run(main())
    assert most > 1
    for number in range(3):
        assert [operation for key, operation, _ in seen if key == number] == ["insert", "update"]
    assert {found["_id"]: found["times"] for found in database["copies"].find()} == {
        **dict.fromkeys(range(3), 2),
        **dict.fromkeys(range(100, 100 + count), 1),
    }
    assert all(lease.owner is None for lease in store.leases())


def test_a_cancelled_listener_with_lanes_gives_everything_back(shop: Any) -> None:
    watched, database, store, _ = shop
    database["orders"].insert_many([{"_id": number} for number in range(10, 30)])
    begun: set[str] = set()
    ended: list[str] = []

    async def main() -> None:
        both = asyncio.Event()

        async def hangs(change: AsyncChange) -> None:
            begun.add(change.resource)
            if len(begun) == 2:
                both.set()
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(change.resource)

        listener = AsyncListener(watched, hangs, resource="orders", store=store, partitions=2).start()
        await asyncio.wait_for(both.wait(), 300)
        assert listener._task is not None
        listener._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener.join()

    asyncio.run(main())
    assert sorted(ended) == sorted(begun)
    assert all(lease.owner is None for lease in store.leases())


def test_an_error_of_a_handler_in_a_lane_ends_the_listener_and_a_lost_lease_cancels_it(shop: Any) -> None:
    watched, _, store, _ = shop
    cancelled: list[Any] = []

    async def fails(change: AsyncChange) -> None:
        raise ValueError("no")

    async def judge(change: AsyncChange, error: Exception, attempt: int) -> str:
        await asyncio.sleep(0)
        return "retry" if attempt < 3 else "stop"

    async def main() -> None:
        listener = AsyncListener(watched, fails, resource="orders", store=store, partitions=2, on_error=judge)
        with pytest.raises(HandlerFailed, match="ValueError"):
            await asyncio.wait_for(listener.run(), 300)
        assert listener.statistics.failures >= 3

        async def handle(change: AsyncChange) -> None:
            if cancelled:
                second.stop()
                return
            for lease in store.leases():
                store.revoke(lease.resource)
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.append(change.resource)
                raise

        second = AsyncListener(watched, handle, resource="orders", store=store, lease_seconds=1)
        await asyncio.wait_for(second.run(), 300)  # it finds the lanes, and follows them

    asyncio.run(main())
    assert cancelled
