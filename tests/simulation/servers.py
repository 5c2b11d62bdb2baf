"""The other side: the store of leases, and the targets that handlers write to. Each call here is one atomic step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules import lease as rules
from tailrace.act.consumer.rules.errors import Fenced, LeaseStoreUnavailable
from tailrace.act.consumer.rules.lease import Lease
from tailrace.act.consumer.rules.position import StreamPosition
from tests.simulation.recorded import RecordedEvent
from tests.simulation.schedule import Schedule

Clock = Callable[[], datetime]


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


@dataclass
class Target:
    """A document that handlers write to."""

    fence: int = 0
    newest: int = -1


class Servers:
    """Leases by resource, targets by key; checks at each step what must never happen.

    ``fenced``  whether targets refuse older tokens (a mutant's do not)
    """

    transaction_seconds = 60.0

    def __init__(self, schedule: Schedule, *, fenced: bool = True) -> None:
        self.schedule = schedule
        self.fenced = fenced
        self.records: dict[str, Lease] = {}
        self.granted_until: dict[str, float] = {}
        self.locked: dict[str, tuple[object, float]] = {}
        self.targets: dict[str, Target] = {}
        self.handled: dict[int, int] = {}
        self.commits = 0
        #: The change that each version must handle next: it begins after the position that it read.
        self.next_change: dict[int, int] = {}
        self.first_after: Callable[[Mapping[str, Any]], int] = lambda position: 0
        self.fenced_writes = 0
        #: Dead letters that were written, and those that came too late.
        self.replayed = self.fenced_letters = 0
        #: For changes to which an operator set the position back: how many more times they may take effect, and the
        #: version above which they must. Also the newest version under which each was handled, left out or passed over.
        self.repeats: dict[int, int] = {}
        self.again: dict[int, int] = {}
        self.settled: dict[int, int] = {}
        self.seeks = 0
        #: The changes that were left out since an operator last asked for one.
        self.left_out: set[int] = set()
        #: Requests to the store that arrived after their time-out.
        self.late = 0

    # The store

    def acquire(self, resource: str, owner: str, seconds: float, client_time: Clock) -> Lease | None:
        """``client_time`` is the asking process's clock, which a store must not use."""
        self.refuse_locked(resource)
        record = self.records.get(resource)
        taken = rules.after_acquire(record, resource, owner, seconds, self.time_of(client_time))
        if taken is None:
            return None
        if record is not None and record.is_free(self.now()):
            if record.paused_at is not None:
                raise BrokenPromiseError(f"{owner} took the lease on {resource}, which is paused")
            if record.is_reserved(self.now()) and not f"{owner}-".startswith(f"{record.reserved_for}-"):
                raise BrokenPromiseError(f"{owner} took the lease on {resource}, left to {record.reserved_for}")
        held = record is not None and record.owner not in (None, owner)
        if held and self.schedule.now < self.granted_until.get(resource, 0.0):
            raise BrokenPromiseError(
                f"{owner} took the lease on {resource} while it was granted to {record and record.owner}"
            )
        if record is not None and taken.version != record.version + 1:
            raise BrokenPromiseError(f"version {taken.version} follows {record.version}")
        if taken.position is not None:
            self.next_change[taken.version] = self.first_after(taken.position)
        return self.put(taken, seconds)

    def renew(self, lease: Lease, seconds: float, client_time: Clock, change: RecordedEvent) -> Lease | None:
        """Acquired again by an owner that goes on after ``change``."""
        renewed = self.acquire(lease.resource, str(lease.owner), seconds, client_time)
        if renewed is not None and renewed.version == lease.version + 1:
            self.next_change[renewed.version] = change.number + 1
        return renewed

    def time_of(self, client_time: Clock) -> datetime:
        """The clock that leases are judged by: the server's."""
        return self.schedule.server_time()

    def refresh(self, lease: Lease, seconds: float, client_time: Clock) -> Lease:
        self.refuse_locked(lease.resource)
        record = self.records.get(lease.resource)
        return self.put(rules.after_refresh(record, lease, seconds, self.time_of(client_time)), seconds)

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float, client_time: Clock) -> Lease:
        self.refuse_locked(lease.resource)
        return self._commit(lease, position, seconds, client_time)

    def _commit(self, lease: Lease, position: Mapping[str, Any], seconds: float, client_time: Clock) -> Lease:
        record = self.records.get(lease.resource)
        after = rules.after_commit(record, lease, position, seconds, self.time_of(client_time))
        if record is not None and record.position is not None:
            check_forward(record.position, position)
        self.commits += 1
        return self.put(after, seconds)

    def release(self, lease: Lease) -> None:
        self.refuse_locked(lease.resource)
        self.put(rules.after_release(self.records.get(lease.resource), lease), 0.0)

    def revoke(self, resource: str) -> None:
        """An operator takes the lease away."""
        record = self.records.get(resource)
        if record is not None and record.owner is not None and not self.is_locked(resource):
            self.put(rules.after_release(record, record), 0.0)

    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float, client_time: Clock) -> Lease:
        self.refuse_locked(lease.resource)
        after = self._commit(lease, position, seconds, client_time)
        return self.put(instructions.mark_skip(after, None), seconds)

    # An operator's requests

    def read(self, resource: str) -> Lease | None:
        return self.records.get(resource)

    def leases(self) -> list[Lease]:
        return [self.records[name] for name in sorted(self.records)]

    def now(self) -> datetime:
        return self.schedule.server_time()

    def amend(self, before: Lease | None, after: Lease) -> bool:
        self.refuse_locked(after.resource)
        record = self.records.get(after.resource)
        if before is None or record is None:
            raise AssertionError("an operator acts on what is there")
        if (record.owner, record.version) != (before.owner, before.version):
            return False
        amended = replace(record, **instructions.changes(before, after))
        if after.skip is not None and before.skip is None:
            self.left_out.clear()
        if amended.position != record.position:
            self.sought(record.position, amended.position or {}, amended.version)
        until = amended.expires_at
        self.put(amended, 0.0 if until is None else (until - self.now()).total_seconds())
        return True

    def sought(self, before: Mapping[str, Any] | None, after: Mapping[str, Any], version: int) -> None:
        """An operator has moved the position: the changes in between must be handled again by newer owners, or not at
        all."""
        first, last = (0 if before is None else self.first_after(before)), self.first_after(after)
        for number in range(last, first):
            self.repeats[number] = self.repeats.get(number, 0) + 1
            self.again[number] = version
        for target in self.targets.values():
            target.newest = min(target.newest, last - 1)
        for number in range(first, last):
            self.again.pop(number, None)
            self.settled[number] = max(version, self.settled.get(number, 0))
        self.seeks += 1

    def is_settled(self, number: int) -> bool:
        """Whether a change was handled or left out, after an operator last wanted it handled again."""
        return self.settled.get(number, 0) > self.again.get(number, 0)

    def check_removable(self, record: Lease) -> None:
        found = self.records.get(record.resource)
        is_still = found is not None and (found.owner, found.version, found.expires_at) == (
            record.owner,
            record.version,
            record.expires_at,
        )
        if is_still and not record.is_free(self.now()):
            raise BrokenPromiseError(f"an operator deletes the lease on {record.resource}, which {record.owner} holds")

    def check_unheld(self, names: list[str]) -> None:
        for name in names:
            record = self.records.get(name)
            if record is not None and record.paused_at is not None and not record.is_free(self.now()):
                raise BrokenPromiseError(f"{record.owner} holds the lease on {name}, which is paused")

    def put(self, record: Lease, seconds: float) -> Lease:
        self.records[record.resource] = record
        self.granted_until[record.resource] = self.schedule.now + seconds
        return record

    # Transactions: the lease's record is locked from the first write to the end

    def begin(self, transaction: object, lease: Lease) -> None:
        self.refuse_locked(lease.resource)
        rules.require_held(self.records.get(lease.resource), lease)
        self.locked[lease.resource] = transaction, self.schedule.now + self.transaction_seconds

    def end(self, transaction: object, resource: str) -> None:
        if self.locked.get(resource, (None, 0.0))[0] is transaction:
            del self.locked[resource]

    def is_locked(self, resource: str) -> bool:
        holder = self.locked.get(resource)
        if holder is not None and holder[1] <= self.schedule.now:
            del self.locked[resource]  # the server has ended the transaction
            return False
        return holder is not None

    def refuse_locked(self, resource: str) -> None:
        if self.is_locked(resource):
            raise LeaseStoreUnavailable(f"a transaction holds the record of {resource}")

    def commit_transaction(
        self, transaction: object, lease: Lease, position: Mapping[str, Any], seconds: float, event: RecordedEvent
    ) -> None:
        if not self.is_locked(lease.resource) or self.locked[lease.resource][0] is not transaction:
            raise LeaseStoreUnavailable("the transaction has been aborted")
        self.end(transaction, lease.resource)
        self._commit(lease, position, seconds, self.schedule.server_time)
        self.write(event, lease.version)
        if self.handled[event.number] > 1 + self.repeats.get(event.number, 0):
            raise BrokenPromiseError(f"change {event.number} took effect twice in transactions")

    # Targets

    def write(self, event: RecordedEvent, version: int) -> None:
        """A fenced write: the effect of one change."""
        target = self.targets.setdefault(event.key, Target())
        if version < target.fence:
            if self.fenced:
                self.fenced_writes += 1
                raise Fenced(f"version {version} after {target.fence}")
            raise BrokenPromiseError(f"an effect of version {version} came after one of {target.fence}")
        following = self.next_change.get(version, event.number)
        if event.number not in (following - 1, following):  # a handler that got no answer writes again
            raise BrokenPromiseError(f"version {version} handles change {event.number} where {following} is next")
        self.next_change[version] = event.number + 1
        target.fence = version
        target.newest = event.number
        self.handled[event.number] = self.handled.get(event.number, 0) + 1
        self.settled[event.number] = max(version, self.settled.get(event.number, 0))

    def replay(self, event: RecordedEvent, version: int) -> None:
        """A fenced write of a dead letter."""
        target = self.targets.setdefault(event.key, Target())
        if version < target.fence:
            self.fenced_letters += 1
            return
        # What an older owner has written after this change is handled again by the owner that left this one out, since
        # that owner began before both.
        if event.number < target.newest and target.fence == version:
            raise BrokenPromiseError(f"the dead letter {event.number} has undone the change {target.newest}")
        self.replayed += 1
        target.fence, target.newest = version, event.number


def check_forward(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """The committed position never goes back."""
    if before.get("token") is None or after.get("token") is None:
        if before.get("token") is not None and not jumps_over(before, after):
            raise BrokenPromiseError("a position with a token was replaced by one without")
        return
    if after["token"]["_data"] < before["token"]["_data"]:
        raise BrokenPromiseError(f"the position went back from {before['token']} to {after['token']}")


def jumps_over(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether what is in between is on record as a gap."""
    begin = StreamPosition(before["token"]).cluster_time.to_timestamp()
    return any(gap["from"] <= begin and after["at"] <= gap["to"] for gap in after.get("gaps", ()))
