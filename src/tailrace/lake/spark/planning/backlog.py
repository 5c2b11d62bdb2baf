"""How far a query is behind, and how long the oplog still holds what it has not read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

#: The fields beside those of an offset in ``sources[].latestOffset`` of a query's progress.
_SECONDS: Final = "lagSeconds"
_BYTES: Final = "lagBytes"
_LEFT: Final = "oplogSecondsLeft"


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a query has not read yet.

    Attributes:
        seconds: of cluster time, from the query's position to the newest majority-committed entry
        bytes: about how many bytes of the oplogs, by their size and the time that they cover; ``None``: the user has no
            right to ask
        seconds_left: from the oldest entry that still exists to the query's position, on the shard with the least: at
            the present pace, the oplog overtakes a query that stands still after this time. With an archive, counted
            from the archive's beginning. ``None``: nothing has been removed from any oplog yet
    """

    seconds: int
    bytes: int | None
    seconds_left: int | None

    @property
    def in_danger(self) -> bool:
        """Whether the query is nearer to the oplog's old end than to its new one."""
        return self.seconds_left is not None and self.seconds > self.seconds_left

    def warning(self) -> str:
        """What to say about a query in danger."""
        left = max(0, self.seconds_left or 0)
        return (
            f"the query is {self.seconds:,} s behind, and the oplog reaches back only {left:,} s further than that. If "
            "it overtakes the query, events are lost (286). Keep an archive (the section archive of the pipeline file, "
            "or 'tailrace archive'; the option archive reads it), enlarge the oplog, or make the query faster"
        )

    def to_json(self) -> dict[str, Any]:
        return {_SECONDS: self.seconds, _BYTES: self.bytes, _LEFT: self.seconds_left}


def backlog_in(latest_offset: object) -> Backlog | None:
    """What the ``latestOffset`` of a source's progress says, which is JSON text; ``None`` if it says nothing."""
    try:
        offset = json.loads(str(latest_offset))
        return Backlog(int(offset[_SECONDS]), offset[_BYTES], offset[_LEFT])
    except (ValueError, KeyError, TypeError):
        return None


def worst(backlogs: Iterable[Backlog]) -> Backlog | None:
    """That of a query with several sources: the longest lag, all bytes, the least time left."""
    known = list(backlogs)
    if not known:
        return None
    sizes = [one.bytes for one in known if one.bytes is not None]
    left = [one.seconds_left for one in known if one.seconds_left is not None]
    return Backlog(max(one.seconds for one in known), sum(sizes) if sizes else None, min(left, default=None))
