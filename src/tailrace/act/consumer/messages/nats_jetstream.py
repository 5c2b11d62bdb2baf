"""Messages on subjects of NATS that a JetStream stream stores."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from tailrace.act.consumer.messages.publisher import Message, MessageRefused, PublisherAway, storable
from tailrace.errors import SinkError
from tailrace.read.source.uri import redact_uri

#: What a stream says about one message: it, or its headers, are too large for this stream (nats-server, errors.json).
_ABOUT_THE_MESSAGE: Final = frozenset({10054, 10097})
_ID_HEADER: Final = "Nats-Msg-Id"
KEY_HEADER: Final = "Tailrace-Key"
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
#: What ends a word, or a line, of its protocol.
_BREAKS: Final = re.compile(r"[ \t\r\n\f\0]")
#: Characters of a value in an error.
_SHOWN: Final = 60

_T = TypeVar("_T")


class NatsPublisher:
    """Publishes to JetStream and waits for its acknowledgements. The message id is sent as ``Nats-Msg-Id``: a message
    that is published again within a stream's duplicate window (two minutes, unless the stream says otherwise) is stored
    once.

    Args:
        servers: ``nats://user:password@host:4222``, or several
        timeout_s: how long to wait for an acknowledgement
        options: options of ``nats.connect``

    The streams that store the subjects must exist. The NATS client uses asyncio: the publisher runs it in a thread of
    its own.
    """

    #: Acknowledgements come one by one, and a stream may refuse one message and take the next.
    keeps_order = False

    def __init__(self, servers: str | list[str], *, timeout_s: float = 5.0, **options: Any) -> None:
        self._servers = [servers] if isinstance(servers, str) else list(servers)
        self._name = "NATS at " + ", ".join(redact_uri(server) for server in self._servers)
        self._timeout_s = timeout_s
        self._options = options
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Client | None = None
        self._stream: JetStreamContext | None = None

    def publish(self, messages: Sequence[Message]) -> int:
        """See ``Publisher``."""
        messages = storable(messages, self._name, _unfit)
        with self._lock:
            results = self._run(self._publish(messages))
            for count, result in enumerate(results):
                if isinstance(result, BaseException):
                    error = self._judged(result, messages[count])
                    if not isinstance(error, MessageRefused):
                        # What waits in a connection that comes back on its own would overtake what is sent again.
                        self._run(self._disconnect())
                    if count:
                        return count
                    raise error from None
            return len(messages)

    async def _publish(self, messages: Sequence[Message]) -> list[Any]:
        try:
            stream = await self._connected()
        except (nats.errors.Error, OSError) as error:
            return [error]
        sent = [
            stream.publish(message.topic, message.body or b"", timeout=self._timeout_s, headers=_headers(message))
            for message in messages
        ]
        return await asyncio.gather(*sent, return_exceptions=True)

    async def _connected(self) -> JetStreamContext:
        if self._client is not None and self._client.is_connected and self._stream is not None:
            return self._stream
        await self._disconnect()
        defaults: dict[str, Any] = {
            "allow_reconnect": False,
            "connect_timeout": self._timeout_s,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.1,
            "error_cb": _ignore,
        }
        connecting = nats.connect(self._servers, **{**defaults, **self._options})
        self._client = await asyncio.wait_for(connecting, self._timeout_s * len(self._servers))
        self._stream = self._client.jetstream(timeout=self._timeout_s)
        return self._stream

    async def _disconnect(self) -> None:
        client, self._client, self._stream = self._client, None, None
        if client is not None and not client.is_closed:
            await client.close()

    def _judged(self, error: BaseException, message: Message) -> SinkError:
        if not isinstance(error, (Exception, asyncio.CancelledError)):
            raise error
        refused = isinstance(error, (nats.errors.MaxPayloadError, nats.errors.BadSubjectError))
        if isinstance(error, nats.js.errors.APIError) and error.err_code in _ABOUT_THE_MESSAGE:
            refused = True
        if refused:
            return MessageRefused(f"{self._name} refused a message for {message.topic!r}: {_words(error)}")
        if isinstance(error, nats.js.errors.NoStreamResponseError):
            return PublisherAway(
                f"{self._name} has no stream that stores the subject {message.topic!r}",
                hint="Add a stream with this subject, and start the server with JetStream (-js)",
            )
        return PublisherAway(f"{self._name} cannot be reached: {_words(error)}")

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="tailrace-nats", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """See ``Publisher``."""
        with self._lock:
            if self._loop is None or self._thread is None:
                return
            self._run(self._disconnect())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None


async def _ignore(_error: Exception) -> None:
    """What goes wrong in the background is seen by the next message."""


def _headers(message: Message) -> dict[str, str]:
    found = {**message.headers, _ID_HEADER: message.id}
    return {**found, KEY_HEADER: message.key} if isinstance(message.key, str) else found


def _unfit(message: Message) -> str | None:
    """What NATS would not store as it is. Its client strips the values of headers; newer ones replace line breaks and
    refuse odd subjects. Older ones send both, so that a key could add headers of its own, and a collection's name with
    a space could lead a message to another subject."""
    words = message.topic.split(".")
    if _BREAKS.search(message.topic) or not all(words) or {"*", ">"} & {*words}:
        form = "a subject consists of words between dots, without spaces, not * or >"
        return f"no message on the subject {message.topic!r}: {form}"
    if isinstance(message.key, bytes):
        return "no message whose key is bytes, such as one of Avro"
    for name, value in _headers(message).items():
        if not _HEADER_NAME.fullmatch(name):
            return f"no header with the name {name!r}"
        if value != value.strip() or "\r" in value or "\n" in value:
            what = "key" if name == KEY_HEADER else f"header {name}"
            return f"no {what} with white space at an end, or with a line break: {value[:_SHOWN]!r}"
    return None


def _words(error: BaseException) -> str:
    return redact_uri(str(error)).removeprefix("nats: ") or type(error).__name__
