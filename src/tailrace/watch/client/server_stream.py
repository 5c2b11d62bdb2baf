"""The server's own change stream, read by a client of ours over PyMongo's connections, sessions and cursors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.operations import _Op
from pymongo.synchronous.aggregation import _CollectionAggregationCommand, _DatabaseAggregationCommand
from pymongo.synchronous.command_cursor import CommandCursor

from tailrace.watch.client.change_stream import ChangeStream
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.server_steps import StreamCursor, translated
from tailrace.watch.client.server_turn import ServerTurns, at_once


class _StreamCursor(StreamCursor, CommandCursor[RawBSONDocument]):
    """PyMongo's cursor, which tells on which connection its getMore ran."""


class ServerChangeStream(ServerTurns, ChangeStream):
    """A stream that the server makes. Raises what its ``aggregate`` raises."""

    _database_kind = Database
    _collection_kind = Collection
    _database_command = _DatabaseAggregationCommand
    _collection_command = _CollectionAggregationCommand
    _cursor_kind = _StreamCursor

    def __init__(self, client: MongoClient[Any], request: WatchRequest) -> None:
        with translated(client):
            super().__init__(client, request)
            with self._time_limit():
                at_once(self._open())

    @property
    def has_next(self) -> bool:
        return self.alive and self._cursor._has_next()

    async def _outcome(self, returned: Any) -> Any:
        return returned

    async def _read(self, get_cursor: Callable[..., Any]) -> Any:
        with self._client._tmp_session(self._session) as session:
            preference = self._target._read_preference_for(session)
            return self._client._retryable_read(get_cursor, preference, session, operation=_Op.AGGREGATE)

    def next(self) -> Any:
        with self._time_limit():  # of the whole call
            return super().next()

    __next__ = next

    def try_next(self) -> Any | None:
        return at_once(self._turn())

    def close(self) -> None:
        at_once(self._shut())
