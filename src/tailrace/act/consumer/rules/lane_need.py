"""What a process that shares lanes with others asks of the world, in addition to the needs of each lane's listener."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tailrace.act.consumer.rules.lanes import LanePlan
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.need import Pause


@dataclass(frozen=True, slots=True)
class Record:
    """A lease's record as it was read. By the store's clock: ``is_free``, whether nobody holds it; ``is_reserved``,
    whether an operator leaves it to somebody for a time."""

    lease: Lease
    is_free: bool
    is_reserved: bool = False

    @classmethod
    def of(cls, lease: Lease, now: datetime) -> Record:
        """A record at the store's time ``now``."""
        return cls(lease, lease.is_free(now), lease.is_reserved(now))

    @property
    def holder(self) -> str | None:
        """Who holds it now."""
        return None if self.is_free else self.lease.owner


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """Answered with a tuple: the Record of each resource, ``None`` for one that was never leased."""

    resources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Answered with the Lease, or ``None`` where somebody else holds it."""

    resource: str


@dataclass(frozen=True, slots=True)
class HoldLease:
    """Refresh it. Answered with anything; raises LeaseLost."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Commit the document as the lease's position. Answered with anything; raises LeaseLost."""

    lease: Lease
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GiveLease:
    """Release it if it is still held. Answered with anything."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class FindBeginning:
    """Settle where the first lanes begin, and commit that as the position of the resource's own lease. Answered with
    anything, when that is done or could not be."""


@dataclass(frozen=True, slots=True)
class RunLanes:
    """Work on these lanes and on no others. Answered at once with the set of lanes at work: those that were told to
    stop and have not ended are among them. Raises what ended a lane, unless it was the loss of its lease."""

    plan: LanePlan
    lanes: frozenset[int]


GroupNeed = ReadRecords | TakeLease | HoldLease | WriteRecord | GiveLease | FindBeginning | RunLanes | Pause
