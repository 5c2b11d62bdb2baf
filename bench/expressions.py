"""What the user's stages cost an event: common pipelines over blocks of events, event by event, and in mongod.

    python bench/expressions.py [--events 50000] [--rounds 3]

The events are inserts of about 500 bytes, taken from the server's own stream. "blocks" is the CPU time of the pipeline
on them in blocks of 5,000, as a stream runs it; "plain" that of the plain stages, event by event. mongod's is the CPU
time of its threads for the native stream with the pipeline less that without it; ``$_internalInhibitOptimization``
stands before both, so that a ``$match`` is evaluated and not moved into the oplog read. A stage that makes the events
smaller saves mongod some sending, so its difference can come near zero. The bytes of all sides are compared first.
Medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
import numpy as np
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.expression import compile_stages
from tailrace.core.kernel.project_program import PASSES
from tailrace.core.kernel.user_stages import BlockStages, StagedEvents, compile_user_stages
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError

LINE_TOTALS = {
    "$map": {
        "input": {"$filter": {"input": "$fullDocument.items", "cond": {"$gt": ["$$this.count", 1]}}},
        "in": {"$multiply": ["$$this.count", "$$this.price"]},
    }
}
PIPELINES: dict[str, list[dict[str, Any]]] = {
    "match one field": [{"$match": {"operationType": "insert"}}],
    "match three paths": [
        {
            "$match": {
                "fullDocument.customer.id": {"$gte": 10},
                "fullDocument.state": {"$in": ["new", "paid", "sent"]},
                "fullDocument.items.sku": {"$exists": True},
            }
        }
    ],
    "match by $expr": [{"$match": {"$expr": {"$gt": [{"$add": ["$fullDocument.total", "$fullDocument.tax"]}, 1]}}}],
    "match by $regex": [{"$match": {"fullDocument.note": {"$regex": "[a-m]", "$options": "i"}}}],
    "project, inclusion": [
        {"$project": {"operationType": 1, "documentKey": 1, "fullDocument.customer": 1, "fullDocument.total": 1}}
    ],
    "project, exclusion": [{"$project": {"fullDocument.items": 0, "fullDocument.customer.city": 0}}],
    "project, through an array": [{"$project": {"fullDocument.items.sku": 1, "documentKey": 1}}],
    "project, computed by paths": [{"$project": {"total": "$fullDocument.total", "skus": "$fullDocument.items.sku"}}],
    "unset": [{"$unset": ["wallTime", "ns", "fullDocument.note"]}],
    "set, literals and paths": [{"$set": {"source": "shop", "total": "$fullDocument.total"}}],
    "set, inside fullDocument": [{"$set": {"fullDocument.note": "***", "fullDocument.customer.seen": True}}],
    "replace by a document of paths": [
        {"$replaceWith": {"_id": "$_id", "op": "$operationType", "doc": "$fullDocument"}}
    ],
    "match, then project": [
        {"$match": {"fullDocument.total": {"$gte": 0}}},
        {"$project": {"operationType": 1, "fullDocument.total": 1}},
    ],
    "set, $cond and $ifNull": [
        {
            "$set": {
                "size": {"$cond": [{"$gt": ["$fullDocument.total", 250]}, "large", "small"]},
                "city": {"$ifNull": ["$fullDocument.customer.city", "?"]},
            }
        }
    ],
    "set, $size and $sum of an array": [
        {"$set": {"lines": {"$size": "$fullDocument.items"}, "count": {"$sum": "$fullDocument.items.count"}}}
    ],
    "set, $dateTrunc": [{"$set": {"day": {"$dateTrunc": {"date": "$fullDocument.placed", "unit": "day"}}}}],
    "set, $switch": [
        {
            "$set": {
                "rank": {
                    "$switch": {
                        "branches": [
                            {"case": {"$eq": ["$fullDocument.state", "new"]}, "then": 1},
                            {"case": {"$eq": ["$fullDocument.state", "paid"]}, "then": 2},
                        ],
                        "default": 3,
                    }
                }
            }
        }
    ],
    "set, arithmetic and text": [
        {
            "$set": {
                "sum": {"$round": [{"$add": ["$fullDocument.total", "$fullDocument.tax"]}, 2]},
                "key": {"$concat": [{"$toUpper": "$fullDocument.state"}, "-", "$fullDocument.customer.city"]},
            }
        }
    ],
    "set, a date in a time zone": [
        {"$set": {"day": {"$dateToString": {"date": "$wallTime", "format": "%Y-%m-%d", "timezone": "Europe/Berlin"}}}}
    ],
    "set, $map over $filter": [{"$set": {"lines": LINE_TOTALS}}],
    "replace by the document": [
        {"$replaceWith": {"$mergeObjects": ["$fullDocument", {"_id": "$_id", "op": "$operationType"}]}}
    ],
    "redact": [{"$redact": {"$cond": [{"$eq": ["$hidden", True]}, "$$PRUNE", "$$DESCEND"]}}],
}
#: Events in a block.
BLOCK = 5_000
INHIBIT: dict[str, Any] = {"$_internalInhibitOptimization": {}}


def document(rng: random.Random, number: int) -> dict[str, Any]:
    words = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=20))
    return {
        "_id": number,
        "customer": {"id": rng.randrange(10, 10**6), "city": "Oslo"},
        "state": rng.choice(("new", "paid", "sent")),
        "total": round(rng.uniform(1, 500), 2),
        "tax": 1.5,
        "placed": datetime.fromtimestamp(1_700_000_000 + number, UTC),
        "items": [{"sku": f"s{n}", "count": rng.randrange(1, 9), "price": 2.5} for n in range(2)],
        "note": words,
    }


def mongod_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process: their nanoseconds on a processor, finer than the ticks of its ``stat``."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def native(client: MongoClient[Any], start: Any, stages: list[dict[str, Any]], count: int) -> Iterator[bytes]:
    """Raw batches of the server's stream until it has given ``count`` events."""
    seen = 0
    pipeline = [{"$changeStream": {"startAtOperationTime": start}}, INHIBIT, *stages]
    with client.bench_expressions.c.aggregate_raw_batches(pipeline) as cursor:
        for batch in cursor:
            seen += sum(1 for _ in raw_bson.split(batch))
            yield batch
            if seen >= count:
                return


def native_s(client: MongoClient[Any], pid: int, start: Any, stages: list[dict[str, Any]], count: int) -> float:
    """CPU seconds of mongod for the whole stream."""
    begin = mongod_cpu_s(pid)
    for _ in native(client, start, stages, count):
        pass
    return mongod_cpu_s(pid) - begin


class Block:
    """Events as a stream's blocks hold them."""

    def __init__(self, events: list[bytes]) -> None:
        self.buffer = np.frombuffer(b"".join(events), np.uint8)
        self.offsets = np.cumsum([0] + [len(event) for event in events])
        tokens = [raw_bson.find(event, b"_id") for event in events]
        places = [(token.value_start, token.end) for token in tokens if token is not None]
        self.token_start, self.token_end = np.array(places, np.int64).T + self.offsets[:-1]

    def through(self, stages: BlockStages) -> StagedEvents:
        return stages.run(self.buffer, self.offsets, self.token_start, self.token_end)


def blocks_of(events: list[bytes]) -> list[Block]:
    return [Block(events[low : low + BLOCK]) for low in range(0, len(events), BLOCK)]


def compiled(stages: list[dict[str, Any]]) -> BlockStages:
    made = compile_user_stages(compile_stages([bson.encode(stage) for stage in stages]))
    assert made is not None
    return made


def blocks_s(stages: list[dict[str, Any]], blocks: list[Block]) -> float:
    made = compiled(stages)
    begin = time.process_time()
    for block in blocks:
        block.through(made)
    return time.process_time() - begin


def ours_s(stages: list[dict[str, Any]], events: list[bytes]) -> float:
    apply = compile_stages([bson.encode(stage) for stage in stages]).apply
    begin = time.process_time()
    for event in events:
        apply(event)
    return time.process_time() - begin


def decoded_s(events: list[bytes]) -> float:
    begin = time.process_time()
    for event in events:
        bson.decode(event)
    return time.process_time() - begin


def compare(client: MongoClient[Any], start: Any, events: list[bytes]) -> None:
    """The bytes of both sides, for a part of the events."""
    part = events[:2000]
    for name, stages in PIPELINES.items():
        apply = compile_stages([bson.encode(stage) for stage in stages]).apply
        mine = [made for event in part if (made := apply(event)) is not None]
        staged = Block(part).through(compiled(stages))
        spans = zip(staged.offsets[:-1].tolist(), staged.offsets[1:].tolist(), staged.verdict.tolist(), strict=True)
        whole = staged.buffer.tobytes()
        if [whole[start:end] for start, end, verdict in spans if verdict == PASSES] != mine:
            raise SystemExit(f"{name}: the events of blocks differ from those of the plain stages")
        theirs = [each for batch in native(client, start, stages, len(part)) for each in raw_bson.split(batch)]
        if theirs[: len(mine)] != mine or len(mine) < len(part):
            raise SystemExit(f"{name}: the events differ from mongod's, or not every one passes")


def run(count: int, rounds: int) -> None:
    with ReplicaSet(1) as replica_set, MongoClient[Any](replica_set.uri) as client:
        pid = replica_set.members[0].pid
        assert pid is not None
        rng = random.Random(1)
        collection = client.bench_expressions.c
        client.bench_expressions.create_collection("c")
        start = client.admin.command("ping")["operationTime"]
        for low in range(0, count, 5000):
            collection.insert_many([document(rng, number) for number in range(low, min(low + 5000, count))])
        start = bson.Timestamp(start.time, start.inc + 1)
        events = [each for batch in native(client, start, [], count) for each in raw_bson.split(batch)]
        print(f"{len(events):,} events of {sum(map(len, events)) / len(events):.0f} bytes", flush=True)
        compare(client, start, events)
        decoded: list[float] = []
        blocks = blocks_of(events)
        mine: dict[str, list[float]] = {name: [] for name in PIPELINES}
        in_blocks: dict[str, list[float]] = {name: [] for name in PIPELINES}
        theirs: dict[str, list[float]] = {name: [] for name in PIPELINES}
        for _ in range(rounds):
            decoded.append(decoded_s(events))
            for name, stages in PIPELINES.items():
                mine[name].append(ours_s(stages, events))
                in_blocks[name].append(blocks_s(stages, blocks))
                without = native_s(client, pid, start, [], count)
                theirs[name].append(native_s(client, pid, start, stages, count) - without)
            print(".", end="", flush=True)
    yardstick = statistics.median(decoded) / count * 1e6
    print(f"\nbson.decode of the whole event: {yardstick:.1f} us\n")
    print(f"{'us an event':32}{'blocks':>8}{'plain':>8}{'mongod':>9}{'blocks/mongod':>15}")
    for name in PIPELINES:
        block = statistics.median(in_blocks[name]) / count * 1e6
        ours = statistics.median(mine[name]) / count * 1e6
        server = statistics.median(theirs[name]) / count * 1e6
        ratio = f"{block / server:.2f}" if server > 0 else "-"
        print(f"{name:32}{block:8.2f}{ours:8.2f}{server:9.2f}{ratio:>15}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        run(arguments.events, arguments.rounds)
    except TailraceError as error:
        print(f"bench/expressions.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
