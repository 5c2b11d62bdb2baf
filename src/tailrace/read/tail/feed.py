"""One read of an oplog for several processes: one of them reads it, and passes what was read on to the others.

A process that is fed has a shared tail of its own, whose reader is a ``FedReader``. To its streams that is a reader
like any other: where it ends, they read for themselves, and come back when there is another one.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import bson
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.read.source.member_version import MemberVersion
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.entry_index import index_entries
from tailrace.read.tail.reader import Attendant, TailReader
from tailrace.read.tail.segment import Segment

#: A process that has this much left to take is fed no further: its streams read for themselves.
BEHIND_BYTES_MAX: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")
#: Pause before the oplog is read again after the read has ended.
_RETRY_S: Final = 1.0

_log = logging.getLogger("tailrace.tail")


class Fed(NamedTuple):
    """What one reply of the oplog brought, or what was learned since.

    ``after``, ``high_water``  what was read is between
    ``raw``      the entries
    ``begins``   a first one: what follows comes after ``high_water``
    ``version``  of the member that was read; ``None``: as before
    ``clock``, ``trouble``  see ``MongodSource``
    """

    after: int
    high_water: int
    raw: bytes = b""
    begins: bool = False
    version: MemberVersion | None = None
    clock: bytes | None = None
    trouble: str | None = None


class _FeedReader(TailReader):
    """Does not index what it reads: the process that is fed does."""

    def __init__(self, client: MongoClient[Any], feed: OplogFeed, attendant: Attendant) -> None:
        super().__init__(client, feed, lambda size: None, attendant)
        self._feed = feed

    def _pass_on(self, batch: OplogBatch, after: ClusterTime, chains: Chains) -> bool:
        return self._feed.took(self, batch, after)


class OplogFeed:
    """Reads the oplog while somebody is fed, and feeds every process that connects to ``path``. Belongs to an event
    loop.

    ``reads``, ``entries`` and ``bytes`` count what was read.
    """

    def __init__(self, client: MongoClient[Any], path: str, attendant: Attendant) -> None:
        self._client = client
        self._path = path
        self._attendant = attendant
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._server: asyncio.Server | None = None
        self._followers: set[asyncio.StreamWriter] = set()
        self._reader: _FeedReader | None = None
        self._is_closed = False
        #: How far was read; ``None``: nothing yet.
        self._position: int | None = None
        self._version: MemberVersion | None = None
        self.reads = self.entries = self.bytes = 0

    async def start(self) -> None:
        """Feed every process that connects from now on."""
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    @property
    def trouble(self) -> str | None:
        """Why the oplog cannot be read at the moment, in words; ``None`` while it can, or is not read."""
        return None if self._reader is None else self._reader.source.trouble

    @property
    def is_read(self) -> bool:
        """Whether the oplog is read: somebody is fed."""
        return self._reader is not None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._followers.add(writer)
        try:
            if self._position is not None:
                self._write(writer, self._beginning())
            self._read()
            await reader.read()  # it says nothing; the end of it is the end
        finally:
            self._followers.discard(writer)
            writer.close()

    def _beginning(self) -> Fed:
        assert self._position is not None
        return Fed(self._position, self._position, b"", True, self._version, self._clock())

    def _clock(self) -> bytes | None:
        return None if self._reader is None else self._reader.source.clock

    def _read(self) -> None:
        if self._reader is None and not self._is_closed and self._followers:
            self._reader = _FeedReader(self._client, self, self._attendant)
            self._reader.start()

    # -- what the reader tells, in its thread or in the loop ---------------------------------------------------------

    def begun(self, reader: TailReader, after: ClusterTime) -> bool:
        self._post(self._begin, int(after))
        return True

    def opened(self, reader: TailReader, after: ClusterTime) -> bytes | None:
        return None

    def is_to_open_again(self, reader: TailReader) -> bool:
        return False

    def reads_version(self, reader: TailReader, version: MemberVersion) -> None:
        self._post(self._adopt, version)

    def took(self, reader: TailReader, batch: OplogBatch, after: ClusterTime) -> bool:
        """A reply has come."""
        self._post(self._pass, Fed(int(after), int(batch.high_water), batch.raw, clock=reader.source.clock))
        return bool(self._followers) and not self._is_closed

    def received(self, reader: TailReader, segment: Segment) -> bool:
        raise NotImplementedError  # see ``took``

    def promised(self, reader: TailReader, high_water: ClusterTime) -> bool:
        raise NotImplementedError  # see ``took``

    def failed(self, reader: TailReader, error: Exception) -> None:
        self._post(self._tell_trouble, str(error))

    def ended(self, reader: TailReader) -> None:
        self._post(self._end)

    def _post(self, work: Callable[..., None], *args: Any) -> None:
        """In the loop, in order: what a thread has posted comes before what the loop takes after it."""
        if threading.get_ident() == self._thread:
            work(*args)
        else:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(work, *args)

    def _begin(self, after: int) -> None:
        self._position = after
        self._to_all(self._beginning())

    def _adopt(self, version: MemberVersion) -> None:
        self._version = version
        if self._position is not None:
            self._to_all(Fed(self._position, self._position, version=version))

    def _pass(self, fed: Fed) -> None:
        self.reads += bool(fed.raw)
        self.bytes += len(fed.raw)
        self.entries += _entries(fed.raw)
        self._position = fed.high_water
        self._to_all(fed)

    def _tell_trouble(self, text: str) -> None:
        if self._position is not None:
            self._to_all(Fed(self._position, self._position, trouble=self.trouble or text))

    def _end(self) -> None:
        self._reader = self._position = self._version = None
        for writer in list(self._followers):
            writer.close()
        self._followers.clear()

    def _to_all(self, fed: Fed) -> None:
        frame = _frame(fed)
        for writer in list(self._followers):
            self._write(writer, fed, frame)

    def _write(self, writer: asyncio.StreamWriter, fed: Fed, frame: bytes | None = None) -> None:
        transport = writer.transport
        if transport.get_write_buffer_size() > BEHIND_BYTES_MAX:
            _log.warning("a process does not take what was read of the oplog, and reads for itself")
            self._followers.discard(writer)
            transport.abort()
            return
        writer.write(frame or _frame(fed))

    def close(self) -> None:
        """Read no further."""
        self._is_closed = True
        if self._reader is not None:
            self._reader.source.interrupt()
        if self._server is not None:
            self._server.close()
        self._end()


def _frame(fed: Fed) -> bytes:
    data = pickle.dumps(tuple(fed), pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def _entries(raw: bytes) -> int:
    """How many documents there are, one after another."""
    at = count = 0
    while at < len(raw):
        at += max(raw_bson.read_int32(raw, at), 5)
        count += 1
    return count


class FedReceiver(Protocol):
    """As that of a ``TailReader``, for what a fed reader tells."""

    def begun(self, reader: Any, after: ClusterTime) -> bool: ...

    def reads_version(self, reader: Any, version: MemberVersion) -> None: ...

    def received(self, reader: Any, segment: Segment) -> bool: ...

    def promised(self, reader: Any, high_water: ClusterTime) -> bool: ...

    def ended(self, reader: Any) -> None: ...


class FedSource:
    """What a ``SharedTail`` asks of its reader's source."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.trouble: str | None = None
        self.clock: bytes | None = None

    @property
    def clock_document(self) -> Mapping[str, Any] | None:
        return None if self.clock is None else bson.decode(self.clock)


class FedReader:
    """Takes what an ``OplogFeed`` of another process gives at ``path``, in the event loop ``loop``, in the place of a
    ``TailReader``. ``on_read``: called with how many bytes each reply had."""

    def __init__(
        self, path: str, loop: asyncio.AbstractEventLoop, receiver: FedReceiver, on_read: Callable[[int], object]
    ) -> None:
        self.source = FedSource(self._interrupt)
        self._path = path
        self._loop = loop
        self._receiver = receiver
        self._on_read = on_read
        self._chains = Chains()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self) -> None:
        """In any thread."""
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:  # the loop has ended
            self._receiver.ended(self)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    def _interrupt(self) -> None:
        self._is_over = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=1 << 20)
            while not self._is_over:
                size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                if not self._take(Fed._make(pickle.loads(await reader.readexactly(size)))):
                    break
        except (OSError, EOFError):
            pass  # there will be another one
        except Exception:  # noqa: BLE001  nobody else would hear of it, and the streams go on
            _log.exception("what another process has read of the oplog could not be taken")
        finally:
            if writer is not None:
                writer.close()
            self._receiver.ended(self)

    def _take(self, fed: Fed) -> bool:
        """Whether to go on."""
        self.source.clock = fed.clock or self.source.clock
        self.source.trouble = fed.trouble
        after, high_water = ClusterTime(fed.after), ClusterTime(fed.high_water)
        if fed.begins and not self._receiver.begun(self, high_water):
            return False
        if fed.version is not None:
            self._receiver.reads_version(self, fed.version)
        if fed.raw:
            segment = Segment(fed.raw, index_entries(fed.raw, self._chains), after, high_water)
            goes_on = self._receiver.received(self, segment)
            self._on_read(len(fed.raw))
            return goes_on
        return fed.begins or self._receiver.promised(self, high_water)
