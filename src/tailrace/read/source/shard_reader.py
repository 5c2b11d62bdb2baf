"""One shard's oplog, read ahead on a thread of its own into a bounded queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import closing
from typing import Any, Final

from pymongo.errors import OperationFailure, PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import InternalError, TailraceError
from tailrace.read.source.failure import Backoff, is_killed, is_transient, source_error
from tailrace.read.source.live import LiveSource

#: A shard of which this much waits is read no further. One reply more may come, of 16 MiB at most.
QUEUE_BYTES_MAX: Final = 8 * 1024 * 1024
#: Replies are passed on in pieces of about this size, so that the shards take turns.
_PIECE_BYTES: Final = 4 * 1024 * 1024

_log = logging.getLogger("tailrace.source")


class ShardReader:
    """Tails one oplog after ``after`` until it is closed.

    ``source``   reads the shard, and tries for ever
    ``changed``  notified (its lock held) whenever there is something new to look at

    Survives elections, killed members and cut connections: it tries for as long as it takes, continues after the last
    entry read, and counts what has failed.
    """

    def __init__(
        self,
        name: str,
        source: LiveSource,
        after: ClusterTime,
        changed: threading.Condition,
        *,
        await_ms: int,
        batch_size: int | None,
        comment: Any,
    ) -> None:
        self.name = name
        self.failure: TailraceError | None = None
        #: The last command that has failed, while nothing was read since: by PyMongo's error and by ours; and how many
        #: have failed in a row.
        self.failed: PyMongoError | None = None
        self.failed_as: TailraceError | None = None
        self.failed_in_a_row = 0
        #: Another client has killed a read on the server, and the stream has not seen this yet.
        self.killed: OperationFailure | None = None
        #: When entries last came, by the monotonic clock.
        self.last_entry_s = 0.0
        self._changed = changed
        self._after = after
        self._tail_options: dict[str, Any] = {"await_ms": await_ms, "batch_size": batch_size, "comment": comment}
        self._source = source
        self._backoff = Backoff(give_up_s=None)
        self._reopens = False
        self._batches: deque[OplogBatch] = deque()
        self._queued_bytes = 0
        self._read_up_to = after
        self._closed = False
        self._reported: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"tailrace-read-{name}", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """Why the shard cannot be read at the moment, in words; ``None`` while it can."""
        return self._source.trouble

    @property
    def clock_document(self) -> Any:
        """The ``$clusterTime`` of its last reply, as it was sent."""
        return self._source.clock_document

    @property
    def has_batch(self) -> bool:
        return bool(self._batches)

    @property
    def read_up_to(self) -> ClusterTime:
        """The cluster time of the last entry that was read, taken out of the queue or not."""
        return self._read_up_to

    def next_batch(self) -> OplogBatch | None:
        """What was read next: all that waits, up to about ``_PIECE_BYTES``; ``None`` where nothing does.

        At the end of the oplog each reply has an entry or two. Where the consumer is behind, they come together:
        documents are then looked up for all of them at once.
        """
        with self._changed:
            if not self._batches:
                return None
            batches = [self._batches.popleft()]
            size = len(batches[0].raw)
            while self._batches and _can_follow(batches[-1], self._batches[0], size):
                batches.append(self._batches.popleft())
                size += len(batches[-1].raw)
            self._queued_bytes -= sum(map(_size, batches))
            self._changed.notify_all()
        return batches[0] if len(batches) == 1 else _joined(batches)

    def await_time(self, until: ClusterTime) -> None:
        """The stream waits for everything up to ``until``: a batch, empty perhaps, is to say so at once."""
        self._source.await_time(until)

    def close(self) -> None:
        """Stop reading: the thread ends when the server's wait for entries does, and closes its cursor."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
        self._source.interrupt()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, after ``timeout_s`` at most."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._source.wait_until_reachable()
            # What the stream makes depends on the version of each shard, so it learns where that changes.
            self._source.expect_present_version()
            options = {"batch_bytes_max": _PIECE_BYTES, "on_error": self._endure, **self._tail_options}
            with closing(self._source.tail(self._after, **options)) as batches:
                for batch in batches:
                    self._report()
                    if self._reopens:  # this batch is none, but the sign that the read is opened again now
                        self._reopens = False
                        continue
                    self._recovered()
                    if not self._put(batch):
                        return
        except TailraceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  must not end the thread silently
            self._fail(InternalError(f"{type(error).__name__} while the shard's oplog was read: {error}"))

    def _endure(self, error: PyMongoError) -> None:
        if is_transient(error):
            with self._changed:
                self.failed_as = source_error(error, self._source.client)
                self.failed, self.failed_in_a_row = error, self.failed_in_a_row + 1
                if is_killed(error):
                    self.killed = error
                self._changed.notify_all()
        self._source.endure(error, self._backoff)
        self._reopens = True

    def _recovered(self) -> None:
        self._backoff.progress()
        if self.failed is not None:
            with self._changed:
                self.failed, self.failed_in_a_row = None, 0

    def _put(self, batch: OplogBatch) -> bool:
        """Queue a batch and wait while the queue is full; False when the reader was closed."""
        with self._changed:
            if batch.raw:
                self.last_entry_s = time.monotonic()
            if batch.raw or batch.high_water > self._read_up_to:
                self._batches.append(batch)
                self._queued_bytes += _size(batch)
                self._read_up_to = batch.high_water
                self._changed.notify_all()
            while self._queued_bytes > QUEUE_BYTES_MAX and not self._closed:
                self._changed.wait()
            return not self._closed

    def _report(self) -> None:
        """Tell once that the shard cannot be read, and once that it can again."""
        trouble = self._source.trouble
        if (trouble is None) != (self._reported is None):
            if trouble is None:
                _log.warning("shard %s is read again, after %s", self.name, self._read_up_to)
            else:
                _log.warning("shard %s cannot be read (%s): the stream waits for it", self.name, trouble)
        self._reported = trouble

    def _fail(self, error: TailraceError) -> None:
        with self._changed:
            if not self._closed:
                self.failure = error
                self._changed.notify_all()


def _can_follow(batch: OplogBatch, next_: OplogBatch, size: int) -> bool:
    """Whether the next batch may be joined to one that leads up to it and has ``size`` bytes so far. Exact images stay
    with their batch."""
    return batch.images is None and next_.images is None and size + len(next_.raw) <= _PIECE_BYTES


def _joined(batches: list[OplogBatch]) -> OplogBatch:
    return OplogBatch(b"".join([batch.raw for batch in batches]), batches[-1].high_water)


def _size(batch: OplogBatch) -> int:
    """The bytes that a batch keeps in memory."""
    return len(batch.raw) + sum(map(len, (batch.images or {}).values()))
