"""CPU time an oplog entry: our plain stages and our kernel, beside mongod's own change stream and ``bson.decode_all``.

    python bench/transform.py [--entries 200000] [--rounds 3]

Half of the entries are inserts and half updates, of about 500 bytes. A mongod is started, filled and read by PyMongo's
raw stream; its CPU time is taken from ``/proc``. In the first round the events of all sides are compared byte for byte.
All sides run in turn, ``--rounds`` times; the table shows medians, and how many times cheaper than mongod each side is.

Below it stand streams with options and stages, each beside mongod's own of the same kind: a share of 0.15 of its CPU
is the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import bson
import numpy as np
from pymongo import InsertOne, MongoClient, UpdateOne

from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.kernel import KernelSettings, Part, encode_json, encode_variants, gather, locate, transform_batch
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.pipeline.kernel import KernelUse
from tailrace.pipeline.merge import MergedStream
from tailrace.pipeline.stream import ONE_OPLOG, Stream, open_stream
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import Plan, build_plan
from tailrace.plan.profile import profile_for
from tailrace.source.drive import answers_of, drive
from tailrace.source.mongod import MongodSource

Stage: TypeAlias = Mapping[str, Any]

DATABASE, COLLECTION = "shop", "orders"
SCOPE = Scope.of_collection(DATABASE, COLLECTION)
BATCH_BYTES = 4 << 20
#: One insert in fifty passes: a small part of what a stream with a filter throws away.
MATCH = {"$match": {"fullDocument.ship.zip": {"$lt": 2000}}}
PROJECT = {"$project": {"operationType": 1, "documentKey": 1, "fullDocument.state": 1, "fullDocument.total": 1}}
EXPANDED = {"showExpandedEvents": True}


def fill(client: MongoClient, entries: int) -> None:
    """Half inserts, half updates, of about 500 bytes an oplog entry; 1,000 at a time."""
    rng = random.Random(7)
    collection = client[DATABASE][COLLECTION]
    for first in range(0, entries // 2, 1000):
        numbers = range(first, min(first + 1000, entries // 2))
        documents = [document(rng, number) for number in numbers]
        collection.bulk_write([InsertOne(inserted) for inserted in documents], ordered=True)
        changes = [{"$set": {"state": "paid", "note": text(rng, 150), "ship.city": text(rng, 8)}} for _ in documents]
        pairs = zip(documents, changes, strict=True)
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


def native_stream(
    client: MongoClient, start: ClusterTime, entries: int, *stages: Stage, **options: Any
) -> Iterator[bytes]:
    """The raw batches of the server's own change stream until it has given ``entries`` events."""
    stage = {"$changeStream": {"startAtOperationTime": start.to_timestamp(), **options}}
    seen = 0
    with client[DATABASE][COLLECTION].aggregate_raw_batches([stage, *stages]) as cursor:
        for batch in cursor:
            seen += sum(1 for _ in split(batch))
            yield batch
            if seen >= entries:
                return
    raise SystemExit(f"the server's stream ended after {seen} events")


def split(batch: bytes) -> Iterator[int]:
    position = 0
    while position < len(batch):
        yield position
        position += int.from_bytes(batch[position : position + 4], "little")


def plan_at(start: ClusterTime, version: str, *stages: Stage, **options: Any) -> Plan:
    stage = {"startAtOperationTime": start.to_timestamp(), **options}
    parsed = StreamOptions.parse(SCOPE, stage, [bson.encode(one) for one in stages])
    return build_plan(parsed, profile_for(version))


def stream_at(start: ClusterTime, version: str, *stages: Stage, kernel: KernelUse) -> Stream:
    return open_stream(plan_at(start, version, *stages), kernel=kernel)


class Sides:
    """One side a method. Each gives the events' bytes where it makes any, so that they can be compared."""

    def __init__(self, client: MongoClient, source: MongodSource, entries: int, start: ClusterTime) -> None:
        self.client, self.source, self.entries, self.start = client, source, entries, start
        self.version = source.server_version
        self.batches = list(source.read(ClusterTime(start - 1), source.newest(), batch_bytes_max=BATCH_BYTES))

    def native(self) -> Iterator[bytes]:
        yield from native_stream(self.client, self.start, self.entries)

    def oplog(self) -> Iterator[bytes]:
        """Reading only: what our source costs mongod."""
        for _ in self.source.read(ClusterTime(self.start - 1), self.source.newest(), batch_bytes_max=BATCH_BYTES):
            yield b""

    def decode_all(self) -> Iterator[bytes]:
        for batch in self.batches:
            bson.decode_all(batch.raw)
            yield b""

    def plain(self) -> Iterator[bytes]:
        return self.driven(stream_at(self.start, self.version, kernel="never"))

    def kernel(self) -> Iterator[bytes]:
        settings = KernelSettings(SCOPE)
        for batch in self.batches:
            yield transform_batch(batch.raw, settings).events.tobytes()

    def fast_path(self) -> Iterator[bytes]:
        return self.driven(stream_at(self.start, self.version, kernel="always"))

    def driven(self, stream: Stream) -> Iterator[bytes]:
        answers = answers_of(self.source)
        for batch in self.batches:
            stream.feed(ONE_OPLOG, batch)
            for made in drive(stream, answers):
                yield made.buffer[made.offsets[0] : made.offsets[-1]].tobytes()

    def streamed(self, line: Line, kernel: KernelUse) -> Iterator[bytes]:
        plan = plan_at(self.start, line.version or self.version, *line.stages, **line.options)
        if line.is_part:
            return self.driven(MergedStream(plan, [ONE_OPLOG], kernel=kernel))
        return self.driven(open_stream(plan, kernel=kernel))

    def columns(self, encode: Callable[[Any, Part], object]) -> Iterator[bytes]:
        """The kernel's events and all columns of the Spark source, documents by ``encode``."""
        settings = KernelSettings(SCOPE)
        for batch in self.batches:
            made = transform_batch(batch.raw, settings).block()
            parts = locate(made.buffer, made.offsets)
            for name in ("token", "operation_type", "database", "collection"):
                gather(made.buffer, parts[name].start, parts[name].end)
            for name in ("document_key", "full_document", "update_description"):
                encode(made.buffer, parts[name])
            yield made.buffer.tobytes()


class Line(NamedTuple):
    """A stream that is measured beside mongod's; of ``version`` (default: the server's), which it may not have."""

    name: str
    stages: tuple[Stage, ...] = ()
    options: Mapping[str, Any] = {}
    version: str | None = None
    is_part: bool = False


LINES = (
    Line("$match, one event in 100", (MATCH,)),
    Line("$project, inclusion", (PROJECT,)),
    Line("$match and $project", (MATCH, PROJECT)),
    Line("a shard's part, merged", is_part=True),
    Line("showExpandedEvents, 6.0", options=EXPANDED),
    Line("showExpandedEvents, 8.0", options=EXPANDED, version="8.0"),
)


def measure_line(sides: Sides, line: Line, pid: int, rounds: int) -> str:
    ours = joined(sides.streamed(line, "always"))
    events = sum(1 for _ in split(ours.tobytes()))
    native = functools.partial(native_stream, sides.client, sides.start, events, *line.stages, **line.options)
    if not np.array_equal(joined(sides.streamed(line, "never")), ours):
        raise SystemExit(f"{line.name}: the events of kernel and plain stages differ")
    has_native = line.version is None
    if has_native and not np.array_equal(joined(native()), ours):
        raise SystemExit(f"{line.name}: the events differ from mongod's")
    took: dict[str, list[float]] = {"mongod": [], "plain": [], "kernel": []}
    for _ in range(rounds):
        if has_native:
            took["mongod"].append(measure(native, pid))
        took["plain"].append(measure(functools.partial(sides.streamed, line, "never"), None))
        took["kernel"].append(measure(functools.partial(sides.streamed, line, "always"), None))
    middle = {side: statistics.median(times) / sides.entries * 1e6 for side, times in took.items() if times}
    cells = "".join(f"{middle[side]:10.2f}" if side in middle else f"{'':10}" for side in took)
    return f"{line.name:37}{cells}" + (f"{middle['kernel'] / middle['mongod']:12.3f}" if has_native else "")


def measure(side: Callable[[], Iterator[bytes]], pid: int | None) -> float:
    """CPU seconds of ``side``: this process's, or those of process ``pid``."""
    begin = time.process_time() if pid is None else mongod_cpu_s(pid)
    for _ in side():
        pass
    return (time.process_time() if pid is None else mongod_cpu_s(pid)) - begin


def load_s(cache: str) -> float:
    """CPU seconds until the kernel is ready in a fresh process, numba's own import included."""
    code = "import time; import tailrace.kernel; tailrace.kernel.warm_up(); print(time.process_time())"
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def joined(chunks: Iterator[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(chunks), np.uint8)


def compare(sides: Sides) -> None:
    native = joined(sides.native())
    for name in ("plain", "kernel", "fast_path"):
        ours = joined(getattr(sides, name)())
        if not np.array_equal(native, ours):
            raise SystemExit(f"{name}: the events differ from mongod's")
    print(f"{sides.entries:,} events, {native.size:,} bytes: mongod, plain stages and kernel give the same bytes\n")


def run(entries: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = load_s(cache), load_s(cache)
    print(f"loading the kernel: {cold:.1f} s of CPU compiled for the first time, {warm:.1f} s from numba's cache")
    with (
        ReplicaSet() as replica_set,
        MongoClient(replica_set.uri) as client,
        contextlib.closing(MongodSource(replica_set.uri)) as source,
    ):
        pid = replica_set.members[0].pid
        assert pid is not None
        client[DATABASE].create_collection(COLLECTION)
        start = source.newest().tick()
        fill(client, entries)
        sides = Sides(client, source, entries, start)
        compare(sides)
        table = [
            ("mongod: native change stream (server CPU)", sides.native, pid),
            ("mongod: raw oplog read (server CPU)", sides.oplog, pid),
            ("bson.decode_all", sides.decode_all, None),
            ("plain stages", sides.plain, None),
            ("kernel: events", sides.kernel, None),
            ("kernel in a stream", sides.fast_path, None),
            ("kernel: events, columns and VARIANTs", functools.partial(sides.columns, encode_variants), None),
            ("kernel: events, columns and JSON", functools.partial(sides.columns, encode_json), None),
        ]
        times: dict[str, list[float]] = {name: [] for name, _, _ in table}
        for _ in range(rounds):
            for name, side, watched in table:
                times[name].append(measure(side, watched) / entries * 1e6)
        lines = [measure_line(sides, line, pid, rounds) for line in LINES]
    native = statistics.median(times[table[0][0]])
    print(f"{'side':47}{'us/entry':>10}{'min':>9}{'max':>9}{'mongod is':>14}")
    for name, measured in times.items():
        middle = statistics.median(measured)
        ratio = f"{native / middle:10.2f} x"
        print(f"{name:47}{middle:10.2f}{min(measured):9.2f}{max(measured):9.2f}{ratio:>14}")
    print(f"\n{'stream, us/entry':37}{'mongod':>10}{'plain':>10}{'kernel':>10}{'of mongod':>12}")
    print("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        run(arguments.entries, arguments.rounds)
    except TailraceError as error:
        print(f"bench/transform.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
