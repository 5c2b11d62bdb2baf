"""A gateway of several processes in front of a sharded cluster: the events of one, and those of our own client."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymongo
import pytest
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.embedded import ShardedCluster
from tests.amounts import amount
from tests.gateway.connected import Connected, at_two_processes, process_of
from tests.gateway.fake_mongos import fake_mongos
from tests.gateway.running import GatewayProcess, eventually
from tests.sharded.waiting import take
from tests.sharded.workload import REGIONS, spread

pytestmark = pytest.mark.mongod

Client = pymongo.MongoClient[dict[str, Any]]
DATABASE = "processes"
COMPUTES = {"$match": {"$expr": {"$in": ["$operationType", ["insert", "update"]]}}}


@pytest.fixture(scope="module")
def config_server(sharded_cluster: ShardedCluster) -> tuple[str, int]:
    spread(sharded_cluster, DATABASE)
    host, _, port = urlsplit(sharded_cluster.uri).netloc.split(",")[0].partition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def mongos(config_server: tuple[str, int]) -> Iterator[str]:
    with fake_mongos(*config_server) as uri:
        yield uri


def key(number: int) -> dict[str, Any]:
    return {"region": REGIONS[number % len(REGIONS)], "_id": number}


def insert(cluster: ShardedCluster, first: int, count: int) -> None:
    for number in range(first, first + count):
        cluster.router.insert_one(f"{DATABASE}.orders", key(number))


def test_events_of_all_shards_come_in_one_order_from_every_connection(
    sharded_cluster: ShardedCluster, mongos: str, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateways = [start_gateway(mongos, "--processes", count) for count in ("1", "2")]
    pairs = [[Connected(gateways[0].address) for _ in range(2)], at_two_processes(gateways[1])]
    with (
        tailrace.connect(sharded_cluster.uri) as other,
        other[DATABASE].orders.watch(full_document="updateLookup", document_class=RawBSONDocument) as merged,
    ):
        insert(sharded_cluster, 0, 1)
        token = RawBSONDocument(take(merged, 1)[0].raw)["_id"]
        options = {"resumeAfter": token, "fullDocument": "updateLookup"}
        opened = [
            (pair, pair[place].opened(*stages, collection="orders", **options))
            for pair in pairs
            for place in range(2)
            for stages in ([], [COMPUTES])
        ]
        insert(sharded_cluster, 1, 24)
        for number in range(12):
            sharded_cluster.router.update_one(f"{DATABASE}.orders", key(number), {"$set": {"paid": True}})
        wanted = [bytes(event.raw) for event in take(merged, 36)]
        for pair, cursor in opened:
            got: list[bytes] = []
            turn = 0
            while len(got) < 36:
                turn += 1
                more = {"getMore": cursor, "collection": "orders", "maxTimeMS": 1000, "batchSize": 5}
                reply = RawBSONDocument(pair[turn % 2].raw(more))
                assert reply["ok"], reply
                got += [bytes(event.raw) for event in reply["cursor"]["nextBatch"]]
            assert got == wanted
            assert pair[0].command({"killCursors": "orders", "cursors": [cursor]})["cursorsKilled"] == [cursor]
    for pair in pairs:
        for each in pair:
            each.close()


@pytest.mark.slow  # test_processes.py has it before a replica set
def test_a_process_that_is_killed_takes_no_event_with_it(
    sharded_cluster: ShardedCluster, mongos: str, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(mongos, "--processes", "2", "--metrics", "127.0.0.1:0")
    with Client(gateway.uri) as client:
        streams = [client[DATABASE].orders.watch(max_await_time_ms=200) for _ in range(4)]
        got: list[list[int]] = [[] for _ in streams]
        for turn in range(3):
            insert(sharded_cluster, 100 + 6 * turn, 6)
            for stream, mine in zip(streams, got, strict=True):
                while len(mine) < 6 * turn + 6:
                    event = stream.try_next()
                    if event is not None:
                        mine.append(event["documentKey"]["_id"])
            # What they read from the shards is counted, including what processes that have ended had read.
            read = eventually(
                lambda turn=turn: (
                    gateway.statistics()["upstream_entries_total"] >= 6 * turn + 6 and gateway.statistics()
                ),
                "what was read is not counted",
            )
            assert read["upstream_reads_total"] > 0
            assert read["upstream_bytes_total"] > 0
            assert read["tails"] == 1
            pair = at_two_processes(gateway)
            killed = process_of(pair[turn % 2], gateway)
            os.kill(killed, signal.SIGKILL)
            for each in pair:
                each.close()
            eventually(lambda pid=killed: not Path(f"/proc/{pid}").exists(), "it is not noticed")
            after = gateway.statistics()
            assert after["upstream_entries_total"] >= read["upstream_entries_total"]
        assert got == [list(range(100, 118))] * 4
        for stream in streams:
            stream.close()


def test_all_processes_take_the_same_mongos(
    config_server: tuple[str, int], start_gateway: Callable[..., GatewayProcess]
) -> None:
    """Each process took the mongos that it saw first: a cursor or a transaction that began on one of a client's
    connections was not found on another. No test had several mongos in a URI."""
    with ExitStack() as stack:
        several = [stack.enter_context(fake_mongos(*config_server)) for _ in range(6)]
        hosts = [urlsplit(uri).netloc for uri in several]
        uri = f"mongodb://{','.join(hosts)}/"
        gateways = [start_gateway(uri, "--processes", "4") for _ in range(amount(1, 2))]
        for gateway in gateways:
            connections = [Connected(gateway.address) for _ in range(8)]
            assert len({process_of(each, gateway) for each in connections}) == 4
            taken = {each.command({"hello": 1}, "admin")["listensAt"] for each in connections}
            assert len(taken) == 1
            for each in connections:
                each.close()
