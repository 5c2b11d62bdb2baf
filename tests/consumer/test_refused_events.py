"""Events that a stream cannot give, and positions at which a changed pipeline lets no stream begin.

Only an event over the size limit was passed over: a listener ended for good at any other event that its stream could
not give, and with ``engine="server"`` at every one. Earlier tests had one kind of such events, and one engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import tailrace
from tailrace.consumer import AsyncListener, Change, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamFatal, ServerError
from tests.consumer.shops import begin_now, new_shop
from tests.server_in_use import IN_BETWEEN

pytestmark = pytest.mark.mongod

ENGINES = ("oplog", "server")
#: Fails at the documents 3 and 4, but not at the drop, which has no key.
DIVIDES: list[dict[str, Any]] = [
    {"$addFields": {"x": {"$divide": [1, {"$multiply": [*({"$subtract": ["$documentKey._id", n]} for n in (3, 4))]}]}}}
]
IN_A_MATCH: list[dict[str, Any]] = [
    {"$match": {"$expr": {"$ne": [DIVIDES[0]["$addFields"]["x"], 77]}}},
    {"$match": {"documentKey._id": {"$ne": 1}}},
]
REQUIRED = {"full_document_before_change": "required"}


class Shop:
    """Orders in a database of the test's own, and the listeners that follow them."""

    def __init__(self, uri: str, database: Any) -> None:
        self.uri = uri
        self.database = database
        self.orders = database.orders
        self.store = MongoLeaseStore(database.leases)
        self.letters = DeadLetters(database.letters, tries=1)

    def begin(self) -> None:
        """Let listeners of ``orders`` begin here."""
        begin_now(self.store, self.database.client)

    def fill(self) -> None:
        """Inserts of 0 to 8; 3 to 6 in one transaction, so at one time."""
        self.orders.insert_many([{"_id": number} for number in range(3)])
        with self.database.client.start_session() as session, session.start_transaction():
            for number in range(3, 7):
                self.orders.insert_one({"_id": number}, session=session)
        self.orders.insert_many([{"_id": number} for number in (7, 8)])

    def handled(self, engine: str, until: Any, before: Sequence[Any] = (), **options: Any) -> list[Any]:
        """What a listener handles up to the change of the document ``until``. If that is a set, until all of it is
        handled, counting what was handled ``before``: one lane may be far behind another."""
        seen: list[Any] = []

        def handle(change: Change) -> None:
            seen.append((change.document_key or {}).get("_id"))
            if until <= {*before, *seen} if isinstance(until, set) else seen[-1] == until:
                listener.stop()

        async def handle_async(change: Any) -> None:
            handle(change)

        with tailrace.connect(self.uri, engine=engine) as client:
            watched = client[self.database.name].orders
            named: dict[str, Any] = {"resource": "orders", "store": self.store, "on_error": self.letters, **options}
            listener: Any
            if named.pop("is_async", False):
                listener = AsyncListener(watched, handle_async, **named)
                asyncio.run(asyncio.wait_for(listener.run(), 300))
            else:
                listener = Listener(watched, handle, **named)
                listener.start()
                if not listener.join(300):
                    listener.stop()
                    pytest.fail(f"the listener has not come to {until} in five minutes: {seen}")
        return seen

    def refused(self) -> list[Any]:
        return [letter.event["documentKey"]["_id"] for letter in self.letters.letters()]


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Shop]:
    with new_shop(replica_set.uri, request, "refused") as database:
        shop = Shop(replica_set.uri, database)
        shop.begin()
        yield shop


@pytest.mark.parametrize("pipeline", [DIVIDES, IN_A_MATCH], ids=["computed", "in a match"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_the_user_s_stages_fail_at_is_a_dead_letter_and_no_more(
    shop: Shop, engine: str, pipeline: Any, partitions: int
) -> None:
    shop.fill()
    seen = shop.handled(engine, 8, pipeline=pipeline, partitions=partitions)
    wanted = [0, 1, 2, 5, 6, 7, 8] if pipeline is DIVIDES else [0, 2, 5, 6, 7, 8]
    if partitions == 1:
        assert seen == wanted
    else:
        seen += shop.handled(engine, {*wanted, 9}, seen, **more(shop, pipeline, partitions))
        assert sorted(seen) == [*wanted, 9]
    assert shop.refused() == [3, 4]


def more(shop: Shop, pipeline: Any, partitions: int) -> dict[str, Any]:
    """Write one more change, so that lanes that were behind when the last one was handled come to their end too."""
    shop.orders.insert_one({"_id": 9})
    return {"pipeline": pipeline, "partitions": partitions}


def with_images(shop: Shop) -> None:
    shop.orders.drop()
    shop.database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    shop.orders.insert_many([{"_id": number} for number in range(5)])
    shop.database.command("collMod", "orders", changeStreamPreAndPostImages={"enabled": False})
    shop.orders.update_one({"_id": 0}, {"$set": {"x": 1}})
    shop.database.command("collMod", "orders", changeStreamPreAndPostImages={"enabled": True})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_change_whose_image_is_missing_is_a_dead_letter(shop: Shop, engine: str, partitions: int) -> None:
    with_images(shop)
    shop.database.leases.delete_many({})
    shop.begin()
    shop.orders.update_one({"_id": 1}, {"$set": {"x": 1}})
    shop.database.command("collMod", "orders", changeStreamPreAndPostImages={"enabled": False})
    shop.orders.update_one({"_id": 2}, {"$set": {"x": 1}})
    shop.database.command("collMod", "orders", changeStreamPreAndPostImages={"enabled": True})
    shop.orders.update_one({"_id": 3}, {"$set": {"x": 1}})
    shop.orders.update_one({"_id": 4}, {"$set": {"x": 1}})
    seen = shop.handled(engine, 4, partitions=partitions, **REQUIRED)
    shop.orders.update_one({"_id": 0}, {"$set": {"x": 2}})
    seen += shop.handled(engine, {0, 1, 3, 4}, seen, partitions=partitions, **REQUIRED)
    assert sorted(seen) == [0, 1, 3, 4]
    assert shop.refused() == [2]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_event_over_the_limit_is_a_dead_letter_with_each_engine(shop: Shop, engine: str) -> None:
    shop.orders.insert_one({"_id": 1, "a": "x" * 12_000_000})
    with_large = {"full_document": "updateLookup"}
    shop.orders.update_one({"_id": 1}, {"$set": {"b": "y" * 4_500_000}})
    shop.orders.insert_one({"_id": 2})
    assert shop.handled(engine, 2, **with_large) == [1, 2]
    (letter,) = shop.letters.letters()
    assert (letter.operation_type, letter.shown_key) == ("update", '{"_id": 1}')


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_policy_the_error_ends_the_listener_before_the_event_each_time(shop: Shop, engine: str) -> None:
    shop.fill()
    assert shop.handled(engine, 2, pipeline=DIVIDES, on_error="stop") == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ServerError, match="divide by zero"):
            shop.handled(engine, None, pipeline=DIVIDES, on_error="stop")
    assert shop.handled(engine, 8) == [*range(3, 9)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_policy_that_is_asked_for_a_retry_gets_the_same_event_again(shop: Shop, engine: str) -> None:
    shop.fill()
    shop.letters = DeadLetters(shop.database.letters, tries=2)
    assert shop.handled(engine, 8, pipeline=DIVIDES, is_async=True) == [0, 1, 2, 5, 6, 7, 8]
    assert shop.refused() == [3, 4]
    assert {letter.tries for letter in shop.letters.letters()} == {2}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_changed_pipeline_goes_on_after_the_last_change(shop: Shop, engine: str, partitions: int) -> None:
    """It always ended with 280 if the pipeline no longer gives the last change that was handled."""
    shop.fill()
    assert shop.handled(engine, 4) == [*range(5)]
    odd = [{"$addFields": {"key": "$documentKey._id"}}, {"$match": {"key": {"$in": [5, 7, 9]}}}]
    shop.orders.insert_one({"_id": 9})
    seen = shop.handled(engine, 9, pipeline=odd, partitions=partitions)
    if partitions == 1:
        assert seen == [5, 7, 9]
        shop.orders.insert_one({"_id": 11})
        assert shop.handled(engine, 11) == [11]
    else:
        shop.orders.insert_one({"_id": 11})
        seen += shop.handled(engine, {5, 7, 9, 11}, seen, partitions=partitions)
        assert sorted(seen) == [5, 7, 9, 11]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipeline_that_changes_the_token_ends_the_listener(shop: Shop, engine: str) -> None:
    shop.fill()
    assert shop.handled(engine, 1) == [0, 1]
    with pytest.raises(ChangeStreamFatal):
        shop.handled(engine, 8, pipeline=[{"$addFields": {"_id": 5}}])
    assert shop.refused() == []


@pytest.mark.parametrize("pipeline", [[{"$nothing": 1}], [{"$match": {"$nothing": 1}}]])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipeline_that_no_server_takes_is_no_matter_of_an_event(shop: Shop, engine: str, pipeline: Any) -> None:
    shop.fill()
    with pytest.raises(tailrace.TailraceError, match=r"\$nothing"):
        shop.handled(engine, 8, pipeline=pipeline)
    assert shop.refused() == []


@pytest.mark.slow
@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_older_servers(start_replica_set: Callable[..., ReplicaSet], version: str, request: Any) -> None:
    uri = start_replica_set(version=version).uri
    for engine in ENGINES:
        for partitions in (1, 2):
            for pipeline, wanted in ((DIVIDES, [0, 1, 2, 5, 6, 7, 8]), (IN_A_MATCH, [0, 2, 5, 6, 7, 8])):
                with new_shop(uri, request, "refused") as database:
                    shop = Shop(uri, database)
                    shop.begin()
                    shop.fill()
                    seen = shop.handled(engine, 8, pipeline=pipeline, partitions=partitions)
                    seen += shop.handled(engine, {*wanted, 9}, seen, **more(shop, pipeline, partitions))
                    assert sorted(seen) == [*wanted, 9]
                    assert shop.refused() == [3, 4]


def test_an_invalidate_that_the_user_s_stages_fail_at_is_gone_on_after(shop: Shop) -> None:
    """It was passed over like any other event, but no stream resumes at its token: the listener ended for good."""
    kind = {"$cond": [{"$eq": ["$operationType", "invalidate"]}, 0, 1]}
    fails = [{"$addFields": {"x": {"$divide": [1, kind]}}}]
    shop.orders.insert_one({"_id": 1})
    shop.orders.drop()
    shop.orders.insert_one({"_id": 2})
    seen = shop.handled("oplog", 2, pipeline=fails, on_invalidate="resume")
    assert seen == [1, None, 2]
    assert [letter.event["operationType"] for letter in shop.letters.letters()] == ["invalidate"]
