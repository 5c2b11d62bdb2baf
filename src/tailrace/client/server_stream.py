"""The server's own change stream, read by a client of ours over PyMongo's connections, sessions and cursors.

Rules: docs/reference/driver-rules.md. What becomes of the token and of failures is ``tailrace.client.resume``'s to say.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo import errors as pymongo_errors
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.operations import _Op
from pymongo.synchronous.aggregation import _CollectionAggregationCommand, _DatabaseAggregationCommand
from pymongo.synchronous.command_cursor import CommandCursor

from tailrace.client.change_stream import ChangeStream
from tailrace.client.failure import failure_of
from tailrace.client.request import STAGE_NAMES, WatchRequest
from tailrace.client.resume import Next, ResumeProcess, SaidStart, get_more_wait_ms
from tailrace.errors import (
    ChangeStreamFatal,
    ChangeStreamHistoryLost,
    InvalidResumeToken,
    ServerError,
    TailraceError,
    UsageError,
)
from tailrace.oplog.namespace import Scope
from tailrace.source.driver_error import as_driver_error
from tailrace.source.failure import source_error
from tailrace.source.time_limit import limit_s, remaining_s, time_limit_of

_STARTS: Final = ("resumeAfter", "startAfter", "startAtOperationTime")


class ServerChangeStream(ChangeStream):
    """A stream that the server makes. Raises what its ``aggregate`` raises.

    PyMongo's helpers run the commands: they choose the server by the target's read preference (rule 27), inherit its
    read concern (6), send getMore to the server of the cursor (12) with the comment (13), and keep the session (15).
    """

    def __init__(self, client: MongoClient[Any], request: WatchRequest) -> None:
        self._client = client
        self._codec_options = request.codec_options
        self._max_await_ms = request.max_await_time_ms
        #: Whether the stream is over, and whether because of an error of its own.
        self._closed = self._failed = False
        request.scope.check_names()
        with _translated(client):
            self._target = _target(client, request)
            request.stage(), request.stages()  # what is no BSON is told by its name
            values = {name: getattr(request, parameter) for parameter, name in STAGE_NAMES.items()}
            said = {name: value for name, value in values.items() if value is not None} | dict(request.options or {})
            self._resume = ResumeProcess(
                SaidStart(said.get("resumeAfter"), said.get("startAfter"), said.get("startAtOperationTime"))
            )
            if request.scope.database is None:
                said["allChangesForCluster"] = True  # rule 3
            #: What a resume leaves as it is (28): the stage but for the start, the caller's stages, the command.
            self._said = said
            self._stages = copy.deepcopy(list(request.pipeline))
            self._command = _command_options(request)
            self._comment = request.comment
            self._session: Any = request.session
            with time_limit_of(client):
                self._cursor = self._opened()

    def next(self) -> Any:
        with time_limit_of(self._client):  # rule 31: of the whole call
            return super().next()

    __next__ = next

    def try_next(self) -> Any | None:
        if not self.alive:
            return None
        with _translated(self._client), time_limit_of(self._client):
            try:
                event = self._look()
            except pymongo_errors.PyMongoError:
                if self._closed and not self._failed:
                    return None  # another thread has closed the stream, and with it the server's cursor
                raise
            except BaseException:
                self.close()
                raise
        return self._decoded(bytes(event.raw)) if isinstance(event, RawBSONDocument) else event

    def _look(self) -> RawBSONDocument | None:
        """One getMore at most, and one attempt to resume after it (rules 16, 22 and 26)."""
        if not self._cursor.alive:
            self._cursor = self._reopened()  # rule 31: the last call has run out of time, or its attempt has failed
        self._cursor.wait_at_most(
            get_more_wait_ms(self._max_await_ms, limit_s(), remaining_s(), self._cursor.round_trip_s)
        )
        try:
            event = self._cursor._try_next(True)
        except pymongo_errors.PyMongoError as error:
            if self._closed:
                raise
            follows = self._resume.failed(failure_of(error, "getMore", self._cursor.wire_version))
            if follows is not Next.RESUME:
                if follows is Next.END:
                    self._fail()
                raise
            self._cursor.close_quietly()
            self._cursor = self._reopened()
            event = self._cursor._try_next(False)
        return self._given(self._cursor, event)

    def _given(self, cursor: _StreamCursor, event: RawBSONDocument | None) -> RawBSONDocument | None:
        if not cursor.alive:
            self._closed = True  # rule 14
        batch_token = cursor._post_batch_resume_token
        if event is None:
            self._resume.found_nothing(batch_token)
            return None
        token = event.get("_id")
        if token is None:
            self._fail()
            raise MissingTokenError(
                "the event has no resume token", hint="Leave _id in the events: the stream goes on after them by it"
            )
        self._resume.gives(token, is_last=not cursor._has_next(), batch_token=batch_token)
        return event

    def _reopened(self) -> _StreamCursor:
        """A resume's aggregate. Raises its error, which ends the stream unless it passes (rules 24 and 25)."""
        command = _Aggregate()
        try:
            return self._opened(command)
        except pymongo_errors.PyMongoError as error:
            if self._resume.failed(failure_of(error, "aggregate", command.wire_version)) is Next.END:
                self._fail()
            raise

    def _opened(self, seen: _Aggregate | None = None) -> _StreamCursor:
        """Rules 2 to 4, and 28: the aggregate, and the cursor that it gives. PyMongo sends it again where a read may be
        (retryReads), which is no resume."""
        seen = seen or _Aggregate()
        stage = {name: value for name, value in self._said.items() if name not in _STARTS}
        stage |= self._resume.start_options()
        of_collection = isinstance(self._target, Collection)
        kind: Any = _CollectionAggregationCommand if of_collection else _DatabaseAggregationCommand
        command = kind(
            self._target,
            _StreamCursor,
            [{"$changeStream": stage}, *self._stages],
            dict(self._command),
            result_processor=self._answered,
            comment=self._comment,
        )

        def get_cursor(session: Any, server: Any, connection: Any, read_preference: Any) -> Any:
            seen.wire_version = connection.max_wire_version
            return command.get_cursor(session, server, connection, read_preference)

        with self._client._tmp_session(self._session) as session:
            preference = self._target._read_preference_for(session)
            cursor: Any = self._client._retryable_read(get_cursor, preference, session, operation=_Op.AGGREGATE)
        assert isinstance(cursor, _StreamCursor)
        cursor.wire_version = seen.wire_version
        return cursor

    def _answered(self, reply: Mapping[str, Any]) -> None:
        cursor = reply["cursor"]
        self._resume.opened(
            is_empty=not cursor["firstBatch"],
            batch_token=cursor.get("postBatchResumeToken"),
            operation_time=reply.get("operationTime"),
        )

    @property
    def resume_token(self) -> Any:
        token = self._resume.token
        return (
            bson.decode(token.raw, self._codec_options) if isinstance(token, RawBSONDocument) else copy.deepcopy(token)
        )

    @property
    def alive(self) -> bool:
        return not self._closed

    def _fail(self) -> None:
        self._failed = True
        self.close()

    def close(self) -> None:
        self._closed = True
        self._cursor.close()


class _Aggregate:
    """The wire version of the connection that an aggregate ran on last."""

    wire_version: int | None = None


class _StreamCursor(CommandCursor[RawBSONDocument]):
    """PyMongo's cursor, which tells what connection its getMore ran on."""

    wire_version: int | None = None

    @property
    def round_trip_s(self) -> float:
        """The shortest way to the cursor's server and back that was measured, as far as it is known."""
        servers = self._collection.database.client.topology_description.server_descriptions()
        server = None if self._address is None else servers.get(self._address)
        return (server is not None and server.min_round_trip_time) or 0.0

    def wait_at_most(self, milliseconds: int | None) -> None:
        """How long the server waits for events from the next getMore on."""
        self._max_await_time_ms = milliseconds

    def close_quietly(self) -> None:
        """Rule 29."""
        with suppress(pymongo_errors.PyMongoError):
            self.close()

    def _run_with_conn(self, conn: Any, operation: Any, read_preference: Any) -> Any:
        self.wire_version = conn.max_wire_version
        return super()._run_with_conn(conn, operation, read_preference)


class MissingTokenError(UsageError, pymongo_errors.InvalidOperation):
    """Rule 20: an event came without an ``_id``, so the stream could not be resumed after it. It is over."""


def _target(client: MongoClient[Any], request: WatchRequest) -> Any:
    """What the aggregate is sent to, giving raw documents (rule 3)."""
    scope: Scope = request.scope
    of_user = client if request.target is None else request.target
    raw: CodecOptions[Any] = request.codec_options.with_options(document_class=RawBSONDocument)
    if client._event_listeners is not None and client._event_listeners.enabled_for_commands:
        raw = request.codec_options  # who listens sees replies that are decoded, as PyMongo's stream decodes them
    options = (raw, of_user.read_preference, of_user.write_concern, of_user.read_concern)  # rules 6 and 27
    database: Database[RawBSONDocument] = Database(client, scope.database or "admin", *options)
    return database if scope.collection is None else Collection(database, scope.collection, False, *options)


def _command_options(request: WatchRequest) -> dict[str, Any]:
    """Rule 4: what belongs to the command and not to the stage, where it was said."""
    options: dict[str, Any] = {}
    if request.batch_size is not None:
        options["batchSize"] = request.batch_size
    if request.max_await_time_ms is not None:
        options["maxAwaitTimeMS"] = request.max_await_time_ms
    collation = request.collation_document()
    if collation is not None:
        options["collation"] = bson.decode(collation)
    return options


@contextmanager
def _translated(client: MongoClient[Any]) -> Iterator[None]:
    try:
        yield
    except pymongo_errors.OperationFailure as error:
        raise as_driver_error(_from_server(error), error) from None
    except pymongo_errors.InvalidName as error:
        # PyMongo takes fewer names than the server does.
        raise as_driver_error(UsageError(str(error), code=73), error) from None
    except pymongo_errors.PyMongoError as error:
        if isinstance(error, TailraceError):
            raise
        raise source_error(error, client) from None
    except (BSONError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TailraceError):
            raise
        raise as_driver_error(UsageError(str(error)), type(error)) from None


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
