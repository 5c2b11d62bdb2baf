"""Messages as entries of Redis streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tailrace.act.consumer.messages.publisher import Message, MessageRefused, PublisherAway, storable
from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.errors import UsageError
from tailrace.read.source.uri import redact_uri

if TYPE_CHECKING:
    from redis.client import Pipeline

#: What the server says about the message; anything else is about the server: memory, rights, its role, loading.
_ABOUT_THE_MESSAGE: Final = ("WRONGTYPE", "string exceeds maximum")


class RedisPublisher:
    """Appends to Redis streams (``XADD``), a call's messages of one stream in one transaction.

    Args:
        server: a URL, ``redis://:password@host:6379/0``, or a client of the package ``redis``
        length_max: a stream is trimmed to about this many entries; ``None``: never
        replicas: how many replicas must have a message before it counts as stored (``WAIT``)
        timeout_s: how long to wait for an answer
        options: options of ``redis.Redis.from_url``

    An entry has the fields ``id``, ``body``, ``headers`` (JSON) and, if there is one, ``key``. How safely Redis keeps
    what it has acknowledged depends on its ``appendfsync``.
    """

    keeps_order = True

    def __init__(
        self,
        server: str | redis.Redis,
        *,
        length_max: int | None = None,
        replicas: int = 0,
        timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        self._owned = isinstance(server, str)
        if isinstance(server, str):
            defaults = {"socket_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
            try:
                self._client = redis.Redis.from_url(server, **{**defaults, **options})
            except ValueError as error:
                raise UsageError(f"the Redis URL cannot be used: {redact_uri(str(error))}") from None
        else:
            self._client = server
        self._length_max = length_max
        self._replicas = replicas
        self._timeout_s = timeout_s
        made = self._client.connection_pool.connection_kwargs
        self._name = f"Redis at {made.get('host') or made.get('path')}:{made.get('port', '')}".rstrip(":")

    def publish(self, messages: Sequence[Message]) -> int:
        """See ``Publisher``."""
        messages = storable(messages, self._name)
        topic = messages[0].topic
        together = next((n for n, message in enumerate(messages) if message.topic != topic), len(messages))
        try:
            # Commands of a transaction fail one by one: only those of one stream fail alike.
            with self._client.pipeline(transaction=True) as pipeline:
                for message in messages[:together]:
                    self._add(pipeline, message)
                pipeline.execute()
            if self._replicas:
                self._wait_for_replicas()
        except redis.ResponseError as error:
            said = redact_uri(str(error))
            if any(words in said for words in _ABOUT_THE_MESSAGE):
                raise MessageRefused(f"{self._name} refused a message for the stream {topic!r}: {said}") from None
            raise PublisherAway(f"{self._name} accepts no messages at the moment: {said}") from None
        except (redis.RedisError, OSError) as error:
            raise PublisherAway(
                f"{self._name} cannot be reached: {redact_uri(str(error)) or type(error).__name__}"
            ) from None
        return together

    def _add(self, pipeline: Pipeline, message: Message) -> None:
        headers = json.dumps(dict(message.headers))
        fields: dict[Any, Any] = {"id": message.id, "body": message.body, "headers": headers}
        if message.key is not None:
            fields["key"] = message.key
        pipeline.xadd(message.topic, fields, maxlen=self._length_max, approximate=True)

    def _wait_for_replicas(self) -> None:
        reached = self._client.wait(self._replicas, int(self._timeout_s * 500))
        if reached < self._replicas:
            raise PublisherAway(f"{self._name} has {reached} of {self._replicas} replicas that are up to date")

    def close(self) -> None:
        """See ``Publisher``."""
        if self._owned:
            self._client.close()


class SeenMessages:
    """What a consumer of Redis streams has acted on, by message id, kept in Redis itself.

    ``once(message_id, effect)`` runs ``effect(pipeline)``, Redis commands, and marks the id in the same transaction; an
    id that is already marked changes nothing. Returns whether the effect was carried out. Ids are remembered for
    ``seconds``: longer than a publisher can be away and come back with the same message.
    """

    def __init__(self, client: redis.Redis, name: str, *, seconds: int = 24 * 3600) -> None:
        self._client = client
        self._name = name
        self._seconds = seconds

    def once(self, message_id: str, effect: Any) -> bool:
        """Carry out the effect of a message unless it was carried out before. Raises redis.WatchError if another
        consumer of the same name works on the same message."""
        mark = f"{self._name}:{message_id}"
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(mark)  # type: ignore[no-untyped-call]
            if pipeline.exists(mark):
                return False
            pipeline.multi()
            refuse_unrun(effect(pipeline), "the effect")
            pipeline.set(mark, 1, ex=self._seconds)
            pipeline.execute()
        return True
