"""What does Delta's change feed of a table cost, in time and on the disk?

The changes of ``bench/tables.py``, into a table with a feed and into one without, in turns.

    python -m bench.change_feed [--documents 50000] [--changes 200000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.tables import changes, fill, ours
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.lake.store.delta import FEED_FOLDER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--changes", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates: dict[float, list[float]] = {0.0: [], 24.0: []}
    with tempfile.TemporaryDirectory() as name, ReplicaSet(1) as running, MongoClient[Any](running.uri) as client:
        for number in range(options.rounds):
            for feed_h, found in rates.items():
                client.drop_database("bench")
                fill(client.bench.orders, options.documents)
                root = Path(name, f"{number}-{feed_h}")
                seconds, _ = ours(
                    running.uri,
                    root,
                    lambda: changes(client.bench.orders, options.changes, options.documents, 2),
                    feed_h=feed_h,
                )
                found.append(options.changes / seconds)
                sizes = {path: path.stat().st_size for path in root.glob("bench.orders/**/*.parquet")}
                fed = sum(size for path, size in sizes.items() if path.parent.name == FEED_FOLDER)
                print(
                    f"{'with' if feed_h else 'without'} a feed: {found[-1]:,.0f} changes/s; bytes of data files "
                    f"{sum(sizes.values()) - fed:,}, of the feed {fed:,} (load {os.getloadavg()[0]:.0f})",
                    flush=True,
                )
    without, with_feed = (statistics.median(found) for found in rates.values())
    print(f"with a feed: {with_feed / without:.2f} of the rate without")


if __name__ == "__main__":
    main()
