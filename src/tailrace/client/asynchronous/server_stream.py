"""The server's own change stream for asyncio: the steps of ``tailrace.client.server_steps``, awaited."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Self

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from pymongo import errors as pymongo_errors
from pymongo.asynchronous.aggregation import _CollectionAggregationCommand, _DatabaseAggregationCommand
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.operations import _Op

from tailrace.client.asynchronous.change_stream import AsyncChangeStream
from tailrace.client.change_stream import CANNOT_DECODE, undecodable
from tailrace.client.request import WatchRequest
from tailrace.client.server_steps import Look, ServerSteps, Step, StreamCursor, target_options, translated


class AsyncServerChangeStream(AsyncChangeStream):
    """A stream that the server makes; ``await AsyncServerChangeStream.opened(client, request)`` opens it.

    A call that is cancelled loses its cursor and no event: the next one resumes."""

    _cursor: _AsyncStreamCursor

    def __init__(self, client: AsyncMongoClient[Any], request: WatchRequest) -> None:
        self._client = client
        self._timeout_ms = request.timeout_ms
        self._codec_options = request.codec_options
        self._comment = request.comment
        self._session: Any = request.session
        self._target = _target(client, request)
        self._steps = ServerSteps(request)

    @classmethod
    async def opened(cls, client: AsyncMongoClient[Any], request: WatchRequest) -> Self:
        """The stream. Raises what the server's ``aggregate`` raises."""
        with translated(client):
            stream = cls(client, request)
            with stream._time_limit():
                await stream._open()
        return stream

    async def try_next(self) -> Any | None:
        if not self.alive:
            return None
        with translated(self._client), self._time_limit():
            try:
                event = await self._follow(self._steps.look())
            except pymongo_errors.PyMongoError:
                if self._steps.closed and not self._steps.failed:
                    return None  # another task has closed the stream, and with it the server's cursor
                raise
            except asyncio.CancelledError:
                self._cursor._die_no_lock()  # its reply may be lost: what it held is asked for again
                raise
            except BaseException:
                await self.close()
                raise
        return await self._decoded(event) if isinstance(event, RawBSONDocument) else event

    async def _decoded(self, event: RawBSONDocument) -> Any:
        try:
            return bson.decode(event.raw, codec_options=self._codec_options)
        except CANNOT_DECODE as error:
            await self.close()
            raise undecodable(error) from None

    async def _follow(self, steps: Look) -> RawBSONDocument | None:
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
                await self._cursor.close()
        elif step is Step.END:
            await self.close()
        else:
            return await self._cursor._try_next(step is Step.ASK)
        return None

    async def _open(self) -> None:
        """The aggregate, and its cursor. PyMongo sends it again if reads may be sent again (retryReads), which
        is no resume."""
        steps = self._steps
        kind: Any = (
            _CollectionAggregationCommand if isinstance(self._target, AsyncCollection) else _DatabaseAggregationCommand
        )
        command = kind(
            self._target,
            _AsyncStreamCursor,
            steps.pipeline(),
            dict(steps.command),
            result_processor=steps.answered,
            comment=self._comment,
        )

        async def get_cursor(session: Any, server: Any, connection: Any, read_preference: Any) -> Any:
            steps.aggregate_wire_version = connection.max_wire_version
            return await command.get_cursor(session, server, connection, read_preference)

        async with self._client._tmp_session(self._session) as session:
            preference = self._target._read_preference_for(session)
            cursor: Any = await self._client._retryable_read(get_cursor, preference, session, operation=_Op.AGGREGATE)
        assert isinstance(cursor, _AsyncStreamCursor)
        cursor.wire_version = steps.aggregate_wire_version
        self._cursor = steps.cursor = cursor

    @property
    def resume_token(self) -> Any:
        return self._steps.token(self._codec_options)

    @property
    def alive(self) -> bool:
        return not self._steps.closed

    async def close(self) -> None:
        self._steps.closed = True
        await self._cursor.close()


class _AsyncStreamCursor(StreamCursor, AsyncCommandCursor[RawBSONDocument]):
    """PyMongo's cursor, which tells on which connection its getMore ran."""

    async def _run_with_conn(self, conn: Any, operation: Any, read_preference: Any) -> Any:
        self.wire_version = conn.max_wire_version
        return await super()._run_with_conn(conn, operation, read_preference)


def _target(client: AsyncMongoClient[Any], request: WatchRequest) -> Any:
    """What the aggregate is sent to (rule 3)."""
    scope, options = request.scope, target_options(client, request)
    database: AsyncDatabase[RawBSONDocument] = AsyncDatabase(client, scope.database or "admin", *options)
    return database if scope.collection is None else AsyncCollection(database, scope.collection, False, *options)
