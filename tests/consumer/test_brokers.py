"""Publishers against real servers: Redis, NATS with JetStream, and the mock cluster inside Kafka's client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
import redis
from confluent_kafka import Consumer, Producer, TopicPartition

from tailrace.consumer.messages import Message, MessageRefused, PublisherAway, publish_all
from tailrace.consumer.messages.kafka import KafkaPublisher, SeenRecords
from tailrace.consumer.messages.nats_jetstream import NatsPublisher
from tailrace.consumer.messages.redis_streams import RedisPublisher, SeenMessages
from tailrace.errors import SourceError, UsageError
from tests.consumer.brokers import NatsServer, RedisServer


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


def numbered(first: int, count: int, *, topic: str = "orders", keys: int = 3) -> list[Message]:
    return [
        Message(f"82{n:08X}", topic, str(n).encode(), str(n % keys), {"content-type": "text/plain"})
        for n in range(first, first + count)
    ]


def in_jetstream(url: str, work: Callable[[Any], Any]) -> Any:
    """The result of ``work`` on a JetStream context."""

    async def run() -> Any:
        client = await nats.connect(url)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


def add_stream(server: NatsServer, **options: Any) -> None:
    in_jetstream(
        server.url, lambda stream: stream.add_stream(name="ORDERS", subjects=["orders.>", "orders"], **options)
    )


def stored_in_jetstream(server: NatsServer) -> list[tuple[str, str, str]]:
    async def read(stream: Any) -> list[tuple[str, str, str]]:
        count = (await stream.stream_info("ORDERS")).state.messages
        found = [await stream.get_msg("ORDERS", seq) for seq in range(1, count + 1)]
        return [(one.headers["Nats-Msg-Id"], one.headers["Tailrace-Key"], one.data.decode()) for one in found]

    return in_jetstream(server.url, read)


def restart_after(server: RedisServer | NatsServer, seconds: float) -> threading.Thread:
    def restart() -> None:
        time.sleep(seconds)
        server.start()

    server.stop()
    thread = threading.Thread(target=restart)
    thread.start()
    return thread


# --- Redis -----------------------------------------------------------------------------------------------------------


def entries(client: redis.Redis, stream: str = "orders") -> list[dict[bytes, bytes]]:
    return [fields for _, fields in client.xrange(stream)]


def test_redis_holds_messages_in_order_with_id_key_headers_and_body(redis_server: RedisServer) -> None:
    publisher = RedisPublisher(redis_server.url)
    publish_all(publisher, numbered(0, 20), size_max=7)
    publish_all(publisher, [Message("83", "drops", b"\x00\xff")])
    with redis.Redis.from_url(redis_server.url) as client:
        found = entries(client)
        assert [int(one[b"body"]) for one in found] == list(range(20))
        assert found[4][b"id"] == b"8200000004"
        assert found[4][b"key"] == b"1"
        assert json.loads(found[4][b"headers"]) == {"content-type": "text/plain"}
        assert entries(client, "drops") == [{b"id": b"83", b"body": b"\x00\xff", b"headers": b"{}"}]
    publisher.close()


def test_a_redis_that_is_away_loses_nothing(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    publisher = RedisPublisher(redis_server.url)
    publish_all(publisher, numbered(0, 5))
    back = restart_after(redis_server, 1.0)
    publish_all(publisher, numbered(5, 5), size_max=2)
    back.join()
    with redis.Redis.from_url(redis_server.url) as client:
        assert list(dict.fromkeys(int(one[b"body"]) for one in entries(client))) == list(range(10))
    assert f"Redis at 127.0.0.1:{redis_server.port} cannot be reached" in caplog.text
    publisher.close()


def test_what_redis_refuses_is_told_apart_from_a_server_that_takes_nothing(redis_server: RedisServer) -> None:
    publisher = RedisPublisher(redis_server.url)
    with redis.Redis.from_url(redis_server.url) as client:
        client.set("text", "x")
        with pytest.raises(MessageRefused, match="WRONGTYPE"):
            publisher.publish([Message("1", "text", b"")])
        # It does not take a message for another stream down with it.
        assert publisher.publish([Message("1", "fine", b""), Message("2", "text", b"")]) == 1
        assert client.xlen("fine") == 1
        client.config_set("maxmemory", 1)
        with pytest.raises(PublisherAway, match="maxmemory"):
            publisher.publish([Message("3", "fine", b"")])
        client.config_set("maxmemory", 0)
    with pytest.raises(PublisherAway, match="0 of 1 replicas"):
        RedisPublisher(redis_server.url, replicas=1, timeout_s=2.0).publish([Message("4", "fine", b"")])
    redis_server.stop()
    with pytest.raises(PublisherAway, match="cannot be reached"):
        publisher.publish([Message("5", "fine", b"")])


def test_no_password_of_redis_is_told(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("requirepass", "s3cret")
        wrong = RedisPublisher(f"redis://:wr0ng@127.0.0.1:{redis_server.port}/0")
        with pytest.raises(PublisherAway) as caught:
            wrong.publish([Message("1", "t", b"")])
        assert "wr0ng" not in str(caught.value)
        with pytest.raises(UsageError) as bad:
            RedisPublisher("nonsense://:wr0ng@h")
        assert "wr0ng" not in str(bad.value)


def test_a_consumer_of_redis_acts_once_on_what_was_published_twice(redis_server: RedisServer) -> None:
    """The publisher crashed between the acknowledgement and its commit, so it published the last three again."""
    for first, count in ((0, 6), (3, 5)):
        publish_all(RedisPublisher(redis_server.url), numbered(first, count))
    with redis.Redis.from_url(redis_server.url) as client:
        seen = SeenMessages(client, "billing")
        acted = [
            seen.once(one[b"id"].decode(), lambda pipeline, n=one[b"body"]: pipeline.rpush("bills", n))
            for one in entries(client)
        ]
        assert acted == [True] * 6 + [False] * 3 + [True] * 2
        assert [int(one) for one in client.lrange("bills", 0, -1)] == list(range(8))


# --- NATS ------------------------------------------------------------------------------------------------------------


def test_jetstream_stores_a_message_that_is_published_again_once(nats_server: NatsServer) -> None:
    """The publisher crashed between the acknowledgement and its commit, so it published the last three again."""
    add_stream(nats_server)
    for first, count in ((0, 6), (3, 5)):
        publisher = NatsPublisher(nats_server.url)
        publish_all(publisher, numbered(first, count))
        publisher.close()
    assert stored_in_jetstream(nats_server) == [(f"82{n:08X}", str(n % 3), str(n)) for n in range(8)]


def test_a_nats_that_is_away_loses_nothing(nats_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    add_stream(nats_server)
    publisher = NatsPublisher(nats_server.url, timeout_s=1.0)
    publish_all(publisher, numbered(0, 5))
    back = restart_after(nats_server, 1.0)
    publish_all(publisher, numbered(5, 10))
    back.join()
    publisher.close()
    stored = stored_in_jetstream(nats_server)
    assert sorted(int(body) for _, _, body in stored) == list(range(15))
    for key in "012":
        of_key = [int(body) for _, found, body in stored if found == key]
        assert of_key == sorted(of_key)
    assert f"NATS at nats://127.0.0.1:{nats_server.port} cannot be reached" in caplog.text


def test_what_nats_refuses_is_told_apart_from_a_server_that_takes_nothing(nats_server: NatsServer) -> None:
    publisher = NatsPublisher(nats_server.url, timeout_s=20.0)
    with pytest.raises(PublisherAway, match="no stream that stores the subject 'orders'"):
        publisher.publish(numbered(0, 1))
    add_stream(nats_server, max_msg_size=500, max_msgs=3, discard="new")
    with pytest.raises(MessageRefused, match="exceeds maximum"):
        publisher.publish([Message("1", "orders", bytes(600), "a")])
    with pytest.raises(MessageRefused, match="payload exceeded"):
        publisher.publish([Message("1", "orders", bytes(2 << 20), "a")])
    with pytest.raises(MessageRefused):
        publisher.publish([Message("1", "orders and more", b"", "a")])
    # The message after a refused one of another key may be stored; when it comes again, it is not stored twice.
    assert publisher.publish([*numbered(0, 2), Message("x", "orders", bytes(600), "x"), *numbered(2, 1)]) == 2
    assert publisher.publish(numbered(2, 1)) == 1
    assert [body for _, _, body in stored_in_jetstream(nats_server)] == ["0", "1", "2"]
    with pytest.raises(PublisherAway, match="maximum messages exceeded"):
        publisher.publish(numbered(3, 1))
    publisher.close()
    publisher.close()


def test_no_password_of_nats_is_told() -> None:
    publisher = NatsPublisher("nats://user:s3cret@127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(PublisherAway, match="cannot be reached") as caught:
        publisher.publish(numbered(0, 1))
    assert "s3cret" not in str(caught.value)
    publisher.close()


# --- Kafka -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kafka() -> Iterator[str]:
    """The mock cluster inside librdkafka: three brokers on the loopback for as long as the client that has it lives."""
    owner = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3, "log_level": 0})
    brokers = owner.list_topics(timeout=300).brokers.values()
    yield ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    owner.flush(5)


def stored_in_kafka(servers: str, topic: str, count: int, patience_s: float = 300) -> list[Any]:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "test", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    found: list[Any] = []
    deadline = time.monotonic() + patience_s
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message)
    consumer.close()
    return found


def test_kafka_keeps_the_messages_of_a_key_in_order_in_one_partition(kafka: str) -> None:
    publisher = KafkaPublisher(kafka, {"linger.ms": 5})
    publish_all(publisher, numbered(0, 30, keys=5))
    publisher.publish([Message("82FF", "orders", b"30", None, {"ce-id": "82FF", "content-type": "x"})])
    publisher.close()
    found = stored_in_kafka(kafka, "orders", 31)
    assert sorted(int(message.value()) for message in found) == list(range(31))
    for key in range(5):
        of_key = [message for message in found if message.key() == str(key).encode()]
        assert [int(message.value()) for message in of_key] == list(range(key, 30, 5))
        assert len({message.partition() for message in of_key}) == 1
    last = next(message for message in found if message.key() is None)
    assert dict(last.headers()) == {"ce_id": b"82FF", "content-type": b"x", "tailrace-id": b"82FF"}
    first = next(message for message in found if message.value() == b"0")
    assert dict(first.headers()) == {"content-type": b"text/plain", "tailrace-id": b"8200000000"}


def test_what_kafka_refuses_is_told_apart_from_a_server_that_takes_nothing(kafka: str) -> None:
    publisher = KafkaPublisher(kafka)
    with pytest.raises(MessageRefused, match="too large"):
        publisher.publish([Message("1", "orders", bytes(2 << 20), "a")])
    assert publisher.publish([*numbered(0, 2), Message("1", "orders", bytes(2 << 20), "a")]) == 2
    publisher.close()
    nobody = KafkaPublisher("127.0.0.1:1", {"message.timeout.ms": 300})
    with pytest.raises(PublisherAway, match=r"Kafka at 127.0.0.1:1 did not take"):
        nobody.publish(numbered(0, 1))
    nobody.close()


def test_an_offset_after_the_end_of_a_partition_is_not_taken_for_records_that_were_seen(kafka: str) -> None:
    """Every record of a recreated topic counted as seen until there were as many as before: no test had a topic that
    became shorter."""
    publisher = KafkaPublisher(kafka)
    publish_all(publisher, numbered(0, 20, keys=1))
    publisher.close()
    settings = {"bootstrap.servers": kafka, "group.id": "g", "enable.auto.commit": False}
    settings |= {"auto.offset.reset": "earliest", "session.timeout.ms": 6000}
    for offset, new in ((20, True), (21, False), (22, None)):
        seen = SeenRecords()
        consumer = Consumer(settings)
        consumer.subscribe(["orders"], on_assign=seen.assigned)
        if new is None:
            said = r"the committed offset 21 of partition \d of the topic 'orders' is after its end, 20"
            with pytest.raises(SourceError, match=said) as caught:
                consumer.consume(1, 300)
            assert "--reset-offsets" in str(caught.value.hint)
        else:
            found = consumer.consume(20, 300)
            assert [seen.is_new(record) for record in found] == [new] * 20
            place = TopicPartition("orders", found[0].partition(), offset)
            consumer.commit(offsets=[place], asynchronous=False)
        consumer.close()


def test_settings_that_would_lose_messages_are_refused() -> None:
    for config in ({"acks": "1"}, {"enable.idempotence": False}, {"no.such.setting": 1}):
        with pytest.raises(UsageError):
            KafkaPublisher("127.0.0.1:1", config)
