"""Keeps a lease alive while its listener works, and notices when it is gone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from tailrace.act.consumer.rules.errors import LeaseLost, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.need import ListenerNeed, Outcome, Pause, RefreshLease, ReleaseLease
from tailrace.act.consumer.rules.ownership import Ownership

#: How many times a lease is refreshed before it would run out.
_REFRESHES: Final = 3


def keep(
    ownership: Ownership, lease_seconds: float, handler_timeout: float | None = None
) -> Generator[ListenerNeed, Outcome, None]:
    """Needs of a keeper, until the ownership ends or is lost. It may be closed at any of them.

    ``handler_timeout``  seconds after which a handler is taken to hang: the lease is given back, so that another
                         listener goes on, and what the handler still tries is refused
    """
    wait = lease_seconds / _REFRESHES
    due = ownership.deadline - lease_seconds + wait
    while True:
        outcome = yield Pause(_wait(wait, handler_timeout), "until the next refresh", always=True)
        if ownership.ended or ownership.lost is not None:
            return
        since = ownership.busy_since
        if handler_timeout is not None and since is not None and outcome.now - since >= handler_timeout:
            ownership.lose(
                LeaseLost(
                    f"the lease on {ownership.lease.resource!r} was given back: the handler has been at work on one "
                    f"change for more than {handler_timeout:g} s",
                    hint="Let the handler end sooner, or choose a longer handler_timeout",
                )
            )
            yield ReleaseLease(ownership.lease)
            return
        if ownership.in_transaction or (handler_timeout is not None and outcome.now < due):
            continue
        wait = yield from _refresh(ownership, lease_seconds)
        due = outcome.now + wait


def _wait(wait: float, handler_timeout: float | None) -> float:
    """So that a handler that hangs is noticed soon after its time, also when it has begun during the wait."""
    return wait if handler_timeout is None else min(wait, handler_timeout / 4)


def _refresh(ownership: Ownership, lease_seconds: float) -> Generator[ListenerNeed, Outcome, float]:
    """Refresh once; how long to wait before the next time."""
    lease = ownership.lease
    outcome = yield RefreshLease(lease)
    if outcome.error is None:
        ownership.extend(outcome.asked + lease_seconds)
        if isinstance(outcome.value, Lease) and outcome.value.paused_at is not None:
            ownership.asked_back = True
        return lease_seconds / _REFRESHES
    if isinstance(outcome.error, LeaseLost):
        if not ownership.in_transaction and ownership.is_current(lease):
            ownership.lose(outcome.error)
    elif not isinstance(outcome.error, LeaseStoreUnavailable):
        raise outcome.error
    if outcome.now >= ownership.deadline and not ownership.in_transaction:
        ownership.lose(LeaseLost(f"the lease on {ownership.lease.resource!r} ran out: the store did not answer"))
    return lease_seconds / _REFRESHES / 10
