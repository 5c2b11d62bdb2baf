"""The copy goes on when the target's primary, or the source's, steps down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.act.sync.copying import Copy
from tailrace.act.sync.ownership import own
from tailrace.act.sync.settings import SyncSettings
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tailrace.read.source.connection import open_client
from tests.amounts import amount
from tests.sync.test_copying import begun, stored

pytestmark = pytest.mark.used_servers
COUNT, PER_SECOND = amount(20_000, 120_000), amount(10_000, 30_000)
SETTINGS = SyncSettings(selection=Selection.of(["shop.*"]), documents_per_second=PER_SECOND, lease_s=30)


@pytest.mark.parametrize("which", ["target", "source"])
def test_every_document_is_there_once(start_replica_set: Callable[..., ReplicaSet], which: str) -> None:
    members = {"target": (1, 3), "source": (3, 1)}[which]
    there, here = start_replica_set(members[0]), start_replica_set(members[1])
    source: MongoClient[Any] = open_client(there.uri)
    target: MongoClient[Any] = open_client(here.uri)
    for first in range(0, COUNT, 10_000):
        source.shop.c.insert_many([{"_id": n, "s": "x" * 100} for n in range(first, first + 10_000)])
    source.shop.c.create_index("s")
    state = begun(source, target, SETTINGS)
    counts = []
    over = threading.Event()

    def step_down() -> None:
        while not over.wait(COUNT / PER_SECOND / 4) and len(counts) < 3:
            counts.append(state.ranges.count_documents({"done": True}))
            (here if which == "target" else there).step_down()

    thread = threading.Thread(target=step_down)
    with own(state, lanes=5) as ownership:
        thread.start()
        try:
            assert Copy(source, state, ownership, SETTINGS).run()
        finally:
            over.set()
            thread.join()
    assert len(counts) >= 2
    assert stored(target, "shop.c") == stored(source, "shop.c")
    assert sum(one["documents"] for one in state.ranges.find({})) == COUNT
    assert [one["name"] for one in target.shop.c.list_indexes()] == ["_id_", "s_1"]
