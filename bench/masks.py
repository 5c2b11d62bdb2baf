"""What do masks cost an event of a lake, beside the same events without masks?

    python bench/masks.py [--events 20000] [--rounds 5]

Updates with a document of some 600 bytes before and after them, on a real mongod, are read by one process as a lake's
tasks read them, columns and all, but written nowhere: microseconds of the processor for each event. Sides take turns;
medians. "elsewhere" are masks whose rules are of another collection.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any, Final

from pymongo import MongoClient, UpdateOne

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.spark.query.options import ReadOptions, parse
from tailrace.lake.spark.reading.columns import ROWS_MAX_WRITTEN
from tailrace.lake.spark.reading.slice_reader import read_slice
from tailrace.lake.spark.source.batch_reader import TailraceBatchReader

BASELINE: Final = "no masks"
_DATABASE: Final = "maskbench"
_RULES: Final[dict[str, dict[str, dict[str, str]]]] = {
    "elsewhere": {f"{_DATABASE}.others": {"customer.name": "hash"}},
    "one field dropped": {f"{_DATABASE}.orders": {"note": "drop"}},
    "one field hashed": {f"{_DATABASE}.orders": {"customer.name": "hash"}},
    "one field tokenised": {f"{_DATABASE}.orders": {"customer.name": "tokenise"}},
    "each price of five hashed": {f"{_DATABASE}.orders": {"lines.price": "hash"}},
    "everything hashed": {f"{_DATABASE}.orders": {"*": "hash"}},
}


def order(number: int) -> dict[str, Any]:
    """A document of some 600 bytes."""
    return {
        "_id": number,
        "customer": {"name": "Ada Lovelace", "city": "London"},
        "lines": [{"article": f"A-{one}", "count": one, "price": 1.25 * one} for one in range(5)],
        "total": 18.75,
        "state": "open",
        "note": "ring twice, leave it with the neighbours at number 12",
    }


def write(uri: str, count: int) -> tuple[ClusterTime, ClusterTime]:
    """Updates, and the times before and after them."""
    with MongoClient[dict[str, Any]](uri) as client:
        database = client[_DATABASE]
        database.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
        database["orders"].insert_many([order(number) for number in range(100)])
        first = client.admin.command("ping")["operationTime"]
        for begin in range(0, count, 1000):
            updates = [UpdateOne({"_id": one % 100}, {"$set": {"total": one}}) for one in range(begin, begin + 1000)]
            database["orders"].bulk_write(updates)
        last = client.admin.command("ping")["operationTime"]
    return ClusterTime.of(first.time, first.inc), ClusterTime.of(last.time, last.inc)


def measure(options: ReadOptions, slices: list[Any]) -> float:
    """Microseconds of the processor for an event."""
    begun, rows = time.process_time(), 0
    for one in slices:
        rows += sum(batch.num_rows for batch in read_slice(options, one, rows_max=ROWS_MAX_WRITTEN))
    return (time.process_time() - begun) / rows * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with ReplicaSet(1) as replica_set:
        first, last = write(replica_set.uri, args.events)
        span = {
            "uri": replica_set.uri,
            "database": _DATABASE,
            "documents": "json",
            "fullDocumentBeforeChange": "whenAvailable",
            "fullDocument": "whenAvailable",
            "startAtOperationTime": f"{first.seconds},{first.increment + 1}",
            "endAtOperationTime": f"{last.seconds},{last.increment}",
        }
        os.environ["TAILRACE_MASK_KEY"] = "a key for this measurement alone"
        key = {"environment": "TAILRACE_MASK_KEY"}
        sides = {BASELINE: parse(span)}
        sides |= {
            name: parse({**span, "masks": json.dumps({"key": key, "rules": rules})}) for name, rules in _RULES.items()
        }
        slices = {name: list(TailraceBatchReader(options).partitions()) for name, options in sides.items()}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name, options in sides.items():
                micros = measure(options, slices[name])
                if turn:  # the first round warms up
                    taken[name].append(micros)
    base = statistics.median(taken[BASELINE])
    for name, found in taken.items():
        micros = statistics.median(found)
        print(f"{name:<28} {micros:8.1f} µs an event  +{micros - base:6.1f}  ratio {micros / base:5.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
