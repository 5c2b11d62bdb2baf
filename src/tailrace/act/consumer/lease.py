"""Where leases live: what a store promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tailrace.act.consumer.rules.errors import LeaseLost, LeaseStoreUnavailable, OwnerNotUnique
from tailrace.act.consumer.rules.lease import Lease
from tailrace.errors import TailraceError

__all__ = [
    "CommitsTogether",
    "Lease",
    "LeaseCommit",
    "LeaseLost",
    "LeaseStore",
    "LeaseStoreUnavailable",
    "OperatedLeaseStore",
    "OwnerNotUnique",
]


class LeaseCommit(NamedTuple):
    """The arguments of ``LeaseStore.commit``."""

    lease: Lease
    position: Mapping[str, Any]
    seconds: float


@runtime_checkable
class LeaseStore(Protocol):
    """One record for each resource: who holds its lease, the fencing token, the committed position. Methods may be
    called from several threads at a time.

    Each call is one atomic step on the record, judged by the store's own clock, durable when it returns. If it is not
    known whether a step was done, it raises LeaseStoreUnavailable, and the caller asks again.
    ``tailrace.testing.check_lease_store`` checks whether a store keeps these promises.
    """

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """The lease for ``seconds``, with a version one above the one before; ``None`` while another owner holds it
        unexpired. The owner that holds it acquires it again."""

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        """Hold it for ``seconds`` from now, version unchanged. Raises LeaseLost where owner and version are no longer
        those of ``lease``; OwnerNotUnique where only the version differs."""

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """Write ``position`` and hold the lease for ``seconds``, in one step. Raises what ``refresh`` raises, and
        then writes nothing. If the record's position is ahead (``rules.forward``), it writes nothing and raises
        LeaseDocumentError: a commit may be carried out long after its caller has given it up, and must not undo
        later ones."""

    def release(self, lease: Lease) -> bool:
        """Give the lease back if it is still held, so that others need not wait. Returns whether it was held; the
        position and the version stay."""

    def transaction(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> AbstractContextManager[Any]:
        """``with ... as session``: either both what is written with ``session`` and the commit of ``position`` take
        effect, or neither. Raises what ``commit`` raises, and UsageError if the store has no transactions."""

    def read(self, resource: str) -> Lease | None:
        """The record as it is; ``None`` where there is none."""

    def leases(self) -> Iterable[Lease]:
        """All records, by resource."""

    def revoke(self, resource: str) -> Lease | None:
        """Take the lease from its owner. Returns the record as it was; ``None`` if there is none."""

    def now(self) -> datetime:
        """The store's clock, UTC."""


@runtime_checkable
class CommitsTogether(Protocol):
    """What a store may also offer: several commits in one request. The lanes of a process use it if the store has
    it."""

    def commit_together(self, commits: Sequence[LeaseCommit]) -> Sequence[TailraceError | None]:
        """Do each commit separately, as ``commit`` does. Returns for each ``None``, or what ``commit`` would have
        raised. No two are for the same resource. Raises LeaseStoreUnavailable if it is not known which of them were
        done."""


@runtime_checkable
class OperatedLeaseStore(LeaseStore, Protocol):
    """What a store also has if an operator can act on its leases (``tailrace.consumer.LeaseOperations``). A store
    without it works too; its leases are never paused or reserved, and no change is left out."""

    def amend(self, before: Lease | None, after: Lease) -> bool:
        """Write in one step what differs between ``before`` and ``after``, if the record still has the owner and the
        version of ``before``; with ``None``, if there is no record. Returns whether it was written."""

    def remove(self, record: Lease) -> bool:
        """Remove the record if it still has this owner, this version and this end of the lease. Returns whether it was
        removed."""

    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """As ``commit``, and in the same step the request to leave a change out is cleared: the change was left out."""


def commits_together(store: LeaseStore) -> CommitsTogether | None:
    """The store, if its commits go that way. A class that changes ``commit`` alone wants to see each of them."""
    if not isinstance(store, CommitsTogether):
        return None
    kinds = (vars(kind) for kind in type(store).__mro__)
    first: Mapping[str, Any] = next((kind for kind in kinds if "commit_together" in kind or "commit" in kind), {})
    return None if "commit" in first and "commit_together" not in first else store
