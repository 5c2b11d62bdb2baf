"""What a listener was asked to do, and what it has counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tailrace.act.consumer.rules.commit_policy import CommitPolicy
from tailrace.act.consumer.rules.need import StartName
from tailrace.act.consumer.rules.retry_schedule import RetrySchedule
from tailrace.errors import UsageError

OnHistoryLost = Literal["fail", "snapshot", "gap"]
OnInvalidate = Literal["fail", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """What a listener was asked to do; see ``tailrace.consumer.Listener``."""

    resource: str
    lease_seconds: float = 30.0
    start: StartName = "oldest"
    on_history_lost: OnHistoryLost = "fail"
    on_invalidate: OnInvalidate = "fail"
    commits: CommitPolicy = field(default_factory=CommitPolicy)
    #: How many changes the handler is given at a time at most; 0: it takes one.
    batch: int = 0
    retry: RetrySchedule = field(default_factory=RetrySchedule)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("start", ("oldest", "now", "snapshot")),
            ("on_history_lost", ("fail", "snapshot", "gap")),
            ("on_invalidate", ("fail", "resume")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")


@dataclass(slots=True)
class ListenerStatistics:
    """Counted since the listener was made.

    Attributes:
        handled: changes for which the handler has returned
        skipped: changes that the error policy passed over
        commits: positions written, those inside transactions included
        failures: times that the handler raised
        leases_lost: times that a lease was lost or given up
        lease_version: the fencing token of the lease that is held; 0 while none is
        position_time: seconds since 1970 of the cluster time up to which everything was handled; 0 while unknown
        gaps: times that lost history was accepted
        paused: 1 while an operator has paused the resource, as far as this listener knows
    """

    handled: int = 0
    skipped: int = 0
    commits: int = 0
    failures: int = 0
    leases_lost: int = 0
    lease_version: int = 0
    position_time: int = 0
    gaps: int = 0
    paused: int = 0


def together(parts: Sequence[ListenerStatistics]) -> ListenerStatistics:
    """The statistics of several listeners as those of one: the least position, the newest lease."""
    whole = ListenerStatistics()
    for name in ("handled", "skipped", "commits", "failures", "leases_lost", "gaps"):
        setattr(whole, name, sum(getattr(part, name) for part in parts))
    whole.paused = max(part.paused for part in parts)
    whole.lease_version = max(part.lease_version for part in parts)
    whole.position_time = min((part.position_time for part in parts if part.lease_version), default=0)
    return whole
