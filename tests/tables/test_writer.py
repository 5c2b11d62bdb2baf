"""Tables under SIGKILL at any moment, two writers, other programs' changes, full disks, and changing schemas."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pymongo import MongoClient

import tailrace
from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.holding import mark_for_rebuilding
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests import commands
from tests.tables.equality import in_collection, in_table

pytestmark = pytest.mark.mongod

_CHILD = """
import sys
from pathlib import Path
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
uri, root, pattern = sys.argv[1:]
with TablesWriter(uri, TableSettings(Path(root), (TableRule(pattern),), every_s=0.0, compact_every=2)) as writer:
    print("begun", flush=True)
    writer.run()
"""


@pytest.fixture
def collection(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.node.name.split("[")[0][-50:]
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database(name)
        yield client[name]["things"]
        client.drop_database(name)


def one_table(root: Path, collection: Any, **options: Any) -> TableSettings:
    return TableSettings(root, (TableRule(collection.full_name, **options),), every_s=0.0)


def brought_up(uri: str, settings: TableSettings) -> None:
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()


def work(collection: Any, chosen: random.Random, count: int) -> None:
    for _ in range(count):
        number = chosen.randrange(50)
        match chosen.randrange(4):
            case 0:
                collection.delete_one({"_id": number})
            case 1:
                collection.replace_one({"_id": number}, {"v": chosen.random()}, upsert=True)
            case _:
                collection.update_one({"_id": number}, {"$inc": {"n": 1}, "$push": {"l": number}}, upsert=True)


@pytest.mark.slow  # a crash between any two steps: the test below
def test_killed_at_any_moment_nothing_is_lost_or_twice(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    chosen = random.Random(4)
    work(collection, chosen, 100)
    root = tmp_path / "t"
    for _ in range(4):
        child = commands.Piped(replica_set.uri, str(root), collection.full_name, code=_CHILD)
        assert child.stdout.readline() == b"begun\n"
        until = time.monotonic() + chosen.uniform(0.2, 2.5)
        while time.monotonic() < until:
            work(collection, chosen, 5)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    brought_up(replica_set.uri, one_table(root, collection))
    assert in_table(root, collection.full_name) == in_collection(collection)


@pytest.mark.parametrize(
    ("step", "merges"),
    [
        ("tables.state", False),
        ("table.commit", False),
        ("tables.done", False),
        ("table.commit", True),
        ("table.compacted", True),
    ],
)
def test_a_crash_between_any_two_steps_is_made_good(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, step: str, merges: bool
) -> None:
    chosen = random.Random(5)
    root = tmp_path / "t"
    settings = replace(one_table(root, collection), merge_on_read=merges)
    work(collection, chosen, 50)
    brought_up(replica_set.uri, settings)

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    for _ in range(3):
        work(collection, chosen, 40 if merges else 20)  # enough for a merge
        durable.observe_steps(die)
        try:
            with pytest.raises(KeyboardInterrupt):
                brought_up(replica_set.uri, settings)
        finally:
            durable.observe_steps(None)
    brought_up(replica_set.uri, settings)
    assert in_table(root, collection.full_name) == in_collection(collection)
    batches = [one.batch for one in stated(root / folder_of(collection.full_name))]
    assert len(set(batches)) == len(batches)


def test_tables_have_one_writer_and_others_changes_are_told(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "t"
    settings = one_table(root, collection)
    collection.insert_many([{"_id": number, "v": number} for number in range(20)])
    with TablesWriter(replica_set.uri, settings) as writer:
        with pytest.raises(SinkError, match="another process writes the tables"):
            TablesWriter(replica_set.uri, settings)
        writer.run_to_present()
    folder = root / folder_of(collection.full_name)
    DeltaTable(str(folder)).optimize.compact()  # which changes no row
    collection.update_one({"_id": 1}, {"$set": {"v": "one"}})
    brought_up(replica_set.uri, settings)
    DeltaTable(str(folder)).delete("v = '3'")
    collection.update_one({"_id": 1}, {"$set": {"v": 11}})
    with pytest.raises(SinkError, match="another program has changed the table"):
        brought_up(replica_set.uri, settings)
    mark_for_rebuilding(root, collection.full_name)
    brought_up(replica_set.uri, settings)
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert main(["tables", "status", str(root)]) == 0
    assert f"{collection.full_name}: version" in capsys.readouterr().out
    assert main(["tables", "compact", str(root)]) == 0
    assert main(["tables", "expire", str(root), "--keep", "1h"]) == 0
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_a_full_disk_stops_the_tables_and_they_go_on(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "t"
    collection.insert_one({"_id": 1})
    brought_up(replica_set.uri, one_table(root, collection))
    collection.insert_one({"_id": 2})
    sync = durable.sync_file

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(durable, "sync_file", full)
    with pytest.raises(durable.LakeFullError, match="no room left to write"):
        brought_up(replica_set.uri, one_table(root, collection))
    monkeypatch.setattr(durable, "sync_file", sync)
    brought_up(replica_set.uri, one_table(root, collection))
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_documents_that_do_not_fit_are_in_quarantine_until_they_do(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    root = tmp_path / "t"
    schema = TableSchema.declared({"n": "int", "day": "string"})
    settings = one_table(root, collection, schema=schema, partition_by=("day",), z_order=("n",))
    collection.insert_many([{"_id": number, "n": number, "day": "ab"[number % 2]} for number in range(10)])
    brought_up(replica_set.uri, settings)
    collection.update_one({"_id": 3}, {"$set": {"n": "three"}})
    collection.update_one({"_id": 4}, {"$set": {"day": "c"}})
    brought_up(replica_set.uri, settings)
    table = in_table(root, collection.full_name)
    truth = in_collection(collection)
    assert table is not None
    assert len(truth.keys() - table.keys()) == 1
    assert all(truth[key] == document for key, document in table.items())
    quarantine = DeltaTable(str(root / "_quarantine")).to_pyarrow_table().to_pylist()
    assert [one["reason"] for one in quarantine] == ["'n' is string three, and its column is int"]
    with collection.database.client.start_session() as session:
        stream = collection.watch(resume_after={"_data": quarantine[0]["token"]}, session=session)
        with stream:
            assert stream.next()["updateDescription"]["updatedFields"] == {"n": "three"}
    collection.update_one({"_id": 3}, {"$set": {"n": 33}})
    brought_up(replica_set.uri, settings)
    assert in_table(root, collection.full_name) == in_collection(collection)
    found = DeltaTable(str(root / folder_of(collection.full_name)))
    assert found.metadata().configuration["tailrace.partitionBy"] == '["day"]'
    assert found.to_pyarrow_table(filters=[("n", "=", 33)]).column("day").to_pylist() == ["b"]


def test_other_columns_count_from_the_next_start(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    # The page promises it for the policy `fail`; earlier tests changed documents, but never rules.
    root = tmp_path / "t"
    collection.insert_many([{"_id": 1, "n": 1, "day": "a"}, {"_id": 2, "n": 2, "day": "b"}])
    declared = TableSchema.declared({"n": "int"}, "fail")
    brought_up(replica_set.uri, one_table(root, collection, schema=declared))
    collection.update_one({"_id": 2}, {"$set": {"n": "two"}})
    for _ in range(2):
        with pytest.raises(SinkError, match="does not fit its table's columns"):
            brought_up(replica_set.uri, one_table(root, collection, schema=declared))
    declared = TableSchema.declared({"n": "json", "day": "string"}, "fail")
    brought_up(replica_set.uri, one_table(root, collection, schema=declared, partition_by=("day",)))
    assert in_table(root, collection.full_name) == in_collection(collection)
    found = DeltaTable(str(root / folder_of(collection.full_name)))
    assert found.metadata().configuration["tailrace.partitionBy"] == '["day"]'
    assert sorted(found.to_pyarrow_table().column("n").to_pylist()) == ['"two"', "1"]


def test_a_table_that_failed_goes_on_when_the_document_fits_again(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    # The writer stopped at what it had folded, and would not read the change that repairs it.
    root = tmp_path / "t"
    settings = one_table(root, collection, schema=TableSchema.declared({"n": "int"}, "fail"))
    collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": 2}])
    brought_up(replica_set.uri, settings)
    collection.update_one({"_id": 2}, {"$set": {"n": "two"}})
    for _ in range(2):
        with pytest.raises(SinkError, match="does not fit its table's columns"):
            brought_up(replica_set.uri, settings)
    collection.update_one({"_id": 2}, {"$set": {"n": 22}})
    brought_up(replica_set.uri, settings)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_no_document_is_in_neither_place_after_a_crash(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    # The other crashes are those of tables in which every document fits.
    root = tmp_path / "t"
    settings = one_table(root, collection, schema=TableSchema.declared({"n": "int"}))
    collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": "two"}])

    def die(name: str) -> None:
        if name == "table.commit":
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            brought_up(replica_set.uri, settings)
    finally:
        durable.observe_steps(None)
    brought_up(replica_set.uri, settings)
    assert DeltaTable(str(root / "_quarantine")).to_pyarrow_table().num_rows == 1


def test_collections_that_are_selected_later_are_copied(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    # Earlier tests had new patterns only for collections that did not exist yet.
    root = tmp_path / "t"
    other = collection.database["others"]
    other.insert_many([{"_id": number} for number in range(5)])
    collection.insert_one({"_id": 1})
    brought_up(replica_set.uri, one_table(root, collection))
    both = TableSettings(root, (TableRule(f"{collection.database.name}.*"),), every_s=0.0)
    brought_up(replica_set.uri, both)
    assert in_table(root, other.full_name) == in_collection(other)
    brought_up(replica_set.uri, one_table(root, collection))
    other.delete_one({"_id": 1})
    brought_up(replica_set.uri, both)
    assert in_table(root, other.full_name) == in_collection(other)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_a_state_that_was_removed_is_made_anew_with_the_tables(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    # Micro-batches were counted from 0 again, and a table believed to have taken them over.
    root = tmp_path / "t"
    collection.insert_one({"_id": 1})
    brought_up(replica_set.uri, one_table(root, collection))
    for number in range(2, 5):
        collection.insert_one({"_id": number})
        brought_up(replica_set.uri, one_table(root, collection))
    shutil.rmtree(root / "_tailrace")
    collection.delete_one({"_id": 2})
    brought_up(replica_set.uri, one_table(root, collection))
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_collections_whose_names_begin_with_tmp_have_tables(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    # The server's temporary names had been recognised by these three letters.
    mine = collection.database["tmp_orders"]
    mine.insert_one({"_id": 1})
    collection.insert_one({"_id": 1})
    collection.aggregate([{"$out": "made"}])
    settings = TableSettings(tmp_path / "t", (TableRule(f"{collection.database.name}.*"),), every_s=0.0)
    brought_up(replica_set.uri, settings)
    collection.aggregate([{"$out": "made"}])
    mine.insert_one({"_id": 2})
    collection.database.command("convertToCapped", "made", size=4096)
    brought_up(replica_set.uri, settings)
    names = {one.name for one in (tmp_path / "t").iterdir()} - {"_tailrace"}
    assert names == {folder_of(f"{collection.database.name}.{name}") for name in ("tmp_orders", "things", "made")}
    assert in_table(tmp_path / "t", mine.full_name) == in_collection(mine)


def test_ids_that_are_equal_numbers_change_places_within_a_transaction(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    # Changes were ordered by their times, which all changes of a transaction share.
    root = tmp_path / "t"
    collection.insert_one({"_id": 1})
    brought_up(replica_set.uri, one_table(root, collection))
    with collection.database.client.start_session() as session, session.start_transaction():
        collection.delete_one({"_id": 1}, session=session)
        collection.insert_one({"_id": 1.0, "n": 1}, session=session)
        collection.delete_one({"_id": 1}, session=session)
        collection.insert_one({"_id": 1, "n": 2}, session=session)
    brought_up(replica_set.uri, one_table(root, collection))
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_a_stream_goes_on_where_a_table_stands(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    # A high-water mark comes before the changes of its time. The fault showed only if two changes had neighbouring
    # times.
    root = tmp_path / "t"
    collection.insert_many([{"_id": number, "n": number} for number in range(5)])
    settings = one_table(root, collection, schema=TableSchema.declared({"n": "int"}))
    brought_up(replica_set.uri, settings)
    collection.insert_many([{"_id": 5, "n": 5}, {"_id": 6, "n": 6}, {"_id": 7, "n": "seven"}])
    brought_up(replica_set.uri, settings)
    token = DeltaTable(str(root / folder_of(collection.full_name))).history(1)[0]["tailrace.token"]
    misfit = DeltaTable(str(root / "_quarantine")).to_pyarrow_table().column("token").to_pylist()[0]
    collection.insert_one({"_id": 8, "n": 8})
    ours = tailrace.connect(replica_set.uri)
    for followed in (collection, ours[collection.database.name][collection.name]):
        for after, first in ((token, 8), (misfit, 7)):
            with followed.watch(resume_after={"_data": after}) as stream:
                assert stream.next()["documentKey"] == {"_id": first}
