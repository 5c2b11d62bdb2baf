"""Leases in this process's memory: for tests of handlers, and as the simplest possible store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import bson

from tailrace.act.consumer.lease import LeaseCommit
from tailrace.act.consumer.rules import instructions
from tailrace.act.consumer.rules import lease as rules
from tailrace.act.consumer.rules.errors import LeaseDocumentError, LeaseLost
from tailrace.act.consumer.rules.lease import Lease
from tailrace.errors import TailraceError, UsageError


def _utc_now() -> datetime:
    return datetime.now(UTC)


class MemoryLeaseStore:
    """A LeaseStore without a server. Positions are kept as BSON, as in MongoDB, so what cannot be stored there fails
    here too.

    Args:
        clock: the store's clock, UTC; a test can pass its own, and set and move it at will
    """

    def __init__(self, clock: Callable[[], datetime] = _utc_now) -> None:
        self._clock = clock
        self._records: dict[str, Lease] = {}
        self._lock = threading.Lock()

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """See LeaseStore."""
        rules.check_arguments(resource, owner, seconds)
        with self._lock:
            taken = rules.after_acquire(self._records.get(resource), resource, owner, seconds, self._clock())
            return None if taken is None else self._put(taken)

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        """See LeaseStore."""
        with self._lock:
            return self._put(rules.after_refresh(self._records.get(lease.resource), lease, seconds, self._clock()))

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """See LeaseStore."""
        stored = bson.decode(bson.encode(position))
        with self._lock:
            record = self._records.get(lease.resource)
            return self._put(rules.after_commit(record, lease, stored, seconds, self._clock()))

    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[TailraceError | None]:
        """See CommitsTogether."""
        return [self._outcome(commit) for commit in commits]

    def _outcome(self, commit: LeaseCommit) -> TailraceError | None:
        try:
            self.commit(*commit)
        except (LeaseLost, LeaseDocumentError) as error:
            return error
        return None

    def release(self, lease: Lease) -> bool:
        """See LeaseStore."""
        with self._lock:
            try:
                self._put(rules.after_release(self._records.get(lease.resource), lease))
            except LeaseLost:
                return False
            return True

    def transaction(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> AbstractContextManager[Any]:
        """Raises UsageError: there is no database here whose transaction a handler's writes could join."""
        raise UsageError(
            f"MemoryLeaseStore has no transactions: the change at {position} cannot be handled in one",
            hint="Use MongoLeaseStore, in the deployment that the handler writes to",
        )

    def read(self, resource: str) -> Lease | None:
        """See LeaseStore."""
        with self._lock:
            return self._records.get(resource)

    def leases(self) -> list[Lease]:
        """See LeaseStore."""
        with self._lock:
            return [self._records[name] for name in sorted(self._records)]

    def revoke(self, resource: str) -> Lease | None:
        """See LeaseStore."""
        with self._lock:
            record = self._records.get(resource)
            if record is not None and record.owner is not None:
                self._put(rules.after_release(record, record))
            return record

    def amend(self, before: Lease | None, after: Lease) -> bool:
        """See OperatedLeaseStore."""
        changed = bson.decode(bson.encode({"position": after.position, "skip": after.skip}))
        differs = instructions.changes(before, after)
        with self._lock:
            record = self._records.get(after.resource)
            if not _is_still(record, before):
                return False
            kept = Lease(after.resource, None, 0) if record is None else record
            self._put(replace(kept, **{**differs, **{name: changed[name] for name in changed.keys() & differs.keys()}}))
            return True

    def remove(self, record: Lease) -> bool:
        """See OperatedLeaseStore."""
        with self._lock:
            found = self._records.get(record.resource)
            if found is None or not _is_still(found, record) or found.expires_at != record.expires_at:
                return False
            del self._records[record.resource]
            return True

    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """See OperatedLeaseStore."""
        stored = bson.decode(bson.encode(position))
        with self._lock:
            after = rules.after_commit(self._records.get(lease.resource), lease, stored, seconds, self._clock())
            return self._put(instructions.mark_skip(after, None))

    def now(self) -> datetime:
        """See LeaseStore."""
        return self._clock()

    def _put(self, record: Lease) -> Lease:
        self._records[record.resource] = record
        return record


def _is_still(record: Lease | None, before: Lease | None) -> bool:
    if record is None or before is None:
        return record is before
    return (record.owner, record.version) == (before.owner, before.version)
