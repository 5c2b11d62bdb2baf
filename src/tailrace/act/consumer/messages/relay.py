"""The handler that publishes: one change, its message, the acknowledgement; then the next change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection
from pymongo.write_concern import WriteConcern

from tailrace.act.consumer.messages.making import RawChange
from tailrace.act.consumer.messages.publisher import Made, Message, MessageRefused, Publisher, PublisherAway, runs
from tailrace.act.consumer.rules.errors import HandlerInterrupted
from tailrace.act.consumer.rules.lane_key import LaneKey
from tailrace.act.consumer.rules.unrun import refuse_unrun
from tailrace.errors import UsageError
from tailrace.read.source.failure import Backoff

RETRY_SECONDS: Final = 600.0
#: While a server is away, the log says so again this often.
_REMIND_S: Final = 60.0
#: How many messages, at most, go into one call of a publisher.
SIZE_MAX: Final = 500

_log = logging.getLogger("tailrace.consumer")


class MessageRelay:
    """A listener's handler that publishes a message for each change and waits for the acknowledgement, so that a
    position is committed only after it. Messages are delivered at least once and in order. With ``commit_every``, up to
    that many available changes are published together.

    Args:
        make: returns the message for a change, several in order, or ``None``: ``ChangeMessages``, ``DebeziumMessages``
            or ``Outbox``. If it raises PublisherAway, for example because a schema registry is unreachable, it is
            called again for as long as an unreachable server is waited for
        retry_seconds: how long to wait for a server that is unreachable; then PublisherAway ends the listener, and
            nothing that was not acknowledged has been committed
        delete_from: the outbox collection: a document is deleted when its message is acknowledged
    """

    def __init__(
        self,
        publisher: Publisher,
        make: Callable[[RawChange], Made],
        *,
        retry_seconds: float = RETRY_SECONDS,
        delete_from: Collection[Any] | None = None,
    ) -> None:
        if retry_seconds < 0:
            raise UsageError("retry_seconds must be a number of seconds, 0 or more")
        self._publisher = publisher
        self._make = make
        self._retry_seconds = retry_seconds
        self._delete_from = None
        #: What lanes are chosen by (``Listener``).
        self.lane_key: LaneKey | None = getattr(make, "lane_key", None)
        if delete_from is not None:
            self._delete_from = delete_from.with_options(write_concern=WriteConcern("majority"))

    def __call__(self, change: Any) -> None:
        """Publish the message for a change. Raises MessageRefused, and PublisherAway if waiting was in vain."""
        self.handle_batch([change])

    def handle_batch(self, changes: Sequence[Any]) -> int:
        """Publish the messages of several changes in as few calls as the order allows. Returns how many changes are
        done, from the first on: one or more. Raises what is wrong with the first of them."""
        messages: list[Message] = []
        owners: list[int] = []
        done = len(changes)
        for place, change in enumerate(changes):
            try:
                made = self._made(change) if place else self._made_at_last(change)
            except Exception:
                if place == 0:
                    raise
                done = place  # those before it are published; then it comes first, and is judged
                break
            messages += made
            owners += [place] * len(made)
        published = publish_first(
            self._publisher,
            messages,
            retry_seconds=self._retry_seconds,
            stopped=lambda: getattr(changes[0], "is_stopping", False),
            check=getattr(changes[0], "check", lambda: None),
        )
        if published.count < len(messages):
            done = owners[published.count]
            if done == 0 and published.error is not None:
                raise self._judged(published.error, changes[0])
        # A change is done when all of its messages are stored.
        stored = dict.fromkeys(place for place in owners[: published.count] if place < done)
        self._delete(changes[place] for place in stored)
        return done

    def _made(self, change: Any) -> list[Message]:
        made = self._make(change)
        refuse_unrun(made, "what makes the message")
        if made is None:
            return []
        return [made] if isinstance(made, Message) else list(made)

    def _made_at_last(self, change: Any) -> list[Message]:
        """As ``_made``, after waiting for a server that making a message needs."""
        backoff = Backoff(give_up_s=self._retry_seconds)
        outage = _Outage(self._retry_seconds)
        while True:
            try:
                made = self._made(change)
            except PublisherAway as error:
                is_stopping = getattr(change, "is_stopping", False)
                if backoff.exhausted or is_stopping:
                    raise self._judged(error, change) from None
                outage.goes_on(error, 1)
                backoff.wait(lambda: getattr(change, "is_stopping", False))
                getattr(change, "check", lambda: None)()
            else:
                outage.is_over()
                return made

    @staticmethod
    def _judged(error: Exception, change: Any) -> Exception:
        """A server that is away is no reason for a listener that is stopped to end with an error."""
        if isinstance(error, PublisherAway) and getattr(change, "is_stopping", False):
            return HandlerInterrupted(f"the listener is stopping while {error.message}")
        return error

    def _delete(self, published: Iterable[Any]) -> None:
        if self._delete_from is not None and (keys := [_document_id(change) for change in published]):
            self._delete_from.delete_many({"_id": {"$in": keys}})


def _document_id(change: RawChange) -> Any:
    """From the event's bytes: other strings of the event need not be UTF-8."""
    return RawBSONDocument(change.raw)["documentKey"]["_id"]


@dataclass(frozen=True)
class Published:
    """``count`` messages are stored; ``error`` is why the next one is not."""

    count: int
    error: Exception | None = None


def publish_all(
    publisher: Publisher,
    messages: Sequence[Message],
    *,
    retry_seconds: float = RETRY_SECONDS,
    size_max: int = SIZE_MAX,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Publish ``messages`` in order, each call of the publisher after the acknowledgement of the one before, and try
    again while the server is away, for ``retry_seconds`` without progress or until ``stopped``.

    Raises PublisherAway, and MessageRefused for the first message that is not acknowledged.
    """
    published = publish_first(publisher, messages, retry_seconds=retry_seconds, size_max=size_max, stopped=stopped)
    if published.error is not None:
        raise published.error


def publish_first(
    publisher: Publisher,
    messages: Sequence[Message],
    *,
    retry_seconds: float = RETRY_SECONDS,
    size_max: int = SIZE_MAX,
    stopped: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
) -> Published:
    """As ``publish_all``, but says how far it came instead of raising. ``check`` is called before each call of the
    publisher; what it raises ends all."""
    backoff = Backoff(give_up_s=retry_seconds)
    count = 0
    for run in runs(messages, size_max, keeps_order=publisher.keeps_order):
        waiting = run
        outage = _Outage(retry_seconds)
        while waiting:
            check()
            try:
                stored = publisher.publish(waiting)
                refuse_unrun(stored, "the publisher's publish()")
            except PublisherAway as error:
                if backoff.exhausted or stopped():
                    return Published(count, error)
                outage.goes_on(error, len(waiting))
                backoff.wait(stopped)
            except MessageRefused as error:
                return Published(count, error)
            else:
                waiting = waiting[stored:]
                count += stored
                backoff.progress()
        outage.is_over()
    return Published(count)


class _Outage:
    """What the log says while a server is away: when it begins, every minute, and when it is over."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._since: float | None = None
        self._said = 0.0

    def goes_on(self, error: PublisherAway, waiting: int) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._said < _REMIND_S:
            return
        self._said = now
        what = "1 message waits" if waiting == 1 else f"{waiting} messages wait"
        _log.warning("%s: %s, and is tried again for up to %.0f s", error.message, what, self._retry_seconds)

    def is_over(self) -> None:
        if self._since is not None:
            _log.warning("messages are published again after %.0f s", time.monotonic() - self._since)
