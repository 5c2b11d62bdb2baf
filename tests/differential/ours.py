"""What our engine reads for a differential run: the workload's oplog in memory, or a MongodSource live."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bson.int64 import Int64

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import Answer, NeedDocuments, NeedEntries, NeedPreImages, OplogBatch, Request
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.mongod import MongodSource
from tests.differential.wire import Wire
from tests.golden.replay import Documents, MemoryOplog

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
        # Small batches if few entries are asked for: the edges between batches are what is tested.
        size = min(entries_max * 500, 1 << 24)
        return self._source.read(after, until, batch_bytes_max=size, oplog_filter=oplog_filter)


class ArchiveOplog(SourceOplog):
    """An archive as the tests' oplog; current documents are looked up live, as a stream that goes on live does."""

    def __init__(self, archived: ArchiveSource, source: MongodSource) -> None:
        super().__init__(source)
        self._archived = archived

    def answer(self, request: Request) -> Answer:
        match request:
            case NeedEntries(times):
                return self._archived.entries(times)
            case NeedPreImages(keys):
                return self._archived.pre_images(keys)
        return super().answer(request)

    def batches(
        self, after: ClusterTime, until: ClusterTime, entries_max: int, oplog_filter: bytes | None = None
    ) -> Iterable[OplogBatch]:
        size = min(entries_max * 500, 1 << 24)
        return self._archived.read(after, until, batch_bytes_max=size, oplog_filter=oplog_filter)


class ArchivedMemory(MemoryOplog):
    """An archive's entries in memory, and its pre-images where they lie."""

    def __init__(
        self, entries: list[bytes], stored: list[bytes], documents: Documents, archived: ArchiveSource
    ) -> None:
        super().__init__(entries, stored, documents)
        self._archived = archived

    def answer(self, request: Request) -> Answer:
        if isinstance(request, NeedPreImages):
            return self._archived.pre_images(request.keys)
        return super().answer(request)


def archive_of(source: MongodSource, folder: Path) -> ArchiveSource:
    """The archive in ``folder``, brought up to date, in segments of a few entries."""
    policy = ArchivePolicy(once=True, limits=SegmentLimits(bytes=200_000))
    Recorder(source.client, None, folder, policy).run()
    return ArchiveSource(folder)


def read_archive_into_memory(
    archived: ArchiveSource, source: MongodSource, after: ClusterTime, until: ClusterTime
) -> MemoryOplog:
    """As ``read_into_memory``, of the archive."""
    entries = [entry for batch in archived.read(after, until) for entry in raw_bson.split(batch.raw)]
    return ArchivedMemory(entries, [], source.documents, archived)


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
