"""Whether a read of the oplog should carry the stream's filter, or take every entry and leave the others out here.

Filtering an entry costs the server three times as much as reading it (measured on mongod 6.0.27: 0.9 µs of CPU to read
an entry, 3 more to filter it). Without a filter all entries come over the network, and the kernel skips those that do
not match. So a filter pays where it saves enough bytes, and within one machine it hardly ever does.

At the end of the oplog it saves more. There every write causes a reply. One without an event for the stream costs, with
the request for the next one, as much as filtering fifty entries or more. A program that writes for each event that it
reads would be woken by its own writes.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from pymongo import MongoClient

#: Nanoseconds: the server asks one entry the filter.
_ASKING_NS: Final = 3000
#: Receiving an entry that gives no event and passing it over, in addition to its bytes: in compiled code, and in plain
#: Python.
_PASSING_OVER_NS: Final = 700
_PASSING_OVER_PLAIN_NS: Final = 8000
#: A byte more: over a network of which this stream may have 1 Gbit/s, and between processes of one machine.
_NETWORK_BYTE_NS: Final = 8.0
_LOCAL_BYTE_NS: Final = 0.4
#: A reply that gives no event, and asking for the next one.
_REPLY_NS: Final = 150_000

#: How many entries represent a stream, and how many are remembered.
_SAMPLE_MIN: Final = 1000
_SAMPLE_MAX: Final = 100_000
#: So do the last replies, whatever was read before: at the end of the oplog a stream gets replies of another kind.
_REPLIES_MIN: Final = 100
#: After how many events with the filter a stretch is read without it; after twice as many the next time.
_EVENTS_TO_LOOK_AGAIN: Final = 50_000
_DOUBLINGS_MAX: Final = 6

_LENGTH: Final = struct.Struct("<i")


class Sample(NamedTuple):
    """Entries, and those of them that give events: how many they are and their size in bytes. ``empty_replies``:
    replies with entries of which none gives an event."""

    entries: int
    bytes: int
    matching: int
    matching_bytes: int
    empty_replies: int = 0

    def plus(self, more: Sample) -> Sample:
        return Sample(*(before + one for before, one in zip(self, more, strict=True)))


def filter_pays(sample: Sample, *, is_local: bool, compiled: bool = True) -> bool:
    """Whether it is cheaper, over server, network and client, to let the server ask each entry.

    ``is_local``  nothing goes over a network
    ``compiled``  the kernel passes over what gives no event
    """
    byte_ns = _LOCAL_BYTE_NS if is_local else _NETWORK_BYTE_NS
    entry_ns = _PASSING_OVER_NS if compiled else _PASSING_OVER_PLAIN_NS
    spared = (sample.entries - sample.matching) * entry_ns + (sample.bytes - sample.matching_bytes) * byte_ns
    spared += sample.empty_replies * _REPLY_NS
    return spared > sample.entries * _ASKING_NS


def is_local(client: MongoClient[Any]) -> bool:
    """Whether every member that the client knows is on this machine."""
    hosts = [host for host, _ in client.nodes]
    return bool(hosts) and all(host in ("localhost", "127.0.0.1", "::1") or host.endswith(".sock") for host in hosts)


class FilterChoice:
    """One stream's choice, from what it has read.

    ``asks``  whether the next read should carry the filter. It begins without one, since only such a read tells what
              the filter would spare: a thousand entries decide
    """

    def __init__(self, *, is_local: bool) -> None:
        self.asks = False
        self._is_local = is_local
        self._sample = self._last = Sample(0, 0, 0, 0)
        #: How many replies ``_last`` is of.
        self._replies = 0
        self._events_left = 0
        self._looks = 0

    def saw(self, raw: bytes, events: int, event_bytes: int, *, compiled: bool) -> None:
        """A batch was read while ``asks`` was as given, and gave this many events of this many bytes."""
        if self.asks:
            self._events_left -= events
            if self._events_left <= 0:
                self.asks = False
                self._forget()
            return
        if not raw:
            return
        entries = _entries(raw)
        # An entry that holds a transaction gives many events, and what an event has in addition to its entry is small.
        seen = Sample(entries, len(raw), min(entries, events), min(len(raw), event_bytes), int(events == 0))
        self._sample, self._last = self._sample.plus(seen), self._last.plus(seen)
        self._replies += 1
        self.asks = self._pays(compiled)
        if self.asks:
            self._events_left = _EVENTS_TO_LOOK_AGAIN << min(self._looks, _DOUBLINGS_MAX)
            self._looks += 1

    def _forget(self) -> None:
        self._sample = self._last = Sample(0, 0, 0, 0)
        self._replies = 0

    def _pays(self, compiled: bool) -> bool:
        sample, last = self._sample, self._last
        pays = sample.entries >= _SAMPLE_MIN and filter_pays(sample, is_local=self._is_local, compiled=compiled)
        if sample.entries > _SAMPLE_MAX:
            self._sample = Sample(*(part // 2 for part in sample))
        if self._replies >= _REPLIES_MIN:
            pays = pays or filter_pays(last, is_local=self._is_local, compiled=compiled)
            self._last, self._replies = Sample(0, 0, 0, 0), 0
        return pays


def _entries(raw: bytes) -> int:
    """About how many entries there are: as many as of the size of the first hundred."""
    pos = count = 0
    while pos < len(raw) and count < 100:
        pos += max(5, _LENGTH.unpack_from(raw, pos)[0]) if pos + 4 <= len(raw) else len(raw)
        count += 1
    return max(count, count * len(raw) // max(pos, 1))
