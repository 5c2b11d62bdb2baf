"""Messages for Kafka, through librdkafka's idempotent producer."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from tailrace.act.consumer.messages.publisher import ID_HEADER, MessageRefused, MessagesLost, PublisherAway
from tailrace.act.consumer.messages.publisher import Message as ToPublish
from tailrace.errors import SinkError, SourceError, UsageError

#: How long the producer itself tries to deliver a message before it gives it back.
_DELIVERY_TIMEOUT_MS: Final = 15_000
_POLL_S: Final = 0.5
_CLOSE_S: Final = 10.0
#: How long to wait for an answer from brokers that did not take a message.
_ANSWER_S: Final = 5.0
_ABOUT_THE_MESSAGE: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_RECORD,
        KafkaError._INVALID_ARG,
    }
)

#: Errors of a message whose producer the brokers no longer accept. Brokers that do not know the producer let its
#: messages time out.
_ABOUT_THE_PRODUCER: Final = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    }
)

_SIZE_HINT: Final = (
    "The client's limit is 1 MB: set message.max.bytes in config, and max.message.bytes of the topic, for larger ones"
)

#: librdkafka's own remarks: several for each outage, which our one line reports too.
_client_log = logging.getLogger("tailrace.kafka")
_client_log.addHandler(logging.NullHandler())
_client_log.propagate = False


class KafkaPublisher:
    """Produces to Kafka with ``acks=all`` and the idempotent producer, and waits for the delivery reports. Messages of
    one key go to one partition, in order.

    Args:
        servers: ``bootstrap.servers``: ``host:9092,host:9092``
        config: further settings of librdkafka, such as those of TLS and SASL

    The message id is in the header ``tailrace-id``. CloudEvents' headers have the prefix ``ce_``, as the Kafka binding
    requires. The topics must exist, unless the brokers create them.

    Offsets only rise. If a message gets one that is not above those that its partition has acknowledged before, the
    topic has been recreated, or its brokers have lost what they acknowledged. Then MessagesLost is raised, and this
    publisher publishes nothing more.
    """

    #: A message that is given back may be overtaken by the next one.
    keeps_order = False

    def __init__(self, servers: str, config: Mapping[str, Any] | None = None) -> None:
        fixed = {"bootstrap.servers": servers, "enable.idempotence": True, "acks": "all"}
        given = dict(config or {})
        if str(given.get("acks", "all")) not in ("all", "-1") or given.get("enable.idempotence", True) not in (
            True,
            "true",
        ):
            raise UsageError(
                "acks and enable.idempotence cannot be changed: messages could be lost", hint="Leave both out"
            )
        defaults = {"message.timeout.ms": _DELIVERY_TIMEOUT_MS, "linger.ms": 0, "partitioner": "murmur2_random"}
        self._config = {**defaults, **given, **fixed}
        self._name = f"Kafka at {servers}"
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        #: The highest offset that each partition, a topic and a number, has acknowledged.
        self._acknowledged: dict[tuple[str, int], int] = {}
        self._lost: str | None = None
        #: The producer from which brokers took no message though they answered, and when they did.
        self._suspect: tuple[Producer, float] | None = None
        self._open()

    def _open(self) -> Producer:
        with self._lock:
            self._refuse_if_lost()
            if self._producer is None:
                try:
                    self._producer = Producer(self._config, logger=_client_log)
                except KafkaException as error:
                    raise UsageError(f"the settings of Kafka cannot be used: {error.args[0].str()}") from None
            return self._producer

    def publish(self, messages: Sequence[ToPublish]) -> int:
        """See ``Publisher``."""
        producer = self._open()
        with self._lock:
            before = dict(self._acknowledged)
        began = time.monotonic()
        reports: dict[int, KafkaError | None] = {}
        stored: dict[tuple[str, int], list[int]] = {}
        sent = 0
        for index, message in enumerate(messages):
            try:
                self._produce(producer, message, reports, index, stored)
            except KafkaException as error:
                reports[index] = error.args[0]
            sent += 1
            if reports.get(index) is not None:
                break
        while len(reports) < sent:
            self._poll(producer)
        self._check(before, stored)
        failed = next((index for index in range(sent) if reports[index] is not None), None)
        if failed is None:
            self._suspect = None
            return sent
        told = reports[failed]
        assert told is not None
        self._replace_if_useless(producer, told, messages[failed].topic, began)
        judged = self._judged(told, messages[failed])
        if failed:
            return failed
        raise judged

    def _check(self, before: Mapping[tuple[str, int], int], stored: Mapping[tuple[str, int], Sequence[int]]) -> None:
        """Whether all that a call has stored lies after all that was acknowledged when it began."""
        with self._lock:
            for place, offsets in stored.items():
                highest = before.get(place, -1)
                if min(offsets) <= highest and self._lost is None:
                    self._lost = (
                        f"{self._name} has lost messages: partition {place[1]} of the topic {place[0]!r} stored one at "
                        f"offset {min(offsets)}, after it had acknowledged one at {highest}"
                    )
                self._acknowledged[place] = max(self._acknowledged.get(place, -1), *offsets)
            self._refuse_if_lost()

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise MessagesLost(
                self._lost,
                hint="The topic was recreated, or its brokers lost what they had acknowledged. The next run goes on "
                "from the committed position: publish what is missing again, with tailrace leases seek or a snapshot",
            )

    def _poll(self, producer: Producer) -> None:
        """Wait for reports. The client raises its fatal error here, once; the reports of the messages follow."""
        try:
            producer.poll(_POLL_S)
        except KafkaException as error:
            if not error.args[0].fatal():
                raise
            self._replace(producer)

    def _replace(self, producer: Producer) -> None:
        """Let the next call begin with a new producer: this one has lost its place among the sequence numbers."""
        with self._lock:
            if self._producer is producer:
                self._producer = None

    def _produce(
        self,
        producer: Producer,
        message: ToPublish,
        reports: dict[int, KafkaError | None],
        index: int,
        stored: dict[tuple[str, int], list[int]],
    ) -> None:
        def delivered(error: KafkaError | None, record: Message) -> None:
            # A batch that was sent twice is acknowledged without offsets.
            if error is None and (offset := record.offset()) is not None and offset >= 0:
                stored.setdefault((message.topic, record.partition() or 0), []).append(offset)
            reports[index] = error

        while True:
            try:
                producer.produce(
                    message.topic,
                    value=message.body,
                    key=message.kafka_key(),
                    headers=list(message.kafka_headers()),
                    on_delivery=delivered,
                )
            except BufferError:  # its queue is full: some have to leave it first
                self._poll(producer)
            else:
                return

    def _judged(self, error: KafkaError, message: ToPublish) -> SinkError:
        if error.code() in _ABOUT_THE_MESSAGE:
            hint = _SIZE_HINT if error.code() == KafkaError.MSG_SIZE_TOO_LARGE else None
            return MessageRefused(
                f"{self._name} refused a message for the topic {message.topic!r}: {error.str()}", hint=hint
            )
        return PublisherAway(f"{self._name} did not take a message for the topic {message.topic!r}: {error.str()}")

    def _replace_if_useless(self, producer: Producer, error: KafkaError, topic: str, began: float) -> None:
        doubtful = error.code() in _ABOUT_THE_PRODUCER
        if error.fatal() or (doubtful and self._is_forgotten(producer, topic, began)):
            self._replace(producer)

    def _is_forgotten(self, producer: Producer, topic: str, began: float) -> bool:
        """Whether the brokers no longer accept the producer. They may have lost their data, or (Tansu) refuse the next
        epoch, which the producer takes after messages timed out. Then they take nothing from it, however often it
        tries. This counts only if the brokers also answered before this attempt began: if a broker only hangs, messages
        that the old producer has sent could still arrive after those of a new one. Only the next epoch of the same
        producer rules that out."""
        try:
            producer.list_topics(topic, timeout=_ANSWER_S)
        except KafkaException:
            self._suspect = None
            return False
        with self._lock:
            if self._suspect is None or self._suspect[0] is not producer:
                self._suspect = (producer, time.monotonic())
                return False
            return self._suspect[1] <= began

    def close(self) -> None:
        """See ``Publisher``."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.flush(_CLOSE_S)


class SeenRecords:
    """Which records of Kafka a consumer has seen before, by the header ``tailrace-id``.

    A publisher that ends between the brokers' acknowledgement and the commit of its position publishes its last
    messages again, to the same partitions, and no broker notices. ``is_new(record)`` says of each record in turn
    whether it is new: for each partition the last ``size`` ids are remembered. They are read back from the topic when a
    partition is assigned:

        consumer = Consumer({..., "enable.auto.commit": False})
        consumer.subscribe(["orders"], on_assign=seen.assigned)

    So a record from before the committed offset is delivered again, and is not new. Commit after new records only: an
    offset must not go back. If a topic is deleted and recreated, delete the group's offsets of it too: with an offset
    that is after the end, ``poll`` raises SourceError. What is done with a record and the commit of its offset are two
    steps: an effect that must be carried out once, even if the consumer ends between the two, belongs in one
    transaction with a mark (``SeenChanges``, ``SeenMessages``) or with the offset (Kafka's own transactions).
    """

    def __init__(self, size: int = 100_000) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"size must be a whole number, 1 or more, not {size!r}")
        self._size = size
        self._ids: dict[tuple[str, int], OrderedDict[bytes, None]] = {}
        #: Where each partition's records begin that were not consumed before.
        self._begin: dict[tuple[str, int], int] = {}

    def assigned(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """For ``on_assign``: let the consumer read ``size`` records before its committed offsets too. Raises
        SourceError, in the consumer's ``poll``, where a committed offset is after the end of its partition."""
        begins = []
        for committed in consumer.committed(partitions):
            place = (committed.topic, committed.partition)
            self._ids.pop(place, None)
            self._begin.pop(place, None)
            if committed.offset >= 0:
                self._begin[place] = committed.offset
                oldest, end = consumer.get_watermark_offsets(TopicPartition(*place))
                if committed.offset > end:
                    # New records would count as seen until there are as many as before.
                    self._begin.pop(place)
                    raise SourceError(
                        f"the committed offset {committed.offset} of partition {place[1]} of the topic {place[0]!r} is "
                        f"after its end, {end}: the topic was recreated, or its brokers lost records",
                        hint="Reset the group's offsets, with kafka-consumer-groups --reset-offsets --to-earliest for "
                        "all that is there",
                    )
                committed.offset = max(oldest, committed.offset - self._size)
            begins.append(committed)
        consumer.assign(begins)

    def is_new(self, record: Message) -> bool:
        """Whether the record should be acted on. A record without an id, which Tailrace did not publish, is always
        new."""
        place = (str(record.topic()), int(record.partition() or 0))
        headers: Any = record.headers() or ()
        identity = next((value for name, value in headers if name == ID_HEADER), None)
        before = (record.offset() or 0) < self._begin.get(place, 0)
        if identity is None:
            return not before
        ids = self._ids.setdefault(place, OrderedDict())
        key = identity.encode() if isinstance(identity, str) else bytes(identity or b"")
        known = key in ids
        ids[key] = None
        if len(ids) > self._size:
            ids.popitem(last=False)
        return not known and not before
