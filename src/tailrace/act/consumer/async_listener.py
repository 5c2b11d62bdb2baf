"""``AsyncListener``: the rules of ``rules.listener``, driven by asyncio.

The handler runs in the event loop. The stream and the store, which wait for sockets, have a thread. The keeper of the
lease has another, so that a handler that blocks the loop does not lose the lease. With partitions each lane has a
thread, and the handlers of all lanes take turns in the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast

from tailrace.act.consumer.async_change import AsyncChange
from tailrace.act.consumer.listening import ListenerBase, cancelled
from tailrace.act.consumer.rules.errors import HandlerNotRun, LeaseDocumentError, LeaseLost
from tailrace.act.consumer.rules.need import Decision, HandleChange, JudgeError, ListenerNeed, Outcome, Pause
from tailrace.act.consumer.rules.unrun import check_runs, refuse_unrun
from tailrace.act.consumer.watching import Watched
from tailrace.errors import InternalError, UsageError

AsyncHandler = Callable[[AsyncChange], Awaitable[Any]]


class AsyncListener(ListenerBase):
    """A Listener whose handler is ``async def``, with the same parameters: ``await listener.run()``, or ``async with
    AsyncListener(...)``.

    When the lease is lost, the handler's task is cancelled. ``on_error`` may be ``async def`` too. With ``partitions``,
    that many handlers run at a time, in one event loop.
    """

    def __init__(self, watchable: Watched, handler: AsyncHandler, **options: Any) -> None:
        super().__init__(watchable, cast(Callable[[Any], Any], handler), **options)
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event | None = None
        #: What the lanes are doing in the loop at the moment.
        self._lane_tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Listen until ``stop()``. Raises what ends it. If the task is cancelled, the change in hand is left to the
        next owner, and what was handled before is committed."""
        self._claim_run()
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        if self._logic.stopping:
            self._woken.set()
        if self._partitions != 1 or await asyncio.to_thread(self._has_lanes):
            await self._run_lanes_beside(self._partitions)
            return
        try:
            await self._run_one()
        except LeaseDocumentError:
            if not await asyncio.to_thread(self._has_lanes):
                raise
            await self._run_lanes_beside(None)  # as in Listener.run()

    async def _run_lanes_beside(self, lanes: int | None) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"listener {self.resource}")
        running = asyncio.get_running_loop().run_in_executor(pool, self._run_lanes, lanes)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            for task in list(self._lane_tasks):
                task.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # it is on its way already
            raise
        finally:
            pool.shutdown(wait=False)

    def _part(self, watchable: Any, **options: Any) -> ListenerBase:
        if self._loop is None:
            raise InternalError("lanes without an event loop")
        part = _LaneInLoop(watchable, cast(AsyncHandler, self._handler), **options)
        part._loop, part._lane_tasks = self._loop, self._lane_tasks
        return part

    async def _run_one(self) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix=f"listener {self.resource}") as pool:
            steps = self._logic.steps()
            try:
                need = next(steps)
                while True:
                    asked = time.monotonic()
                    value, error = None, None
                    try:
                        value = await self._answer(need, pool)
                    except BaseException as raised:  # noqa: BLE001  the logic judges, and raises it again
                        error = raised
                    need = steps.send(Outcome(asked, time.monotonic(), value, error))
            except StopIteration:
                return

    def start(self) -> Self:
        """Listen in a task of its own."""
        if self._task is not None or self._begun:
            raise UsageError("a listener runs once", hint="Make a new one")
        self._task = asyncio.get_running_loop().create_task(self.run(), name=f"listener {self.resource}")
        return self

    def stop(self) -> None:
        """Ask it to end: the change in hand is finished and committed, and the lease is released. May be called from
        any thread and from a signal handler."""
        super().stop()
        if self._loop is not None and self._woken is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    async def join(self) -> bool:
        """Wait for the end of a started listener; raises what ended it."""
        if self._task is not None:
            await self._task
        return True

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            await self.join()
        elif self._task is not None:
            await asyncio.wait([self._task])

    def __enter__(self) -> Self:
        raise UsageError("an asyncio listener is entered with async with")

    async def _answer(self, need: ListenerNeed, pool: ThreadPoolExecutor | None) -> Any:
        match need:
            case HandleChange():
                return await self._handle_in_task(need)
            case Pause():
                return await self._wait(need)
            case JudgeError():
                decision: Any = self._judge(need)
                return await decision if inspect.isawaitable(decision) else decision
            case _:
                return await asyncio.get_running_loop().run_in_executor(pool, self._perform, need)

    @staticmethod
    def _takes_batches(handler: Any) -> bool:
        return False  # a coroutine is awaited for each change

    async def _handle_in_task(self, need: HandleChange) -> bool:
        """The handler in a task that is cancelled when the lease is lost."""
        if self._is_barrier(need):
            return False
        hands, loop = self._hands_now(), asyncio.get_running_loop()
        change = AsyncChange(need.event, need.position, hands, need.again)
        task = asyncio.ensure_future(self._awaitable(change))
        hands.ownership.on_lost = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            refuse_unrun(await task, f"the handler of {self.resource!r}")
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if not task.cancelled() or (current is not None and current.cancelling()):
                raise
            if hands.ownership.lost is not None:
                raise LeaseLost(hands.ownership.lost.message, hint=hands.ownership.lost.hint) from None
            raise cancelled(self.resource) from error
        finally:
            hands.ownership.on_lost = None
            if not task.done():
                task.cancel()
            self._refuse_fork()
        return change.is_committed

    def _awaitable(self, change: AsyncChange) -> Awaitable[Any]:
        given: Any = cast(AsyncHandler, self._handler)(change)
        if inspect.isawaitable(given):
            return given
        what = f"the handler of {self.resource!r}"
        refuse_unrun(given, what)
        raise HandlerNotRun(
            f"{what} returned nothing that can be awaited: it may already have done its work on this change",
            hint="Give an AsyncListener async def, and a plain function to a Listener",
        )

    def _check_runs(self, handler: Any) -> None:
        check_runs(handler, "the handler", awaited=True)

    async def _wait(self, need: Pause) -> None:
        seconds = need.seconds * random.uniform(0.75, 1.25)
        if need.always or self._woken is None:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)

    def _new_change(self, need: HandleChange) -> Any:
        return AsyncChange(need.event, need.position, self._hands_now(), need.again)

    def _checked_decision(self, decision: Any) -> Decision:
        if inspect.isawaitable(decision):
            return cast(Decision, self._awaited(decision))
        return super()._checked_decision(decision)

    async def _awaited(self, decision: Awaitable[Any]) -> Decision:
        return super()._checked_decision(await decision)


class _LaneInLoop(AsyncListener):
    """A part of an AsyncListener that a thread drives (``run_alone``): handler and error policy run in the loop."""

    def _perform(self, need: ListenerNeed) -> Any:
        if not isinstance(need, HandleChange | JudgeError):
            return super()._perform(need)
        loop, done = self._loop, Future[asyncio.Task[Any]]()
        if loop is None:
            raise InternalError("a lane without an event loop")

        def begin() -> None:
            task = loop.create_task(self._answer(need, None))
            self._lane_tasks.add(task)
            task.add_done_callback(self._lane_tasks.discard)
            task.add_done_callback(done.set_result)

        loop.call_soon_threadsafe(begin)
        return done.result().result()

    def stop(self) -> None:
        """Finish the change in hand and end."""
        ListenerBase.stop(self)  # no task waits to be woken
