"""The end of an oplog in memory, bounded, and the places of the streams that read from it. No I/O and no threads: its
owner makes sure that only one thread at a time is in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import OplogBatch
from tailrace.read.tail.interest import EVERYONE, InterestKeys
from tailrace.read.tail.segment import Segment, TailPlace


class Taken(NamedTuple):
    """What a stream takes: the segments with entries of its own, what it had before, and up to where it has all now."""

    segments: list[Segment]
    after: ClusterTime
    high_water: ClusterTime

    def batch(self, key: bytes) -> OplogBatch:
        """The stream's own entries. Takes a while, and nobody else has to wait for it."""
        raw = b"".join([segment.select(key, self.after) for segment in self.segments])
        return OplogBatch(raw, self.high_water)


class SharedWindow:
    """``after`` < ts <= ``high_water`` is what it holds.

    ``bytes_max``  how much it may hold; one segment stays however large it is. The oldest ones go first, and a stream
                   that has not taken what goes falls out of the window

    ``joined``              how many streams read from it
    ``falls``, ``rejoins``  how often a stream fell out, and how often one came back
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = self.entries = self.joined = self.falls = self.rejoins = 0
        self.segments: deque[Segment] = deque()
        #: What is read: of these keys, or of all (``None``), from this time on.
        self.keys: frozenset[bytes] | None = None
        self.whole_after = ClusterTime(0)
        self._places: dict[bytes, dict[TailPlace, None]] = {}
        self._awaiting: set[TailPlace] = set()
        self.after = self.high_water = ClusterTime(0)
        self._is_open = False

    def open(self, after: ClusterTime) -> None:
        """What comes from now on begins after ``after``."""
        self.after = self.high_water = after
        self._is_open = True

    def narrow(self, keys: frozenset[bytes] | None, after: ClusterTime) -> None:
        """What comes after ``after`` is about ``keys`` alone; ``None``: about everything. Streams that are joined wait
        for nothing else."""
        self.keys, self.whole_after = keys, after

    def close(self) -> list[TailPlace]:
        """Nothing more will come. Everyone falls out; those that have something waiting, or wait, are woken."""
        self._is_open = False
        joined = [place for places in self._places.values() for place in places]
        for place in joined:
            self.drop(place)
        self.segments.clear()
        self.bytes = self.entries = 0
        return joined

    def join(self, place: TailPlace) -> bool:
        """The stream reads from here from its position on, if nothing after it has gone, and it is not so far back
        that it would fall out again at once."""
        if not self._is_open or place.position < max(self.after, self.whole_after):
            return False
        if self.keys is not None and place.key not in self.keys:
            return False
        following: list[Segment] = []
        size = 0
        for segment in reversed(self.segments):
            if segment.high_water <= place.position:
                break
            size += segment.size
            about = segment.index.about
            if about is EVERYONE or place.key in about:
                following.append(segment)
        if size > self.bytes_max // 2 and len(self.segments) > 1:
            return False
        place.joined = True
        place.pending = following[::-1]
        for segment in following:
            segment.holders.append(place)
        places = self._places.setdefault(place.key, {})
        self.joined += place not in places
        places[place] = None
        self.await_time(place, place.awaits)
        self.rejoins += place.has_fallen
        return True

    def drop(self, place: TailPlace) -> None:
        """The stream reads from here no longer."""
        place.joined = False
        place.pending = []
        self._awaiting.discard(place)
        places = self._places.get(place.key)
        if places is not None and place in places:
            del places[place]
            self.joined -= 1
            if not places:
                del self._places[place.key]

    def add(self, segment: Segment) -> list[TailPlace]:
        """What was read next. Gives those for whom something has come, and who had nothing before."""
        self.segments.append(segment)
        self.bytes += segment.size
        self.entries += segment.entries
        ready = self._hand_out(segment)
        self.high_water = max(self.high_water, segment.high_water)
        fallen = self._shrink()
        return [*ready, *fallen, *self._promised()]

    def promise(self, high_water: ClusterTime) -> list[TailPlace]:
        """Nothing was read, up to this time. Gives those who wait for it."""
        self.high_water = max(self.high_water, high_water)
        return self._promised()

    def await_time(self, place: TailPlace, time: ClusterTime | None) -> bool:
        """Tell ``place`` when everything up to ``time`` was read; ``None``: it does not wait for that any more. Returns
        whether it was read already without the stream's knowing."""
        place.awaits = time
        self._awaiting.discard(place)
        if time is None or not place.joined or time <= place.position:
            return False
        if time <= self.high_water:
            return True
        self._awaiting.add(place)
        return False

    def owes(self, place: TailPlace) -> bool:
        """Whether there is something to tell a stream that is joined: entries, or that the time that it awaits is
        past."""
        if place.pending:
            return True
        return place.awaits is not None and place.position < place.awaits <= self.high_water

    def take(self, place: TailPlace, bytes_max: int) -> Taken:
        """What has come for a stream that is joined, of about ``bytes_max`` bytes; its position moves past it."""
        count = size = 0
        for segment in place.pending:
            count += 1
            size += segment.size
            if size >= bytes_max:
                break
        segments, place.pending = place.pending[:count], place.pending[count:]
        after = place.position
        reached = segments[-1].high_water if place.pending else self.high_water
        place.position = max(after, reached)
        return Taken(segments, after, place.position)

    def count(self, segments: list[Segment]) -> None:
        """Count what was kept with segments since they came. What is too much goes with the next one that comes."""
        for segment in segments:
            more, segment.uncounted = segment.uncounted, 0
            segment.size += more
            if segment.high_water > self.after:
                self.bytes += more

    def entry(self, time: ClusterTime) -> bytes | None:
        """The entry of exactly this time, where the window holds it."""
        for segment in reversed(self.segments):
            if segment.high_water < time:
                return None
            if segment.after < time:
                return segment.entry(time)
        return None

    @property
    def awaited_keys(self) -> Collection[bytes]:
        """What those who are joined wait for."""
        return self._places.keys()

    def _hand_out(self, segment: Segment) -> list[TailPlace]:
        ready: list[TailPlace] = []
        for key in self._keys_waited_for(segment.index.about):
            for place in self._places[key]:
                if not place.pending:
                    ready.append(place)
                place.pending.append(segment)
                segment.holders.append(place)
        return ready

    def _keys_waited_for(self, about: InterestKeys) -> list[bytes]:
        if about is EVERYONE:
            return list(self._places)
        if len(about) < len(self._places):
            return [key for key in about if key in self._places]
        return [key for key in self._places if key in about]

    def _shrink(self) -> list[TailPlace]:
        """Let the oldest segments go until the rest fits. Gives the places that fell out."""
        fallen: list[TailPlace] = []
        while self.bytes > self.bytes_max and len(self.segments) > 1:
            oldest = self.segments.popleft()
            self.bytes -= oldest.size
            self.entries -= oldest.entries
            self.after = oldest.high_water
            for place in oldest.holders:
                if place.joined and place.pending and place.pending[0] is oldest:
                    self.drop(place)
                    place.has_fallen = True
                    self.falls += 1
                    fallen.append(place)
        return fallen

    def _promised(self) -> list[TailPlace]:
        if not self._awaiting:
            return []
        reached = [place for place in self._awaiting if place.awaits is not None and place.awaits <= self.high_water]
        self._awaiting.difference_update(reached)
        return reached
