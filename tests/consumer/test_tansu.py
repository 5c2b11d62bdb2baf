"""Messages through a broker that is not librdkafka's own: Tansu, another implementation of Kafka's protocol.

Earlier the tests had only the mock cluster inside Kafka's client. It has the client's own view of the protocol, cannot
lose what it has acknowledged, cannot hang, and cannot delete a topic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from confluent_kafka import Consumer
from pymongo import MongoClient

import tailrace
from tailrace.cli.run_messages import _topic_of
from tailrace.consumer import HandlerFailed, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import (
    ChangeMessages,
    DebeziumMessages,
    JsonConverter,
    Message,
    MessageRefused,
    MessageRelay,
    MessagesLost,
    publish_all,
)
from tailrace.consumer.messages.kafka import KafkaPublisher, SeenRecords
from tailrace.consumer.messages.schema_registry import AvroConverter, ProtobufConverter
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tests.amounts import amount
from tests.consumer.brokers import KafkaBrokers, TansuServer, records_in
from tests.consumer.fake_registry import fake_registry
from tests.consumer.shops import until
from tests.consumer.test_brokers import numbered
from tests.consumer.test_outages import check_order, number_of, write

#: Attempts end soon, so that a test sees several.
QUICK = {"message.timeout.ms": 2000}


@pytest.fixture(scope="module")
def tansu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TansuServer]:
    """For tests that only make topics of their own."""
    with TansuServer(tmp_path_factory.mktemp("tansu")) as server:
        yield server


@pytest.fixture
def own_tansu(tmp_path: Path) -> Iterator[TansuServer]:
    """One that a test can stop and kill, with the topic ``orders``."""
    with TansuServer(tmp_path / "tansu") as server:
        server.make("orders")
        yield server


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"tansu_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield client[name]
        client.drop_database(name)


def shown(servers: str, topic: str) -> dict[int, list[tuple[Any, ...]]]:
    """What a consumer sees of each partition, in order."""
    found = records_in(servers, topic)
    return {number: [(one.key(), one.value(), one.headers()) for one in records] for number, records in found.items()}


@dataclass
class Event:
    raw: bytes


@pytest.fixture(scope="module")
def events(replica_set: ReplicaSet) -> list[Event]:
    """Changes as the server gives them: keys of many types, updates, replacements, deletes."""
    name = "tansu_events"
    keys = [1, "é\n", bson.Int64(7), bson.ObjectId(), {"a": [1, None]}, 2.5, b"\0\xff", True, bson.Decimal128("1.10")]
    found: list[Event] = []
    with MongoClient[Any](replica_set.uri, document_class=RawBSONDocument) as client:
        orders = client[name]["orders"]
        with client[name].watch(full_document="updateLookup") as stream:
            orders.insert_many([{"_id": key, "text": "é€\U0001f600" * 3, "list": [1, {"b": None}]} for key in keys])
            orders.update_many({}, {"$set": {"list.1.b": 5}, "$unset": {"text": 1}})
            orders.replace_one({"_id": 1}, {"whole": bson.SON([("z", 1), ("a", 2)])})
            orders.delete_many({"_id": {"$in": keys[1:6]}})
            orders.insert_one({"_id": keys[2], "again": "yes"})
            while len(found) < 2 * len(keys) + 7:
                found.append(Event(stream.next().raw))
        client.drop_database(name)
    return found


FORMS: dict[str, Callable[[str], Any]] = {
    "json": lambda url: ChangeMessages("t"),
    "bson": lambda url: ChangeMessages("t", body="bson"),
    "structured": lambda url: ChangeMessages("t", cloud_events="structured"),
    "binary": lambda url: ChangeMessages("t", cloud_events="binary"),
    "debezium": lambda url: DebeziumMessages("t", clock=int),
    "debezium with schemas": lambda url: DebeziumMessages("t", clock=int, converter=JsonConverter(schemas=True)),
    "debezium structured": lambda url: DebeziumMessages("t", clock=int, cloud_events="structured"),
    "debezium binary": lambda url: DebeziumMessages("t", clock=int, cloud_events="binary"),
    "avro": lambda url: DebeziumMessages("t", clock=int, converter=AvroConverter(url)),
    "protobuf": lambda url: DebeziumMessages(
        "t", clock=int, converter=ProtobufConverter(url), key_converter=JsonConverter()
    ),
}


@pytest.mark.mongod
def test_each_form_of_message_is_on_tansu_what_it_is_on_the_mock_cluster(
    tansu: TansuServer, events: list[Event]
) -> None:
    """Keys, values, headers, tombstones, the partition of each key, and the order in it."""
    with fake_registry() as registry:
        for number, (form, maker) in enumerate(FORMS.items()):
            make, topic, messages = maker(registry.url), f"form-{number}", list[Message]()
            for event in events:
                made = make(event)
                messages += made if isinstance(made, tuple | list) else [made]
            messages = [Message(one.id, topic, one.body, one.key, one.headers) for one in messages]
            tansu.make(topic)
            with closing(KafkaBrokers(topic)) as mock:
                for servers in (mock.servers, tansu.servers):
                    publisher = KafkaPublisher(servers)
                    publish_all(publisher, messages)
                    publisher.close()
                there, here = shown(mock.servers, topic), shown(tansu.servers, topic)
            assert here == there, form
            assert sum(map(bool, here.values())) > 1, "more than one partition"
            wanted = [(one.kafka_key(), one.body, one.kafka_headers()) for one in messages]
            assert sorted(one for found in here.values() for one in map(repr, found)) == sorted(map(repr, wanted))
            assert any(one.body is None for one in messages) == form.startswith(("debezium", "avro", "protobuf"))
            for found in here.values():
                assert found == [one for one in wanted if one[0] in {key for key, *_ in found}]


def test_records_of_16_mb_are_taken_if_both_sides_are_told(tansu: TansuServer) -> None:
    """The client refuses what is above its own limit, before a broker sees it."""
    tansu.make("large")
    body = bytes(range(256)) * (16 << 12) + b"and more"
    publisher = KafkaPublisher(tansu.servers)
    with pytest.raises(MessageRefused, match="too large") as caught:
        publisher.publish([Message("1", "large", body, "a")])
    assert "message.max.bytes" in str(caught.value.hint)
    publisher.close()
    publisher = KafkaPublisher(tansu.servers, {"message.max.bytes": 64 << 20})
    assert publisher.publish([Message("1", "large", body, "a")]) == 1
    publisher.close()
    assert [value for found in shown(tansu.servers, "large").values() for _, value, _ in found] == [body]


@pytest.mark.parametrize("name", ["a b", "é", "a/b", ".", "..", "", "x" * 250])
def test_a_name_that_kafka_forbids_is_refused_by_tansu_too(tansu: TansuServer, name: str) -> None:
    publisher = KafkaPublisher(tansu.servers)
    with pytest.raises(MessageRefused, match="Invalid topic"):
        publisher.publish([Message("1", name, b"", "a")])
    publisher.close()


def test_names_of_collections_become_names_that_tansu_takes(tansu: TansuServer) -> None:
    make = _topic_of("changes.{database}.{collection}")
    assert not isinstance(make, str)
    names = ["orders", "a b", "Bestellungen-ü", "a/b:c", "system.x", "-", "x" * 230]
    topics = [make({"ns": {"db": "shop", "coll": name}}) for name in names] + [make({"ns": {"db": "shop"}})]
    publisher = KafkaPublisher(tansu.servers)
    publish_all(publisher, [Message(str(number), topic, b"", "a") for number, topic in enumerate(topics)])
    publisher.close()
    for number, topic in enumerate(topics):
        found = [dict(headers)["tailrace-id"] for one in shown(tansu.servers, topic).values() for *_, headers in one]
        assert found == [str(number).encode()], topic


@pytest.mark.parametrize("partitions", [1, 3, 11])
def test_keys_keep_their_partition_whatever_the_number_of_partitions(tansu: TansuServer, partitions: int) -> None:
    """As Java's producer chooses it: by murmur2. A second publisher, after a crash, chooses the same."""
    topic = f"by-key-{partitions}"
    tansu.make(topic, partitions)
    for _ in range(2):
        publisher = KafkaPublisher(tansu.servers)
        publish_all(publisher, numbered(0, 40, topic=topic, keys=9))
        publisher.close()
    found = shown(tansu.servers, topic)
    assert len(found) == partitions
    for key in range(9):
        places = [number for number, records in found.items() if str(key).encode() in {one[0] for one in records}]
        assert len(places) == 1
        bodies = [int(value) for of_key, value, _ in found[places[0]] if of_key == str(key).encode()]
        assert bodies == list(range(key, 40, 9)) * 2


def test_a_topic_that_is_made_anew_under_a_publisher_ends_it(tansu: TansuServer) -> None:
    """It went on as if nothing had happened: no earlier broker in the tests could lose what it had acknowledged."""
    tansu.make("anew")
    publisher = KafkaPublisher(tansu.servers)
    publish_all(publisher, numbered(0, 20, topic="anew"))
    tansu.delete("anew")
    tansu.make("anew")
    said = r"has lost messages: partition \d of the topic 'anew' stored one at offset 0, after it had acknowledged one"
    with pytest.raises(MessagesLost, match=said) as caught:
        publish_all(publisher, numbered(20, 20, topic="anew"))
    assert "snapshot" in str(caught.value.hint)
    with pytest.raises(MessagesLost, match=said):  # not only the first attempt
        publisher.publish(numbered(99, 1, topic="anew"))
    publisher.close()
    again = KafkaPublisher(tansu.servers)  # whoever starts it again has read the message
    publish_all(again, numbered(20, 20, topic="anew"))
    again.close()
    bodies = {int(value) for found in shown(tansu.servers, "anew").values() for _, value, _ in found}
    assert bodies == set(range(20, 40))


@pytest.mark.parametrize("harm", ["hangs", "forgets"])
def test_a_producer_that_a_broker_no_longer_accepts_is_replaced(own_tansu: TansuServer, harm: str) -> None:
    """After messages have timed out, the producer takes the next epoch, which Tansu does not accept; a broker that
    comes back empty knows no producers. Either way every attempt failed until the retries ended, and only the next run
    could publish. The mock cluster accepts all of this."""
    publisher = KafkaPublisher(own_tansu.servers, {"message.timeout.ms": 1000, "socket.timeout.ms": 500})
    publish_all(publisher, numbered(0, 20))
    if harm == "hangs":
        with hanging(own_tansu, 3):
            publish_all(publisher, numbered(20, 20), retry_seconds=120)
        bodies = [int(value) for found in shown(own_tansu.servers, "orders").values() for _, value, _ in found]
        assert sorted(set(bodies)) == list(range(40))
        for key in range(3):
            of_key = [body for body in dict.fromkeys(bodies) if body % 3 == key]
            assert of_key == sorted(of_key)
    else:
        own_tansu.stop()
        own_tansu.start()
        with pytest.raises(MessagesLost):
            publish_all(publisher, numbered(20, 20), retry_seconds=120)
    publisher.close()


def listener_of(shop: Any, publisher: KafkaPublisher, letters: DeadLetters, **options: Any) -> Listener:
    return Listener(
        shop["orders"],
        MessageRelay(publisher, ChangeMessages("orders"), retry_seconds=300),
        resource="orders",
        store=MongoLeaseStore(shop["leases"]),
        commit_every=50,
        on_error=letters,
        **options,
    )


def numbers_in(server: TansuServer) -> list[int]:
    return [number_of(one.value()) for records in records_in(server.servers, "orders").values() for one in records]


@pytest.mark.mongod
@pytest.mark.slow  # waits; the publisher alone shows the same above
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_broker_that_comes_back_empty_ends_the_listener_and_the_next_one_goes_on(
    shop: Any, own_tansu: TansuServer, partitions: int
) -> None:
    """The producer tried again for all of its ten minutes, since the broker did not know it, and then ended with
    "timed out". With a new producer it would have gone on, and nobody would have learned that messages were missing."""
    publisher = KafkaPublisher(own_tansu.servers, QUICK)
    letters = DeadLetters(shop["letters"])
    listener = listener_of(shop, publisher, letters, partitions=partitions)
    write(shop, range(100))
    ended: list[TailraceError] = []

    def run() -> None:
        try:
            listener.run()
        except TailraceError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(set(numbers_in(own_tansu))) == 100)
    own_tansu.stop()
    own_tansu.start()
    own_tansu.make("orders")
    write(shop, range(100, 200))
    thread.join(300)
    assert not thread.is_alive()
    assert isinstance(ended[0], HandlerFailed)
    assert isinstance(ended[0].__cause__, MessagesLost)
    assert list(letters.letters()) == [], "no change is to blame"
    publisher.close()
    publisher = KafkaPublisher(own_tansu.servers, QUICK)
    with listener_of(shop, publisher, letters, partitions=partitions):
        until(lambda: set(numbers_in(own_tansu)) >= set(range(100, 200)))
    first = list(dict.fromkeys(one for one in numbers_in(own_tansu) if one >= 100))
    for key in range(7):
        of_key = [one for one in first if one % 7 == key]
        assert of_key == sorted(of_key)
    publisher.close()


@pytest.mark.mongod
@pytest.mark.slow  # as above
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("seconds", [1, 5, 12])
def test_a_broker_that_hangs_has_everything_in_order_when_it_goes_on(
    shop: Any, own_tansu: TansuServer, caplog: pytest.LogCaptureFixture, partitions: int, seconds: int
) -> None:
    """For less than the client waits, and for so long that it gives its messages back several times."""
    publisher = KafkaPublisher(own_tansu.servers, {**QUICK, "socket.timeout.ms": 1000})
    letters = DeadLetters(shop["letters"])
    write(shop, range(100))
    with listener_of(shop, publisher, letters, partitions=partitions):
        until(lambda: len(numbers_in(own_tansu)) >= 50)
        with hanging(own_tansu, seconds):
            write(shop, range(100, 300))
        until(lambda: len(set(numbers_in(own_tansu))) == 300)
    check_order(numbers_in(own_tansu), 300)
    assert ("published again after" in caplog.text) == (seconds > 4)
    assert list(letters.letters()) == []
    publisher.close()


@contextmanager
def hanging(server: TansuServer, seconds: float) -> Iterator[None]:
    server.hang()
    timer = threading.Timer(seconds, server.go_on)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.slow  # a group gets its partitions after 23 s; test_once has the mock cluster
def test_a_consumer_knows_what_was_published_twice_and_what_it_had_before(tansu: TansuServer) -> None:
    """With one record in a batch: with larger ones Tansu reports a wrong end of the partition."""
    tansu.make("twice")
    count = amount(30, 90)
    for first, end in ((0, count), (count - 7, count + 5)):  # the second one repeats seven
        publisher = KafkaPublisher(tansu.servers, {"batch.num.messages": 1})
        publish_all(publisher, numbered(first, end - first, topic="twice"))
        publisher.close()
    settings = {"bootstrap.servers": tansu.servers, "group.id": "g", "auto.offset.reset": "earliest"}
    acted: list[int] = []
    for share in (count // 2, count + 12):
        seen, taken = SeenRecords(), 0
        consumer = Consumer({**settings, "enable.auto.commit": False})
        consumer.subscribe(["twice"], on_assign=seen.assigned)
        while taken < share:
            record = consumer.poll(300)
            assert record is not None
            assert record.error() is None
            taken += 1
            if seen.is_new(record):
                acted.append(int(record.value()))
                consumer.commit(record, asynchronous=False)
        consumer.close()
    assert sorted(acted) == list(range(count + 5))
