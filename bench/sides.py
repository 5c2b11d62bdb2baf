"""What the benches of CPU time an event share: the writes, the clocks, and the bar.

The writes are half inserts and half updates, of about 500 bytes an oplog entry. mongod's CPU time is taken from
``/proc``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import bson
from pymongo import InsertOne, MongoClient, UpdateOne

from tailrace.core.oplog.namespace import Scope

DATABASE, COLLECTION = "shop", "orders"
SCOPE = Scope.of_collection(DATABASE, COLLECTION)
BATCH_BYTES = 4 << 20
#: What the kernel's events may cost, as a share of the CPU that mongod spends on the same stream.
SHARE_MAX = 0.15

SIDES = ("mongod", "plain", "kernel", "asked")
HEADER = f"{'stream, CPU us an event':44}" + "".join(f"{side:>9}" for side in SIDES) + f"{'of mongod':>11}"


class Row(NamedTuple):
    """One stream's line of a table: CPU microseconds an event of each side, one figure a round. ``asked`` is what our
    look-ups cost mongod; a side that is not measured has no figures."""

    name: str
    took: Mapping[str, list[float]]

    @property
    def share(self) -> float | None:
        """The kernel's CPU as a share of mongod's."""
        if not self.took.get("mongod"):
            return None
        return median(self.took["kernel"]) / median(self.took["mongod"])

    @property
    def is_met(self) -> bool:
        return self.share is None or self.share <= SHARE_MAX

    def __str__(self) -> str:
        cells = "".join(f"{median(self.took[side]):9.2f}" if self.took.get(side) else " " * 9 for side in SIDES)
        if self.share is None:
            return f"{self.name:44}{cells}"
        return f"{self.name:44}{cells}{self.share:11.3f}" + ("" if self.is_met else "  MISSED")


def fill(client: MongoClient, entries: int) -> None:
    """Half inserts, half updates, of about 500 bytes an oplog entry; 1,000 at a time. Odd: one insert more."""
    rng = random.Random(7)
    collection = client[DATABASE][COLLECTION]
    updates = entries // 2
    for first in range(0, entries - updates, 1000):
        numbers = range(first, min(first + 1000, entries - updates))
        documents = [document(rng, number) for number in numbers]
        collection.bulk_write([InsertOne(inserted) for inserted in documents], ordered=True)
        changes = [{"$set": {"state": "paid", "note": text(rng, 150), "ship.city": text(rng, 8)}} for _ in documents]
        pairs = list(zip(documents, changes, strict=True))[: updates - first]
        if pairs:
            collection.bulk_write([UpdateOne({"_id": old["_id"]}, change) for old, change in pairs], ordered=True)


def document(rng: random.Random, number: int) -> dict[str, object]:
    return {
        "_id": bson.ObjectId(),
        "customer": f"c{rng.randrange(10**6):06}",
        "state": "new",
        "total": round(rng.uniform(1, 500), 2),
        "placed": datetime.fromtimestamp(1_700_000_000 + number, UTC),
        "ship": {"city": text(rng, 8), "street": text(rng, 12), "zip": rng.randrange(10**5)},
        "items": [{"sku": f"s{rng.randrange(10**4)}", "count": rng.randrange(1, 9)} for _ in range(2)],
        "note": text(rng, 60),
    }


def text(rng: random.Random, size: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=size))


def mongod_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, in nanoseconds from ``schedstat``: finer than the ticks of ``stat``."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def clock(client: MongoClient, at_least: Any = None) -> Any:
    """The member's cluster time, as a session has it, moved on to ``at_least``."""
    with client.start_session() as session:
        if at_least is not None:
            session.advance_cluster_time(at_least)
        client.admin.command("ping", session=session)
        return session.cluster_time


def split(batch: bytes) -> Iterator[int]:
    position = 0
    while position < len(batch):
        yield position
        position += int.from_bytes(batch[position : position + 4], "little")


def measure(side: Callable[[], Iterator[bytes]], pid: int | None) -> float:
    """CPU seconds of ``side``: this process's, or those of process ``pid``."""
    begin = time.process_time() if pid is None else mongod_cpu_s(pid)
    for _ in side():
        pass
    return (time.process_time() if pid is None else mongod_cpu_s(pid)) - begin
