"""A source with one member that is late, and a URI that lets secondaries be read.

Times and documents came from whichever member the driver chose. If the start came from one member and the documents
from one that is behind, writes in between were in no document and in no entry that was read. Tests had sources of one
member, or read primaries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import MongoClient, WriteConcern

from tailrace.embedded import ReplicaSet
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import open_client
from tailrace.sync import Sync
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held

pytestmark = [pytest.mark.mongod, pytest.mark.slow]


@contextmanager
def late(source: ReplicaSet, member: int) -> Iterator[Callable[[], None]]:
    """The member replicates nothing until the given function is called, or the block ends."""
    port = source.uri.partition("/?")[0].split(",")[member].rpartition(":")[2]
    with MongoClient[Any]("127.0.0.1", int(port), directConnection=True) as client:

        def set_mode(mode: str) -> None:
            client.admin.command("configureFailPoint", "stopReplProducer", mode=mode)

        set_mode("alwaysOn")
        try:
            yield lambda: set_mode("off")
        finally:
            set_mode("off")


def test_a_source_is_read_from_a_member_that_is_late(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source, target = start_replica_set(3, enable_test_commands=True), start_replica_set(1)
    uri = f"{source.uri}&readPreference=secondary"
    secondary = next(number for number in range(3) if number != source.primary)
    with MongoClient[Any](source.uri) as client, open_client(uri) as reader:
        orders = client.shop.get_collection("orders", write_concern=WriteConcern("majority"))
        orders.insert_many([{"_id": number, "n": 0} for number in range(500)])
        source.wait_until_ready()
        with late(source, secondary) as on_time:
            orders.update_many({}, {"$inc": {"n": 1}})
            orders.insert_many([{"_id": number, "n": 0} for number in range(500, 600)])
            written = client.admin.command("ping")["operationTime"]
            assert all(places_of(reader, 10).now().to_timestamp() >= written for _ in range(20))
            timer = threading.Timer(5.0, on_time)
            timer.start()
            with Sync(uri, target.uri, lease_s=4) as sync:
                sync.run(to_present=True)
                timer.join()
                sides = [held(one.uri, but=[STATE_DB], selected=is_users) for one in (source, target)]
                assert differences(*sides, known=normal("", "", ages=False)) == []
                assert len(sides[1]["shop.orders"].documents) == 600
