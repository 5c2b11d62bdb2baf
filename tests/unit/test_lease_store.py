"""The store in memory keeps the promises of a store, and the check of them notices stores that do not."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tailrace.act.consumer.lease import LeaseCommit, commits_together
from tailrace.consumer import Lease, LeaseLost, LeaseStore, MemoryLeaseStore
from tailrace.errors import UsageError
from tailrace.testing import LeaseStoreError, check_lease_store


def test_the_store_in_memory_keeps_every_promise() -> None:
    store = MemoryLeaseStore()
    assert isinstance(store, LeaseStore)
    check_lease_store(lambda: store)


class GivesToEverybody(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        self.revoke(resource)
        return super().acquire(resource, owner, seconds)


class VersionStays(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        record = self.read(resource)
        lease = super().acquire(resource, owner, seconds)
        if lease is None or record is None:
            return lease
        return self._put(replace(lease, version=record.version))


class VersionGrowsWithRefresh(MemoryLeaseStore):
    def refresh(self, lease: Lease, seconds: float) -> Lease:
        held = super().refresh(lease, seconds)
        return self._put(replace(held, version=held.version + 1))


class CommitsForAnybody(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        return super().commit(self.read(lease.resource) or lease, position, seconds)


class LooksAtTheOwnerAlone(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        record = self.read(lease.resource)
        if record is not None and record.owner == lease.owner:
            lease = record
        return super().commit(lease, position, seconds)


class ReleasesForAnybody(MemoryLeaseStore):
    def release(self, lease: Lease) -> bool:
        return super().release(self.read(lease.resource) or lease)


class ForgetsThePosition(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        lease = super().acquire(resource, owner, seconds)
        return lease and self._put(replace(lease, position=None))


class KeepsPositionsAsText(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        return super().commit(lease, json.loads(json.dumps(position, default=str)), seconds)


class NeverRunsOut(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        return super().acquire(resource, owner, 600.0)


class CommitDoesNotHold(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        before = self.read(lease.resource)
        after = super().commit(lease, position, seconds)
        return self._put(replace(after, expires_at=before and before.expires_at))


class RefreshDoesNotHold(MemoryLeaseStore):
    def refresh(self, lease: Lease, seconds: float) -> Lease:
        return super().refresh(lease, min(seconds, 0.1))


class RevokesNothing(MemoryLeaseStore):
    def revoke(self, resource: str) -> Lease | None:
        return self.read(resource)


class LooksBeforeItLeaps(MemoryLeaseStore):
    """The check and the change are two steps."""

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        record = self.read(resource)
        if record is not None and record.owner not in (None, owner) and not record.is_free(self.now()):
            return None
        time.sleep(0.01)
        self.revoke(resource)
        return super().acquire(resource, owner, seconds)


class RefusesSilently(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        try:
            return super().commit(lease, position, seconds)
        except LeaseLost:
            return lease


class StopsAtTheFirstThatIsLost(MemoryLeaseStore):
    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[Any]:
        answers = [error for error in map(self._outcome, commits[:1]) if error is not None]
        return [*answers, *answers] if answers else super().commit_together(commits)


class GivesWhatIsPaused(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        record = self.read(resource)
        lease = super().acquire(resource, owner, seconds)
        if lease is not None or record is None or record.owner is not None or record.paused_at is None:
            return lease
        self._put(replace(record, paused_at=None))
        return super().acquire(resource, owner, seconds)


class GivesWhatIsReserved(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        record = self.read(resource)
        if record is not None:
            self._put(replace(record, reserved_until=None))
        return super().acquire(resource, owner, seconds)


class ReservesForThoseWhoseNamesBeginSo(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        record = self.read(resource)
        if record is not None and record.reserved_for is not None and owner.startswith(record.reserved_for):
            self._put(replace(record, reserved_until=None))
        return super().acquire(resource, owner, seconds)


class AmendsWhateverIsThere(MemoryLeaseStore):
    def amend(self, before: Lease | None, after: Lease) -> bool:
        return super().amend(self.read(after.resource), after)


class RemovesWhateverIsThere(MemoryLeaseStore):
    def remove(self, record: Lease) -> bool:
        return super().remove(self.read(record.resource) or record)


class EndsNoSkip(MemoryLeaseStore):
    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        return self.commit(lease, position, seconds)


class SkipsBackwards(MemoryLeaseStore):
    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        self._put(replace(self.refresh(lease, seconds), position=None))
        return super().commit_skip(lease, position, seconds)


class ForgetsTheSkip(MemoryLeaseStore):
    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        lease = super().acquire(resource, owner, seconds)
        return lease and self._put(replace(lease, skip=None))


class SeesEachCommit(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        return super().commit(lease, position, seconds)


class SeesBoth(SeesEachCommit):
    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[Any]:
        return super().commit_together(commits)


def test_a_store_whose_class_changes_commit_alone_is_given_each_commit_alone() -> None:
    """Lanes bypassed such a class, and every listener would."""
    assert [commits_together(kind()) is not None for kind in (MemoryLeaseStore, SeesEachCommit, SeesBoth)] == [
        True,
        False,
        True,
    ]


class CommitsTogetherForAnybody(MemoryLeaseStore):
    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[Any]:
        mine = [one._replace(lease=self.read(one.lease.resource) or one.lease) for one in commits]
        return super().commit_together(mine)


class SetsThePositionBack(MemoryLeaseStore):
    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        record = self.read(lease.resource)
        if record is not None and (record.owner, record.version) == (lease.owner, lease.version):
            self._put(replace(record, position=None))
        return super().commit(lease, position, seconds)


class SetsThePositionBackTogether(MemoryLeaseStore):
    def commit_together(self, commits: Sequence[LeaseCommit]) -> list[Any]:
        for one in commits:
            record = self.read(one.lease.resource)
            if record is not None and (record.owner, record.version) == (one.lease.owner, one.lease.version):
                self._put(replace(record, position=None))
        return super().commit_together(commits)


class SeesOnlyItsOwn(MemoryLeaseStore):
    """Each store object has records of its own."""


BROKEN = [
    GivesToEverybody,
    VersionStays,
    VersionGrowsWithRefresh,
    CommitsForAnybody,
    LooksAtTheOwnerAlone,
    ReleasesForAnybody,
    ForgetsThePosition,
    KeepsPositionsAsText,
    CommitDoesNotHold,
    RefreshDoesNotHold,
    RevokesNothing,
    LooksBeforeItLeaps,
    RefusesSilently,
    StopsAtTheFirstThatIsLost,
    CommitsTogetherForAnybody,
    SetsThePositionBack,
    SetsThePositionBackTogether,
    GivesWhatIsPaused,
    GivesWhatIsReserved,
    ReservesForThoseWhoseNamesBeginSo,
    AmendsWhateverIsThere,
    RemovesWhateverIsThere,
    EndsNoSkip,
    SkipsBackwards,
    ForgetsTheSkip,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_store_is_found(broken: type[MemoryLeaseStore]) -> None:
    store = broken()
    with pytest.raises(LeaseStoreError):
        check_lease_store(lambda: store)


def test_a_store_that_shares_nothing_is_found() -> None:
    with pytest.raises(LeaseStoreError):
        check_lease_store(SeesOnlyItsOwn)


def test_a_lease_that_never_runs_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.act.testing.lease_store._WAIT_S", 1.0)
    store = NeverRunsOut()
    with pytest.raises(LeaseStoreError, match="run out"):
        check_lease_store(lambda: store)


def test_a_test_can_move_the_clock() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    store = MemoryLeaseStore(lambda: now)
    first = store.acquire("orders", "a", 30)
    assert first is not None
    assert store.acquire("orders", "b", 30) is None
    now += timedelta(seconds=30)
    second = store.acquire("orders", "b", 30)
    assert second is not None
    assert second.version == 2
    with pytest.raises(LeaseLost, match="'b' holds it, version 2"):
        store.commit(first, {"at": 1}, 30)


@pytest.mark.parametrize(
    ("resource", "owner", "seconds"),
    [("", "a", 1), ("r", "", 1), ("r", "a", 0), ("r", "a", "1"), (5, "a", 1), ("r", "a", 1e9)],
)
def test_a_lease_that_cannot_be_asked_for_is_an_error_of_the_caller(resource: Any, owner: Any, seconds: Any) -> None:
    with pytest.raises(UsageError):
        MemoryLeaseStore().acquire(resource, owner, seconds)
