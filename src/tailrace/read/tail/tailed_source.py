"""One stream's source on a deployment that is tailed for many: reads from the shared window where it can, and from the
oplog itself where it has to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import OplogBatch
from tailrace.read.source.batch import BATCH_BYTES_MAX
from tailrace.read.source.live import OnFailedCommand
from tailrace.read.source.mongod import AWAIT_MS, MongodSource
from tailrace.read.source.time_limit import remaining_s
from tailrace.read.tail.segment import TailPlace
from tailrace.read.tail.shared_tail import SharedTail


class TailedSource(MongodSource):
    """A ``MongodSource`` whose ``tail`` gives what concerns ``scope``, out of a window that others read from too.

    Other entries may be given or not, as with an ``oplog_filter``. ``comment`` and ``batch_size`` are those of reads of
    the stream's own.
    """

    def __init__(self, client: MongoClient[Any], shared: SharedTail, scope: Scope, **options: Any) -> None:
        super().__init__(client, **options)
        self._shared = shared
        self._scope = scope
        self._place: TailPlace | None = None
        self._on_ready: Callable[[], None] | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the stream reads from the window."""
        return self._place is not None and self._place.joined

    def on_ready(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` when something has come for a stream that reads from the window and had nothing: once, and
        then not before it has read again. The call comes from the reader's thread, holds up every stream of the
        deployment, and must not raise: ``loop.call_soon_threadsafe(...)`` is meant."""
        self._on_ready = callback
        if self._place is not None:
            self._place.on_ready = callback

    @property
    def trouble(self) -> str | None:
        """See MongodSource; of the shared reader where that reads for the stream."""
        return self._shared.trouble if self.is_joined else super().trouble

    @property
    def clock_document(self) -> Mapping[str, Any] | None:
        """See MongodSource; of the shared reader where that reads for the stream."""
        return (self._shared.clock_document if self.is_joined else None) or super().clock_document

    def await_time(self, until: ClusterTime) -> None:
        """See MongodSource."""
        place = self._place
        if place is not None:
            self._shared.await_time(place, until)

    def poll(self) -> OplogBatch | None:
        """What has come for a stream that reads from the window: its entries, or none and how far was read. Does not
        wait. ``None``: it reads from there not yet, or no longer, and the next batch is to be had from its ``tail``,
        which waits: in a thread that may."""
        place = self._place
        return None if place is None else self._shared.poll(place)

    @property
    def has_more(self) -> bool:
        """Whether more has come for a stream that reads from the window than its last ``poll`` gave."""
        return self._place is not None and bool(self._place.pending)

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
        """See OplogSource and MongodSource. ``on_error`` is called for errors of the stream's own reads, and for errors
        of the shared read while the stream waits for it."""
        place = self._place = self._shared.enter(self._scope, after, self._on_ready, self._expected)
        options: dict[str, Any] = {
            "await_ms": await_ms,
            "batch_bytes_max": batch_bytes_max,
            "oplog_filter": oplog_filter,
            "batch_size": batch_size,
            "comment": comment,
            "on_error": on_error,
        }
        try:
            if place.joined and (batch := self._shared.wait(place, 0.0)) is not None:
                yield batch  # at once, as a cursor's first reply comes
            while not self.interrupted:
                yield from self._from_window(place, await_ms / 1000, on_error)
                if not self.interrupted:
                    yield from self._by_itself(place, options)
        finally:
            self._place = None
            self._shared.leave(place)

    def entries(self, times: Sequence[ClusterTime]) -> list[bytes | None]:
        """See MongodSource. What the window holds is not asked for."""
        found = [self._shared.entry(time) for time in times]
        missing = [time for time, entry in zip(times, found, strict=True) if entry is None]
        others = iter(super().entries(missing) if missing else ())
        return [next(others) if entry is None else entry for entry in found]

    def interrupt(self) -> None:
        """See MongodSource. A wait for the window ends at once."""
        super().interrupt()
        place = self._place
        if place is not None:
            self._shared.turn_out(place)

    def _from_window(
        self, place: TailPlace, await_s: float, on_error: OnFailedCommand | None
    ) -> Generator[OplogBatch, None, None]:
        """What comes for the stream, until it falls out of the window."""
        hears = on_error is not None
        while True:
            error = self._shared.failure(place) if hears else None
            batch = OplogBatch(b"", place.position)
            if error is None:
                batch_ = self._shared.wait(place, await_s, limit_s=remaining_s(), hears=hears)
                if batch_ is None:
                    return
                batch = batch_
                error = self._shared.failure(place) if hears and not batch.raw else None
            if on_error is not None and error is not None:
                on_error(error)
                yield batch
                self._shared.expect(place)
            else:
                yield batch

    def _by_itself(self, place: TailPlace, options: dict[str, Any]) -> Generator[OplogBatch, None, None]:
        """What the stream reads with a cursor of its own, until it is joined."""
        self._expected = place.version or self._expected
        with closing(MongodSource.tail(self, place.position, **options)) as batches:
            for batch in batches:
                place.version = self._expected  # the read may have told it
                is_joined = self._shared.reached(place, batch.high_water, len(batch.raw))
                if is_joined:
                    batches.close()
                yield batch
                if is_joined:
                    return
