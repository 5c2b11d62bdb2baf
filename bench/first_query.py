"""What do the fork server and the archive of Java's classes bring to a session's start and its first query?

Each round starts a program for each side: a session of ``local_session(fast_start=True)``, and 200 events into a new
lake. "none" is a session without either, "both" is ``preload=True``. CPU seconds are those of the program and of all
that it has started (JVM, Python processes), to their end. The archive is written before the first round, if there is
none.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from pymongo import MongoClient

from tailrace.embedded import ReplicaSet

SIDES = ("both", "none", "fork server", "archive")


def first_query(side: str, uri: str) -> None:
    """The program of a side: prints the seconds of the session's start and of its first query."""
    begun = time.monotonic()
    from tailrace.lake import write_stream  # noqa: PLC0415  loading it is part of the start
    from tailrace.lake.spark.runtime import session  # noqa: PLC0415

    if side in ("none", "archive"):
        session.start_fork_server = lambda: False
    if side in ("none", "fork server"):
        session.class_data_options = lambda *_: ""
    spark = session.local_session("first query", cores=2, fast_start=True)
    spark.sparkContext.setLogLevel("ERROR")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        source = {"uri": uri, "database": "first", "startingFrom": "oldest"}
        write_stream(spark, source, Path(directory) / "lake", available_now=True).awaitTermination()
        done = time.monotonic()
        spark.stop()
    print(f"seconds {started - begun:.2f} {done - started:.2f}", flush=True)


def with_all_it_starts(side: str, uri: str) -> None:
    """Run the program of a side and wait for everything that it leaves, as the JVM; prints their CPU seconds too."""
    adopts_orphans = 36
    ctypes.CDLL(None).prctl(adopts_orphans, 1, 0, 0, 0)
    subprocess.run([sys.executable, __file__, "--side", side, "--uri", uri], check=True)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"CPU {used.ru_utime + used.ru_stime:.2f}", flush=True)


def measured(side: str, uri: str) -> tuple[float, ...]:
    """Seconds of the start and of the first query, and CPU seconds of all."""
    asked = [sys.executable, __file__, "--whole", "--side", side, "--uri", uri]
    said = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return tuple(float(word) for line in said if line.startswith(("seconds ", "CPU ")) for word in line.split()[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--uri", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        (with_all_it_starts if args.whole else first_query)(args.side, args.uri)
        return
    took: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
    with ReplicaSet() as members:
        with MongoClient[dict[str, object]](members.uri) as client:
            client.first.events.insert_many([{"_id": number, "text": "x" * 50} for number in range(200)])
        measured("both", members.uri)
        for number in range(args.rounds):
            place = number % len(SIDES)
            for side in SIDES[place:] + SIDES[:place]:
                took[side].append(measured(side, members.uri))
                print(f"round {number + 1}, {side}: {took[side][-1]}, load {os.getloadavg()[0]:.0f}", flush=True)
    print(f"{'medians, seconds':20}{'start':>8}{'query':>8}{'CPU':>8}")
    for side, figures in took.items():
        print(f"{side:20}" + "".join(f"{median(column):8.2f}" for column in zip(*figures, strict=True)))


if __name__ == "__main__":
    main()
