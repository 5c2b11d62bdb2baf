"""Messages for Kafka, through librdkafka's idempotent producer."""

from tailrace.act.consumer.messages.kafka import (
    KafkaPublisher,
    SeenRecords,
)

__all__ = [
    "KafkaPublisher",
    "SeenRecords",
]
