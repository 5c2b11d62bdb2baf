"""Listeners, archives and tables of a cluster whose shards log events with the same token at the same time: each event
is handled or given, with a name of its own, and each shard's collections are dropped.

With lanes only the first was handled, and all had the same ``message_id``, so that consumers that recognise repeats by
it dropped the others. No test of a listener had two events with the same token."""

from __future__ import annotations

import threading
from pathlib import Path

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from deltalake import DeltaTable

import tailrace
from tailrace.consumer import Change, Listener, MongoLeaseStore
from tailrace.consumer.dead_letters import DeadLetters
from tailrace.consumer.messages import ChangeMessages
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.mongod import MongodSource
from tests.consumer.test_lanes import eventually
from tests.differential.test_archive_live import archive_now
from tests.sharded import native
from tests.sharded.one_time import drop_at_one_time
from tests.sharded.test_archive import drain

pytestmark = pytest.mark.mongod


# A listener without lanes reads the same tokens, and events are numbered by the stream.
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_listener_handles_each_event_of_a_token_that_several_have(
    sharded_cluster: ShardedCluster, replica_set: ReplicaSet, partitions: int
) -> None:
    prefix = f"listened_at_one_time_{partitions}_"
    seen: list[tuple[str, str, str]] = []
    noting = threading.Lock()
    make = ChangeMessages("topic")

    def handle(change: Change) -> None:
        database = change.event["ns"]["db"]
        if change.operation_type == "dropDatabase" and database.startswith(prefix):
            message = make(change)
            assert message is not None
            assert message.id == change.message_id
            with noting:
                seen.append((database, change.message_id, str(change.token["_data"])))
            raise ValueError("into the dead letters")

    with (
        tailrace.connect(sharded_cluster.uri) as client,
        tailrace.connect(replica_set.uri) as other,
    ):
        database = other[f"one_time_{partitions}"]
        store = MongoLeaseStore(database.leases)
        letters = DeadLetters(database.letters, tries=1)
        running = Listener(client, handle, resource="drops", store=store, partitions=partitions, on_error=letters)
        with running:
            eventually(lambda: any(lease.position for lease in store.leases()), "the place where it begins")
            names = drop_at_one_time(sharded_cluster, prefix)
            eventually(lambda: {name for name, *_ in seen} >= set(names), "the drops of all databases")
            kept = [name for name in seen if name[0] in names]
            eventually(lambda: len(list(letters.letters())) == len(seen), "the letters")
        other.drop_database(database.name)
    assert sorted(name for name, *_ in kept) == sorted(names)
    assert len({token for *_, token in kept}) == 1
    assert [identifier for _, identifier, _ in kept] == [kept[0][2], f"{kept[0][2]}-1", f"{kept[0][2]}-2"]


def test_a_stream_that_begins_in_an_archive_gives_each_event_of_a_token_once(
    sharded_cluster: ShardedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, folder, router = "archived_at_one_time_", tmp_path / "kept", sharded_cluster.router
    start = router.fence()
    drop_at_one_time(sharded_cluster, prefix)
    archive_now(sharded_cluster.uri, folder)
    begins = ClusterTime(min(ArchiveSource(folder, name).newest() for name in sharded_cluster.shards) - 1)
    drop_at_one_time(sharded_cluster, prefix)
    union = native.union(sharded_cluster, "admin", 1, start, router.fence(), allChangesForCluster=True)
    wanted = [event for event in union if bson.decode(event)["ns"]["db"].startswith(prefix)]
    tokens = [native.token(event).data for event in wanted]
    again = [number for number, token in enumerate(tokens[1:], 1) if token == tokens[number - 1]]
    # Others that were logged at the same time by chance also have one token.
    assert len(again) >= 4

    def forgetful(self: MongodSource) -> tuple[ClusterTime, bool]:
        return begins, False

    monkeypatch.setattr(MongodSource, "oldest", forgetful)
    mine = [{"$match": {"ns.db": {"$regex": f"^{prefix}"}}}]
    with tailrace.connect(sharded_cluster.uri, archive=folder, document_class=RawBSONDocument) as client:
        with client.watch(mine, start_at_operation_time=start, max_await_time_ms=500) as stream:
            assert drain(stream, len(wanted)) == wanted
        for number in (again[0], again[-1]):
            rest = wanted[number + 1 + tokens[number + 1 :].count(tokens[number]) :]
            token = {"_data": tokens[number]}
            with client.watch(mine, resume_after=token, max_await_time_ms=500) as stream:
                assert drain(stream, len(rest) or 1) == rest


def test_tables_lose_the_rows_of_each_shard(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    prefix, router = "tabled_at_one_time_", sharded_cluster.router

    def rows(names: list[str]) -> list[list[str]]:
        found = [DeltaTable(str(tmp_path / f"{name}.c")).to_pyarrow_table(columns=["_id"]) for name in names]
        return [table.column("_id").to_pylist() for table in found]

    made: list[str] = []
    with TablesWriter(sharded_cluster.uri, TableSettings(tmp_path, (TableRule(f"{prefix}*.*"),))) as writer:

        def copy(names: list[str]) -> None:
            for name, shard in zip(names, sharded_cluster.shards, strict=True):
                router.create_database(name, shard)  # it exists, and the cluster learns of it
            made.extend(names)
            writer.run_to_present()
            assert rows(names) == [[name] for name in names]

        names = drop_at_one_time(sharded_cluster, prefix, before=copy)
        writer.run_to_present()
        assert rows(names) == [[], [], []]
        router.insert_one(f"{names[0]}.c", {"_id": "again"})
        writer.run_to_present()
        assert rows(names) == [["again"], [], []]
    for name in made:
        router.drop_database(name)
