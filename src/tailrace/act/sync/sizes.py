"""How much a source holds, how much room a target has, and how far an oplog reaches."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.act.sync.state import SyncedCollection
from tailrace.read.source.mongod import MongodSource

#: Seconds for which a size is believed.
_FRESH_S: Final = 60.0


class DocumentSizes:
    """About how large the documents of each collection of a target are; 0 where it does not tell."""

    def __init__(self, target: MongoClient[Any]) -> None:
        self._target = target
        self._known: dict[str, tuple[float, int]] = {}

    def __call__(self, collection: SyncedCollection) -> int:
        now = time.monotonic()
        asked, size = self._known.get(collection.target, (-_FRESH_S, 0))
        if now - asked >= _FRESH_S:
            database, _, name = collection.target.partition(".")
            try:
                size = int(self._target[database].command({"collStats": name}).get("avgObjSize", 0))
            except PyMongoError:
                size = 0
            self._known[collection.target] = now, size
        return size


def sizes_of(clients: Sequence[MongoClient[Any]], namespaces: Sequence[str]) -> tuple[int, int, int]:
    """About how many documents collections have, their bytes, and the bytes on disk with the indexes. What the user
    may not ask, and what is not on a shard, does not count."""
    documents = size = stored = 0
    for client in clients:
        for namespace in namespaces:
            database, _, name = namespace.partition(".")
            try:
                stats = client[database].command({"collStats": name})
            except PyMongoError:
                continue
            documents += int(stats.get("count", 0))
            size += int(stats.get("size", 0))
            stored += int(stats.get("storageSize", 0)) + int(stats.get("totalIndexSize", 0))
    return documents, size, stored


def disk_of(target: MongoClient[Any], database: str) -> tuple[int, int]:
    """The size of the disk, and what of it is used; 0 where the server does not tell. It does for a database that is
    there."""
    for name in (database, "admin", "local"):
        try:
            stats = target[name].command("dbStats")
        except OperationFailure:
            continue
        if stats.get("fsTotalSize"):
            return int(stats["fsTotalSize"]), int(stats.get("fsUsedSize", 0))
    return 0, 0


def reach_of(source: MongodSource) -> float | None:
    """How many seconds an oplog reaches back once it is full, at the pace so far; ``None`` where the user may not
    know."""
    oldest, _ = source.oldest()
    seconds = max(1, source.newest().seconds - oldest.seconds)
    try:
        stats = source.client.local.command("collStats", "oplog.rs")
    except OperationFailure:
        return None
    size, size_max = int(stats["size"]), int(stats["maxSize"])
    return seconds * size_max / size if size else None


def in_units(count: int) -> str:
    """Bytes for people."""
    size, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1_000:
            break
        size, unit = size / 1_024, larger
    return f"{size:,.0f} {unit}" if unit == "bytes" or size >= 10 else f"{size:.1f} {unit}"


def in_time(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7_200 else f"{seconds / 3_600:,.1f} hours"
