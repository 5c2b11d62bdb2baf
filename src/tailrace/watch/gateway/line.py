"""Questions and answers between the processes of one gateway, over a socket that nobody else can reach."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from tailrace.errors import InternalError, TailraceError

_LENGTH: Final = struct.Struct("<Q")
_ASK, _ANSWER, _FAIL, _CANCEL = range(4)

_log = logging.getLogger("tailrace.gateway")


class LineClosedError(TailraceError):
    """The other process has ended."""


class Line:
    """Either end asks, by a question's name, and answers: ``answer(name, *args)`` may raise TailraceError, which is
    raised where it was asked. Belongs to an event loop; ``closed`` is set when the other end has gone."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[..., Awaitable[Any]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self.closed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def ask(self, name: str, *args: Any) -> Any:
        """The answer. Raises LineClosedError, or the error of the other side. If the caller is cancelled, so is the
        work for it."""
        if self.closed.is_set():
            raise LineClosedError("another process of the gateway has ended")
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(_ASK, number, (name, args))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                self._send(_CANCEL, number, None)
            raise
        finally:
            self._asked.pop(number, None)

    def _send(self, kind: int, number: int, content: Any) -> None:
        if self.closed.is_set():
            return
        data = pickle.dumps((kind, number, content), pickle.HIGHEST_PROTOCOL)
        self._writer.write(_LENGTH.pack(len(data)))
        self._writer.write(data)

    async def _run(self) -> None:
        try:
            while True:
                size = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))[0]
                kind, number, content = pickle.loads(await self._reader.readexactly(size))
                self._take(kind, number, content)
        except (OSError, EOFError):
            pass
        except Exception:  # noqa: BLE001  nobody else would hear of it; to both sides the other one has gone
            _log.exception("what another process of the gateway has sent cannot be read")
        finally:
            self.closed.set()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(LineClosedError("another process of the gateway has ended"))
            for task in list(self._answering.values()):
                task.cancel()
            self._writer.close()

    def _take(self, kind: int, number: int, content: Any) -> None:
        if kind == _ASK:
            task = asyncio.get_running_loop().create_task(self._answered(number, *content))
            self._answering[number] = task
            task.add_done_callback(lambda _: self._answering.pop(number, None))
            return
        if kind == _CANCEL:
            if number in self._answering:
                self._answering[number].cancel()
            return
        future = self._asked.get(number)
        if future is not None and not future.done():
            if kind == _ANSWER:
                future.set_result(content)
            else:
                future.set_exception(content)

    async def _answered(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            found = await self._answer(name, *args)
        except TailraceError as error:
            self._send(_FAIL, number, error)
        except Exception as error:  # noqa: BLE001  told to whoever asked
            _log.exception("a question of another process of the gateway could not be answered")
            self._send(_FAIL, number, InternalError(f"another process of the gateway failed: {type(error).__name__}"))
        else:
            self._send(_ANSWER, number, found)

    async def drained(self) -> None:
        """Wait until the other side has taken what was sent."""
        with suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        """Say no more, and answer nothing."""
        self._task.cancel()
