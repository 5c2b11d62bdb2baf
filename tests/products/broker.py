"""A broker for the outbox's messages in some seeds: Tansu, which speaks Kafka's protocol. In others, they go to a file.

It runs beside the products for a whole run, and each seed has a topic of its own: the hand kills the publishers, sets
their positions back and takes the deployment away, and the broker stays.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest

from tailrace.act.consumer.messages.publisher import Message
from tailrace.consumer.messages.kafka import KafkaPublisher
from tests.consumer.brokers import TansuServer, records_in
from tests.products.product import Job

#: The address of the broker that runs.
_SERVERS: Final = "TAILRACE_TESTS_BROKER"
_NEEDS_IT: Final = "outbox"


@contextmanager
def broker_for(names: Sequence[str], folder: Path) -> Iterator[None]:
    """A broker for this process and its children, if one of the products can use it and the program is available."""
    try:
        server = TansuServer(folder / "broker") if _NEEDS_IT in names else None
    except pytest.skip.Exception:
        server = None
    if server is None:
        yield
        return
    with server:
        os.environ[_SERVERS] = server.servers
        try:
            yield
        finally:
            del os.environ[_SERVERS]


def servers_of(job: Job) -> str | None:
    """The broker that a seed's messages go to, if not to a file."""
    return os.environ.get(_SERVERS) if goes_to_broker(job.options["played"]) else None


def goes_to_broker(seed: int) -> bool:
    return random.Random(f"tailrace broker {seed}").random() < 0.5


class TopicPublisher:
    """All messages of a product to its one topic."""

    keeps_order = KafkaPublisher.keeps_order

    def __init__(self, servers: str, job: Job) -> None:
        self._inner = KafkaPublisher(servers)
        self._topic = topic_of(job)

    def publish(self, messages: Sequence[Message]) -> int:
        """See ``Publisher``."""
        return self._inner.publish([replace(one, topic=self._topic) for one in messages])

    def close(self) -> None:
        """See ``Publisher``."""
        self._inner.close()


def topic_of(job: Job) -> str:
    return f"t{sha256(job.folder.encode()).hexdigest()[:20]}"


def taken(servers: str, job: Job) -> list[tuple[str, str, str, str]]:
    """The id, key, id of the letter and body of each record; those of one key in their order."""
    found = []
    for records in records_in(servers, topic_of(job)).values():
        for one in records:
            headers = {name: value.decode() for name, value in one.headers()}
            found.append((headers["tailrace-id"], one.key().decode(), headers["outbox-id"], one.value().decode()))
    return found
