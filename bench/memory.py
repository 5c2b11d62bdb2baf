"""What memory does reading take, and does it stay flat?

    python bench/memory.py [--entries 2000000] [--large 2000] [--sides raw,dict,slow,worker]

A mongod is started and filled with ``--entries`` oplog entries (``bench/watch.py``'s: about 500 bytes, half inserts and
half updates) and with ``--large`` inserts of 1 MB each. Every reader is a process of its own that reads all of one or
the other and drops each event as it comes:

* ``raw`` and ``dict``: ``watch()`` with raw documents, and with dictionaries;
* ``slow``: raw, by a reader that pauses now and then;
* ``worker``: what a Spark worker runs for a slice, ``read_slice`` with all columns, without the JVM around it.

Printed are megabytes of resident size: before the first read, and the largest up to a tenth of the events (by then the
compiled code is loaded), from there to half of them, and in the second half. Flat is a second half that grew by a tenth
or by 20 MB at most; exit status 1 where one did not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymongo
from bson.timestamp import Timestamp

from watch import COLLECTION, DATABASE, RAW, fill, operation_time

LARGE = "large"
SIDES = ("raw", "dict", "slow", "worker")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=2_000_000)
    parser.add_argument("--large", type=int, default=2_000, help="documents of 1 MB")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return 0
    from tailrace.embedded import ReplicaSet  # noqa: PLC0415  the readers must not pay for it

    good = True
    with ReplicaSet(1, oplog_size_mb=16_000, cache_gb=1.0) as members, pymongo.MongoClient[Any](members.uri) as client:
        print(f"{args.entries:,} entries, {args.large:,} documents of 1 MB; MB resident")
        print(f"{'':24}{'before':>10}{'a tenth':>10}{'half':>10}{'end':>10}{'growth':>10}")
        tasks = [
            ("entries", COLLECTION, fill(client, args.entries), args.entries),
            (LARGE, LARGE, fill_large(client, args.large), args.large),
        ]
        for words, collection, start, count in tasks:
            for side in args.sides.split(","):
                task = {"uri": members.uri, "side": side, "collection": collection, "start": start, "count": count}
                good &= show(f"{side}, {words}", child(task))
    return 0 if good else 1


def fill_large(client: pymongo.MongoClient[Any], count: int) -> list[int]:
    client[DATABASE].create_collection(LARGE)
    start = operation_time(client)
    for number in range(count):
        client[DATABASE][LARGE].insert_one({"_id": number, "text": "x" * 1_000_000})
    return [start.time, start.inc + 1]


def child(task: Mapping[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(words: str, sizes: Mapping[str, float]) -> bool:
    growth = sizes["end"] - sizes["half"]
    flat = growth <= max(20.0, sizes["half"] / 10)
    figures = "".join(f"{sizes[name]:10,.0f}" for name in ("before", "tenth", "half", "end"))
    print(f"{words:24}{figures}{growth:10,.0f}  {'flat' if flat else 'NOT FLAT'}", flush=True)
    return flat


def measure(task: Mapping[str, Any]) -> dict[str, float]:
    events = worker(task) if task["side"] == "worker" else watched(task)
    count, largest, sizes = 0, 0.0, {"before": resident_mb()}
    marks = {task["count"] // 10: "tenth", task["count"] // 2: "half", task["count"]: "end"}
    step = max(1, task["count"] // 400)
    last = 0
    for more in events:
        count += more
        if count // step > last // step:
            if task["side"] == "slow" and count // step % 100 == 50:
                time.sleep(1.0)
            largest = max(largest, resident_mb())
        for mark in [mark for mark in marks if mark <= count]:
            sizes[marks.pop(mark)], largest = max(largest, resident_mb()), 0.0
        last = count
    assert count == task["count"], f"{count} events"
    return sizes


def watched(task: Mapping[str, Any]) -> Iterator[int]:
    """1 for each event."""
    import tailrace  # noqa: PLC0415

    options = {} if task["side"] == "dict" else {"codec_options": RAW}
    start = Timestamp(*task["start"])
    with (
        tailrace.connect(task["uri"]) as client,
        client[DATABASE][task["collection"]].watch(start_at_operation_time=start, **options) as stream,
    ):
        for _ in range(task["count"]):
            stream.next()
            yield 1


def worker(task: Mapping[str, Any]) -> Iterator[int]:
    """The rows of each record batch."""
    from tailrace.lake.spark.query.options import parse  # noqa: PLC0415
    from tailrace.lake.spark.source.batch_reader import TailraceBatchReader  # noqa: PLC0415

    seconds, increment = task["start"]
    options = {
        "uri": task["uri"],
        "database": DATABASE,
        "collection": task["collection"],
        "startAtOperationTime": f"{seconds},{increment}",
        "partitions": "1",
    }
    reader = TailraceBatchReader(parse(options))
    for part in reader.partitions():
        for batch in reader.read(part):
            rows = batch.num_rows
            del batch
            yield rows


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


if __name__ == "__main__":
    raise SystemExit(main())
