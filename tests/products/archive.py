"""The archive beside the oplog: its entries, and a stream that begins in it because the oplog is said not to reach so
far back."""

from __future__ import annotations

from contextlib import closing

from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.archive.layout import existing
from tailrace.archive.recorder import ArchivePolicy, Recorder
from tailrace.archive.source import ArchiveSource
from tailrace.archive.writer import SegmentLimits
from tailrace.event.resume_token import ResumeToken
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.mongod import MongodSource
from tailrace.source.topology import Cluster
from tests.differential.test_archive_live import entries_of
from tests.products.product import Job, Product
from tests.products.truth import Truth, first_of, time_of

_SMALL = SegmentLimits(bytes=60_000, seconds=0.5)


class ArchiveProduct(Product):
    name = "archive"
    parts = ("*/*.parquet", "*.json")
    limits = ("was removed from the cluster and added again", "after the stream's start, which lies in the archive")

    def advance(self, job: Job) -> None:
        with MongoClient(job.uri) as client:
            cluster = Cluster.discover(client, job.uri, {})
            try:
                Recorder(client, cluster, job.root, ArchivePolicy(once=True, limits=_SMALL)).run()
            finally:
                if cluster is not None:
                    cluster.close()

    def differences(self, job: Job, truth: Truth) -> list[str]:
        told = self._entries(job)
        return told or self._stream(job, truth)

    def _entries(self, job: Job) -> list[str]:
        """Each oplog's entries, from the archive's beginning to the pause."""
        told = []
        description = existing(job.root)
        with MongoClient(job.uri) as client:
            cluster = Cluster.discover(client, job.uri, {})
            for name in description.oplogs:
                archived = ArchiveSource(job.root, name)
                if cluster is None:
                    live = MongodSource(client)
                else:
                    known = {one.name for one in cluster.shards()}
                    if name not in known:
                        continue  # the config server's, or a shard that has gone
                    live = MongodSource(cluster.client(name))
                first = max(archived.start, ClusterTime(live.oldest()[0] - 1))
                until = min(job.time, archived.newest())
                if until < job.time and description.shards.get(name) is None and cluster is None:
                    told.append(f"the archive ends at {until}, before {job.time}")
                told += first_of(entries_of(live, first, until), entries_of(archived, first, until), f"entry of {name}")
            if cluster is not None:
                cluster.close()
        return told

    def _stream(self, job: Job, truth: Truth) -> list[str]:
        """From a pause on, the first half from the archive: the live oplog is said to begin in the middle."""
        pauses = [pause for pause in truth.pauses() if pause <= job.time]
        middle = pauses[len(pauses) // 2]
        since = max(pauses[0], self._begins(job)).tick()
        own = MongodSource.oldest

        def oldest(source: MongodSource) -> tuple[ClusterTime, bool]:
            found, _ = own(source)
            return max(found, middle), False

        MongodSource.oldest = oldest  # type: ignore[method-assign]
        try:
            events = self._read(job, since)
        finally:
            MongodSource.oldest = own  # type: ignore[method-assign]
        return first_of(truth.events(since, job.time), events, "event from the archive")

    def _begins(self, job: Job) -> ClusterTime:
        description = existing(job.root)
        names = [name for name in description.oplogs if name in description.shards] or [description.name or ""]
        starts = [ArchiveSource(job.root, name).start for name in names]
        return max([description.since, *starts])

    def _read(self, job: Job, since: ClusterTime) -> list[bytes]:
        found = []
        with (
            tailrace.connect(job.uri, archive=job.root) as client,
            closing(
                client.watch(
                    start_at_operation_time=since.to_timestamp(), document_class=RawBSONDocument, max_await_time_ms=50
                )
            ) as stream,
        ):
            while True:
                event = stream.try_next()
                if event is not None:
                    found.append(bytes(event.raw))
                elif ResumeToken.parse(stream.resume_token).cluster_time >= job.time:
                    return [one for one in found if time_of(one) <= job.time]
