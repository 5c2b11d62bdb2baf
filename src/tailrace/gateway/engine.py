"""The change streams of a gateway: their cursors, their owners, and the work for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pymongo import MongoClient

from tailrace import raw_bson
from tailrace.client import kernel_loader
from tailrace.cursor import Acting, Action, CursorRegistry, NeedStart
from tailrace.cursor.get_more import GetMoreCommand
from tailrace.cursor.reply import RESUMABLE_CODES, error_reply
from tailrace.errors import InternalError, ServerError, TailraceError
from tailrace.gateway.attendant import LoopAttendant
from tailrace.gateway.cluster_reading import ClusterReading
from tailrace.gateway.generic_fields import api_text
from tailrace.gateway.log import note
from tailrace.gateway.metrics import GatewayMetrics
from tailrace.gateway.reading import (
    INLINE_BYTES,
    AheadRoom,
    Keeper,
    OplogReading,
    Reading,
    Threads,
    Waker,
    aside_for,
    in_thread,
    now_ms,
)
from tailrace.gateway.replies import ServerClock
from tailrace.gateway.rights import User
from tailrace.gateway.upstream import APP_NAME
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.profile import profile_for
from tailrace.source.mongod import MongodSource
from tailrace.source.topology import Cluster
from tailrace.source.uri import ConnectionString
from tailrace.tail.shard_tails import ShardTails
from tailrace.tail.shared_tail import WINDOW_BYTES, SharedTail, TailStatistics

_WORK_THREADS: Final = 2
_READ_THREADS: Final = 16
#: How long the shared read goes on after the last stream was closed.
_LINGER_S: Final = 30.0
_EXPIRE_S: Final = 10.0
_CLOSE_S: Final = 2.0
#: For a smaller batch, of about sixteen entries, the compiled code takes longer than the plain stages, because of the
#: fixed work for each batch. Most batches of a gateway have one entry.
_KERNEL_BYTES_MIN: Final = 8_192

#: How a reply to a getMore is laid out: where its array begins; what follows it; where in the token its text begins.
_NEXT_BATCH: Final = b"\x04nextBatch\x00"
_ARRAY_AT: Final = 27
_TOKEN: Final = b"\x03postBatchResumeToken\x00"
_DATA_AT: Final = 15

SHUTTING_DOWN: Final = 91
_TOO_MANY: Final = 146

_log = logging.getLogger("tailrace.gateway")


class Owner(NamedTuple):
    """Who owns a cursor: the users of the connection that opened it, and their session.

    ``session``  the value of ``lsid``'s ``id``, ``None`` without a session
    """

    users: frozenset[User]
    session: bytes | None


@dataclass(eq=False, slots=True)
class ServedStream:
    """A cursor of the gateway.

    ``opened``  when, seconds since 1970
    ``events``  how many were sent
    ``api``      the API parameters with which it was opened, as text
    ``is_busy``  a command is working on it
    ``is_ended``  its session has ended, and it will soon be closed
    """

    cursor_id: int
    owner: Owner
    scope: Scope
    namespace: str
    reading: Reading
    api: str = "{}"
    opened: float = field(default_factory=time.time)
    events: int = 0
    is_busy: bool = False
    is_ended: bool = False


class Engine:
    """Carries out the commands of change streams. Belongs to the event loop in which it was made.

    ``client``        reads the deployment that ``uri`` names
    ``cursors_max``   how many streams may be open
    ``window_bytes``  how much of the oplog's end is kept for streams that share the read
    """

    def __init__(
        self,
        client: MongoClient[Any],
        uri: ConnectionString,
        metrics: GatewayMetrics,
        *,
        cursors_max: int,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._client = client
        self._uri = uri
        self.metrics = metrics
        self._cursors_max = cursors_max
        self._opening = 0
        self._reading_pool = Threads(_READ_THREADS, thread_name_prefix="tailrace-read")
        self._work_pool = Threads(_WORK_THREADS, thread_name_prefix="tailrace-work")
        self._waker = Waker(asyncio.get_running_loop())
        # Until the kernel is loaded, a read may have to load it, which takes a second: not in the loop.
        self._attendant = LoopAttendant(
            asyncio.get_running_loop(), lambda: kernel_loader.is_ready(0) or kernel_loader.is_missing()
        )
        tails: Any = {
            "window_bytes": window_bytes,
            "on_read": kernel_loader.is_ready,
            "streams_min": 1,
            "attendant": self._attendant,
        }
        self._shared = SharedTail(client, filters=True, **tails)
        self._shard_tails = ShardTails(**tails)
        self._ahead_room = AheadRoom()
        self._cluster: Cluster | None = None
        #: The tails that are kept going, by the client that reads them.
        self._kept: dict[MongoClient[Any], tuple[SharedTail, Keeper]] = {}
        self._idle_since: float | None = None
        self._registry: CursorRegistry | None = None
        self._minding: asyncio.Task[None] | None = None
        #: The error that streams get once the gateway stops.
        self.stopping: TailraceError | None = None
        #: Major and minor version of the server.
        self.version = (6, 0)
        self.streams: dict[int, ServedStream] = {}
        self.clock = ServerClock()

    async def start(self) -> None:
        """Connect. Raises TailraceError if the deployment cannot be read."""
        version = await in_thread(self._reading_pool, self._connected)
        profile = profile_for(version)
        self.version = profile.version
        self.clock.operation_time_first = profile.version < (5, 0)
        self._registry = CursorRegistry(_new_ids(), profile, kernel=_kernel_works_on)
        self._minding = asyncio.create_task(self._mind())

    def _connected(self) -> str:
        """The server version whose streams are given. Missing rights to read the oplog are found here."""
        cluster = self._cluster = Cluster.discover(self._client, self._uri, {"appname": APP_NAME})
        source = MongodSource(self._client if cluster is None else cluster.config_client())
        source.oldest()
        kernel_loader.prepare()  # before anybody is served
        return source.server_version if cluster is None else cluster.server_version()

    # -- commands ---------------------------------------------------------------------------------------------------

    async def aggregate(self, owner: Owner, database: str, command: bytes) -> bytes | None:
        """Open a stream. Returns the reply without the server's times; ``None``: the server is to answer."""
        if len(self.streams) + self._opening >= self._cursors_max:
            return self.refused(
                ServerError(
                    f"this gateway has {self._cursors_max} change streams open, which is its limit", code=_TOO_MANY
                )
            )
        if self.stopping is not None:
            return self.refused(self.stopping)
        self._idle_since = None
        opening = _Opening(self)
        self._opening += 1
        try:
            acting = self._cursors.run(database, command, now_ms())
            reply = await self._carried_out(acting, opening, len(command))
        except BaseException:
            opening.close()
            raise
        finally:
            self._opening -= 1
        cursor = _cursor_of(reply)
        if _is_left(cursor.code):
            self.metrics.fallbacks["refused"] += 1
            opening.close()
            return None
        if cursor.cursor_id == 0 or opening.reading is None or opening.scope is None:
            opening.close()
        else:
            stream = ServedStream(
                cursor.cursor_id, owner, opening.scope, cursor.namespace, opening.reading, api_text(command)
            )
            self.streams[cursor.cursor_id] = stream
            self.metrics.streams_opened += 1
            note("stream opened", **_noted(stream))
        self._count(reply, cursor)
        return reply

    async def get_more(
        self, stream: ServedStream, database: str, command: bytes, wanted: GetMoreCommand | None = None
    ) -> bytes:
        """The next batch of a stream that the caller may read; the reply without the server's times. ``wanted``: what
        ``command`` asks for, if that is known already."""
        was_busy, stream.is_busy = stream.is_busy, True
        if not was_busy:  # or one that was told to end its wait would wait on
            stream.reading.rest()
        try:
            acting = self._cursors.get_more(database, command, now_ms(), wanted)
            reply = await self._carried_out(acting, stream.reading, len(command))
        finally:
            stream.is_busy = was_busy
            self._forget_closed(stream)
        cursor = _next_of(reply) or _cursor_of(reply)
        stream.events += cursor.events
        self._count(reply, cursor)
        return reply

    def kill(self, streams: list[ServedStream]) -> None:
        """Close streams. A getMore that waits comes back at once, with 237."""
        if not streams:
            return
        ids = [raw_bson.encode_int64(stream.cursor_id) for stream in streams]
        array = raw_bson.encode_document(
            *(raw_bson.encode_element(raw_bson.INT64, b"%d" % i, each) for i, each in enumerate(ids))
        )
        self._cursors.kill_cursors(
            raw_bson.encode_document(
                raw_bson.encode_element(raw_bson.STRING, b"killCursors", raw_bson.encode_string("")),
                raw_bson.encode_element(raw_bson.ARRAY, b"cursors", array),
            )
        )
        for stream in streams:
            stream.reading.hurry()
            if not stream.is_busy:
                self._forget_closed(stream)
            else:
                self.streams.pop(stream.cursor_id, None)
                note("stream killed", **_noted(stream), events=stream.events)

    def refused(self, error: TailraceError, *, in_stream: bool = True) -> bytes:
        """The reply that says which cursors were killed."""
        self.metrics.errors[error.code or 0] += 1
        return error_reply(error, in_stream=in_stream, version=self.version)

    def stamped(self, reply: bytes) -> bytes:
        """A reply with the server's times, as the tail of the oplog or a client's connection received them."""
        for shared, _ in self._kept.values():
            document = shared.clock
            if document is not None:
                self.clock.saw(document)
        return self.clock.stamp(reply, _reached(reply))

    def tail_statistics(self) -> TailStatistics:
        """How the shared reads are doing. May be called from any thread; updates the metrics too."""
        found = TailStatistics.total([self._shared.statistics, self._shard_tails.statistics])
        self.metrics.saw_tail(found)
        self.metrics.streams = len(self.streams)
        return found

    def stop(self) -> None:
        """End every stream with an error after which drivers resume; streams that wait end now."""
        self.stopping = ServerError("the gateway is shutting down", code=SHUTTING_DOWN)
        for stream in self.streams.values():
            stream.reading.ending = self.stopping
            stream.reading.hurry()

    def give_up(self) -> None:
        """Stop waiting for threads that still wait for the server."""
        self._reading_pool.given_up = self._work_pool.given_up = True

    async def close(self) -> None:
        """Close everything. Does not wait for reads that are under way."""
        if self._minding is not None:
            self._minding.cancel()
            with suppress(asyncio.CancelledError):
                await self._minding
        for stream in list(self.streams.values()):
            stream.reading.close()
        self.streams.clear()
        self._let_go()
        self._attendant.close()
        self._shared.close()
        self._shard_tails.close()
        if self._cluster is not None:
            await aside_for(self._cluster.close, _CLOSE_S)
        self._work_pool.shutdown(wait=False, cancel_futures=True)
        self._reading_pool.shutdown(wait=False)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _cursors(self) -> CursorRegistry:
        if self._registry is None:
            raise InternalError("the engine was not started")
        return self._registry

    def open_reading(self, scope: Scope) -> Reading:
        """What a new stream of ``scope`` reads."""
        if self._cluster is not None:
            return ClusterReading(
                self._reading_pool, self._waker, self._cluster, self._shard_tails, scope, keep=self._keep
            )
        self._keep(self._client, self._shared)
        return OplogReading(self._reading_pool, self._waker, self._client, self._shared, scope, ahead=self._ahead_room)

    def _keep(self, client: MongoClient[Any], shared: SharedTail) -> None:
        if client not in self._kept:
            self._kept[client] = shared, Keeper(client, shared)

    def _let_go(self) -> None:
        for _, keeper in self._kept.values():
            keeper.close()
        self._kept.clear()

    async def _carried_out(self, acting: Acting, answering: Reading | _Opening, size: int) -> bytes:
        """Drive a command to its reply. Large batches are worked on in a thread."""
        answer: Any = None
        error: TailraceError | None = None
        try:
            while True:
                if size > INLINE_BYTES:
                    action, reply = await in_thread(self._work_pool, _advance, acting, answer, error)
                else:
                    action, reply = _advance(acting, answer, error)
                if reply is not None:
                    return reply
                answer = error = None
                try:
                    answer = await answering.answer(action)
                except TailraceError as caught:
                    error = caught
                size = _size_of(answer)
        except InternalError as caught:
            _log.exception("a change stream has failed")
            return error_reply(caught, in_stream=True, version=self.version)  # the caller counts it
        finally:
            acting.close()

    def _forget_closed(self, stream: ServedStream) -> None:
        if stream.cursor_id not in self._cursors:
            stream.reading.close()
            if self.streams.get(stream.cursor_id) is stream:
                del self.streams[stream.cursor_id]
                note("stream closed", **_noted(stream), events=stream.events)

    def _count(self, reply: bytes, cursor: _Cursor) -> None:
        metrics = self.metrics
        metrics.streams = len(self.streams)
        if cursor.code is not None:
            metrics.errors[cursor.code] += 1
            return
        metrics.batches += 1
        metrics.events += cursor.events
        metrics.event_bytes += len(reply) if cursor.events else 0

    async def _mind(self) -> None:
        """Now and then, close streams that nobody asks for, and note the server's clock."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self.kill([stream for stream in self.streams.values() if stream.is_ended])
            gone = self._cursors.expire(now_ms())
            if gone:
                self.metrics.cursors_expired += gone
                for stream in list(self.streams.values()):
                    if not stream.is_busy:
                        self._forget_closed(stream)
            self.metrics.streams = len(self.streams)
            now = time.monotonic()
            if self.streams or self._opening or not self._kept:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = now
            elif now - self._idle_since > _LINGER_S:
                self._let_go()


class _Opening:
    """Answers a cursor that is being opened: its first question shows what it reads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scope: Scope | None = None
        self.reading: Reading | None = None

    async def answer(self, action: Action) -> Any:
        if isinstance(action, NeedStart):
            self.scope = action.scope
            self.reading = self._engine.open_reading(action.scope)
        if self.reading is None:
            raise InternalError("a cursor asks before it says what it is over")
        return await self.reading.answer(action)

    def close(self) -> None:
        if self.reading is not None:
            self.reading.close()


class _Cursor(NamedTuple):
    """What a reply says of its cursor; ``code`` if it is an error instead."""

    cursor_id: int
    namespace: str
    events: int
    code: int | None


#: The cursors of replies to a getMore that hold no event, and one.
_NOTHING: Final = _Cursor(0, "", 0, None)
_ONE_EVENT: Final = _Cursor(0, "", 1, None)


def _is_left(code: int | None) -> bool:
    """Whether the server is to answer an aggregate that the engine refuses with ``code``. A command with a fault may
    have a second one, and which of them is reported depends on the order of the server's checks. Besides, the server
    supports some of what the engine does not. An error after which drivers resume is about the stream, not the
    command."""
    return code is not None and code not in RESUMABLE_CODES


def _kernel_works_on(size: int) -> bool:
    """As ``kernel_loader.works_on``."""
    return kernel_loader.is_ready(size) and not 0 < size < _KERNEL_BYTES_MIN


def _next_of(reply: bytes) -> _Cursor | None:
    """How many events our own reply to a getMore has, where they are none or one; ``None``: look at all of it."""
    if not reply.startswith(_NEXT_BATCH, _ARRAY_AT - len(_NEXT_BATCH)):
        return None
    size = raw_bson.read_int32(reply, _ARRAY_AT)
    if size == len(raw_bson.EMPTY_DOCUMENT):
        return _NOTHING
    # An array of one document is that, the element's type and name, its own length and its end.
    return _ONE_EVENT if raw_bson.read_int32(reply, _ARRAY_AT + 7) == size - 8 else None


def _cursor_of(reply: bytes) -> _Cursor:
    found = raw_bson.find(reply, b"cursor")
    if found is None:
        code = raw_bson.find(reply, b"code")
        return _Cursor(0, "", 0, 0 if code is None else raw_bson.read_int32(reply, code.value_start))
    cursor_id, namespace, events = 0, "", 0
    for element in raw_bson.elements(reply, found.value_start):
        if element.name == b"id":
            cursor_id = raw_bson.read_int64(reply, element.value_start)
        elif element.name == b"ns":
            namespace = raw_bson.read_string(reply, element.value_start).decode("utf-8", "replace")
        elif element.name in (b"firstBatch", b"nextBatch"):
            events = sum(1 for _ in raw_bson.elements(reply, element.value_start))
    return _Cursor(cursor_id, namespace, events, None)


def _reached(reply: bytes) -> ClusterTime:
    """The cluster time of a reply's resume token: the stream was read up to there. 0 if there is none."""
    if reply.startswith(_NEXT_BATCH, _ARRAY_AT - len(_NEXT_BATCH)):  # our own replies to a getMore: nothing to look for
        at = _ARRAY_AT + raw_bson.read_int32(reply, _ARRAY_AT)
        if reply.startswith(_TOKEN, at):
            at += len(_TOKEN) + _DATA_AT
            return ClusterTime(int(reply[at + 2 : at + 18], 16))
    cursor = raw_bson.find(reply, b"cursor")
    token = None if cursor is None else raw_bson.find(reply, b"postBatchResumeToken", cursor.value_start)
    data = None if token is None else raw_bson.find(reply, b"_data", token.value_start)
    if data is None:
        return ClusterTime(0)
    # The first value of a token is its time, most significant byte first, behind the byte of its type.
    return ClusterTime(int(raw_bson.read_string(reply, data.value_start)[2:18], 16))


def _noted(stream: ServedStream) -> dict[str, Any]:
    """What is logged of a stream."""
    return {
        "cursor": stream.cursor_id,
        "ns": stream.namespace,
        "users": [f"{user}@{database}" for user, database in sorted(stream.owner.users)],
    }


def _advance(acting: Acting, answer: Any, error: TailraceError | None) -> tuple[Any, bytes | None]:
    """One step of a command: what it asks for, or its reply."""
    try:
        return (acting.send(answer) if error is None else acting.throw(error)), None
    except StopIteration as end:
        return None, end.value


def _size_of(answer: Any) -> int:
    batch = getattr(answer, "batch", None)
    if batch is not None:
        return len(batch.raw)
    return sum(len(each or b"") for each in answer) if isinstance(answer, list) else 0


def _new_ids() -> Iterator[int]:
    """Like the server's: positive, of 63 random bits, so that none can be guessed and no two are equal."""
    while True:
        number = secrets.randbits(63)
        if number:
            yield number
