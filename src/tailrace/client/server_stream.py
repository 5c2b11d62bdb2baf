"""The server's own change stream, read by a client of ours over PyMongo's connections, sessions and cursors."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo import errors as pymongo_errors
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.operations import _Op
from pymongo.synchronous.aggregation import _CollectionAggregationCommand, _DatabaseAggregationCommand
from pymongo.synchronous.command_cursor import CommandCursor

from tailrace.client.change_stream import ChangeStream
from tailrace.client.request import WatchRequest
from tailrace.client.server_steps import Look, ServerSteps, Step, StreamCursor, target_options, translated


class ServerChangeStream(ChangeStream):
    """A stream that the server makes. Raises what its ``aggregate`` raises. ``ServerSteps`` says what is done."""

    def __init__(self, client: MongoClient[Any], request: WatchRequest) -> None:
        self._client = client
        self._timeout_ms = request.timeout_ms
        self._codec_options = request.codec_options
        self._comment = request.comment
        self._session: Any = request.session
        with translated(client):
            self._target = _target(client, request)
            self._steps = ServerSteps(request)
            with self._time_limit():
                self._open()

    def next(self) -> Any:
        with self._time_limit():  # of the whole call
            return super().next()

    __next__ = next

    def try_next(self) -> Any | None:
        if not self.alive:
            return None
        with translated(self._client), self._time_limit():
            try:
                event = self._follow(self._steps.look())
            except pymongo_errors.PyMongoError:
                if self._steps.closed and not self._steps.failed:
                    return None  # another thread has closed the stream, and with it the server's cursor
                raise
            except BaseException:
                self.close()
                raise
        return self._decoded(bytes(event.raw)) if isinstance(event, RawBSONDocument) else event

    def _follow(self, steps: Look) -> RawBSONDocument | None:
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
                answer = self._take(step)
            except pymongo_errors.PyMongoError as error:
                failure = error

    def _take(self, step: Step) -> RawBSONDocument | None:
        if step is Step.OPEN:
            self._open()
        elif step is Step.LEAVE:
            with suppress(pymongo_errors.PyMongoError):
                self._cursor.close()
        elif step is Step.END:
            self.close()
        else:
            return self._cursor._try_next(step is Step.ASK)
        return None

    def _open(self) -> None:
        """The aggregate, and its cursor. PyMongo sends it again if reads may be sent again (retryReads), which
        is no resume."""
        steps = self._steps
        kind: Any = (
            _CollectionAggregationCommand if isinstance(self._target, Collection) else _DatabaseAggregationCommand
        )
        command = kind(
            self._target,
            _StreamCursor,
            steps.pipeline(),
            dict(steps.command),
            result_processor=steps.answered,
            comment=self._comment,
        )

        def get_cursor(session: Any, server: Any, connection: Any, read_preference: Any) -> Any:
            steps.aggregate_wire_version = connection.max_wire_version
            return command.get_cursor(session, server, connection, read_preference)

        with self._client._tmp_session(self._session) as session:
            preference = self._target._read_preference_for(session)
            cursor: Any = self._client._retryable_read(get_cursor, preference, session, operation=_Op.AGGREGATE)
        assert isinstance(cursor, _StreamCursor)
        cursor.wire_version = steps.aggregate_wire_version
        self._cursor = steps.cursor = cursor

    @property
    def resume_token(self) -> Any:
        return self._steps.token(self._codec_options)

    @property
    def alive(self) -> bool:
        return not self._steps.closed

    def close(self) -> None:
        self._steps.closed = True
        self._cursor.close()


class _StreamCursor(StreamCursor, CommandCursor[RawBSONDocument]):
    """PyMongo's cursor, which tells what connection its getMore ran on."""

    def _run_with_conn(self, conn: Any, operation: Any, read_preference: Any) -> Any:
        self.wire_version = conn.max_wire_version
        return super()._run_with_conn(conn, operation, read_preference)


def _target(client: MongoClient[Any], request: WatchRequest) -> Any:
    """What the aggregate is sent to (rule 3)."""
    scope, options = request.scope, target_options(client, request)
    database: Database[RawBSONDocument] = Database(client, scope.database or "admin", *options)
    return database if scope.collection is None else Collection(database, scope.collection, False, *options)
