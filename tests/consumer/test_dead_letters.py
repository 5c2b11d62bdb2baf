"""Poison: what a handler cannot handle is kept with its position and reason, and replayed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace
from tailrace.consumer import Change, HandlerFailed, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import MemoryPublisher, MessageRelay, Outbox
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError

pytestmark = pytest.mark.mongod


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"letters_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield client[name], MongoLeaseStore(client[f"{name}_leases"]["leases"])
        client.drop_database(name)
        client.drop_database(f"{name}_leases")


def outbox(database: Any) -> None:
    """Three documents, of which the second makes no message."""
    documents = [{"_id": 1, "topic": "t", "payload": "one"}, {"_id": 2, "token": "user's", "key": 1}]
    database.outbox.insert_many([*documents, {"_id": 3, "topic": "t", "payload": "three"}])


def test_the_listener_goes_on_behind_a_dead_letter_which_is_replayed(
    shop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    database, store = shop
    publisher = MemoryPublisher()
    relay = MessageRelay(publisher, Outbox())
    letters = DeadLetters(database.letters, tries=3)
    tries = []
    ended = threading.Event()

    def handle(change: Change) -> None:
        tries.append(change.document_key["_id"])
        relay(change)
        if tries[-1] == 3:
            ended.set()

    with Listener(database.outbox, handle, resource="out.box", store=store, on_error=letters):
        outbox(database)
        assert ended.wait(60)
    assert tries == [1, 2, 2, 2, 3]
    assert [message.body for message in publisher.stored] == [b"one", b"three"]
    (letter,) = letters.letters("out.box")
    assert list(letters.letters("another")) == []
    assert letter.document_key == {"_id": 2}
    assert (letter.error, letter.tries, letter.namespace) == ("MessageRefused", 3, f"{database.name}.outbox")
    assert "names no topic" in letter.reason
    assert "is a dead letter after 3 tries" in caplog.text
    assert letter.token["_data"] == letter.message_id
    with pytest.raises(Exception, match="names no topic"):
        letters.replay(relay)
    assert letters.replay(MessageRelay(publisher, Outbox(fixed_topic="mended", payload="token"))) == 1
    assert publisher.stored[-1].body == b"user's"
    assert publisher.stored[-1].id == letter.message_id
    assert list(letters.letters()) == []


def test_the_listener_ends_at_a_dead_letter_if_that_is_chosen(shop: Any) -> None:
    database, store = shop
    outbox(database)
    publisher = MemoryPublisher()
    letters = DeadLetters(database.letters, tries=2, then="stop")
    for _ in range(2):  # again, and the letter is there once
        with pytest.raises(HandlerFailed, match="MessageRefused"):
            Listener(
                database.outbox, MessageRelay(publisher, Outbox()), resource="outbox", store=store, on_error=letters
            ).run()
    assert [message.body for message in publisher.stored] == [b"one"]
    assert len(list(letters.letters())) == 1


def test_a_broker_that_is_away_makes_no_dead_letter(shop: Any) -> None:
    database, store = shop
    outbox(database)
    publisher = MemoryPublisher()
    publisher.away = True
    letters = DeadLetters(database.letters, tries=1)
    relay = MessageRelay(publisher, Outbox(), retry_seconds=0)
    with pytest.raises(HandlerFailed, match="PublisherAway"):
        Listener(database.outbox, relay, resource="outbox", store=store, on_error=letters).run()
    assert list(letters.letters()) == []
    publisher.away = False
    ended = threading.Event()

    def handle(change: Change) -> None:
        relay(change)
        if len(publisher.stored) == 2:
            ended.set()

    with Listener(database.outbox, handle, resource="outbox", store=store, on_error=letters):
        assert ended.wait(60)
    assert [message.body for message in publisher.stored] == [b"one", b"three"]


def test_an_outbox_whose_messages_were_published_is_emptied(shop: Any) -> None:
    database, store = shop
    publisher = MemoryPublisher()
    relay = MessageRelay(publisher, Outbox(), delete_from=database.outbox)
    database.outbox.insert_many([{"_id": number, "topic": "t", "payload": str(number)} for number in range(3)])
    ended = threading.Event()

    def handle(change: Change) -> None:
        relay(change)
        if change.operation_type == "delete" and change.document_key["_id"] == 2:
            ended.set()

    with Listener(database.outbox, handle, resource="outbox", store=store):
        assert ended.wait(60)
    assert [message.body for message in publisher.stored] == [b"0", b"1", b"2"]
    assert database.outbox.count_documents({}) == 0


def test_what_cannot_be_is_refused(shop: Any) -> None:
    database, _ = shop
    for options in ({"tries": 0}, {"tries": True}, {"then": "ignore"}):
        with pytest.raises(UsageError):
            DeadLetters(database.letters, **options)
    database.letters.insert_one({"_id": 1})
    with pytest.raises(UsageError, match="none"):
        list(DeadLetters(database.letters).letters())
