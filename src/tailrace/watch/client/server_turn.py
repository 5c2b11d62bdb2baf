"""A stream of ``engine="server"``, written once for both flavours.

Each call is a coroutine that takes the steps of ``tailrace.watch.client.server_steps``. The asynchronous flavour
awaits it. In the synchronous one PyMongo's calls are done when they return, so the coroutine never waits, and
``at_once`` runs it to its end.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import errors as pymongo_errors

from tailrace.core import raw_bson
from tailrace.errors import UsageError
from tailrace.read.source.time_limit import time_limit_of
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.server_steps import ServerSteps, Step, StepsOfLook, target_options, translated
from tailrace.watch.client.stream_errors import CANNOT_DECODE, undecodable

_T = TypeVar("_T")


class ServerTurns(ABC):
    """The part that both flavours have in common. ``await self._open()`` comes first."""

    #: PyMongo's classes of the flavour.
    _database_kind: ClassVar[Any]
    _collection_kind: ClassVar[Any]
    _database_command: ClassVar[Any]
    _collection_command: ClassVar[Any]
    _cursor_kind: ClassVar[Any]

    def __init__(self, client: Any, request: WatchRequest) -> None:
        self._client = client
        self._timeout_ms = request.timeout_ms
        self._codec_options = request.codec_options
        self._comment = request.comment
        self._session: Any = request.session
        # Rule 3: what the aggregate is sent to.
        scope, options = request.scope, target_options(client, request)
        database = self._database_kind(client, scope.database or "admin", *options)
        is_database = scope.collection is None
        self._target = database if is_database else self._collection_kind(database, scope.collection, False, *options)
        self._command = self._database_command if is_database else self._collection_command
        self._steps = ServerSteps(request)
        self._cursor: Any = None

    @abstractmethod
    def _outcome(self, returned: Any) -> Awaitable[Any]:
        """The outcome of a call of PyMongo's."""

    @abstractmethod
    async def _read(self, get_cursor: Callable[..., Any]) -> Any:
        """The cursor that ``get_cursor`` gives, by PyMongo's rules for a read in the stream's session."""

    async def _turn(self) -> Any | None:
        """The next event, or ``None``, after one getMore at most."""
        if not self.alive:
            return await self._left_over()
        with translated(self._client), time_limit_of(self._client, self._timeout_ms):
            try:
                event = await self._follow(self._steps.look())
            except pymongo_errors.PyMongoError:
                if self._steps.closed and not self._steps.failed:
                    return None  # another thread or task has closed the stream, and with it the server's cursor
                raise
            except asyncio.CancelledError:
                self._cursor._die_no_lock()  # its reply may be lost: what it held is asked for again
                raise
            except BaseException:
                await self._shut()
                raise
        try:
            return self._decoded_of(event)
        except UsageError:
            await self._shut()
            raise

    def _decoded_of(self, event: Any | None) -> Any | None:
        """The event as a program holds it. Raises UsageError; the stream is over then."""
        if not isinstance(event, RawBSONDocument):
            return event
        try:
            return bson.decode(raw_bson.bytes_of(event), codec_options=self._codec_options)
        except CANNOT_DECODE as error:
            self._steps.failed = True
            raise undecodable(error) from None

    async def _left_over(self) -> Any | None:
        """What the cursor of a closed stream still holds, one event after the other."""
        if self._steps.failed:
            return None
        return self._decoded_of(await self._follow(self._steps.left_over()))

    async def _follow(self, steps: StepsOfLook) -> RawBSONDocument | None:
        answer: Any = None
        failure: Exception | None = None
        while True:
            try:
                step = steps.send(answer) if failure is None else steps.throw(failure)
            except StopIteration as done:
                found: RawBSONDocument | None = done.value
                return found
            answer = failure = None
            try:
                answer = await self._take(step)
            except pymongo_errors.PyMongoError as error:
                failure = error

    async def _take(self, step: Step) -> RawBSONDocument | None:
        if step is Step.OPEN:
            await self._open()
        elif step is Step.LEAVE:
            with suppress(pymongo_errors.PyMongoError):
                await self._outcome(self._cursor.close())
        elif step is Step.END:
            await self._shut()
        else:
            found: RawBSONDocument | None = await self._outcome(self._cursor._try_next(step is Step.ASK))
            return found
        return None

    async def _open(self) -> None:
        """The aggregate, and its cursor. PyMongo sends it again if reads may be sent again (retryReads), which
        is no resume."""
        steps = self._steps
        command = self._command(
            self._target,
            self._cursor_kind,
            steps.pipeline(),
            dict(steps.command),
            result_processor=steps.answered,
            comment=self._comment,
        )

        def get_cursor(session: Any, server: Any, connection: Any, read_preference: Any) -> Any:
            steps.aggregate_wire_version = connection.max_wire_version
            return command.get_cursor(session, server, connection, read_preference)

        cursor = await self._read(get_cursor)
        assert isinstance(cursor, self._cursor_kind)
        cursor.wire_version = steps.aggregate_wire_version
        self._cursor = steps.cursor = cursor

    async def _shut(self) -> None:
        self._steps.closed = True
        await self._outcome(self._cursor.close())

    @property
    def resume_token(self) -> Any:
        return self._steps.token(self._codec_options)

    @property
    def alive(self) -> bool:
        return not self._steps.closed


def at_once(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        found: _T = done.value
        return found
    raise AssertionError("the synchronous flavour has nothing to wait for")
