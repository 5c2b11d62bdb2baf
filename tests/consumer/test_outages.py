"""A broker that is away while changes come: real servers, killed and started again under a listener that publishes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from confluent_kafka import Producer

import tailrace
from tailrace.consumer import HandlerFailed, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import ChangeMessages, MessageRelay
from tailrace.consumer.messages.kafka import KafkaPublisher
from tailrace.consumer.messages.nats_jetstream import NatsPublisher
from tailrace.consumer.messages.redis_streams import RedisPublisher
from tailrace.embedded import ReplicaSet
from tests.consumer.brokers import Broker, KafkaBrokers, NatsServer, RedisServer
from tests.consumer.shops import until
from tests.consumer.test_brokers import add_stream, in_jetstream, stored_in_kafka

pytestmark = pytest.mark.mongod

WAIT_S = 300.0
KEYS = 7


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"outages_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield client[name]
        client.drop_database(name)


def write(shop: Any, numbers: range) -> None:
    for number in numbers:
        shop.orders.update_one({"_id": number % KEYS}, {"$set": {"n": number}}, upsert=True)


def number_of(body: bytes) -> int:
    event = json.loads(body)
    document = event.get("fullDocument") or event["updateDescription"]["updatedFields"]
    return int(document["n"])


def check_order(numbers: list[int], count: int) -> None:
    """Everything is there, and what came first of each key came in order."""
    first = list(dict.fromkeys(numbers))
    assert sorted(first) == list(range(count))
    for key in range(KEYS):
        assert [number for number in first if number % KEYS == key] == list(range(key, count, KEYS))


def in_redis(server: Any) -> list[int]:
    with redis.Redis.from_url(server.url) as client:
        return [number_of(fields[b"body"]) for _, fields in client.xrange("orders")]


def in_nats(server: Any) -> list[int]:
    async def read(stream: Any) -> list[int]:
        state = (await stream.stream_info("ORDERS")).state
        found = [await stream.get_msg("ORDERS", seq) for seq in range(1, state.messages + 1)]
        return [number_of(one.data) for one in found]

    return list(in_jetstream(server.url, read))


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "partitions"), [("redis", 1), ("redis", 3), ("nats", 1)])
def test_a_broker_that_is_killed_and_comes_back_has_everything_in_order(  # noqa: PLR0917
    shop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, partitions: int, seconds: float
) -> None:
    server: Broker = RedisServer(tmp_path / kind) if kind == "redis" else NatsServer(tmp_path / kind)
    stored: Callable[[Any], list[int]] = in_redis if kind == "redis" else in_nats
    with server:
        publisher: Any
        if isinstance(server, RedisServer):
            publisher = RedisPublisher(server.url)
        else:
            assert isinstance(server, NatsServer)
            add_stream(server)
            publisher = NatsPublisher(server.url)
        letters = DeadLetters(shop["letters"])
        listener = Listener(
            shop["orders"],
            MessageRelay(publisher, ChangeMessages("orders")),
            resource="orders",
            store=MongoLeaseStore(shop["leases"]),
            partitions=partitions,
            commit_every=100,
            on_error=letters,
        )
        write(shop, range(100))
        with listener:
            until(lambda: len(stored(server)) >= 50)
            writer = threading.Thread(target=write, args=(shop, range(100, 900)))
            writer.start()
            server.stop()
            time.sleep(seconds)
            writer.join()
            server.start()
            until(lambda: len(set(stored(server))) == 900)
        check_order(stored(server), 900)
        assert " cannot be reached" in caplog.text
        assert "published again after" in caplog.text
        assert list(letters.letters()) == [], "an outage makes no dead letters"
        publisher.close()


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a_kafka_that_goes_away_and_comes_back_has_everything_in_order(
    shop: Any, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    """Earlier only a Kafka that never came back was tried: it was not known that the mock brokers can be stopped."""
    brokers = KafkaBrokers("orders")
    publisher = KafkaPublisher(brokers.servers, {"message.timeout.ms": 1000})
    letters = DeadLetters(shop["letters"])
    listener = Listener(
        shop["orders"],
        MessageRelay(publisher, ChangeMessages("orders")),
        resource="orders",
        store=MongoLeaseStore(shop["leases"]),
        partitions=3,
        commit_every=100,
        on_error=letters,
    )
    write(shop, range(100))
    with listener:
        found = stored_in_kafka(brokers.servers, "orders", 50)
        assert len(found) == 50
        brokers.stop()
        write(shop, range(100, 500))
        time.sleep(seconds)
        until(lambda: " did not take a message" in caplog.text)
        brokers.start()
        deadline = time.monotonic() + WAIT_S
        while len({number_of(message.value()) for message in found}) < 500:
            assert time.monotonic() < deadline
            missing = 500 - len({number_of(message.value()) for message in found})
            found += stored_in_kafka(brokers.servers, "orders", missing)  # its group goes on where it was
    # All of one key are in one partition, where offsets say in which order they came.
    check_order([number_of(message.value()) for message in sorted(found, key=lambda one: one.offset())], 500)
    assert "published again after" in caplog.text
    assert list(letters.letters()) == [], "an outage makes no dead letters"
    publisher.close()
    brokers.close()


def test_a_kafka_that_does_not_come_back_ends_the_listener_and_loses_nothing(shop: Any) -> None:
    write(shop, range(200))

    def listen(publisher: KafkaPublisher, retry_seconds: float) -> Listener:
        relay = MessageRelay(publisher, ChangeMessages("orders"), retry_seconds=retry_seconds)
        store = MongoLeaseStore(shop["leases"])
        return Listener(shop["orders"], relay, resource="orders", store=store, commit_every=100)

    gone = KafkaPublisher("127.0.0.1:1", {"message.timeout.ms": 300})
    with pytest.raises(HandlerFailed, match=r"Kafka at 127\.0\.0\.1:1 did not take a message for the topic 'orders'"):
        listen(gone, 1.0).run()
    gone.close()
    owner = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3, "log_level": 0})
    brokers = owner.list_topics(timeout=300).brokers.values()
    servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    publisher = KafkaPublisher(servers)
    with listen(publisher, 60.0):
        found = stored_in_kafka(servers, "orders", 200)
    check_order([number_of(message.value()) for message in sorted(found, key=lambda one: one.timestamp())], 200)
    publisher.close()
    owner.flush(5)
