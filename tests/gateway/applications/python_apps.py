"""motor and beanie: what their change streams give, from the server itself and through the gateway.

python python_apps.py motor|beanie DIRECT GATEWAY NAME
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import bson
from bson import Decimal128
from bson.raw_bson import RawBSONDocument

_PATIENCE_S = 120.0


class Streams:
    """Streams on both sides, each read by a task of its own; their events are BSON in hexadecimal digits."""

    def __init__(self) -> None:
        self.given: dict[str, list[list[str]]] = {"direct": [], "gateway": []}
        self._tasks: list[asyncio.Task[None]] = []

    async def follow(self, side: str, stream: Any) -> None:
        """``stream`` is entered, so that it is open at the server when this returns."""
        events: list[str] = []
        self.given[side].append(events)
        await stream.__aenter__()

        async def read() -> None:
            async for event in stream:
                raw = event.raw if isinstance(event, RawBSONDocument) else bson.encode(event)
                events.append(bytes(raw).hex())

        self._tasks.append(asyncio.ensure_future(read()))

    def count(self, side: str) -> int:
        return sum(map(len, self.given[side]))

    async def step(self, write: Awaitable[Any]) -> Any:
        """One step of the workload, and what both sides are given for it."""
        before = self.count("direct")
        result = await write
        end = asyncio.get_running_loop().time() + _PATIENCE_S
        while self.count("direct") == before or self.count("gateway") < self.count("direct"):
            if asyncio.get_running_loop().time() > end:
                break  # what one side lacks is reported at the end
            await asyncio.sleep(0.02)
        return result

    async def quiet(self) -> None:
        """Wait until nothing more comes on either side."""
        last, same = -1, 0
        while same < 15:
            now = self.count("direct") + self.count("gateway")
            last, same = now, same + 1 if now == last else 0
            await asyncio.sleep(0.1)

    async def settle(self) -> None:
        await self.quiet()
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error


async def use_motor(uris: dict[str, str], name: str) -> dict[str, Any]:
    from motor.motor_asyncio import AsyncIOMotorClient

    streams = Streams()
    clients = {side: AsyncIOMotorClient(uri, document_class=RawBSONDocument) for side, uri in uris.items()}
    plain = [AsyncIOMotorClient(uri)[name]["orders"] for uri in uris.values()]
    await AsyncIOMotorClient(uris["direct"]).drop_database(name)
    await plain[0].insert_one({"_id": "before"})
    for side, client in clients.items():
        orders = client[name]["orders"]
        await streams.follow(side, orders.watch(full_document="updateLookup", max_await_time_ms=200))
        await streams.follow(side, client[name].watch([{"$match": {"operationType": "insert"}}], max_await_time_ms=200))
        await streams.follow(
            side, client.watch([{"$match": {"ns.db": name}}, {"$project": {"clusterTime": 0}}], max_await_time_ms=200)
        )
    for number in range(20):
        orders = plain[number % 2]
        await streams.step(orders.insert_one({"_id": number, "n": number, "list": [1, {"a": number}], "f": number / 3}))
        await streams.step(
            orders.update_one({"_id": number}, {"$push": {"list": "x"}, "$set": {"s.t": Decimal128("1.5")}})
        )
    await streams.step(plain[0].replace_one({"_id": 1}, {"whole": True}))
    await streams.step(plain[1].delete_many({"_id": {"$in": [2, 3]}}))

    async def transact() -> None:
        async with await plain[1].database.client.start_session() as session, session.start_transaction():
            await plain[1].insert_many([{"_id": f"t{number}"} for number in range(3)], session=session)
            await plain[1].update_one({"_id": 5}, {"$unset": {"list": 1}}, session=session)

    await streams.step(transact())
    await streams.quiet()  # so that no document is still to be looked up when its collection is dropped
    await streams.step(plain[0].rename("moved", dropTarget=True))
    await streams.settle()
    return {"given": streams.given}


async def use_beanie(uris: dict[str, str], name: str) -> dict[str, Any]:
    from beanie import Document, init_beanie
    from beanie.operators import Inc, Push, Set
    from pydantic import BaseModel, Field
    from pymongo import AsyncMongoClient

    class Line(BaseModel):
        sku: str
        count: int = 1

    class Order(Document):
        customer: str
        lines: list[Line] = Field(default_factory=list)
        total: float = 0.0

        class Settings:
            name = "orders"
            use_state_management = True
            use_revision = True

    class OrderThroughGateway(Order):
        class Settings(Order.Settings):
            pass

    streams = Streams()
    await AsyncMongoClient[Any](uris["direct"]).drop_database(name)
    models: dict[str, Any] = {"direct": Order, "gateway": OrderThroughGateway}
    for side, uri in uris.items():
        await init_beanie(database=AsyncMongoClient[Any](uri)[name], document_models=[models[side]])
    for side, watched in models.items():
        collection = watched.get_pymongo_collection()
        for options in ({"full_document": "updateLookup"}, {"pipeline": [{"$match": {"operationType": "update"}}]}):
            await streams.follow(side, await collection.watch(**options, max_await_time_ms=200))
    kept = []
    for number in range(12):
        order = models["gateway" if number % 2 else "direct"](
            customer=f"c{number}", lines=[Line(sku="a"), Line(sku="b", count=number)], total=number / 7
        )
        kept.append(await streams.step(order.insert()))
    for order in kept[:4]:
        order.lines.append(Line(sku="late"))
        await streams.step(order.save_changes())
    await streams.step(kept[4].update(Set({"customer": "renamed"}), Inc({"total": 2})))
    await streams.step(kept[5].update(Push({"lines": Line(sku="pushed").model_dump()})))
    kept[6].customer = "replaced"
    await streams.step(kept[6].replace())
    await streams.step(kept[7].delete())
    of = models["gateway"]
    await streams.step(of.find(of.customer == "c8").update(Set({"total": 100.0})))
    await streams.step(of.find_one(of.customer == "c9").upsert(Set({"total": 1.0}), on_insert=of(customer="c9")))
    await streams.step(of.find_one(of.customer == "new").upsert(Set({"total": 1.0}), on_insert=of(customer="new")))
    await streams.step(of.insert_many([of(customer=f"m{number}") for number in range(5)]))
    await streams.step(of.find(of.total > 50).delete())
    await streams.settle()
    return {"given": streams.given}


APPLICATIONS: dict[str, Callable[[dict[str, str], str], Awaitable[dict[str, Any]]]] = {
    "motor": use_motor,
    "beanie": use_beanie,
}


if __name__ == "__main__":
    chosen, direct, through, database = sys.argv[1:]
    found = asyncio.run(APPLICATIONS[chosen]({"direct": direct, "gateway": through}, database))  # type: ignore[arg-type]
    print(json.dumps(found))
