"""Clients that come and go at random while primaries and the gateway are killed: no stream loses or repeats an event,
and the gateway gives back what it held for them."""

from __future__ import annotations

import asyncio
import math
import random
import signal
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
from tailrace.embedded.ports import free_port
from tests.amounts import amount
from tests.gateway.running import GatewayProcess

pytestmark = pytest.mark.mongod

_COLLECTIONS = 20
#: How long a client may take for the rest once the last event is written.
_LIMIT_S = 300.0
_MB = 1 << 20
#: Descriptors of a gateway that serves nobody: its own connections to three members, for sixteen threads, and a dozen
#: files.
_AT_REST = 60


@dataclass
class Watcher:
    """An application that keeps its place: each time it connects, it goes on from its last token.

    ``stay``  how long a visit lasts at most, seconds
    """

    uri: str
    collection: str
    seed: int
    stay: float
    until: threading.Event
    seen: list[int] = field(default_factory=list)
    token: Any = None
    last: int | None = None
    visits: int = 0

    async def run(self) -> None:
        chance = random.Random(self.seed)
        limit = math.inf
        while not self.is_done() and time.monotonic() < limit:
            if self.until.is_set() and limit == math.inf:
                limit = time.monotonic() + _LIMIT_S
            await asyncio.sleep(chance.uniform(0, 1.0))
            with suppress(PyMongoError):  # the gateway or the server is away just now
                await self.visit(chance.uniform(0.2, self.stay))

    def is_done(self) -> bool:
        return self.until.is_set() and self.last is not None and bool(self.seen) and self.seen[-1] >= self.last

    async def visit(self, seconds: float) -> None:
        self.visits += 1
        leaving = time.monotonic() + seconds
        options = {"serverSelectionTimeoutMS": 20_000, "connectTimeoutMS": 20_000, "heartbeatFrequencyMS": 1000}
        async with (
            pymongo.AsyncMongoClient[Any](self.uri, **options) as client,
            await client.load[self.collection].watch(resume_after=self.token, max_await_time_ms=1000) as stream,
        ):
            while time.monotonic() < leaving and not self.is_done():
                event = await stream.try_next()
                if event is not None:
                    self.seen.append(event["documentKey"]["_id"])
                if stream.resume_token is not None:
                    self.token = stream.resume_token


class Crowd:
    """All watchers, in an event loop of their own: so many threads would take the whole machine."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self._watchers = watchers
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*(watcher.run() for watcher in self._watchers))

        try:
            asyncio.run(all_of_them())
        except BaseException as fault:  # noqa: BLE001  the test tells it
            self._fault = fault

    def end(self) -> None:
        self._thread.join()
        if self._fault is not None:
            raise self._fault


def begin(uri: str, watchers: list[Watcher]) -> None:
    """The places where the watchers start, before anything is written."""
    with pymongo.MongoClient[Any](uri) as client:
        tokens = {}
        for name in {watcher.collection for watcher in watchers}:
            with client.load[name].watch() as stream:
                tokens[name] = stream.resume_token
    for watcher in watchers:
        watcher.token = tokens[watcher.collection]


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
                with suppress(PyMongoError):  # whether it was written shows in the end
                    client.load[f"c{number % _COLLECTIONS}"].insert_one({"_id": number, "text": "x" * 200})
                number += 1
                time.sleep(self._pause_s)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


def ordeal(
    replica_set: ReplicaSet,
    start_gateway: Callable[..., GatewayProcess],
    *,
    clients: int,
    seconds: float,
    kills: int,
    stay: float,
    pause_s: float,
) -> None:
    """``clients`` come for up to ``stay`` and go, for ``seconds``, while something is written every ``pause_s``,
    primaries are killed ``kills`` times and the gateway once."""
    listen = f"127.0.0.1:{free_port()}"
    gateway = start_gateway(replica_set.uri, listen=listen)
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        database = client.get_database("load", write_concern=WriteConcern("majority"))
        for number in range(_COLLECTIONS):
            database.create_collection(f"c{number}")
    until = threading.Event()
    watchers = [Watcher(gateway.uri, f"c{number % _COLLECTIONS}", number, stay, until) for number in range(clients)]
    begin(gateway.uri, watchers)
    writer = Writer(replica_set.uri, pause_s)
    crowd = Crowd(watchers)
    pause = seconds / (kills + 2)
    for _ in range(kills):
        time.sleep(pause)
        replica_set.restart(replica_set.kill())
    time.sleep(pause)
    report("before the kill", gateway, watchers)
    gateway.stop(signal.SIGKILL)
    gateway = start_gateway(replica_set.uri, listen=listen)
    time.sleep(pause)
    writer.end()
    report("at the end", gateway, watchers)
    written = last_writes(replica_set, watchers)
    until.set()
    crowd.end()
    wrong = [text for one in watchers if (text := difference(one.seen, written[one.collection]))]
    assert wrong == [], f"{len(wrong)} clients lost or repeated events"
    assert sum(watcher.visits for watcher in watchers) > clients
    gives_back(gateway)
    report("at rest", gateway, watchers)


def report(when: str, gateway: GatewayProcess, watchers: list[Watcher]) -> None:
    """Progress for people who run the test with ``-s``."""
    visits = sum(watcher.visits for watcher in watchers)
    seen = sum(len(watcher.seen) for watcher in watchers)
    memory = gateway.memory() >> 20
    print(f"{when}: {visits} visits, {seen} events, {gateway.handles()} descriptors, {memory} MB")


def difference(seen: list[int], written: list[int]) -> str:
    """How what a client saw differs from what was written, in words; empty if it does not."""
    if seen == written:
        return ""
    at = next((n for n, (one, other) in enumerate(zip(seen, written, strict=False)) if one != other), None)
    if at is None:
        return f"saw {len(seen)} of {len(written)}"
    return f"saw {seen[max(0, at - 2) : at + 3]} where {written[max(0, at - 2) : at + 3]} was written"


def last_writes(replica_set: ReplicaSet, watchers: list[Watcher]) -> dict[str, list[int]]:
    """What was written to each collection; each watcher gets its last id. The ids of one writer are in the oplog's
    order."""
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
    """After a rest it holds no more than after a single client, although it has served many."""

    held: list[int] = []
    limit = time.monotonic() + 300
    while not held or held[-1] > _AT_REST:
        assert time.monotonic() < limit, f"the gateway keeps files open: {held}"
        with pymongo.MongoClient[Any](gateway.uri) as client, client.load.c0.watch(max_await_time_ms=50) as stream:
            stream.try_next()
        held.append(gateway.handles())
    assert gateway.memory() < 600 * _MB
    assert "fault of the gateway" not in gateway.log.read_text()


@pytest.mark.slow  # one at a time: test_stop.py, test_processes.py, test_several.py
def test_clients_come_and_go_while_a_primary_and_the_gateway_are_killed(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    ordeal(
        start_replica_set(3),
        start_gateway,
        clients=amount(8, 20),
        seconds=amount(6, 15),
        kills=1,
        stay=3.0,
        pause_s=0.02,
    )


@pytest.mark.slow
def test_500_clients_come_and_go_for_five_minutes(
    start_replica_set: Callable[..., ReplicaSet], start_gateway: Callable[..., GatewayProcess]
) -> None:
    ordeal(
        start_replica_set(3, oplog_size_mb=2000),
        start_gateway,
        clients=500,
        seconds=300,
        kills=2,
        stay=60.0,
        pause_s=0.1,
    )
