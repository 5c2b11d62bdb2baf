"""The one reader of an oplog, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, Protocol

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.errors import TailraceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.plan.request import OplogBatch
from tailrace.source.failure import Backoff, is_transient
from tailrace.source.mongod import MongodSource
from tailrace.tail.chains import Chains
from tailrace.tail.entry_index import index_entries
from tailrace.tail.segment import Segment

#: How long the server waits for entries, and so how long the thread lives on when nobody needs it.
AWAIT_MS: Final = 1000
#: Entries in one reply: about a megabyte, so that streams get theirs while the next reply is on its way.
_READ_ENTRIES: Final = 2000
#: A larger reply comes in pieces of this size.
_PIECE_BYTES: Final = 4 << 20
#: The longest pause between two tries: streams that ask again wait for the next one.
_PAUSE_S: Final = 1.0

_log = logging.getLogger("tailrace.tail")


class Receiver(Protocol):
    """Who is given what was read; each call says by its answer whether to read on."""

    def begun(self, reader: TailReader, after: ClusterTime) -> bool: ...

    def received(self, reader: TailReader, segment: Segment) -> bool: ...

    def promised(self, reader: TailReader, high_water: ClusterTime) -> bool: ...

    def failed(self, reader: TailReader, error: PyMongoError) -> None: ...

    def ended(self, reader: TailReader) -> None: ...


class TailReader:
    """Reads an oplog from its newest majority-committed entry on, until its receiver wants no more.

    ``on_read``  told how many bytes each reply had

    It survives elections and cut connections, as every reader of a ``MongodSource`` does. The receiver is told of each
    failure, and then of the next reply or the next failure. An error that ends the reading is not passed on: the
    streams then read for themselves, and each meets its own error, if any.
    """

    def __init__(self, client: MongoClient[Any], receiver: Receiver, on_read: Callable[[int], object]) -> None:
        self.source = MongodSource(client, pushed=True)
        self._receiver = receiver
        self._on_read = on_read
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
        position = self.source.newest()
        if not self._receiver.begun(self, position):
            return
        chains = Chains()
        options: dict[str, Any] = {"await_ms": AWAIT_MS, "batch_size": _READ_ENTRIES, "batch_bytes_max": _PIECE_BYTES}
        with closing(self.source.tail(position, on_error=self._endure, **options)) as batches:
            for batch in batches:
                if self._reopens:
                    self._reopens = False
                    continue
                self._backoff.progress()
                if not self._pass_on(batch, position, chains):
                    return
                position = batch.high_water

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
