"""How fast is a program from its first second, on a machine that has never run it?

    python bench/cold_start.py [--rounds 5] [--events 20000] [--python fresh/bin/python] [--services]

A mongod is started and filled with inserts of about 500 bytes. Each reading is a process of its own whose home cannot
be written and whose caches are empty, as in a container; ``--python`` names the environment that is tried, by default
this one. The two sides differ in one line, ``pymongo.MongoClient(uri)`` and ``tailrace.connect(uri)``, and take turns.
Milliseconds, medians: from the process's start to its end; from ``watch()`` to the first event; from there to the last
of ``--events``; and native over ours for each. Numbers of events and their checksums must be equal.

Beside dictionaries stands what ``bson.decode`` takes for these events alone, in the same process, and native over that:
no program that gives dictionaries can be faster, however it makes the events.

With ``--services`` the same raw documents come from a Spark worker (a slice of the oplog, read as Spark's workers do,
with the extra ``spark``) and through a gateway that has just been started. numba cannot be imported there, so nothing
is compiled. Their own loading comes first: in a worker it is the import, for a gateway the time until it answers.

Bars: all events 3 times as fast as native, the first event no later than 1.2 times native, ``import tailrace`` under
50 ms. Exit status 1 where bytes differ or a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

SIDES = ("native", "ours")
_CHILD = """
import json, sys, time
uri, side, first, events, pipeline, decoded = json.loads(sys.argv[1])
began = time.monotonic()
if side == "ours":
    import tailrace
    imported = time.monotonic() - began
    client = tailrace.connect(uri)
else:
    import pymongo
    imported = time.monotonic() - began
    client = pymongo.MongoClient(uri)
from bson import Timestamp, encode
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
import zlib
client.admin.command("ping")
options = {"start_at_operation_time": Timestamp(*first)}
places = client.get_database("bench", codec_options=CodecOptions() if decoded else CodecOptions(RawBSONDocument))
got = []
began = time.monotonic()
stream = places["entries"].watch(pipeline, **options)
got.append(stream.next())
one = time.monotonic() - began
while len(got) < events:
    got.append(stream.next())
all_ = time.monotonic() - began
checksum = 0
for number, event in enumerate(got):
    got[number] = encode(event) if decoded else event.raw
    checksum = zlib.crc32(got[number], checksum)
event = None
began = time.monotonic()
if decoded:
    from bson import decode
    kept = [decode(event) for event in got]
decoding = time.monotonic() - began
print(json.dumps({"import": imported * 1e3, "first": one * 1e3, "all": all_ * 1e3, "checksum": checksum,
    "decoding": decoding * 1e3}))
"""
_WORKER = """
import json, sys, time, zlib
sys.modules["numba"] = None
uri, first, events = json.loads(sys.argv[1])
began = time.monotonic()
from tailrace.core.kernel.native import library
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.reading.slice_reader import read_slice
from tailrace.lake.spark.source.batch_reader import TailraceBatchReader
imported = time.monotonic() - began
assert library() is not None
start = f"{first[0]},{first[1]}"
options = parse({"uri": uri, "database": "bench", "collection": "entries", "startAtOperationTime": start,
    "partitions": "1", "columns": "event"})
slices = TailraceBatchReader(options).partitions()
batches, one = [], 0.0
began = time.monotonic()
for part in slices:
    for batch in read_slice(options, part):
        one = one or time.monotonic() - began
        batches.append(batch)
all_ = time.monotonic() - began
checksum = 0
got = [event for batch in batches for event in batch.column("event").to_pylist()]
assert len(got) == events, len(got)
for event in got:
    checksum = zlib.crc32(event, checksum)
print(json.dumps({"import": imported * 1e3, "first": one * 1e3, "all": all_ * 1e3, "checksum": checksum,
    "decoding": 0.0}))
"""
CASES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "raw documents": ([], False),
    "dictionaries": ([], True),
    "$match and $project": (
        [
            {"$match": {"fullDocument.group": {"$lt": 100}}},
            {"$project": {"operationType": 1, "fullDocument.name": 1, "fullDocument.points": 1}},
        ],
        False,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--python", default=sys.executable, help="of the environment to try")
    parser.add_argument("--services", action="store_true", help="a Spark worker and a gateway too")
    args = parser.parse_args()
    import pymongo  # noqa: PLC0415

    from tailrace.embedded import ReplicaSet  # noqa: PLC0415

    met = True
    with ReplicaSet() as replica_set, pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        begun = client.admin.command("ping")["operationTime"]
        first = [begun.time, begun.inc + 1]
        documents = [
            {
                "_id": number,
                "group": number % 25,
                "name": f"name {number}",
                "points": [1, 2.5, number],
                "pad": "x" * 350,
            }
            for number in range(args.events)
        ]
        client["bench"]["entries"].insert_many(documents)
        print(f"{'':22}{'ms: process':>14}{'import':>9}{'first':>9}{'all':>9}   native / ours: first, all")
        for name, (pipeline, decoded) in CASES.items():
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for _ in range(args.rounds):
                for side in SIDES:
                    task = [replica_set.uri, side, first, args.events, pipeline, decoded]
                    runs[side].append(read(args.python, task))
            met &= tell(name, runs)
        if args.services:
            task = [replica_set.uri, "native", first, args.events, [], False]
            for service in (worker, gateway):
                runs = {"native": [], "ours": []}
                for _ in range(args.rounds):
                    runs["native"].append(read(args.python, task))
                    runs["ours"].append(service(args.python, task))
                tell(service.__name__, runs)
    return 0 if met else 1


def read(python: str, task: list[Any], program: str = _CHILD) -> dict[str, float]:
    """What a new process measures, on a machine without a cache of anything."""
    with tempfile.TemporaryDirectory() as home:
        begun = time.monotonic()
        done = subprocess.run(
            [python, "-c", program, json.dumps(task)],
            stdout=subprocess.PIPE,
            check=True,
            env=without_caches(home),
            cwd=home,
        )
        found: dict[str, float] = json.loads(done.stdout)
        return {**found, "process": (time.monotonic() - begun) * 1e3}


def without_caches(home: str) -> dict[str, str]:
    nothing = Path(home) / "none"
    return {"PATH": os.environ["PATH"], "HOME": str(nothing), "XDG_CACHE_HOME": str(nothing / "cache")}


def worker(python: str, task: list[Any]) -> dict[str, float]:
    """A new process that reads as a Spark worker does."""
    uri, _, first, events, *_ = task
    return read(python, [uri, first, events], _WORKER)


def gateway(python: str, task: list[Any]) -> dict[str, float]:
    """A new gateway, and a native stream through it."""
    import pymongo  # noqa: PLC0415

    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    start = "import sys; sys.modules['numba'] = None; from tailrace.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as home:
        begun = time.monotonic()
        words = ["gateway", "--upstream", task[0], "--listen", place]
        process = subprocess.Popen([python, "-c", start, *words], env=without_caches(home), stderr=subprocess.DEVNULL)
        try:
            uri = f"mongodb://{place}/?directConnection=true"
            with pymongo.MongoClient[dict[str, Any]](uri) as client:
                client.admin.command("ping")
            answers = time.monotonic() - begun
            return {**read(python, [uri, *task[1:]]), "import": answers * 1e3}
        finally:
            process.terminate()
            process.wait()


def tell(name: str, runs: dict[str, list[dict[str, float]]]) -> bool:
    """Print the lines of a case. Whether its bars were met."""
    median = {
        side: {what: statistics.median(run[what] for run in of_side) for what in of_side[0]}
        for side, of_side in runs.items()
    }
    native, ours = median["native"], median["ours"]
    same = len({run["checksum"] for of_side in runs.values() for run in of_side}) == 1
    for side, of in median.items():
        line = f"{f'{name}, {side}':28}{of['process']:8.0f}{of['import']:9.0f}{of['first']:9.0f}{of['all']:9.0f}"
        if side == "ours":
            line += f"{native['first'] / ours['first']:12.2f}, {native['all'] / ours['all']:.2f}"
            line += "" if same else "  THE EVENTS DIFFER"
        print(line, flush=True)
    if native["decoding"] > 1:
        bound = native["all"] / native["decoding"]
        print(f"{f'{name}, decoding alone':28}{native['decoding']:35.0f}{'':14}{bound:.2f}", flush=True)
    return same and native["all"] >= 3 * ours["all"] and ours["first"] <= 1.2 * native["first"] and ours["import"] < 50


if __name__ == "__main__":
    sys.exit(main())
