"""Debezium's records, in each form, are read back to the change that they were made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import bson
from bson import json_util
from bson.binary import Binary
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.min_key import MinKey
from bson.objectid import ObjectId
from bson.regex import Regex
from bson.timestamp import Timestamp
from confluent_kafka.schema_registry import topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.act.consumer.messages.connect_schema import value_schema
from tailrace.act.consumer.messages.driver_text import legacy, relaxed
from tailrace.act.consumer.messages.schema_registry import message_class
from tailrace.consumer.messages import DebeziumMessages, JsonConverter
from tailrace.consumer.messages.schema_registry import AvroConverter, ProtobufConverter
from tests.amounts import amount

OPTIONS = json_util.JSONOptions(json_mode=json_util.JSONMode.LEGACY, datetime_conversion=DatetimeConversion.DATETIME_MS)
RELAXED = json_util.JSONOptions(
    json_mode=json_util.JSONMode.RELAXED,
    datetime_conversion=DatetimeConversion.DATETIME_MS,
    tz_aware=True,
)
CODEC: CodecOptions[dict[str, Any]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS, tz_aware=True)
AVRO = AvroConverter("mock://round-trip-avro")
PROTOBUF = ProtobufConverter("mock://round-trip-protobuf")
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
#: Extended JSON cannot tell a user's field ``$oid`` from its own.
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$"), max_size=6)
values = st.one_of(
    st.floats(allow_nan=False),
    texts,
    st.binary(max_size=20).map(lambda data: Binary(data, 0)),
    st.builds(Binary, st.binary(max_size=20), st.sampled_from([1, 2, 3, 5, 128, 255])),
    st.binary(min_size=12, max_size=12).map(ObjectId),
    st.booleans(),
    NUMBERS.map(DatetimeMS),
    st.none(),
    st.integers(-(1 << 31), (1 << 31) - 1),
    NUMBERS.map(Int64),
    st.builds(Timestamp, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1)),
    st.decimals(allow_nan=False, places=6).map(lambda number: Decimal128(str(number)[:34].rstrip("."))),
    st.builds(Regex, st.text('ab/\\"é', max_size=5), st.sampled_from([0, 2, 10])),
    st.builds(Code, texts),
    st.sampled_from([MinKey(), MaxKey(), float("nan"), float("inf"), float("-inf")]),
)
inside = st.recursive(
    values,
    lambda one: st.one_of(st.lists(one, max_size=4), st.dictionaries(names, one, max_size=4)),
    max_leaves=8,
)
documents = st.dictionaries(names, inside, max_size=5)


def read_back(text: str) -> bytes:
    return bson.encode(json_util.loads(text, json_options=OPTIONS))


@settings(max_examples=amount(60, 4000), deadline=None)
@given(documents)
def test_texts_are_read_back_to_the_same_bytes(document: dict[str, Any]) -> None:
    stored = bson.encode(document)
    assert read_back(legacy(stored)) == stored
    # A relaxed text does not distinguish integers of 32 and 64 bits; the values are the same.
    assert read_back(relaxed(stored)) == read_back(json_util.dumps(bson.decode(stored, CODEC), json_options=RELAXED))


@dataclass
class Made:
    raw: bytes


changes = st.fixed_dictionaries(
    {
        "_id": st.just({"_data": "82AB"}),
        "operationType": st.sampled_from(["insert", "update", "replace", "delete", "snapshot"]),
        "clusterTime": st.builds(Timestamp, st.integers(1, 1 << 31), st.integers(1, 1 << 31)),
        "ns": st.just({"db": "shop", "coll": "orders"}),
        "documentKey": st.fixed_dictionaries({"_id": inside}),
    },
    optional={
        "fullDocument": documents,
        "fullDocumentBeforeChange": documents,
        "wallTime": st.integers(0, 4102444800000).map(DatetimeMS),
        "txnNumber": NUMBERS.map(Int64),
        "lsid": st.just({"id": Binary(b"1" * 16, 4)}),
        "updateDescription": st.fixed_dictionaries(
            {
                "updatedFields": documents,
                "removedFields": st.lists(texts, max_size=3),
                "truncatedArrays": st.lists(
                    st.fixed_dictionaries({"field": texts, "newSize": st.integers(0, 100)}), max_size=2
                ),
            }
        ),
    },
)


@settings(max_examples=amount(40, 2000), deadline=None)
@given(changes)
def test_each_form_says_the_same_of_a_change(event: dict[str, Any]) -> None:
    change = Made(bson.encode(event))
    plain, *more = DebeziumMessages("cdc", clock=int)(change)
    assert len(more) == (event["operationType"] == "delete")
    record = json.loads(plain.body or b"")
    schemas = DebeziumMessages("cdc", clock=int, converter=JsonConverter(schemas=True))(change)[0]
    assert json.loads(schemas.body or b"")["payload"] == record
    avro = DebeziumMessages("cdc", clock=int, converter=AVRO)(change)[0]
    read = AvroDeserializer(AVRO.client, conf={"subject.name.strategy": topic_subject_name_strategy})
    assert read(avro.body, SerializationContext(avro.topic, MessageField.VALUE)) == record
    protobuf = DebeziumMessages("cdc", clock=int, converter=PROTOBUF)(change)[0]
    assert protobuf.body is not None
    envelope = message_class(value_schema("cdc.shop.orders")).FromString(protobuf.body[6:])
    assert said_by(envelope) == record
    assert record["op"] == {"insert": "c", "delete": "d", "snapshot": "r"}.get(event["operationType"], "u")
    for name, kept in (("before", "fullDocumentBeforeChange"), ("after", "fullDocument")):
        if name == "after" and event["operationType"] == "delete":
            continue
        assert (record[name] is None) == (kept not in event)
        if record[name] is not None:
            assert read_back(record[name]) == bson.encode(event[kept])


def said_by(message: Any) -> dict[str, Any]:
    """A message of Protobuf's as the record that it is."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            found[field.name] = [said_by(one) if field.message_type else one for one in value] or None
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = said_by(value) if field.message_type else value
    return found
