"""What we make of events is, byte for byte, what Debezium 3.6.3 and Connect's converters made of the same oplog.

``record_debezium.py`` made the recordings. What Debezium alone knows is taken from its records: when they were made,
and for documents of a snapshot the time and the place of the copy.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from google.protobuf.descriptor_pb2 import DescriptorProto

from tailrace.act.consumer.messages.connect_schema import value_schema
from tailrace.act.consumer.messages.debezium import compact
from tailrace.act.consumer.messages.driver_text import double_text
from tailrace.act.consumer.messages.schema_registry import message_class
from tailrace.consumer.messages import DebeziumMessages, JsonConverter, Message, MessageRefused
from tailrace.consumer.messages.schema_registry import AvroConverter, ProtobufConverter
from tailrace.embedded import ReplicaSet
from tests.gateway.programs import Unavailable
from tests.golden.record_debezium import KINDS, DebeziumRecord, DebeziumRecording, load, record

#: A key or a value of the registry's converters begins with a zero and the schema's number.
HEAD = 5
#: Java before 19 writes more digits of some numbers than are needed to tell them from others.
NUMBER = re.compile(rb"(?<![\w\".-])-?[0-9]+\.[0-9]+E[+-][0-9]+")


@dataclass
class Event:
    raw: bytes


def shortest(value: bytes | None) -> bytes | None:
    """A text of Java's with the shortest numbers."""

    def shorter(found: re.Match[bytes]) -> bytes:
        number = float(found[0])
        ours = double_text(number).encode() if isfinite(number) else found[0]  # a decimal can be larger
        return ours if len(ours) < len(found[0]) else found[0]

    return value and NUMBER.sub(shorter, value)


@functools.cache
def recordings() -> dict[str, DebeziumRecording]:
    return {one.prefix: one for one in load()}


def is_sound(one: DebeziumRecord) -> bool:
    """Debezium writes U+FFFD for what is not UTF-8; we refuse it."""
    return b"\xef\xbf\xbd" not in (one.written["json"][1] or b"")


def made_of(one: DebeziumRecord, maker: Any) -> Message:
    """The message of ours that the record has to be equal to."""
    messages = maker(Event(one.event))
    is_delete = RawBSONDocument(one.event or b"")["operationType"] == "delete"
    assert len(messages) == (2 if is_delete else 1)
    found: Message = messages[1] if one.written["json"][1] is None else messages[0]
    return found


def clock_of(one: DebeziumRecord) -> int:
    value = one.written["json"][1]
    return 0 if value is None else int(json.loads(value)["ts_ms"])


def known_to_debezium(one: DebeziumRecord, ours: bytes | None) -> bytes | None:
    """Our JSON with the time and the place of the copy that Debezium made itself."""
    theirs = one.written["json"][1]
    if theirs is None or ours is None or b'"op":"r"' not in theirs:
        return ours
    document, known = json.loads(ours), json.loads(theirs)["source"]
    source = document.get("payload", document)["source"]
    assert source["ord"] > 0
    assert source["snapshot"] == "true"
    for name in ("ts_ms", "ts_us", "ts_ns", "ord", "snapshot"):
        source[name] = known[name]
    return compact(document).encode()


@pytest.mark.parametrize("prefix", list(KINDS))
@pytest.mark.parametrize("form", ["json", "schemas"])
def test_records_in_json_are_debeziums_bytes(prefix: str, form: str) -> None:
    seen = differences_in_json(recordings()[prefix], form, transactions=KINDS[prefix])
    assert seen["equal"] >= 62
    assert seen["refused"] == 2


def differences_in_json(recording: DebeziumRecording, form: str, *, transactions: bool) -> Counter[str]:
    """How many records are equal, and how many of ours are refused. Fails for the first that differs."""
    seen: Counter[str] = Counter()
    for one in recording.records:
        maker = DebeziumMessages(
            recording.prefix,
            converter=JsonConverter(schemas=form == "schemas"),
            clock=functools.partial(clock_of, one),
        )
        if not is_sound(one):
            with pytest.raises(MessageRefused, match="not UTF-8"):
                maker(Event(one.event))
            seen["refused"] += 1
            continue
        message = made_of(one, maker)
        key, value = one.written[form][0], shortest(one.written[form][1])
        assert message.topic == one.topic
        assert message.kafka_key() == key
        if transactions and value is not None:
            value = without_transaction(value)
        assert known_to_debezium(one, message.body) == value
        seen["equal"] += 1
    return seen


def without_transaction(value: bytes) -> bytes:
    """Remove the block on the transaction: we do not number its changes."""
    document = json.loads(value)
    document.get("payload", document)["transaction"] = None
    return compact(document).encode()


def test_structured_cloud_events_are_debeziums_bytes() -> None:
    seen = 0
    for one in recordings()["shop-cdc"].records:
        value = one.written["cloudevents"][1]
        if not is_sound(one) or (value is not None and b'"iodebeziumop":"r"' in value):
            continue
        message = made_of(one, DebeziumMessages("shop-cdc", cloud_events="structured"))
        assert message.body == shortest(value)
        seen += 1
    assert seen >= 54


@pytest.mark.parametrize("form", ["avro", "protobuf"])
def test_records_of_the_registry_are_debeziums_bytes(form: str) -> None:
    recording = recordings()["shop_cdc" if form == "protobuf" else "shop-cdc"]
    registry = f"mock://golden-{form}"
    converter: Any = ProtobufConverter(registry) if form == "protobuf" else AvroConverter(registry, adjust_names=False)
    seen = 0
    for one in recording.records:
        value = one.written[form][1]
        if not is_sound(one) or (value is not None and (b"\x02\x02r" in value or b"*\x01r" in value)):
            continue
        if KINDS[recording.prefix] and value is not None and b'"transaction":{' in (one.written["json"][1] or b""):
            continue
        maker = DebeziumMessages(recording.prefix, converter=converter, clock=functools.partial(clock_of, one))
        message = made_of(one, maker)
        key, ours = message.kafka_key(), message.body
        assert key is not None
        assert key[:1] == b"\0"
        assert key[HEAD:] == (one.written[form][0] or b"")[HEAD:]
        # Texts are preceded by their lengths, so values with longer numbers are not compared.
        if value == shortest(value):
            assert (ours or b"")[HEAD:] == (value or b"")[HEAD:]
        assert (ours is None) == (value is None)
        seen += 1
    assert seen >= 50


def test_the_registry_is_given_connects_schemas() -> None:
    """Confluent's converters register the same text, so a registry that Connect has filled gives its number."""
    registered = recordings()["shop-cdc"].schemas["avro"]
    converter = AvroConverter("mock://schemas", adjust_names=False)
    maker = DebeziumMessages("shop-cdc", converter=converter)
    for one in recordings()["shop-cdc"].records:
        if is_sound(one):
            maker(Event(one.event))
    for subject, text in registered.items():
        if "probes" not in subject:
            assert converter.client.get_latest_version(subject).schema.schema_str == text
    assert len(registered) >= 10


def test_protobufs_fields_have_the_names_the_types_and_the_numbers_of_connects() -> None:
    text = recordings()["shop_cdc"].schemas["protobuf"]["shop_cdc.shop.orders-value"]
    fields = sorted(re.findall(r"^ *((?:optional |repeated )?\w+) (\w+) = (\d+)", text, re.MULTILINE))
    assert len(fields) == 29
    described: list[tuple[str, str, str]] = []
    made = DescriptorProto()
    message_class(value_schema("shop_cdc.shop.orders")).DESCRIPTOR.CopyToProto(made)
    waiting = [made]
    while waiting:
        one = waiting.pop()
        waiting += one.nested_type
        for field in one.field:
            kind = field.type_name.rpartition(".")[2] or {5: "int32", 3: "int64", 9: "string"}[field.type]
            label = "repeated " if field.label == field.LABEL_REPEATED else "optional " if field.proto3_optional else ""
            described.append((f"{label}{kind}", field.name, str(field.number)))
    assert sorted(described) == fields
    assert [line.split()[1].rstrip(";") for line in text.splitlines() if line.startswith(("package", "message"))] == [
        "shop_cdc.shop.orders",
        made.name,
    ]


def test_events_without_a_record_are_skipped_as_debezium_does() -> None:
    skipped = recordings()["shop-cdc"].skipped
    assert len(skipped) == 2
    for event in skipped:
        assert DebeziumMessages("shop-cdc")(Event(event)) == ()
        with pytest.raises(MessageRefused, match=r"type '(rename|drop)'"):
            DebeziumMessages("shop-cdc", others="refuse")(Event(event))


@pytest.mark.slow
@pytest.mark.mongod
def test_debezium_itself_makes_them_today(tmp_path: Path) -> None:
    """The recording is made anew, on this server."""
    with ReplicaSet(1) as replica_set:
        try:
            found = record(replica_set, "shop-cdc", tmp_path / "engine")
        except Unavailable as reason:
            pytest.skip(str(reason))
    for form in ("json", "schemas"):
        assert differences_in_json(found, form, transactions=False)["equal"] >= 58
