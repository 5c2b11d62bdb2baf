"""What our engine reads for a differential run: the workload's oplog in memory, or a MongodSource live."""

from __future__ import annotations

from collections.abc import Iterable

from bson.int64 import Int64

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.plan.request import Answer, NeedDocuments, NeedEntries, NeedPreImages, OplogBatch, Request
from tailrace.source.mongod import MongodSource
from tests.differential.wire import Wire
from tests.golden.replay import MemoryOplog

_MAJORITY = {"readConcern": {"level": "majority"}}


class SourceOplog:
    """A MongodSource as the tests' oplog; its own batches, whatever number of entries is asked for."""

    def __init__(self, source: MongodSource) -> None:
        self._source = source

    def answer(self, request: Request) -> Answer:
        match request:
            case NeedEntries(times):
                return self._source.entries(times)
            case NeedPreImages(keys):
                return self._source.pre_images(keys)
            case NeedDocuments(lookups):
                return self._source.documents(lookups)

    def batches(
        self, after: ClusterTime, until: ClusterTime, entries_max: int, oplog_filter: bytes | None = None
    ) -> Iterable[OplogBatch]:
        # Few bytes a batch where few entries are asked for: the edges between batches are what is to be tried.
        size = min(entries_max * 500, 1 << 24)
        return self._source.read(after, until, batch_bytes_max=size, oplog_filter=oplog_filter)


def read_into_memory(wire: Wire, source: MongodSource, after: ClusterTime, until: ClusterTime) -> MemoryOplog:
    """The entries with ``after`` < ts <= ``until`` and the pre-images of that time; documents are looked up live."""
    window = {"$gt": after.to_timestamp(), "$lte": until.to_timestamp()}
    entries = _find_all(wire, "local", "oplog.rs", {"ts": window})
    pre_images = _find_all(wire, "config", "system.preimages", {"_id.ts": window})
    return MemoryOplog(entries, pre_images, source.documents)


def _find_all(wire: Wire, database: str, collection: str, query: dict[str, object]) -> list[bytes]:
    cursor = wire.run(database, {"find": collection, "filter": query, **_MAJORITY})["cursor"]
    found = [bytes(document.raw) for document in cursor["firstBatch"]]
    while cursor["id"] != 0:
        cursor = wire.run(database, {"getMore": Int64(cursor["id"]), "collection": collection})["cursor"]
        found.extend(bytes(document.raw) for document in cursor["nextBatch"])
    return found
