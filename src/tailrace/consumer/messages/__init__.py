"""Changes as messages: ordered, at least once, each with its resume token as the id by which repeats are recognised.

``RedisPublisher`` needs the extra ``redis``, ``NatsPublisher`` ``nats`` and ``KafkaPublisher`` ``kafka``: they are
imported from their modules ``redis_streams``, ``nats_jetstream`` and ``kafka``. ``AvroConverter`` and
``ProtobufConverter`` need the extra ``schema-registry``, and are imported from ``schema_registry``.
"""

from tailrace.act.consumer.messages.debezium import DebeziumMessages, JsonConverter
from tailrace.act.consumer.messages.making import ChangeMessages, Outbox, ordering_key
from tailrace.act.consumer.messages.publisher import (
    MemoryPublisher,
    Message,
    MessageRefused,
    MessagesLost,
    Publisher,
    PublisherAway,
)
from tailrace.act.consumer.messages.relay import MessageRelay, publish_all

__all__ = [
    "ChangeMessages",
    "DebeziumMessages",
    "JsonConverter",
    "MemoryPublisher",
    "Message",
    "MessageRefused",
    "MessageRelay",
    "MessagesLost",
    "Outbox",
    "Publisher",
    "PublisherAway",
    "ordering_key",
    "publish_all",
]
