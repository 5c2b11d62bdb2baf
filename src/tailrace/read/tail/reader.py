"""The one reader of an oplog, on a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, Final, Protocol

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import TailraceError
from tailrace.read.source.failure import Backoff, is_transient
from tailrace.read.source.member_version import MemberVersion
from tailrace.read.source.mongod import MongodSource
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.entry_index import index_entries
from tailrace.read.tail.segment import Segment

#: How long the server waits for entries, and so how long the thread lives on when nobody needs it.
AWAIT_MS: Final = 1000
#: Entries in one reply: about a megabyte, so that streams get theirs while the next reply is on its way.
_READ_ENTRIES: Final = 2000
#: A larger reply comes in pieces of this size.
_PIECE_BYTES: Final = 4 << 20
#: The longest pause between two tries: streams that ask again wait for the next one.
_PAUSE_S: Final = 1.0

#: How many replies are taken in a row before the event loop sees to its other work.
_TURNS: Final = 16

_log = logging.getLogger("tailrace.tail")


class Attendant(Protocol):
    """An event loop that takes pushed replies, so that the reader's thread need not be woken for each."""

    def attend(self, file: socket.socket, turn: Callable[[], bool]) -> None:
        """Have the loop call ``turn`` whenever ``file`` can be read, until it returns False; then return. Returns at
        once if the loop has ended, or does not want to."""


class Receiver(Protocol):
    """Who is given what was read; each call says by its answer whether to read on."""

    def begun(self, reader: TailReader, after: ClusterTime) -> bool: ...

    def opened(self, reader: TailReader, after: ClusterTime) -> bytes | None:
        """The reader asks for what comes after ``after``. Returns the filter of its query; ``None``: it has none."""

    def is_to_open_again(self, reader: TailReader) -> bool:
        """Whether the reader is to ask ``opened`` again, and read on with another filter."""

    def reads_version(self, reader: TailReader, version: MemberVersion) -> None:
        """What is received from now on comes from a member of this version."""

    def received(self, reader: TailReader, segment: Segment) -> bool: ...

    def promised(self, reader: TailReader, high_water: ClusterTime) -> bool: ...

    def failed(self, reader: TailReader, error: PyMongoError) -> None: ...

    def ended(self, reader: TailReader) -> None: ...


class TailReader:
    """Reads an oplog from its newest majority-committed entry on, until its receiver wants no more.

    ``on_read``    called with how many bytes each reply had
    ``attendant``  takes replies in place of the thread, while the server pushes them and all is well. The thread sees
                   to everything for which somebody has to wait

    It survives elections and cut connections, as every reader of a ``MongodSource`` does. The receiver is notified of
    each failure, and then of the next reply or the next failure. An error that ends the reading is not passed on: the
    streams then read for themselves, and each meets its own error, if any.
    """

    def __init__(
        self,
        client: MongoClient[Any],
        receiver: Receiver,
        on_read: Callable[[int], object],
        attendant: Attendant | None = None,
    ) -> None:
        self.source = MongodSource(client, pushed=True)
        self._receiver = receiver
        self._on_read = on_read
        self._attendant = attendant
        self._chains = Chains()
        #: Of the member that was read last.
        self._version: MemberVersion | None = None
        self._position = ClusterTime(0)
        #: Why the loop has stopped taking replies, if the reading is not to go on.
        self._failure: BaseException | None = None
        self._is_over = False
        self._backoff = Backoff(give_up_s=None, wait_s_max=_PAUSE_S)
        #: Whether the next batch is only the sign that the read is opened again.
        self._reopens = False
        self._thread = threading.Thread(target=self._run, name="tailrace-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, after ``timeout_s`` at most."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read()
        except TailraceError as error:
            if not self.source.interrupted:
                _log.warning("the shared read of the oplog has ended, and each stream reads for itself: %s", error)
        except Exception:  # noqa: BLE001  nobody else would hear of it, and the streams go on
            if not self.source.interrupted:
                _log.exception("the shared read of the oplog has failed, and each stream reads for itself")
        finally:
            self._receiver.ended(self)

    def _read(self) -> None:
        self._position = self.source.newest()
        if not self._receiver.begun(self, self._position):
            return
        while not self._is_over:
            self._read_filtered(self._receiver.opened(self, self._position))

    def _read_filtered(self, oplog_filter: bytes | None) -> None:
        """Read with this filter, to the end or until there is to be another one."""
        options: dict[str, Any] = {"await_ms": AWAIT_MS, "batch_size": _READ_ENTRIES, "batch_bytes_max": _PIECE_BYTES}
        options["oplog_filter"] = oplog_filter
        with closing(self.source.tail(self._position, on_error=self._endure, **options)) as batches:
            for batch in batches:
                self._is_over = self._is_over or not self._take(batch)
                if not self._is_over and self._attendant is not None and batch.raw:
                    self._be_attended(self._attendant, batch, batches)
                if self._failure is not None:
                    raise self._failure
                if self._is_over or self._receiver.is_to_open_again(self):
                    return
        self._is_over = True

    def _take(self, batch: OplogBatch) -> bool:
        """Whether to read on after ``batch``."""
        if self._reopens:
            self._reopens = False
            return True
        self._backoff.progress()
        if self.source.read_version != self._version:
            self._version = version = self.source.read_version
            if version is not None:
                self._receiver.reads_version(self, version)
        after, self._position = self._position, batch.high_water
        return self._pass_on(batch, after, self._chains)

    def _be_attended(self, attendant: Attendant, batch: OplogBatch, batches: Iterator[OplogBatch]) -> None:
        view = self.source.pushed_socket(batch)
        if view is not None:
            with view:
                attendant.attend(view, partial(self._turn, view, batches))

    def _turn(self, view: socket.socket, batches: Iterator[OplogBatch]) -> bool:
        """In the event loop, while the thread waits: take the replies that are here. Whether the loop goes on."""
        try:
            for _ in range(_TURNS):
                taken = self.source.take_pushed(view)
                if not taken:
                    return taken is None
                batch = next(batches, None)
                if batch is None or not self._take(batch):
                    self._is_over = True
                    return False
                if self._receiver.is_to_open_again(self):
                    return False
                if not self.source.has_pushed_more:
                    return True
        except BaseException as error:  # noqa: BLE001  raised in the thread
            self._failure = error
            return False
        return True

    def _endure(self, error: PyMongoError) -> None:
        if is_transient(error) and not self.source.interrupted:
            self._receiver.failed(self, error)
        self.source.endure(error, self._backoff)
        self._reopens = True

    def _pass_on(self, batch: OplogBatch, after: ClusterTime, chains: Chains) -> bool:
        if not batch.raw:
            return self._receiver.promised(self, batch.high_water)
        segment = Segment(batch.raw, index_entries(batch.raw, chains), after, batch.high_water)
        goes_on = self._receiver.received(self, segment)
        self._on_read(len(batch.raw))
        return goes_on
