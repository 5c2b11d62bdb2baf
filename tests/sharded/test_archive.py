"""Streams over a cluster that begin in its archive and go on in the live oplogs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.archive.layout import DESCRIPTION
from tailrace.archive.source import ArchiveSource
from tailrace.durable import read_json, write_json
from tailrace.embedded import ShardedCluster
from tailrace.errors import ChangeStreamHistoryLost, SourceError, TailraceError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.mongod import MongodSource
from tests.differential.test_archive_live import archive_now
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod

DATABASE = "archived_hybrid"


def drain(stream: Any, count: int) -> list[bytes]:
    """So many events, or what comes until nothing has for long."""
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
    # From now on every shard's oplog says to begin shortly before the archive's end.
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


def test_what_an_archive_cannot_tell_is_refused(
    sharded_cluster: ShardedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "archive"
    with tailrace.connect(sharded_cluster.uri) as client:
        start = client._deployment.operation_time(client)
        client[DATABASE].watch().close()
    archive_now(sharded_cluster.uri, folder)
    end = max(ArchiveSource(folder, name).newest() for name in sharded_cluster.shards)
    monkeypatch.setattr(MongodSource, "oldest", lambda self: (ClusterTime(end + (1 << 32)), False))
    with tailrace.connect(sharded_cluster.uri, archive=folder) as both:
        with pytest.raises(ChangeStreamHistoryLost, match="what lies between is lost"):
            both[DATABASE].watch(start_at_operation_time=start.to_timestamp())
        monkeypatch.setattr(MongodSource, "oldest", lambda self: (ClusterTime(end - 1), False))
        known: Any = read_json(folder / DESCRIPTION)
        name = min(known["sharded"])
        known["sharded"][name]["after"] = f"{end:016x}"
        write_json(folder / DESCRIPTION, known)
        with pytest.raises(SourceError, match=f"the shard {name} came or went"):
            both[DATABASE].watch(start_at_operation_time=start.to_timestamp())
    with pytest.raises(TailraceError, match="there is no archive"):
        tailrace.connect(sharded_cluster.uri, archive=tmp_path / "no")[DATABASE].watch()
