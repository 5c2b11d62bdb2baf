"""``as of``: a table at a time equals the copy that was recorded then, inside micro-batches too."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pymongo import MongoClient

from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.lake.tables import versions
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.versions import Keeping
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tests.differential.execute import note
from tests.differential.wire import Wire
from tests.tables.aging import age
from tests.tables.equality import in_collection, key_of

pytestmark = pytest.mark.mongod


def rows_of(table: Any) -> dict[bytes, bytes]:
    found = dict(zip(table.column("_key").to_pylist(), table.column("_bson").to_pylist(), strict=True))
    assert len(found) == table.num_rows
    assert all(key_of(document) == key for key, document in found.items())
    return found


def change(collection: Any, chosen: random.Random) -> None:
    """A few changes of any kind."""
    for _ in range(chosen.randrange(1, 6)):
        number = chosen.randrange(40)
        match chosen.randrange(5):
            case 0:
                collection.replace_one({"_id": number}, {"v": chosen.random()}, upsert=True)
            case 1:
                collection.delete_one({"_id": number})
            case 2:
                collection.update_one({"_id": number}, {"$push": {"list": number}, "$unset": {"v": 1}}, upsert=True)
            case 3:
                collection.update_many({"_id": {"$gt": number}}, {"$inc": {"n": 1}})
            case 4:
                collection.update_one({"_id": number}, [{"$set": {"w": {"a": "$n", "b": 1}}}], upsert=True)


def test_as_of_equals_what_was_recorded(replica_set: ReplicaSet, tmp_path: Path) -> None:
    client: Any = MongoClient(replica_set.uri)
    collection = client["tables_as_of"]["things"]
    collection.drop()
    collection.insert_many([{"_id": number, "n": number} for number in range(20)])
    chosen = random.Random(3)
    settings = TableSettings(tmp_path / "t", (TableRule("tables_as_of.things"),))
    recorded: list[tuple[ClusterTime, dict[bytes, bytes]]] = []
    with Wire.to(replica_set.uri) as wire:
        before = note(wire, "before")
        for batch in range(4):
            # From the third one on, rows are marked as deleted.
            settings = replace(settings, merge_on_read=batch > 1)
            with TablesWriter(replica_set.uri, settings) as writer:
                writer.run_to_present(note(wire, "batch"))
            for _ in range(5):
                change(collection, chosen)
                recorded.append((note(wire, "recorded"), in_collection(collection)))
            if batch == 2:
                collection.drop()
                recorded.append((note(wire, "dropped"), {}))
        with TablesWriter(replica_set.uri, settings) as writer:
            end = writer.run_to_present(note(wire, "end"))
    with pytest.raises(UsageError, match="inside a micro-batch"):
        as_of(tmp_path / "t", "tables_as_of.things", recorded[0][0])
    replayed = 0
    Recorder(client, None, tmp_path / "archive", ArchivePolicy(once=True, images=False)).run()
    for time, truth in recorded:
        for source in ({"uri": replica_set.uri}, {"archive": tmp_path / "archive"}):
            found = as_of(tmp_path / "t", "tables_as_of.things", time, **source)  # type: ignore[arg-type]
            assert rows_of(found.rows) == truth, time
            replayed += found.replayed > 0
    assert replayed >= 20
    assert rows_of(as_of(tmp_path / "t", "tables_as_of.things", end).rows) == in_collection(collection)
    with pytest.raises(UsageError, match="does not reach back to"):
        as_of(tmp_path / "t", "tables_as_of.things", ClusterTime(before - (100 << 32)))
    # By the deployment's clock: other tests have set the shared one forward by hours.
    later = datetime.fromtimestamp(end >> 32, UTC) + timedelta(hours=1)
    with pytest.raises(UsageError, match="reaches only to"):
        as_of(tmp_path / "t", "tables_as_of.things", later)
    with pytest.raises(UsageError, match="no time zone"):
        as_of(tmp_path / "t", "tables_as_of.things", datetime.now())


@contextmanager
def busy(uri: str) -> Iterator[None]:
    """The deployment's clock moves on all the time."""
    ended = threading.Event()

    def write() -> None:
        with MongoClient[Any](uri) as client:
            while not ended.wait(0.002):
                client["tables_unfollowed"]["unselected"].insert_one({})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_nothing_is_said_of_a_time_when_nobody_followed_the_collection(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """Between two versions of a table, its state was lost, or there was no rule for its collection. The later version
    claimed that the earlier one was valid until it began, so a reader of a time in between got old rows. (No test had
    asked for a time at which there was no writer.)"""
    client: Any = MongoClient(replica_set.uri)
    database = client["tables_unfollowed"]
    for name in ("lost", "left", "kept"):
        database[name].drop()
        database[name].insert_one({"_id": 1, "n": 0})
    root = tmp_path / "t"

    def write(*names: str) -> ClusterTime:
        rules = tuple(TableRule(f"tables_unfollowed.{name}") for name in names)
        with TablesWriter(replica_set.uri, TableSettings(root, rules)) as writer:
            return writer.run_to_present(note(wire, "written"))

    def changed(value: int) -> tuple[ClusterTime, dict[bytes, bytes]]:
        database["lost"].update_one({"_id": 1}, {"$set": {"n": value}})
        database["left"].update_one({"_id": 1}, {"$set": {"n": value}})
        return note(wire, "changed"), in_collection(database["left"])

    def held(name: str, time: ClusterTime) -> dict[bytes, bytes]:
        return rows_of(as_of(root, f"tables_unfollowed.{name}", time, uri=replica_set.uri).rows)

    with Wire.to(replica_set.uri) as wire, busy(replica_set.uri):
        first = write("lost", "left", "kept"), in_collection(database["left"])
        second = changed(1)
        write("lost", "kept")
        third = changed(2)
        assert held("lost", second[0]) == second[1]
        for time, _ in (second, third):
            with pytest.raises(UsageError, match=r"left reaches only to .*, but .*The collection is not followed"):
                held("left", time)
        assert held("left", first[0]) == first[1]
        shutil.rmtree(root / "_tailrace" / "state")
        write("lost", "left", "kept")
        fourth = changed(3)
        write("lost", "left", "kept")
        for name in ("lost", "left"):
            for time, truth in (first, second, third, fourth):
                assert held(name, time) == truth, (name, time)
        write("lost", "kept")
        fifth = changed(4)
        write("lost", "kept")
        write("lost", "left", "kept")
        assert held("left", fifth[0]) == fifth[1]


VERSIONS = [
    None,
    pytest.param("5.0.4", marks=pytest.mark.slow),
    pytest.param("4.4.2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_as_of_is_exact_around_renames(request: pytest.FixtureRequest, tmp_path: Path, version: str | None) -> None:
    """This was refused if the name had gone to another collection within the micro-batch, although the other one has a
    table, or the oplog shows how it was made. (Earlier tests had not asked for renamed collections.)"""
    own = None if version is None else request.getfixturevalue("start_replica_set")(version=version)
    uri = (own or request.getfixturevalue("replica_set")).uri
    client: Any = MongoClient(uri)
    database, chosen = client["tables_renamed"], random.Random(17)
    client.drop_database("tables_renamed")
    names = ("a", "b", "c", "made")
    settings = TableSettings(tmp_path / "t", (TableRule("tables_renamed.*"),))
    recorded: list[tuple[ClusterTime, dict[str, dict[bytes, bytes]]]] = []

    def turn(wire: Wire) -> None:
        source, target = chosen.sample(names[:3], 2)
        present = database.list_collection_names()
        match chosen.randrange(5):
            case 0 | 1 if source in present:
                database[source].rename(target, dropTarget=True)
            case 2 if source in present:
                database[source].aggregate([{"$set": {"out": chosen.random()}}, {"$out": "made"}])
            case 3 if source in present:
                database[source].drop()
            case _:
                change(database[source], chosen)
        change(database[chosen.choice(names[:3])], chosen)
        recorded.append((note(wire, "recorded"), {name: in_collection(database[name]) for name in names}))

    with client, Wire.to(uri) as wire:
        for name in names:
            database[name].insert_many([{"_id": number, "of": name} for number in range(5)])
        for _ in range(4):
            with TablesWriter(uri, settings) as writer:
                writer.run_to_present(note(wire, "batch"))
            for _ in range(6):
                turn(wire)
        with TablesWriter(uri, settings) as writer:
            writer.run_to_present(note(wire, "end"))
        for time, truth in recorded:
            for name in names:
                found = as_of(tmp_path / "t", f"tables_renamed.{name}", time, uri=uri)
                assert rows_of(found.rows) == truth[name], (name, time)
        client.drop_database("tables_renamed")


def test_as_of_is_exact_between_the_versions_that_were_kept(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """What a removed version would have said must not be guessed. In earlier tests every version existed."""
    client: Any = MongoClient(replica_set.uri)
    collection = client["tables_thinned"]["things"]
    collection.drop()
    chosen = random.Random(5)
    root = tmp_path / "t"
    recorded: list[tuple[ClusterTime, dict[bytes, bytes]]] = []
    settings = TableSettings(root, (TableRule(collection.full_name),))
    with Wire.to(replica_set.uri) as wire, TablesWriter(replica_set.uri, settings) as writer:
        for _ in range(12):
            change(collection, chosen)
            recorded.append((writer.run_to_present(note(wire, "recorded")), in_collection(collection)))
    folder = root / folder_of(collection.full_name)
    now = age(folder)
    table = CollectionTable(folder, collection.full_name)
    files = [file.name for file in table.files()]
    assert versions.expire(folder, Keeping(grace_h=1 / 60, retention_h=1, versions=2), files, now)
    replayed = refused = 0
    for time, truth in recorded:
        found = as_of(root, collection.full_name, time, uri=replica_set.uri)
        assert rows_of(found.rows) == truth, time
        replayed += found.replayed > 0
        try:
            assert rows_of(as_of(root, collection.full_name, time).rows) == truth
        except UsageError as error:
            refused += "inside a micro-batch" in error.message
    assert replayed >= 4
    assert refused >= replayed
    client.drop_database("tables_thinned")


def test_as_of_on_the_command_line(replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # No test had run the command, nor asked for a column that became wider, a document in quarantine, or removed files.
    client: Any = MongoClient(replica_set.uri)
    collection, strict = client["tables_as_of_cli"]["things"], client["tables_as_of_cli"]["strict"]
    root = tmp_path / "t"
    rules = (
        TableRule("tables_as_of_cli.strict", TableSchema.declared({"n": "int"})),
        TableRule("tables_as_of_cli.*"),
    )

    def brought_up() -> None:
        with TablesWriter(replica_set.uri, TableSettings(root, rules)) as writer:
            writer.run_to_present()

    def at(time: Any, namespace: str = collection.full_name, *more: str) -> tuple[int, str, str]:
        status = main(["tables", "as-of", str(root), namespace, f"{time.time},{time.inc}", *more])
        return status, *capsys.readouterr()

    with client, client.start_session() as session:
        client.drop_database("tables_as_of_cli")
        strict.insert_one({"_id": 1, "n": "one"})
        collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": 2}])
        brought_up()
        collection.update_one({"_id": 2}, {"$set": {"n": "two"}}, session=session)
        strict.update_one({"_id": 1}, {"$set": {"m": 1}}, session=session)
        inside = session.operation_time
        collection.delete_one({"_id": 1})
        strict.update_one({"_id": 1}, {"$set": {"n": 1}})
        brought_up()
        assert at(inside)[0] == 1
        status, out, err = at(inside, collection.full_name, "--uri", replica_set.uri)
        assert (status, out.splitlines()) == (0, ['{"_id": 1, "n": 1}', '{"_id": 2, "n": "two"}'])
        assert "2 rows (version 0, and 1 changes of the oplog)" in err
        status, _, err = at(inside, strict.full_name, "--uri", replica_set.uri)
        assert (status, "in quarantine is not in the versions of its table" in err) == (1, True)
        out_file = str(tmp_path / "rows.parquet")
        assert at(inside, collection.full_name, "--uri", replica_set.uri, "--out", out_file)[:2] == (0, "")
        assert pq.read_table(out_file).column("n").to_pylist() == ["1", '"two"']
        assert main(["tables", "rebuild", str(root), collection.full_name]) == 0
        brought_up()
        assert main(["tables", "expire", str(root), "--keep", "0s"]) == 0
        capsys.readouterr()
        status, _, err = at(inside, collection.full_name, "--uri", replica_set.uri)
        assert (status, "tables.retention" in err) == (1, True)
        client.drop_database("tables_as_of_cli")
