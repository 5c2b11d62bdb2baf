"""The server's own change stream, as PyMongo's asynchronous client reads it, with the face and the errors of ours."""

from __future__ import annotations

from typing import Any, Final, Self, cast

from pymongo import AsyncMongoClient
from pymongo.asynchronous.change_stream import AsyncChangeStream as NativeStream
from pymongo.asynchronous.collection import AsyncCollection as NativeCollection
from pymongo.asynchronous.database import AsyncDatabase as NativeDatabase
from pymongo.errors import ConfigurationError

from tailrace.client.arguments import refused
from tailrace.client.asynchronous.change_stream import AsyncChangeStream
from tailrace.client.request import STAGE_NAMES, WatchRequest
from tailrace.client.server_stream import _translated as translated
from tailrace.expression import parse_collation

_PASSED_ON: Final = (*STAGE_NAMES, "max_await_time_ms", "batch_size", "comment", "session")


class AsyncServerChangeStream(AsyncChangeStream):
    """Delegates to PyMongo's ``watch``."""

    def __init__(self, client: AsyncMongoClient[Any], stream: NativeStream[Any]) -> None:
        self._client = client
        self._stream = stream
        self._closed = False

    @classmethod
    async def opened(cls, client: AsyncMongoClient[Any], request: WatchRequest) -> Self:
        """The stream. Options that PyMongo's ``watch`` has no parameter for are a UsageError."""
        _check(request)
        request.stage(), request.stages()  # what is no BSON is told by its name
        with translated(cast(Any, client)):
            return cls(client, await _opened(client, request))

    async def try_next(self) -> Any | None:
        if not self.alive:
            return None
        with translated(cast(Any, self._client)):
            return await self._stream.try_next()

    @property
    def resume_token(self) -> Any:
        return self._stream.resume_token

    @property
    def alive(self) -> bool:
        return not self._closed and bool(self._stream.alive)

    async def close(self) -> None:
        self._closed = True
        await self._stream.close()


def _check(request: WatchRequest) -> None:
    """Raises UsageError for what PyMongo's asynchronous ``watch`` does not send."""
    request.scope.check_names()
    if request.options:
        raise refused(
            f"PyMongo's watch has no parameter for {', '.join(request.options)}", TypeError, 'Use engine="oplog"'
        )
    collation = request.collation_document()
    if collation is not None and parse_collation(collation) is not None:
        # The stages would compare by bytes.
        raise refused("PyMongo's watch does not send a collation", ConfigurationError, 'Use engine="oplog"')


async def _opened(client: AsyncMongoClient[Any], request: WatchRequest) -> NativeStream[Any]:
    """PyMongo's stream, with the options of the object whose ``watch`` was called."""
    scope, target = request.scope, client if request.target is None else request.target
    options = (request.codec_options, target.read_preference, target.write_concern, target.read_concern)
    stages = list(request.pipeline)
    passed_on = {name: getattr(request, name) for name in _PASSED_ON}
    database: NativeDatabase[Any] = NativeDatabase(client, scope.database or "admin", *options)
    if scope.collection is not None:
        return await NativeCollection(database, scope.collection, False, *options).watch(stages, **passed_on)
    if scope.database is not None:
        return await database.watch(stages, **passed_on)
    return await AsyncMongoClient.watch(_OfWholeCluster(database), stages, **passed_on)  # type: ignore[arg-type]


class _OfWholeCluster:
    """What PyMongo's ``AsyncMongoClient.watch`` asks of its client: the database that the stream is opened on."""

    def __init__(self, admin: NativeDatabase[Any]) -> None:
        self.admin = admin
