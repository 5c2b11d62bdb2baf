"""What an operator makes of a lease's record: hold it still, hand it over, move its position, leave out a change.

What may live here: the record after each of these, from the record before and the store's time. A store writes what
differs (``OperatedLeaseStore.amend``) while owner and version are still those of the record before. What concerns the
position is done by the operator as an owner like any other: ``seized`` has the newest fencing token, so that the owner
before can commit nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

from tailrace.act.consumer.rules.lease import Lease


def changes(before: Lease | None, after: Lease) -> dict[str, Any]:
    """The attributes in which ``after`` differs, with their new values."""
    old = Lease(after.resource, None, -1) if before is None else before
    names = (field.name for field in fields(Lease))
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(old, name)}


def unowned(record: Lease) -> Lease:
    """Taken from whoever holds it."""
    return replace(record, owner=None, expires_at=None)


def paused(record: Lease, now: datetime) -> Lease:
    """Nobody takes it from now on; its owner, if there is one, is asked to give it back."""
    return replace(record, paused_at=record.paused_at or now)


def resumed(record: Lease) -> Lease:
    """Anybody may take it again."""
    return replace(record, paused_at=None, reserved_for=None, reserved_until=None)


def handed_over(record: Lease, to: str, seconds: float, now: datetime) -> Lease:
    """Taken from its owner, and left to ``to`` alone for a time."""
    return replace(unowned(record), reserved_for=to, reserved_until=now + timedelta(seconds=seconds))


def seized(record: Lease, owner: str, seconds: float, now: datetime) -> Lease:
    """Held by ``owner``, the operator, whoever held it before, with a newer fencing token."""
    until = now + timedelta(seconds=seconds)
    return replace(record, owner=owner, version=record.version + 1, expires_at=until, acquired_at=now)


def placed(lease: Lease, position: Mapping[str, Any], now: datetime) -> Lease:
    """At another position, however far back. What was to be left out there is forgotten."""
    return replace(lease, position=position, committed_at=now, skip=None)


def skipping(record: Lease, skip: Mapping[str, Any] | None) -> Lease:
    """The next owner leaves out the first change that it comes to; with ``None`` it does not."""
    return replace(record, skip=skip)
