"""CPU time an event of streams with images and of showExpandedEvents, beside mongod's own stream.

    python bench/images.py [--entries 60000] [--rounds 3]

Half of the entries are inserts and half updates, as in ``bench/transform.py``; images are looked up for the updates,
live, from the same mongod. The sides are mongod's change stream (its CPU time, from ``/proc``), the plain stages and
the kernel; "asked" is what our look-ups cost mongod. First the events of all three are compared byte for byte, but for
the profile of 8.0, which no server here has.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.pipeline.kernel import KernelUse
from tailrace.pipeline.stream import ONE_OPLOG, open_stream
from tailrace.plan.options import StreamOptions
from tailrace.plan.plan import build_plan
from tailrace.plan.profile import profile_for
from tailrace.source.drive import answers_of, drive
from tailrace.source.mongod import MongodSource
from transform import BATCH_BYTES, COLLECTION, DATABASE, SCOPE, fill, measure, mongod_cpu_s, split

Options = dict[str, Any]
BOTH: Options = {"fullDocument": "whenAvailable", "fullDocumentBeforeChange": "whenAvailable"}
#: Name, options, the profile of our events, and whether the server can make the same.
LINES: tuple[tuple[str, Options, str, bool], ...] = (
    ("no images", {}, "6.0", True),
    ("updateLookup", {"fullDocument": "updateLookup"}, "6.0", True),
    ("pre-images", {"fullDocumentBeforeChange": "whenAvailable"}, "6.0", True),
    ("post-images by delta", {"fullDocument": "whenAvailable"}, "6.0", True),
    ("pre- and post-images", BOTH, "6.0", True),
    ("showExpandedEvents, 6.0", {"showExpandedEvents": True}, "6.0", True),
    ("showExpandedEvents, 8.0", {"showExpandedEvents": True}, "8.0", False),
)


class Sides:
    """The three sides of one stream; each gives the events' bytes."""

    def __init__(self, source: MongodSource, entries: int, stage: Options, version: str) -> None:
        self.source, self.entries, self.stage, self.version = source, entries, stage, version
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
        plan = build_plan(StreamOptions.parse(SCOPE, self.stage), profile_for(self.version))
        stream = open_stream(plan, kernel=kernel)
        answers = answers_of(self.source)
        for batch in self.batches:
            stream.feed(ONE_OPLOG, batch)
            for made in drive(stream, answers):
                yield made.buffer[made.offsets[0] : made.offsets[-1]].tobytes()


def run_line(sides: Sides, client: MongoClient, name: str, pid: int, *, rounds: int, native: bool) -> str:
    kernel, plain = functools.partial(sides.ours, "always"), functools.partial(sides.ours, "never")
    server = functools.partial(sides.native, client)
    ours = b"".join(kernel())
    for other in (plain, server) if native else (plain,):
        if b"".join(other()) != ours:
            raise SystemExit(f"{name}: the events differ")
    took: dict[str, list[float]] = {"mongod": [], "plain": [], "kernel": [], "asked": []}
    for _ in range(rounds):
        if native:
            took["mongod"].append(measure(server, pid))
        took["plain"].append(measure(plain, None))
        before = mongod_cpu_s(pid)
        took["kernel"].append(measure(kernel, None))
        took["asked"].append(mongod_cpu_s(pid) - before)
    middle = {side: statistics.median(times) / sides.entries * 1e6 for side, times in took.items() if times}
    columns = "".join(f"{middle[side]:10.2f}" if side in middle else f"{'':10}" for side in took)
    return f"{name:28}{columns}" + (f"{middle['kernel'] / middle['mongod']:12.3f}" if native else "")


def run(entries: int, rounds: int) -> None:
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
        print(f"{'CPU us an event':28}{'mongod':>10}{'plain':>10}{'kernel':>10}{'asked':>10}{'of mongod':>12}")
        for name, options, version, native in LINES:
            sides = Sides(source, entries, {"startAtOperationTime": start.to_timestamp(), **options}, version)
            print(run_line(sides, client, name, pid, rounds=rounds, native=native), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    try:
        run(asked.entries, asked.rounds)
    except TailraceError as error:
        print(f"bench/images.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
