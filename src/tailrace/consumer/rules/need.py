"""What a listener's logic asks of the world, as data; whoever drives it answers with an ``Outcome``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tailrace.consumer.rules.lease import Lease
from tailrace.consumer.rules.ownership import Ownership
from tailrace.consumer.rules.position import StreamPosition

Start = Literal["oldest", "now", "snapshot"]
Decision = Literal["retry", "skip", "stop"]


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Answered with the Lease, or ``None`` where somebody holds it."""


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Begin to keep the lease alive beside everything else (``rules.keeper``); answered at once with anything."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class RefreshLease:
    """Answered with the Lease; raises LeaseLost."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class CommitPosition:
    """Answered with anything; raises LeaseLost."""

    lease: Lease
    position: StreamPosition


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Give the lease back if it is still held; answered with anything."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class FindStart:
    """Answered with the Timestamp to start at: of the oldest entry that is no no-op, or of the present."""

    start: Start


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Answered with the StreamPosition of a snapshot of which nothing is copied yet (``start="snapshot"``); the stream
    that is opened there gives what is there first."""

    lease: Lease
    position: StreamPosition | None


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open the stream at the position; one that is open is closed first."""

    position: StreamPosition


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close the stream, if one is open."""


@dataclass(frozen=True, slots=True)
class PullChange:
    """Answered with a ``Pulled``: the next change, or that there is none at the moment."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """``event`` is opaque here; ``token`` is the event's, or without one the stream's own, where it has one.

    ``invalidate``  the event ends the stream
    ``alive``       false where the stream has ended without an event
    ``position``    of a snapshot: where it stands after this event, or without one when all is copied
    """

    event: Any
    token: Mapping[str, Any] | None
    invalidate: bool = False
    alive: bool = True
    position: StreamPosition | None = None


@dataclass(frozen=True, slots=True)
class HandleChange:
    """Run the handler. Answered with true where ``position`` was committed together with its writes."""

    lease: Lease
    event: Any
    position: StreamPosition


@dataclass(frozen=True, slots=True)
class JudgeError:
    """Ask the error policy. Answered with a Decision."""

    change: HandleChange
    error: Exception
    attempt: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait about so long: a driver adds jitter. ``reason`` is for a log. Cut short when the listener is stopped,
    unless ``always``."""

    seconds: float
    reason: str
    always: bool = False


Need = (
    AcquireLease
    | KeepLease
    | RefreshLease
    | CommitPosition
    | ReleaseLease
    | FindStart
    | TakeSnapshot
    | OpenStream
    | CloseStream
    | PullChange
    | HandleChange
    | JudgeError
    | Pause
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a need: a value or an error, and when it was asked and answered on the listener's own monotonic
    clock, in seconds."""

    asked: float
    now: float
    value: Any = None
    error: BaseException | None = None
