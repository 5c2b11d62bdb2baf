"""Publish every change of a database to a topic of Kafka, exactly once, in order for each document.

    python to_kafka.py URI DATABASE BOOTSTRAP_SERVERS TOPIC CHECKPOINT

A topic is its own record of what it has: each message carries its token (with a number, where several events have one
token), a document's changes all go to one partition, and the producer keeps their order. So the last message of each
partition tells which events of a batch that is given again are there already. That holds as long as nobody else writes
to the topic, its number of partitions stays, and its retention keeps the last message.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from zlib import crc32

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tailrace.spark import MicroBatch, document_of, foreach_batch, local_session

WAIT_S = 60.0
TOKEN = "tailrace-token"


class Topic:
    """Writes batches to a topic. ``partitions`` maps each partition to the last token in it, "" for none."""

    def __init__(self, servers: str, topic: str, **config: object) -> None:
        self._config: dict[str, object] = {"bootstrap.servers": servers, **config}
        self._topic = topic
        self._producer = Producer({**self._config, "enable.idempotence": True})
        self._partitions: Mapping[int, str] = {}

    def write(self, batch: MicroBatch) -> None:
        if not self._partitions:  # the process is new, or a batch has failed
            self._partitions = self._last_tokens()
        tokens, self._partitions = dict(self._partitions), {}
        try:
            self._send(batch, tokens)
        except BaseException:
            self._call_back()
            raise
        self._partitions = tokens

    def _send(self, batch: MicroBatch, tokens: dict[int, str]) -> None:
        refused: list[KafkaError] = []

        def told(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                refused.append(error)

        before, again = "", 0
        for row in batch.rows():
            key = document_of(row.event)
            partition = crc32(key) % len(tokens)
            # What several shards log at one time, such as a drop, may share one token.
            before, again = row.token, again + 1 if row.token == before else 0
            place = f"{row.token}-{again:03}" if again else row.token
            if place <= tokens[partition]:
                continue
            headers = [(TOKEN, place.encode()), ("operation", row.operation_type.encode())]
            while True:
                try:
                    self._producer.produce(
                        self._topic, bytes(row.event), key, partition, on_delivery=told, headers=headers
                    )
                    break
                except BufferError:
                    self._producer.poll(1)
            tokens[partition] = place
        if self._producer.flush(WAIT_S) or refused:
            raise KafkaException(refused[0] if refused else KafkaError(KafkaError._TIMED_OUT))

    def _call_back(self) -> None:
        """Nothing of a failed batch may come after the last tokens are read for its repetition. What is not sent yet is
        taken back, and the answer to what is on the way is awaited, which ``socket.timeout.ms`` bounds."""
        self._producer.purge(in_flight=False)
        while self._producer.flush(0.1):
            self._producer.purge(in_flight=False)  # what was on the way, and would be sent again

    def _last_tokens(self) -> dict[int, str]:
        consumer = Consumer({**self._config, "group.id": "unused", "enable.auto.commit": False})
        try:
            found = consumer.list_topics(self._topic, WAIT_S).topics[self._topic]
            if found.error is not None:
                raise KafkaException(found.error)
            return {number: self._last_token(consumer, number) for number in found.partitions}
        finally:
            consumer.close()

    def _last_token(self, consumer: Consumer, number: int) -> str:
        first, end = consumer.get_watermark_offsets(TopicPartition(self._topic, number), WAIT_S)
        if first == end:
            return ""
        consumer.assign([TopicPartition(self._topic, number, end - 1)])
        message = consumer.poll(WAIT_S)
        if message is None or message.error() is not None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT) if message is None else message.error())
        token = dict(message.headers() or []).get(TOKEN)
        if token is None:
            raise ValueError(f"somebody else has written to partition {number} of {self._topic}")
        return token.decode()


def main(uri: str, database: str, servers: str, topic: str, checkpoint: str) -> None:
    events = (
        local_session()
        .readStream.format("tailrace")
        .options(uri=uri, database=database, columns="token,operation_type,event")
        .load()
    )
    query = events.writeStream.foreachBatch(foreach_batch(Topic(servers, topic).write))
    query.option("checkpointLocation", checkpoint).start().awaitTermination()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    main(*sys.argv[1:])
