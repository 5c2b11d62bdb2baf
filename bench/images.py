"""CPU time an event of streams with images, beside mongod's own stream.

    python bench/images.py [--entries 60000] [--rounds 3]

Half of the entries are inserts and half updates, as in ``bench/transform.py``; images are looked up for the updates,
live, from the same mongod. The sides are mongod's change stream (its CPU time, from ``/proc``), the plain stages and
the kernel; "asked" is what our look-ups cost mongod. First the events of all three are compared byte for byte. The bar
is 0.15 of mongod's; exit status 1 where it is missed. ``bench/transform.py`` has these lines too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from pymongo import MongoClient

import tailrace.core.kernel.reply  # noqa: F401  replies are taken apart in compiled code, as in watch() and on Spark
from sides import BATCH_BYTES, COLLECTION, DATABASE, HEADER, SCOPE, Row, fill, measure, mongod_cpu_s, split
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.source.drive import answers_of, drive
from tailrace.read.source.mongod import MongodSource

Options = dict[str, Any]
BOTH: Options = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
#: Name and options.
LINES: tuple[tuple[str, Options], ...] = (
    ("images: updateLookup", {"fullDocument": "updateLookup"}),
    ("images: before", {"fullDocumentBeforeChange": "whenAvailable"}),
    ("images: after, by delta", {"fullDocument": "whenAvailable"}),
    ("images: before and after", BOTH),
)


class Sides:
    """The three sides of one stream; each gives the events' bytes."""

    def __init__(self, source: MongodSource, entries: int, stage: Options) -> None:
        self.source, self.entries, self.stage = source, entries, stage
        start = ClusterTime.from_timestamp(stage["startAtOperationTime"])
        self.batches = list(source.read(ClusterTime(start - 1), source.newest(), batch_bytes_max=BATCH_BYTES))

    def native(self, client: MongoClient) -> Iterator[bytes]:
        seen = 0
        with client[DATABASE][COLLECTION].aggregate_raw_batches([{"$changeStream": self.stage}]) as cursor:
            for batch in cursor:
                seen += sum(1 for _ in split(batch))
                yield batch
                if seen >= self.entries:
                    return

    def ours(self, kernel: KernelUse) -> Iterator[bytes]:
        plan = build_plan(StreamOptions.parse(SCOPE, self.stage), profile_for(self.source.server_version))
        stream = open_stream(plan, kernel=kernel)
        answers = answers_of(self.source)
        for batch in self.batches:
            stream.feed(ONE_OPLOG, batch)
            for made in drive(stream, answers):
                yield made.buffer[made.offsets[0] : made.offsets[-1]].tobytes()


def run_line(sides: Sides, client: MongoClient, name: str, pid: int, rounds: int) -> Row:
    kernel, plain = functools.partial(sides.ours, "always"), functools.partial(sides.ours, "never")
    server = functools.partial(sides.native, client)
    ours = b"".join(kernel())
    if not b"".join(plain()) == b"".join(server()) == ours:
        raise SystemExit(f"{name}: the events differ")
    took: dict[str, list[float]] = {"mongod": [], "plain": [], "kernel": [], "asked": []}
    for _ in range(rounds):
        took["mongod"].append(measure(server, pid))
        took["plain"].append(measure(plain, None))
        before = mongod_cpu_s(pid)
        took["kernel"].append(measure(kernel, None))
        took["asked"].append(mongod_cpu_s(pid) - before)
    return Row(name, {side: [s / sides.entries * 1e6 for s in times] for side, times in took.items()})


def image_rows(entries: int, rounds: int, only: str = "") -> Iterator[Row]:
    """The lines, as they are measured; ``only`` those whose name has these words."""
    lines = [(name, options) for name, options in LINES if only in name]
    if not lines:
        return
    with (
        ReplicaSet() as replica_set,
        MongoClient(replica_set.uri) as client,
        contextlib.closing(MongodSource(replica_set.uri)) as source,
    ):
        pid = replica_set.members[0].pid
        assert pid is not None
        client[DATABASE].create_collection(COLLECTION, changeStreamPreAndPostImages={"enabled": True})
        start = source.newest().tick()
        fill(client, entries)
        for name, options in lines:
            sides = Sides(source, entries, {"startAtOperationTime": start.to_timestamp(), **options})
            yield run_line(sides, client, name, pid, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(HEADER)
    met = True
    try:
        for row in image_rows(asked.entries, asked.rounds):
            print(row, flush=True)
            met &= row.is_met
    except TailraceError as error:
        print(f"bench/images.py: {error}", file=sys.stderr)
        return 1
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
