"""How many changes a second does a listener handle, beside the usual loop on PyMongo?

    python bench/consumer.py [--changes 4000] [--rounds 3] [--cases ...]

The loop is what people write: ``for change in collection.watch(resume_after=token)``, the handler, then one
``update_one`` that keeps the resume token, with majority write concern, after every change. Beside it listeners with 1
and 4 partitions, with a commit after every change and after every 100, whose handler does nothing, or one small write
(``update_one`` by ``_id``, write concern 1), plain or with the commit in one transaction. Each case is a fresh process
over the same ``--changes`` inserts (ten times as many where commits are rare), counted from the moment when a quarter
is handled. 4 partitions are also shared among 2 and 4 processes, counted over ``--changes`` that begin three seconds
after each of them has a part: lanes move first, and readers begin anew. Beside them four threads of PyMongo, each of
which takes the next change of one stream and keeps a token of its own, in whatever order: what lanes that commit
separately could reach at best. Sides take turns, ``--rounds`` times; medians are printed, and the median of the ratios
to the loop with the same handler in the same round: a busy machine is seldom as busy in the next one.

The last line is about the reading alone: events a second that one process reads and divides into lanes when all but one
of 1024 lanes belong to others. It says how fast a handler would have to be before reading in parallel paid.

Bars: with 1 partition at least 0.8 of the loop, with 4 at least 3 times; with commits of 100 at least 10 times. Exit
status 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import bson
import pymongo
from pymongo import WriteConcern


class Case(NamedTuple):
    """``partitions`` 0: the loop; below 0: that many threads, which share the loop's stream. ``work``: nothing, write,
    transaction, wait (for a service, ``WAIT_S``). ``way``: Listener, AsyncListener, or one on the server's stream.
    ``processes`` share the partitions, as with ``tailrace listen --processes``."""

    partitions: int
    every: int
    work: str
    bar: float | None = None
    way: str = "listener"
    processes: int = 1


WAIT_S: Final = 0.002
SETTLED_S: Final = 3.0
FIGURES: Final = ("rate", "cpu_us", "mongod_us")


CASES: Final = {
    "nothing, loop": Case(0, 1, "nothing"),
    "nothing, 4 threads on the loop's stream": Case(-4, 1, "nothing"),
    "nothing, 1 partition": Case(1, 1, "nothing", 0.8),
    "nothing, 4 partitions": Case(4, 1, "nothing", 3),
    "nothing, 4 partitions, 2 processes": Case(4, 1, "nothing", 3, processes=2),
    "nothing, 4 partitions, 4 processes": Case(4, 1, "nothing", 3, processes=4),
    "nothing, 1 partition, commits of 100": Case(1, 100, "nothing", 10),
    "nothing, 4 partitions, commits of 100": Case(4, 100, "nothing", 10),
    "write, loop": Case(0, 1, "write"),
    "write, 4 threads on the loop's stream": Case(-4, 1, "write"),
    "write, 1 partition": Case(1, 1, "write"),
    "write, 4 partitions": Case(4, 1, "write", 3),
    "write, 4 partitions, 2 processes": Case(4, 1, "write", 3, processes=2),
    "write, 1 partition, commits of 100": Case(1, 100, "write"),
    "write, 4 partitions, commits of 100": Case(4, 100, "write"),
    "transaction, loop": Case(0, 1, "transaction"),
    "transaction, 1 partition": Case(1, 1, "transaction"),
    "transaction, 4 partitions": Case(4, 1, "transaction"),
    "wait 2 ms, loop": Case(0, 1, "wait"),
    "wait 2 ms, 1 partition": Case(1, 1, "wait"),
    "wait 2 ms, 4 partitions": Case(4, 1, "wait"),
    "wait 2 ms, 4 partitions, AsyncListener": Case(4, 1, "wait", way="async"),
    "nothing, 4 partitions, AsyncListener": Case(4, 1, "nothing", way="async"),
    'nothing, 4 partitions, engine="server"': Case(4, 1, "nothing", way="server"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_child(json.loads(args.child))))
        return 0
    from tailrace.embedded import ReplicaSet  # noqa: PLC0415  the children must not pay for it

    load_kernel()
    cases = {name: case for name, case in CASES.items() if args.cases in name}
    loops = {loop_of(case) for case in cases.values()}
    cases = {name: case for name, case in CASES.items() if name in cases or name in loops}
    with ReplicaSet(1, oplog_size_mb=2048) as members:
        mongod = fill(members.uri, args.changes)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for turn in range(args.rounds):
            for name, case in cases.items():
                found[name].append(measured(members.uri, mongod, case, args.changes, turn))
        reading = [child({"uri": members.uri, "reading": True}) for _ in range(args.rounds)]
    print(f"{args.changes:,} changes, {os.cpu_count()} cores, medians of {args.rounds}")
    print(f"{'':40}{'changes/s':>10}{'ratio':>8}{'CPU us: client':>16}{'mongod':>8}  bar")
    good = True
    for name, case in cases.items():
        rate, cpu, server = (statistics.median(one[what] for one in found[name]) for what in FIGURES)
        rounds = zip(found[name], found[loop_of(case)], strict=True)
        ratio = statistics.median(one["rate"] / loop["rate"] for one, loop in rounds)
        met = case.bar is None or ratio >= case.bar
        good = good and met
        bar = "" if case.bar is None else f"{case.bar:g}" + ("" if met else "  missed")
        print(f"{name:40}{rate:>10,.0f}{ratio:>8.2f}{cpu:>16,.0f}{server:>8,.0f}  {bar}")
    rate, cpu = (statistics.median(one[what] for one in reading) for what in ("rate", "cpu_us"))
    print(f"{'reading for lanes of others':40}{rate:>10,.0f}{'':8}{cpu:>16,.1f}")
    return 0 if good else 1


def loop_of(case: Case) -> str:
    """The name of the case that this one is compared with."""
    return next(name for name, other in CASES.items() if other.partitions == 0 and other.work == case.work)


def load_kernel() -> None:
    """Load the kernel, as in a listener that has read for some seconds. It is compiled once for an installation, which
    takes half a minute. The children do not live that long: each would begin compiling anew beside its work."""
    from tailrace.watch.client import kernel_loader  # noqa: PLC0415  the loop must not pay for it

    kernel_loader.is_ready(kernel_loader.BYTES_MIN)
    while not kernel_loader.is_ready(1) and not kernel_loader.is_missing():
        time.sleep(0.1)


def fill(uri: str, changes: int) -> int:
    """The changes, in a collection for cases with a commit each and in one for cases with few. Gives mongod's process
    id."""
    with pymongo.MongoClient[Any](uri) as client:
        for name, count in (("orders", changes), ("many", 10 * changes)):
            for first in range(0, count, 1000):
                documents = [{"_id": bson.ObjectId(), "n": n, "name": "x" * 200} for n in range(first, first + 1000)]
                client["shop"][name].insert_many(documents)
        return int(client.admin.command("serverStatus")["pid"])


def cpu_seconds(process: int) -> float:
    """CPU seconds that another process has used so far, to a hundredth; 0 where ``/proc`` does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(uri: str, mongod: int, case: Case, changes: int, turn: int) -> dict[str, float]:
    count = changes if case.every == 1 else 10 * changes
    name = f"{turn}-{'-'.join(map(str, case))}"
    job = {"uri": uri, "mongod": mongod, "case": case._asdict(), "changes": count, "name": name}
    return child(job) if case.processes == 1 else children(job, case.processes)


def children(job: dict[str, Any], count: int) -> dict[str, float]:
    """Processes that share the partitions: each counts in a file, where all is added up."""
    changes = job["changes"]
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        file.write(bytes(count * _COUNT.size))
        commands = [
            [sys.executable, __file__, "--child", json.dumps(job | {"counter": [file.name, n]})] for n in range(count)
        ]
        running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for command in commands]
        until(file, running, 10 * changes, all)
        time.sleep(SETTLED_S)
        begun = until(file, running, 10 * changes, all)
        cpu, started = cpu_seconds(job["mongod"]), time.monotonic()
        ended = until(file, running, 10 * changes, lambda counts: sum(counts) >= begun[0] + changes)
        seconds, cpu = time.monotonic() - started, cpu_seconds(job["mongod"]) - cpu
        for process in running:
            process.communicate()
    handled, used = (after - before for before, after in zip(begun, ended, strict=True))
    found = {"rate": handled / seconds, "cpu_us": used / handled * 1e6, "mongod_us": cpu / handled * 1e6}
    print(f"{job['name']}: {found['rate']:,.0f}/s", file=sys.stderr)
    return found


def until(
    file: IO[bytes], running: list[subprocess.Popen[bytes]], total: int, holds: Callable[[list[int]], bool]
) -> tuple[int, float]:
    """Wait until ``holds`` accepts the numbers of changes that the processes have handled. Returns the sum of these
    numbers, and the processes' seconds of CPU."""
    while True:
        file.seek(0)
        counts = list(_COUNT.iter_unpack(file.read()))
        if sum(count for count, _ in counts) == total:
            raise SystemExit("everything was handled before all processes had a part in it: try more --changes")
        if holds([count for count, _ in counts]):
            return sum(count for count, _ in counts), sum(seconds for _, seconds in counts)
        for process in running:
            if process.poll() is not None:
                raise SystemExit("a process has ended")
        time.sleep(0.005)


def child(job: dict[str, Any]) -> dict[str, float]:
    run = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)], check=True, stdout=subprocess.PIPE)
    answer: dict[str, float] = json.loads(run.stdout)
    print(f"{job.get('name', 'reading')}: {answer['rate']:,.0f}/s", file=sys.stderr)
    return answer


#: Changes handled and seconds of CPU used by one of several processes.
_COUNT: Final = struct.Struct("<qd")


# ── a child: one case ────────────────────────────────────────────────────────────────────────────────────────────────


class Meter:
    """From the moment when a quarter is handled to the last change: everything is loaded and connected by then."""

    def __init__(self, changes: int, mongod: int) -> None:
        self.left = changes
        self.mongod = mongod
        self.changes = changes - changes // 4
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            if self.left == self.changes:
                self.begin, self.cpu, self.server = time.monotonic(), time.process_time(), cpu_seconds(self.mongod)
            self.left -= 1
            if self.left == 0:
                seconds, cpu = time.monotonic() - self.begin, time.process_time() - self.cpu
                used = (seconds, cpu, cpu_seconds(self.mongod) - self.server)
                _, *us = (part / self.changes * 1e6 for part in used)
                self.result = dict(zip(FIGURES, (self.changes / seconds, *us), strict=True))
                self.ended.set()


class SharedMeter(Meter):
    """The meter of one of several processes; such a process ends when its standard input does."""

    def __init__(self, changes: int, mongod: int, file: str, number: int) -> None:
        super().__init__(changes, mongod)
        with open(file, "r+b") as opened:
            self._counts = mmap.mmap(opened.fileno(), 0)
        self._at = number * _COUNT.size
        self._count = 0
        self.result = {}
        threading.Thread(target=self._wait, daemon=True).start()

    def count(self) -> None:
        with self._lock:
            self._count += 1
            _COUNT.pack_into(self._counts, self._at, self._count, time.process_time())

    def _wait(self) -> None:
        sys.stdin.read()
        self.ended.set()


def run_child(job: dict[str, Any]) -> dict[str, float]:
    if job.get("reading"):
        return run_reading(job["uri"])
    case = Case(**job["case"])
    shared = job.get("counter")
    meter = SharedMeter(job["changes"], job["mongod"], *shared) if shared else Meter(job["changes"], job["mongod"])
    collection = "orders" if case.every == 1 and case.processes == 1 else "many"
    with pymongo.MongoClient[Any](job["uri"]) as client:
        if not shared or shared[1] == 0:
            client["effects"].drop_collection("customers")
            client["effects"].create_collection("customers")
        (run_loop if case.partitions <= 0 else run_listener)(client, collection, case, meter, job)
    return meter.result


def run_loop(client: pymongo.MongoClient[Any], collection: str, case: Case, meter: Meter, job: dict[str, Any]) -> None:
    first = client["local"]["oplog.rs"].find_one({"ns": f"shop.{collection}"})
    assert first is not None
    with client["shop"][collection].watch(start_at_operation_time=first["ts"]) as stream:
        if case.partitions == 0:
            for change in stream:
                handle_in_loop(client, case, change, job["name"])
                meter.count()
                if meter.ended.is_set():
                    return
        turn = threading.Lock()

        def work(name: str) -> None:
            for _ in range(job["changes"] // -case.partitions):
                with turn:
                    change = next(stream)
                handle_in_loop(client, case, change, name)
                meter.count()

        threads = [threading.Thread(target=work, args=(f"{job['name']}.{n}",)) for n in range(-case.partitions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def handle_in_loop(client: pymongo.MongoClient[Any], case: Case, change: Any, name: str) -> None:
    """The work, and the token kept under ``name``."""
    effects, query = client["effects"]["customers"], {"_id": name}
    key, token = change["documentKey"]["_id"], {"$set": {"token": change["_id"]}}
    if case.work == "transaction":
        with client.start_session() as session, session.start_transaction(write_concern=WriteConcern("majority")):
            effects.update_one({"_id": key}, {"$set": {"n": 1}}, upsert=True, session=session)
            client["tailrace"]["tokens"].update_one(query, token, upsert=True, session=session)
        return
    if case.work == "wait":
        time.sleep(WAIT_S)
    elif case.work == "write":
        effects.update_one({"_id": key}, {"$set": {"n": 1}}, upsert=True)
    tokens = client["tailrace"].get_collection("tokens", write_concern=WriteConcern("majority"))
    tokens.update_one(query, token, upsert=True)


def run_listener(
    client: pymongo.MongoClient[Any], collection: str, case: Case, meter: Meter, job: dict[str, Any]
) -> None:
    import tailrace  # noqa: PLC0415  the loop must not pay for it
    from tailrace.consumer import AsyncListener, Change, Listener, MongoLeaseStore  # noqa: PLC0415

    load_kernel()
    effects = client["effects"]["customers"]

    def handle(change: Change) -> None:
        if case.work == "transaction":
            with change.transaction() as session:
                key = (change.document_key or {})["_id"]
                effects.update_one({"_id": key}, {"$set": {"n": 1}}, upsert=True, session=session)
        elif case.work == "wait":
            time.sleep(WAIT_S)
        elif case.work == "write":
            effects.update_one({"_id": (change.document_key or {})["_id"]}, {"$set": {"n": 1}}, upsert=True)
        meter.count()

    async def handle_async(_change: Any) -> None:
        if case.work == "wait":
            await asyncio.sleep(WAIT_S)
        meter.count()

    async def run_async(options: dict[str, Any]) -> None:
        async with AsyncListener(watched["shop"][collection], handle_async, **options):
            await asyncio.to_thread(meter.ended.wait)

    options: dict[str, Any] = {
        "resource": job["name"],
        "store": MongoLeaseStore(client["tailrace"]["leases"]),
        "partitions": case.partitions,
        "commit_every": case.every,
    }
    with tailrace.connect(job["uri"], engine="server" if case.way == "server" else "oplog") as watched:
        if case.way == "async":
            asyncio.run(run_async(options))
            return
        with Listener(watched["shop"][collection], handle, **options):
            meter.ended.wait()


def run_reading(uri: str) -> dict[str, float]:
    """The collection of many changes, twice; the second time counts."""
    from bson.raw_bson import RawBSONDocument  # noqa: PLC0415

    import tailrace  # noqa: PLC0415

    load_kernel()
    from tailrace.act.consumer.lane_queue import LaneQueue  # noqa: PLC0415
    from tailrace.act.consumer.lane_reader import LaneReader  # noqa: PLC0415
    from tailrace.act.consumer.rules.lanes import LanePlan  # noqa: PLC0415
    from tailrace.act.consumer.rules.position import StreamPosition  # noqa: PLC0415

    with tailrace.connect(uri) as client:
        first = client["local"]["oplog.rs"].find_one({"ns": "shop.many"})
        count = client["shop"]["many"].count_documents({})
        assert first is not None
        begin, collection = StreamPosition(at=first["ts"]), client["shop"]["many"]

        def read() -> None:
            queue = LaneQueue(begin, events=count, size=1 << 40)
            reader = LaneReader(
                lambda at: collection.watch(
                    document_class=RawBSONDocument, max_await_time_ms=50, start_at_operation_time=at.at
                ),
                LanePlan(1024, begin),
                {0: queue},
                "reading",
            )
            reader.start()
            while not reader.caught_up:
                time.sleep(0.002)
            reader.stop()
            reader.join()

        read()
        started, cpu = time.monotonic(), time.process_time()
        read()
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    return {"rate": count / seconds, "cpu_us": cpu / count * 1e6}


if __name__ == "__main__":
    sys.exit(main())
