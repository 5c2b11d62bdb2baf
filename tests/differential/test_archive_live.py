"""The archive beside what a live server holds and gives: every entry once, and streams that do not see the seam."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import ChangeStreamHistoryLost, SourceError, TailraceError, UsageError
from tailrace.read.archive.cluster import ArchivedCluster
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tailrace.read.archive.writer import SegmentLimits
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.topology import Cluster
from tests import commands
from tests.differential.auth import PASSWORD, ROOT, mongod_with_users, uri_of
from tests.differential.test_source_live import fill, wait_until_truncated
from tests.pace import BETWEEN_WRITES_S
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod

_SMALL = SegmentLimits(bytes=100_000, seconds=0.5)
_PATIENCE_S = 300


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ReplicaSet]:
    """One of this file's own: what archives an oplog from its beginning would archive all that others wrote before."""
    with ReplicaSet(1, enable_test_commands=True, parameters={"disableLogicalSessionCacheRefresh": True}) as running:
        yield running


def archive_now(uri: str, folder: ArchivePlace, limits: SegmentLimits = _SMALL) -> None:
    """Archive everything up to now."""
    with MongoClient[dict[str, Any]](uri) as client:
        cluster = Cluster.discover(client, uri, {})
        try:
            Recorder(client, cluster, folder, ArchivePolicy(once=True, limits=limits)).run()
        finally:
            if cluster is not None:
                cluster.close()


@contextmanager
def archiving(uri: str, folder: Path) -> Iterator[Recorder]:
    """An archive that is written meanwhile."""
    with MongoClient[dict[str, Any]](uri) as client:
        recorder = Recorder(client, None, folder, ArchivePolicy(limits=_SMALL))
        thread = threading.Thread(target=recorder.run)
        thread.start()
        try:
            yield recorder
        finally:
            recorder.stop()
            thread.join()


def entries_of(source: MongodSource | ArchiveSource, after: ClusterTime, until: ClusterTime) -> list[bytes]:
    return [entry for batch in source.read(after, until) for entry in raw_bson.split(batch.raw)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_writer_that_is_killed_again_and_again_archives_each_entry_once(
    replica_set: ReplicaSet, tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    command = ["archive", replica_set.uri, str(folder), "--from", "now"]
    command += ["--segment-bytes", "50k", "--segment-seconds", "0.1"]
    rng = random.Random(7)
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        for life in range(4):
            running = commands.Command(*command)
            end = time.monotonic() + 1.5 + rng.random()
            while time.monotonic() < end:
                client.archived.c.insert_many([{"count": life, "ts": "x" * 200} for _ in range(50)])
                time.sleep(BETWEEN_WRITES_S)
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
    archive_now(replica_set.uri, folder)
    (report,) = verify(folder)
    assert report.faults == []
    archived = ArchiveSource(folder)
    with closing(MongodSource(replica_set.uri)) as live:
        got = entries_of(archived, archived.start, archived.newest())
        assert got == entries_of(live, archived.start, archived.newest())
    assert report.entries == len(got) > 100
    assert not list(folder.rglob("*.unfinished"))


def test_a_failure_at_the_last_segment_is_raised(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two threads waited for each other: the end had been taken from the queue already. A page's own command showed
    it, with a user who may not read the pre-images."""

    def fail(connection: object, after: ClusterTime, until: ClusterTime) -> None:
        if after < until:
            raise SourceError("not allowed", code=13)

    monkeypatch.setattr("tailrace.read.archive.writer.stored_between", fail)
    with pytest.raises(SourceError, match="not allowed"):
        archive_now(replica_set.uri, tmp_path / "archive", SegmentLimits())
    assert not list(tmp_path.rglob("*.unfinished"))


def overtake(uri: str, beyond: ClusterTime, recorder: Recorder) -> None:
    """Write until the oplog no longer reaches back so far, and never more than the archive has read."""
    with closing(MongodSource(uri)) as source:
        deadline = time.monotonic() + _PATIENCE_S
        while source.oldest()[0] <= beyond:
            fill(source.client, 1)
            newest = source.newest()
            wait_for(lambda newest=newest: all(one.read >= newest for one in recorder.statistics().values()))  # type: ignore[misc]
            assert time.monotonic() < deadline


def test_a_stream_begins_in_the_archive_and_goes_on_in_the_oplog(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    replica_set = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    folder = tmp_path / "archive"
    # The last segments are read from the oplog too, so the two overlap.
    with (
        archiving(replica_set.uri, folder) as recorder,
        MongoClient[dict[str, Any]](replica_set.uri) as client,
        MongoClient[RawBSONDocument](replica_set.uri, document_class=RawBSONDocument) as raw,
    ):
        client.shop.create_collection("c", changeStreamPreAndPostImages={"enabled": True})
        with raw.shop.watch(full_document_before_change="whenAvailable") as native:
            start = client.admin.command("ping")["operationTime"]
            client.shop.c.insert_many([{"_id": number, "ts": number} for number in range(500)])
            client.shop.c.update_many({}, {"$set": {"count": 1}})
            with client.start_session() as session, session.start_transaction():
                client.shop.c.delete_many({"_id": {"$lt": 100}}, session=session)
            client.shop.c.rename("d")
            early = _drain(native, 1101)
            native_token = native.resume_token
        overtake(replica_set.uri, ClusterTime.from_timestamp(start), recorder)
        with raw.shop.watch(full_document_before_change="whenAvailable") as native:
            client.shop.d.insert_one({"_id": "late"})
            late = _drain(native, 1)
        wait_for(lambda: ArchiveSource(folder).newest() > ClusterTime.from_timestamp(start))
    with tailrace.connect(replica_set.uri) as plain, pytest.raises(ChangeStreamHistoryLost):
        plain.shop.watch(start_at_operation_time=start)
    options: dict[str, Any] = {"full_document_before_change": "whenAvailable", "max_await_time_ms": 200}
    with tailrace.connect(replica_set.uri, archive=folder, document_class=RawBSONDocument) as both:
        with both.shop.watch(start_at_operation_time=start, **options) as stream:
            got = _drain(stream, len(early + late))
        with both.shop.watch(resume_after=native_token, **options) as stream:
            rest = _drain(stream, len(late))
    # The asynchronous client refused the parameter as an option that PyMongo does not know: no test had given it.
    assert asyncio.run(_drained_by_asyncio(replica_set.uri, folder, start, options, len(early + late))) == early + late
    assert len(early) == 1101
    assert rest == late
    assert got == early + late


async def _drained_by_asyncio(uri: str, folder: Path, start: Any, options: dict[str, Any], count: int) -> list[bytes]:
    async with tailrace.AsyncClient(uri, archive=folder, document_class=RawBSONDocument) as client:
        stream = await client.shop.watch(start_at_operation_time=start, **options)
        async with stream, asyncio.timeout(_PATIENCE_S):
            return [bytes((await stream.next()).raw) for _ in range(count)]


def _drain(stream: Any, at_least: int = 0) -> list[bytes]:
    """The events until none has come for a while, but at least so many: a busy machine may pause for longer."""
    events: list[bytes] = []
    quiet = 0
    deadline = time.monotonic() + _PATIENCE_S
    while quiet < 3 or (len(events) < at_least and time.monotonic() < deadline):
        event = stream.try_next()
        quiet = quiet + 1 if event is None else 0
        if event is not None:
            events.append(bytes(event.raw))
    return events


def test_a_hole_between_archive_and_oplog_is_named(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    replica_set = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    folder = tmp_path / "archive"
    archive_now(replica_set.uri, folder)
    end = ArchiveSource(folder).newest()
    with closing(MongodSource(replica_set.uri)) as source:
        fill(source.client, 1)
        wait_until_truncated(source, end)
        start = ArchiveSource(folder).oldest()[0].to_timestamp()
        with tailrace.connect(replica_set.uri, archive=folder) as client:
            with pytest.raises(ChangeStreamHistoryLost) as caught:
                client.shop.watch(start_at_operation_time=start)
            assert str(end) in str(caught.value)
            now = client.shop.watch()  # a stream that needs no archive is not refused
            now.close()
    with pytest.raises(TailraceError, match="286"):
        archive_now(replica_set.uri, folder)
    assert verify(folder)[0].faults == []


def test_an_archive_of_another_deployment_is_refused(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    archive_now(replica_set.uri, folder)
    other = start_replica_set(1)
    with pytest.raises((UsageError, SourceError), match=r"another|is the archive of"):
        archive_now(other.uri, folder)
    with (
        tailrace.connect(other.uri, archive=folder) as client,
        pytest.raises(TailraceError),
        client.shop.watch(start_at_operation_time=ArchiveSource(folder).oldest()[0].to_timestamp()) as stream,
    ):
        stream.try_next()


def test_a_clusters_archive_gives_the_events_of_its_live_stream(
    sharded_cluster: ShardedCluster, tmp_path: Path
) -> None:
    with tailrace.connect(sharded_cluster.uri, document_class=RawBSONDocument) as client:
        namespace = spread(sharded_cluster, "archived_cluster", "c")
        with client["archived_cluster"].watch(max_await_time_ms=500) as live:
            start = client._deployment.operation_time(client)
            for number in range(200):
                document = {"region": "agnt"[number % 4], "_id": number, "token": number}
                sharded_cluster.router.insert_one(namespace, document)
            wanted = _drain(live, 200)
    folder = tmp_path / "archive"
    archive_now(sharded_cluster.uri, folder)
    assert all(report.faults == [] for report in verify(folder))
    cluster = ArchivedCluster(folder)
    options = StreamOptions.parse(Scope.parse("archived_cluster"), {"startAtOperationTime": start.to_timestamp()}, [])
    plan = build_plan(options, profile_for(cluster.description.server_version))
    got = [event for block in cluster.open(plan) for event in block.events()]
    assert len(wanted) == 200
    assert got == wanted


@pytest.mark.parametrize("version", ["5.0.4", pytest.param("4.4.2", marks=pytest.mark.slow)])
def test_servers_with_users_and_without_stored_pre_images_are_archived(version: str, tmp_path: Path) -> None:
    """On these servers config.system.preimages does not exist and nobody may read it: the archive was refused. Older
    servers had only been archived without users; the fuzz of all products found it."""
    with mongod_with_users(tmp_path, version) as mongod:
        uri = uri_of(mongod, ROOT, PASSWORD)
        with MongoClient[dict[str, Any]](uri) as client:
            client.shop.orders.insert_one({"_id": 1})
        folder = tmp_path / "archive"
        archive_now(uri, folder)
        held = ArchiveSource(folder)
        assert any(b"shop.orders" in batch.raw for batch in held.read(held.start, held.newest()))
