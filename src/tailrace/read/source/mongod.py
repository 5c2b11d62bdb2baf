"""Entries from a running replica set: ``local.oplog.rs`` in raw batches, majority-committed only.

An entry that is majority-committed is in the oplog of every member that can be elected, so the reader may go from
member to member: it asks the next one for everything from the last entry given, that one included. When that entry
comes first, nothing is missing between; when it does not, either the oplog was truncated (286) or another oplog
answers. How cursors behave at the end of the oplog and under truncation is measured on mongod 6.0.27.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import bson
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.cursor import CursorType, RawBatchCursor
from pymongo.errors import AutoReconnect, PyMongoError

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.history import history_lost, reaches_back
from tailrace.core.oplog.witness import EntryMark
from tailrace.core.plan.profile import for_people, profile_for
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.errors import OtherHistoryError, OtherVersionError, SourceError
from tailrace.read.source.batch import BATCH_BYTES_MAX, cut, entry_time, is_initiating_set
from tailrace.read.source.compatibility import server_version
from tailrace.read.source.connection import RETRY_SECONDS, Connection
from tailrace.read.source.failure import Backoff
from tailrace.read.source.live import OnFailedCommand
from tailrace.read.source.lookup import current_documents, refuse_view, stored_pre_images
from tailrace.read.source.member_version import MemberVersion, MemberVersions, present_member
from tailrace.read.source.next_reply import Replies
from tailrace.read.source.raw_reply import RawReplyCursor
from tailrace.read.source.time_limit import remaining_s
from tailrace.read.source.uri import ConnectionString
from tailrace.read.source.window import Window

AWAIT_MS: Final = 1000
#: One wait of the server; a longer ``await_ms`` is made of several, so that no socket time-out cuts it.
_AWAIT_MS_MAX: Final = 10_000
#: PyMongo's flag for an exhaust cursor; none of its cursor types combines this with awaitData.
_EXHAUST: Final = 64
_SAME_MEMBER_TRIES: Final = 10
#: How long, at most, one wait for an entry to be committed takes; an interrupted read ends after it.
_COMMITTED_S: Final = 0.25


class _Position(NamedTuple):
    """Where a reader stands: after which time; the entry of that time if it has given it; whether the deployment is
    known to have reached it."""

    after: ClusterTime
    entry: bytes | None
    reached: bool


class _AnotherPrimary(Exception):  # noqa: N818  no error: the read goes on at another member
    """Another member is primary than the one that is read."""


class MongodSource:
    """One replica set's oplog, and its images and documents.

    ``deployment``     a connection URI, or a PyMongo client (which stays open when the source is closed)
    ``retry_seconds``  how long a read is tried again without progress; ``tail`` never gives up once it has begun
    ``waits``          whether that is so where no member can be reached, too: otherwise the client's own patience is
                       all, and the SourceError has the label of what may be resumed
    ``pushed``         at the end of the oplog the server sends each reply without being asked (an exhaust cursor): less
                       work on both sides, but the connection is this reader's own. Not with OIDC
    ``reads_ahead``    while the caller of ``tail`` works on a long reply, the next is read in a thread
    ``options``        PyMongo's client options, for a URI

    Connects at first use; a deployment that cannot be read then is a SourceError. Not for several threads at a time.
    """

    def __init__(
        self,
        deployment: str | ConnectionString | MongoClient[Any],
        *,
        retry_seconds: float = RETRY_SECONDS,
        waits: bool = True,
        pushed: bool = False,
        reads_ahead: bool = False,
        **options: Any,
    ) -> None:
        self._pushed = pushed
        self._reads_ahead = reads_ahead and not pushed
        self._connection = Connection(deployment, retry_seconds=retry_seconds, waits=waits, options=options)
        self._tailing: RawReplyCursor | None = None
        self._versions = MemberVersions(self._connection.client)
        #: Which version the entries are to come from, and that of the member that was read last.
        self._expected: MemberVersion | None = None
        #: Whether the next member that is read says it.
        self._takes_first = False
        self.read_version: MemberVersion | None = None
        #: Whether the caller that asks for the next batch can wait.
        self._may_wait = True
        #: The bytes of the reply that ``tail`` is giving.
        self._reply_bytes = 0

    @property
    def client(self) -> MongoClient[Any]:
        """The PyMongo client that the source reads with."""
        return self._connection.client

    @property
    def name(self) -> str:
        """The replica set's name."""
        return self._connection.name

    @property
    def server_version(self) -> str:
        """See ``tailrace.read.source.compatibility``."""
        return server_version(self._connection)

    def expect_version(self, version: str | Sequence[int] | None) -> None:
        """Read from members alone that give the events of this version: ``tail`` and ``read`` raise OtherVersionError
        where they come to another, before they give anything of its entries. ``None``: from members of any version."""
        self._expected, self._takes_first = None if version is None else MemberVersion.whole(version), False

    def expect_present_version(self) -> None:
        """As ``expect_version``, of the version that the primary has now, as PyMongo knows it; where other members may
        be read, of the version of the first one that is."""
        member = present_member(self.client) if self._connection.reads_primary else None
        self._expected = None if member is None else MemberVersion.of_series(member.series)
        self._takes_first = self._expected is None

    def version_read(self) -> str:
        """The server version whose change streams a client would get where this source reads: that of the member that
        was read last, as far as it is known; the primary's whole version, if this can be the same."""
        version, read = self.server_version, self.read_version
        if read is None or (not read.is_whole and profile_for(version) in read.profiles):
            return version
        return read.text

    @property
    def trouble(self) -> str | None:
        """Why nothing can be read at the moment: the members and the state of each. ``None`` while reading goes
        well."""
        return self._connection.trouble

    @property
    def clock_document(self) -> Mapping[str, Any] | None:
        """The ``$clusterTime`` of the last reply to ``tail``, with its signature as the member sent it."""
        clock = self.clock
        return None if clock is None else bson.decode(clock)

    @property
    def clock(self) -> bytes | None:
        """``clock_document`` as the member sent it."""
        return None if self._tailing is None else self._tailing.clock

    def pushed_socket(self, batch: OplogBatch) -> socket.socket | None:
        """A handle of the connection on which ``tail`` will find its next batch after ``batch``, if the server pushes
        it; else ``None``. Once something can be read there, call ``take_pushed``. The caller closes the handle."""
        cursor = self._tailing
        return None if cursor is None or len(batch.raw) != self._reply_bytes else cursor.pushed_socket()

    def take_pushed(self, view: socket.socket) -> bool | None:
        """True: ``tail`` gives its next batch without waiting. ``None``: nothing has come. False: it may wait."""
        cursor = self._tailing
        if cursor is None or self._versions.compatibility.is_due:
            return False
        taken = cursor.take_pushed(view)
        self._may_wait = not taken
        return taken

    @property
    def has_pushed_more(self) -> bool:
        """Whether there was more after what ``take_pushed`` has taken."""
        return self._tailing is not None and self._tailing.has_pushed_more

    def await_time(self, until: ClusterTime) -> None:
        """The caller of ``tail`` waits for everything up to ``until``, and wants a batch that says so, an empty one
        too. Here nothing is to be done: each entry comes in a batch."""

    def wait_until_reachable(self) -> None:
        """Wait for a member that can be read, for ``retry_seconds`` or until ``interrupt``. Raises SourceError as
        ``name`` does."""
        self._connection.wait_for_hello()

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` was called."""
        return self._connection.interrupted

    def interrupt(self) -> None:
        """End ``tail`` and ``read`` for good, from any thread: they end or raise SourceError as soon as their wait is
        over. A server's wait for entries cannot be cut short, not even by killCursors (6.0.27)."""
        self._connection.interrupted = True

    def operation_time(self) -> ClusterTime:
        """The time of the last entry that the member has applied, committed or not: where a stream without a starting
        point begins, one tick later."""
        reply = self._connection.retrying(
            lambda: self.client.admin.command("ping", read_preference=self.client.read_preference)
        )
        return ClusterTime.from_timestamp(reply["operationTime"])

    def oldest(self) -> tuple[ClusterTime, bool]:
        time, complete, _ = self._connection.retrying(self._oldest)
        return time, complete

    def newest(self) -> ClusterTime:
        return self._connection.retrying(self._newest)[0]

    def read(
        self,
        after: ClusterTime,
        until: ClusterTime,
        *,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
        entry: bytes | None = None,
    ) -> Iterator[OplogBatch]:
        """See OplogSource. The last batch's high water is ``until``; it is empty when no entry has that time.

        ``entry``  the entry at ``after``, which was read before: raises OtherHistoryError if another one is there
        """
        if until <= after:
            return
        self._wait_until_committed(until)
        backoff = self._connection.new_backoff()
        window = Window(oplog_filter)
        position = _Position(after, entry, reached=True)
        while position.after < until:
            self._check_interrupted()
            for reached, batch in self._window(position, until, window, backoff, batch_bytes_max):
                position = reached
                yield batch

    def _window(
        self,
        position: _Position,
        until: ClusterTime,
        window: Window,
        backoff: Backoff,
        bytes_max: int,
        *,
        on_error: OnFailedCommand | None = None,
        **extra: Any,
    ) -> Iterator[tuple[_Position, OplogBatch]]:
        """The entries of one window after ``position``, each batch with the position that it leads to. The last one
        leads to the window's end, unless the reading was cut off: then it is empty and leads nowhere."""
        end = window.end(position.after, until)
        try:
            with self._opened(position, until=end, oplog_filter=window.oplog_filter, **extra) as (replies, first):
                for raw in window.timed(_all(replies.cursor, first)):
                    for batch, last in cut(raw, bytes_max):
                        position = _Position(batch.high_water, last, reached=True)
                        backoff.progress()
                        yield position, batch
        except PyMongoError as error:
            window.shrink()
            self._after(error, backoff, on_error)
            yield position, OplogBatch(b"", position.after)
            return
        if position.after < end:
            backoff.progress()
            yield _Position(end, None, reached=True), OplogBatch(b"", end)

    def tail(
        self,
        after: ClusterTime,
        *,
        await_ms: int = AWAIT_MS,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        oplog_filter: bytes | None = None,
        batch_size: int | None = None,
        comment: Any = None,
        on_error: OnFailedCommand | None = None,
    ) -> Generator[OplogBatch, None, None]:
        """See OplogSource. While no member can be read it keeps trying, and gives an empty batch after each attempt.
        The first batch comes at once: what there is already, or nothing.

        ``batch_size`` bounds the entries and ``comment`` marks the commands of the oplog cursor. ``on_error`` is called
        in place of waiting when a command has failed: where it returns, an empty batch is given, and the read is opened
        again when the next one is asked for; what it raises ends the iterator.
        """
        # A reader whose errors somebody decides on reports this first read's too.
        position = None if on_error is not None else _Position(after, None, reached=after <= self.newest())
        backoff = self._connection.new_backoff(for_ever=True)
        extra = {"batch_size": batch_size or 0, "comment": comment}
        window = Window(oplog_filter)
        while True:
            try:
                position = position or _Position(after, None, reached=after <= self._newest()[0])
                # A tailable cursor on a long stretch of which the filter passes nothing would not answer for minutes.
                until = self._newest()[0] if oplog_filter is not None else position.after
                while position.after < until:
                    for reached, batch in self._window(
                        position, until, window, backoff, batch_bytes_max, on_error=on_error, **extra
                    ):
                        if self._connection.interrupted:
                            return
                        position = reached
                        yield batch
                with self._opened(position, await_ms=await_ms, oplog_filter=oplog_filter, **extra) as (replies, first):
                    self._tailing = replies.cursor
                    for raw, seen in self._tailed(replies, first, await_ms, looks=oplog_filter is not None):
                        if self._connection.interrupted:
                            return
                        self._connection.trouble = None
                        backoff.progress()
                        self._reply_bytes = len(raw)
                        for batch, last in cut(raw, batch_bytes_max):
                            position = _Position(batch.high_water, last, reached=True)
                            yield batch
                        if not raw:
                            if seen > position.after:
                                position = _Position(seen, None, reached=True)
                            yield OplogBatch(b"", position.after)
            except _AnotherPrimary:
                continue  # not a failure, and not reported
            except PyMongoError as error:
                self._after(error, backoff, on_error)
                yield OplogBatch(b"", after if position is None else position.after)

    def _after(self, error: PyMongoError, backoff: Backoff, on_error: OnFailedCommand | None) -> None:
        if on_error is None:
            self._connection.endure(error, backoff, self.name)
        else:
            on_error(error)

    def endure(self, error: PyMongoError, backoff: Backoff) -> None:
        """Wait after an error of ``tail``, so that it may be tried again, and say so in the log and in ``trouble``.
        Raises SourceError where waiting cannot help."""
        self._connection.endure(error, backoff, self.name)

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        """The entries at exactly these times, ``None`` where the oplog has none."""
        return self._connection.retrying(lambda: [self._entry(time) for time in times])

    def mark_between(self, after: ClusterTime, until: ClusterTime) -> EntryMark | None:
        """The mark of the entry at ``until``; where there is none, as on a shard that others were ahead of, that of the
        first after ``after``. ``None`` where nothing lies between the two. (The last one before a time cannot be found
        by a seek: a search backwards reads all that is newer, 2 µs an entry on 6.0.27 and 5 on 4.4.2.)"""
        for time in (until, after.tick()):
            found = self._connection.retrying(partial(self._from, time))
            if found is not None and entry_time(found) <= until:
                return EntryMark.of(entry_time(found), found)
        return None

    def pre_images(self, keys: Sequence[PreImageKey]) -> Sequence[bytes | None]:
        """The documents before the operations, from ``config.system.preimages`` (semantics 5)."""
        return stored_pre_images(self._connection, keys)

    def documents(self, lookups: Sequence[DocumentLookup]) -> Sequence[bytes | None]:
        """The current documents, read at majority after the events; ServerError 166 where the name is a view now."""
        return current_documents(self._connection, lookups)

    def confirm_readable(self, database: str, collection: str) -> None:
        """Raises SourceError where this user may not read the collection, whether it exists or not."""
        self._connection.retrying(lambda: self._connection.majority(database, collection).find_one({}, {"_id": 1}))

    def refuse_view(self, database: str, collection: str) -> None:
        """Raises ServerError 166 where the name is a view or a time-series collection now."""
        refuse_view(self._connection, database, collection)

    def close(self) -> None:
        """Close the client, if the source made it. Iterators still open end with an error."""
        self._connection.close()

    def _oplog(self, *, after: ClusterTime | None = None) -> Any:
        return self._connection.majority("local", "oplog.rs", after=after)

    def _oldest(self) -> tuple[ClusterTime, bool, tuple[str, int | None] | None]:
        with closing(self._oplog().find_raw_batches({}, sort=[("$natural", 1)], limit=1)) as cursor:
            raw: bytes = next(cursor, b"")
            if not raw:
                raise SourceError(
                    f"the oplog of replica set {self.name} is empty",
                    hint="Wait until the member has finished starting; if it is an arbiter, name one that holds data",
                )
            return entry_time(raw), is_initiating_set(raw), cursor.address

    def _newest(self) -> tuple[ClusterTime, tuple[str, int | None] | None]:
        with closing(self._oplog().find_raw_batches({}, sort=[("$natural", -1)], limit=1)) as cursor:
            raw: bytes = next(cursor, b"")
            # Right after rs.initiate() nothing is majority-committed yet.
            return entry_time(raw) if raw else ClusterTime(0), cursor.address

    def _entry(self, time: ClusterTime) -> bytes | None:
        raw = self._from(time)
        return raw if raw and entry_time(raw) == time else None

    def _from(self, time: ClusterTime) -> bytes | None:
        """The first entry at ``time`` or after it."""
        # $gte with limit 1 seeks on every server version; $in would scan the oplog.
        query = {"ts": {"$gte": time.to_timestamp()}}
        with closing(self._oplog(after=time).find_raw_batches(query, limit=1)) as cursor:
            raw: bytes = next(cursor, b"")
        return raw or None

    def _wait_until_committed(self, until: ClusterTime) -> None:
        backoff = Backoff(give_up_s=None, wait_s_max=_COMMITTED_S)
        while self.newest() < until:
            self._check_interrupted()
            backoff.wait()

    def _check_interrupted(self) -> None:
        if self.interrupted:
            raise SourceError(f"the read of {self.name} was stopped", hint="Open the stream again")

    @contextmanager
    def _opened(
        self,
        position: _Position,
        *,
        until: ClusterTime | None = None,
        await_ms: int | None = None,
        oplog_filter: bytes | None = None,
        **extra: Any,
    ) -> Iterator[tuple[Replies, bytes]]:
        """The replies of a cursor on the entries after ``position``, and the first of them without the entry at
        ``position`` itself, which is asked for whatever the filter says about it.

        Raises ChangeStreamHistoryLost where the oplog no longer reaches back, SourceError where it never held the last
        entry given.
        """
        window: dict[str, Timestamp] = {"$gte": position.after.to_timestamp()}
        if until is not None:
            window["$lte"] = until.to_timestamp()
        query: dict[str, Any] = {"ts": window}
        if oplog_filter is not None:
            # The condition on ts stands at the top too, where it lets the server begin at its first record.
            query["$or"] = [{"ts": position.after.to_timestamp()}, RawBSONDocument(oplog_filter)]
        wait_for = until or (position.after if position.reached else None)
        options: dict[str, Any] = dict(extra)
        if await_ms is not None:
            options["cursor_type"] = CursorType.TAILABLE_AWAIT
        cursor = RawReplyCursor(self._oplog(after=wait_for), query, **options)
        with closing(Replies(cursor, ahead=self._reads_ahead)) as replies:
            if await_ms is not None:
                cursor.max_await_time_ms(min(await_ms, self._await_ms_max()))
                if self._pushed and _may_push(self.client):
                    cursor.add_option(_EXHAUST)
            first: bytes = next(cursor, b"")
            self._confirm_version(cursor.address)
            end = raw_bson.document_end(first) if first else 0
            if first and entry_time(first) == position.after and position.entry in (None, first[:end]):
                first = first[end:]
            else:
                self._check_history(position, cursor.address)
            yield replies, first

    def _confirm_version(self, address: tuple[str, int | None] | None) -> None:
        """Raises OtherVersionError where the member at ``address`` is not of the version that is expected."""
        version = None if address is None else self._versions.of(address)
        if version is None and self._expected is not None:
            # It was marked as gone since it has answered: PyMongo looks for a member, and asks that one too.
            self.client.admin.command("ping", read_preference=self.client.read_preference)
            version = None if address is None else self._versions.of(address)
            if version is None:
                raise AutoReconnect("the member that was read is gone, and its version is not known")
        if version is None or address is None:
            return
        self.read_version = version
        if self._takes_first:
            self._expected, self._takes_first = version, False
        if self._expected is None:
            return
        common = self._expected.profiles & version.profiles
        if not common:
            raise OtherVersionError(
                f"the member {address[0]}:{address[1]} of {self.name} runs MongoDB {for_people(version.text)}, and the "
                f"events so far were those of {for_people(self._expected.text)}: the deployment is being upgraded",
                hint="Resume the stream: it goes on with the events of the version that it reads",
            )
        if common != self._expected.profiles:
            self._expected = version  # what could be one of several is known now

    def _check_history(self, position: _Position, address: tuple[str, int | None] | None) -> None:
        """The oplog of the member at ``address`` does not show the entry at ``position``: what does that mean?

        The look at its oldest entry comes after the cursor's first reply, so a truncation between the two is seen.
        """
        for _ in range(_SAME_MEMBER_TRIES):
            oldest, complete, looked_at = self._oldest()
            if looked_at == address:
                break
        else:
            raise AutoReconnect("the member changed between two reads")
        if not reaches_back(position.after, oldest, complete):
            raise history_lost(
                f"The oldest entry in the oplog of {self.name} is of {oldest}, and the reader has come to "
                f"{position.after}: what lies between is lost, and it has to start again. Keep a longer oplog "
                "(replSetResizeOplog, minRetentionHours), or read more often"
            )
        if position.entry is not None:
            raise OtherHistoryError(
                f"the oplog of {self.name} does not hold the entry at {position.after} that was read before",
                hint="Another replica set answers under its address, or it was restored: start a new stream",
            )

    def _tailed(
        self, replies: Replies, first: bytes, await_ms: int, *, looks: bool
    ) -> Iterator[tuple[bytes, ClusterTime]]:
        """The cursor's replies, empty ones too, for as long as its member is the one to read from.

        With each comes a time that the cursor has seen everything up to. Where it ``looks``, that is the newest entry's
        time before an empty reply was asked for: the cursor came to the end of the oplog, so it came past that time.
        A pushed reply may have been on its way for long. The server began it after the one before, so it came past that
        one's operation time, and no later time is taken. Of a majority read, that is what was committed when the reply
        was sent, and not what was applied (6.0.27, 5.0.4, 4.4.2).
        """
        cursor, seen = replies.cursor, ClusterTime(0)
        yield replies.given(first), seen
        idle = not first
        while True:
            if looks and idle:
                newest, address = self._newest()
                # Another member may be ahead of this one.
                if address == cursor.address:
                    seen = min(newest, cursor.operation_time) if cursor.is_pushed else newest
            if not cursor.is_pushed:
                cursor.wait_at_most(min(await_ms, self._await_ms_max()))
            raw = replies.next()
            if not cursor.alive:
                raise AutoReconnect("the server closed the cursor at the end of the oplog")
            self._follow_compatibility(cursor.address)
            yield replies.given(raw), seen
            idle = not raw
            # A member that was voted out and then cut off would answer for ever that nothing is new.
            if idle and self._connection.reads_primary and self.client.primary not in (None, cursor.address):
                raise _AnotherPrimary

    def _follow_compatibility(self, address: tuple[str, int | None] | None) -> None:
        """Before a reply is given: the member may be set to another feature compatibility version since it was asked.
        Raises OtherVersionError."""
        may_wait, self._may_wait = self._may_wait, True
        if may_wait and self._versions.compatibility.is_due:
            with suppress(PyMongoError):  # the next reply is soon enough; and what is wrong, the cursor will tell
                self._confirm_version(address)

    def _await_ms_max(self) -> int:
        options = self.client.options
        limits = [limit for limit in (options.pool_options.socket_timeout, options.timeout, remaining_s()) if limit]
        return max(1, min(_AWAIT_MS_MAX, *(int(limit * 500) for limit in limits))) if limits else _AWAIT_MS_MAX


def _may_push(client: MongoClient[Any]) -> bool:
    """Whether the server may push: not where it may ask for a new login in the middle (OIDC). PyMongo waits for the
    next reply then, and none comes."""
    credentials = client.options.pool_options._credentials  # it has no public name
    return credentials is None or credentials.mechanism != "MONGODB-OIDC"


def _all(cursor: RawBatchCursor[Any], first: bytes) -> Iterator[bytes]:
    yield first
    yield from cursor
