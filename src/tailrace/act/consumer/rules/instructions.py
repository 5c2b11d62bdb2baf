"""What an operator makes of a lease's record: hold it still, hand it over, move its position, leave out a change.

What may live here: the record after each of these, from the record before and the store's time. A store writes what
differs (``OperatedLeaseStore.amend``) while owner and version are still those of the record before. To change the
position, the operator becomes an owner like any other: ``seize`` gives the newest fencing token, so that the owner
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


def disown(record: Lease) -> Lease:
    """Take the lease from its owner."""
    return replace(record, owner=None, expires_at=None)


def pause(record: Lease, now: datetime) -> Lease:
    """Let nobody take the lease from now on; its owner, if there is one, is asked to give it back."""
    return replace(record, paused_at=record.paused_at or now)


def resume(record: Lease) -> Lease:
    """Let anybody take the lease again."""
    return replace(record, paused_at=None, reserved_for=None, reserved_until=None)


def hand_over(record: Lease, to: str, seconds: float, now: datetime) -> Lease:
    """Take the lease from its owner, and leave it to ``to`` alone for a time."""
    return replace(disown(record), reserved_for=to, reserved_until=now + timedelta(seconds=seconds))


def seize(record: Lease, owner: str, seconds: float, now: datetime) -> Lease:
    """Give the lease to ``owner``, the operator, whoever held it before, with a newer fencing token."""
    until = now + timedelta(seconds=seconds)
    return replace(record, owner=owner, version=record.version + 1, expires_at=until, acquired_at=now)


def place(lease: Lease, position: Mapping[str, Any], now: datetime) -> Lease:
    """Set another position, however far back. What was to be left out there is forgotten."""
    return replace(lease, position=position, committed_at=now, skip=None)


def mark_skip(record: Lease, skip: Mapping[str, Any] | None) -> Lease:
    """Let the next owner leave out the first change that it comes to; with ``None`` it does not."""
    return replace(record, skip=skip)
