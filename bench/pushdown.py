"""What does a narrow stream cost, with pushdown and without, beside mongod's own stream?

    python bench/pushdown.py [--entries 100000] [--collections 1000] [--rounds 3]

Two streams over the same stretch of oplog: one collection out of a thousand, and the deletes (one write in a hundred)
of a database. Each is read from its start to its end by three sides in turn: ours with pushdown, without, and PyMongo
on the server's own change stream. Bytes are what mongod sent (its ``network.bytesOut``), CPU is mongod's from ``/proc``
and this process's own. The events of all sides are compared byte for byte. Medians, and the ratios to pushdown.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import bson
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.source.mongod import MongodSource
from tailrace.watch.client.change_stream import OplogChangeStream
from tailrace.watch.client.request import WatchRequest

DATABASE = "bench"
RAW: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument)
TICKS = os.sysconf("SC_CLK_TCK")
_CHUNK = 20_000
DELETES = ({"$match": {"operationType": "delete"}},)
QUESTIONS: tuple[tuple[str, Scope, Sequence[dict[str, Any]]], ...] = (
    ("one collection of all", Scope.of_collection(DATABASE, "c7"), ()),
    ('operationType "delete"', Scope.of_database(DATABASE), DELETES),
)


class Cost(NamedTuple):
    sent: float
    server_s: float
    client_s: float
    wall_s: float


def fill(client: pymongo.MongoClient[Any], entries: int, collections: int) -> None:
    """Inserts of about 400 bytes into collections at random, 20,000 at a time; every hundredth write is a delete."""
    rng = random.Random(3)
    text = "".join(rng.choices("abcdefgh ", k=250))
    database = client[DATABASE]
    for number in range(collections):
        database.create_collection(f"c{number}")
    for first in range(0, entries, _CHUNK):
        by_collection: dict[str, list[Any]] = {}
        for number in range(first, min(first + _CHUNK, entries)):
            writes = by_collection.setdefault(f"c{rng.randrange(collections)}", [])
            writes.append(pymongo.InsertOne({"_id": number, "text": text, "n": rng.random()}))
            if number % 100 == 0:
                writes.append(pymongo.DeleteOne({"_id": number}))
        for name, writes in by_collection.items():
            database[name].bulk_write(writes)


def ours(source: MongodSource, question: tuple[str, Scope, Any], start: ClusterTime, *, pushes_down: bool) -> Side:
    def read(end: ClusterTime) -> Iterator[bytes]:
        request = WatchRequest(
            scope=question[1],
            codec_options=RAW,
            pipeline=list(question[2]),
            start_at_operation_time=start.to_timestamp(),
            max_await_time_ms=50,
        )
        with closing(OplogChangeStream(source, request, pushes_down=pushes_down)) as stream:
            while not reached(stream.resume_token, end):
                event = stream.try_next()
                if event is not None:
                    yield bytes(event.raw)

    return read


def native(client: pymongo.MongoClient[Any], question: tuple[str, Scope, Any], start: ClusterTime) -> Side:
    def read(end: ClusterTime) -> Iterator[bytes]:
        _, scope, stages = question
        target: Any = client.get_database(DATABASE, codec_options=RAW)
        if scope.collection is not None:
            target = target[scope.collection]
        begun = start.to_timestamp()
        with target.watch(list(stages), start_at_operation_time=begun, max_await_time_ms=50) as stream:
            while not reached(stream.resume_token, end):
                event = stream.try_next()
                if event is not None:
                    yield bytes(event.raw)

    return read


Side = Callable[[ClusterTime], Iterator[bytes]]


def reached(token: Any, end: ClusterTime) -> bool:
    if token is None:
        return False
    raw = bytes(token.raw) if isinstance(token, RawBSONDocument) else bson.encode(token)
    return ResumeToken.parse(raw).cluster_time >= end


def measure(side: Side, end: ClusterTime, client: pymongo.MongoClient[Any], pid: int) -> tuple[Cost, list[bytes]]:
    sent, server, cpu, wall = bytes_out(client), mongod_cpu_s(pid), time.process_time(), time.perf_counter()
    events = list(side(end))
    cost = Cost(
        bytes_out(client) - sent,
        mongod_cpu_s(pid) - server,
        time.process_time() - cpu,
        time.perf_counter() - wall,
    )
    return cost, events


def bytes_out(client: pymongo.MongoClient[Any]) -> int:
    return int(client.admin.command("serverStatus", metrics=0)["network"]["bytesOut"])


def mongod_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def ask(question: tuple[str, Scope, Any], sides: dict[str, Side], run: Callable[[Side], Any], rounds: int) -> None:
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    expected: list[bytes] | None = None
    for _ in range(rounds):
        for name, side in sides.items():
            cost, events = run(side)
            costs[name].append(cost)
            if expected is not None and events != expected:
                raise SystemExit(f"{question[0]}, {name}: the events differ from the first side's")
            expected = events
    middle = {
        name: Cost(*(statistics.median(part) for part in zip(*all_, strict=True))) for name, all_ in costs.items()
    }
    print(f"\n{question[0]}: {len(expected or ()):,} events, the same bytes from every side")
    print(f"{'':24}{'kB sent':>10}{'server CPU ms':>15}{'client CPU ms':>15}{'wall ms':>10}")
    for name, cost in middle.items():
        figures = cost.sent / 1e3, cost.server_s * 1e3, cost.client_s * 1e3, cost.wall_s * 1e3
        print(f"{name:24}{figures[0]:10,.0f}{figures[1]:15,.0f}{figures[2]:15,.0f}{figures[3]:10,.0f}")
    base = next(iter(middle.values()))
    for name, cost in list(middle.items())[1:]:
        ratios = [other / max(own, 1e-3) for other, own in zip(cost, base, strict=True)]
        print(f"{name + ' / pushdown':24}{ratios[0]:9.1f}x{ratios[1]:14.1f}x{ratios[2]:14.1f}x{ratios[3]:9.1f}x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--collections", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        with (
            ReplicaSet(1, oplog_size_mb=2048) as replica_set,
            pymongo.MongoClient[Any](replica_set.uri) as client,
            closing(MongodSource(replica_set.uri)) as source,
        ):
            pid = replica_set.members[0].pid
            assert pid is not None
            start = source.newest().tick()
            fill(client, arguments.entries, arguments.collections)
            end = source.newest()
            print(
                f"{arguments.entries:,} writes to {arguments.collections:,} collections, medians of {arguments.rounds}"
            )
            for question in QUESTIONS:
                sides = {
                    "pushdown": ours(source, question, start, pushes_down=True),
                    "without": ours(source, question, start, pushes_down=False),
                    "mongod's own stream": native(client, question, start),
                }
                ask(question, sides, lambda side: measure(side, end, client, pid), arguments.rounds)
    except TailraceError as error:
        print(f"bench/pushdown.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
