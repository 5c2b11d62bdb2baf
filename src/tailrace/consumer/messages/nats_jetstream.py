"""Messages on subjects of NATS that a JetStream stream stores."""

from tailrace.act.consumer.messages.nats_jetstream import (
    NatsPublisher,
)

__all__ = [
    "NatsPublisher",
]
