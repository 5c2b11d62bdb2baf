"""One reply of the oplog, kept for the streams that it concerns, and where each of these stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from pymongo.errors import PyMongoError

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.batch import entry_time
from tailrace.read.source.member_version import MemberVersion
from tailrace.read.tail.entry_index import EntryIndex
from tailrace.read.tail.interest import EVERYONE

#: What a segment takes in addition to its bytes, and each of its entries: measured, rounded up.
_SEGMENT_BYTES: Final = 2_000
_ENTRY_BYTES: Final = 20


class Segment:
    """The entries with ``after`` < ts <= ``high_water``, as they came and indexed.

    ``size``       what it takes in memory, about
    ``uncounted``  how many bytes of answers are kept with it, and are not in ``size`` yet
    ``holders``    the places that were given it, some of which have taken it by now
    """

    __slots__ = ("_joined", "after", "high_water", "holders", "index", "raw", "size", "uncounted")

    def __init__(self, raw: bytes, index: EntryIndex, after: ClusterTime, high_water: ClusterTime) -> None:
        self.raw = raw
        self.index = index
        self.after = after
        self.high_water = high_water
        self.size = len(raw) + _SEGMENT_BYTES + _ENTRY_BYTES * self.entries
        self.holders: list[TailPlace] = []
        self.uncounted = 0
        self._joined: dict[bytes, bytes] = {}

    @property
    def entries(self) -> int:
        return len(self.index.numbers)

    def select(self, key: bytes, after: ClusterTime) -> bytes:
        """The entries with ts > ``after`` that are about ``key``, one after another. Streams that wait for the same
        key share the answer."""
        if self.entries == 1 and after <= self.after:
            about = self.index.about
            return self.raw if about is EVERYONE or key in about else b""
        if after > self.after:
            return self._join(self.index.select(key, self._first_after(after)))
        found = self._joined.get(key)
        if found is None:
            found = self._join(self.index.select(key))
            if len(self.holders) > 1:
                self._joined[key] = found
                self.uncounted += len(found) if found is not self.raw else 0
        return found

    def entry(self, time: ClusterTime) -> bytes | None:
        """The entry of exactly this time; ``None`` where there is none."""
        place = self._first_after(ClusterTime(time - 1))
        if place == self.entries:
            return None
        raw = self.raw[self.index.starts[place] : self.index.starts[place + 1]]
        return raw if entry_time(raw) == time else None

    def _first_after(self, after: ClusterTime) -> int:
        low, high = 0, self.entries
        while low < high:
            middle = (low + high) // 2
            if entry_time(self.raw, int(self.index.starts[middle])) > after:
                high = middle
            else:
                low = middle + 1
        return low

    def _join(self, entries: Sequence[int]) -> bytes:
        if len(entries) == self.entries:
            return self.raw
        raw, starts = self.raw, self.index.starts
        if len(entries) < 2:
            return b"".join(raw[starts[entry] : starts[entry + 1]] for entry in entries)
        if isinstance(starts, list):
            return b"".join([raw[starts[entry] : starts[entry + 1]] for entry in entries])
        return b"".join(_slices(raw, starts, entries))


class TailPlace:
    """Where one stream stands in the shared window. The window's owner holds its lock around every change.

    ``key``       what the stream waits for
    ``position``  everything of the stream's at or before this cluster time was given to it
    ``joined``    its entries come from the window; else the stream reads the oplog itself
    ``has_fallen``  it was joined before, and was too slow
    ``pending``   segments that hold something for it, in order
    ``awaits``    a cluster time: when everything up to it was read, the stream wants to know
    ``unheard``   a failure of the reader that concerns the stream, and that it was not told of yet
    ``reopens``   it was notified of a failure, and has taken nothing since
    ``on_ready``  called, without the lock, when something has come for a stream that had nothing
    ``version``   of the servers whose entries it wants; ``None``: of any
    """

    __slots__ = (
        "_waited_from",
        "_waited_until",
        "awaits",
        "has_fallen",
        "joined",
        "key",
        "on_ready",
        "pending",
        "position",
        "reopens",
        "unheard",
        "version",
        "waiter",
    )

    def __init__(
        self,
        key: bytes,
        position: ClusterTime,
        on_ready: Callable[[], None] | None,
        version: MemberVersion | None = None,
    ) -> None:
        self.key = key
        self.version = version
        self.position = position
        self.joined = False
        self.has_fallen = False
        self.forget_failures()
        self.pending: list[Segment] = []
        self.awaits: ClusterTime | None = None
        self.on_ready = on_ready
        #: A lock that the waiting thread wants to acquire.
        self.waiter: threading.Lock | None = None
        #: When the last wait began and ended, by the monotonic clock.
        self._waited_from = self._waited_until = 0.0

    def forget_failures(self) -> None:
        """Ignore the reader's failures so far; they do not concern the stream."""
        self.unheard: PyMongoError | None = None
        self.reopens = False

    def begin_wait(self) -> threading.Lock:
        """Note that the stream's thread waits from now on, until it can acquire the returned lock."""
        self._waited_from = time.monotonic()
        self.waiter = threading.Lock()
        self.waiter.acquire()
        return self.waiter

    def end_wait(self, *, brought: bool) -> None:
        """Note that the stream's thread no longer waits; ``brought``: something has come, and so its call ends."""
        self.waiter = None
        self._waited_until = self._waited_from if brought else time.monotonic()

    def note_given(self) -> None:
        """Note that the stream has taken entries, so that its call ends, whether or not it waited for them."""
        self._waited_from = self._waited_until

    @property
    def is_waited_at(self) -> bool:
        """Whether the stream's thread waits for entries. It also counts as waiting if it has taken nothing since its
        last wait and less time has passed since then than that wait took: it is then about to wait again."""
        if self.waiter is not None:
            return True
        return time.monotonic() - self._waited_until < self._waited_until - self._waited_from

    def wake(self) -> None:
        """Let the thread that waits go on, if one does."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.release()


def _slices(raw: bytes, starts: Sequence[int], entries: Sequence[int]) -> list[bytes]:
    """The entries, neighbours in one piece."""
    import numpy as np  # noqa: PLC0415  whoever made the array has loaded it

    chosen, places = np.asarray(entries), np.asarray(starts)
    cuts = np.flatnonzero(np.diff(chosen) != 1)
    begins = places[chosen[np.concatenate(([0], cuts + 1))]].tolist()
    ends = places[chosen[np.concatenate((cuts, [len(chosen) - 1]))] + 1].tolist()
    return [raw[begin:end] for begin, end in zip(begins, ends, strict=True)]
