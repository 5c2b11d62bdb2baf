"""What does a message cost in each format, beside the event as JSON?

    python bench/message_formats.py [--changes 5000] [--rounds 5]

Messages are made of the same updates, each with a document of some 600 bytes before and after it, by one process that
publishes nothing: microseconds of the processor for each change, and the ratio to ``ChangeMessages`` with its JSON.
Sides take turns; medians. The schema registry is the mock inside of Confluent's client.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import bson
from bson.int64 import Int64
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from tailrace.consumer.messages import ChangeMessages, DebeziumMessages, JsonConverter
from tailrace.consumer.messages.schema_registry import AvroConverter, ProtobufConverter

BASELINE = "event as JSON"


@dataclass
class RawEvent:
    raw: bytes


def update(number: int) -> RawEvent:
    """An update of an order."""
    when = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    lines = [{"article": f"A-{one}", "count": one, "price": 1.25 * one} for one in range(5)]
    before = {
        "_id": ObjectId(),
        "customer": {"name": "Ada Lovelace", "city": "London", "since": when},
        "lines": lines,
        "total": 18.75,
        "state": "open",
        "version": Int64(number),
        "note": "ring twice, leave it with the neighbours at number 12",
    }
    after = {**before, "state": "paid"}
    event = {
        "_id": {"_data": f"82{number:016X}2B"},
        "operationType": "update",
        "clusterTime": Timestamp(1_767_000_000, number + 1),
        "wallTime": when,
        "fullDocument": after,
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": before["_id"]},
        "updateDescription": {"updatedFields": {"state": "paid"}, "removedFields": [], "truncatedArrays": []},
        "fullDocumentBeforeChange": before,
    }
    return RawEvent(bson.encode(event))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    sides: dict[str, Callable[[Any], Any]] = {
        BASELINE: ChangeMessages("orders"),
        "event as JSON, CloudEvent": ChangeMessages("orders", cloud_events="structured"),
        "event as BSON": ChangeMessages("orders", body="bson"),
        "Debezium": DebeziumMessages("cdc"),
        "Debezium, with schemas": DebeziumMessages("cdc", converter=JsonConverter(schemas=True)),
        "Debezium, CloudEvent": DebeziumMessages("cdc", cloud_events="structured"),
        "Debezium, Avro": DebeziumMessages("cdc", converter=AvroConverter("mock://avro")),
        "Debezium, Protobuf": DebeziumMessages("cdc", converter=ProtobufConverter("mock://protobuf")),
    }
    events = [update(number) for number in range(args.changes)]
    costs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, make in sides.items():
            begin = time.process_time()
            for event in events:
                make(event)
            costs[name].append((time.process_time() - begin) / args.changes * 1e6)
    base = statistics.median(costs[BASELINE])
    print(f"{'format':28} {'µs a change':>12} {'ratio':>7}")
    for name, found in costs.items():
        middle = statistics.median(found)
        print(f"{name:28} {middle:12.1f} {middle / base:7.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
