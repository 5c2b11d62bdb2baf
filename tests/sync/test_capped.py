"""Capped collections: copied in their order, also with writers and through kills, and followed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.verification import verify
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tests.amounts import amount
from tests.pace import BETWEEN_WRITES_S
from tests.server_in_use import IN_BETWEEN
from tests.sync.running import following
from tests.sync.test_copying import RAW, _process, begun, put

pytestmark = pytest.mark.used_servers
SETTINGS = SyncSettings(selection=Selection.of(["shop.*"]), lease_s=10)


def in_order(client: MongoClient[Any], name: str) -> list[bytes]:
    there = client.get_database("shop", codec_options=RAW)
    return [bytes(one.raw) for one in there[name].find({}).hint([("$natural", 1)])]


# For 7.0, test_copying.py and test_catalog.py cover what differs.
@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2", pytest.param("7.0.28", marks=pytest.mark.slow)])
def test_the_order_is_kept_beside_a_writer(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    there, here = start_replica_set(version=version), start_replica_set(version=version)
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    held = amount(300, 1_500)  # 4.4 takes a transaction for each of them
    source.shop.create_collection("ring", capped=True, size=200_000, max=held)
    source.shop.create_collection("odd", capped=True, size=1_000_000)
    source.shop.ring.insert_many([{"_id": -n, "s": "x" * 20} for n in range(held * 4 // 3)])
    put(source, "shop.odd", [bson.encode({"_id": n % 7 * 100 + n, "t": Timestamp(0, 0), "n": n}) for n in range(50)])
    stop = threading.Event()

    def write() -> None:
        chosen = random.Random(3)
        number = 1
        while not stop.wait(BETWEEN_WRITES_S):
            source.shop.ring.insert_one({"_id": number, "s": "y" * 20, "v": 0})
            source.shop.ring.update_one({"_id": chosen.randrange(number + 1)}, {"$inc": {"v": 1}})
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    with following(there.uri, here.uri, SETTINGS) as run:
        time.sleep(1)
        stop.set()
        writer.join()
        run.settle()
        assert len(in_order(source, "ring")) >= held * 14 // 15
        for name in ("ring", "odd"):
            assert in_order(target, name) == in_order(source, name)
        assert verify(run.source, run.state, SETTINGS).good


def test_another_order_is_a_difference(start_replica_set: Callable[..., ReplicaSet]) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    source.shop.create_collection("ring", capped=True, size=200_000)
    source.shop.ring.insert_many([{"_id": n} for n in (5, 3, 4)])
    with following(there.uri, here.uri, SETTINGS) as run:
        run.settle()
        target.shop.ring.delete_one({"_id": 3})
        target.shop.ring.insert_one({"_id": 3})
        source.other.c.insert_one({})
        run.settle()
        result = verify(run.source, run.state, SETTINGS)
        assert [str(one) for one in result.differences] == ["shop.ring: 3: is at another place"]


def test_one_that_was_interrupted_is_copied_anew(start_replica_set: Callable[..., ReplicaSet]) -> None:
    there, here = start_replica_set(), start_replica_set()
    source, target = MongoClient(there.uri), MongoClient(here.uri)
    count = amount(10_000, 50_000)
    source.shop.create_collection("ring", capped=True, size=100 << 20, max=count)
    source.shop.ring.insert_many([{"_id": -n, "s": "x" * 200} for n in range(count * 6 // 5)])
    state: SyncState = begun(source, target, SyncSettings(selection=Selection.of(["shop.*"]), lease_s=1))
    kills = 0
    for wait in (0.0, 0.1, 0.3, 0.0):
        running = _process(there, here, 2 * count, 1)
        while not target.shop.ring.find_one() and running.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        running.send_signal(signal.SIGKILL)
        kills += running.wait() == -signal.SIGKILL
        found = state.read()
        assert found is not None
        if found.phase != "copy":
            break
    assert kills
    assert _process(there, here, 1_000_000, 30).wait() == 0
    assert in_order(target, "ring") == in_order(source, "ring")
    assert len(in_order(target, "ring")) == count
    assert RawBSONDocument(in_order(target, "ring")[0])["_id"] == -count // 5
