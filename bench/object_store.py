"""What does it cost to keep an archive in an object store, and not on a local disk?

The entries of ``bench/archive.py``, once to a directory and once to a store on the same machine, SeaweedFS' S3 gateway,
Azurite or fake-gcs-server: the store's own work is in the second figure, and a network is in neither. The latter two
keep everything in memory: their figures say little about Azure's and Google's rates. Requests are counted by a proxy in
a run of their own. For tables it is ``bench/tables.py --place``, for lakes ``bench/catch_up.py --place``.

    python -m bench.object_store [--store s3|azure|google]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.archive import read, timed, write
from bench.places import store_of
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.writer import SegmentLimits
from tests.tables.object_server import ObjectServer
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
    parser.add_argument(
        "--store",
        choices=("s3", "azure", "google"),
        default="s3",
        help="SeaweedFS, Azurite (needs npm) or fake-gcs-server",
    )
    parser.add_argument("--entries", type=int, default=200_000)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        ReplicaSet(1) as running,
        store_of(options.store, Path(name, "store")) as store,
        MongoClient[Any](running.uri) as client,
    ):
        archives(client, store, Path(name), options.entries)


if __name__ == "__main__":
    main()
