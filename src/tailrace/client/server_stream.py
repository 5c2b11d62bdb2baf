"""The server's own change stream, as PyMongo reads it, with the face and the errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo import errors as pymongo_errors
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.synchronous.change_stream import ChangeStream as NativeChangeStream

from tailrace.client.change_stream import ChangeStream
from tailrace.client.request import STAGE_NAMES, WatchRequest
from tailrace.errors import (
    ChangeStreamFatal,
    ChangeStreamHistoryLost,
    InvalidResumeToken,
    ServerError,
    TailraceError,
    UsageError,
)
from tailrace.expression import parse_collation
from tailrace.source.driver_error import as_driver_error
from tailrace.source.failure import source_error

_PASSED_ON = (*STAGE_NAMES, "max_await_time_ms", "batch_size", "comment", "session")


class ServerChangeStream(ChangeStream):
    """Delegates to PyMongo's ``watch``. Options that PyMongo's has no parameter for are a UsageError.

    Events come as raw documents and are decoded here, by the codec options asked for, since PyMongo's cluster streams
    know only their client's.
    """

    def __init__(self, client: MongoClient[Any], request: WatchRequest) -> None:
        if request.options:
            raise UsageError(
                f"PyMongo's watch has no parameter for {', '.join(request.options)}", hint='Use engine="oplog"'
            )
        collation = request.collation_document()
        if collation is not None and parse_collation(collation) is not None:
            # PyMongo 4.20 takes the parameter and leaves it out of the command: the stages would compare by bytes.
            raise UsageError("PyMongo's watch does not send a collation to the server", hint='Use engine="oplog"')
        self._client = client
        self._closed = False
        self._codec_options = request.codec_options
        scope = request.scope
        scope.check_names()
        stages = [RawBSONDocument(stage) for stage in request.stages()]
        with self._translated():
            self._stream = _opened(client, request, stages)

    def try_next(self) -> Any | None:
        if not self.alive:
            return None
        with self._translated():
            try:
                event = self._stream.try_next()
            except pymongo_errors.PyMongoError:
                if self._closed:
                    return None  # another thread has closed the stream, and with it the server's cursor
                raise
        return None if event is None else self._decoded(bytes(event.raw))

    @property
    def resume_token(self) -> Any:
        token = self._stream.resume_token
        return bson.decode(token.raw, self._codec_options) if isinstance(token, RawBSONDocument) else token

    @property
    def alive(self) -> bool:
        return bool(self._stream.alive)

    def close(self) -> None:
        self._closed = True
        self._stream.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except pymongo_errors.OperationFailure as error:
            raise as_driver_error(_from_server(error), error) from None
        except pymongo_errors.InvalidName as error:
            # PyMongo takes fewer names than the server does.
            raise as_driver_error(UsageError(str(error), code=73), error) from None
        except pymongo_errors.PyMongoError as error:
            raise source_error(error, self._client) from None
        except (BSONError, TypeError, ValueError, OverflowError) as error:
            raise as_driver_error(UsageError(str(error)), type(error)) from None


def _opened(
    client: MongoClient[Any], request: WatchRequest, stages: list[RawBSONDocument]
) -> NativeChangeStream[RawBSONDocument]:
    """PyMongo's stream, of raw documents, with the options of the object whose ``watch`` was called."""
    scope, target = request.scope, client if request.target is None else request.target
    options = (
        CodecOptions(RawBSONDocument),
        target.read_preference,
        target.write_concern,
        target.read_concern,
    )
    passed_on = {name: getattr(request, name) for name in _PASSED_ON}
    database: Database[RawBSONDocument] = Database(client, scope.database or "admin", *options)
    if scope.collection is not None:
        return Collection(database, scope.collection, False, *options).watch(stages, **passed_on)
    if scope.database is not None:
        return database.watch(stages, **passed_on)
    return MongoClient.watch(_OfCluster(database), stages, **passed_on)  # type: ignore[arg-type]


class _OfCluster:
    """What PyMongo's ``MongoClient.watch`` asks of its client: the database that a cluster's stream is opened on."""

    def __init__(self, admin: Database[RawBSONDocument]) -> None:
        self.admin = admin


def _from_server(error: pymongo_errors.OperationFailure) -> TailraceError:
    """The same class that the oplog engine would raise; code, message and labels are the server's."""
    message = str((error.details or {}).get("errmsg") or error)
    labels = (error.details or {}).get("errorLabels", ())
    if error.code == 280:
        return ChangeStreamFatal(message)
    if error.code == 286:
        return ChangeStreamHistoryLost(message)
    if error.code == 260:
        return InvalidResumeToken(message, labels=labels)
    return ServerError(message, code=error.code, labels=labels)
