"""What a publisher promises, and the two ways in which it can fail: the server is away, or a message is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tailrace.errors import SinkError

#: The header of a record of Kafka that holds the message's id.
ID_HEADER: Final = "tailrace-id"


@dataclass(frozen=True)
class Message:
    """One message for a broker.

    Attributes:
        id: the change's ``message_id``, which is its resume token's ``_data`` but for changes that share a token: the
            same change gives the same id however often it is published, and the ids of one stream sort as its changes
            do
        topic: the Redis stream, the NATS subject or the Kafka topic
        body: what the message carries; ``None``: a tombstone, after which a compacted topic of Kafka forgets the key
        key: messages with the same key must stay in order: for a change, its document; ``None`` if it concerns no
            document
        headers: names and values in addition to the body
    """

    id: str
    topic: str
    body: bytes | None
    key: str | bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def kafka_key(self) -> bytes | None:
        """The key of the record that the message becomes in Kafka."""
        return self.key.encode() if isinstance(self.key, str) else self.key

    def kafka_headers(self) -> list[tuple[str, bytes]]:
        """The headers of the record that the message becomes in Kafka: those of CloudEvents have the prefix ``ce_``,
        and the id is in ``tailrace-id``."""
        headers = [(name.replace("ce-", "ce_", 1), value.encode()) for name, value in self.headers.items()]
        return [*headers, (ID_HEADER, self.id.encode())]


#: What makes the messages of a change gives: one, several in their order, or none.
Made = Message | Sequence[Message] | None


class PublisherAway(SinkError):  # noqa: N818 - as the other errors are named
    """The server cannot be reached, or accepts no messages at the moment: the same message may be taken later."""


class MessageRefused(SinkError):  # noqa: N818
    """This message will never be taken as it is: it is too large, its topic has no valid name, or it cannot be made."""


class MessagesLost(SinkError):  # noqa: N818
    """The server no longer has what it has acknowledged. No later attempt can repair that, and the message that showed
    it is not to blame, so the listener ends."""


def storable(
    messages: Sequence[Message], server: str, unfit: Callable[[Message], str | None] = lambda message: None
) -> Sequence[Message]:
    """The messages, from the first on, that a server without tombstones can store as they are. ``unfit`` says what else
    the server cannot store of a message. Raises MessageRefused if the first is not one of them."""
    for index, message in enumerate(messages):
        wrong = "no message without a body, such as a tombstone" if message.body is None else unfit(message)
        if wrong is not None:
            if index == 0:
                raise MessageRefused(
                    f"{server} stores {wrong}",
                    hint="Make messages that it can store: tombstones=False, a key in JSON",
                )
            return messages[:index]
    return messages


class Publisher(Protocol):
    """Where messages go. Several threads may publish at a time.

    Attributes:
        keeps_order: a call's messages are stored in their order and without a gap. If it is false, a message may be
            stored although an earlier one of the same call was not; messages of one key are then sent in separate calls
            (``runs``)
    """

    keeps_order: bool

    def publish(self, messages: Sequence[Message]) -> int:
        """Send messages, in order, and wait until the server has stored them. Returns how many, counted from the first,
        are stored: one or more. The rest may be stored or not, and must be published again.

        Raises PublisherAway or MessageRefused for the first message if not even that one is stored, and MessagesLost if
        the server shows that it has lost what it acknowledged. The text names the server without any secret.
        """

    def close(self) -> None:
        """Close the connection. It may be called more than once."""


def runs(messages: Sequence[Message], size_max: int, *, keeps_order: bool) -> Iterator[Sequence[Message]]:
    """``messages`` cut, in order, into what may be published in one call.

    Where the publisher does not keep order on its own, no call has two messages of one key.
    """
    start = 0
    keys: set[str | bytes | None] = set()
    for index, message in enumerate(messages):
        # What concerns no document stands between those before it and those after it.
        barrier = message.key is None or None in keys
        if index - start == size_max or (not keeps_order and index > start and (barrier or message.key in keys)):
            yield messages[start:index]
            start, keys = index, set()
        keys.add(message.key)
    if start < len(messages):
        yield messages[start:]


class MemoryPublisher:
    """Keeps messages in ``stored``, for tests. ``away`` and ``refused`` make it fail: as if the server were out of
    reach, and for the ids of messages that it should refuse."""

    keeps_order = True

    def __init__(self) -> None:
        self.stored: list[Message] = []
        self.refused: set[str] = set()
        self.away = False
        self.closed = False
        self._lock = threading.Lock()

    def publish(self, messages: Sequence[Message]) -> int:
        """See ``Publisher``."""
        with self._lock:
            if self.away or self.closed:
                raise PublisherAway(f"the memory is {'closed' if self.closed else 'away'}")
            for count, message in enumerate(messages):
                if message.id in self.refused:
                    if count:
                        return count
                    raise MessageRefused(f"the message {message.id} is refused")
                self.stored.append(message)
            return len(messages)

    def close(self) -> None:
        """See ``Publisher``."""
        self.closed = True
