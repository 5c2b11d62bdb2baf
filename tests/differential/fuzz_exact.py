"""Exact images beside the server's own, event by event and byte for byte, over as many updates as asked for.

    python -m tests.differential.fuzz_exact --updates 1000000              random writes to one collection after another
    python -m tests.differential.fuzz_exact --updates 3000 --first 417     from this collection on: a difference again

Exit code 1 at the first difference. The last line says how many events and updates were compared. Servers from 6.0 on.
The server's own stream fails at some updates that it has carried out (mongod 6.0.27: error 8, "assertion ... value.h"):
what comes after them in that collection is not compared, and the collection is counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import PyMongoError

import tailrace
from tailrace.embedded import ReplicaSet
from tests.differential import documents as docs
from tests.differential.test_exact_images_live import NAME, write

#: How many rounds of updates a collection takes: updates become slower as their documents grow.
_ROUNDS = 60
_UPDATES = (b"\x02operationType\x00\x07\x00\x00\x00update\x00", b"\x02operationType\x00\x08\x00\x00\x00replace\x00")
#: The document key of the last document that is written.
_END = b"\x03documentKey\x00" + bson.encode({"_id": "end"})
_RAW: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument)
_SHOWN_EVERY = 10_000
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Compared:
    """What was compared. ``failed``: the number of collections in which the server's own stream failed; ``difference``:
    the first one, in words."""

    collections: int = 0
    events: int = 0
    updates: int = 0
    bytes: int = 0
    failed: int = 0
    difference: str = ""

    def __add__(self, other: Compared) -> Compared:
        if other.difference:
            return self
        return Compared(
            self.collections + other.collections,
            self.events + other.events,
            self.updates + other.updates,
            self.bytes + other.bytes,
            self.failed + other.failed,
        )

    def __str__(self) -> str:
        return (
            f"{self.events} events, {self.updates} updates, {self.bytes} bytes equal, {self.collections} collections, "
            f"in {self.failed} the server's stream failed"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=100_000, help="end when so many were compared")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first collection")
    parser.add_argument("--processes", type=int, default=3, help="how many write and compare at the same time")
    options = parser.parse_args()
    begun = time.monotonic()
    total, shown, difference = Compared(), 0, ""
    with ReplicaSet(1, oplog_size_mb=4000) as deployment:
        with MongoClient[Any](deployment.uri) as client:  # no write has to be on disk before the next one
            client.admin.command("setDefaultRWConcern", 1, defaultWriteConcern={"w": 1})
        for part in compared(deployment.uri, options):
            difference = difference or part.difference
            total += part
            if difference or total.updates >= options.updates:
                break
            if total.updates >= shown + _SHOWN_EVERY:
                shown = total.updates
                print(f"{total}, {time.monotonic() - begun:.0f} s", flush=True)
    print(difference, end="")
    print(f"seed {options.seed}: {total}, {time.monotonic() - begun:.0f} s")
    return 1 if difference else 0


def compared(uri: str, options: argparse.Namespace) -> Iterator[Compared]:
    """What was compared, collection by collection, in several processes. Never ends by itself."""
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[Compared] = context.Queue()
    numbers = [range(options.first + place, 1 << 31, options.processes) for place in range(options.processes)]
    workers = [context.Process(target=work, args=(uri, options.seed, own, found), daemon=True) for own in numbers]
    for worker in workers:
        worker.start()
    try:
        while True:
            try:
                yield found.get(timeout=_PATIENCE_S)
            except queue.Empty:
                if not all(worker.is_alive() for worker in workers):
                    raise RuntimeError("a process has died: see above") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def work(uri: str, seed: int, numbers: range, found: multiprocessing.Queue[Compared]) -> None:
    with tempfile.TemporaryDirectory() as folder, MongoClient[Any](uri, document_class=RawBSONDocument) as client:
        for number in numbers:
            made = client[NAME].create_collection(f"c{number}", changeStreamPreAndPostImages={"enabled": True})
            rng = docs.UniqueNames(seed * 1_000_000 + number)
            images = Path(folder, str(number))
            (expected, fails), mine = both(uri, made, rng, images)
            part = Compared(1, len(expected), sum(map(_is_update, expected)), sum(map(len, expected)), int(fails))
            if expected != mine[: len(expected)] or (not fails and len(mine) != len(expected)):
                part = replace(part, difference=told(number, expected, mine))
            found.put(part)
            made.drop()
            shutil.rmtree(images)


def both(uri: str, made: Any, rng: docs.UniqueNames, images: Path) -> tuple[tuple[list[bytes], bool], list[bytes]]:
    """What the server's own stream gives for a collection's writes, whether it fails, and what ours gives."""
    with tailrace.connect(uri, document_class=RawBSONDocument, images=images) as ours:
        exact = {"full_document": "exact", "full_document_before_change": "exact"}
        with ours[NAME][made.name].watch(**exact) as mine:
            token = mine.resume_token
            write(made, rng, _ROUNDS)
            made.insert_one({"_id": "end"})
            found: list[bytes] = []
            with suppress(PyMongoError):  # a replacement whose field "$v" is no int32 ends both streams
                while not found or _END not in found[-1]:
                    found.append(next(mine).raw)
    stage = {"fullDocument": "required", "fullDocumentBeforeChange": "required", "resumeAfter": token}
    expected, fails = own_events(made, stage)
    if fails:  # once more and one at a time: a reply that fails takes all of its events with it
        expected, fails = own_events(made, stage, batchSize=1)
    return (expected, fails), found


def own_events(made: Any, stage: dict[str, Any], **size: int) -> tuple[list[bytes], bool]:
    """The server's events up to the end of what was written, and whether its stream fails before."""
    found: list[bytes] = []
    try:
        pipeline = [{"$changeStream": stage}]
        reply = made.database.command("aggregate", made.name, pipeline=pipeline, cursor=size, codec_options=_RAW)
        batch = reply["cursor"]["firstBatch"]
        while True:
            for event in batch:
                found.append(event.raw)
                if _END in event.raw:
                    made.database.command("killCursors", made.name, cursors=[reply["cursor"]["id"]])
                    return found, False
            more = {"getMore": Int64(reply["cursor"]["id"]), "collection": made.name, **size}
            reply = made.database.command(more, codec_options=_RAW)
            batch = reply["cursor"]["nextBatch"]
    except PyMongoError:
        return found, True


def _is_update(event: bytes) -> bool:
    return any(kind in event for kind in _UPDATES)


def told(number: int, expected: list[bytes], found: list[bytes]) -> str:
    """The first difference, in words."""
    text = f"collection {number}: {len(expected)} events of the server, {len(found)} of ours\n"
    for place, (theirs, mine) in enumerate(zip(expected, found, strict=False)):
        if theirs != mine:
            return f"{text}event {place}\n  server {bson.decode(theirs)!r}\n  ours   {bson.decode(mine)!r}\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
