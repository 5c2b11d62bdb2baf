"""What command listeners learn about a stream that we make: the commands that the server's own stream would have sent.

A program that counts a stream's aggregates or logs its getMores goes on doing so. The reading of the oplog itself runs
on connections that nobody listens to.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import bson
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError
from tailrace.read.source.time_limit import TimeLimitError, limit_s, remaining_s
from tailrace.watch.client.request import STAGE_NAMES, WatchRequest
from tailrace.watch.client.resume import get_more_wait_ms
from tailrace.watch.client.session import StreamSession, known_clock

#: After these the server has no cursor any more.
_CURSOR_IS_GONE: Final = (43, 175, 237)
_STARTS: Final = ("resumeAfter", "startAfter", "startAtOperationTime")
_ID_MAX: Final = (1 << 63) - 1


class StreamCommands:
    """The commands of one stream, told to the listeners of the client that it was asked of."""

    def __init__(self, listeners: Any, request: WatchRequest) -> None:
        self._listeners = listeners
        self._request = request
        self._address: tuple[str, int | None] = ("", None)
        self._cursor_id = 0
        self._session = StreamSession(request.session)
        self._under_way: tuple[str, int, float] | None = None
        #: Gives the ``$clusterTime`` of each client that reads for the stream; set by the code that knows them.
        self.clocks: Callable[[], Iterable[Mapping[str, Any] | None]] = tuple
        self._reached = ClusterTime(0)

    @property
    def waits(self) -> bool:
        """Whether a command was sent and not answered yet."""
        return self._under_way is not None

    def aggregate(self, address: tuple[str, int | None], start: Mapping[str, Any]) -> None:
        """An aggregate is sent, with this starting point (rules 2 to 4)."""
        request, scope = self._request, self._request.scope
        self._address = address
        values = {name: getattr(request, parameter) for parameter, name in STAGE_NAMES.items()}
        stage = {name: value for name, value in values.items() if value is not None} | dict(request.options or {})
        stage = {name: value for name, value in stage.items() if name not in _STARTS} | dict(start)
        if scope.database is None:
            stage["allChangesForCluster"] = True
        command: dict[str, Any] = {"aggregate": scope.collection or 1}
        command["pipeline"] = [{"$changeStream": stage}, *request.pipeline]
        command["cursor"] = {} if request.batch_size is None else {"batchSize": request.batch_size}
        collation = request.collation_document()
        if collation is not None:
            command["collation"] = bson.decode(collation)
        left_s = remaining_s()
        if left_s is not None:
            command["maxTimeMS"] = int(left_s * 1000)  # rule 31
        self._start("aggregate", self._completed(command))

    def get_more(self, token: bytes) -> None:
        """A getMore is sent (rules 12 and 13), unless one is under way: each look is one getMore, however often it
        reads. An aggregate under way has given nothing then; ``token`` is the stream's."""
        if self._under_way is not None:
            if self._under_way[0] == "getMore":
                return
            self.answered(bson.decode(token), [])
        request = self._request
        command: dict[str, Any] = {"getMore": bson.Int64(self._cursor_id), "collection": self._collection}
        if request.batch_size:
            command["batchSize"] = request.batch_size
        wait_ms = get_more_wait_ms(request.max_await_time_ms, limit_s(), remaining_s(), 0.0)
        if wait_ms is not None:
            command["maxTimeMS"] = wait_ms
        self._start("getMore", self._completed(command))

    def answered(self, token: Any, events: list[bytes], *, is_last: bool = False) -> None:
        """The command under way has given these events; ``is_last``: and has ended the cursor (rule 14)."""
        if self._under_way is None:
            return
        name = self._under_way[0]
        if name == "aggregate":
            self._cursor_id = random.randint(1, _ID_MAX)
        if is_last:
            self._cursor_id = 0
        batch = [self._decoded(event) for event in events]
        token = batch[-1].get("_id", token) if batch else token
        self._reached = max(self._reached, _time_of(token))
        cursor = {
            "firstBatch" if name == "aggregate" else "nextBatch": batch,
            "postBatchResumeToken": token,
            "id": bson.Int64(self._cursor_id),
            "ns": f"{self._database}.{self._collection}",
        }
        self._end({"cursor": cursor, "ok": 1.0})

    def _decoded(self, event: bytes) -> Any:
        """As PyMongo's listeners see it: decoded by the stream's codec options."""
        try:
            return bson.decode(event, self._request.codec_options)
        except (BSONError, ValueError, OverflowError, TypeError):
            return RawBSONDocument(event)  # the reader of the stream gets the error

    def failed(self, error: Exception) -> None:
        """The command under way has failed; PyMongo would close a cursor that is still there (rule 29)."""
        if self._under_way is None:
            return
        failure = _failure_document(error)
        if "code" in failure:  # a server's reply; otherwise none has answered
            failure = {**self._times(), **failure}
        name, number, since = self._under_way
        self._under_way = None
        self._listeners.publish_command_failure(
            timedelta(seconds=time.monotonic() - since),
            failure,
            name,
            number,
            self._address,
            None,
            database_name=self._database,
        )
        if not isinstance(error, OperationFailure) or error.code in _CURSOR_IS_GONE:
            self._cursor_id = 0
        self.close()

    def close(self) -> None:
        """The cursor is closed (rule 14)."""
        if self._cursor_id and self._under_way is None:
            number, self._cursor_id = bson.Int64(self._cursor_id), 0
            self._start("killCursors", {"killCursors": self._collection, "cursors": [number]})
            self._end({"cursorsKilled": [number], "cursorsNotFound": [], "cursorsAlive": [], "ok": 1.0})

    @property
    def _database(self) -> str:
        return self._request.scope.database or "admin"

    @property
    def _collection(self) -> str:
        return self._request.scope.collection or "$cmd.aggregate"

    def _completed(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._request.comment is not None:
            command["comment"] = self._request.comment
        preference = self._request.read_preference
        if preference is not None and preference.mode:
            command["$readPreference"] = preference.document
        return command

    def _start(self, name: str, command: dict[str, Any]) -> None:
        command["lsid"] = self._session.identity  # rule 15
        clock = self._clock()
        if clock is not None:
            command["$clusterTime"] = clock
        number = random.randint(1, (1 << 31) - 1)
        self._under_way = (name, number, time.monotonic())
        self._listeners.publish_command_start(
            command | {"$db": self._database}, self._database, number, self._address, None
        )

    def _end(self, reply: dict[str, Any]) -> None:
        assert self._under_way is not None
        name, number, since = self._under_way
        self._under_way = None
        self._listeners.publish_command_success(
            timedelta(seconds=time.monotonic() - since),
            reply | self._times(),
            name,
            number,
            self._address,
            None,
            database_name=self._database,
        )

    def _clock(self) -> Mapping[str, Any] | None:
        """The newest ``$clusterTime`` that any client of the stream was sent."""
        known = [clock for clock in (known_clock(self._request.client), *self.clocks()) if clock is not None]
        return max(known, key=_time_in, default=None)

    def _times(self) -> dict[str, Any]:
        """What each reply of a replica set contains: its clock, and the time up to which it was read."""
        clock = self._clock()
        if clock is None:
            return {}
        # A token may be one tick later than anything that has happened.
        reached = min(self._reached.to_timestamp(), _time_in(clock)) if self._reached else _time_in(clock)
        return {"operationTime": reached, "$clusterTime": clock}


def _time_in(clock: Mapping[str, Any]) -> Timestamp:
    found: Timestamp = clock["clusterTime"]
    return found


def _time_of(token: Any) -> ClusterTime:
    """The cluster time of a resume token; 0 where the caller's stages have changed it to something else."""
    try:
        return ResumeToken.parse(bson.encode(token)).cluster_time
    except (TailraceError, BSONError, TypeError, ValueError):
        return ClusterTime(0)


def _failure_document(error: Exception) -> Mapping[str, Any]:
    if isinstance(error, OperationFailure) and error.details:
        return error.details
    if isinstance(error, TailraceError) and error.code is not None:
        return {"ok": 0.0, "errmsg": error.message, "code": error.code, "codeName": error.code_name}
    return {"errmsg": str(error), "errtype": type(error).__name__}


def starts_said(request: WatchRequest) -> dict[str, Any]:
    """The starting points that the caller has given, by the server's names."""
    said = {name: getattr(request, parameter) for parameter, name in STAGE_NAMES.items()}
    return {name: said[name] for name in _STARTS if said[name] is not None}


@contextmanager
def telling_refusals(request: WatchRequest) -> Iterator[None]:
    """Inside, a stream is checked before anything is opened: an error with a code is that of its aggregate,
    and so is the end of the caller's time."""
    try:
        yield
    except TailraceError as error:
        was_sent = error.code is not None or isinstance(error, TimeLimitError)
        commands = commands_of(request) if was_sent else None
        if commands is not None:
            commands.aggregate(("", None), starts_said(request))
            commands.failed(error)
        raise


def commands_of(request: WatchRequest) -> StreamCommands | None:
    """Who is notified of the stream's commands; ``None`` where nobody listens."""
    listeners = getattr(request.client, "_event_listeners", None)  # PyMongo has no public name for telling them
    if listeners is None or not listeners.enabled_for_commands:
        return None
    return StreamCommands(listeners, request)
