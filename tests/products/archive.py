"""The archive compared with the oplog: its entries, and a stream that begins in it because the oplog is made to look as
if it did not reach so far back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.archive.layout import existing
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.connection import Connection
from tailrace.read.source.membership import changes
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tests.differential.test_archive_live import entries_of
from tests.products.product import Job, Product
from tests.products.truth import Truth, first_of, time_of

#: An archive ends where another replica set gets the name of a shard.
REPLACED = "was removed from the cluster and added again"
_SMALL = SegmentLimits(bytes=60_000, seconds=0.5)


def record(uri: str, folder: Path) -> None:
    """Archive everything up to now."""
    with MongoClient(uri) as client:
        cluster = Cluster.discover(client, uri, {})
        try:
            Recorder(client, cluster, folder, ArchivePolicy(once=True, limits=_SMALL)).run()
        finally:
            if cluster is not None:
                cluster.close()


def came_or_went(job: Job) -> bool:
    """Whether a shard joined or left since the workload began."""
    with MongoClient[Any](job.uri) as client:
        cluster = Cluster.discover(client, job.uri, {})
        assert cluster is not None
        try:
            return bool(list(changes(Connection(cluster.config_client()), ClusterTime(job.start))))
        finally:
            cluster.close()


class ArchiveProduct(Product):
    name = "archive"
    parts = ("*/*.parquet", "*.json")
    limits = (REPLACED, "after the stream's start, which lies in the archive")

    def advance(self, job: Job) -> None:
        record(job.uri, job.root)

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
        """From a pause on, or after an event, the first half from the archive: the live oplog is said to begin in the
        middle."""
        rng = random.Random(job.seed)
        pauses = [pause for pause in truth.pauses() if pause <= job.time]
        middle = rng.choice(pauses)
        since = max(pauses[0], self._begins(job)).tick()
        expected = truth.events(since, job.time)
        begin: dict[str, Any] = {"start_at_operation_time": since.to_timestamp()}
        if expected and rng.random() < 0.6:
            # Mostly a token that only the archive has.
            place = rng.randrange(len(truth.events(since, middle)) or 1)
            token = raw_bson.find(expected[place], b"_id")
            assert token is not None
            name = rng.choice(("resume_after", "start_after"))
            begin = {name: bson.decode(raw_bson.value(expected[place], token))}
            expected = expected[place + 1 :]
        with beginning_at(middle):
            events = self._read(job, begin)
        return first_of(expected, events, f"event from the archive, {next(iter(begin))}")

    def _begins(self, job: Job) -> ClusterTime:
        description = existing(job.root)
        names = [name for name in description.oplogs if name in description.shards] or [description.name or ""]
        starts = [ArchiveSource(job.root, name).start for name in names]
        return max([description.since, *starts])

    def _read(self, job: Job, begin: dict[str, Any]) -> list[bytes]:
        found = []
        with (
            tailrace.connect(job.uri, archive=job.root) as client,
            closing(client.watch(document_class=RawBSONDocument, max_await_time_ms=50, **begin)) as stream,
        ):
            while True:
                event = stream.try_next()
                if event is not None:
                    found.append(bytes(event.raw))
                elif ResumeToken.parse(stream.resume_token).cluster_time >= job.time:
                    return [one for one in found if time_of(one) <= job.time]


@contextmanager
def beginning_at(time: ClusterTime) -> Iterator[None]:
    """Let each live oplog claim to begin then, if it does not begin later."""
    own = MongodSource.oldest

    def oldest(source: MongodSource) -> tuple[ClusterTime, bool]:
        found, _ = own(source)
        return max(found, time), False

    MongodSource.oldest = oldest  # type: ignore[method-assign]
    try:
        yield
    finally:
        MongodSource.oldest = own  # type: ignore[method-assign]
