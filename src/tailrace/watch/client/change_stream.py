"""The face of a change stream, and the stream that is made from the oplog in the calling process."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import bson
from bson.codec_options import CodecOptions
from pymongo import MongoClient
from pymongo.synchronous import change_stream as pymongo_change_stream

from tailrace.core.event.event_block import OPERATION_TYPES, EventBlock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.explain import explain
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import ServerProfile, for_people, profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import ONE_OPLOG, Stream, open_stream
from tailrace.errors import (
    NonResumableError,
    OtherVersionError,
    ServerError,
    TailraceError,
    UsageError,
)
from tailrace.read.source.drive import answers_of, drive
from tailrace.read.source.driver_error import at_the_border
from tailrace.read.source.filter_choice import FilterChoice, is_local
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import AWAIT_MS
from tailrace.read.source.time_limit import TimeLimitError, check_time_limit, time_limit_of
from tailrace.read.source.unknown_kinds import tell_of_unknown_kinds
from tailrace.watch.client import kernel_loader
from tailrace.watch.client.block_events import BlockEvents
from tailrace.watch.client.checked import checked_options, collections_read
from tailrace.watch.client.commands import StreamCommands, commands_of, telling_refusals
from tailrace.watch.client.oplog_resume import OplogResume
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.session import StreamSession, known_clock
from tailrace.watch.client.statistics import StreamStatistics
from tailrace.watch.client.stream_errors import CANNOT_DECODE, in_execution, named_version, undecodable
from tailrace.watch.client.turn import Turn

#: Entries in one reply where nobody says otherwise: about a megabyte, which stays in the processor's cache on its way
#: through the kernel (16 MB, the server's own limit, cost a third more), and is all that a slow reader holds.
_READ_ENTRIES: Final = 2000
_INVALIDATE: Final = OPERATION_TYPES.index("invalidate")

_log = logging.getLogger("tailrace.client")


if TYPE_CHECKING:
    _PyMongoStream = object
else:
    #: Programs ask whether a stream is one of PyMongo's; nothing of its implementation is used.
    _PyMongoStream = pymongo_change_stream.ChangeStream


class ChangeStream(ABC, _PyMongoStream):
    """An iterator over change events. ``for event in stream`` waits for the next one; the end is an invalidation.

    A stream belongs to one thread at a time: if two threads use it at once, both get an error (143 and 237), and the
    stream ends. ``close`` may be called from any thread; a thread that waits for an event then gets StopIteration when
    the server's wait of ``max_await_time_ms`` is over. ``pymongo.timeout`` and the client's ``timeoutMS`` bound each
    call. A call that takes longer raises ``pymongo.errors.NetworkTimeout``; the stream stays open and misses nothing.
    """

    _codec_options: CodecOptions[Any]
    _client: Any = None
    #: The time-out of each call that ``watch`` was given, in place of the client's ``timeoutMS``.
    _timeout_ms: int | None = None
    #: The events that are at hand, as documents. Taking one is safe in any thread: the iterator is one of Python's own.
    _ready: Iterator[Any] = iter(())

    def _time_limit(self) -> AbstractContextManager[None]:
        """Rule 31: around each call."""
        return time_limit_of(self._client, self._timeout_ms)

    @abstractmethod
    def try_next(self) -> Any | None:
        """The next event, or ``None`` when there is none within ``max_await_time_ms`` (default 1 s) or the stream has
        ended. After ``close`` it returns the events that were already there, as PyMongo's does. Raises the error that
        ends the stream: a TailraceError with the server's code."""

    @property
    @abstractmethod
    def resume_token(self) -> Any:
        """The token to continue after the last delivered event (``resume_after``); it advances on a quiet stream
        too."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False after an invalidation was delivered, after an error, or after ``close``."""

    @property
    def has_next(self) -> bool:
        """Whether the next event is already here; False also if that is not known."""
        return False

    @property
    def statistics(self) -> StreamStatistics:
        """How the stream is doing now. All of it is empty with ``engine="server"``: the server does not say."""
        return StreamStatistics()

    def explain(self) -> dict[str, Any]:
        """The stream's plan: its stages, what the oplog query asks for, and where each part of the ``$match`` is
        checked (``tailrace.core.pipeline.explain``). ``oplogQuerySent`` says whether the read of the oplog carries the
        query at present, or takes every entry because that costs less; null where there is no query. Reads nothing."""
        raise UsageError("the plan of the server's own stream is not known here", hint='Use engine="oplog"')

    @abstractmethod
    def close(self) -> None:
        """End the stream and the server's cursor. Calling it twice does no harm."""

    def next(self) -> Any:
        """Wait for the next event and return it. Raises StopIteration when the stream has ended."""
        while self.alive:
            event = self.try_next()
            if event is not None:
                return event
        raise StopIteration

    __next__ = next

    def _decoded(self, event: bytes) -> Any:
        try:
            return bson.decode(event, codec_options=self._codec_options)
        except CANNOT_DECODE as error:
            self._refuse_to_decode(error)

    def _refuse_to_decode(self, error: Exception) -> NoReturn:
        self._abandon()
        raise undecodable(error) from None

    def _abandon(self) -> None:
        """Close the stream after an error: nothing is left to give."""
        self.close()

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class BlockChangeStream(ChangeStream):
    """A stream whose events are made in this process: they come in blocks, and are given one by one.

    An event that is at hand is taken from an iterator of Python's own. Everything else (whose turn it is, the caller's
    time limit, the end of the stream) is checked once for a few hundred events.

    ``client``   its ``timeoutMS`` bounds each call
    ``stream``   what the events come from
    ``release``  gives back what the stream reads from. It must not hold the stream itself
    """

    def __init__(
        self, client: MongoClient[Any], request: WatchRequest, stream: Stream, release: Callable[[], None]
    ) -> None:
        self._client = client
        self._timeout_ms = request.timeout_ms
        self._codec_options = request.codec_options
        self._await_s = (AWAIT_MS if request.max_await_time_ms is None else request.max_await_time_ms) / 1000
        self._stream = stream
        self._token: bytes = stream.token.to_bson()
        self._turn = Turn(release)
        weakref.finalize(self, self._turn.end)
        #: The block whose events are being given.
        self._events: BlockEvents | None = None
        #: An invalidation at the end of that block, which nothing may follow.
        self._last: EventBlock | None = None
        self._has_given_before = self._is_closed = False
        self._refilling = threading.RLock()
        self._session = StreamSession(request.session)
        #: Hears about the commands that the server's stream would have sent; ``None`` if nobody listens.
        self._commands = commands_of(request)
        #: The events that the command under way has given, as reported to PyMongo's listeners.
        self._told: list[bytes] = []

    @abstractmethod
    def _next_block(self) -> EventBlock | None:
        """Let the stream go on with what it has until it gives events; ``None`` where it wants more."""

    @abstractmethod
    def _read_more(self, left_s: float) -> bool:
        """Wait until the stream can go on; ``left_s`` of the caller's wait are left. It is called again until they are
        over, or until it gives False: then the caller learns that there is nothing. Raises TimeLimitError, and the
        error that ends the stream."""

    @property
    def resume_token(self) -> Any:
        return bson.decode(self._token_given(), codec_options=self._codec_options)

    @property
    def _has_given(self) -> bool:
        """Whether an event was given."""
        return self._has_given_before or (self._events is not None and self._events.token is not None)

    def _token_given(self) -> bytes:
        events = self._events
        return (None if events is None else events.token) or self._token

    @property
    def statistics(self) -> StreamStatistics:
        return StreamStatistics(unknown_operations=self._stream.statistics.unknown_operations)

    @property
    def alive(self) -> bool:
        return not self._turn.ended

    @property
    def has_next(self) -> bool:
        if self._turn.ended:
            return False
        return self._last is not None or (self._events is not None and self._events.left > 0)

    def next(self) -> Any:
        # The first lines of both: all that is done for an event that is at hand.
        try:
            for event in self._ready:
                return event
        except CANNOT_DECODE as error:
            self._refuse_to_decode(error)
        with self._time_limit():  # of the whole call
            while self.alive:
                event = self._awaited()
                if event is not None:
                    return event
        raise StopIteration

    __next__ = next

    def try_next(self) -> Any | None:
        try:
            for event in self._ready:
                return event
        except CANNOT_DECODE as error:
            self._refuse_to_decode(error)
        return self._awaited()

    @at_the_border
    def _awaited(self) -> Any | None:
        """The next event where none is ready, waited for once."""
        if self._is_closed:
            return self._left_over()
        if not self._refill():
            with self._turn, self._time_limit():
                try:
                    if self._last is None:
                        self._session.check_open()
                    last = self._look() if self._commands is None else self._told_look(self._commands)
                    self._turn.check()
                except BaseException as error:
                    if not self._leaves_open(error):
                        self._abandon()
                    raise
            if last is not None:
                return self._decoded(last)
        try:
            return next(self._ready, None)
        except CANNOT_DECODE as error:
            self._refuse_to_decode(error)

    def _left_over(self) -> Any | None:
        """What a closed stream still holds, one event after another."""
        with self._refilling:
            last = self._last
            if self._events is not None and self._events.left:
                try:
                    return next(self._events.documents())
                except CANNOT_DECODE as error:
                    self._refuse_to_decode(error)
            self._forget_block()
            if last is None:
                return None
            self._last = None
            self._token = last.token(0) or self._token
        return self._decoded(last.event(0))

    def _leaves_open(self, error: BaseException) -> bool:
        """Whether the stream goes on after an error (rule 31)."""
        return isinstance(error, TimeLimitError)

    def _refill(self) -> bool:
        """Make the next events of the block ready; False where it has none. Two threads may come here at a time."""
        with self._refilling:
            events = self._events
            if events is None or not events.left:
                return False
            self._ready = events.documents()
            if self._turn.ended:
                self._ready = iter(())
            return True

    def _told_look(self, commands: StreamCommands) -> bytes | None:
        self._told = []
        if self._last is None:  # it belongs to a batch that was reported
            self._tell_look(commands)
        try:
            last = self._look()
        except TailraceError as error:
            commands.failed(error)
            raise
        commands.answered(self.resume_token, self._told, is_last=self._ends)
        return last

    @property
    def _ends(self) -> bool:
        """Whether nothing follows what was made."""
        return self._last is not None or self._stream.invalidated

    def _tell_look(self, commands: StreamCommands) -> None:
        """What the server's stream would send now: a getMore, or an aggregate if it resumes."""
        commands.get_more(self._token_given())

    def _look(self) -> bytes | None:
        """Wait once for events: they are ready then. The event that ends the stream is given at once, as BSON."""
        deadline = time.monotonic() + self._await_s
        has_read, goes_on = False, True
        while self.alive:
            if self._last is not None:
                return self._give_last()
            self._forget_block()
            if self._finish_block():
                if self._refill():
                    return None
                continue
            self._token = self._stream.token.to_bson()
            if self._stream.invalidated:
                self._abandon()
                break
            left_s = max(0.0, deadline - time.monotonic())
            if has_read and not (left_s and goes_on):
                break
            goes_on = self._read_more(left_s)
            has_read = True
        return None

    def _finish_block(self) -> bool:
        """Take the stream's next block; False where it wants more first."""
        block = self._next_block()
        if block is None:
            return False
        if self._commands is not None:
            self._told += block.events()
        ends = self._stream.invalidated or block.operation[-1] == _INVALIDATE
        count = len(block) - int(ends)
        # Whether the stream is over is known after the event that ends it.
        self._last = block.cut(count, count + 1) if ends else None
        self._events = BlockEvents(block.cut(0, count), self._codec_options)
        return True

    def _give_last(self) -> bytes:
        block = self._last
        assert block is not None
        self._last = None
        self._forget_block()
        self._token = block.token(0) or self._token
        if not self._finish_block() and self._stream.invalidated:
            self._token = self._stream.token.to_bson()
            self._abandon()
        return block.event(0)

    def _forget_block(self) -> None:
        self._has_given_before = self._has_given
        self._token = self._token_given()
        self._events = None

    def close(self) -> None:
        if self._commands is not None:
            self._commands.close()
        self._is_closed = True
        tell_of_unknown_kinds()
        self._turn.end()
        self._ready = iter(())  # ``next`` gives nothing more

    def _abandon(self) -> None:
        self.close()
        self._last = None
        self._forget_block()


class OplogChangeStream(BlockChangeStream):
    """Reads the oplog and makes the events here. Raises at once what the server's ``aggregate`` would raise.

    ``profile``      of the server version whose events to make; ``None``: the deployment's own
    ``pushes_down``  whether scope and ``$match`` narrow what is read; without it the same events cost more
    """

    def __init__(
        self,
        source: LiveSource,
        request: WatchRequest,
        profile: ServerProfile | None = None,
        *,
        pushes_down: bool = True,
    ) -> None:
        self._source = source
        self._request = request
        self._pushes_down = pushes_down
        #: Whether the user named the version; otherwise the stream takes that of the member that it reads.
        self._is_chosen = profile is not None
        with telling_refusals(request):
            version = source.server_version if profile is None else None
            profile = profile or profile_for(version or "")
            source.expect_version(version)
            options = checked_options(request, profile)
            scope = options.scope
            if scope.database is not None and scope.collection is not None:
                source.refuse_view(scope.database, scope.collection)
            session = StreamSession(request.session)
            session.check_snapshot(lambda: source.server_version)
            plan = self._planned(options, profile)
            self._not_before = session.time or ClusterTime(0)
            plan = self._begun(plan)
            stream = open_stream(plan, pushes_down=pushes_down, kernel=kernel_loader.works_on)
        #: The one read that is open; its cursor is closed with the stream, or when nobody holds the stream any more.
        self._open: list[Generator[OplogBatch, None, None]] = []
        super().__init__(source.client, request, stream, partial(_close_all, self._open))
        #: False if the caller asked for an empty first batch.
        self._fills_first_batch = request.batch_size != 0
        if self._commands is not None:
            self._commands.clocks = partial(_clocks, source.client)
        self._resume = OplogResume(source.client, request, self._commands)
        self._answers = self._resume.answers(answers_of(source))
        self._tail = partial(
            source.tail,
            on_error=self._resume.on_error,
            await_ms=max(1, int(self._await_s * 1000)),
            batch_size=request.batch_size or _READ_ENTRIES,
            comment=request.comment,
        )
        self._filter_choice = FilterChoice(is_local=is_local(source.client))
        self._begin_reading(plan)
        self._open_read()

    def _begin_reading(self, plan: Plan) -> None:
        self._oplog_filter: bytes | None = None
        self._batch = OplogBatch(b"", ClusterTime(0))
        #: The rest of a reply that was divided.
        self._rest: OplogBatch | None = None
        #: Events of that batch so far, and their bytes.
        self._given, self._given_bytes = 0, 0
        self._read_up_to = plan.read_after or ClusterTime(0)

    def _open_read(self) -> None:
        """The first reply, and the events that are there already. If the oplog cannot be read, or the server's
        ``aggregate`` would fail on filling its first batch, ``watch`` itself raises."""
        commands = self._commands
        self._is_opening = True
        try:
            with self._time_limit():
                self._feed(is_first=True)
                while self._fills_first_batch and not self._finish_block() and self._rest is not None:
                    self._feed()
        except BaseException as error:
            if commands is not None and isinstance(error, TailraceError):
                commands.failed(error)
            self._abandon()
            raise
        self._is_opening = False
        if commands is not None:
            commands.answered(self.resume_token, self._told, is_last=self._ends)

    def _go_over(self) -> None:
        """The member that is read gives other events than the one before, as in an upgrade under way: go on with
        that version's events, as a driver does that resumes there. All that was read before has been given."""
        version = self._source.version_read()
        profile = profile_for(version)
        self._source.expect_version(version)
        token = bson.decode(self._token_given())
        _log.info("the stream goes on with the events of MongoDB %s", for_people(version))
        request = self._request.resumed(token, has_given=self._has_given)
        plan = self._planned(checked_options(request, profile), profile)
        plan.confirm_history(*self._source.oldest())
        self._stream = open_stream(plan, pushes_down=self._pushes_down, kernel=kernel_loader.works_on)
        self._begin_reading(plan)

    def _planned(self, options: StreamOptions, profile: ServerProfile) -> Plan:
        return build_plan(options, profile)

    def _begun(self, plan: Plan) -> Plan:
        oldest = self._source.oldest()  # a user who may not read the oplog learns it here, not at the first event
        for database, collection in collections_read(plan):
            self._source.confirm_readable(database, collection)
        if plan.read_after is None:
            # The server begins one tick after what it has applied, committed or not.
            return plan.start_after(max(self._source.operation_time(), self._not_before))
        plan.confirm_history(*oldest)
        return plan

    def explain(self) -> dict[str, Any]:
        document = explain(self._stream.plan)
        sent = None if document["oplogQuery"] is None else self._filter_choice.asks
        return {**document, "oplogQuerySent": sent}

    def _leaves_open(self, error: BaseException) -> bool:
        return super()._leaves_open(error) or error is self._resume.kept

    def _tell_look(self, commands: StreamCommands) -> None:
        self._resume.reads(self._token_given(), has_given=self._has_given)

    def _next_block(self) -> EventBlock | None:
        try:
            block = next(drive(self._stream, self._answers), None)
        except OtherVersionError as error:
            raise (named_version(error) if self._is_chosen else error) from None
        except (ServerError, NonResumableError) as error:
            raise in_execution(error, self._stream.plan.profile, is_opening=self._is_opening) from error.__cause__
        if block is not None:
            self._given += len(block)
            self._given_bytes += block.size
        return block

    def _read_more(self, left_s: float) -> bool:
        check_time_limit(self._source.name)
        self._session.check_get_more()
        self._feed()
        return not self._resume.has_resumed  # rule 22: an aggregate's reply is not followed by a getMore in one call

    def _feed(self, *, is_first: bool = False) -> None:
        batch = self._read(is_first=is_first)
        tell_of_unknown_kinds()
        self._stream.feed(ONE_OPLOG, batch)  # the one that there is after reading: another version has another

    def _read(self, *, is_first: bool = False) -> OplogBatch:
        """The next batch. An open read that has met the end of the caller's time, or whose filter is no longer the one
        to read by, is opened again after the last one. The beginning of a large first reply is a batch of its own."""
        compiled = not kernel_loader.is_missing()
        self._filter_choice.saw(self._batch.raw, self._given, self._given_bytes, compiled=compiled)
        self._batch, self._given, self._given_bytes = OplogBatch(b"", self._read_up_to), 0, 0
        wanted = self._stream.oplog_filter if self._filter_choice.asks else None
        if self._open and wanted != self._oplog_filter:
            _close_all(self._open)
            self._open.clear()
            self._rest = None
        if not self._open:
            self._oplog_filter = wanted
            self._open.append(self._tail(self._read_up_to, oplog_filter=wanted))
        try:
            batch, self._rest = self._rest or self._next_batch(), None
        except OtherVersionError:
            if self._is_chosen:
                raise
            check_time_limit(self._source.name)
            self._go_over()
            return self._read(is_first=is_first)
        if is_first:
            batch, self._rest = kernel_loader.shortened(batch)
        self._read_up_to = batch.high_water
        self._session.advance(batch.high_water, [known_clock(self._source.client)])
        self._batch = batch
        return batch

    def _next_batch(self) -> OplogBatch:
        """The next batch of the open read."""
        try:
            while True:
                self._resume.reads(self._token_given(), has_given=self._has_given)
                batch = next(self._open[0])
                if not self._resume.reads_on(batch):
                    return batch
        except BaseException as error:
            if error is not self._resume.kept:
                self._open.clear()
            raise


def _clocks(client: Any) -> list[Mapping[str, Any] | None]:
    return [known_clock(client)]


def _close_all(opened: list[Generator[OplogBatch, None, None]]) -> None:
    for batches in opened:
        batches.close()
