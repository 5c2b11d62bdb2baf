"""What tests of listeners share: a database of their own with a collection, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

import tailrace
from tailrace.consumer import MongoLeaseStore

WAIT_S: Final = 300.0


@contextmanager
def new_shop(uri: str, request: pytest.FixtureRequest, prefix: str) -> Iterator[Any]:
    """A database of this test alone, with an empty collection ``orders``; it is dropped in the end."""
    name = f"{prefix}_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(uri) as client:
        client[name].create_collection("orders")
        yield client[name]
        client.drop_database(name)


def begin_now(store: MongoLeaseStore, client: Any, resource: str = "orders") -> None:
    """Make listeners of the resource go on from the present, as after earlier ones: a collection that is dropped from
    now on ends them."""
    lease = store.acquire(resource, "before", 60)
    assert lease is not None
    store.commit(lease, {"at": client.admin.command("ping")["operationTime"]}, 60)
    store.release(lease)


def until(holds: Callable[[], Any]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
