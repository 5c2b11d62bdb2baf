"""What does it cost to have many streams open, each on a collection of its own?

    python bench/streams.py                                     1, 10, 100 and 1,000 streams of one client
    python bench/streams.py --streams 1 100 1000 10000 --native-max 1000

The same writes for every number of streams: half of them to the first stream's collection, the others to 1,000
collections in turn. A thread waits on each stream, on both sides; the writer, the readers and mongod are processes of
their own. For each line: mongod's CPU, less what the writes cost without any stream; the readers' CPU; milliseconds
from before the write to the event; and what a quiet stream takes in memory, measured by opening as many and polling
each once, without threads. Where mongod cannot keep up with its streams, the line says how many events came.

Bars: mongod's CPU with 100 streams under 1.2 times that with one; our median delay with one stream within a millisecond
of the native one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pymongo

from tailrace.embedded import ReplicaSet

TICKS: Final = os.sysconf("SC_CLK_TCK")
DATABASE: Final = "streams"
COLLECTIONS: Final = 1_000
SIDES: Final = ("native", "ours")
_BAR_CPU: Final = 1.2
_BAR_MS: Final = 1.0
#: Writes before those that are measured: enough for the compiled code to be loaded.
_WARM_UP: Final = 1500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--native-max", type=int, default=100, help="how many native streams at most")
    parser.add_argument("--writes", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=300.0, help="writes a second")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return read(json.loads(args.child))
    with ReplicaSet(1, oplog_size_mb=2000) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        pid = replica_set.members[0].pid
        for number in range(COLLECTIONS):
            client[DATABASE].create_collection(f"c{number}")
        write(client, 200, args.rate)
        bare = server_cpu(pid, lambda: write(client, args.writes, args.rate))
        print(f"{args.writes} writes at {args.rate:.0f}/s; without a stream they cost mongod {bare:.2f} s of CPU\n")
        print(
            f"{'streams':>8} {'side':8}{'mongod, s':>10}{'with writes':>12}{'readers, s':>11}{'p50 ms':>8}{'p99 ms':>8}"
            f"{'kB each':>9}"
        )
        rows = {}
        for count in args.streams:
            for side in SIDES:
                if side == "native" and count > args.native_max:
                    continue
                task = {"uri": replica_set.uri, "side": side, "streams": count}
                rows[side, count] = measure(client, pid, task, args.writes, args.rate)
                row = rows[side, count]
                print(
                    f"{count:8} {side:8}{row['server'] - bare:10.2f}{row['server']:12.2f}{row['cpu']:11.2f}"
                    f"{row['p50']:8.2f}{row['p99']:8.2f}{row['kB']:9.1f}"
                    + (f"  only {row['events']} of {row['expected']} events came" if _is_short(row) else ""),
                    flush=True,
                )
        return verdict(rows)


def verdict(rows: dict[tuple[str, int], dict[str, float]]) -> int:
    good = True
    for count in (100, 1000):
        if ("ours", count) in rows and ("ours", 1) in rows:
            ratio = rows["ours", count]["server"] / rows["ours", 1]["server"]
            good &= ratio < _BAR_CPU
            print(f"mongod's CPU with {count} streams / with one: {ratio:.2f} ({_met(ratio < _BAR_CPU)})")
    if ("native", 1) in rows and ("ours", 1) in rows:
        more = rows["ours", 1]["p50"] - rows["native", 1]["p50"]
        good &= more < _BAR_MS
        print(f"p50 with one stream, more than native: {more:.2f} ms ({_met(more < _BAR_MS)})")
    return 0 if good else 1


def _is_short(row: dict[str, float]) -> bool:
    return row["events"] < row["expected"]


def _met(good: bool) -> str:
    return "met" if good else "MISSED"


def measure(
    client: pymongo.MongoClient[Any], pid: int, task: dict[str, Any], writes: int, rate: float
) -> dict[str, float]:
    with subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()  # the streams wait
        write(client, _WARM_UP, 4 * rate)
        child.stdin.write(f"{_expected(task, _WARM_UP)}\n")
        child.stdin.flush()
        child.stdout.readline()  # everything that a first read loads is loaded now
        time.sleep(1.5)
        server = server_cpu(pid, lambda: write(client, writes, rate))
        expected = _expected(task, writes)
        child.stdin.write(f"{expected}\n")
        child.stdin.flush()
        result: dict[str, float] = json.loads(child.stdout.readline())
        child.stdin.close()
        child.wait()
    if result["events"] != expected and task["side"] == "ours":
        raise SystemExit(f"{task}: {result['events']} events of {expected}")
    return {**result, "server": server, "expected": expected}


def _expected(task: dict[str, Any], writes: int) -> int:
    return sum(number < task["streams"] for number in map(place, range(writes)))


def place(number: int) -> int:
    """The collection of a write."""
    return 0 if number % 2 == 0 else (number // 2) % COLLECTIONS


def write(client: pymongo.MongoClient[Any], writes: int, rate: float) -> None:
    begun = time.monotonic()
    for number in range(writes):
        time.sleep(max(0.0, begun + number / rate - time.monotonic()))
        client[DATABASE][f"c{place(number)}"].insert_one({"at": time.monotonic(), "text": "x" * 200})


def server_cpu(pid: int, work: Any) -> float:
    before = cpu_s([pid])
    work()
    time.sleep(0.5)
    return cpu_s([pid]) - before


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


# ── the readers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read(task: dict[str, Any]) -> int:
    with connect(task) as client:
        client.admin.command("ping")
        each = quiet_stream_kb(client, task["streams"])
        # Each poll of a quiet stream costs the reader something, so 10,000 of them wait for longer.
        streams = opened(client, task["streams"], max_await_time_ms=max(1000, task["streams"]))
        delays: list[list[float]] = [[] for _ in streams]
        ending = threading.Event()
        threads = [
            threading.Thread(target=follow, args=(stream, found, ending))
            for stream, found in zip(streams, delays, strict=True)
        ]
        threading.stack_size(256 << 10)
        for thread in threads:
            thread.start()
        time.sleep(2.0 + len(streams) / 200)
        for _ in range(2):  # to warm up, and to be measured
            cpu = time.process_time()
            for found in delays:
                found.clear()
            print("wait", flush=True)
            expected, patience = int(sys.stdin.readline()), time.monotonic() + 60
            cpu = time.process_time() - cpu
            while sum(map(len, delays)) < expected and time.monotonic() < patience:
                time.sleep(0.05)
        ending.set()
        for thread in threads:
            thread.join()
        every = sorted(delay for found in delays for delay in found)
        every = every or [0.0]
        p50, p99 = every[len(every) // 2], every[len(every) * 99 // 100]
        result = {"events": sum(map(len, delays)), "p50": p50, "p99": p99, "cpu": cpu, "kB": each}
        print(json.dumps(result), flush=True)
        os._exit(0)


def connect(task: dict[str, Any]) -> Any:
    if task["side"] == "native":
        return pymongo.MongoClient[Any](task["uri"], maxPoolSize=None)
    import tailrace  # noqa: PLC0415  the native reader must not pay for it
    from tailrace.watch.client import kernel_loader  # noqa: PLC0415

    # Compiled for this installation and loaded before anything is measured: both happen once in a program's life.
    patience = time.monotonic() + 120
    while not kernel_loader.is_ready(kernel_loader.BYTES_MIN) and time.monotonic() < patience:
        time.sleep(0.1)
    return tailrace.connect(task["uri"], maxPoolSize=None)


def opened(client: Any, count: int, **options: Any) -> list[Any]:
    return [client[DATABASE][f"c{number}"].watch(**options) for number in range(count)]


def follow(stream: Any, delays: list[float], ending: threading.Event) -> None:
    while not ending.is_set():
        event = stream.try_next()
        if event is not None:
            delays.append((time.monotonic() - event["fullDocument"]["at"]) * 1000)


def quiet_stream_kb(client: Any, count: int) -> float:
    """What a stream takes that was polled once: the resident memory of as many, less that of a few."""
    few = opened(client, 3, max_await_time_ms=1)
    for _ in range(3):
        for stream in few:
            stream.try_next()
    gc.collect()
    before = resident_kb()
    streams = opened(client, count, max_await_time_ms=1)
    for stream in streams:
        stream.try_next()
    gc.collect()
    each = (resident_kb() - before) / count
    for stream in [*few, *streams]:
        stream.close()
    return each


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


if __name__ == "__main__":
    raise SystemExit(main())
