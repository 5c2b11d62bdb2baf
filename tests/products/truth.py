"""What the server says, recorded while nobody writes: its own stream's bytes, and what its collections hold."""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tests.sharded.fuzz import tied
from tests.snapshot.copies import opened

#: Documents by namespace and sortable key.
Collections = Mapping[str, Mapping[bytes, bytes]]


def time_of(event: bytes) -> ClusterTime:
    """The cluster time in an event's token."""
    element = raw_bson.find(event, b"_id")
    assert element is not None
    return ResumeToken.parse(raw_bson.value(event, element)).cluster_time


class Truth:
    """The truth about one deployment, in a folder, where the processes that compare read it.

    A *pause* is a cluster time at which nobody was writing, so that the contents of the collections at it are known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    # -- recording --------------------------------------------------------------------------------------------------

    def record(
        self, time: ClusterTime, collections: Collections, events: Iterable[bytes], imaged: Iterable[bytes]
    ) -> None:
        """Record a pause. ``events`` are those since the pause before; ``imaged`` are the same with the server's own
        images, empty if it has none."""
        for name, found in (("events", events), ("imaged", imaged)):
            with (self.folder / name).open("ab") as file:
                file.writelines(found)
        with (self.folder / f"{int(time):016x}.pause").open("wb") as file:
            pickle.dump({name: dict(documents) for name, documents in collections.items()}, file)

    def until(self, pause: ClusterTime, folder: Path) -> Truth:
        """A copy in another folder, up to a pause: from there on that history is another one."""
        other = Truth(folder)
        for found in (one for one in self.pauses() if one <= pause):
            events = [self.events(ZERO, found), self.imaged(ZERO, found)] if found == pause else [[], []]
            other.record(found, self.collections(found), *events)
        return other

    # -- reading ----------------------------------------------------------------------------------------------------

    def pauses(self) -> list[ClusterTime]:
        """In order."""
        return sorted(ClusterTime(int(path.stem, 16)) for path in self.folder.glob("*.pause"))

    def collections(self, pause: ClusterTime) -> dict[str, dict[bytes, bytes]]:
        """What each collection held. Collections that did not exist are missing."""
        found: dict[str, dict[bytes, bytes]] = pickle.loads((self.folder / f"{int(pause):016x}.pause").read_bytes())
        return found

    def events(self, since: ClusterTime, until: ClusterTime) -> list[bytes]:
        """The server's events with ``since`` <= time <= ``until``."""
        first, last = bisect_left(self._times, since), bisect_right(self._times, until)
        return self._events[first:last]

    def imaged(self, since: ClusterTime, until: ClusterTime) -> list[bytes]:
        """The same with the server's own images where it kept them."""
        found = list(raw_bson.split((self.folder / "imaged").read_bytes()))
        return [event for event in found if since <= time_of(event) <= until]

    @cached_property
    def _events(self) -> list[bytes]:
        return list(raw_bson.split((self.folder / "events").read_bytes()))

    @cached_property
    def _times(self) -> list[ClusterTime]:
        return [time_of(event) for event in self._events]


def renamed(events: Iterable[bytes]) -> set[str]:
    """The collections whose documents do not all follow from the events: no event shows what ``convertToCapped`` copies
    into the collection that it then renames, and a look-up by a name that another collection has now finds nothing."""
    found = set()
    for event in events:
        if b"\x02operationType\x00\x07\x00\x00\x00rename\x00" in event:
            told = opened(event)
            found |= {f"{one['db']}.{one['coll']}" for one in (told["ns"], told["to"])}
    return found


def first_of(expected: list[bytes], found: list[bytes], what: str) -> list[str]:
    """How two lists of bytes differ, in a sentence; nothing if they are equal."""
    if expected == found or (what.startswith("event") and expected == tied(found)):
        return []
    for place, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        if theirs != ours:
            return [f"{what} {place} of {len(expected)}: {_shown(theirs)} of the server, {_shown(ours)} of ours"]
    if len(expected) > len(found):
        return [
            f"{what}: {len(expected) - len(found)} of {len(expected)} missing, first {_shown(expected[len(found)])}"
        ]
    return [f"{what}: {len(found) - len(expected)} too many, first {_shown(found[len(expected)])}"]


def difference_of(expected: Collections, found: Mapping[str, Mapping[bytes, bytes] | None], what: str) -> list[str]:
    """How collections differ: one sentence for each namespace."""
    told = []
    for namespace in sorted({*expected, *found}):
        theirs, ours = expected.get(namespace) or {}, found.get(namespace) or {}
        if theirs == ours:
            continue
        missing, more = theirs.keys() - ours.keys(), ours.keys() - theirs.keys()
        other = [key for key in theirs.keys() & ours.keys() if theirs[key] != ours[key]]
        told.append(
            f"{what} {namespace}: {len(missing)} of {len(theirs)} documents missing, {len(more)} too many, "
            f"{len(other)} other ones"
            + (f": {_shown(ours[other[0]])}, not {_shown(theirs[other[0]])}" if other else "")
        )
    return told


def _shown(document: bytes) -> str:
    text = repr(document[:250])
    return text if len(document) <= 250 else f"{text}... ({len(document)} bytes)"
