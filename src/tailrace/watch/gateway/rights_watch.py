"""Which changes of users and roles the shared read of the oplog has seen.

The server keeps users and roles in two collections of ``admin``. An entry about one of them means that somebody's
rights may have changed. It comes in the oplog before everything that was written later. So no event is given because of
an answer about rights that is older than the event.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.read.tail.shared_tail import SharedTail

_WATCHED: Final = (Scope.of_collection("admin", "system.users"), Scope.of_collection("admin", "system.roles"))


class RightsHeard(NamedTuple):
    """``generation``  changes with each known change, whosever rights it is about
    ``until``       all of them up to this time are known of; 0: none is
    """

    generation: int
    until: ClusterTime


#: For a deployment whose oplog does not tell: only the age of an answer counts.
UNHEARD: Final = RightsHeard(0, ClusterTime(-1 & (1 << 64) - 1))


class RightsWatch:
    """Reads from the window of ``shared``, without a thread: it reads when it is asked."""

    def __init__(self, shared: SharedTail) -> None:
        self._shared = shared
        self._places = [shared.place(scope) for scope in _WATCHED]
        self._generation = 0

    def heard(self) -> RightsHeard:
        """What is known now."""
        until = []
        for place in self._places:
            if not place.joined:
                self._generation += self._shared.join_at_end(place)  # something may have been missed
            batch = self._shared.poll(place)
            until.append(ClusterTime(0) if batch is None else batch.high_water)
            self._generation += batch is not None and bool(batch.raw)
        return RightsHeard(self._generation, min(until))

    def close(self) -> None:
        """Look no more; the shared read may end."""
        for place in self._places:
            self._shared.leave(place)
