"""Streams over a cluster that begin in its archive and go on in the live oplogs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.write_concern import WriteConcern

import tailrace
from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import profile_for
from tailrace.embedded import ShardedCluster
from tailrace.errors import ChangeStreamHistoryLost, OtherHistoryError, SourceError, TailraceError, UsageError
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.options import parse
from tailrace.read.archive.cluster import ArchivedCluster
from tailrace.read.archive.layout import DESCRIPTION, HEAD
from tailrace.read.archive.place import ArchivePlace
from tailrace.read.archive.record import read_record, write_record
from tailrace.read.archive.replay import ArchiveReplay
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tailrace.read.source.mongod import MongodSource
from tests.differential.test_archive_live import archive_now, entries_of
from tests.sharded.workload import spread
from tests.tables.object_server import ObjectServer
from tests.traces import traces

pytestmark = pytest.mark.mongod

DATABASE = "archived_hybrid"


def drain(stream: Any, count: int) -> list[bytes]:
    """So many events, or fewer if none comes for a long time."""
    events: list[bytes] = []
    quiet = 0
    while len(events) < count and quiet < 60:
        event = stream.try_next()
        quiet = quiet + 1 if event is None else 0
        if event is not None:
            events.append(bytes(event.raw))
    return events


def write(cluster: ShardedCluster, namespace: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        cluster.router.insert_one(namespace, {"region": "agnt"[number % 4], "_id": number, "token": number})
        cluster.router.update_one(namespace, {"region": "agnt"[number % 4], "_id": number}, {"$set": {"seen": 1}})


def test_a_stream_begins_in_the_archive_and_goes_on_in_the_oplogs(
    sharded_cluster: ShardedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "archive"
    namespace = spread(sharded_cluster, DATABASE, "c")
    options: dict[str, Any] = {"max_await_time_ms": 500, "full_document": "updateLookup"}
    with (
        tailrace.connect(sharded_cluster.uri, document_class=RawBSONDocument) as client,
        client[DATABASE].watch(**options) as live,
    ):
        start = client._deployment.operation_time(client)
        write(sharded_cluster, namespace, 0, 60)
        archive_now(sharded_cluster.uri, folder)
        write(sharded_cluster, namespace, 60, 60)
        wanted = drain(live, 240)
    assert len(wanted) == 240
    # From now on every shard's oplog claims to begin shortly before the archive's end.
    ends = {name: ArchiveSource(folder, name).newest() for name in sharded_cluster.shards}
    begins = ClusterTime(min(ends.values()) - 1)
    assert begins > start

    def forgetful(self: MongodSource) -> tuple[ClusterTime, bool]:
        return begins, False

    monkeypatch.setattr(MongodSource, "oldest", forgetful)
    with tailrace.connect(sharded_cluster.uri) as plain, pytest.raises(ChangeStreamHistoryLost):
        plain[DATABASE].watch(start_at_operation_time=start.to_timestamp())
    with tailrace.connect(sharded_cluster.uri, archive=folder, document_class=RawBSONDocument) as both:
        with both[DATABASE].watch(start_at_operation_time=start.to_timestamp(), **options) as stream:
            assert drain(stream, 240) == wanted
        token = RawBSONDocument(wanted[10])["_id"]
        with both[DATABASE].watch(resume_after=token, **options) as stream:
            assert drain(stream, 229) == wanted[11:]
        # A start that needs no archive does not ask it.
        with both[DATABASE].watch(max_await_time_ms=100) as stream:
            assert stream.try_next() is None


def test_a_clusters_entries_are_replayed_as_the_events_of_their_time(
    sharded_cluster: ShardedCluster, object_store: ObjectServer, tmp_path: Path
) -> None:
    """The version changes between two cluster times, on all shards together. No test had replayed a cluster's archive
    over an upgrade; here one is recorded at times for which the archive has no entry."""
    folder = tmp_path / "archive"
    namespace = spread(sharded_cluster, "archived_upgrade", "c")
    write(sharded_cluster, namespace, 0, 24)
    archive_now(sharded_cluster.uri, folder)
    of = {version: _replayed(folder, version) for version in ("6.0", "7.0")}
    in_store = object_store.place("archived-upgrade", tmp_path / "state")
    archive_now(sharded_cluster.uri, in_store)
    assert _replayed(in_store, "6.0") == of["6.0"]
    assert all(not report.faults for report in verify(in_store))
    times = [_time_of(event) for event in of["6.0"]]
    assert [_time_of(event) for event in of["7.0"]] == times
    known: Any = read_record(folder / DESCRIPTION)
    for at in (times[1], times[len(times) // 2], ClusterTime(times[-1] - 1), times[-1], times[-1].tick()):
        notes = [{"version": "6.0.27", "since": "0"}, {"version": "7.0.28", "since": f"{at:016x}"}]
        write_record(folder / DESCRIPTION, {**known, "serverVersions": notes})
        expected = [
            older if time < at else newer for time, older, newer in zip(times, of["6.0"], of["7.0"], strict=True)
        ]
        assert _replayed(folder, None) == expected
        token = bson.decode(expected[len(times) // 3])["_id"]
        assert _replayed(folder, None, resumeAfter=token) == expected[len(times) // 3 + 1 :]


def _replayed(folder: ArchivePlace, version: str | None, **stage: Any) -> list[bytes]:
    options = StreamOptions.parse(Scope.of_database("archived_upgrade"), stage)
    replay = ArchiveReplay(folder, options, None if version is None else profile_for(version))
    return [bytes(event) for block in replay.blocks() for event in block.events()]


def _time_of(event: bytes) -> ClusterTime:
    return ClusterTime.from_timestamp(bson.decode(event)["clusterTime"])


def test_what_an_archive_cannot_tell_is_refused(
    sharded_cluster: ShardedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "archive"
    with tailrace.connect(sharded_cluster.uri) as client:
        start = client._deployment.operation_time(client)
        client[DATABASE].watch().close()
    for shard in sharded_cluster.shards.values():  # a quiet 7.0 writes nothing: the archive would end at the start
        with MongoClient[Any](shard.uri) as client_of_shard:
            client_of_shard.get_database("archived_later", write_concern=WriteConcern("majority")).c.insert_one({})
    archive_now(sharded_cluster.uri, folder)
    end = max(ArchiveSource(folder, name).newest() for name in sharded_cluster.shards)
    monkeypatch.setattr(MongodSource, "oldest", lambda self: (ClusterTime(end + (1 << 32)), False))
    with tailrace.connect(sharded_cluster.uri, archive=folder) as both:
        with pytest.raises(ChangeStreamHistoryLost, match="what lies between is lost"):
            both[DATABASE].watch(start_at_operation_time=start.to_timestamp())
        monkeypatch.setattr(MongodSource, "oldest", lambda self: (ClusterTime(end - 1), False))
        known: Any = read_record(folder / DESCRIPTION)
        name = min(known["sharded"])
        known["sharded"][name]["after"] = f"{end:016x}"
        write_record(folder / DESCRIPTION, known)
        with pytest.raises(SourceError, match=f"the shard {name} was added or removed"):
            both[DATABASE].watch(start_at_operation_time=start.to_timestamp())
        # Another cluster with shards of the same names. Earlier tests had only one cluster.
        known["sharded"][name]["after"] = f"{0:016x}"
        write_record(folder / DESCRIPTION, known)
        reach: Any = read_record(folder / name / HEAD)
        write_record(folder / name / HEAD, {**reach, "replicaSetId": "f" * 24})
        with pytest.raises(OtherHistoryError, match=f"the id of the replica set {name} was ffff"):
            both[DATABASE].watch(start_at_operation_time=start.to_timestamp())
        with pytest.raises(OtherHistoryError, match=f"the id of the replica set {name} was ffff"):
            archive_now(sharded_cluster.uri, folder)
        write_record(folder / name / HEAD, {**reach, "clusterId": "f" * 24})
        with pytest.raises(SourceError, match="is a part of another archive: the cluster's id was"):
            both[DATABASE].watch(start_at_operation_time=start.to_timestamp())
        write_record(folder / name / HEAD, reach)
        known["identity"]["cluster"] = "f" * 24
        write_record(folder / DESCRIPTION, known)
        with pytest.raises(OtherHistoryError, match="is the archive of another deployment: the cluster's id was ffff"):
            archive_now(sharded_cluster.uri, folder)
    with pytest.raises(TailraceError, match="there is no archive"):
        tailrace.connect(sharded_cluster.uri, archive=tmp_path / "no")[DATABASE].watch()


def test_one_run_ends_where_a_shard_has_joined_since_the_last_one(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path
) -> None:
    """Archiving such a shard's oplog never came to an end. No test had let a shard join between two runs."""
    cluster = start_sharded_cluster(1)
    folder = tmp_path / "archive"
    archive_now(cluster.uri, folder)
    added = cluster.add_shard()
    cluster.router.create_database("joined", added)
    cluster.router.insert_one("joined.c", {"_id": 1})
    archive_now(cluster.uri, folder)
    entries = entries_of(ArchiveSource(folder, added), ArchiveSource(folder, added).start, ClusterTime((1 << 64) - 1))
    assert any(bson.decode(entry)["ns"] == "joined.c" for entry in entries)


def test_a_start_before_a_shards_removal_is_refused_with_the_way_to_the_archive(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the removed shard's own oplog no longer reached back, the message said only that, without the way out that the
    page on the archive promises. Every earlier test was about shards that still exist."""
    cluster = start_sharded_cluster(1)
    folder = tmp_path / "archive"
    gone = cluster.add_shard()
    archive_now(cluster.uri, folder)
    start = max(ArchiveSource(folder, name).newest() for name in cluster.shards).tick()
    cluster.router.create_database("kept", "shard0")
    cluster.router.insert_one("kept.c", {"_id": 1})
    cluster.remove_shard(gone)
    archive_now(cluster.uri, folder)
    begins = ClusterTime.from_timestamp(cluster.router.fence())
    monkeypatch.setattr(MongodSource, "oldest", lambda self: (begins, False))
    said = rf"the shard {gone} was added or removed at .* \(tailrace replay\)"
    with (
        tailrace.connect(cluster.uri, archive=folder) as both,
        pytest.raises(SourceError, match=said),
    ):
        both.watch(start_at_operation_time=start.to_timestamp())
    deployment = open_deployment(parse({"uri": cluster.uri, "archive": str(folder)}))
    with closing(deployment), pytest.raises(SourceError, match=said):
        deployment._member(gone, start)
    with tailrace.connect(cluster.uri) as live, pytest.raises(ChangeStreamHistoryLost, match="and its oplog begins at"):
        live.watch(start_at_operation_time=start.to_timestamp())


@pytest.mark.slow  # tests/unit/test_archive_members.py has its quick form
def test_what_a_shard_held_that_was_removed_while_nobody_archived_is_in_the_archive(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path
) -> None:
    """The shard was missing, and replay of the archive ended before it with exit status 0, whatever came later: a shard
    that was removed while the archiver was away was not read. Every earlier test removed shards while a stream was
    open."""
    cluster = start_sharded_cluster(1)
    folder = tmp_path / "archive"
    first = cluster.add_shard()
    cluster.router.create_database("kept", "shard0")
    cluster.router.create_database("gone", first)
    cluster.router.insert_one("gone.c", {"_id": 1})
    archive_now(cluster.uri, folder)
    # One that the archive knows, and one that comes and goes meanwhile.
    cluster.router.insert_one("gone.c", {"_id": 2})
    second = cluster.add_shard()
    cluster.router.create_database("also", second)
    cluster.router.insert_one("also.c", {"_id": 3})
    with tailrace.connect(cluster.uri, document_class=RawBSONDocument) as client:
        start = ArchivedCluster(folder).oldest().to_timestamp()
        with client.watch(start_at_operation_time=start, max_await_time_ms=500) as live:
            former = {name: cluster.remove_shard(name) for name in (first, second)}
            cluster.router.insert_one("kept.c", {"_id": 4})
            wanted = until_document(live, 4)
    former[second].stop(0)
    with pytest.raises(
        SourceError, match=rf"shard {second} was removed .* nothing of it is archived, and it cannot be"
    ):
        archive_now(cluster.uri, folder)
    with pytest.raises(SourceError, match=rf"the shard {first} was removed from the cluster at .* no later event"):
        list(replayed(folder))
    lacking = [fault for report in verify(folder) for fault in report.faults]
    assert any(f"the shard {second} was removed" in fault for fault in lacking)
    former[second].restart(0)
    archive_now(cluster.uri, folder)
    assert [report.faults for report in verify(folder)] == [[]] * 4
    got = list(replayed(folder))
    assert got[: len(wanted)] == wanted
    # There is nothing left of them to be read: their servers may go.
    for one in former.values():
        one.stop(0)
    archive_now(cluster.uri, folder)
    assert list(replayed(folder))[: len(got)] == got


@pytest.mark.slow
def test_of_5_0_a_removed_shards_entries_are_archived_too_and_replay_is_refused(
    start_sharded_cluster: Callable[..., ShardedCluster], tmp_path: Path
) -> None:
    """5.0 removes a shard in the same way. The test above does not work there: inserts of 5.0 have no shard key."""
    cluster = start_sharded_cluster(1, version="5.0.4")
    first = cluster.add_shard()
    cluster.router.create_database("gone", first)
    cluster.router.insert_one("gone.c", {"_id": 1})
    archive_now(cluster.uri, tmp_path)
    cluster.router.insert_one("gone.c", {"_id": 2})
    second = cluster.add_shard()
    cluster.router.create_database("also", second)
    cluster.router.insert_one("also.c", {"_id": 3})
    former = {name: cluster.remove_shard(name) for name in (first, second)}
    former[second].stop(0)
    with pytest.raises(SourceError, match=rf"shard {second} was removed .* nothing of it is archived"):
        archive_now(cluster.uri, tmp_path)
    former[second].restart(0)
    archive_now(cluster.uri, tmp_path)
    assert [report.faults for report in verify(tmp_path)] == [[]] * 4
    inserted = {name: _inserted(tmp_path, name) for name in (first, second)}
    assert inserted == {first: [1, 2], second: [3]}
    with pytest.raises(UsageError, match=r"a cluster of 5\.0 cannot be replayed: inserts name no shard key"):
        list(replayed(tmp_path))


def _inserted(folder: Path, oplog: str) -> list[Any]:
    """The ``_id`` of each document that, according to an archived oplog, was inserted in the test's databases."""
    source = ArchiveSource(folder, oplog)
    entries = [bson.decode(raw) for raw in entries_of(source, source.start, source.newest())]
    return [one["o"]["_id"] for one in entries if one["op"] == "i" and one["ns"] in ("gone.c", "also.c")]


def until_document(stream: Any, last: int) -> list[bytes]:
    """The events up to the insert of the document with this ``_id``."""
    events: list[bytes] = []
    for event in stream:
        events.append(bytes(event.raw))
        if event["operationType"] == "insert" and event["documentKey"]["_id"] == last:
            return events
    raise AssertionError("the stream ended")


def replayed(folder: Path) -> Iterator[bytes]:
    """The events of a cluster's archive."""
    archived = ArchivedCluster(folder)
    profile = profile_for(archived.description.server_version)
    plan = build_plan(StreamOptions.parse(Scope.cluster(), {}, []), profile).start_at(archived.oldest())
    for block in archived.open(plan):
        yield from map(bytes, block.events())


def test_documents_of_moving_chunks_are_erased(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    """A migration inserts the document on one shard and deletes it on the other: neither means that it is gone."""
    namespace = spread(sharded_cluster, "archived_erased", "c")
    key = {"region": "a", "_id": 1}
    router, folder = sharded_cluster.router, tmp_path / "archive"
    router.insert_one(namespace, {**key, "who": "Anna Musterfrau"})
    router.insert_one(namespace, {"region": "a", "_id": 2, "who": "Bertha"})
    first, second, *_ = sharded_cluster.shards
    for shard in (second, first):
        router.move_chunk(namespace, key, to=shard)
        router.update_one(namespace, key, {"$set": {"at": shard, "again": "Anna Musterfrau"}})
    archive_now(sharded_cluster.uri, folder)
    erase = ["erase", "--document", namespace, "1", "--archive", str(folder)]
    assert main(erase) == 1  # it is still there
    router.delete_one(namespace, key)
    archive_now(sharded_cluster.uri, folder)
    before = events_of_erased(folder)
    assert main(erase) == 0
    assert all(report.faults == [] for report in verify(folder))
    assert traces(folder, b"Anna Musterfrau") == []
    assert sum(report.erased for report in verify(folder)) >= 5

    def stays(event: bytes) -> bool:
        found = bson.decode(event)
        return found.get("documentKey", {}).get("_id") != 1 or found["operationType"] == "delete"

    assert events_of_erased(folder) == [event for event in before if stays(event)]
    assert len(before) - len(events_of_erased(folder)) == 3


def events_of_erased(folder: Path) -> list[bytes]:
    options = StreamOptions.parse(Scope.parse("archived_erased"), {}, [])
    return [bytes(event) for block in ArchiveReplay(folder, options).blocks() for event in block.events()]
