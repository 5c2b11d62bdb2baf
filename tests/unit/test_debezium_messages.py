"""Debezium's records of changes: what is refused, what goes with them, and the schema registry.

``tests/golden/test_debezium.py`` checks that the bytes are Debezium's.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import bson
import pytest
from bson.int64 import Int64
from bson.timestamp import Timestamp
from confluent_kafka import Consumer
from confluent_kafka.schema_registry import topic_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from tailrace.act.consumer.messages.connect_schema import adjusted_name, key_schema, value_schema
from tailrace.act.consumer.messages.publisher import storable
from tailrace.act.consumer.messages.schema_registry import message_class
from tailrace.consumer.messages import (
    DebeziumMessages,
    JsonConverter,
    MemoryPublisher,
    Message,
    MessageRefused,
    MessageRelay,
    PublisherAway,
)
from tailrace.consumer.messages.kafka import KafkaPublisher
from tailrace.consumer.messages.nats_jetstream import NatsPublisher
from tailrace.consumer.messages.redis_streams import RedisPublisher
from tailrace.consumer.messages.schema_registry import AvroConverter, ProtobufConverter
from tailrace.errors import UsageError
from tests.consumer.brokers import KafkaBrokers
from tests.consumer.fake_registry import fake_registry


@dataclass
class Made:
    raw: bytes
    is_stopping: bool = False


def change(operation: str = "insert", *, key: Any = 7, **more: Any) -> Made:
    event = {
        "_id": {"_data": "82AB"},
        "operationType": operation,
        "clusterTime": Timestamp(1_700_000_000, 3),
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": key},
        **more,
    }
    return Made(bson.encode({name: value for name, value in event.items() if value is not None}))


def value_of(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.body or b"")
    return found


def one_of(change_: Made, **options: Any) -> Message:
    (message,) = DebeziumMessages("cdc", **options)(change_)
    return message


def test_a_delete_is_a_record_and_a_tombstone_with_an_id_of_its_own() -> None:
    record, tombstone = DebeziumMessages("cdc")(change("delete"))
    assert (record.id, tombstone.id) == ("82AB", "82AB-tombstone")
    assert record.key == tombstone.key == '{"id":"7"}'
    assert tombstone.body is None
    assert value_of(record)["op"] == "d"
    (alone,) = DebeziumMessages("cdc", tombstones=False)(change("delete"))
    assert alone.body is not None


def test_what_a_pipeline_adds_to_an_event_is_not_told() -> None:
    described = {"updatedFields": {"a": 1}, "removedFields": [], "truncatedArrays": []}
    for operation in ("delete", "insert", "replace"):
        record = value_of(DebeziumMessages("cdc")(change(operation, updateDescription=described, fullDocument={}))[0])
        assert record["updateDescription"] is None
        assert record["after"] == (None if operation == "delete" else "{}")


def test_before_6_0_the_time_is_the_clusters_to_the_second() -> None:
    source = value_of(one_of(change()))["source"]
    assert source["ts_ms"] == 1_700_000_000_000
    assert source["wallTime"] is None
    assert source["ord"] == 3


def test_a_shard_key_before_the_id_is_no_part_of_the_key() -> None:
    made = change()
    event = {**bson.decode(made.raw), "documentKey": {"region": "eu", "_id": Int64(7)}}
    assert one_of(Made(bson.encode(event))).key == '{"id":"7"}'


@pytest.mark.parametrize("lost", ["operationType", "ns", "documentKey", "clusterTime", "_id"])
def test_an_event_that_lacks_what_a_record_needs_is_refused(lost: str) -> None:
    event = {name: value for name, value in bson.decode(change().raw).items() if name != lost}
    with pytest.raises(MessageRefused, match=rf"the event has no {lost}"):
        DebeziumMessages("cdc")(Made(bson.encode(event)))


@pytest.mark.parametrize(
    "altered",
    [
        {"txnNumber": 5},
        {"updateDescription": {"removedFields": [1]}},
        {"updateDescription": {"truncatedArrays": [1]}},
        {"updateDescription": {"truncatedArrays": [{"field": "a"}]}},
        {"ns": "shop.orders"},
        {"documentKey": 7},
    ],
)
def test_an_event_whose_parts_a_pipeline_has_altered_is_refused(altered: dict[str, Any]) -> None:
    event = {**bson.decode(change("update").raw), **altered}
    with pytest.raises(MessageRefused, match="Debezium's needs"):
        DebeziumMessages("cdc")(Made(bson.encode(event)))


def test_two_fields_of_one_name_are_refused_and_not_made_one() -> None:
    made = change(fullDocument={"_id": 7, "a": 1, "b": 2})
    twice = Made(made.raw.replace(b"\x10b\0", b"\x10a\0"))
    with pytest.raises(MessageRefused, match="two fields with the same name"):
        DebeziumMessages("cdc")(twice)


@pytest.mark.parametrize("where", ["fullDocument", "updateDescription", "removed", "key"])
def test_a_string_that_is_not_utf8_is_refused_wherever_it_stands(where: str) -> None:
    documents: dict[str, dict[str, Any]] = {
        "fullDocument": {"fullDocument": {"a": ["\x01a"]}},
        "updateDescription": {"updateDescription": {"updatedFields": {"\x01a": 1}}},
        "removed": {"updateDescription": {"updatedFields": {}, "removedFields": ["\x01a"]}},
        "key": {"key": "\x01a"},
    }
    made = change("update", **documents[where])
    with pytest.raises(MessageRefused, match="not UTF-8"):
        DebeziumMessages("cdc")(Made(made.raw.replace(b"\x01a\0", b"\xffa\0")))


def test_a_document_of_16_mb_is_made_whole() -> None:
    text = "é" * ((16 << 20) // 2 - 100)
    message = one_of(change(fullDocument={"_id": 7, "t": text}))
    assert json.loads(value_of(message)["after"])["t"] == text


def test_topics_can_be_chosen_and_what_kafka_forbids_is_replaced() -> None:
    def topic(database: str, collection: str) -> str | None:
        return None if collection == "secret" else f"{database}/{collection}"

    assert one_of(change(), topic=topic).topic == "shop_orders"
    secret = change()
    event = {**bson.decode(secret.raw), "ns": {"db": "shop", "coll": "secret"}}
    assert DebeziumMessages("cdc", topic=topic)(Made(bson.encode(event))) == ()


def test_binary_cloud_events_stand_in_headers_beside_the_same_record() -> None:
    plain = one_of(change(), clock=lambda: 5)
    message = one_of(change(), cloud_events="binary", clock=lambda: 5)
    assert message.body == plain.body
    headers = dict(message.kafka_headers())
    assert headers["ce_id"] == b"name:cdc;ts:1700000000000;ord:3"
    assert headers["ce_specversion"] == b"1.0"
    assert headers["ce_type"] == b"io.debezium.connector.mongodb.DataChangeEvent"
    assert headers["ce_iodebeziumop"] == b"c"
    assert headers["content-type"] == b"application/json"
    assert headers["tailrace-id"] == b"82AB"
    assert "ce_iodebeziumlsid" not in headers
    assert "ce_datacontenttype" not in headers
    # CloudEvents' names are lower case letters and digits.
    assert all(name[3:].isalnum() and name.islower() for name in headers if name.startswith("ce_"))


def test_options_that_cannot_be_are_refused_when_they_are_given() -> None:
    for options in (
        {"topic_prefix": "with space"},
        {"topic_prefix": ""},
        {"topic_prefix": "t", "others": "drop"},
        {"topic_prefix": "t", "cloud_events": "xml"},
        {"topic_prefix": "t", "cloud_events": "structured", "converter": JsonConverter(schemas=True)},
    ):
        with pytest.raises(UsageError):
            DebeziumMessages(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="registry"):
        AvroConverter({"url": "no-url", "nonsense": 1})


def test_names_are_adjusted_as_debezium_does_for_avro() -> None:
    assert adjusted_name("shop-cdc.d.c é.Envelope") == "shop_cdc.d.c__.Envelope"
    assert adjusted_name("9to5.d.c") == "_to5.d.c"
    assert adjusted_name("plain.d.c") == "plain.d.c"


def test_the_registry_gives_the_number_and_consumers_read_the_record() -> None:
    with fake_registry() as registry:
        converter = AvroConverter(registry.url)
        message = one_of(change(fullDocument={"_id": 7}), converter=converter, clock=lambda: 5)
        assert sorted(registry.subjects) == ["cdc.shop.orders-key", "cdc.shop.orders-value"]
        assert message.body is not None
        number = int.from_bytes(message.body[1:5], "big")
        assert number == registry.subjects["cdc.shop.orders-value"][0]
        read = AvroDeserializer(converter.client, conf={"subject.name.strategy": topic_subject_name_strategy})
        value = read(message.body, SerializationContext(message.topic, MessageField.VALUE))
        key = read(message.key, SerializationContext(message.topic, MessageField.KEY))
        assert key == {"id": "7"}
        assert value == value_of(one_of(change(fullDocument={"_id": 7}), clock=lambda: 5))
        asked = len(registry.asked)
        one_of(change(), converter=converter)
        assert len(registry.asked) == asked, "a schema is asked for once"


def test_protobuf_tells_null_from_empty() -> None:
    with fake_registry() as registry:
        converter = ProtobufConverter(registry.url)
        message = one_of(change(key="", fullDocument={}), converter=converter, clock=lambda: 5)
        assert [one["schemaType"] for one in registry.schemas] == ["PROTOBUF", "PROTOBUF"]
        envelope = message_class(value_schema("cdc.shop.orders")).FromString(message.body[6:])  # type: ignore[index]
        assert envelope.after == "{}"
        assert envelope.HasField("after")
        assert not envelope.HasField("before")
        assert not envelope.source.HasField("lsid")
        key = message_class(key_schema("cdc.shop.orders")).FromString(message.key[6:])
        assert key.id == '""'


def test_names_that_protobuf_forbids_are_adjusted() -> None:
    event = {**bson.decode(change().raw), "ns": {"db": "2024", "coll": "a-b"}}
    made = one_of(Made(bson.encode(event)), converter=ProtobufConverter("mock://names"))
    assert made.topic == "cdc.2024.a-b"
    assert message_class(value_schema("cdc.2024.a_b")).DESCRIPTOR.full_name == "cdc._2024.a_b.Envelope"


@pytest.mark.parametrize("status", [409, 422, 500, 401])
def test_a_registry_that_does_not_take_a_schema_is_no_fault_of_the_change(status: int) -> None:
    with fake_registry() as registry:
        registry.failing = status
        converter = AvroConverter({"url": registry.url, "basic.auth.user.info": "me:secret"})
        with pytest.raises(PublisherAway, match=f"status {status}") as caught:
            one_of(change(), converter=converter)
        assert "secret" not in str(caught.value)
        registry.failing = None
        assert one_of(change(), converter=converter).body


def test_a_schema_that_may_not_be_registered_is_looked_up() -> None:
    with fake_registry() as registry:
        with pytest.raises(PublisherAway, match="Schema not found"):
            one_of(change(), converter=AvroConverter(registry.url, register=False))
        one_of(change(), converter=AvroConverter(registry.url))
        assert one_of(change(), converter=AvroConverter(registry.url, register=False)).body


def test_a_relay_waits_for_a_registry_that_is_away() -> None:
    with fake_registry() as registry:
        port = int(registry.url.rpartition(":")[2])
    publisher = MemoryPublisher()
    relay = MessageRelay(publisher, DebeziumMessages("cdc", converter=AvroConverter(registry.url)), retry_seconds=60)
    working = threading.Thread(target=relay, args=(change("delete"),))
    working.start()
    time.sleep(0.2)
    assert publisher.stored == []
    with fake_registry(port):
        working.join()
    assert [one.body is None for one in publisher.stored] == [False, True]
    relay = MessageRelay(publisher, DebeziumMessages("cdc", converter=AvroConverter(registry.url)), retry_seconds=0)
    with pytest.raises(PublisherAway, match="cannot be reached"):
        relay(change())


def test_a_change_is_done_when_all_of_its_messages_are_stored() -> None:
    class Stubborn(MemoryPublisher):
        """Stores one message in a call."""

        def publish(self, messages: Any) -> int:
            return super().publish(messages[:1])

    publisher = Stubborn()
    publisher.refused.add("82AB-tombstone")
    relay = MessageRelay(publisher, DebeziumMessages("cdc"))
    assert relay.handle_batch([change(), change(), change("delete"), change()]) == 2
    assert len(publisher.stored) == 3
    with pytest.raises(MessageRefused):
        relay.handle_batch([change("delete"), change()])
    publisher.refused.clear()
    assert relay.handle_batch([change("delete"), change()]) == 2


def test_an_outbox_document_is_deleted_when_all_of_its_messages_are_stored() -> None:
    class Collection:
        def __init__(self) -> None:
            self.deleted: list[Any] = []

        def with_options(self, write_concern: Any) -> Collection:
            return self

        def delete_many(self, filter_: Any) -> None:
            self.deleted += filter_["_id"]["$in"]

    publisher, collection = MemoryPublisher(), Collection()
    publisher.refused.add("82AB-tombstone")
    outbox: Any = collection
    relay = MessageRelay(publisher, DebeziumMessages("cdc"), delete_from=outbox)
    assert relay.handle_batch([change(key=1), change("delete", key=2)]) == 1
    assert collection.deleted == [1]
    publisher.refused.clear()
    assert relay.handle_batch([change("delete", key=2)]) == 1
    assert collection.deleted == [1, 2]


def test_a_server_without_tombstones_is_given_what_is_before_them() -> None:
    plain, tombstone = Message("1", "t", b"x", "k"), Message("2", "t", None, "k")
    binary = Message("3", "t", b"x", b"k")
    assert storable([plain, tombstone, plain], "Redis") == [plain]
    assert storable([plain, binary], "Redis") == [plain, binary]
    with pytest.raises(MessageRefused, match="stores no message"):
        storable([tombstone, plain], "Redis")


def test_brokers_without_tombstones_refuse_them_before_anything_is_sent() -> None:
    tombstone = Message("2", "t", None, "k")
    for publisher in (RedisPublisher("redis://127.0.0.1:1/0"), NatsPublisher("nats://127.0.0.1:1")):
        with pytest.raises(MessageRefused, match="a tombstone"):
            publisher.publish([tombstone])
        publisher.close()


@pytest.mark.parametrize(
    ("key", "headers", "told"),
    [
        (b"\x00", {}, "key is bytes"),
        # The client of NATS strips values. Line breaks became spaces, or added headers, depending on the version.
        (" a", {}, "no key with white space"),
        ("a\x85", {}, "no key with white space"),
        ("a\r\nNats-Msg-Id: 1", {}, "or with a line break: 'a"),
        ("k", {"x": "a\nb"}, "no header x with"),
        ("k", {"a b": "c"}, "no header with the name 'a b'"),
    ],
)
def test_what_a_header_of_nats_would_change_is_refused_before_anything_is_sent(
    key: str | bytes, headers: dict[str, str], told: str
) -> None:
    publisher = NatsPublisher("nats://127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(MessageRefused, match=told):
        publisher.publish([Message("2", "t", b"", key, headers)])
    with pytest.raises(PublisherAway):  # those before it are sent
        publisher.publish([Message("1", "t", b"", "a b: \x1cé"), Message("2", "t", b"", key, headers)])
    publisher.close()


@pytest.mark.parametrize("subject", ["", "orders and more", "a..b", ".a", "a.", "a.*", ">", "a\tb", "a\r\nPUB b 0"])
def test_a_subject_that_nats_does_not_have_is_refused_before_anything_is_sent(subject: str) -> None:
    """Before 2.16 its client sent it: ``PUB orders more 1`` is the subject ``orders``, and ``more`` is for answers."""
    publisher = NatsPublisher("nats://127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(MessageRefused, match="on the subject"):
        publisher.publish([Message("1", subject, b"x", "k")])
    publisher.close()


def test_kafka_is_given_tombstones_and_keys_of_bytes() -> None:
    with closing(KafkaBrokers("t")) as brokers, closing(KafkaPublisher(brokers.servers)) as publisher:
        assert publisher.publish([Message("1", "t", b"x", b"\0\xff", {"ce-id": "é"})]) == 1
        assert publisher.publish([Message("2", "t", None, b"\0\xff")]) == 1
        settings = {"bootstrap.servers": brokers.servers, "group.id": "g", "auto.offset.reset": "earliest"}
        with closing(Consumer({**settings, "enable.auto.commit": False})) as consumer:
            consumer.subscribe(["t"])
            records: list[Any] = [consumer.poll(30) for _ in range(2)]
            found = [(one.key(), one.value(), dict(one.headers())) for one in records]
    assert found == [
        (b"\0\xff", b"x", {"ce_id": "é".encode(), "tailrace-id": b"1"}),
        (b"\0\xff", None, {"tailrace-id": b"2"}),
    ]


def test_documents_as_deep_as_the_server_stores_are_written() -> None:
    document: Any = {"x": 1}
    for number in range(198):
        document = {"a": document} if number % 2 else {"a": [document]}
    assert value_of(one_of(change(fullDocument=document)))["after"].count("[") == 99


def test_converters_go_to_other_processes_without_their_connections() -> None:
    with fake_registry() as registry:
        for converter in (AvroConverter(registry.url), ProtobufConverter(registry.url)):
            make = DebeziumMessages("cdc", converter=converter, clock=int)
            assert pickle.loads(pickle.dumps(make))(change()) == make(change())
