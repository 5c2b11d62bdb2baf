"""How fast is ``watch()``, beside PyMongo's own?

    python bench/watch.py [--entries 200000] [--rounds 3] [--cases raw,dict] [--no-cluster] [--no-latency]

A mongod is started and filled with ``--entries`` oplog entries (half inserts, half updates, about 500 bytes each), then
the same number of writes, half of them in transactions of ten. Each case is read from its start to its end by two
programs that differ in one line: ``pymongo.MongoClient(uri)`` and ``tailrace.connect(uri)``. Each is a fresh process
that reads the case twice; the sides take turns, ``--rounds`` times, and medians are printed. Of the second reading, in
a running program: events a second from ``watch()`` to the last event, CPU microseconds an event of the client and of
mongod, and ours over native, which the bar is for. Of the first reading ("first") the ratio: ours loads its compiled
code meanwhile. A stream over three shards stands beside a merge of the shards' native streams in one process.

Afterwards each side reads its case once more, untimed, for the checksum of its events: raw bytes, or decoded and
encoded again. Number and checksum must be equal.

The second table is about single events: the milliseconds from before the write to the event in the reader's hands,
events coming one by one; and from the start of ``watch()`` to its first event, with compiled code in its cache and with
an empty cache. The third is about a program's first second: a fresh process reads the entries, and ours loads its
compiled code, which is in the cache, meanwhile. Milliseconds from ``watch()`` to the first event and to a tenth of
them, and how many it has after a second. Exit status 1 where bytes differ or a bar is missed.

The readers have Python's bytecode in its cache, as after an installation by pip.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import heapq
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import bson
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

DATABASE, COLLECTION, TRANSACTIONS, SINGLE = "bench", "entries", "transactions", "single"
RAW: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument)
TICKS = os.sysconf("SC_CLK_TCK")
SIDES = ("native", "ours")
_GROUPS = 25
_LATENCY_EVENTS = 300
_SHARDS = 3
_REGIONS = ("a", "g", "n")
#: Each of these writes goes through the router by itself.
_LOOKED_UP_MAX = 30_000


class Case(NamedTuple):
    """``events``: how many of the entries give one, as a part of all."""

    bar: float
    events: float = 1.0
    raw: bool = True
    database: str = DATABASE
    collection: str = COLLECTION
    pipeline: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = {}


MATCH = {"$match": {"fullDocument.group": 7}}
HALF = {"$match": {"operationType": "insert"}}
PROJECT = {"$project": {"operationType": 1, "documentKey": 1, "fullDocument.name": 1, "fullDocument.points": 1}}
CASES = {
    "raw": Case(4),
    "dict": Case(2, raw=False),
    "match": Case(2, events=1 / (2 * _GROUPS), pipeline=(MATCH,)),
    "project": Case(2, events=1 / 2, pipeline=(HALF, PROJECT)),
    "transactions": Case(2, collection=TRANSACTIONS),
    "updateLookup": Case(2, options={"full_document": "updateLookup"}),
    "cluster": Case(2),
    "cluster-updateLookup": Case(1, database="routed", options={"full_document": "updateLookup"}),
}
WORDS = {
    "raw": "raw documents",
    "dict": "dictionaries",
    "match": "$match, one in fifty passes",
    "project": "$match (half) and $project",
    "transactions": "transactions, half of the writes",
    "updateLookup": "updateLookup, half are updates",
    "cluster": f"{_SHARDS} shards, raw",
    "cluster-updateLookup": f"{_SHARDS} shards, updateLookup",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--no-cluster", dest="cluster", action="store_false", help="leave the sharded cluster out")
    parser.add_argument("--no-latency", dest="latency", action="store_false", help="leave single events out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_child(json.loads(args.child))))
        return 0
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=1)
    cases = {name: CASES[name] for name in args.cases.split(",") if name not in CLUSTER_CASES or args.cluster}
    print(f"{args.entries:,} entries, {os.cpu_count()} cores, medians of {args.rounds}")
    print(f"{'':36}{'events/s':>20}{'ratio':>7}{'first':>7}{'client CPU us':>16}{'server CPU us':>16}  bar")
    print(f"{'':36}{'native':>10}{'ours':>10}{'':14}{'native':>8}{'ours':>8}{'native':>8}{'ours':>8}")
    good = all([one_replica_set(args, cases)] + [one_cluster(args, name) for name in CLUSTER_CASES if name in cases])
    return 0 if good else 1


# ── the parent: fill, start the readers, compare ─────────────────────────────────────────────────────────────────────


def one_replica_set(args: argparse.Namespace, cases: Mapping[str, Case]) -> bool:
    from tailrace.embedded import ReplicaSet  # noqa: PLC0415  the readers must not pay for it

    good = True
    with ReplicaSet(1, oplog_size_mb=4096, cache_gb=1.0) as members, pymongo.MongoClient[Any](members.uri) as client:
        starts = {COLLECTION: fill(client, args.entries)}
        if any(case.collection == TRANSACTIONS for case in cases.values()):
            starts[TRANSACTIONS] = fill_transactions(client, args.entries)
        for name, case in cases.items():
            if name not in CLUSTER_CASES:
                task = {
                    "case": name,
                    "uris": [members.uri],
                    "uri": members.uri,
                    "pids": [members.members[0].pid],
                    "counts": [round(args.entries * case.events)],
                    "start": starts[case.collection],
                }
                good &= compare(name, case, task, args.rounds)
        if args.latency:
            good &= single_events(client, members.uri)
            first_second(args, {"uri": members.uri, "start": starts[COLLECTION], "second": args.entries})
    return good


def one_cluster(args: argparse.Namespace, name: str) -> bool:
    from tailrace.embedded import ShardedCluster  # noqa: PLC0415

    with ShardedCluster(shards=_SHARDS) as cluster:
        start, each = CLUSTER_CASES[name](cluster, args.entries // _SHARDS)
        parts = [*cluster.shards.values(), cluster.config]
        task = {
            "case": name,
            "uris": [shard.uri for shard in cluster.shards.values()],
            "uri": cluster.uri,
            "pids": [member.pid for part_ in parts for member in part_.members],
            "counts": [each] * _SHARDS,
            "start": [start.time, start.inc + 1],
        }
        return compare(name, CASES[name], task, args.rounds)


def fill_shards(cluster: Any, each: int) -> tuple[Timestamp, int]:
    """Inserts on each shard, past the router; the time before them, and how many they are."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(pymongo.MongoClient[Any](shard.uri)) for shard in cluster.shards.values()]
        for client in clients:
            client[DATABASE].create_collection(COLLECTION)
        start = max(operation_time(client) for client in clients)
        time.sleep(1.5)  # nobody tells the shards' clocks of each other: now all of them are past it
        part = each // 10
        for first in range(0, each, part):
            for number, client in enumerate(clients):
                insert(client[DATABASE][COLLECTION], range(first, min(first + part, each)), number + 1)
    return start, each


def fill_routed(cluster: Any, each: int) -> tuple[Timestamp, int]:
    """Half inserts, half updates of a collection with a chunk on each shard, written by a thread for each; as above."""
    router, namespace = cluster.router, f"{CASES['cluster-updateLookup'].database}.{COLLECTION}"
    router.create_database(namespace.partition(".")[0], next(iter(cluster.shards)))
    router.shard_collection(namespace, {"region": 1, "_id": 1})
    for region, shard in zip(_REGIONS, cluster.shards, strict=True):
        if region != _REGIONS[0]:
            router.split(namespace, {"region": region})
            router.move_chunk(namespace, {"region": region}, to=shard)
    inserts = min(each, _LOOKED_UP_MAX // _SHARDS) // 2

    def write(region: str, seed: int) -> None:
        chance = random.Random(seed)
        documents = [{**document(f"{region}{n}", chance), "region": region} for n in range(inserts)]
        for first in range(0, inserts, 1000):
            router.insert_many(namespace, documents[first : first + 1000])
        for number in range(inserts):
            key = {"region": region, "_id": f"{region}{chance.randrange(inserts)}"}
            router.update_one(namespace, key, {"$set": change(number, chance)})

    start: Timestamp = router.fence()
    with ThreadPoolExecutor(_SHARDS) as writers:
        list(writers.map(write, _REGIONS, range(_SHARDS)))
    router.fence()
    return start, 2 * inserts


#: Those that are read of a cluster, and what fills it.
CLUSTER_CASES = {"cluster": fill_shards, "cluster-updateLookup": fill_routed}


def compare(name: str, case: Case, task: dict[str, Any], rounds: int) -> bool:
    """Print the case's line. Whether both sides gave the same and the bar was met."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            runs[side].append(child({**task, "side": side}))
    digests = {side: child({**task, "side": side, "digest": True})["digest"] for side in SIDES}
    count = sum(task["counts"])

    def median(side: str, figure: str) -> float:
        return statistics.median(run[figure] for run in runs[side])

    rates = {side: count / median(side, "seconds") for side in SIDES}
    ratio = rates["ours"] / rates["native"]
    first = median("native", "first") / median("ours", "first")
    cpu = [median(side, figure) / count * 1e6 for figure in ("client", "server") for side in SIDES]
    met = "met" if ratio >= case.bar else "MISSED"
    same = "" if digests["native"] == digests["ours"] else "  THE EVENTS DIFFER"
    print(
        f"{WORDS[name]:36}{rates['native']:10,.0f}{rates['ours']:10,.0f}{ratio:7.2f}{first:7.2f}"
        + "".join(f"{figure:8.1f}" for figure in cpu)
        + f"  {case.bar:g} {met}{same}",
        flush=True,
    )
    return ratio >= case.bar and not same


def child(task: Mapping[str, Any], **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(task)],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def single_events(client: pymongo.MongoClient[Any], uri: str) -> bool:
    """The second table. Whether our median delay is within a millisecond of the native one."""
    delays = {side: delay(client, uri, side) for side in SIDES}
    start = write_single(client)
    task = {"uri": uri, "first": [start.time, start.inc]}
    with tempfile.TemporaryDirectory() as empty:
        first = {
            "native": child({**task, "side": "native"})["ms"],
            "ours, warm": statistics.median(child({**task, "side": "ours"})["ms"] for _ in range(3)),
            "ours, cold": child({**task, "side": "ours"}, NUMBA_CACHE_DIR=empty)["ms"],
        }
    print(f"\n{'one by one, ms from write to event':36}{'p50':>8}{'p99':>8}")
    for side, (p50, p99) in delays.items():
        print(f"{side:36}{p50:8.2f}{p99:8.2f}")
    good = delays["ours"][0] <= delays["native"][0] + 1.0
    print(f"bar: p50 within 1 ms of native: {'met' if good else 'MISSED'}")
    print(f"{'ms from watch() to its first event':36}" + ", ".join(f"{name} {ms:.0f}" for name, ms in first.items()))
    return good


def first_second(args: argparse.Namespace, task: Mapping[str, Any]) -> None:
    """The third table, for raw documents and dictionaries."""
    print(f"\n{'a fresh process':36}{'first, ms':>12}{'a tenth, ms':>14}{'after 1 s':>12}")
    for words, case in (("raw documents", "raw"), ("dictionaries", "dict")):
        for side in SIDES:
            runs = [child({**task, "case": case, "side": side}) for _ in range(args.rounds)]
            first, tenth, count = (statistics.median(run[name] for run in runs) for name in ("first", "tenth", "count"))
            print(f"{f'{words}, {side}':36}{first:12.0f}{tenth:14.0f}{count:12,.0f}", flush=True)


def delay(client: pymongo.MongoClient[Any], uri: str, side: str) -> tuple[float, float]:
    """p50 and p99 in milliseconds; the reader waits in a process of its own."""
    task = {"uri": uri, "side": side, "delays": _LATENCY_EVENTS}
    with subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(task)], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()  # the stream is open
        for number in range(_LATENCY_EVENTS):
            time.sleep(0.004 + 0.008 * random.random())
            client[DATABASE][SINGLE].insert_one({"n": number, "at": time.monotonic()})
        result = json.loads(reader.stdout.readline())
    return result["p50"], result["p99"]


# ── the writes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def operation_time(client: pymongo.MongoClient[Any]) -> Timestamp:
    time_: Timestamp = client.admin.command("ping")["operationTime"]
    return time_


def document(number: int | str, chance: random.Random, group: int = 0) -> dict[str, Any]:
    return {
        "_id": number,
        "name": f"customer {number}",
        "town": chance.choice(["Lagos", "Osaka", "Porto", "Quito"]),
        "group": group,
        "points": chance.random(),
        "lines": [{"sku": f"sku-{chance.randrange(10_000)}", "n": n} for n in range(4)],
        "text": "".join(chance.choices("abcdefgh ", k=150)),
    }


def change(number: int, chance: random.Random) -> dict[str, Any]:
    return {"points": chance.random(), "seen": number, "text": "".join(chance.choices("abcdefgh ", k=220))}


def insert(collection: Any, numbers: range, seed: int) -> None:
    chance = random.Random(seed)
    for first in range(numbers.start, numbers.stop, 1000):
        batch = range(first, min(first + 1000, numbers.stop))
        collection.insert_many([document(number, chance, number % _GROUPS) for number in batch])


def fill(client: pymongo.MongoClient[Any], entries: int) -> list[int]:
    """Half inserts, half updates; the time to start at."""
    client[DATABASE].create_collection(COLLECTION)
    start = operation_time(client)
    collection = client[DATABASE][COLLECTION]
    inserts = entries // 2
    insert(collection, range(inserts), 7)
    chance = random.Random(8)
    for first in range(inserts, entries, 1000):
        numbers = range(first, min(first + 1000, entries))
        collection.bulk_write(
            [
                pymongo.UpdateOne({"_id": chance.randrange(inserts)}, {"$set": change(number, chance)})
                for number in numbers
            ]
        )
    return [start.time, start.inc + 1]


def fill_transactions(client: pymongo.MongoClient[Any], writes: int) -> list[int]:
    """By turns ten transactions of ten inserts each and a hundred inserts by themselves."""
    client[DATABASE].create_collection(TRANSACTIONS)
    start = operation_time(client)
    collection = client[DATABASE][TRANSACTIONS]
    chance = random.Random(9)
    with client.start_session() as session:
        for first in range(0, writes, 200):
            for ten in range(first, first + 100, 10):
                with session.start_transaction():
                    collection.insert_many([document(n, chance) for n in range(ten, ten + 10)], session=session)
            collection.insert_many([document(n, chance) for n in range(first + 100, first + 200)])
    return [start.time, start.inc + 1]


def write_single(client: pymongo.MongoClient[Any]) -> Timestamp:
    start = operation_time(client)
    client[DATABASE][SINGLE].insert_one({"n": -1})
    return Timestamp(start.time, start.inc + 1)


# ── the readers, each in a process of its own ────────────────────────────────────────────────────────────────────────


def run_child(task: dict[str, Any]) -> dict[str, Any]:
    if "delays" in task:
        return read_single(task)
    if "first" in task:
        return read_first(task)
    if "second" in task:
        return read_second(task)
    case = CASES[task["case"]]
    client = connect(task["side"], task["uri"]) if task["side"] == "ours" or len(task["uris"]) == 1 else None
    opened = (lambda: [stream(client, case, task)]) if client is not None else (lambda: shards(case, task))
    if task.get("digest"):
        return {"digest": digest(events_of(opened(), task), case)}
    begun = time.perf_counter()
    for _ in events_of(opened(), task):
        pass
    first = time.perf_counter() - begun
    server, cpu, begun = cpu_s(task["pids"]), time.process_time(), time.perf_counter()
    for _ in events_of(opened(), task):
        pass
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {"first": first, "seconds": seconds, "client": cpu, "server": cpu_s(task["pids"]) - server}


def connect(side: str, uri: str) -> Any:
    if side == "native":
        return pymongo.MongoClient[Any](uri)
    import tailrace  # noqa: PLC0415  the native reader must not pay for it

    return tailrace.connect(uri)


def stream(client: Any, case: Case, task: Mapping[str, Any]) -> Iterable[Any]:
    codec = RAW if case.raw else CodecOptions[Any]()
    collection = client.get_database(case.database).get_collection(case.collection, codec_options=codec)
    start = Timestamp(*task["start"])
    opened: Iterable[Any] = collection.watch(list(case.pipeline), start_at_operation_time=start, **case.options)
    return opened


def shards(case: Case, task: Mapping[str, Any]) -> list[Iterable[Any]]:
    return [stream(pymongo.MongoClient[Any](uri), case, task) for uri in task["uris"]]


def events_of(streams: list[Iterable[Any]], task: Mapping[str, Any]) -> Iterator[Any]:
    """As many events as were written; with several streams, the events of all of them, by token."""
    if len(streams) == 1:
        return itertools.islice(streams[0], sum(task["counts"]))
    parts = [itertools.islice(one, count) for one, count in zip(streams, task["counts"], strict=True)]
    # The token's text begins at byte 24 of every event and its cluster time fills the first 18 digits; the rest of it
    # decides only between events of the same time.
    return heapq.merge(*parts, key=lambda event: event.raw[24:224])


def digest(events: Iterable[Any], case: Case) -> list[Any]:
    hashed, count = hashlib.sha256(), 0
    for event in events:
        hashed.update(event.raw if case.raw else bson.encode(event))
        count += 1
    return [count, hashed.hexdigest()]


def read_single(task: Mapping[str, Any]) -> dict[str, float]:
    delays: list[float] = []
    with connect(task["side"], task["uri"]) as client, client[DATABASE][SINGLE].watch() as changes:
        changes.try_next()
        print("open", flush=True)
        for _ in range(task["delays"]):
            event = changes.next()
            delays.append((time.monotonic() - event["fullDocument"]["at"]) * 1000)
    delays.sort()
    return {"p50": delays[len(delays) // 2], "p99": delays[len(delays) * 99 // 100]}


def read_first(task: Mapping[str, Any]) -> dict[str, float]:
    with connect(task["side"], task["uri"]) as client:
        # The client is connected already: the stream alone is measured.
        client.admin.command("ping")
        client[DATABASE]["connected"].watch().close()
        begun = time.perf_counter()
        with client[DATABASE][SINGLE].watch(start_at_operation_time=Timestamp(*task["first"])) as changes:
            changes.next()
        return {"ms": (time.perf_counter() - begun) * 1000}


def read_second(task: Mapping[str, Any]) -> dict[str, float]:
    """With a client that is connected already."""
    with connect(task["side"], task["uri"]) as client:
        client.admin.command("ping")
        client[DATABASE]["connected"].watch().close()
        begun, entries = time.perf_counter(), task["second"]
        figures = {"first": 0.0, "tenth": 0.0, "count": float(entries)}
        for count, _ in enumerate(itertools.islice(stream(client, CASES[task["case"]], task), entries), 1):
            passed = time.perf_counter() - begun
            if passed >= 1.0 and figures["count"] == entries:
                figures["count"] = count
            if count == 1:
                figures["first"] = passed * 1000
            if count >= entries / 10:
                figures["tenth"] = figures["tenth"] or passed * 1000
                if passed >= 1.0:
                    break
    return figures


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


if __name__ == "__main__":
    raise SystemExit(main())
