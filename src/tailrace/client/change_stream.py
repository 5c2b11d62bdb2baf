"""The face of a change stream, and the stream that is made of the oplog in the calling process."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError

from tailrace.client.request import WatchRequest
from tailrace.client.turn import Turn
from tailrace.errors import UsageError
from tailrace.event.change_event import ChangeEvent
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.explain import explain
from tailrace.pipeline.stream import ChangeStreamPipeline
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import Plan, build_plan
from tailrace.plan.profile import ServerProfile, profile_for
from tailrace.plan.request import OplogBatch
from tailrace.source.drive import drive
from tailrace.source.mongod import AWAIT_MS, MongodSource
from tailrace.source.time_limit import TimeLimitError, check_time_limit, time_limit_of


class ChangeStream(ABC):
    """An iterator over change events. ``for event in stream`` waits for the next one; the end is an invalidation.

    A stream belongs to one thread at a time: two that ask it at once both get an error (143 and 237), and it ends.
    ``close`` may be called from any thread; one that waits then comes back, with StopIteration, when the server's wait
    of ``max_await_time_ms`` is over. ``pymongo.timeout`` and the client's ``timeoutMS`` bound each call, which raises
    ``pymongo.errors.NetworkTimeout`` then; the stream stays open and misses nothing.
    """

    _codec_options: CodecOptions[Any]

    @abstractmethod
    def try_next(self) -> Any | None:
        """The next event, or ``None`` when there is none within ``max_await_time_ms`` (default 1 s) or the stream has
        ended. Raises the error that ends the stream: a TailraceError with the server's code."""

    @property
    @abstractmethod
    def resume_token(self) -> Any:
        """The token to go on after the last event given (``resume_after``); it advances on a quiet stream too."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False after an invalidation was given, an error, or ``close``."""

    @property
    def has_next(self) -> bool:
        """Whether the next event is here already; False also where that is not known."""
        return False

    def explain(self) -> dict[str, Any]:
        """The stream's plan: its stages, what the query of the oplog asks, and where each part of the ``$match`` is
        asked (``tailrace.pipeline.explain``). Reads nothing."""
        raise UsageError("the server does not say here how it runs its own stream", hint='Use engine="oplog"')

    @abstractmethod
    def close(self) -> None:
        """End the stream and the server's cursor. Twice does no harm."""

    def next(self) -> Any:
        """The next event, waited for. Raises StopIteration when the stream has ended."""
        while self.alive:
            event = self.try_next()
            if event is not None:
                return event
        raise StopIteration

    __next__ = next

    def _decoded(self, event: bytes) -> Any:
        try:
            return bson.decode(event, codec_options=self._codec_options)
        except (BSONError, ValueError, OverflowError, TypeError) as error:
            self.close()
            raise UsageError(
                f"an event cannot be decoded: {error}",
                hint="Watch with document_class=RawBSONDocument, or with codec options that allow the value",
            ) from None

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class OplogChangeStream(ChangeStream):
    """Reads the oplog and makes the events here. Raises at once what the server's ``aggregate`` would raise.

    ``profile``      of the server version whose events to make; ``None``: the deployment's own
    ``pushes_down``  whether scope and ``$match`` narrow what is read; without it the same events cost more
    """

    def __init__(
        self,
        source: MongodSource,
        request: WatchRequest,
        profile: ServerProfile | None = None,
        *,
        pushes_down: bool = True,
    ) -> None:
        options = checked_options(request)
        scope = options.scope
        if scope.database is not None and scope.collection is not None:
            source.refuse_view(scope.database, scope.collection)
        self._source = source
        self._codec_options = request.codec_options
        plan = self._begun(build_plan(options, profile or profile_for(source.server_version)))
        self._pipeline = ChangeStreamPipeline(plan, pushes_down=pushes_down)
        self._await_s = (AWAIT_MS if request.max_await_time_ms is None else request.max_await_time_ms) / 1000
        self._tail = partial(
            source.tail,
            await_ms=max(1, int(self._await_s * 1000)),
            batch_size=request.batch_size,
            comment=request.comment,
        )
        self._oplog_filter = self._pipeline.oplog_filter
        self._read_up_to = plan.read_after or ClusterTime(0)
        #: The one read that is open; its cursor is closed with the stream, or when nobody holds the stream any more.
        self._open: list[Generator[OplogBatch, None, None]] = []
        self._turn = Turn(partial(_close_all, self._open))
        weakref.finalize(self, self._turn.end)
        self._driven: Iterator[list[ChangeEvent]] = iter(())
        self._events: deque[ChangeEvent] = deque()
        self._token: bytes = plan.first_token.to_bson()

    def _begun(self, plan: Plan) -> Plan:
        oldest = self._source.oldest()  # who may not read the oplog is told here, not at the first event
        for database, collection in collections_read(plan.options):
            self._source.confirm_readable(database, collection)
        if plan.read_after is None:
            # The server begins one tick after what it has applied, committed or not.
            return plan.start_at(self._source.operation_time().tick())
        plan.confirm_history(*oldest)
        return plan

    def explain(self) -> dict[str, Any]:
        return explain(self._pipeline.plan)

    @property
    def resume_token(self) -> Any:
        return bson.decode(self._token, codec_options=self._codec_options)

    @property
    def alive(self) -> bool:
        return not self._turn.ended

    @property
    def has_next(self) -> bool:
        return bool(self._events)

    def try_next(self) -> Any | None:
        event = self.next_event()
        return None if event is None else self._decoded(event.to_bson())

    def next_event(self) -> ChangeEvent | None:
        """Like ``try_next``, but the event as the pipeline made it."""
        with self._turn, time_limit_of(self._source.client):
            try:
                event = self._look()
                self._turn.check()
            except TimeLimitError:
                raise
            except BaseException:
                self.close()
                raise
        return event

    def _look(self) -> ChangeEvent | None:
        """The next event, waited for once."""
        deadline = time.monotonic() + self._await_s
        has_read = False
        while self.alive:
            if self._events or self._finish_events():
                return self._give()
            self._token = self._pipeline.resume_token.to_bson()
            if self._pipeline.invalidated:
                self.close()
                break
            if has_read and time.monotonic() >= deadline:
                break
            check_time_limit(self._source.name)
            self._driven = drive(self._pipeline.process(self._read()), self._source)
            has_read = True
        return None

    def _read(self) -> OplogBatch:
        """The next batch. An open read that has met the end of the caller's time, or whose filter leaves in what is no
        longer needed, is opened anew behind the last one."""
        if self._open and self._pipeline.oplog_filter != self._oplog_filter:
            _close_all(self._open)
            self._open.clear()
        if not self._open:
            self._oplog_filter = self._pipeline.oplog_filter
            self._open.append(self._tail(self._read_up_to, oplog_filter=self._oplog_filter))
        try:
            batch = next(self._open[0])
        except TimeLimitError:
            self._open.clear()
            raise
        self._read_up_to = batch.high_water
        return batch

    def _finish_events(self) -> bool:
        """Let the pipeline go on with the batch it has until it gives events; False when the batch is done."""
        for events in self._driven:
            if events:
                self._events.extend(events)
                return True
            check_time_limit(self._source.name)
        return False

    def _give(self) -> ChangeEvent:
        event = self._events.popleft()
        self._token = event.token_bson
        if not self._events and self._pipeline.invalidated and not self._finish_events():
            self._token = self._pipeline.resume_token.to_bson()
            self.close()
        return event

    def close(self) -> None:
        self._turn.end()


def collections_read(options: StreamOptions) -> Iterator[tuple[str, str]]:
    """What a stream reads beside the oplog, as far as that is known before its first event: where the images are kept,
    and the collection whose current documents are looked up."""
    if options.full_document in ("whenAvailable", "required") or options.full_document_before_change != "off":
        yield "config", "system.preimages"
    scope = options.scope
    if options.full_document == "updateLookup" and scope.database is not None and scope.collection is not None:
        yield scope.database, scope.collection


def _close_all(opened: list[Generator[OplogBatch, None, None]]) -> None:
    for batches in opened:
        batches.close()


def checked_options(request: WatchRequest) -> StreamOptions:
    """The stream that a request asks for. Raises what the server's ``aggregate`` would raise, and UsageError for what
    has no meaning here."""
    if request.session is not None:
        raise UsageError("a session has no meaning for the oplog", hint='Leave it out, or use engine="server"')
    return StreamOptions.parse(request.scope, request.stage(), request.stages(), collation=request.collation_document())
