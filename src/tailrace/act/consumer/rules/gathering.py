"""Whether a commit waits for commits of other lanes, to go with them in one request. Callers give the time.

A lane whose handler is quick commits again soon after each answer. So it is worth waiting a moment for it: a request
with four commits costs the server and the client little more than one with a single commit. A lane whose handler takes
long is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

#: A commit waits for at most this part of the time that a request usually takes, and for at most this many seconds;
#: half of that from another request's answer on.
_PATIENCE: Final = 0.6
_PATIENCE_MAX_S: Final = 0.02
#: How much a single observation counts.
_TIME_WEIGHT: Final = 1 / 8
_PAUSE_WEIGHT: Final = 1 / 4


class _At(Enum):
    WORK = 1
    WAITING = 2
    ON_ITS_WAY = 3


class _Lane:
    """``since``: when its last commit was answered. ``pause``: seconds from there to its next one, usually; ``None``
    while unknown."""

    __slots__ = ("at", "pause", "since")

    def __init__(self) -> None:
        self.at = _At.WAITING
        self.since = 0.0
        self.pause: float | None = None


class Gathering:
    """What is known about the lanes of one process. ``now`` and other times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        #: How long a request usually takes; 0 before the first answer.
        self._request_s = 0.0
        self._answered_at = 0.0

    def note_commit(self, resource: str, now: float) -> None:
        """A lane has a commit."""
        lane = self._lanes.get(resource)
        if lane is None:
            lane = self._lanes[resource] = _Lane()
        elif lane.at is _At.WORK:
            pause = min(now - lane.since, 4 * self._request_s)  # one long pause must not count for ever
            lane.pause = pause if lane.pause is None else lane.pause + (pause - lane.pause) * _PAUSE_WEIGHT
        lane.at = _At.WAITING

    def note_sent(self, resources: Iterable[str]) -> None:
        """A request for these lanes is on its way."""
        for resource in resources:
            self._lanes[resource].at = _At.ON_ITS_WAY

    def note_answered(self, resources: Iterable[str], begun: float | None, now: float) -> None:
        """Their request, sent at ``begun``, has been answered; ``None`` if there was no answer."""
        if begun is not None:
            took = now - begun
            self._request_s += (took - self._request_s) * _TIME_WEIGHT if self._request_s else took
        self._answered_at = now
        for resource in resources:
            lane = self._lanes[resource]
            lane.at, lane.since = _At.WORK, now

    def wait(self, since: float, now: float) -> float:
        """For how many more seconds the waiting commits should wait; the first of them has waited since ``since``. 0 or
        less: they should be sent.

        Lanes whose request is on its way are waited for too: so lanes that have fallen out of step come together.
        """
        patience = min(_PATIENCE * self._request_s, _PATIENCE_MAX_S)
        end = max(since + patience, self._answered_at + patience / 2)
        latest = now
        for lane in self._lanes.values():
            if lane.at is _At.WAITING or lane.pause is None or lane.pause > patience / 2:
                continue
            latest = max(latest, end if lane.at is _At.ON_ITS_WAY else lane.since + patience)
        return min(latest, end) - now
