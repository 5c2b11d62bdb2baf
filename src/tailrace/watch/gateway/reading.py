"""Where one stream's oplog entries come from, for an event loop: the shared tail, and its own reads where needed.

No thread waits for a stream that is joined: the tail's reader calls when something has come (``Waker``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from pymongo import MongoClient

from tailrace.base.threads import CheckedThread, told
from tailrace.core.cursor import (
    Action,
    Members,
    NeedMembers,
    NeedOldest,
    NeedStart,
    OldestEntry,
    OplogRead,
    ReadOplog,
    StreamStart,
)
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import OplogBatch
from tailrace.core.stream.stream import Need
from tailrace.errors import InternalError, TailraceError
from tailrace.read.source.drive import answer_request
from tailrace.read.source.filter_choice import FilterChoice, is_local
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.read.tail.tailed_source import TailedSource
from tailrace.watch.client import kernel_loader
from tailrace.watch.gateway.loop_turns import LoopTurns

#: Up to how many bytes of work are done in the event loop; more goes to a thread, so that no other stream waits for it.
INLINE_BYTES: Final = 1 << 15
#: One wait of a stream's own read: how long a thread is taken at most before the stream is joined.
OWN_AWAIT_MS: Final = 100
#: A stream whose reads return this much is far behind.
_AHEAD_BYTES_MIN: Final = 1 << 20
_AHEAD_MAX: Final = 4
_AHEAD_IDLE_S: Final = 10.0
#: A scope in which nothing ever happens: a stream that waits there keeps the shared reader going.
_NOWHERE: Final = Scope.of_collection("local", "tailrace.nowhere")
_KEEPER_RETRY_S: Final = 1.0
#: How often, in seconds, a cancelled task checks whether its thread was given up.
_GIVEN_UP_S: Final = 0.2
_NOT_CLOSED: Final = "a read could not be closed"

_log = logging.getLogger("tailrace.gateway")
_T = TypeVar("_T")


def now_ms() -> int:
    """The clock of cursors: milliseconds, monotonic."""
    return time.monotonic_ns() // 1_000_000


class Threads(ThreadPoolExecutor):
    """Threads for work that waits for the server. ``given_up``: nobody waits for what they do any more."""

    given_up = False


async def in_thread(pool: Executor | None, work: Callable[..., _T], *args: Any) -> _T:
    """Run ``work`` in a thread of ``pool``, or of the loop's own pool, and return its result. A task that is cancelled
    waits for it to end, unless the pool was given up, since nothing else may use what it works on until then."""
    future = asyncio.get_running_loop().run_in_executor(pool, work, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done() and not (isinstance(pool, Threads) and pool.given_up):
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future], timeout=_GIVEN_UP_S)
        if future.done() and not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not report it
        raise


async def aside(size: int, work: Callable[..., _T], *args: Any) -> _T:
    """What ``work`` gives, which looks at ``size`` bytes: in a thread where they are many, or all would wait."""
    return work(*args) if size <= INLINE_BYTES else await in_thread(None, work, *args)


async def aside_for(work: Callable[[], object], seconds: float) -> None:
    """Run ``work`` in a daemon thread and wait for it for a limited time only; the process may end before it does."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def run() -> None:
        try:
            work()
        finally:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended.set)

    CheckedThread(run, "tailrace-close").start()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ended.wait()


class Waker:
    """Carries calls from the readers' threads into the event loop, many at once, and wakes streams in the order of
    their tenants' ``turns``. Made in the loop's own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: LoopTurns) -> None:
        self._loop = loop
        self._turns = turns
        self._thread = threading.get_ident()
        self._calls: deque[tuple[Hashable, Callable[[], object]]] = deque()

    def of(self, tenant: Hashable) -> Callable[[Callable[[], object]], None]:
        """What makes a call for this tenant soon; it may be called in any thread."""
        return partial(self._wake, tenant)

    def _wake(self, tenant: Hashable, call: Callable[[], object]) -> None:
        if threading.get_ident() == self._thread:
            self._turns.call(tenant, call)
            return
        is_first = not self._calls
        self._calls.append((tenant, call))
        if is_first:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._make_calls)

    def _make_calls(self) -> None:
        while self._calls:
            self._turns.call(*self._calls.popleft())


class Reading(ABC):
    """What one stream reads. Used in the event loop, by one task at a time.

    ``pool``  threads for what waits for the server
    ``wake``  makes a call soon, from any thread
    """

    def __init__(self, pool: Executor, wake: Callable[[Callable[[], object]], None]) -> None:
        self.pool = pool
        self._came = asyncio.Event()
        self._wake = partial(wake, self._has_come)
        #: Called in the loop, in a turn of the tenant's, when something has come or the wait is to end.
        self.on_came: Callable[[], None] | None = None
        #: The wait for entries that is under way is to end.
        self.is_hurried = False
        #: Raised in place of going on to wait.
        self.ending: TailraceError | None = None

    async def answer(self, action: Action) -> Any:
        """What a cursor asks for. Raises TailraceError."""
        match action:
            case ReadOplog():  # most are
                return await self._read(action)
            case NeedStart(scope):
                return await self._start(scope)
            case NeedOldest():
                return await self._oldest(action.participant)
            case NeedMembers(after):
                return await self._members(after)
            case Need():
                return await self._look_up(action)
        raise InternalError(f"a cursor asks for {type(action).__name__}")

    def _has_come(self) -> None:
        self._came.set()
        if self.on_came is not None:
            self.on_came()

    def hurry(self) -> None:
        """End the wait for entries that is under way."""
        self.is_hurried = True
        self._came.set()
        if self.on_came is not None:
            asyncio.get_running_loop().call_soon(self._has_come)

    def rest(self) -> None:
        """A new command: it may wait again."""
        self.is_hurried = False

    def at_hand(self) -> OplogRead | None:
        """What has come for a stream that needs no task to read it; ``None``: it needs one."""
        return None

    @property
    def needs_task(self) -> bool:
        """Whether ``at_hand`` would give ``None``, as far as is known."""
        return True

    @property
    def has_more(self) -> bool:
        """Whether ``at_hand`` would give entries."""
        return False

    async def _read(self, action: ReadOplog) -> OplogRead:
        deadline = action.deadline_ms
        while True:
            self._came.clear()
            read = await self._next(action)
            if self.ending is not None:
                raise self.ending
            if self._is_news(action, read) or deadline is None or read.now_ms >= deadline:
                return read
            if self.is_hurried:
                return read._replace(now_ms=deadline)
            if self._is_joined(action):
                await self._wait(action, (deadline - read.now_ms) / 1000)

    async def _wait(self, action: ReadOplog, seconds: float) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, self._came.set)
        try:
            await self._came.wait()
        finally:
            timer.cancel()

    def _is_news(self, action: ReadOplog, read: OplogRead) -> bool:
        """Whether the cursor has to be given it at once."""
        return bool(read.batch.raw)

    @abstractmethod
    async def _start(self, scope: Scope) -> StreamStart: ...

    @abstractmethod
    async def _oldest(self, participant: str) -> OldestEntry: ...

    async def _members(self, after: ClusterTime) -> Members:
        raise InternalError(f"a stream over one oplog asks who took part after {after}")

    @abstractmethod
    async def _next(self, action: ReadOplog) -> OplogRead:
        """The next batch; an empty one if there is nothing."""

    @abstractmethod
    def _is_joined(self, action: ReadOplog) -> bool:
        """Whether somebody calls when something has come."""

    @abstractmethod
    async def _look_up(self, need: Need) -> Any: ...

    @abstractmethod
    async def version_read(self) -> str:
        """The server version whose events a stream gives that is opened here now. Raises TailraceError."""

    @abstractmethod
    def close(self) -> None:
        """Read no more. Does not wait."""


class AheadRoom:
    """Limits how many streams may hold a batch that was read before they asked for it. Each takes up to 16 MB.

    A stream that has not asked for ``idle_s`` gives up its place if another needs it: its client may have gone, and the
    cursor stays for ten minutes.
    """

    def __init__(self, streams_max: int = _AHEAD_MAX, idle_s: float = _AHEAD_IDLE_S) -> None:
        self._streams_max = streams_max
        self._idle_s = idle_s
        #: When each stream that holds a batch asked last.
        self._holders: dict[OplogReading, float] = {}

    @property
    def free(self) -> int:
        return self._streams_max - len(self._holders)

    def take(self, reading: OplogReading) -> bool:
        """Whether ``reading`` may read ahead."""
        now = time.monotonic()
        if not self.free:
            oldest = min(self._holders, key=lambda one: self._holders[one])
            if now - self._holders[oldest] < self._idle_s or not oldest.give_up_ahead():
                return False
        self._holders[reading] = now
        return True

    def asks(self, reading: OplogReading) -> None:
        """Note that its client still asks."""
        if reading in self._holders:
            self._holders[reading] = time.monotonic()

    def leave(self, reading: OplogReading) -> None:
        self._holders.pop(reading, None)


class OplogReading(Reading):
    """The reads over a replica set. For a stream that is far behind, the next batch is read while the last one is
    processed."""

    def __init__(
        self,
        pool: Executor,
        wake: Callable[[Callable[[], object]], None],
        client: MongoClient[Any],
        shared: SharedTail,
        scope: Scope,
        *,
        ahead: AheadRoom,
    ) -> None:
        super().__init__(pool, wake)
        self._ahead_room = ahead
        self._ahead: Future[OplogBatch] | None = None
        self._is_asked = False
        #: The end of the read that was given up.
        self._ending_read: Future[None] | None = None
        self._source = TailedSource(client, shared, scope)
        self._source.on_ready(self._wake)
        self._scope = scope
        self._batches: Generator[OplogBatch, None, None] | None = None
        #: The filter that ``_batches`` reads with, and the entries of its last batch until it is known what they gave.
        self._filter: bytes | None = None
        self._unweighed = b""
        self._choice: FilterChoice | None = None

    def rest(self) -> None:
        super().rest()
        self._ahead_room.asks(self)

    async def answer(self, action: Action) -> Any:
        self._is_asked = True
        try:
            return await super().answer(action)
        finally:
            self._is_asked = False

    def expect_version(self, version: str) -> None:
        """Raise OtherVersionError where a member is to be read whose version has other events than this one."""
        self._source.expect_version(version)

    async def version_read(self) -> str:
        return await in_thread(self.pool, self._source.version_read)

    async def _start(self, scope: Scope) -> StreamStart:
        return await in_thread(self.pool, self._started, scope)

    def _started(self, scope: Scope) -> StreamStart:
        if scope.database is not None and scope.collection is not None:
            self._source.refuse_view(scope.database, scope.collection)
        return StreamStart(self._source.operation_time())

    async def _oldest(self, participant: str) -> OldestEntry:
        return OldestEntry(*await in_thread(self.pool, self._source.oldest))

    async def _next(self, action: ReadOplog) -> OplogRead:
        if self._unweighed:
            self._weigh(action)
        batch = await self._taken_ahead() if self._ahead is not None else self._source.poll()
        if batch is not None and batch.raw and self._source.is_joined:
            # Asking again to hear that there is nothing more would cost as much as an event does.
            return OplogRead(batch, not self._source.has_more, now_ms())
        if batch is None:
            batches = await self._own_batches(action)
            own: OplogBatch = await in_thread(self.pool, next, batches)
            batch = own
        at_end = not batch.raw
        if self._batches is not None and not self._source.is_joined:
            self._unweighed = batch.raw
            # Nothing passed the filter for a while: that is no end.
            at_end = at_end and (self._filter is None or batch.high_water <= action.after)
            if len(batch.raw) >= _AHEAD_BYTES_MIN and self._wanted_filter(action) == self._filter:
                self._read_ahead(self._batches)
        return OplogRead(batch, at_end, now_ms())

    def at_hand(self) -> OplogRead | None:
        if self.needs_task:
            return None
        batch = self._source.poll()
        if batch is None:
            return None
        is_more = bool(batch.raw) and (self._source.has_more or not self._source.is_joined)
        return OplogRead(batch, not is_more, now_ms())

    @property
    def needs_task(self) -> bool:
        return bool(self._unweighed) or self._ahead is not None or not self._source.is_joined

    @property
    def has_more(self) -> bool:
        return self._source.has_more

    def _is_news(self, action: ReadOplog, read: OplogRead) -> bool:
        return bool(read.batch.raw) or not read.at_end

    async def _own_batches(self, action: ReadOplog) -> Generator[OplogBatch, None, None]:
        """What the stream reads for itself. It is opened again if the filter is no longer the one to read with."""
        if self._ending_read is not None:
            await _ended(self._ending_read)
            self._ending_read = None
        wanted = self._wanted_filter(action)
        if self._batches is not None and wanted != self._filter:
            batches, self._batches = self._batches, None
            await in_thread(self.pool, batches.close)
        if self._batches is None:
            self._filter = wanted
            self._batches = self._source.tail(action.after, await_ms=OWN_AWAIT_MS, oplog_filter=wanted)
        return self._batches

    def _wanted_filter(self, action: ReadOplog) -> bytes | None:
        return action.oplog_filter if self._choice is not None and self._choice.asks else None

    def _weigh(self, action: ReadOplog) -> None:
        """Count what the last batch gave, as ``watch()`` does: the filter is sent where that pays."""
        raw, self._unweighed = self._unweighed, b""
        choice = self._choice = self._choice or FilterChoice(is_local=is_local(self._source.client))
        if choice.asks == (self._filter is not None):  # else it was read before the choice was made
            choice.saw(raw, action.events, action.event_bytes, compiled=not kernel_loader.is_missing())

    def _read_ahead(self, batches: Generator[OplogBatch, None, None]) -> None:
        if self._ahead_room.take(self):
            self._ahead = self.pool.submit(next, batches)

    def give_up_ahead(self) -> bool:
        """Forget what was read ahead; it is read again when the client asks. False while the client waits."""
        batches, ahead = self._batches, self._ahead
        if self._is_asked or batches is None or ahead is None:
            return False
        self._forget_ahead()
        self._batches = None
        self._ending_read = told(self.pool.submit(_close, batches, ahead), _NOT_CLOSED)
        return True

    async def _taken_ahead(self) -> OplogBatch:
        ahead = self._ahead
        assert ahead is not None
        await _ended(ahead)
        self._forget_ahead()
        return ahead.result()

    def _forget_ahead(self) -> Future[OplogBatch] | None:
        ahead, self._ahead = self._ahead, None
        self._ahead_room.leave(self)
        return ahead

    def _is_joined(self, action: ReadOplog) -> bool:
        return self._source.is_joined

    async def _look_up(self, need: Need) -> Any:
        if self._ahead is not None:  # only one thread at a time may use a source
            await _ended(self._ahead)
        return await in_thread(self.pool, answer_request, need.request, self._source)

    def close(self) -> None:
        self._source.interrupt()
        batches, self._batches = self._batches, None
        ahead = self._forget_ahead()
        if batches is not None:
            with suppress(RuntimeError):  # the pool has ended, and with it every read
                told(self.pool.submit(_close, batches, ahead), _NOT_CLOSED)


def _close(batches: Generator[OplogBatch, None, None], ahead: Future[OplogBatch] | None) -> None:
    if ahead is not None:
        wait([ahead])
    batches.close()


async def _ended(work: Future[Any]) -> None:
    """Wait until work in a thread has ended. Its outcome is handled elsewhere."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(ended.set)

    work.add_done_callback(tell)
    await ended.wait()


class Keeper:
    """Keeps a shared reader going while a gateway has streams: it joins as a stream to which nothing comes."""

    def __init__(self, client: MongoClient[Any], shared: SharedTail) -> None:
        self._source = TailedSource(client, shared, _NOWHERE)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                for _ in self._source.tail(self._source.newest()):
                    if self._ended.is_set():
                        return
            except TailraceError as error:
                _log.debug("the shared read waits: %s", error)
            except Exception:  # noqa: BLE001  nobody else would learn of it
                _log.exception("the shared read has failed, and is begun again")
            self._ended.wait(_KEEPER_RETRY_S)

    def close(self) -> None:
        """Let the reader end if nobody else needs it. Does not wait."""
        self._ended.set()
        self._source.interrupt()
