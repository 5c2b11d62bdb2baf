"""CPU time an event of every kind of stream: our plain stages and our kernel, beside mongod's own change stream.

    python bench/transform.py [--entries 200000] [--rounds 3] [--only WORDS]

A mongod is started, filled and read by PyMongo's raw stream; its CPU time is taken from ``/proc``. In the first round
the events of all sides are compared byte for byte. All sides run in turn, ``--rounds`` times; the tables show medians.

* The first table: half inserts and half updates, of about 500 bytes. What reading, events and columns cost. A column
  is counted with the events that it is read from, and by itself: the documents of each event as ``bson``, VARIANT or
  JSON.
* The second: streams by kind of entry and option, each beside mongod's own of the same kind (``--only transaction``
  runs those whose name has the word). Kinds other than plain writes come from ``bench/transactions.py`` and
  ``bench/images.py``, with a third as many entries.

The bars: no stream costs more than 0.15 of mongod's CPU, and the documents as JSON no more than 3 us an event. Exit
status 1 where one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import bson
import numpy as np
from pymongo import MongoClient

from images import image_rows
from sides import BATCH_BYTES, COLLECTION, DATABASE, HEADER, SCOPE, Row, fill, measure, split
from tailrace.core.kernel import KernelSettings, Part, encode_json, encode_variants, gather, locate, transform_batch
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan, build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.merge import MergedStream
from tailrace.core.stream.stream import ONE_OPLOG, Stream, open_stream
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.source.drive import answers_of, drive
from tailrace.read.source.mongod import MongodSource
from transactions import transaction_rows

Stage: TypeAlias = Mapping[str, Any]
Encoder: TypeAlias = Callable[[np.ndarray, Part], object]

#: One insert in fifty passes: a small part of what a stream with a filter throws away.
MATCH = {"$match": {"fullDocument.ship.zip": {"$lt": 2000}}}
PROJECT = {"$project": {"operationType": 1, "documentKey": 1, "fullDocument.state": 1, "fullDocument.total": 1}}
EXPANDED = {"showExpandedEvents": True}
#: The columns that hold a document, and the forms that these may have.
DOCUMENTS = ("document_key", "full_document", "update_description")
JSON_MAX_US = 3.0


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


def gather_documents(buffer: np.ndarray, part: Part) -> None:
    """``documents = bson``: the bytes as they are."""
    gather(buffer, part.start, part.end)


FORMS: Mapping[str, Encoder] = {"bson": gather_documents, "variant": encode_variants, "json": encode_json}


def plan_at(start: ClusterTime, version: str, *stages: Stage, **options: Any) -> Plan:
    stage = {"startAtOperationTime": start.to_timestamp(), **options}
    parsed = StreamOptions.parse(SCOPE, stage, [bson.encode(one) for one in stages])
    return build_plan(parsed, profile_for(version))


def stream_at(start: ClusterTime, version: str, *stages: Stage, kernel: KernelUse) -> Stream:
    return open_stream(plan_at(start, version, *stages), kernel=kernel)


class Sides:
    """A method for each side. It returns the events' bytes if it makes any, so that they can be compared."""

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

    def columns(self, encode: Encoder) -> Iterator[bytes]:
        """The kernel's events and all columns of the Spark source, documents by ``encode``."""
        settings = KernelSettings(SCOPE)
        for batch in self.batches:
            made = transform_batch(batch.raw, settings).block()
            parts = locate(made.buffer, made.offsets, noted=made.places)
            for name in ("token", "operation_type", "database", "collection"):
                gather(made.buffer, parts[name].start, parts[name].end)
            for name in DOCUMENTS:
                encode(made.buffer, parts[name])
            yield b""

    def located(self) -> list[tuple[np.ndarray, dict[str, Part]]]:
        """Each batch's events, with their documents found."""
        settings = KernelSettings(SCOPE)
        blocks = [transform_batch(batch.raw, settings).block() for batch in self.batches]
        return [(block.buffer, locate(block.buffer, block.offsets, DOCUMENTS, block.places)) for block in blocks]


def documents_alone(located: list[tuple[np.ndarray, dict[str, Part]]], encode: Encoder) -> Iterator[bytes]:
    for buffer, parts in located:
        for name in DOCUMENTS:
            encode(buffer, parts[name])
        yield b""


class Line(NamedTuple):
    """A stream that is measured beside mongod's; of ``version`` (default: the server's), which it may not have."""

    name: str
    stages: tuple[Stage, ...] = ()
    options: Mapping[str, Any] = {}
    version: str | None = None
    is_part: bool = False


LINES = (
    Line("plain writes"),
    Line("$match, one event in 100", (MATCH,)),
    Line("$project, inclusion", (PROJECT,)),
    Line("$match and $project", (MATCH, PROJECT)),
    Line("a shard's part, merged", is_part=True),
    Line("showExpandedEvents, 6.0", options=EXPANDED),
    Line("showExpandedEvents, 8.0", options=EXPANDED, version="8.0"),
)


def measure_line(sides: Sides, line: Line, pid: int, rounds: int) -> Row:
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
    # An entry that gives no event costs too, so these figures are an entry's.
    return Row(line.name, {side: [s / sides.entries * 1e6 for s in times] for side, times in took.items()})


def load_s(cache: str) -> float:
    """CPU seconds until the kernel is ready in a fresh process, numba's own import included."""
    code = "import time; import tailrace.core.kernel; tailrace.core.kernel.warm_up(); print(time.process_time())"
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


def run(entries: int, rounds: int, only: str) -> bool:
    """Whether every bar was met."""
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
        met = only != "" or plain_table(sides, pid, rounds)
        print(f"\n{HEADER}")
        for line in LINES:
            if only in line.name:
                met &= show(measure_line(sides, line, pid, rounds))
    for row in (*transaction_rows(entries // 3, rounds, only), *image_rows(entries // 3, rounds, only)):
        met &= show(row)
    return met


def show(row: Row) -> bool:
    print(row, flush=True)
    return row.is_met


def plain_table(sides: Sides, pid: int, rounds: int) -> bool:
    """The first table. Whether JSON met its bar."""
    located = sides.located()
    alone = {form: functools.partial(documents_alone, located, encode) for form, encode in FORMS.items()}
    table = [
        ("mongod: native change stream (server CPU)", sides.native, pid),
        ("mongod: raw oplog read (server CPU)", sides.oplog, pid),
        ("bson.decode_all", sides.decode_all, None),
        ("plain stages", sides.plain, None),
        ("kernel: events", sides.kernel, None),
        ("kernel in a stream", sides.fast_path, None),
        *((f"documents as {form}, alone", side, None) for form, side in alone.items()),
        *(
            (f"kernel: events, columns, documents as {form}", functools.partial(sides.columns, encode), None)
            for form, encode in FORMS.items()
        ),
    ]
    times: dict[str, list[float]] = {name: [] for name, _, _ in table}
    for _ in range(rounds):
        for name, side, watched in table:
            times[name].append(measure(side, watched) / sides.entries * 1e6)
    native = statistics.median(times[table[0][0]])
    print(f"{'side':47}{'us/entry':>10}{'min':>9}{'max':>9}{'of mongod':>14}")
    for name, measured in times.items():
        middle = statistics.median(measured)
        print(f"{name:47}{middle:10.2f}{min(measured):9.2f}{max(measured):9.2f}{middle / native:14.3f}")
    met = statistics.median(times["documents as json, alone"]) <= JSON_MAX_US
    print(f"documents as JSON in at most {JSON_MAX_US:g} us: {'met' if met else 'MISSED'}", flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only streams whose name has these words, and no first table")
    arguments = parser.parse_args()
    try:
        return 0 if run(arguments.entries, arguments.rounds, arguments.only) else 1
    except TailraceError as error:
        print(f"bench/transform.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
