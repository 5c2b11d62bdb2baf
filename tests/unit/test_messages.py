"""Which message a change becomes, and what is published together."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from tailrace.act.consumer.messages.publisher import runs
from tailrace.consumer.messages import (
    ChangeMessages,
    MemoryPublisher,
    Message,
    MessageRefused,
    MessageRelay,
    Outbox,
    PublisherAway,
    ordering_key,
    publish_all,
)
from tailrace.errors import UsageError


@dataclass
class Made:
    raw: bytes

    @property
    def document_key(self) -> dict[str, Any]:
        return bson.decode(self.raw)["documentKey"]


def change(number: int = 1, *, key: Any = 1, operation: str = "insert", **more: Any) -> Made:
    event = {
        "_id": {"_data": f"82{number:08X}"},
        "operationType": operation,
        "clusterTime": Timestamp(1_700_000_000, number),
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": key},
        **more,
    }
    return Made(bson.encode(event))


def key_of(value: Any) -> str | None:
    return ordering_key(change(key=value).raw)


@pytest.mark.parametrize(
    "equal",
    [
        (1, 1.0, Int64(1), Decimal128("1"), Decimal128("1.000")),
        (0, -0.0, Decimal128("-0"), Decimal128("0E+10")),
        (0.5, Decimal128("0.5"), Decimal128("0.50")),
        (float("nan"), Decimal128("NaN")),
        ({"a": 1}, {"a": 1.0}, {"a": Int64(1)}),
    ],
)
def test_values_that_are_equal_for_the_server_have_one_ordering_key(equal: tuple[Any, ...]) -> None:
    assert len({key_of(value) for value in equal}) == 1


def test_values_that_differ_have_different_ordering_keys() -> None:
    values = [
        1,
        2,
        1.5,
        "1",
        "keystring:2b02",
        True,
        None,
        b"1",
        Binary(b"1", 4),
        {"a": 1},
        {"$oid": "6" * 24},
        {"b": 1},
        {},
        float("inf"),
        Decimal128("1E+6000"),
        Decimal128("1E-6000"),
        ObjectId("6" * 24),
        datetime(2026, 1, 1, tzinfo=UTC),
        Timestamp(1, 1),
        MaxKey(),
        1 << 62,
    ]
    assert len({key_of(value) for value in values}) == len(values)


def not_utf8(**more: Any) -> Made:
    """A change with the string ff 61 wherever "\\x01a" was put."""
    made = change(operation="insert", **more)
    return Made(made.raw.replace(b"\x01a\0", b"\xffa\0"))


@pytest.mark.parametrize("cloud_events", [None, "structured", "binary"])
def test_strings_that_are_not_utf8_are_carried_as_they_are(cloud_events: Any) -> None:
    """The event could not be decoded, and the listener ended. No test had such a string, which the server stores."""
    made = not_utf8(fullDocument={"_id": 1, "name": "\x01a"})
    for body in ("json", "bson"):
        message = ChangeMessages("orders", body=body, cloud_events=cloud_events)(made)  # type: ignore[arg-type]
        assert message is not None
        assert b"\xffa" in message.body or (body == "bson" and cloud_events == "structured")
    letter = {"topic": "t", "payload": "\x01a", "key": "\x01a", "headers": {"h": "\x01a"}, "type": "\x01a"}
    made = not_utf8(fullDocument={"_id": "\x01a", **letter}, key="\x01a")
    message = Outbox(cloud_events=cloud_events)(made)
    assert message is not None
    assert b"\xffa" in message.body
    assert message.key == "\\xffa"
    assert message.headers["h"] == message.headers["outbox-id"] == "\\xffa"
    assert ordering_key(made.raw) == '"\\xffa"'
    for text in (message.key, *message.headers.values()):
        text.encode()


def test_an_event_without_a_document_has_no_ordering_key() -> None:
    drop = bson.encode({"_id": {"_data": "82"}, "operationType": "drop", "ns": {"db": "shop", "coll": "orders"}})
    assert ordering_key(drop) is None
    assert ChangeMessages("orders")(Made(drop)).key is None


def test_users_fields_with_our_names_are_their_own() -> None:
    """``token``, ``key``, ``_id._data`` and the like inside a document say nothing about the event."""
    document = {
        "_id": 7,
        "token": "x",
        "ts": 1,
        "key": "other",
        "count": 3,
        "_id._data": "82FF",
        "documentKey": {"_id": 8},
    }
    message = ChangeMessages("orders")(change(5, key=7, fullDocument=document))
    assert (message.id, message.key) == ("8200000005", "7")
    assert json.loads(message.body)["fullDocument"] == document


def test_a_message_holds_the_event_as_json_or_as_its_exact_bytes() -> None:
    made = change(1, fullDocument={"_id": 1, "n": Int64(5), "at": datetime(9999, 1, 1, tzinfo=UTC)})
    assert ChangeMessages("t", body="bson")(made).body == made.raw
    assert json.loads(ChangeMessages("t")(made).body)["fullDocument"]["n"] == 5
    strange = {"_id": {"_data": "82"}, "operationType": "insert", "fullDocument": {"at": bson.DatetimeMS(1 << 60)}}
    assert b"1152921504606846976" in ChangeMessages("t")(Made(bson.encode(strange))).body
    assert ChangeMessages(lambda event: None)(made) is None
    assert ChangeMessages(lambda event: event["ns"]["coll"])(made).topic == "orders"


def test_a_cloud_event_has_the_attributes_that_its_specification_asks_for() -> None:
    made = change(3, key="a b", fullDocument={"_id": "a b"})
    structured = ChangeMessages("t", cloud_events="structured")(made)
    sent = json.loads(structured.body)
    assert sent["data"]["fullDocument"] == {"_id": "a b"}
    about = {name: sent[name] for name in ("specversion", "id", "source", "type", "time", "partitionkey")}
    assert about == {
        "specversion": "1.0",
        "id": "8200000003",
        "source": "/shop/orders",
        "type": "tailrace.change.insert",
        "time": "2023-11-14T22:13:20Z",
        "partitionkey": '"a b"',
    }
    assert structured.headers["content-type"].startswith("application/cloudevents+json")
    binary = ChangeMessages("t", cloud_events="binary", body="bson")(made)
    assert binary.body == made.raw
    assert binary.headers["content-type"] == "application/bson"
    assert {f"ce-{name}": value for name, value in about.items()}.items() <= binary.headers.items()
    inside = json.loads(ChangeMessages("t", cloud_events="structured", body="bson")(made).body)
    assert base64.b64decode(inside["data_base64"]) == made.raw


def test_an_outbox_document_says_what_its_message_is() -> None:
    document = {"_id": 9, "to": {"topic": "bills"}, "body": {"n": 1}, "who": "c1", "more": {"a": "b", "n": 2}}
    outbox = Outbox(topic="to.topic", payload="body", key="who", headers="more")
    message = outbox(change(2, key=9, fullDocument=document))
    assert message == Message(
        "8200000002",
        "bills",
        b'{"n": 1}',
        "c1",
        {"content-type": "application/json", "a": "b", "n": "2", "outbox-id": "9"},
    )
    assert outbox(change(2, operation="delete")) is None
    plain = Outbox(fixed_topic="t")
    assert plain(change(key=4, fullDocument={"_id": 4, "payload": "text"})).body == b"text"
    assert plain(change(key=4, fullDocument={"_id": 4, "payload": b"\x00"})).body == b"\x00"
    assert plain(change(key=4, fullDocument={"_id": 4, "payload": None})).body == b"null"
    assert plain(change(key=4, fullDocument={"_id": 4, "payload": ""})).key == "4"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"_id": 1, "payload": 1}, "names no topic"),
        ({"_id": 1, "topic": 5, "payload": 1}, "names no topic"),
        ({"_id": 1, "topic": "t"}, "no field 'payload'"),
        ({"_id": 1, "topic": "t", "payload": 1, "headers": [1]}, "is not a document"),
    ],
)
def test_an_outbox_document_that_lacks_something_is_refused_with_the_reason(
    document: dict[str, Any], words: str
) -> None:
    with pytest.raises(MessageRefused, match=words):
        Outbox()(change(fullDocument=document))


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(UsageError, match="json or bson"):
        ChangeMessages("t", body="xml")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="structured or binary"):
        Outbox(cloud_events="soap")  # type: ignore[arg-type]


def messages(keys: str) -> list[Message]:
    return [Message(str(n), "t", b"", None if key == "-" else key) for n, key in enumerate(keys)]


@pytest.mark.parametrize(
    ("keys", "keeps_order", "cut"),
    [
        ("abc", False, ["abc"]),
        ("aba", False, ["ab", "a"]),
        ("aa", False, ["a", "a"]),
        ("ab-cd", False, ["ab", "-", "cd"]),
        ("--", False, ["-", "-"]),
        ("aab-", True, ["aab-"]),
        ("abcdef", True, ["abcd", "ef"]),
        ("", True, []),
    ],
)
def test_messages_that_must_stay_in_order_are_not_published_together(
    keys: str, keeps_order: bool, cut: list[str]
) -> None:
    found = list(runs(messages(keys), 4, keeps_order=keeps_order))
    assert ["".join(message.key or "-" for message in run) for run in found] == cut


class Flaky(MemoryPublisher):
    """Stores at most ``step`` messages a call, and is away every other call."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.calls = 0

    def publish(self, messages: Any) -> int:
        self.calls += 1
        if self.calls % 2:
            raise PublisherAway("the flaky one is away")
        return super().publish(messages[: self.step])


@pytest.mark.parametrize("step", [1, 3, 100])
def test_messages_are_published_in_order_through_every_outage(step: int, caplog: pytest.LogCaptureFixture) -> None:
    publisher = Flaky(step)
    publish_all(publisher, messages("abcabcabc"), size_max=5)
    assert [message.id for message in publisher.stored] == list("012345678")
    assert "the flaky one is away: " in caplog.text
    assert "messages are published again" in caplog.text


def test_waiting_for_a_server_has_an_end() -> None:
    publisher = MemoryPublisher()
    publisher.away = True
    with pytest.raises(PublisherAway):
        publish_all(publisher, messages("a"), retry_seconds=0)
    with pytest.raises(PublisherAway):
        publish_all(publisher, messages("a"), stopped=lambda: True)
    assert publisher.stored == []


def test_a_relay_publishes_each_change_before_it_returns() -> None:
    publisher = MemoryPublisher()
    relay = MessageRelay(publisher, ChangeMessages("orders"))
    for number in range(3):
        relay(change(number))
        assert len(publisher.stored) == number + 1
    publisher.refused = {"8200000003"}
    with pytest.raises(MessageRefused):
        relay(change(3))
    publisher.close()
    with pytest.raises(PublisherAway, match="closed"):
        MessageRelay(publisher, ChangeMessages("orders"), retry_seconds=0)(change(4))
