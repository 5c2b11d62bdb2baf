"""Poison: a change that a handler cannot handle is kept with its position and the reason, and replayed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.act.consumer import newer_changes
from tailrace.act.consumer.newer_changes import NewerChanges
from tailrace.cli.main import main
from tailrace.consumer import Change, Fenced, HandlerFailed, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import ChangeMessages, MemoryPublisher, MessageRelay, Outbox
from tailrace.core import raw_bson
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


def test_the_listener_goes_on_after_a_dead_letter_which_is_replayed(
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
        assert ended.wait(300)
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


@pytest.mark.parametrize("then", ["skip", "stop"])
def test_a_lane_goes_on_after_its_poison_or_ends_with_all_of_them(shop: Any, then: Any) -> None:
    """Dead letters had only been tried without lanes."""
    database, store = shop
    fine = {"topic": "t", "payload": ""}
    database.outbox.insert_many([{"_id": number, **({} if number == 7 else fine)} for number in range(80)])
    publisher, letters = MemoryPublisher(), DeadLetters(database.letters, tries=2, then=then)
    relay = MessageRelay(publisher, Outbox())
    options: dict[str, Any] = {"resource": "outbox", "store": store, "on_error": letters, "partitions": 4}
    listener = Listener(database.outbox, relay, **options)
    if then == "stop":
        with pytest.raises(HandlerFailed, match="MessageRefused"):
            listener.run()
        assert len(list(letters.letters())) == 1
        assert all(lease.owner is None for lease in store.leases())
        options["on_error"] = DeadLetters(database.letters, tries=1)
        listener = Listener(database.outbox, relay, **options)
    with listener:
        deadline = time.monotonic() + 300
        while len({message.id for message in publisher.stored}) < 79:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert len(publisher.stored) == 79, "nothing is published again where all was committed"
    (letter,) = letters.letters()
    assert letter.document_key == {"_id": 7}


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
        assert ended.wait(300)
    assert [message.body for message in publisher.stored] == [b"one", b"three"]


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_listener_that_is_stopped_while_the_broker_is_away_ends_in_peace(shop: Any, partitions: int) -> None:
    """It ended with HandlerFailed, as if its broker had been away for good."""
    database, store = shop
    database.outbox.insert_many([{"_id": number, "topic": "t", "payload": str(number)} for number in range(4)])
    tried = threading.Event()

    class Away(MemoryPublisher):
        def publish(self, messages: Any) -> int:
            try:
                return super().publish(messages)
            finally:
                tried.set()

    publisher = Away()
    publisher.away = True
    letters = DeadLetters(database.letters, tries=1)
    options: dict[str, Any] = {"resource": "outbox", "store": store, "on_error": letters, "partitions": partitions}
    with Listener(database.outbox, MessageRelay(publisher, Outbox()), **options):
        assert tried.wait(300)
    publisher.away = False
    assert list(letters.letters()) == []
    with Listener(database.outbox, MessageRelay(publisher, Outbox()), **options):
        deadline = time.monotonic() + 300
        while len(publisher.stored) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert sorted(message.body for message in publisher.stored) == [b"0", b"1", b"2", b"3"]


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
        assert ended.wait(300)
    assert [message.body for message in publisher.stored] == [b"0", b"1", b"2"]
    assert database.outbox.count_documents({}) == 0


def fail_all(shop: Any, count: int) -> DeadLetters:
    """Dead letters of so many inserts."""
    database, store = shop
    letters = DeadLetters(database.letters, tries=1)
    ended = threading.Event()

    def fails(change: Change) -> None:
        if change.document_key == {"_id": count - 1}:
            ended.set()
        raise ValueError(f"not {change.document_key}")

    database.orders.insert_many([{"_id": number} for number in range(count)])
    with Listener(database.orders, fails, resource="orders", store=store, on_error=letters):
        assert ended.wait(300)
    assert len(list(letters.letters())) == count
    return letters


def test_a_letter_has_what_a_change_has_so_that_the_same_handler_takes_it(shop: Any) -> None:
    """Through the fence it writes under the old token: what a newer owner has written since stays."""
    database, _ = shop
    letters = fail_all(shop, 3)
    database.copies.insert_many([{"_id": 1, "by": "a newer owner", "_fence": {"orders": 9}}, {"_id": 2}])

    def handle(change: Any) -> None:
        change.check()
        change.fence.update_one(database.copies, change.document_key, {"$set": {"by": "a letter"}})

    assert letters.replay(handle, change=next(letters.letters()).message_id) == 1
    with pytest.raises(Fenced):
        letters.replay(handle)
    assert [letter.document_key for letter in letters.letters()] == [{"_id": 1}, {"_id": 2}]
    assert letters.replay(handle, change=list(letters.letters())[1].message_id) == 1
    assert [found.get("by") for found in database.copies.find(sort=[("_id", 1)])] == ["a newer owner", "a letter"]


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_letter_does_not_undo_what_the_same_listener_has_written_since(shop: Any, partitions: int) -> None:
    """The letter's token was also that of the later changes. In the test above these have a newer owner's token."""
    database, store = shop
    letters = DeadLetters(database.letters, tries=1)
    done = threading.Event()

    def handle(change: Any) -> None:
        found = change.full_document
        if found["_id"] == 1 and found["v"] == 2 and not done.is_set():
            raise ValueError("not now")
        change.fence.replace_one(database.copies, {"_id": found["_id"]}, found, upsert=True)
        if found["_id"] == 9:
            done.set()

    for version in (1, 2, 3):
        database.orders.replace_one({"_id": 1}, {"_id": 1, "v": version}, upsert=True)
    database.orders.insert_one({"_id": 9, "v": 1})
    options: dict[str, Any] = {"resource": "orders", "store": store, "on_error": letters, "partitions": partitions}
    with Listener(database.orders, handle, **options):
        assert done.wait(300)
        deadline = time.monotonic() + 300
        while (database.copies.find_one({"_id": 1}) or {}).get("v") != 3:
            assert time.monotonic() < deadline
    with pytest.raises(Fenced):
        letters.replay(handle)
    assert database.copies.find_one({"_id": 1})["v"] == 3
    database.copies.delete_one({"_id": 1})
    database.copies.insert_one({"_id": 1, "v": 1, "_fence": {"orders": 1}})
    assert letters.replay(handle) == 1, "what was written before it is replaced"
    assert database.copies.find_one({"_id": 1})["v"] == 2


def test_strings_that_are_not_utf_8_reach_the_letters_whoever_put_them_at_the_top(shop: Any) -> None:
    """A user's stage can remove it. Then the kind of the change could not be read, and no letter was written."""
    database, store = shop
    bad = raw_bson.encode_element(raw_bson.STRING, b"name", raw_bson.encode_string(b"M\xfcller"))
    identity = raw_bson.encode_element(raw_bson.INT32, b"_id", raw_bson.encode_int32(1))
    database.orders.insert_one(RawBSONDocument(raw_bson.encode_document(identity, bad)))
    letters, publisher = DeadLetters(database.letters, tries=1), MemoryPublisher()
    make = ChangeMessages("orders")

    def fails(change: Change) -> None:
        MessageRelay(publisher, make)(change)
        listener.stop()
        raise ValueError("not now")

    pipeline = [{"$addFields": {"name": "$fullDocument.name"}}]
    options: dict[str, Any] = {"resource": "orders", "store": store, "pipeline": pipeline, "on_error": letters}
    listener = Listener(database.orders, fails, **options)
    listener.run()
    (letter,) = letters.letters()
    assert (letter.operation_type, letter.shown_key) == ("insert", '{"_id": 1}')
    assert letters.replay(MessageRelay(publisher, make)) == 1
    bodies = {message.body for message in publisher.stored}
    assert len(bodies) == 1
    assert bodies.pop().count(b'"name": "M\xfcller"') == 2


def test_a_resource_that_is_called_as_a_lane_is_none(shop: Any) -> None:
    """``x/1`` was taken for lane 1 of ``x``: a letter of it stamped its targets with a token of ``x``."""
    database, _ = shop
    database.copies.insert_one({"_id": 0, "_fence": {"x": 5}})
    letter = replace(next(fail_all(shop, 1).letters()), resource="x/1", version=3)
    letter.fence.update_one(database.copies, {"_id": 0}, {"$set": {"by": "a letter"}})
    assert database.copies.find_one() == {"_id": 0, "_fence": {"x": 5, "x/1": 3}, "by": "a letter"}


def test_the_token_of_a_lane_s_letter_is_older_than_that_of_a_later_number_of_lanes(shop: Any) -> None:
    database, _ = shop
    letter = replace(next(fail_all(shop, 1).letters()), resource="orders/3", version=(1 << 32) + 5)
    database.copies.insert_one({"_id": 0, "_fence": {"orders/1": (2 << 32) + 1, "orders": 2 << 32}})
    with pytest.raises(Fenced):
        letter.fence.update_one(database.copies, {"_id": 0}, {"$set": {"by": "a letter"}})


def test_a_letter_is_replayed_exactly_once_in_a_transaction(shop: Any) -> None:
    database, _ = shop
    letters = fail_all(shop, 2)
    database.create_collection("counters")

    def counts(change: Any, *, breaks: bool = False) -> None:
        with change.transaction() as session:
            database.counters.update_one(change.document_key, {"$inc": {"times": 1}}, upsert=True, session=session)
            if breaks:
                raise InterruptedError

    for letter in letters.letters():
        with pytest.raises(InterruptedError):
            counts(letter, breaks=True)
    assert database.counters.find_one() is None
    first = next(letters.letters())
    counts(first)
    with pytest.raises(UsageError, match="is gone"):
        counts(first)
    assert letters.replay(counts) == 1
    assert list(database.counters.find(sort=[("_id", 1)])) == [{"_id": 0, "times": 1}, {"_id": 1, "times": 1}]


def test_the_command_line_lists_and_replays_one_or_all(
    shop: Any,
    replica_set: ReplicaSet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database, _ = shop
    where = f"{database.name}.letters"
    command = ["leases", "dead-letters"]
    rest = [replica_set.uri, "--letters", where]
    assert main([*command, *rest]) == 0
    assert capsys.readouterr().out == f"no dead letters in {where}\n"
    letters = fail_all(shop, 3)
    first, *_ = letters.letters()
    assert main([*command, "list", *rest, "--resource", "orders", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["documentKey"] for one in listed] == ['{"_id": 0}', '{"_id": 1}', '{"_id": 2}']
    assert listed[0]["position"] == first.cluster_time.for_programs()
    assert (listed[0]["reason"], listed[0]["tries"]) == ("not {'_id': 0}", 1)
    assert main([*command, *rest]) == 0
    assert 'insert of {"_id": 1} in' in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    handlers = "import sys\ndef takes(change): print('took', change.document_key['_id'])\n"
    handlers += "def refuses(change):\n    if change.document_key['_id'] == 2: raise ValueError('still not')\n"
    (tmp_path / "letter_handlers.py").write_text(handlers + "async def waits(change): ...\n")
    assert main([*command, "replay", "letter_handlers:takes", *rest, "--change", first.message_id]) == 0
    assert capsys.readouterr().out == "took 0\n1 replayed\n"
    assert main([*command, "replay", "letter_handlers:refuses", *rest, "--all"]) == 1
    said = capsys.readouterr().err
    assert "ValueError: still not" in said
    assert "1 were replayed before" in said
    assert [letter.document_key for letter in letters.letters()] == [{"_id": 2}]
    assert main([*command, "replay", "letter_handlers:takes", *rest, "--all", "--format", "json"]) == 0
    assert capsys.readouterr().out == 'took 2\n{"replayed": 1}\n'
    for wrong in (
        ["replay"],
        ["replay", "letter_handlers:takes"],
        ["replay", "letter_handlers:takes", "--all", "--change", "82"],
        ["replay", "letter_handlers:takes", "--change", "82"],
        ["replay", "letter_handlers:waits", "--all"],
        ["list", "--all"],
        ["list", "more"],
    ):
        assert main([*command, *wrong, "--uri", replica_set.uri, "--letters", where]) != 0, wrong
    assert main(["leases", replica_set.uri, "--letters", where]) != 0


def test_a_letter_whose_document_has_changed_since_is_kept_and_told(
    shop: Any,
    replica_set: ReplicaSet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler without a fence overwrote the newer value with the old one, and nobody was told."""
    database, _ = shop
    letters = fail_all(shop, 4)
    database.orders.update_one({"_id": 1}, {"$set": {"v": 2}})
    database.others.insert_one({"_id": 2})
    database.orders.delete_one({"_id": 3})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain_handlers.py").write_text("def takes(change): print('took', change.document_key['_id'])\n")
    rest = ["--uri", replica_set.uri, "--letters", f"{database.name}.letters"]
    replay = ["dead-letters", "replay", "plain_handlers:takes", *rest]
    before = {letter.document_key["_id"]: letter.message_id for letter in letters.letters()}
    assert main([*replay, "--all", "--resource", "orders"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("took 0\ntook 2\n2 replayed, 2 kept; --anyway hands them over all the same\n")
    assert f"{before[1]}: its document has changed since: update at 20" in said
    assert f"{before[3]}: its document has changed since: delete at 20" in said
    assert main([*replay, "--change", before[1], "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["replayed"] == 0
    assert told["kept"].keys() == {before[1]}
    assert [letter.document_key for letter in letters.letters()] == [{"_id": 1}, {"_id": 3}]
    assert main([*replay, "--change", before[1], "--anyway"]) == 0
    assert capsys.readouterr().out == "took 1\n1 replayed\n"


def test_changes_of_one_document_that_are_all_dead_letters_are_replayed_in_their_order(
    shop: Any, replica_set: ReplicaSet
) -> None:
    """None of them is newer than what the handler has: it has handled none of them."""
    database, store = shop
    letters = DeadLetters(database.letters, tries=1)
    refused = threading.Event()

    def handle(change: Change) -> None:
        if change.document_key["_id"] == 0 and change.operation_type != "delete":
            raise ValueError("not now")
        refused.set()

    for version in range(3):
        database.orders.replace_one({"_id": 0}, {"v": version}, upsert=True)
    database.orders.insert_one({"_id": 1})
    with Listener(database.orders, handle, resource="orders", store=store, on_error=letters):
        assert refused.wait(300)
    taken: list[Any] = []
    with NewerChanges(database.client, letters.letters(), letters.changes) as newer:
        count = letters.replay(
            lambda letter: taken.append(letter.full_document["v"]), keeps=lambda letter: newer.since(letter) is not None
        )
    assert count == 3
    assert taken == [0, 1, 2]


def test_whether_a_document_has_changed_cannot_be_told_of_what_the_oplog_has_lost(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, _ = shop
    letters = fail_all(shop, 2)
    first, second = letters.letters()
    monkeypatch.setattr(newer_changes, "oldest_reachable", lambda client: second.cluster_time)
    with NewerChanges(database.client, [first, second]) as newer:
        reached = second.cluster_time > first.cluster_time
        assert ("no longer reaches back" in str(newer.since(first))) == reached
        assert newer.since(second) is None
        database.orders.update_one({"_id": 1}, {"$set": {"v": 2}})
        assert "update at" in str(newer.since(second)), "it looks on at each question"
        assert "too large" in str(newer.since(replace(second, raw=b"")))


def test_the_letters_of_all_lanes_have_one_name_are_shown_and_discarded(
    shop: Any, replica_set: ReplicaSet, capsys: pytest.CaptureFixture[str]
) -> None:
    database, store = shop
    letters = DeadLetters(database.letters, tries=1)

    def fails(change: Change) -> None:
        raise ValueError("not now")

    database.orders.insert_many([{"_id": number} for number in range(12)])
    with Listener(database.orders, fails, resource="orders", store=store, on_error=letters, partitions=3):
        deadline = time.monotonic() + 300
        while len(list(letters.letters())) < 12:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    own = next(letters.letters())
    other = {**database.letters.find_one(own.key), "_id": {"resource": "orders/7", "change": "82AA"}, "version": 3}
    database.letters.insert_one(other)  # of a listener without lanes, whose resource is called so
    assert len({letter.resource for letter in letters.letters("orders")}) > 1
    assert len(list(letters.letters("orders"))) == 12
    assert len(list(letters.letters(own.resource))) < 12
    assert [letter.whole_resource for letter in letters.letters("orders/7")] == ["orders/7"]
    rest = ["--uri", replica_set.uri, "--letters", f"{database.name}.letters", "--resource", "orders"]
    assert main(["dead-letters", "show", *rest, "--change", own.message_id, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["event"]["documentKey"] == {"_id": {"$numberInt": str(own.document_key["_id"])}}
    assert shown["event"]["operationType"] == "insert"
    assert (shown["error"], shown["reason"]) == ("ValueError", "not now")
    assert main(["dead-letters", "show", *rest, "--change", own.message_id]) == 0
    said = capsys.readouterr().out
    assert '"operationType": "insert"' in said
    assert "ValueError after 1 tries: not now" in said
    for wrong in (["discard"], ["discard", "--all", "--change", "82"], ["show", "--all"], ["list", "--anyway"]):
        assert main(["dead-letters", *wrong, *rest]) == 1
    assert main(["dead-letters", "discard", *rest, "--change", "nothing"]) == 1
    assert "no dead letter whose change id begins with 'nothing'" in capsys.readouterr().err
    assert main(["dead-letters", "discard", *rest, "--change", own.message_id]) == 0
    assert len(list(letters.letters("orders"))) == 11
    assert main(["dead-letters", "discard", *rest, "--all", "--json"]) == 0
    assert capsys.readouterr().out == '1 discarded\n{"discarded": 11}\n'
    assert [letter.resource for letter in letters.letters()] == ["orders/7"]


def test_what_cannot_be_is_refused(shop: Any) -> None:
    database, _ = shop
    for options in ({"tries": 0}, {"tries": True}, {"then": "ignore"}):
        with pytest.raises(UsageError):
            DeadLetters(database.letters, **options)
    database.letters.insert_one({"_id": 1})
    with pytest.raises(UsageError, match="is not one: 'token'"):
        list(DeadLetters(database.letters).letters())


def test_letters_of_named_documents_are_erased(
    shop: Any, replica_set: ReplicaSet, capsys: pytest.CaptureFixture[str]
) -> None:
    database, store = shop
    marker, seen = "anna-4711@example.com", list[Any]()
    ended = threading.Event()

    def handle(change: Change) -> None:
        seen.append(change.document_key["_id"])
        if len(seen) == 3:
            ended.set()
        raise ValueError(f"no such person: {change.full_document['who']}")

    letters = DeadLetters(database.letters, tries=1)
    with Listener(database.people, handle, resource="people", store=store, on_error=letters):
        database.people.insert_many([{"_id": 1, "who": marker}, {"_id": "1", "who": "b"}, {"_id": 2, "who": "c"}])
        assert ended.wait(300)
    one = database.letters.find_one({"documentKey": '{"_id": 2}'})
    for change, key in (("x", '{"_id": 1.0}'), ("y", '{"_id": 3}'), ("z", '{"_id": "cut')):
        found = {**one, "_id": {**one["_id"], "change": change}, "event": None, "documentKey": key}
        database.letters.insert_one(found)
    where = ("--dead-letters", replica_set.uri, "--letters", f"{database.name}.letters")
    which = ("--document", f"{database.name}.people", "1")
    assert main(["erase", *which, *where, "--dry-run"]) == 1
    assert "2 dead letters found\n" in capsys.readouterr().out
    assert database.letters.count_documents({}) == 6
    assert main(["erase", *which, *where]) == 1
    said = capsys.readouterr().out
    assert "2 dead letters found, 2 erased" in said
    assert "1 dead letters have no event" in said
    left = list(database.letters.find())
    assert sorted(one["documentKey"] for one in left) == ['{"_id": "1"}', '{"_id": "cut', '{"_id": 2}', '{"_id": 3}']
    assert marker not in repr(left)
    database.letters.delete_one({"_id.change": "z"})
    assert main(["erase", *which, *where, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["stores"]
    assert (found["found"], found["left"], found["place"]) == ({}, [], f"{database.name}.letters")
    database.letters.insert_one({"_id": 5})
    assert main(["erase", *which, *where]) == 1
    assert "is not one" in capsys.readouterr().out
