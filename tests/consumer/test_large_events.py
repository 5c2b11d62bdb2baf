"""Events that a stream gives in fragments or not at all, and events without an ``operationType``. No listener had been
given one: it ended with KeyError in the middle of an event, and could never pass it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.embedded import ReplicaSet
from tailrace.errors import ServerError, StreamInvalidated, UsageError
from tests.consumer.shops import begin_now, new_shop

pytestmark = pytest.mark.mongod

SPLIT: list[dict[str, Any]] = [{"$changeStreamSplitLargeEvent": {}}]
IMAGES = {"full_document": "whenAvailable", "full_document_before_change": "whenAvailable"}


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Five changes, of which the third makes an event of 25 MB, and then a drop, at which listeners end."""
    with new_shop(replica_set.uri, request, "large") as shop:
        shop.orders.drop()
        shop.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
        begin_now(MongoLeaseStore(shop["leases"]), shop.client)
        shop.orders.insert_one({"_id": 0})
        shop.orders.insert_one({"_id": 1, "a": "x" * 12_000_000})
        shop.orders.update_one({"_id": 1}, {"$set": {"b": 1}})
        shop.orders.insert_one({"_id": 2})
        shop.orders.insert_one({"_id": 3})
        shop.orders.drop()
        yield shop


WHOLE = ["insert 0", "insert 1", "update 1", "insert 2", "insert 3", "drop None", "invalidate None"]


def listen(shop: Any, **options: Any) -> tuple[list[str], Listener]:
    seen: list[str] = []

    def handle(change: Change) -> None:
        seen.append(f"{change.operation_type} {(change.document_key or {}).get('_id')}")
        if change.operation_type == "update" and "full_document" in options:
            before, after = change.event["fullDocumentBeforeChange"], change.event["fullDocument"]
            assert after == {**before, "b": 1}
            assert list(change.event)[:3] == ["_id", "operationType", "clusterTime"]
            assert "splitEvent" not in change.event

    listener = Listener(shop.orders, handle, resource="orders", store=MongoLeaseStore(shop["leases"]), **options)
    return seen, listener


@pytest.mark.parametrize("partitions", [1, 2])
def test_the_fragments_of_an_event_are_handled_as_one(shop: Any, partitions: int) -> None:
    seen, listener = listen(shop, pipeline=SPLIT, partitions=partitions, **IMAGES)
    with pytest.raises(StreamInvalidated):
        listener.run()
    assert sorted(seen[:-2]) == sorted(WHOLE[:-2])
    assert seen[-2:] == WHOLE[-2:]


def test_a_listener_that_ends_at_a_split_event_begins_with_it_again_and_can_go_on_without_the_stage(shop: Any) -> None:
    tries: list[str] = []

    def handle(change: Change) -> None:
        tries.append(change.operation_type)
        if change.operation_type == "update":
            listener.stop()

    store = MongoLeaseStore(shop["leases"])
    listener = Listener(shop.orders, handle, resource="orders", store=store, pipeline=SPLIT, **IMAGES)
    listener.run()
    assert tries == ["insert", "insert", "update"]
    seen, listener = listen(shop)
    with pytest.raises(StreamInvalidated):
        listener.run()
    assert seen == WHOLE[3:]


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_the_stream_cannot_give_is_a_dead_letter(shop: Any, partitions: int) -> None:
    letters = DeadLetters(shop["letters"], tries=2)
    seen, listener = listen(shop, on_error=letters, partitions=partitions, **IMAGES)
    with pytest.raises(StreamInvalidated):
        listener.run()
    assert sorted(seen) == sorted(one for one in WHOLE if one != "update 1")
    assert listener.statistics.skipped == 1
    (letter,) = letters.letters()
    assert (letter.operation_type, letter.namespace, letter.shown_key) == (
        "update",
        f"{shop.name}.orders",
        '{"_id": 1}',
    )
    assert "BSONObj size" in letter.reason
    with pytest.raises(UsageError, match="too large"):
        _ = letter.event


def test_lanes_that_begin_at_such_an_event_make_one_dead_letter_of_it(shop: Any) -> None:
    """Then the stream fails when it is opened, before any lane has been given anything."""
    store = MongoLeaseStore(shop["leases"])
    _, listener = listen(shop, **IMAGES)
    with pytest.raises(ServerError):
        listener.run()
    assert "token" in (store.read("orders").position or {})  # type: ignore[union-attr]
    letters = DeadLetters(shop["letters"], tries=2)
    seen, listener = listen(shop, on_error=letters, partitions=3, **IMAGES)
    with pytest.raises(StreamInvalidated):
        listener.run()
    assert sorted(seen) == sorted(WHOLE[3:])
    assert len(list(letters.letters())) == 1


def test_without_a_policy_the_stream_s_own_error_ends_the_listener_before_the_event(shop: Any) -> None:
    for _ in range(2):
        seen, listener = listen(shop, **IMAGES)
        with pytest.raises(ServerError, match="SplitLargeEvent"):
            listener.run()
    assert seen == []
    seen, listener = listen(shop, pipeline=SPLIT, **IMAGES)
    with pytest.raises(StreamInvalidated):
        listener.run()
    assert seen == WHOLE[2:]


def test_an_event_at_which_a_stage_of_the_user_fails_is_a_dead_letter_and_so_is_one_that_is_too_large(
    shop: Any,
) -> None:
    letters = DeadLetters(shop["letters"], tries=1)
    fails = [{"$addFields": {"x": {"$divide": [1, {"$subtract": ["$documentKey._id", 2]}]}}}]
    seen, listener = listen(shop, pipeline=fails, on_error=letters, full_document_before_change="whenAvailable")
    with pytest.raises(StreamInvalidated):
        listener.run()
    assert seen == [one for one in WHOLE if one != "insert 2"]
    assert ["divide by zero" in letter.reason for letter in letters.letters()] == [True]


def test_an_event_without_an_operation_is_handled(shop: Any) -> None:
    """An invalidate is recognised by its token."""
    keys: list[Any] = []
    store = MongoLeaseStore(shop["leases"])
    project = [{"$project": {"documentKey": 1}}]
    with pytest.raises(StreamInvalidated):
        Listener(
            shop.orders,
            lambda change: keys.append((change.operation_type, change.document_key)),
            resource="orders",
            store=store,
            pipeline=project,
        ).run()
    assert keys == [*(("", {"_id": key}) for key in (0, 1, 1, 2, 3)), ("", None), ("", None)]


def test_lanes_say_that_they_need_the_operation(shop: Any) -> None:
    """Instead they logged for ever that the stream will be resumed when that is possible."""
    seen, listener = listen(shop, pipeline=[{"$project": {"documentKey": 1}}], partitions=2)
    with pytest.raises(UsageError, match="operationType"):
        listener.run()
    assert seen == []
