"""How long does an event wait for shards that sleep?

Three shards, of which two are not written to, no-op interval at the server's default of 10 s. One write at a time, at
majority, at random distances; measured from its acknowledgement to the event, each side in turns over writes of its
own, in one run:

* ``ours``: ``tailrace.connect(cluster).watch()``, which asks the idle shards for promises;
* ``native``: the three shards' own change streams (PyMongo), merged by their post-batch resume tokens: an event leaves
  when every other shard's token is past it. A mongos does the same, and asks the config server too.

Then writes without a pause for some seconds, for the number of no-ops that are forced. The exit status is 1 where the
latency misses its bar or the no-ops exceed their bound. ``--reads-only`` measures the second way of asking, a read with
``afterClusterTime``.

    python bench/idle_shard.py [--writes 300] [--native-writes 200] [--reads-only]
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pymongo

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.read.source import sharded
from tailrace.read.source.promise import PromiseRequester
from tailrace.read.source.sharded import PROMISE_INTERVAL_S
from tailrace.watch.client.sharded_stream import ShardedChangeStream

DATABASE, COLLECTION = "bench", "orders"
NAMESPACE = f"{DATABASE}.{COLLECTION}"
BAR_P50_MS, BAR_P99_MS = 40.0, 150.0
BURST_S = 5.0
PATIENCE_S = 120.0
Next = Callable[[], int | None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=300)
    parser.add_argument("--native-writes", type=int, default=200)
    parser.add_argument("--reads-only", action="store_true", help="ask by reads with afterClusterTime")
    args = parser.parse_args()
    if args.reads_only:
        sharded.PromiseRequester = partial(PromiseRequester, reads_only=True)  # type: ignore[assignment,misc]
    with ShardedCluster(3) as cluster:
        cluster.router.create_database(DATABASE, "shard0")
        cluster.router.insert_one(NAMESPACE, {"_id": -1})
        ours, noops, seconds = measure_ours(cluster, args.writes)
        burst_noops, burst_seconds, burst_writes = measure_burst(cluster, args.writes)
        with native_merge(cluster) as next_event:
            native = latencies(cluster, next_event, 1_000_000, args.native_writes)
    print(f"{'ms from acknowledgement to event':<34}{'p50':>10}{'p99':>10}{'max':>10}{'writes':>9}")
    for name, found in (("ours", ours), ("native merge", native)):
        print(f"{name:<34}{at(found, 50):>10.1f}{at(found, 99):>10.1f}{found[-1]:>10.1f}{len(found):>9}")
    p50, p99 = at(native, 50) / at(ours, 50), at(native, 99) / at(ours, 99)
    print(f"{'ratio (native / ours)':<34}{p50:>10.0f}{p99:>10.0f}")
    bound = 3 / PROMISE_INTERVAL_S  # of each of two idle shards and the config server
    print(f"forced no-ops a second: {noops / seconds:.1f} over {len(ours) / seconds:.1f} writes a second")
    burst_noops_s, burst_writes_s = burst_noops / burst_seconds, burst_writes / burst_seconds
    print(f"  without a pause: {burst_noops_s:.1f} over {burst_writes_s:.0f} writes a second; bound: {bound:.0f}")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    good = at(ours, 50) < BAR_P50_MS and at(ours, 99) < BAR_P99_MS and burst_noops_s <= bound
    print(f"bar: p50 < {BAR_P50_MS:.0f} ms, p99 < {BAR_P99_MS:.0f} ms: {'reached' if good else 'MISSED'}")
    return 0 if good else 1


def measure_ours(cluster: ShardedCluster, writes: int) -> tuple[list[float], int, float]:
    """Sorted latencies in ms, the no-ops that were forced, and the seconds that it took."""
    with tailrace.connect(cluster.uri) as client, client[DATABASE][COLLECTION].watch() as stream:
        assert isinstance(stream, ShardedChangeStream)

        def next_event() -> int | None:
            event = stream.try_next()
            return None if event is None else int(event["documentKey"]["_id"])

        begun = time.monotonic()
        found = latencies(cluster, next_event, 0, writes)
        return found, stream.statistics.forced_noops, time.monotonic() - begun


def latencies(cluster: ShardedCluster, next_event: Next, first: int, writes: int) -> list[float]:
    acknowledged: dict[int, float] = {}
    delivered: dict[int, float] = {}

    def write() -> None:
        for number in range(first, first + writes):
            time.sleep(random.uniform(0.02, 0.18))
            cluster.router.insert_one(NAMESPACE, {"_id": number, "text": "x" * 200})
            acknowledged[number] = time.monotonic()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    deadline = time.monotonic() + PATIENCE_S + writes * 0.5
    while len(delivered) < writes:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {len(delivered)} of {writes} events came")
        number = next_event()
        if number is not None and number >= first:
            delivered[number] = time.monotonic()
    writer.join()
    # An event may come before its write's acknowledgement has been read.
    return sorted(max(0.0, delivered[number] - acknowledged[number]) * 1000 for number in delivered)


def measure_burst(cluster: ShardedCluster, first: int) -> tuple[int, float, int]:
    """Forced no-ops, seconds and writes of a time without a pause between writes."""
    with tailrace.connect(cluster.uri) as client, client[DATABASE][COLLECTION].watch() as stream:
        assert isinstance(stream, ShardedChangeStream)
        begun, number, seen = time.monotonic(), 0, 0
        ended = threading.Event()

        def write() -> None:
            nonlocal number
            while not ended.is_set():
                number += 1
                cluster.router.insert_one(NAMESPACE, {"_id": first + number})

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        while time.monotonic() - begun < BURST_S:
            seen += stream.try_next() is not None
        seconds, noops = time.monotonic() - begun, stream.statistics.forced_noops
        ended.set()
        writer.join()
        deadline = time.monotonic() + PATIENCE_S
        while seen < number and time.monotonic() < deadline:
            seen += stream.try_next() is not None
        if seen != number:
            raise SystemExit(f"{number} writes, {seen} events")
        return noops, seconds, number


@contextmanager
def native_merge(cluster: ShardedCluster) -> Iterator[Next]:
    """Each shard's own change stream on a thread, merged by post-batch resume tokens."""
    changed = threading.Condition()
    waiting: list[tuple[str, int]] = []
    reached: dict[str, str] = {}
    ended = threading.Event()

    def read(name: str, uri: str) -> None:
        with (
            pymongo.MongoClient[dict[str, Any]](uri) as client,
            client[DATABASE][COLLECTION].watch(max_await_time_ms=1000) as stream,
        ):
            while not ended.is_set():
                event = stream.try_next()
                with changed:
                    if event is not None:
                        waiting.append((event["_id"]["_data"], int(event["documentKey"]["_id"])))
                        waiting.sort()
                    reached[name] = (stream.resume_token or {})["_data"]
                    changed.notify_all()

    threads = [
        threading.Thread(target=read, args=(name, shard.uri), daemon=True) for name, shard in cluster.shards.items()
    ]
    for thread in threads:
        thread.start()
    while len(reached) < len(threads):
        time.sleep(0.05)

    def next_event() -> int | None:
        with changed:
            if not waiting or waiting[0][0] > min(reached.values()):
                changed.wait(1.0)
            if waiting and waiting[0][0] <= min(reached.values()):
                return waiting.pop(0)[1]
            return None

    try:
        yield next_event
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def at(found: list[float], percent: int) -> float:
    return found[min(len(found) - 1, len(found) * percent // 100)]


if __name__ == "__main__":
    raise SystemExit(main())
