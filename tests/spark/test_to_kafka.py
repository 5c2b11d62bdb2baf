"""The program ``examples/sinks/to_kafka.py`` with brokers that can go away, and with the test's own batches: no Spark
runs here.

The test of the program in a query let a batch fail only after everything queued was in the topic. So no test had seen
that the producer went on sending the rest of a failed batch, after what the repeated batch had sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import cast

import bson
import pytest
from confluent_kafka import KafkaException
from pyspark.sql import Row

from tailrace.spark import MicroBatch
from tests.consumer.brokers import KafkaBrokers
from tests.spark.sinks import example
from tests.spark.test_foreach_batch import taken_from, tokens_of

pytestmark = pytest.mark.spark


def changes(first: int, end: int) -> list[Row]:
    """An insert of a document each."""
    found = []
    for number in range(first, end):
        token = f"82{1_700_000_000 + number:08X}000000012B"
        event = {"_id": {"_data": token}, "ns": {"db": "d", "coll": "c"}, "documentKey": {"_id": number}}
        found.append(Row(token=token, operation_type="insert", event=bson.encode(event)))
    return found


class Given:
    """A batch of these rows; a function is called before row ``at``."""

    def __init__(self, rows: Sequence[Row], at: int = -1, then: Callable[[], object] = lambda: None) -> None:
        self._rows, self._at, self._then = rows, at, then

    def rows(self) -> Iterator[Row]:
        for number, row in enumerate(self._rows):
            if number == self._at:
                self._then()
            yield row


def batch(*arguments: object) -> MicroBatch:
    return cast("MicroBatch", Given(*arguments))  # type: ignore[arg-type]


def assert_once(brokers: KafkaBrokers, rows: Sequence[Row]) -> None:
    """Each event is in the topic once, and each partition has them in their order."""
    partitions = [tokens_of(events) for events in taken_from(brokers.servers, "events")]
    assert all(partitions), "more than one partition"
    assert sorted(token for tokens in partitions for token in tokens) == [row.token for row in rows]
    for tokens in partitions:
        assert tokens == sorted(tokens)


def test_what_a_failed_batch_has_queued_is_not_sent_after_its_repetition() -> None:
    def fail() -> None:
        raise OSError("the source is gone")

    with closing(KafkaBrokers("events")) as brokers:
        # Queued messages are held back, as by a slow network: only flushed ones are sent.
        topic = example("to_kafka").Topic(brokers.servers, "events", **{"linger.ms": 200_000, "log_level": 0})
        rows = changes(0, 100)
        topic.write(batch(rows[:20]))
        for at in (10, 60):
            with pytest.raises(OSError, match="the source is gone"):
                topic.write(batch(rows[20:], at, fail))
        assert_once(brokers, rows[:20])
        topic.write(batch(rows[20:]))
        topic.write(batch(changes(100, 120)))
        assert_once(brokers, changes(0, 120))


@pytest.mark.parametrize("half", ["taken", "queued"])
def test_brokers_that_are_away_within_a_batch_and_before_it(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to_kafka = example("to_kafka")
    with closing(KafkaBrokers("events")) as brokers:
        topic = to_kafka.Topic(brokers.servers, "events", log_level=0)
        rows, patience = changes(0, 100), to_kafka.WAIT_S
        topic.write(batch(rows[:20]))

        def cut_off() -> None:
            if half == "taken":
                assert topic._producer.flush(300) == 0
            brokers.stop()
            monkeypatch.setattr(to_kafka, "WAIT_S", 1.0)

        with pytest.raises(KafkaException, match="_TIMED_OUT"):
            topic.write(batch(rows[20:], 50, cut_off))
        for again in (topic, to_kafka.Topic(brokers.servers, "events", log_level=0)):
            with pytest.raises(KafkaException, match=r"_TRANSPORT|_TIMED_OUT"):  # whichever it notices first
                again.write(batch(rows[20:]))
        brokers.start()
        monkeypatch.setattr(to_kafka, "WAIT_S", patience)
        topic.write(batch(rows[20:]))
        topic.write(batch(changes(100, 120)))
        assert_once(brokers, changes(0, 120))


def test_each_event_of_a_token_that_several_have_is_sent_once_wherever_a_batch_was_cut_off() -> None:
    """Events of several shards with the same token were taken for repetitions of the first. No earlier test had two in
    a batch."""
    rows = changes(0, 8)
    event = {**bson.decode(rows[5].event), "from": "another shard"}
    rows.insert(6, Row(token=rows[5].token, operation_type="insert", event=bson.encode(event)))
    for done in (5, 6, 7, 9):
        with closing(KafkaBrokers("events")) as brokers:
            example("to_kafka").Topic(brokers.servers, "events").write(batch(rows[:done]))
            topic = example("to_kafka").Topic(brokers.servers, "events")  # as after a crash
            topic.write(batch(rows))
            topic.write(batch(changes(20, 30)))
            assert_once(brokers, [*rows, *changes(20, 30)])
