"""How many exact images a second? Updates of a collection's documents, from oplog entries to the document before each
and the state after it, in processes that share the documents; memory beside it.

    python bench/exact_images.py [--documents 1000000] [--updates 1000000] [--processes 2]

Documents have 500 bytes; an update sets two fields and adds to a nested one. Bar: 100,000 images a second on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
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

from tailrace.images.fold import ImageFolder
from tailrace.images.key import state_key
from tailrace.images.state import ImageState
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.profile import SERVER_6_0
from tailrace.plan.request import OplogBatch

UUID = bytes(range(16))
SCOPE = Scope.of_collection("shop", "orders")
BATCH = 20_000


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


def worker(directory: str, share: tuple[int, int], documents: int, connection: Any) -> None:
    with ImageState.open(directory, buckets=1) as state:
        for first in range(0, documents, 50_000):
            wanted = range(first, min(documents, first + 50_000))
            keys = ((state_key(UUID, bson.encode({"_id": identifier(n)})), n) for n in wanted)
            with state.batch(first + 1) as batch:
                batch.put((key, document(n)) for key, n in keys if zlib.crc32(key) % share[1] == share[0])
        folder = ImageFolder(state, SCOPE, SERVER_6_0, kernel=lambda size: True, share=share)
        connection.send(len(state))
        while (batch := connection.recv()) is not None:
            begun = time.process_time()
            images = folder.fold(OplogBatch(batch[0], ClusterTime(batch[1])), lambda times: [None] * len(times))
            connection.send((len(images), time.process_time() - begun, memory_kb()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    root = tempfile.mkdtemp(prefix="exact-images-")
    pipes, processes = [], []
    for number in range(arguments.processes):
        mine, theirs = multiprocessing.Pipe()
        share = (number, arguments.processes)
        process = multiprocessing.Process(
            target=worker, args=(f"{root}/{number}", share, arguments.documents, theirs), daemon=True
        )
        process.start()
        pipes.append(mine)
        processes.append(process)
    try:
        print(f"{sum(pipe.recv() for pipe in pipes)} documents of {len(document(5))} bytes in the state")
        run(arguments, pipes)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    finally:
        shutil.rmtree(root)
    return 0


def run(arguments: argparse.Namespace, pipes: list[Any]) -> None:
    images, wall, cpu = 0, 0.0, 0.0
    memories: list[int] = []
    for batch in batches(arguments.documents, arguments.updates):
        begun = time.perf_counter()
        for pipe in pipes:
            pipe.send((batch.raw, int(batch.high_water)))
        answers = [pipe.recv() for pipe in pipes]
        wall += time.perf_counter() - begun if memories else 0
        images += sum(answer[0] for answer in answers) if memories else 0
        cpu += sum(answer[1] for answer in answers) if memories else 0
        memories.append(sum(answer[2] for answer in answers))
    print(
        f"{images} images in {wall:.1f} s with {len(pipes)} processes: {images / wall:,.0f} a second, "
        f"{1e6 * cpu / images:.1f} µs of CPU each"
    )
    middle = memories[len(memories) // 2]
    print(f"memory of the processes: {middle / 1024:.0f} MB in the middle, {memories[-1] / 1024:.0f} MB at the end")


if __name__ == "__main__":
    sys.exit(main())
