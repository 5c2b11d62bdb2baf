"""Messages as entries of Redis streams."""

from tailrace.act.consumer.messages.redis_streams import (
    RedisPublisher,
    SeenMessages,
)

__all__ = [
    "RedisPublisher",
    "SeenMessages",
]
