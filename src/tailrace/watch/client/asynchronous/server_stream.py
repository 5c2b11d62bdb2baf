"""The server's own change stream for asyncio: ``tailrace.watch.client.server_turn``, awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Self

from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient
from pymongo.asynchronous.aggregation import _CollectionAggregationCommand, _DatabaseAggregationCommand
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.command_cursor import AsyncCommandCursor
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.operations import _Op

from tailrace.watch.client.asynchronous.change_stream import AsyncChangeStream
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.server_steps import StreamCursor, translated
from tailrace.watch.client.server_turn import ServerTurns


class _AsyncStreamCursor(StreamCursor, AsyncCommandCursor[RawBSONDocument]):
    """PyMongo's cursor, which tells on which connection its getMore ran."""


class AsyncServerChangeStream(ServerTurns, AsyncChangeStream):
    """A stream that the server makes; ``await AsyncServerChangeStream.opened(client, request)`` opens it.

    A call that is cancelled loses its cursor and no event: the next one resumes."""

    _database_kind = AsyncDatabase
    _collection_kind = AsyncCollection
    _database_command = _DatabaseAggregationCommand
    _collection_command = _CollectionAggregationCommand
    _cursor_kind = _AsyncStreamCursor

    @classmethod
    async def opened(cls, client: AsyncMongoClient[Any], request: WatchRequest) -> Self:
        """The stream. Raises what the server's ``aggregate`` raises."""
        with translated(client):
            stream = cls(client, request)
            with stream._time_limit():
                await stream._open()
        return stream

    def _outcome(self, returned: Any) -> Awaitable[Any]:
        awaited: Awaitable[Any] = returned
        return awaited

    async def _read(self, get_cursor: Callable[..., Any]) -> Any:
        async with self._client._tmp_session(self._session) as session:
            preference = self._target._read_preference_for(session)
            return await self._client._retryable_read(get_cursor, preference, session, operation=_Op.AGGREGATE)

    async def try_next(self) -> Any | None:
        return await self._turn()

    async def close(self) -> None:
        await self._shut()
