"""Clients that come and go at random while primaries and the gateway are killed: no stream loses or repeats an event,
and the gateway gives back what it held for them."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pymongo
import pytest
from pymongo.errors import PyMongoError
from pymongo.write_concern import WriteConcern

from tailrace.embedded import ReplicaSet
from tests.gateway.running import GatewayProcess, eventually

pytestmark = pytest.mark.mongod

_COLLECTIONS = 20
_LIMIT_S = 400.0
_MB = 1 << 20


@dataclass
class Watcher:
    """An application that keeps its place: each time that it comes it goes on from its last token."""

    uri: str
    collection: str
    seed: int
    until: threading.Event
    seen: list[int] = field(default_factory=list)
    token: Any = None
    last: int | None = None
    visits: int = 0
    fault: BaseException | None = None

    def begin(self) -> None:
        with pymongo.MongoClient[Any](self.uri) as client, client.load[self.collection].watch() as stream:
            self.token = stream.resume_token

    def run(self) -> None:
        chance = random.Random(self.seed)
        limit = time.monotonic() + _LIMIT_S
        try:
            while not self.is_done() and time.monotonic() < limit:
                time.sleep(chance.uniform(0, 1.0))
                with suppress(PyMongoError):  # of a gateway or a server that is not there just now
                    self.visit(chance.uniform(0.2, 5.0))
        except BaseException as fault:  # noqa: BLE001  the test tells it
            self.fault = fault

    def is_done(self) -> bool:
        return self.until.is_set() and self.last is not None and bool(self.seen) and self.seen[-1] >= self.last

    def visit(self, seconds: float) -> None:
        self.visits += 1
        leaving = time.monotonic() + seconds
        options = {"serverSelectionTimeoutMS": 20_000, "connectTimeoutMS": 20_000, "heartbeatFrequencyMS": 1000}
        with (
            pymongo.MongoClient[Any](self.uri, **options) as client,
            client.load[self.collection].watch(resume_after=self.token, max_await_time_ms=300) as stream,
        ):
            while time.monotonic() < leaving and not self.is_done():
                event = stream.try_next()
                if event is not None:
                    self.seen.append(event["documentKey"]["_id"])
                if stream.resume_token is not None:
                    self.token = stream.resume_token


class Writer:
    """Writes to the collections in turn, to the servers themselves, until it is told to end."""

    def __init__(self, uri: str, pause_s: float) -> None:
        self._uri = uri
        self._pause_s = pause_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with pymongo.MongoClient[Any](self._uri, w="majority", heartbeatFrequencyMS=1000) as client:
            number = 0
            while not self._ending.is_set():
                with suppress(PyMongoError):  # whether it was written is seen at the end
                    client.load[f"c{number % _COLLECTIONS}"].insert_one({"_id": number, "text": "x" * 200})
                number += 1
                time.sleep(self._pause_s)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def ordeal(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess], *, clients: int, seconds: float, kills: int
) -> None:
    """``clients`` come and go for ``seconds``, while primaries are killed ``kills`` times and the gateway once."""
    listen = f"127.0.0.1:{free_port()}"
    gateway = start_gateway(replica_set.uri, listen=listen)
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        database = client.get_database("load", write_concern=WriteConcern("majority"))
        for number in range(_COLLECTIONS):
            database.create_collection(f"c{number}")
    until = threading.Event()
    watchers = [Watcher(gateway.uri, f"c{number % _COLLECTIONS}", number, until) for number in range(clients)]
    for watcher in watchers:
        watcher.begin()
    writer = Writer(replica_set.uri, 0.02)
    threading.stack_size(512 << 10)
    threads = [threading.Thread(target=watcher.run) for watcher in watchers]
    threading.stack_size(0)
    for thread in threads:
        thread.start()
    pause = seconds / (kills + 2)
    for _ in range(kills):
        time.sleep(pause)
        replica_set.restart(replica_set.kill())
    time.sleep(pause)
    gateway.stop(signal.SIGKILL)
    gateway = start_gateway(replica_set.uri, listen=listen)
    time.sleep(pause)
    writer.end()
    written = last_writes(replica_set, watchers)
    until.set()
    for thread in threads:
        thread.join()
    assert [watcher.fault for watcher in watchers if watcher.fault] == []
    wrong = {(one.collection, one.seed) for one in watchers if one.seen != written[one.collection]}
    assert wrong == set(), "these lost or repeated events"
    assert sum(watcher.visits for watcher in watchers) > clients
    gives_back(gateway)


def last_writes(replica_set: ReplicaSet, watchers: list[Watcher]) -> dict[str, list[int]]:
    """What was written to each collection; each watcher is told its last. One writer's ids are in the oplog's order."""
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        written: dict[str, list[int]] = {}
        for number in range(_COLLECTIONS):
            name = f"c{number}"
            client.load[name].with_options(write_concern=WriteConcern("majority")).insert_one({"_id": 10**9 + number})
            written[name] = [one["_id"] for one in client.load[name].find().sort("_id")]
    for watcher in watchers:
        watcher.last = written[watcher.collection][-1]
    return written


def gives_back(gateway: GatewayProcess) -> None:
    """After a rest it holds no more than after one client; it has served many meanwhile."""

    def rested() -> tuple[int, int]:
        with pymongo.MongoClient[Any](gateway.uri) as client, client.load.c0.watch(max_await_time_ms=50) as stream:
            stream.try_next()
        return gateway.handles(), gateway.memory()

    first = rested()[0]
    eventually(lambda: rested()[0] <= min(first, 60), "the gateway keeps files open")
    assert gateway.memory() < 600 * _MB
    assert "fault of the gateway" not in gateway.log.read_text()


def test_clients_come_and_go_while_a_primary_and_the_gateway_are_killed(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    ordeal(start_replica_set(3), start_gateway, clients=20, seconds=15, kills=1)


@pytest.mark.slow
def test_500_clients_come_and_go_for_five_minutes(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    ordeal(start_replica_set(3, oplog_size_mb=2000), start_gateway, clients=500, seconds=300, kills=2)
