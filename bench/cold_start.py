"""How fast is a program from its first second, on a machine that has never run it?

    python bench/cold_start.py [--rounds 5] [--events 20000] [--python fresh/bin/python]

A mongod is started and filled with inserts of about 500 bytes. Each reading is a process of its own whose home cannot
be written and whose caches are empty, as in a container; ``--python`` names the environment that is tried, by default
this one. The two sides differ in one line, ``pymongo.MongoClient(uri)`` and ``tailrace.connect(uri)``, and take turns.
Milliseconds, medians: from the process's start to its end; from ``watch()`` to the first event; from there to the last
of ``--events``; and native over ours for each. Numbers of events and their checksums must be equal.

Beside dictionaries stands what ``bson.decode`` takes for these events alone, in the same process, and native over that:
whoever gives dictionaries cannot be faster, however the events come to be.

Bars: all events 3 times as fast as native, the first event no later than 1.2 times native, ``import tailrace`` under
50 ms. Exit status 1 where bytes differ or a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
    return 0 if met else 1


def read(python: str, task: list[Any]) -> dict[str, float]:
    """What a new process measures, on a machine without a cache of anything."""
    with tempfile.TemporaryDirectory() as home:
        nothing = Path(home) / "none"
        environment = {"PATH": os.environ["PATH"], "HOME": str(nothing), "XDG_CACHE_HOME": str(nothing / "cache")}
        begun = time.monotonic()
        done = subprocess.run(
            [python, "-c", _CHILD, json.dumps(task)], stdout=subprocess.PIPE, check=True, env=environment, cwd=home
        )
        found: dict[str, float] = json.loads(done.stdout)
        return {**found, "process": (time.monotonic() - begun) * 1e3}


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
