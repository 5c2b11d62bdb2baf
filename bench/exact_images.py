"""How many exact images a second? Updates of a collection's documents, from oplog entries to the document before each
and the state after it, in processes that share the documents; memory beside it.

    python bench/exact_images.py [--documents 1000000] [--updates 1000000] [--processes 2]

Documents have 500 bytes; an update sets two fields and adds to a nested one. Every process reads all entries from a
file and keeps the images of its share of the documents; the time ends when the last of them has its state on disk. Bar:
100,000 images a second on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
from bson import ObjectId
from bson.binary import Binary
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import SERVER_6_0
from tailrace.core.plan.request import OplogBatch
from tailrace.read.images.fold import ImageFolder
from tailrace.read.images.key import is_in_share, state_key
from tailrace.read.images.state import ImageState

UUID = bytes(range(16))
SCOPE = Scope.of_collection("shop", "orders")
BATCH = 20_000
#: As in a stream (``tailrace.read.images.source``).
MEMORY_BYTES = 64 << 20
_HEADER = struct.Struct("<qQ")


def identifier(number: int) -> ObjectId:
    return ObjectId(number.to_bytes(12, "big"))


def document(number: int) -> bytes:
    return bson.encode(
        {"_id": identifier(number), "n": number, "status": "new", "at": {"x": 1.5, "y": number}, "tags": [1, 2, 3]}
        | {"text": "x" * 360}
    )


def batches(documents: int, updates: int) -> Iterator[OplogBatch]:
    """Batches of the oplog, each of ``BATCH`` updates of random documents."""
    rng = random.Random(1)
    seconds = 1_700_000_000
    for first in range(0, updates, BATCH):
        seconds += 1
        entries = []
        for number in range(min(BATCH, updates - first)):
            change = {"u": {"n": number, "status": f"s{number % 7}"}, "sat": {"u": {"y": number}}}
            entry: dict[str, Any] = {
                "op": "u",
                "ns": "shop.orders",
                "ui": Binary(UUID, 4),
                "o": {"$v": 2, "diff": change},
            }
            entry |= {"o2": {"_id": identifier(rng.randrange(documents))}, "ts": Timestamp(seconds, number + 1)}
            entries.append(bson.encode(entry | {"t": 1, "v": 2}))
        yield OplogBatch(b"".join(entries), ClusterTime((seconds << 32) | BATCH))


def memory_kb() -> int:
    """Memory that is this process's own; pages of the state's files are the system's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0])


def write_batches(path: Path, documents: int, updates: int) -> None:
    with path.open("wb") as file:
        for batch in batches(documents, updates):
            file.write(_HEADER.pack(len(batch.raw), int(batch.high_water)) + batch.raw)


def read_batches(path: Path) -> Iterator[OplogBatch]:
    with path.open("rb") as file:
        while header := file.read(_HEADER.size):
            size, high_water = _HEADER.unpack(header)
            yield OplogBatch(file.read(size), ClusterTime(high_water))


def worker(root: Path, share: tuple[int, int], documents: int, buckets: int, connection: Any) -> None:
    """Seeds its state, folds the first batch, and says that it is ready; then folds the others when it is told to."""
    with ImageState.open(root / str(share[0]), buckets=buckets, memory_bytes=MEMORY_BYTES) as state:
        for first in range(0, documents, 50_000):
            wanted = range(first, min(documents, first + 50_000))
            keys = ((state_key(UUID, bson.encode({"_id": identifier(n)})), n) for n in wanted)
            with state.batch(first + 1) as batch:
                batch.put((key, document(n)) for key, n in keys if is_in_share(zlib.crc32(key), share))
        folder = ImageFolder(state, SCOPE, SERVER_6_0, kernel=lambda size: True, share=share)
        all_batches = read_batches(root / "batches")
        folder.fold(next(all_batches), no_entries)
        connection.send(len(state))
        connection.recv()
        images, memory, begun = 0, [], time.process_time()
        for batch in all_batches:
            images += len(folder.fold(batch, no_entries))
            memory.append(memory_kb())
        state.flush()
        connection.send((images, time.process_time() - begun, memory))


def no_entries(times: Any) -> list[None]:
    return [None] * len(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--buckets", type=int, default=4, help="of each process")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="exact-images-"))
    pipes, processes = [], []
    try:
        write_batches(root / "batches", arguments.documents, arguments.updates)
        for number in range(arguments.processes):
            mine, theirs = multiprocessing.Pipe()
            share = (number, arguments.processes)
            given = (root, share, arguments.documents, arguments.buckets, theirs)
            process = multiprocessing.Process(target=worker, args=given)
            process.daemon = True
            process.start()
            pipes.append(mine)
            processes.append(process)
        print(f"{sum(pipe.recv() for pipe in pipes)} documents of {len(document(5))} bytes in the state")
        run(pipes)
        for process in processes:
            process.join()
    finally:
        shutil.rmtree(root)
    return 0


def run(pipes: list[Any]) -> None:
    begun = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    answers = [pipe.recv() for pipe in pipes]
    wall = time.perf_counter() - begun
    images = sum(answer[0] for answer in answers)
    cpu = sum(answer[1] for answer in answers)
    print(
        f"{images} images in {wall:.1f} s with {len(pipes)} processes: {images / wall:,.0f} a second, "
        f"{1e6 * cpu / images:.1f} µs of CPU each"
    )
    memory = [sum(each) / 1024 for each in zip(*(answer[2] for answer in answers), strict=True)]
    half = len(memory) // 2
    print(
        f"memory of the processes: at most {max(memory[:half]):.0f} MB in the first half, "
        f"{max(memory[half:]):.0f} MB in the second, {memory[-1]:.0f} MB at the end"
    )


if __name__ == "__main__":
    sys.exit(main())
