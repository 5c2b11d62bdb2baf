"""How much disk do tables take under a steady load, beside the rows that they hold?

Updates spread over all documents of two collections, at a fixed rate for a fixed time. Every few seconds it prints the
bytes and files of a table's directory, and those bytes as a multiple of the newest version's.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pymongo import MongoClient, UpdateOne

from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter

_NAMES = ("orders", "items")


def load(uri: str, documents: int, rate: int, seconds: float) -> None:
    """``rate`` updates a second in all, each of a document that is chosen at random."""
    chosen = random.Random(1)
    with MongoClient[Any](uri) as client:
        begun, done = time.monotonic(), 0
        while (passed := time.monotonic() - begun) < seconds:
            due = int(passed * rate) - done
            for name in _NAMES:
                numbers = [chosen.randrange(documents) for _ in range(due // len(_NAMES))]
                if numbers:
                    writes = [UpdateOne({"_id": one}, {"$set": {"n": chosen.random()}}) for one in numbers]
                    client.bench[name].bulk_write(writes, ordered=False)
            done += due
            time.sleep(0.05)


def taken(root: Path) -> tuple[int, int, int]:
    """Bytes of all files below ``root``, how many they are, and the bytes of the newest version's data files."""
    size = files = 0
    for where, _, names in os.walk(root):
        for name in names:
            try:
                size += (Path(where) / name).stat().st_size
            except FileNotFoundError:
                continue
            files += 1
    live = pa.table(DeltaTable(str(root)).get_add_actions()).column("size_bytes")
    return size, files, sum(live.to_pylist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rate", type=int, default=2_000, help="updates a second")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory,
        ReplicaSet(1, oplog_size_mb=2000) as members,
    ):
        with MongoClient[Any](members.uri) as client:
            for name in _NAMES:
                client.bench[name].insert_many(
                    {"_id": number, "n": 0.0, "text": f"{random.Random(number).getrandbits(800):x}"}
                    for number in range(args.documents)
                )
        root = Path(directory) / "t"
        with TablesWriter(members.uri, TableSettings(root, (TableRule("bench.*"),))) as writer:
            writer.run_to_present()
            follower = threading.Thread(target=writer.run)
            follower.start()
            loader = threading.Thread(target=load, args=(members.uri, args.documents, args.rate, args.seconds))
            begun = time.monotonic()
            loader.start()
            while loader.is_alive():
                loader.join(20)
                size, files, live = taken(root / "bench.orders")
                passed = time.monotonic() - begun
                print(
                    f"{passed:6.0f} s {size:14,} bytes {files:6,} files {size / live:8.1f} times the rows", flush=True
                )
            writer.stop()
            follower.join()


if __name__ == "__main__":
    main()
