"""What a listener believes about the lease it holds, for everything in its process that must stop when it is gone.

The belief can be late: only the store and the targets know for certain, and they are asked by owner, version and fence.
The belief keeps a process that has woken up from trying.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.act.consumer.rules.errors import LeaseLost
from tailrace.act.consumer.rules.lease import Lease


class Ownership:
    """One lease from its acquisition to its end. Attributes are set by one thread and read by others, one at a time.

    ``lease``           as it was acquired: owner and version
    ``deadline``        when it runs out on the listener's own monotonic clock, counted from before it was asked for
    ``ended``           the listener has given it up; the keeper ends
    ``busy_since``      since when the handler has been at work, on the same clock; ``None`` while it is not
    ``on_lost``         called, by whichever thread notices, when the lease is found to be lost
    ``renewing``        a newer fencing token is asked for: what the store says about the one before counts for nothing
    ``asked_back``      an operator holds the lease still: the change in hand is finished and committed, and it is given
                        back
    ``skip``            the next change is not handled but goes to the dead letters (``Lease.skip``)
    ``in_transaction``  a transaction holds the lease's record: nobody can take it, and a refresh would only wait
    """

    __slots__ = (
        "_lost",
        "asked_back",
        "busy_since",
        "deadline",
        "ended",
        "in_transaction",
        "lease",
        "on_lost",
        "renewing",
        "skip",
    )

    def __init__(self, lease: Lease, deadline: float) -> None:
        self.lease = lease
        self.deadline = deadline
        self.ended = False
        self.busy_since: float | None = None
        self.in_transaction = False
        self.renewing = False
        self.asked_back = lease.paused_at is not None
        self.skip = lease.skip
        self.on_lost: Callable[[], object] | None = None
        self._lost: LeaseLost | None = None

    @property
    def lost(self) -> LeaseLost | None:
        """Why the lease is known to be lost."""
        return self._lost

    def lose(self, error: LeaseLost) -> None:
        """From now on it is known to be lost."""
        if self._lost is not None:
            return
        self._lost = error
        if self.on_lost is not None:
            self.on_lost()

    def extend(self, until: float) -> None:
        """The store has said that it is held until ``until``."""
        self.deadline = max(self.deadline, until)

    def renew(self, lease: Lease, until: float) -> None:
        """The lease has a newer fencing token, and is held until ``until``."""
        self.lease = lease
        self.renewing = False
        self.extend(until)

    def is_current(self, lease: Lease) -> bool:
        """Whether an answer about ``lease`` is one about the ownership."""
        return self.lease is lease and not self.renewing

    def check(self, now: float) -> None:
        """Raises LeaseLost where the lease is lost, or has not been refreshed in time."""
        if self._lost is None and now >= self.deadline and not self.in_transaction:
            self.lose(
                LeaseLost(
                    f"the lease on {self.lease.resource!r}, version {self.lease.version}, ran out: it could not be "
                    "refreshed in time",
                    hint="The process was paused, or the store did not answer; lease_seconds may be too short",
                )
            )
        if self._lost is not None:
            raise LeaseLost(self._lost.message, hint=self._lost.hint) from self._lost
