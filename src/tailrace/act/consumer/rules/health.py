"""How a listener is doing: what to say about it, given the facts."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from tailrace.base.health import HUNG_AFTER_S, Health

#: How long deployment and lease store may leave questions unanswered.
SILENT_AFTER_S: Final = 30.0
_TIMES_MAX: Final = 1_000


class NewestTimes:
    """The cluster times, in seconds, that were the newest of a deployment whenever it was checked.

    The clock of an idle deployment stands still and leaps ten seconds at a time, so the distance between a position
    and the newest time says little: what counts is the first time after the position that is known to have been there.
    """

    def __init__(self) -> None:
        self._times: list[int] = []
        self._apart = 0.0

    def saw(self, seconds: int) -> None:
        """It is ``seconds`` now."""
        times = self._times
        if times and seconds <= times[-1]:
            return
        if len(times) > 1 and times[-1] - times[-2] < self._apart:
            times[-1] = seconds
            return
        times.append(seconds)
        if len(times) > _TIMES_MAX:
            del times[1:-1:2]
            self._apart = (times[-1] - times[0]) / _TIMES_MAX * 2

    def lag(self, position: int) -> int | None:
        """How many seconds of cluster time a position is behind: 0 where nothing was seen after it. ``None`` while
        nothing is known."""
        if not self._times:
            return None
        after = bisect_right(self._times, position)
        if after == len(self._times):
            return 0
        return self._times[-1] - (self._times[after] if after else position)


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """``hung_after``    seconds after which a handler that works on one change is taken to hang
    ``behind_after``  seconds of lag after which a listener is not ready; ``None``: however far it is behind
    """

    hung_after: float = HUNG_AFTER_S
    behind_after: float | None = None


@dataclass(frozen=True, slots=True)
class ListenerFacts:
    """``begun``         it has the lease, or knows that somebody else has it
    ``holds``         it has the lease, or that of a lane
    ``busy_s``        for how long its handler has been at work on a change; ``None`` while it is not
    ``lease_lost``    why the lease is lost while the handler is still at work
    ``lag_s``         how far it is behind, or for one that waits, what was committed; ``None`` while that is unknown
    ``past_oplog``    the position is before the oldest entry that is left
    ``silence_s``     for how long deployment or lease store have not answered; ``silence`` says which, and why
    """

    resource: str
    begun: bool = True
    holds: bool = True
    busy_s: float | None = None
    lease_lost: str | None = None
    lag_s: float | None = None
    past_oplog: bool = False
    silence_s: float = 0.0
    silence: str = ""


def judge(facts: ListenerFacts, limits: HealthLimits) -> Health:
    """A listener that waits for its turn is ready: it is what takes over."""
    return Health(_said(facts), _dead(facts, limits), _unready(facts, limits), facts.begun)


def _said(facts: ListenerFacts) -> str:
    name = repr(facts.resource)
    if not facts.begun:
        return f"the listener on {name} has not asked for its lease yet"
    lag = "" if facts.lag_s is None else f", {facts.lag_s:.0f} s behind"
    if facts.holds:
        return f"the listener on {name} holds its lease{lag}"
    return f"the listener on {name} stands by: it does not hold the lease{lag}"


def _dead(facts: ListenerFacts, limits: HealthLimits) -> str | None:
    if facts.busy_s is None or facts.busy_s <= limits.hung_after:
        return None
    return (
        f"the handler of {facts.resource!r} has been at work on one change for {facts.busy_s:.0f} s, longer than "
        f"{limits.hung_after:g} s"
    )


def _unready(facts: ListenerFacts, limits: HealthLimits) -> str | None:
    if facts.lease_lost is not None:
        return f"{facts.lease_lost}, and its handler is still at work"
    if facts.past_oplog:
        return (
            f"the position of {facts.resource!r} is older than the oldest entry of the oplog: what was not read yet is "
            "lost (286)"
        )
    if facts.silence_s > SILENT_AFTER_S:
        return f"for {facts.silence_s:.0f} s there was no answer {facts.silence}"
    if limits.behind_after is not None and facts.lag_s is not None and facts.lag_s > limits.behind_after:
        return f"{facts.resource!r} is {facts.lag_s:.0f} s behind, more than {limits.behind_after:g} s"
    return None
