"""A change that a handler has failed at comes again after the waits that were asked for."""

from __future__ import annotations

from typing import Any

import pytest
from pymongo.errors import OperationFailure

import tailrace
from tailrace.act.consumer.rules.need import Pause
from tailrace.consumer import HandlerFailed, Listener, MemoryLeaseStore, RetrySchedule
from tailrace.embedded import ReplicaSet

pytestmark = pytest.mark.mongod


def noted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the waits before retries, without waiting."""
    waits: list[float] = []
    plain = Listener._pause

    def pause(self: Listener, need: Pause) -> None:
        if need.reason.startswith("the handler raised"):
            waits.append(need.seconds)
        else:
            plain(self, need)

    monkeypatch.setattr(Listener, "_pause", pause)
    return waits


@pytest.mark.parametrize("partitions", [1, 2])
def test_waits_are_those_of_the_schedule(
    replica_set: ReplicaSet, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = noted(monkeypatch)
    with tailrace.connect(replica_set.uri) as client:
        orders = client["retries"][f"orders{partitions}"]
        orders.insert_one({"_id": 1})

        def fails(change: Any) -> None:
            raise ValueError("no")

        listener = Listener(
            orders,
            fails,
            resource="r",
            store=MemoryLeaseStore(),
            partitions=partitions,
            retries=RetrySchedule(4, first=1, factor=3, longest=20),
        )
        with pytest.raises(HandlerFailed, match="no"):
            listener.run()
        assert waits == [1, 3, 9, 20]


def test_a_transaction_that_another_writer_was_in_the_way_of_is_tried_again_soon(
    replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = noted(monkeypatch)
    with tailrace.connect(replica_set.uri) as client:
        orders = client["retries"]["conflicts"]
        orders.insert_one({"_id": 1})
        left = [1, 1]

        def conflicts(change: Any) -> None:
            if left:
                left.pop()
                raise OperationFailure("conflict", 112, {"errorLabels": ["TransientTransactionError"]})
            listener.stop()

        retry = RetrySchedule(0, first=600, factor=1, longest=600)
        listener = Listener(orders, conflicts, resource="r", store=MemoryLeaseStore(), retries=retry)
        listener.run()
        assert waits == [0.05, 0.1]
