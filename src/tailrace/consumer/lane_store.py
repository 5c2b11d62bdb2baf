"""The lease store as a lane's listener sees it: its lane's lease under the lane's name, with fencing tokens that grow
over generations too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tailrace.consumer.lease import Lease, LeaseStore
from tailrace.consumer.rules.lanes import LanePlan, is_sealed, lane_resource, order_of
from tailrace.consumer.rules.position import StreamPosition


class LaneStore:
    """The part of a LeaseStore that a listener uses, for one lane.

    ``unavailable``  called when the lease cannot be had: the lane belongs to somebody else, or its generation is over
    ``committed``    called with the place of each position that was committed
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
    ) -> None:
        self._store = store
        self._name = lane_resource(resource, plan, lane)
        self._shown = f"{resource}/{lane}"
        self._plan = plan
        self._lane = lane
        self._unavailable = unavailable
        self._committed = committed
        self._acquired = False

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """The lane's lease, once: whoever has lost it leaves it to whoever has it now."""
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

    def refresh(self, lease: Lease, seconds: float) -> Lease:
        """See LeaseStore."""
        return self._outer(self._store.refresh(self._inner(lease), seconds))

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """See LeaseStore."""
        written = self._store.commit(self._inner(lease), position, seconds)
        self._committed(self._lane, order_of(StreamPosition.from_document(position, self._shown)))
        return self._outer(written)

    def release(self, lease: Lease) -> bool:
        """See LeaseStore."""
        return self._store.release(self._inner(lease))

    def transaction(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> AbstractContextManager[Any]:
        """See LeaseStore."""
        return self._store.transaction(self._inner(lease), position, seconds)

    def _outer(self, lease: Lease) -> Lease:
        return replace(lease, resource=self._shown, version=self._plan.fencing_token(lease.version))

    def _inner(self, lease: Lease) -> Lease:
        return replace(lease, resource=self._name, version=lease.version - self._plan.fencing_token(0))


class BeginningStore:
    """The resource's own lease, for a listener that only settles where the lanes begin. ``done`` is called when that is
    committed, or when it is for others to do."""

    def __init__(self, store: LeaseStore, done: Callable[[], None]) -> None:
        self._store = store
        self._done = done
        self.refresh = store.refresh
        self.release = store.release
        self.transaction = store.transaction

    def acquire(self, resource: str, owner: str, seconds: float) -> Lease | None:
        """The lease, if nobody has settled the beginning meanwhile."""
        lease = self._store.acquire(resource, owner, seconds)
        if lease is not None and lease.position is not None and "snapshot" not in lease.position:
            self._store.release(lease)
            lease = None
        if lease is None:
            self._done()
        return lease

    def commit(self, lease: Lease, position: Mapping[str, Any], seconds: float) -> Lease:
        """See LeaseStore."""
        written = self._store.commit(lease, position, seconds)
        if "snapshot" not in position:
            self._done()
        return written
