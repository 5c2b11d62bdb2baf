"""Who may hold a lease: decisions on a record and a time, the same for every store.

What may live here: the record, and what acquire, refresh, commit and release make of it. ``MemoryLeaseStore`` and the
simulation call these; ``MongoLeaseStore`` expresses the same in the server's language, and one check compares them
(``tailrace.testing.check_lease_store``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from tailrace.act.consumer.rules.errors import LeaseDocumentError, LeaseLost, OwnerNotUnique
from tailrace.act.consumer.rules.forward import is_behind
from tailrace.errors import TailraceError, UsageError

LEASE_SECONDS_MIN: Final = 0.1
LEASE_SECONDS_MAX: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it stands in a store, with an operator's instructions to the listeners (``rules.instructions``).

    Attributes:
        resource: what is leased: a name that the listeners agree on
        owner: the id of the listener that holds it; ``None`` once it was released
        version: the fencing token: grows by one each time the lease is acquired, never otherwise
        position: what was committed last, a document; ``None`` before the first commit
        expires_at: when anybody may take it, by the store's clock (UTC); ``None`` where nobody holds it
        acquired_at: since when this owner has held it, by the store's clock
        committed_at: when ``position`` was written, by the store's clock
        paused_at: since when nobody is to take it; its owner finishes the change in hand and gives it back
        reserved_for: until ``reserved_until`` nobody else takes it: an owner's id, or what such ids begin with
        skip: the first change that the next owner comes to goes to the dead letters: ``{"letters": where}``
    """

    resource: str
    owner: str | None
    version: int
    position: Mapping[str, Any] | None = None
    expires_at: datetime | None = None
    acquired_at: datetime | None = None
    committed_at: datetime | None = None
    paused_at: datetime | None = None
    reserved_for: str | None = None
    reserved_until: datetime | None = None
    skip: Mapping[str, Any] | None = None

    def is_free(self, now: datetime) -> bool:
        """Whether anybody may take it at ``now``, a time of the store's clock."""
        return self.owner is None or self.expires_at is None or self.expires_at <= now

    def is_kept_from(self, owner: str, now: datetime) -> bool:
        """Whether an operator's instructions keep it from ``owner`` though nobody holds it."""
        return self.paused_at is not None or self.is_reserved_for_others(owner, now)

    def is_reserved_for_others(self, owner: str, now: datetime) -> bool:
        """Whether somebody else is to have it first."""
        return self.is_reserved(now) and self.reserved_for not in names_of(owner)

    def is_reserved(self, now: datetime) -> bool:
        """Whether it is reserved for anybody at ``now``."""
        return self.reserved_until is not None and self.reserved_until > now


def names_of(owner: str) -> tuple[str, ...]:
    """What names an owner where a lease is reserved: its id, and each part of it before a hyphen, such as its
    host."""
    return (owner, *(owner[:at] for at, letter in enumerate(owner) if letter == "-" and at))


def check_arguments(resource: str, owner: str, seconds: float) -> None:
    """Raises UsageError where a lease could not be asked for with these."""
    for name, value in (("resource", resource), ("owner", owner)):
        if not isinstance(value, str) or not value or len(value) > 500 or "\0" in value:
            raise UsageError(f"the {name} of a lease must be a string of 1 to 500 characters, not {value!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise UsageError(f"lease_seconds must be a number, not {seconds!r}")
    if not LEASE_SECONDS_MIN <= seconds <= LEASE_SECONDS_MAX:
        raise UsageError(f"lease_seconds must lie between {LEASE_SECONDS_MIN} and {LEASE_SECONDS_MAX:.0f}: {seconds}")


def after_acquire(record: Lease | None, resource: str, owner: str, seconds: float, now: datetime) -> Lease | None:
    """The record after ``owner`` asked for the lease; ``None`` where somebody else holds it.

    A request under the id that holds the lease gets it, with a new version: a process that was restarted under its
    old id need not wait, and if two share an id, the one before finds its version gone. Of a lease that is paused, it
    must give it back itself.
    """
    before = Lease(resource, None, 0) if record is None else record
    if before.is_kept_from(owner, now) if before.is_free(now) else before.owner != owner:
        return None
    is_reserved = before.is_reserved(now)
    return replace(
        before,
        owner=owner,
        version=before.version + 1,
        expires_at=now + timedelta(seconds=seconds),
        acquired_at=now,
        reserved_for=before.reserved_for if is_reserved else None,
        reserved_until=before.reserved_until if is_reserved else None,
    )


def require_held(record: Lease | None, lease: Lease) -> Lease:
    """``record``, if it still says what ``lease`` says: owner and version, both. Raises LeaseLost.

    A lease that has expired, and that nobody has taken since, is still held: its version is the newest.
    """
    if record is not None and (record.owner, record.version) == (lease.owner, lease.version):
        return record
    raise lease_lost(record, lease)


def lease_lost(record: Lease | None, lease: Lease) -> LeaseLost:
    """How the lease was lost, in words."""
    mine = f"the lease on {lease.resource!r}, version {lease.version}, is lost"
    if record is None:
        return LeaseLost(f"{mine}: its record is gone", hint="Never delete lease records: versions would start over")
    if record.owner == lease.owner:
        return OwnerNotUnique(
            f"{mine}: version {record.version} was taken under the same owner id {lease.owner!r}",
            hint="Each listener needs an owner id of its own: leave owner out",
        )
    who = "it was released" if record.owner is None else f"{record.owner!r} holds it"
    return LeaseLost(f"{mine}: {who}, version {record.version}")


def after_refresh(record: Lease | None, lease: Lease, seconds: float, now: datetime) -> Lease:
    """The record held for ``seconds`` from ``now``. Raises LeaseLost."""
    return replace(require_held(record, lease), expires_at=now + timedelta(seconds=seconds))


def after_commit(
    record: Lease | None, lease: Lease, position: Mapping[str, Any], seconds: float, now: datetime
) -> Lease:
    """The record with ``position``, held for ``seconds`` from ``now``. Raises LeaseLost, and LeaseDocumentError if
    the record's own position is ahead."""
    after = after_refresh(record, lease, seconds, now)
    if is_behind(position, after.position):
        raise commit_refused(record, lease)
    return replace(after, position=position, committed_at=now)


def commit_refused(record: Lease | None, lease: Lease) -> TailraceError:
    """The error for a commit that changed nothing: the lease is lost, or the record's position is ahead."""
    if record is None or (record.owner, record.version) != (lease.owner, lease.version):
        return lease_lost(record, lease)
    return LeaseDocumentError(
        f"the position in the lease on {lease.resource!r} is ahead of the one to be committed",
        hint="Did somebody move it by hand, or did a deployment with an older clock replace another? Correct the "
        "position, or use another resource",
    )


def after_release(record: Lease | None, lease: Lease) -> Lease:
    """The record without an owner. Raises LeaseLost."""
    return replace(require_held(record, lease), owner=None, expires_at=None)
