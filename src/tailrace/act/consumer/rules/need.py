"""What a listener's logic asks of the world, as data; its driver answers with an ``Outcome``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import TailraceError

StartName = Literal["oldest", "now", "snapshot"]
Decision = Literal["retry", "skip", "stop"]


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """Answered with the Lease, or ``None`` where somebody holds it."""


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Begin to keep the lease alive during everything else (``rules.keeper``); answered at once with anything."""

    ownership: Ownership


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Acquire the lease that is held once more, for a newer fencing token. Answered with the Lease, or ``None`` where
    somebody holds it."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class RefreshLease:
    """Answered with the Lease; raises LeaseLost."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class CommitPosition:
    """Answered with anything; raises LeaseLost."""

    lease: Lease
    position: StreamPosition
    #: In the same step it is noted that the change which an operator wanted left out was.
    ends_skip: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Give the lease back if it is still held; answered with anything."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class FindStart:
    """Answered with the Timestamp to start at: of the oldest entry that is no no-op, or of the present."""

    start: StartName


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Answered with the StreamPosition of a snapshot of which nothing is copied yet (``start="snapshot"``); the stream
    that is opened there gives what is there first."""

    lease: Lease
    position: StreamPosition | None


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open the stream at the position; one that is open is closed first. Answered with the deployment that it is read
    from (``DeploymentIdentity.name_and_id``), or ``None``; raises OtherHistoryError where the position is another's."""

    position: StreamPosition


@dataclass(frozen=True, slots=True)
class MarkEntries:
    """Read which entries stand at the position, so that it can be compared later. Answered with an EntryMark of each
    oplog, by its name: of the entry at the position, or of another between ``after`` and it; without those that have
    none. ``None`` where the oplogs cannot be asked."""

    position: StreamPosition
    after: ClusterTime


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close the stream, if one is open."""


@dataclass(frozen=True, slots=True)
class PullChange:
    """Answered with a ``Pulled``: the next change, or that there is none at the moment.

    ``wait``  false: only what is at hand
    """

    wait: bool = True


@dataclass(frozen=True, slots=True)
class Pulled:
    """``event`` is opaque here; ``token`` is the event's, or without one the stream's own, where it has one.

    ``invalidate``  the event ends the stream
    ``alive``       false where the stream has ended without an event
    ``position``    of a snapshot: where it stands after this event, or without one when all is copied
    ``size``        bytes of the event
    ``error``       the stream cannot give the event, and says why; ``event`` is what is known about it
    ``alone``       the event is handled on its own, even by a handler that takes several
    """

    event: Any
    token: Mapping[str, Any] | None
    invalidate: bool = False
    alive: bool = True
    position: StreamPosition | None = None
    size: int = 0
    alone: bool = False
    error: TailraceError | None = None


@dataclass(frozen=True, slots=True)
class HandleChange:
    """Run the handler. Answered with true where ``position`` was committed together with its writes. ``again`` counts
    the changes directly before this one that have its token (``Change.message_id``)."""

    lease: Lease
    event: Any
    position: StreamPosition
    again: int = 0


class BatchHandler(Protocol):
    """A handler that takes several changes at a time, such as one that sends them elsewhere together. Each call is
    given what is at hand, up to the next commit and up to about 16 MB; on a quiet stream that is one."""

    def handle_batch(self, changes: Sequence[Any]) -> int:
        """Handle changes in order. How many are done, from the first: one or more. The others come again. Raises what
        is wrong with the first: the error policy is asked about that one."""


@dataclass(frozen=True, slots=True)
class HandleChanges:
    """Run a handler that takes several changes at a time. Answered with ``Handled``; raises what is wrong with the
    first of them."""

    changes: Sequence[HandleChange]


@dataclass(frozen=True, slots=True)
class Handled:
    """``count``      how many changes, from the first, are done: one or more
    ``committed``  the position of the last of them was committed together with its writes
    """

    count: int
    committed: bool = False


@dataclass(frozen=True, slots=True)
class JudgeError:
    """Ask the error policy. Answered with a Decision."""

    change: HandleChange
    error: Exception
    attempt: int


@dataclass(frozen=True, slots=True)
class SkipChange:
    """Write a change to the dead letters in the place of its handling, as an operator has asked for. ``error``: why the
    stream cannot give it, where that is so. Answered with whether it was one: a lane at a barrier has none."""

    change: HandleChange
    skip: Mapping[str, Any]
    error: TailraceError | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait about this long: a driver adds jitter. ``reason`` is for a log. Cut short when the listener is stopped,
    unless ``always``."""

    seconds: float
    reason: str
    always: bool = False


@dataclass(frozen=True, slots=True)
class TellGap:
    """Changes were lost, and the listener goes on after them: let the operator know. Answered with anything."""

    begin: Timestamp
    end: Timestamp
    why: str


ListenerNeed = (
    AcquireLease
    | KeepLease
    | RefreshLease
    | RenewLease
    | CommitPosition
    | ReleaseLease
    | FindStart
    | TakeSnapshot
    | OpenStream
    | MarkEntries
    | CloseStream
    | PullChange
    | HandleChange
    | HandleChanges
    | JudgeError
    | SkipChange
    | Pause
    | TellGap
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a need: a value or an error, and when it was asked and answered on the listener's own monotonic
    clock, in seconds."""

    asked: float
    now: float
    value: Any = None
    error: BaseException | None = None
