"""The lease store as a lane's listener sees it: its lane's lease under the lane's name, with fencing tokens that grow
over generations too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from typing import Any

from tailrace.act.consumer.group_commit import GroupCommit
from tailrace.act.consumer.lease import Lease, LeaseStore
from tailrace.act.consumer.rules.lanes import LanePlan, is_sealed, lane_resource, order_of
from tailrace.act.consumer.rules.position import StreamPosition


class LaneStore:
    """The part of a LeaseStore that a listener uses, for one lane.

    ``commits``      commits together with other lanes of this process; without it, the store does it for each alone
    ``unavailable``  called when the lease cannot be taken: the lane belongs to another owner, or its generation is over
    ``committed``    called with the place of each committed position
    """

    def __init__(
        self,
        store: LeaseStore,
        resource: str,
        plan: LanePlan,
        lane: int,
        *,
        unavailable: Callable[[], None],
        committed: Callable[[int, bytes], None],
        commits: GroupCommit | None = None,
    ) -> None:
        self._store = store
        self._commit: Callable[[Lease, Mapping[str, Any], float], object] = (commits or store).commit
        self._name = lane_resource(resource, plan, lane)
        self._shown = f"{resource}/{lane}"
        self._plan = plan
        self._lane = lane
        self._unavailable = unavailable
        self._committed = committed
        self._acquired = False
        #: The lease of the last commit, as the listener and as the store know it.
        self._lease: Lease | None = None
        self._inner_lease: Any = None

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """The lane's lease, once: a process that has lost it leaves it to its new owner."""
        lease = None if self._acquired else self._store.acquire(self._name, owner, seconds)
        if lease is not None and is_sealed(lease.position):
            self._store.release(lease)
            lease = None
        if lease is None:
            self._unavailable()
            return None
        self._acquired = True
        if lease.position is None:
            lease = replace(lease, position=self._plan.start.to_document())
        return self._outer(lease)

    def renew(self, lease: Lease, seconds: float) -> Lease | None:
        """The lease that is held, with a newer fencing token."""
        renewed = self._store.acquire(self._name, str(lease.owner), seconds)
        if renewed is not None and is_sealed(renewed.position):
            self._store.release(renewed)
            return None
        return None if renewed is None else self._outer(renewed)

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        """See LeaseStore."""
        return self._outer(self._store.refresh(self._inner(lease), seconds))

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> None:
        """See LeaseStore; nothing is returned: the listener knows what it has written."""
        if self._lease is not lease:
            self._lease, self._inner_lease = lease, self._inner(lease)
        self._commit(self._inner_lease, position, seconds)
        self._note(position)

    def commit_skip(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> None:
        """See OperatedLeaseStore; nothing is returned."""
        self._store.commit_skip(self._inner(lease), position, seconds)  # type: ignore[attr-defined]
        self._note(position)

    def _note(self, position: Mapping[str, Any]) -> None:
        self._committed(self._lane, order_of(StreamPosition(position.get("token"), at=position.get("at"))))

    @property
    def collection(self) -> Any:
        """As of a MongoLeaseStore; ``None`` where the store has none."""
        return getattr(self._store, "collection", None)

    def release(self, lease: Lease) -> bool:
        """See LeaseStore."""
        return self._store.release(self._inner(lease))

    def transaction(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> AbstractContextManager[Any]:
        """See LeaseStore."""
        return self._store.transaction(self._inner(lease), position, seconds)

    @property
    def async_transaction(self) -> Callable[..., AbstractAsyncContextManager[Any]] | None:
        """As of a MongoLeaseStore; ``None`` where the store has no transactions for asyncio handlers."""
        begin = getattr(self._store, "async_transaction", None)
        if begin is None:
            return None
        return lambda client, lease, position, seconds: begin(client, self._inner(lease), position, seconds)

    def _outer(self, lease: Lease) -> Lease:
        return replace(lease, resource=self._shown, version=self._plan.fencing_token(lease.version))

    def _inner(self, lease: Lease) -> Lease:
        return replace(lease, resource=self._name, version=lease.version - self._plan.fencing_token(0))


class BeginningStore:
    """The resource's own lease, for a listener that only settles where the lanes begin. ``done`` is called when that is
    committed, or when another process has to do it.

    Where lanes have been before, the lease holds their plan, and the listener's position is a part of it.
    """

    def __init__(self, store: LeaseStore, done: Callable[[], None]) -> None:
        self._store = store
        self._done = done
        self._plan: LanePlan | None = None

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """The lease, if nobody has settled the beginning meanwhile."""
        lease = self._store.acquire(resource, owner, seconds)
        if lease is not None and not self._is_open(lease):
            self._store.release(lease)
            lease = None
        if lease is None:
            self._done()
            return None
        return self._outer(lease)

    def _is_open(self, lease: Lease) -> bool:
        position = lease.position
        if not LanePlan.is_plan(position):
            return position is None or "snapshot" in position
        self._plan = LanePlan.from_document(position or {}, lease.resource)
        return self._plan.beginning is not None and self._plan.next_lanes is None

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        """See LeaseStore."""
        return self._outer(self._store.refresh(self._inner(lease), seconds))

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> None:
        """See LeaseStore; nothing is returned."""
        self._store.commit(self._inner(lease), self._document(lease, position), seconds)
        if "snapshot" not in position:
            self._done()

    def release(self, lease: Lease) -> bool:
        """See LeaseStore."""
        return self._store.release(self._inner(lease))

    def transaction(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> AbstractContextManager[Any]:
        """See LeaseStore."""
        return self._store.transaction(self._inner(lease), self._document(lease, position), seconds)

    @property
    def async_transaction(self) -> Callable[..., AbstractAsyncContextManager[Any]] | None:
        """As of a MongoLeaseStore; ``None`` where the store has no transactions for asyncio handlers."""
        begin = getattr(self._store, "async_transaction", None)
        if begin is None:
            return None
        return lambda client, lease, position, seconds: begin(
            client, self._inner(lease), self._document(lease, position), seconds
        )

    def _document(self, lease: Lease, position: Mapping[str, Any]) -> Mapping[str, Any]:
        return position if self._plan is None else self._plan.after_copy(position, lease.resource).to_document()

    def _outer(self, lease: Lease) -> Lease:
        if self._plan is None:
            return lease
        return replace(lease, version=self._plan.fencing_token(lease.version), position=self._plan.beginning or None)

    def _inner(self, lease: Lease) -> Lease:
        return lease if self._plan is None else replace(lease, version=lease.version - self._plan.fencing_token(0))
