"""A change stream for asyncio. One that is made from the oplog works in a thread of its own; events that have already
arrived are given without going there."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from pymongo.asynchronous import change_stream as pymongo_change_stream

from tailrace.base.threads import told
from tailrace.errors import UsageError
from tailrace.read.source.time_limit import TimeLimitError, remaining_s, time_limit_exceeded, time_limit_of
from tailrace.watch.client.change_stream import ChangeStream

_T = TypeVar("_T")

#: The one that works, and one for a second task that comes while it works: that one gets the error at once.
_THREADS: Final = 2


if TYPE_CHECKING:
    _PyMongoAsyncStream = object
else:
    #: Programs ask whether a stream is one of PyMongo's; nothing of its implementation is used.
    _PyMongoAsyncStream = pymongo_change_stream.AsyncChangeStream


class AsyncChangeStream(ABC, _PyMongoAsyncStream):
    """An asynchronous iterator over change events: ``async for event in stream`` waits for the next one.

    A stream belongs to one task at a time: if two tasks ask it at once, both get an error (143 and 237), and the stream
    ends. A call that is cancelled (``asyncio.wait_for``) loses no event: the next call continues to wait for it.
    ``close`` may be called from any task; a task that waits for an event then gets StopAsyncIteration at once.
    """

    _client: Any = None
    #: The time-out of each call that ``watch`` was given, in place of the client's ``timeoutMS``.
    _timeout_ms: int | None = None

    def _time_limit(self) -> AbstractContextManager[None]:
        """Rule 31: around each call."""
        return time_limit_of(self._client, self._timeout_ms)

    @abstractmethod
    async def try_next(self) -> Any | None:
        """The next event, or ``None`` when there is none within ``max_await_time_ms`` (default 1 s) or the stream has
        ended. Raises the error that ends the stream, as ``ChangeStream.try_next`` does."""

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

    def explain(self) -> dict[str, Any]:
        """The stream's plan, as ``ChangeStream.explain`` gives it. Reads nothing."""
        raise UsageError("the plan of the server's own stream is not known here", hint='Use engine="oplog"')

    @abstractmethod
    async def close(self) -> None:
        """End the stream and the server's cursor. Calling it twice does no harm."""

    async def next(self) -> Any:
        """Wait for the next event and return it. Raises StopAsyncIteration when the stream has ended."""
        with self._time_limit():  # of the whole call
            while self.alive:
                event = await self.try_next()
                if event is not None:
                    return event
        raise StopAsyncIteration

    __anext__ = next

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


class ThreadedChangeStream(AsyncChangeStream):
    """A stream that blocks, in a thread. ``await ThreadedChangeStream.opened(open)`` opens it there."""

    def __init__(self, executor: ThreadPoolExecutor, stream: ChangeStream) -> None:
        self._executor = executor
        self._stream = stream
        self._client, self._timeout_ms = stream._client, stream._timeout_ms
        #: What the thread is doing. It outlives a call that is cancelled, and the next call takes its outcome.
        self._looking: asyncio.Future[Any | None] | None = None
        self._is_awaited = False
        self._ended: asyncio.Event = asyncio.Event()

    @classmethod
    async def opened(cls, open_stream: Callable[[], ChangeStream]) -> Self:
        """The stream that ``open_stream`` gives. Where the caller is cancelled meanwhile, it is closed again."""
        executor = ThreadPoolExecutor(_THREADS, "tailrace-stream")
        opening = _run(executor, open_stream)
        try:
            stream = await asyncio.shield(opening)
        except BaseException:
            opening.add_done_callback(lambda done: _discard(executor, done))
            raise
        return cls(executor, stream)

    async def next(self) -> Any:
        return self._stream.try_next() if self.has_next else await super().next()

    __anext__ = next

    async def try_next(self) -> Any | None:
        if self.has_next or self._ended.is_set():
            return self._stream.try_next()
        with self._time_limit():
            return await self._look()

    async def _look(self) -> Any | None:
        is_begun_here = self._looking is None
        if self._looking is None:
            if not self.alive:
                return None
            self._looking = _run(self._executor, self._stream.try_next)
        elif self._is_awaited:  # by another task: both get the error, as two threads do
            return await _run(self._executor, self._stream.try_next)
        looking, self._is_awaited = self._looking, True
        closing = asyncio.ensure_future(self._ended.wait())
        # The thread keeps the time-out of the call that it works for. A call that was cancelled has left its own.
        left_s = None if is_begun_here else remaining_s()
        try:
            await asyncio.wait((looking, closing), return_when=asyncio.FIRST_COMPLETED, timeout=left_s)
        finally:
            self._is_awaited = False
            closing.cancel()
        if not looking.done():
            if self._ended.is_set():
                return None
            raise time_limit_exceeded("the deployment")
        self._looking = None
        if not is_begun_here and isinstance(looking.exception(), TimeLimitError):
            return await self._look()
        return looking.result()

    @property
    def resume_token(self) -> Any:
        return self._stream.resume_token

    @property
    def alive(self) -> bool:
        # What a call that was cancelled has found is still to be given.
        return not self._ended.is_set() and (self._looking is not None or self._stream.alive)

    @property
    def has_next(self) -> bool:
        return self._looking is None and not self._ended.is_set() and self._stream.has_next

    def explain(self) -> dict[str, Any]:
        return self._stream.explain()

    async def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.add_done_callback(_take)
        closing = _run(self._executor, self._stream.close)
        self._executor.shutdown(wait=False)
        await asyncio.shield(closing)


def _run(executor: ThreadPoolExecutor, work: Callable[[], _T]) -> asyncio.Future[_T]:
    """``work`` in a thread, with the caller's context: ``pymongo.timeout()`` is in it."""
    return asyncio.get_running_loop().run_in_executor(executor, contextvars.copy_context().run, work)


def _take(done: asyncio.Future[Any]) -> None:
    """Nobody waits for the outcome any more, and nobody complains of it."""
    with suppress(asyncio.CancelledError):
        done.exception()


def _discard(executor: ThreadPoolExecutor, opened: asyncio.Future[ChangeStream]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        told(executor.submit(opened.result().close), "a stream that nobody waits for could not be closed")
    executor.shutdown(wait=False)
