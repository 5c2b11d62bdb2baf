"""Whether the one read of an oplog leaves out what no stream waits for.

At the end of an oplog every write causes a reply, and a reply costs both sides as much as filtering fifty entries. So
where few collections are watched and many of the replies are about none of them, the server is asked to leave out the
other collections. A stream that then waits for something else makes the reader ask for everything again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import bson

from tailrace.read.tail.interest import CLUSTER

#: For how many replies the choice is made once.
_REPLIES_MIN: Final = 200
#: At least one in this many replies has to be of no use to any stream.
_UNUSED_MIN: Final = 4
#: The server looks for each entry's namespace among these.
_KEYS_MAX: Final = 64
#: How long a read goes without a filter once a filter did not last; twice as long each time.
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 300.0


class ReaderFilter:
    """Not for several threads at a time.

    ``keys``  those whose entries the read gives, as it was opened last; ``None``: it gives all
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.keys: frozenset[bytes] | None = None
        self._clock = clock
        self._replies = self._unused = 0
        self._wanted = False
        self._pause_s = _PAUSE_S
        self._not_before = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the read is to be opened again, with a filter or without."""
        return self._wanted is (self.keys is None)

    def open(self, keys: Collection[bytes]) -> bytes | None:
        """The read is opened, for streams that wait for ``keys``. Its filter, a query; ``None``: everything is read."""
        self._replies = self._unused = 0
        self._wanted = self._wanted and _can_name(keys)
        self.keys = frozenset(keys) if self._wanted else None
        return None if self.keys is None else _query(self.keys)

    def saw(self, *, is_used: bool, keys: Collection[bytes]) -> None:
        """A reply with entries has come. ``keys``: what streams wait for."""
        if self._wanted:
            return
        self._replies += 1
        self._unused += not is_used
        if self._replies < _REPLIES_MIN:
            return
        pays = self._unused * _UNUSED_MIN >= self._replies
        self._wanted = pays and self._clock() >= self._not_before and _can_name(keys)
        self._replies = self._unused = 0

    def lacks(self, key: bytes) -> bool:
        """Whether entries about ``key`` are left out."""
        return self.keys is not None and key not in self.keys

    def drop(self) -> None:
        """Somebody waits for what is left out."""
        if self._wanted:
            self._wanted = False
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)


def _can_name(keys: Collection[bytes]) -> bool:
    """Whether all that streams wait for are single collections, and not too many."""
    return 0 < len(keys) <= _KEYS_MAX and all(b"." in key and key != CLUSTER and b"\x00" not in key for key in keys)


def _query(keys: frozenset[bytes]) -> bytes:
    """Writes to these collections, and all that is not a write: transactions, definitions, announcements. The server's
    patterns for names ignore a line break at the end of a name."""
    names = [key.decode() for key in sorted(keys)]
    return bson.encode(
        {"$or": [{"ns": {"$in": [*names, *(f"{name}\n" for name in names)]}}, {"op": {"$nin": ["i", "u", "d"]}}]}
    )
