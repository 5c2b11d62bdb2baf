"""Which of two committed positions is ahead of the other. A commit that arrives late must not set a position back.

A request may still be carried out when nobody waits for it any more, such as by a server that was frozen for a time.
Its owner and version are those of the owner's newer commits, so the positions are compared where the lease is kept.

Only positions of one kind are compared: places in a stream, the states of one snapshot, and generations of lanes. Any
other position is not ahead of anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime


class Progress(NamedTuple):
    """How far a position is.

    ``place``       in the stream, by the hex digits of a token; ``None`` where that is not known
    ``time``        the cluster time of the place
    ``at``          whether it stands before all events of ``time``
    ``copied``      of a snapshot that begins at ``time``: how often a collection was started again, and the number of
                    documents; ``None`` where no snapshot is under way
    ``generation``  of lanes; 0 where there are none
    """

    place: str | None
    time: Timestamp | None = None
    at: bool = False
    copied: tuple[int, int] | None = None
    generation: int = 0


def progress(position: Mapping[str, Any]) -> Progress:
    """Read a position. It may hold anything, since people can edit it."""
    generation = position.get("generation")
    if isinstance(generation, int) and "lanes" in position:
        return Progress(None, generation=generation)
    token, at = position.get("token"), position.get("at")
    if isinstance(token, Mapping) and isinstance(token.get("_data"), str):
        return Progress(token["_data"], _time_of(token["_data"]), copied=_copied(position.get("snapshot")))
    if isinstance(at, Timestamp):
        place = f"82{int(ClusterTime.from_timestamp(at)):016X}"
        return Progress(place, at, at=True, copied=_copied(position.get("snapshot")))
    return Progress(None)


def is_behind(position: Mapping[str, Any], record: Mapping[str, Any] | None) -> bool:
    """Whether ``record``, which is committed, is ahead of ``position``."""
    if record is None:
        return False
    new, old = progress(position), progress(record)
    if new.generation and old.generation:
        return new.generation < old.generation
    if new.place is None or old.place is None or old.place < new.place or (old.at and new.time is None):
        return False
    if new.place < old.place:
        return True
    # The same place. While a snapshot is under way, this is the place where it began.
    return new.copied is not None and (old.copied is None or new.copied < old.copied)


def _time_of(data: str) -> Timestamp | None:
    try:
        return ClusterTime(int(data[2:18], 16)).to_timestamp() if len(data) >= 18 else None
    except ValueError:
        return None


def _copied(snapshot: object) -> tuple[int, int] | None:
    if not isinstance(snapshot, Mapping):
        return None
    collections = snapshot.get("collections")
    counted = [one for one in collections if isinstance(one, Mapping)] if isinstance(collections, list) else []
    return _sum(counted, "restarts"), _sum(counted, "documents")


def _sum(collections: list[Mapping[str, Any]], name: str) -> int:
    values = (one.get(name) for one in collections)
    return sum(value for value in values if isinstance(value, int))
