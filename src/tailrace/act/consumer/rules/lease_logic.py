"""A listener's lease, and the position that is written under it. Part of ``rules.listener``."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from tailrace.act.consumer.rules.errors import LeaseLost, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.need import (
    AcquireLease,
    CommitPosition,
    KeepLease,
    ListenerNeed,
    Outcome,
    Pause,
    RenewLease,
)
from tailrace.act.consumer.rules.ownership import Ownership
from tailrace.act.consumer.rules.position import StreamPosition
from tailrace.act.consumer.rules.settings import ListenerSettings, ListenerStatistics

#: The first wait after a failure, and the longest one.
BACKOFF_S: Final = (0.05, 5.0)

Steps = Generator[ListenerNeed, Outcome, Any]


class LeaseLogic:
    """Has the lease, commits the position, and knows what the time was in the last answer."""

    def __init__(self, settings: ListenerSettings) -> None:
        self.settings = settings
        self.stopping = False
        #: The lease was had, or somebody else had it.
        self.begun = False
        self.statistics = ListenerStatistics()
        self.ownership: Ownership | None = None
        self._position: StreamPosition | None = None
        self._committed: StreamPosition | None = None
        self._committed_at = 0.0
        self._uncommitted = 0
        self._now = 0.0
        self._asked = 0.0

    @property
    def leaves(self) -> bool:
        """Whether the change in hand is the last one for now: the listener is stopped, or its lease asked back."""
        return self.stopping or (self.ownership is not None and self.ownership.asked_back)

    def _ask(self, need: ListenerNeed) -> Steps:
        outcome = yield need
        self._asked, self._now = outcome.asked, outcome.now
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _acquire(self) -> Steps:
        """The Ownership, waited for; ``None`` when the listener is stopped first."""
        failures = 0
        while not self.stopping:
            try:
                lease: Lease | None = yield from self._ask(AcquireLease())
            except LeaseStoreUnavailable as error:
                failures += 1
                yield Pause(backoff(failures), error.message)
                continue
            self.begun = True
            if lease is not None:
                owned = Ownership(lease, self._asked + self.settings.lease_seconds)
                self.ownership = owned
                self.statistics.lease_version = lease.version
                yield from self._ask(KeepLease(owned))
                return owned
            failures = 0
            yield Pause(min(self.settings.lease_seconds / 4, BACKOFF_S[1]), "another listener holds the lease")
        return None

    def _commit(self, owned: Ownership, *, ends_skip: bool = False) -> Steps:
        """Write the position, again and again until it is written or the lease is gone. Raises LeaseLost."""
        position, failures = self._position, 0
        if position is None:
            return
        while True:
            owned.check(self._now)
            try:
                yield from self._ask(CommitPosition(owned.lease, position, ends_skip))
            except LeaseStoreUnavailable as error:
                failures += 1
                yield from self._pause(backoff(failures), error.message, always=True)
                continue
            owned.extend(self._asked + self.settings.lease_seconds)
            self._note_commit(position)
            return

    def _renew(self, owned: Ownership) -> Steps:
        """Go on under a newer fencing token: a change that was left out and is handled later, under the token that it
        had, must not undo what is written from now on. Raises LeaseLost."""
        lease, failures = owned.lease, 0
        owned.renewing = True
        while True:
            owned.check(self._now)
            try:
                renewed: Lease | None = yield from self._ask(RenewLease(lease))
            except LeaseStoreUnavailable as error:
                failures += 1
                yield from self._pause(backoff(failures), error.message, always=True)
                continue
            break
        if renewed is None or renewed.version != lease.version + 1:
            # Another owner may have been there; the position is read back.
            raise LeaseLost(f"the lease on {lease.resource!r}, version {lease.version}, could not be renewed")
        owned.renew(renewed, self._asked + self.settings.lease_seconds)
        self.statistics.lease_version = renewed.version

    def _note_commit(self, position: StreamPosition) -> None:
        self._committed, self._committed_at, self._uncommitted = position, self._now, 0
        self.statistics.commits += 1

    def _moved(self, position: StreamPosition) -> None:
        self._position = position
        self._came_to(position)

    def _came_to(self, position: StreamPosition) -> None:
        """Everything before it is handled, whether it is written down or not."""
        statistics = self.statistics
        statistics.position_time = max(statistics.position_time, position.cluster_time.seconds)

    def _pause(self, seconds: float, reason: str, *, always: bool = False) -> Steps:
        yield from self._ask(Pause(seconds, reason, always))


def backoff(failures: int) -> float:
    """How many seconds to wait after this many failures in a row."""
    shortest, longest = BACKOFF_S
    return min(longest, shortest * 2.0 ** min(failures - 1, 20))
