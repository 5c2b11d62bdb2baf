"""Exact images beside the server's own, event by event and byte for byte, over as many updates as asked for.

    python -m tests.differential.fuzz_exact --updates 1000000              random writes to one collection after another
    python -m tests.differential.fuzz_exact --updates 3000 --first 417     from this collection on: a difference again

Exit code 1 at the first difference. The last line says how many events and updates were compared. Servers from 6.0 on.
The server's own stream fails at some updates that it has carried out (mongod 6.0.27: error 8, "assertion ... value.h"):
what comes behind them in that collection is not compared, and the collection is counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import PyMongoError

import tailrace
from tailrace.embedded import ReplicaSet
from tests.differential import documents as docs
from tests.differential.test_exact_images_live import NAME, write

#: Updates become slower as their documents grow, so each collection takes so many rounds of them.
_ROUNDS = 60
_UPDATES = ("update", "replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=100_000, help="end when so many were compared")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first collection")
    options = parser.parse_args()
    begun = time.monotonic()
    number, events, updates, size, failed = options.first, 0, 0, 0, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        ReplicaSet(1, oplog_size_mb=2000) as deployment,
        MongoClient[Any](deployment.uri, document_class=RawBSONDocument) as client,
    ):
        while updates < options.updates:
            made = client[NAME].create_collection(f"c{number}", changeStreamPreAndPostImages={"enabled": True})
            rng = docs.UniqueNames(options.seed * 1_000_000 + number)
            (expected, fails), found = both(deployment.uri, made, rng, Path(folder, str(number)))
            if expected != found[: len(expected)] or (not fails and len(found) != len(expected)):
                return told(number, expected, found)
            made.drop()
            number, events, failed = number + 1, events + len(expected), failed + fails
            updates += sum(RawBSONDocument(event)["operationType"] in _UPDATES for event in expected)
            size += sum(map(len, expected))
            if number % 5 == 0:
                print(f"{updates} updates, {number - options.first} collections", flush=True)
    print(f"seed {options.seed}: {events} events, {updates} updates, {size} bytes equal, ", end="")
    print(f"{number - options.first} collections, in {failed} the server's stream failed, ", end="")
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


def both(uri: str, made: Any, rng: docs.UniqueNames, images: Path) -> tuple[tuple[list[bytes], bool], list[bytes]]:
    """What the server's own stream gives of a collection's writes, with whether it fails, and what ours gives."""
    with tailrace.connect(uri, document_class=RawBSONDocument, images=images) as ours:
        exact = {"full_document": "exact", "full_document_before_change": "exact"}
        with ours[NAME][made.name].watch(**exact) as mine:
            token = mine.resume_token
            write(made, rng, _ROUNDS)
            made.insert_one({"_id": "end"})
            found, _ = read(mine)
    required = {"full_document": "required", "full_document_before_change": "required", "resume_after": token}
    with made.watch(**required) as own:
        expected, fails = read(own)
    if fails:  # once more and one at a time: a reply that fails takes all of its events with it
        with made.watch(**required, batch_size=1) as own:
            expected, fails = read(own)
    return (expected, fails), found


def read(stream: Any) -> tuple[list[bytes], bool]:
    """The events up to the end of what was written, and whether the stream fails before."""
    found: list[bytes] = []
    try:
        for event in stream:
            found.append(bytes(event.raw))
            if event["operationType"] == "insert" and event["documentKey"]["_id"] == "end":
                return found, False
    except PyMongoError:
        pass
    return found, True


def told(number: int, expected: list[bytes], found: list[bytes]) -> int:
    print(f"collection {number}: {len(expected)} events of the server, {len(found)} of ours")
    for place, (theirs, mine) in enumerate(zip(expected, found, strict=False)):
        if theirs != mine:
            print(f"event {place}\n  server {bson.decode(theirs)!r}\n  ours   {bson.decode(mine)!r}")
            break
    return 1


if __name__ == "__main__":
    sys.exit(main())
