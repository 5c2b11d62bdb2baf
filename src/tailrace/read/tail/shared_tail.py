"""One deployment's tail: the reader, the window, and who reads from it (docs/design/tail.md)."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import OplogBatch
from tailrace.read.source.failure import is_killed
from tailrace.read.source.member_version import MemberVersion
from tailrace.read.tail.feed import FedReader
from tailrace.read.tail.interest import key_of
from tailrace.read.tail.reader import Attendant, TailReader
from tailrace.read.tail.reader_filter import ReaderFilter
from tailrace.read.tail.segment import Segment, TailPlace
from tailrace.read.tail.shared_window import SharedWindow, Taken

#: What the window may hold where nobody says otherwise.
WINDOW_BYTES: Final = 32 << 20
#: What a stream takes at a time: as much as stays in the processor's cache on its way through the kernel.
_TAKE_BYTES: Final = 1 << 20
#: A stream whose own read gave less than this has come to the end of the oplog, about.
_END_BYTES: Final = 256 << 10
_RETRY_S: Final = 1.0

#: Makes a reader for what receives its entries; the function is notified of each reply's size.
ReaderMaker = Callable[[Any, Callable[[int], object]], FedReader]


@dataclass(frozen=True)
class TailStatistics:
    """How the shared read of a deployment is doing.

    Attributes:
        streams: streams that read, in whatever way
        joined: those of them that read from the window; the others read the oplog themselves
        waiting: those of the joined streams that have something to take
        window_bytes: what the window holds
        window_bytes_max: how much it may hold
        window_entries: how many entries it holds
        reads: how many replies were read for all streams
        entries: entries that they held
        bytes: bytes that they held
        fallbacks: how often a stream was too slow, and then read for itself
        rejoins: how often such a stream came back
        lag_seconds: how far, in cluster time, the slowest stream is behind what was read
        trouble: why the deployment cannot be read at the moment, in words; ``None`` while it can
    """

    streams: int = 0
    joined: int = 0
    waiting: int = 0
    window_bytes: int = 0
    window_bytes_max: int = 0
    window_entries: int = 0
    reads: int = 0
    entries: int = 0
    bytes: int = 0
    fallbacks: int = 0
    rejoins: int = 0
    lag_seconds: int = 0
    trouble: str | None = None

    @classmethod
    def total(cls, parts: Iterable[TailStatistics]) -> TailStatistics:
        """Those of several oplogs together: sums, the longest lag, and every trouble."""
        every = list(parts)
        counts = [field.name for field in fields(cls) if field.name not in ("lag_seconds", "trouble")]
        sums = {name: sum(getattr(part, name) for part in every) for name in counts}
        lag = max((part.lag_seconds for part in every), default=0)
        trouble = "; ".join(part.trouble for part in every if part.trouble is not None)
        return cls(**sums, lag_seconds=lag, trouble=trouble or None)


class SharedTail:
    """Reads the oplog of ``client``'s replica set once for all streams that ``enter``.

    ``window_bytes``  how much of the oplog's end is kept for streams that have not taken theirs yet
    ``on_read``       notified of each reply's size

    ``streams_min``   the reader is started when there are this many streams: a single one reads as cheaply itself
    ``attendant``     an event loop that takes the server's replies in place of the reader's thread (``TailReader``)
    ``filters``       the server may be asked to leave out what no stream waits for (``ReaderFilter``). While
                      nothing comes, the position that was read is then known a second late
    ``make_reader``   makes what reads, in place of a ``TailReader``: another process may do so for this one

    The reader ends when they are fewer. For use by many threads.
    """

    def __init__(
        self,
        client: MongoClient[Any],
        *,
        window_bytes: int = WINDOW_BYTES,
        on_read: Callable[[int], object] = lambda size: None,
        streams_min: int = 2,
        attendant: Attendant | None = None,
        filters: bool = False,
        make_reader: ReaderMaker | None = None,
    ) -> None:
        self._make_reader = make_reader
        self._client = client
        self._on_read = on_read
        self._attendant = attendant
        self._window_bytes = window_bytes
        self._streams_min = streams_min
        self._filters = filters
        self._closed = False
        self._begin()
        _tails.add(self)

    def _begin(self) -> None:
        """Nothing is read, and nobody is there: at first, and in a child process, which has none of the threads."""
        self._lock = threading.Lock()
        self._window = SharedWindow(self._window_bytes)
        self._places: set[TailPlace] = set()
        self._reader: TailReader | FedReader | None = None
        self._filter = ReaderFilter()
        #: Of the member that the reader reads.
        self._version: MemberVersion | None = None
        self._not_before = 0.0
        #: The reader's error, until it has read again.
        self._failure: PyMongoError | None = None
        self._reads = self._entries = self._bytes = 0
        #: What was read since a stream was joined last.
        self._unused_bytes = 0

    # -- what a stream does -----------------------------------------------------------------------------------------

    def enter(
        self,
        scope: Scope,
        position: ClusterTime,
        on_ready: Callable[[], None] | None = None,
        version: MemberVersion | None = None,
    ) -> TailPlace:
        """A stream of ``scope`` reads, after ``position``. Where that is in the window, it is joined at once.

        ``version``  of the servers whose entries it wants; ``None``: of any
        """
        place = TailPlace(key_of(scope), position, on_ready, version)
        with self._lock:
            self._places.add(place)
            self._join(place)
            if self._filter.lacks(place.key):
                self._filter.drop()
        return place

    def place(self, scope: Scope) -> TailPlace:
        """A place for one who looks at what comes for ``scope`` now and then, with ``join_at_end`` and ``poll``."""
        return TailPlace(key_of(scope), ClusterTime(0), None)

    def join_at_end(self, place: TailPlace) -> bool:
        """Join one who wants what is read from now on and nothing before. Returns whether it is joined. Starts no
        reader."""
        with self._lock:
            place.position = self._window.high_water
            place.forget_failures()
            if self._reader is None:
                return False
            self._places.add(place)
            is_joined = self._join(place)
            if not is_joined and self._filter.lacks(place.key):
                self._filter.drop()
            return is_joined

    def leave(self, place: TailPlace) -> None:
        """The stream reads no more."""
        with self._lock:
            self._places.discard(place)
            self._window.drop(place)
            place.wake()

    def turn_out(self, place: TailPlace) -> None:
        """The stream is to read from the window no longer; if it waits there, its wait is over."""
        with self._lock:
            self._window.drop(place)
            place.wake()

    def reached(self, place: TailPlace, position: ClusterTime, size: int) -> bool:
        """The stream, which reads for itself, has come to ``position``; its last reply had ``size`` bytes. Whether it
        is joined from here on."""
        with self._lock:
            place.position = position
            place.forget_failures()
            if place not in self._places:  # after a fork
                self._places.add(place)
            if self._join(place):
                return True
            if self._filter.lacks(place.key):
                self._filter.drop()
            starts = (
                self._reader is None
                and not self._closed
                and size < _END_BYTES
                and len(self._places) >= self._streams_min
                and time.monotonic() >= self._not_before
            )
            if starts:
                self._reader = self._new_reader()
            reader = self._reader
        if starts and reader is not None:
            reader.start()
        return False

    def _new_reader(self) -> TailReader | FedReader:
        if self._make_reader is not None:
            return self._make_reader(self, self._on_read)
        return TailReader(self._client, self, self._on_read, self._attendant)

    def _join(self, place: TailPlace) -> bool:
        """The stream reads from the window, if what it wants is there, and is of the version that it wants."""
        if not self._is_of(place) or not self._window.join(place):
            return False
        if place.version is not None and self._version is not None and self._version.is_certain:
            place.version = self._version  # it may have known the series alone
        return True

    def _is_of(self, place: TailPlace) -> bool:
        wanted, read = place.version, self._version
        return wanted is None or read is None or not wanted.profiles.isdisjoint(read.profiles)

    def poll(self, place: TailPlace) -> OplogBatch | None:
        """What has come for a stream that is joined: its entries, or none and how far was read. ``None``: it is joined
        no longer. Does not wait."""
        with self._lock:
            if not place.joined:
                return None
            taken = self._window.take(place, _TAKE_BYTES)
            if taken.segments:
                place.note_given()
        return self._batch(taken, place.key)

    def wait(
        self, place: TailPlace, seconds: float, *, limit_s: float | None = None, hears: bool = False
    ) -> OplogBatch | None:
        """As ``poll``, but waits for entries, at most that many seconds, and ``limit_s`` whatever happens.

        ``hears``  the wait also ends when the reader has failed (``failure`` then returns the error). While the reader
                   cannot read, the call waits for its next try, however long that takes. After a failure that is over,
                   it returns at once what has come, as a cursor's first reply does
        """
        waiter = None
        with self._lock:
            if not place.joined:
                return None
            if hears and self._failure is None:
                seconds = 0.0 if place.reopens else seconds
                place.reopens = False
            elif hears and not place.pending:
                seconds = math.inf if place.unheard is None else 0.0
            if seconds > 0 and not self._window.owes(place):
                waiter = place.begin_wait()
        if waiter is not None:
            seconds = max(0.0, seconds if limit_s is None else min(seconds, limit_s))
            waiter.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
            with self._lock:
                place.end_wait(brought=bool(place.pending))
                place.reopens = place.reopens and self._failure is not None
        return self.poll(place)

    def failure(self, place: TailPlace) -> PyMongoError | None:
        """The reader's error, once, if it concerns the stream; also if the failure is over and the stream was in no
        call meanwhile. While the reader cannot read, the caller first takes what has already come for the stream."""
        if place.unheard is None:
            return None
        with self._lock:
            if not place.joined or (place.pending and self._failure is not None):
                return None
            found, place.unheard = place.unheard, None
            place.reopens = True
            return found

    def expect(self, place: TailPlace) -> None:
        """The stream tries again: it wants the outcome of the reader's next try, not of earlier ones."""
        with self._lock:
            place.unheard = None

    def await_time(self, place: TailPlace, until: ClusterTime | None) -> None:
        """Wake the stream when everything up to ``until`` was read, too."""
        with self._lock:
            if self._window.await_time(place, until):
                place.wake()

    def has_come(self, place: TailPlace) -> bool:
        """Whether there is something to take or to learn."""
        with self._lock:
            return not place.joined or self._window.owes(place)

    def entry(self, time: ClusterTime) -> bytes | None:
        """The oplog's entry of exactly this time, where the window holds it."""
        with self._lock:
            return self._window.entry(time)

    def _batch(self, taken: Taken, key: bytes) -> OplogBatch:
        batch = taken.batch(key)
        if any(segment.uncounted for segment in taken.segments):
            with self._lock:
                self._window.count(taken.segments)
        return batch

    # -- what the reader tells --------------------------------------------------------------------------------------

    def begun(self, reader: TailReader | FedReader, after: ClusterTime) -> bool:
        with self._lock:
            if self._reader is not reader:
                return False
            self._window.open(after)
            self._filter = ReaderFilter()
            self._unused_bytes = 0
            return True

    def opened(self, reader: TailReader, after: ClusterTime) -> bytes | None:
        with self._lock:
            oplog_filter = self._filter.open({place.key for place in self._places})
            if self._reader is reader:
                self._window.narrow(self._filter.keys, after)
            return oplog_filter

    def is_to_open_again(self, reader: TailReader) -> bool:
        return self._filter.is_due

    def reads_version(self, reader: TailReader | FedReader, version: MemberVersion) -> None:
        with self._lock:
            if self._reader is not reader:
                return
            self._version = version
            # They read on for themselves, and so come to the other version at a place that they know.
            others = [place for place in self._places if place.joined and not self._is_of(place)]
            for place in others:
                self._window.drop(place)
            ready = self._told(others)
        _call(ready)

    def received(self, reader: TailReader | FedReader, segment: Segment) -> bool:
        with self._lock:
            if not self._is_wanted(reader):
                return False
            if self._make_reader is None:  # else it was read for others too, and is counted there
                self._reads += 1
                self._entries += segment.entries
                self._bytes += len(segment.raw)
            self._unused_bytes = 0 if self._window.joined else self._unused_bytes + len(segment.raw)
            ready = self._told(self._window.add(segment))
            if self._filters:
                self._filter.saw(is_used=bool(segment.holders), keys=self._window.awaited_keys)
            self._recovered()
        _call(ready)
        return True

    def promised(self, reader: TailReader | FedReader, high_water: ClusterTime) -> bool:
        with self._lock:
            if not self._is_wanted(reader):
                return False
            ready = self._told(self._window.promise(high_water))
            self._recovered()
        _call(ready)
        return True

    def failed(self, reader: TailReader, error: PyMongoError) -> None:
        with self._lock:
            if self._reader is not reader:
                return
            self._failure = error
            was_killed = is_killed(error)
            for place in self._places:
                # A stream that did not wait has only lost its cursor, and would have opened another without an error.
                is_concerned = place.joined and (not was_killed or place.is_waited_at)
                if is_concerned and (place.unheard is None or place.reopens):
                    place.unheard = error
                place.wake()

    def _recovered(self) -> None:
        if self._failure is None:
            return
        self._failure = None
        for place in self._places:
            if place.reopens:
                place.unheard = None  # its next try is the first that it makes
            place.wake()

    def ended(self, reader: TailReader | FedReader) -> None:
        with self._lock:
            if self._reader is not reader:
                return
            self._reader = self._failure = self._version = None
            self._not_before = time.monotonic() + _RETRY_S
            ready = self._told(self._window.close())
        _call(ready)

    def _is_wanted(self, reader: TailReader | FedReader) -> bool:
        """Whether the reader is still the one, and it is worth reading: not for a stream that is alone, and not if all
        streams are so far back that a whole window went by unused."""
        is_used = self._unused_bytes <= self._window.bytes_max and len(self._places) >= self._streams_min
        return self._reader is reader and is_used and not self._closed

    def _told(self, places: list[TailPlace]) -> list[Callable[[], None]]:
        for place in places:
            place.wake()
        return [place.on_ready for place in places if place.on_ready is not None]

    # -- what others see --------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why the reader cannot read at the moment, in words; ``None`` while it can, or does not read."""
        reader = self._reader
        return None if reader is None else reader.source.trouble

    @property
    def clock_document(self) -> Mapping[str, Any] | None:
        """The ``$clusterTime`` of the reader's last reply."""
        reader = self._reader
        return None if reader is None else reader.source.clock_document

    @property
    def clock(self) -> bytes | None:
        """``clock_document`` as the member sent it."""
        reader = self._reader
        return None if reader is None else reader.source.clock

    @property
    def statistics(self) -> TailStatistics:
        with self._lock:
            window = self._window
            behind = [place.position for place in self._places if place.pending or not place.joined]
            newest = window.high_water.seconds
            return TailStatistics(
                streams=len(self._places),
                joined=window.joined,
                waiting=sum(bool(place.pending) for place in self._places),
                window_bytes=window.bytes,
                window_bytes_max=window.bytes_max,
                window_entries=window.entries,
                reads=self._reads,
                entries=self._entries,
                bytes=self._bytes,
                fallbacks=window.falls,
                rejoins=window.rejoins,
                lag_seconds=max(0, newest - min((one.seconds for one in behind), default=newest)),
                trouble=self.trouble,
            )

    def close(self) -> None:
        """Read no further. Streams that are still open read for themselves, with what that brings."""
        with self._lock:
            self._closed = True
            reader, self._reader = self._reader, None
            self._failure = self._version = None
            ready = self._told(self._window.close())
        if reader is not None:
            reader.source.interrupt()
        _call(ready)


def _call(ready: list[Callable[[], None]]) -> None:
    for callback in ready:
        callback()


_tails: weakref.WeakSet[SharedTail] = weakref.WeakSet()


def _after_fork() -> None:
    for tail in list(_tails):
        for place in tail._places:
            place.joined, place.pending, place.waiter = False, [], None
            place.forget_failures()
        tail._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
