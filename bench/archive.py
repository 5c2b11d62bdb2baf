"""How fast is an archive written, and how fast do events come out of it?

    python bench/archive.py [--entries 400000]

One mongod, one oplog with entries of about 600 bytes. In one run: the oplog read to its end and thrown away, the same
into an archive, and then the events of a whole-cluster stream from the archive beside the same from mongod.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pymongo import MongoClient

import tailrace.core.kernel.reply  # noqa: F401  compiled before anything is timed
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.embedded import ReplicaSet
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.base import OplogSource
from tailrace.read.source.drive import answers_of, drive
from tailrace.read.source.mongod import MongodSource


def timed(work: Callable[[], int]) -> tuple[int, float, float]:
    """What it gives, seconds of the clock and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    given = work()
    return given, time.perf_counter() - wall, time.process_time() - cpu


def write(client: MongoClient[Any], count: int) -> None:
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)]
    for first in range(0, count, 1000):
        texts = [" ".join(rng.choices(words, k=60)) for _ in range(1000)]
        client.bench.c.insert_many([{"n": first + n, "text": text} for n, text in enumerate(texts)])


def read(source: OplogSource, after: ClusterTime, until: ClusterTime) -> int:
    return sum(len(batch.raw) for batch in source.read(after, until))


def events(source: OplogSource, after: ClusterTime, until: ClusterTime, version: str) -> int:
    options = StreamOptions.parse(Scope.cluster(), {"startAtOperationTime": after.tick().to_timestamp()}, [])
    stream = open_stream(build_plan(options, profile_for(version)), kernel="always")
    count = 0
    for batch in source.read(after, until):
        stream.feed(ONE_OPLOG, batch)
        for block in drive(stream, answers_of(source)):
            count += len(block)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entries", type=int, default=400_000)
    entries: int = parser.parse_args().entries
    with (
        tempfile.TemporaryDirectory() as folder,
        ReplicaSet(1, oplog_size_mb=4000) as deployment,
        MongoClient[Any](deployment.uri) as client,
    ):
        source = MongodSource(client)
        after = source.newest()
        write(client, entries)
        until = source.newest()
        events(source, after, ClusterTime(after + 1), source.server_version)  # compiled, if it was not
        size, wall, _ = timed(lambda: read(source, after, until))
        print(f"{entries:,} entries of {size / entries:.0f} bytes")
        print(f"oplog read and thrown away        {entries / wall:>10,.0f} entries/s")
        recorder = Recorder(client, None, Path(folder, "archive"), ArchivePolicy(once=True, limits=SegmentLimits()))
        _, wall, cpu = timed(lambda: recorder.run() or 0)
        written = recorder.statistics()[source.name]
        files = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        rate = written.entries / wall
        print(f"into the archive                  {rate:>10,.0f} entries/s  bar 200,000   {cpu / wall:.2f} cores")
        print(f"its files                         {files / written.bytes:>10.2f} of the entries' bytes")
        archived = ArchiveSource(Path(folder, "archive"))
        sides = {}
        for name, side in (("mongod", source), ("archive", archived), ("mongod", source), ("archive", archived)):
            count, wall, _ = timed(partial(events, side, after, until, source.server_version))
            sides[name] = max(sides.get(name, 0.0), count / wall)
        print(f"events out of mongod              {sides['mongod']:>10,.0f} events/s")
        print(f"events out of the archive         {sides['archive']:>10,.0f} events/s  ratio", end=" ")
        print(f"{sides['archive'] / sides['mongod']:.2f}  bar 1")


if __name__ == "__main__":
    main()
