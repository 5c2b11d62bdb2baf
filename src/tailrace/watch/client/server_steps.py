"""What a stream of ``engine="server"`` does, as steps. The two flavours take them, one synchronous and one
asynchronous.

Rules: docs/reference/driver-rules.md. ``tailrace.watch.client.resume`` decides about the token and about failures; this
module decides which command follows which. PyMongo's helpers run the commands: they choose the server by the target's
read preference (rule 27), inherit its read concern (6), send getMore to the server of the cursor (12) with the comment
(13), and keep the session (15).
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final, Protocol

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from pymongo import errors as pymongo_errors

from tailrace.core import raw_bson
from tailrace.errors import (
    ChangeStreamFatal,
    ChangeStreamHistoryLost,
    InvalidResumeToken,
    ServerError,
    TailraceError,
    UsageError,
)
from tailrace.read.source.driver_error import as_driver_error
from tailrace.read.source.failure import source_error
from tailrace.read.source.time_limit import limit_s, remaining_s
from tailrace.watch.client.failure import failure_of
from tailrace.watch.client.request import WatchRequest
from tailrace.watch.client.resume import Next, ResumeProcess, SaidStart, get_more_wait_ms

_STARTS: Final = ("resumeAfter", "startAfter", "startAtOperationTime")


class Step(Enum):
    """One thing to do. Its outcome, or PyMongo's error, is reported before the next one."""

    OPEN = "send the aggregate; its cursor is the stream's from now on"
    ASK = "the cursor's next event, or nothing; one getMore at most"
    TAKE = "the cursor's next event among those at hand, or nothing"
    LEAVE = "close the cursor, and tell nobody of an error (rule 29)"
    END = "close the stream"


StepsOfLook = Generator[Step, Any, RawBSONDocument | None]


class _CursorInSteps(Protocol):
    """What the steps use of a cursor; a StreamCursor of either flavour."""

    wire_version: int | None

    @property
    def alive(self) -> bool: ...
    @property
    def round_trip_s(self) -> float: ...
    @property
    def _post_batch_resume_token(self) -> Any: ...
    def _has_next(self) -> bool: ...
    def wait_at_most(self, milliseconds: int | None) -> None: ...


class StreamCursor:
    """What both flavours add to PyMongo's cursor, which stands after it among a class's bases."""

    #: The wire version of the connection that its last command ran on.
    wire_version: int | None = None

    @property
    def round_trip_s(self) -> float:
        """The shortest round trip to the cursor's server that was measured, if any is known."""
        cursor: Any = self
        servers = cursor._collection.database.client.topology_description.server_descriptions()
        server = None if cursor._address is None else servers.get(cursor._address)
        return (server is not None and server.min_round_trip_time) or 0.0

    def wait_at_most(self, milliseconds: int | None) -> None:
        """How long the server waits for events from the next getMore on."""
        self._max_await_time_ms = milliseconds

    def _run_with_conn(self, conn: Any, operation: Any, read_preference: Any) -> Any:
        self.wire_version = conn.max_wire_version
        return super()._run_with_conn(conn, operation, read_preference)  # type: ignore[misc]


class ServerSteps:
    """One stream's steps. Their taker sets ``cursor`` and ``aggregate_wire_version``, that of the connection
    on which the last aggregate ran."""

    cursor: _CursorInSteps
    aggregate_wire_version: int | None = None

    def __init__(self, request: WatchRequest) -> None:
        request.scope.check_names()
        request.stage(), request.stages()  # an option that is not BSON is reported by its name
        said = request.said()
        self.resume = ResumeProcess(SaidStart(*(said.get(name) for name in _STARTS)))
        if request.scope.database is None:
            said["allChangesForCluster"] = True  # rule 3
        #: What a resume leaves as it is (28): the stage without the start, and the caller's stages.
        self._said = {name: value for name, value in said.items() if name not in _STARTS}
        self._stages = copy.deepcopy(list(request.pipeline))
        self._max_await_ms = request.max_await_time_ms
        #: Rule 4: what belongs to the command and not to the stage.
        self.command = _command_options(request)
        #: Whether the stream is over, and whether because of an error of its own.
        self.closed = self.failed = False

    def pipeline(self) -> list[Mapping[str, Any]]:
        """Rules 2 to 4, and 28: the pipeline of the next aggregate."""
        return [{"$changeStream": self._said | self.resume.start_options()}, *self._stages]

    def answered(self, reply: Mapping[str, Any]) -> None:
        """The reply to an aggregate."""
        cursor = reply["cursor"]
        self.resume.opened(
            is_empty=not cursor["firstBatch"],
            batch_token=cursor.get("postBatchResumeToken"),
            operation_time=reply.get("operationTime"),
        )

    def look(self) -> StepsOfLook:
        """One getMore at most, and one attempt to resume after it (rules 16, 22 and 26)."""
        if not self.cursor.alive:
            yield from self._reopened()  # rule 31: the last call has run out of time, or its attempt has failed
        cursor = self.cursor
        cursor.wait_at_most(get_more_wait_ms(self._max_await_ms, limit_s(), remaining_s(), cursor.round_trip_s))
        try:
            event = yield Step.ASK
        except pymongo_errors.PyMongoError as error:
            if self.closed:
                raise
            follows = self.resume.failed(failure_of(error, "getMore", cursor.wire_version))
            if follows is not Next.RESUME:
                if follows is Next.END:
                    yield from self._fail()
                raise
            yield Step.LEAVE
            yield from self._reopened()
            event = yield Step.TAKE
        return (yield from self._given(event))

    def left_over(self) -> StepsOfLook:
        """What a closed stream's cursor holds: nothing is asked of the server."""
        event = yield Step.TAKE
        return None if event is None else (yield from self._given(event))

    def _given(self, event: RawBSONDocument | None) -> StepsOfLook:
        if not self.cursor.alive:
            self.closed = True  # rule 14
        batch_token = self.cursor._post_batch_resume_token
        if event is None:
            self.resume.found_nothing(batch_token)
            return None
        token = event.get("_id")
        if token is None:
            yield from self._fail()
            raise MissingTokenError(
                "the event has no resume token", hint="Leave _id in the events: the stream goes on after them by it"
            )
        self.resume.gives(token, is_last=not self.cursor._has_next(), batch_token=batch_token)
        return event

    def _reopened(self) -> StepsOfLook:
        """A resume's aggregate. Raises its error, which ends the stream unless it passes (rules 24 and 25)."""
        self.aggregate_wire_version = None
        try:
            yield Step.OPEN
        except pymongo_errors.PyMongoError as error:
            if self.resume.failed(failure_of(error, "aggregate", self.aggregate_wire_version)) is Next.END:
                yield from self._fail()
            raise
        return None

    def _fail(self) -> StepsOfLook:
        self.failed = True
        yield Step.END
        return None

    def token(self, codec_options: CodecOptions[Any]) -> Any:
        """Rule 21."""
        token = self.resume.token
        return (
            bson.decode(raw_bson.bytes_of(token), codec_options)
            if isinstance(token, RawBSONDocument)
            else copy.deepcopy(token)
        )


class MissingTokenError(UsageError, pymongo_errors.InvalidOperation):
    """Rule 20: an event came without an ``_id``, so the stream could not be resumed after it. It is over."""


def target_options(client: Any, request: WatchRequest) -> tuple[Any, ...]:
    """Codec options and the like of what the aggregate is sent to: those of the object whose ``watch`` was called
    (rules 6 and 27), giving raw documents."""
    of_user = client if request.target is None else request.target
    raw: CodecOptions[Any] = request.codec_options.with_options(document_class=RawBSONDocument)
    if client._event_listeners is not None and client._event_listeners.enabled_for_commands:
        raw = request.codec_options  # listeners see decoded replies, as PyMongo's stream decodes them
    return raw, of_user.read_preference, of_user.write_concern, of_user.read_concern


def _command_options(request: WatchRequest) -> dict[str, Any]:
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
def translated(client: Any) -> Iterator[None]:
    """Inside, PyMongo's errors are raised as ours too."""
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
