"""The event loop takes pushed replies in place of a thread, and returns them to a thread if it cannot."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tailrace.watch.gateway.attendant import LoopAttendant

#: For a test that would otherwise wait for ever.
LIMIT_S = 300


async def attended(attendant: LoopAttendant, file: socket.socket, turn: Callable[[], bool]) -> None:
    """``attend``, in a thread that does not block the test if it never returns."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def work() -> None:
        attendant.attend(file, turn)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=work, daemon=True).start()
    await asyncio.wait_for(ended.wait(), LIMIT_S)


def test_a_connection_on_which_nothing_comes_goes_back_to_its_thread() -> None:
    """PyMongo gives up a member that hangs without closing its connection, by its time-outs and its monitor. While the
    loop had the connection, it could not: until the end of the process nobody read from the newly elected member. The
    tests that stop a member do so while nothing is written, and then the thread is the one that reads."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = asyncio.get_running_loop()
            attendant = LoopAttendant(loop, lambda: True, keep_s=0.05)
            await attended(attendant, ours, lambda: True)
            assert not loop.remove_reader(ours.fileno())

    asyncio.run(run())


def test_a_connection_that_the_loop_cannot_watch_goes_back_to_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would have waited for ever; every file could be watched in the tests there were."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = asyncio.get_running_loop()

            def refuses(*_: Any) -> None:
                raise PermissionError

            monkeypatch.setattr(loop, "add_reader", refuses)
            await attended(LoopAttendant(loop, lambda: True), ours, lambda: True)

    asyncio.run(run())


def test_the_loop_has_it_until_a_turn_says_that_it_is_over() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            taken: list[bytes] = []

            def turn() -> bool:
                taken.append(ours.recv(1))
                theirs.sendall(b"x")
                return len(taken) < 3

            theirs.sendall(b"x")
            attendant = LoopAttendant(asyncio.get_running_loop(), lambda: True, keep_s=LIMIT_S * 10)
            await attended(attendant, ours, turn)
            assert len(taken) == 3

    asyncio.run(run())


def test_closing_gives_everything_back_and_takes_nothing_more() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = asyncio.get_running_loop()
            attendant = LoopAttendant(loop, lambda: True, keep_s=LIMIT_S * 10)
            under_way = asyncio.create_task(attended(attendant, ours, lambda: True))
            while not attendant._attended:
                await asyncio.sleep(0.001)
            attendant.close()
            await under_way
            await attended(attendant, ours, lambda: True)

    asyncio.run(run())
