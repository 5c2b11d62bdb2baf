"""Faults that are put back into the processes of the chaos: its checks must find each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from tailrace.act.consumer import fence, listening, mongo_lease_store
from tailrace.act.consumer.rules.ownership import Ownership
from tests.simulation.mutants import CommitsBeforeTheWork


def without_fence() -> None:
    """A fenced write does not look at the token of its target."""
    fence.Fence._where = lambda self, filter: dict(filter)  # type: ignore[method-assign]


def commits_past_a_batch() -> None:
    """The position after a batch is committed before its changes are handled."""
    listening.ListenerLogic = CommitsBeforeTheWork  # type: ignore[misc,attr-defined]


def judges_by_its_own_clock() -> None:
    """Whether a lease has expired is judged by the clock of the process that wants it."""
    acquired = mongo_lease_store._acquired

    def changed(part: Any) -> Any:
        if part == "$$NOW":
            return datetime.fromtimestamp(0, UTC) + timedelta(seconds=time.time())
        if isinstance(part, Mapping):
            return {name: changed(value) for name, value in part.items()}
        return [changed(one) for one in part] if isinstance(part, list) else part

    mongo_lease_store._acquired = lambda owner, seconds: changed(acquired(owner, seconds))


def looks_at_no_owner() -> None:
    """A process that was stopped does not notice, and its commit is done whoever holds the lease by now."""
    Ownership.check = lambda self, now: None  # type: ignore[method-assign]
    mongo_lease_store._of = lambda lease: {"_id": lease.resource}
    mongo_lease_store.forward = lambda position: {}  # type: ignore[attr-defined]
    mongo_lease_store.forward_expressions = lambda position: None  # type: ignore[attr-defined]


def _told_to_the_handlers() -> None:
    """See ``listening.py``."""


PLANTED: Final[dict[str, Callable[[], None]]] = {
    "no fence": without_fence,
    "commits past a batch": commits_past_a_batch,
    "the client's clock": judges_by_its_own_clock,
    "no owner looked at": looks_at_no_owner,
    "effects outside the transaction": _told_to_the_handlers,
    "lanes by number": _told_to_the_handlers,
}
