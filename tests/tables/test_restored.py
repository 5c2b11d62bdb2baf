"""Tables and their state, each restored from a backup, damaged, swapped or lost: equal afterwards, or refused.

In every earlier test of tables both were as the test had left them. So nobody had seen that a restored table stayed
wrong.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import EntryMark
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, OtherHistoryError, SinkError
from tailrace.lake.store import delta
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.source.mongod import MongodSource
from tests.amounts import amount
from tests.differential.test_source_live import wait_until_truncated
from tests.tables.equality import in_collection, in_table
from tests.tables.test_as_of import rows_of
from tests.unit.test_tables_state_damage import of_records

pytestmark = pytest.mark.mongod


@pytest.fixture
def collection(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.node.name.split("[")[0][-50:]
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database(name)
        yield client[name]["things"]
        client.drop_database(name)


def settings_of(root: Path, collection: Any) -> TableSettings:
    return TableSettings(root, (TableRule(f"{collection.database.name}.*"),), every_s=0.0, compact_every=0)


def brought_up(uri: str, root: Path, collection: Any) -> ClusterTime:
    with TablesWriter(uri, settings_of(root, collection)) as writer:
        return writer.run_to_present()


def made(uri: str, root: Path, collection: Any) -> Path:
    """Three versions of a table, the second one kept beside it. Returns its folder."""
    for turn in range(3):
        collection.insert_many([{"_id": turn * 10 + number, "turn": turn} for number in range(10)])
        collection.update_one({"_id": turn}, {"$set": {"n": turn}})
        brought_up(uri, root, collection)
        if turn == 1:
            shutil.copytree(root, root.with_name("backup"))
    return root / folder_of(collection.full_name)


def put_back(folder: Path, backup: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(backup, folder)


def newest_log(folder: Path) -> Path:
    return delta.commit_path(folder, DeltaTable(str(folder)).version())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(bytes(content))


def data_file(folder: Path) -> Path:
    return folder / Path(DeltaTable(str(folder)).file_uris()[0]).name


def change_newest(folder: Path) -> None:
    newest_log(folder).write_bytes(newest_log(folder).read_bytes() + b"\n")


HARM: dict[str, Callable[[Path, Path], object]] = {
    "from a backup": put_back,
    "its newest log file lost": lambda folder, backup: newest_log(folder).unlink(),
    "its newest log file changed": lambda folder, backup: change_newest(folder),
    "deleted": lambda folder, backup: shutil.rmtree(folder),
    "a data file missing": lambda folder, backup: data_file(folder).unlink(),
    "a data file cut short": lambda folder, backup: os.truncate(data_file(folder), 100),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_table_that_is_not_as_the_state_knows_it_is_written_anew(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    root = tmp_path / "t"
    folder = made(replica_set.uri, root, collection)
    backup = root.with_name("backup") / folder.name
    HARM[harm](folder, backup)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert "is rewritten" in caplog.text
    caplog.clear()
    with TablesWriter(replica_set.uri, settings_of(root, collection)) as writer:
        writer.begin()
        HARM[harm](folder, backup)
        collection.update_many({}, {"$set": {"while": "running"}})
        writer.step(at_once=True)
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert "is rewritten" in caplog.text


def test_a_flipped_bit_is_found_where_the_file_is_read(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "t"
    folder = made(replica_set.uri, root, collection)
    file = data_file(folder)
    flip(file, file.stat().st_size // 3)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 1
    collection.update_many({}, {"$set": {"all": True}})
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert "is rewritten" in caplog.text


def test_a_table_of_another_collection_or_directory_is_refused(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    root, other = tmp_path / "t", collection.database["others"]
    other.insert_one({"_id": "other"})
    folder = made(replica_set.uri, root, collection)
    brought_up(replica_set.uri, tmp_path / "second", collection)
    put_back(folder, root / folder_of(other.full_name))
    with pytest.raises(
        SinkError, match=rf"holds the table of {other.full_name}, not that of .*Remove {folder}: the next"
    ):
        brought_up(replica_set.uri, root, collection)
    put_back(folder, tmp_path / "second" / folder.name)
    with pytest.raises(SinkError, match=r"holds a table of .* that is not the one that its state knows.*or remove"):
        brought_up(replica_set.uri, root, collection)
    shutil.rmtree(folder)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_a_log_that_nobody_can_read_is_refused_with_the_way_out(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    root = tmp_path / "t"
    folder = made(replica_set.uri, root, collection)
    delta.commit_path(folder, 0).unlink()
    with pytest.raises(SinkError, match=f"cannot be read.*Remove {folder}: the next run writes the table"):
        brought_up(replica_set.uri, root, collection)
    shutil.rmtree(folder)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_a_state_that_is_older_than_its_tables_goes_on(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tables' earlier answers stay what they were, and those for the time between are exact."""
    root = tmp_path / "t"
    client = collection.database.client
    folder = made(replica_set.uri, root, collection)
    between = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"])
    held = in_collection(collection)
    brought_up(replica_set.uri, root, collection)
    put_back(root / "_tailrace", root.with_name("backup") / "_tailrace")
    collection.delete_one({"_id": 5})
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert "is newer than its state" in caplog.text
    times = [one.time for one in stated(folder)]
    assert times == sorted(times, reverse=True)
    assert rows_of(as_of(root, collection.full_name, between, uri=replica_set.uri).rows) == held
    # And the table is a copy that is older than that state.
    put_back(folder, root.with_name("backup") / folder.name)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_the_state_of_other_tables_is_refused(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    root = tmp_path / "t"
    made(replica_set.uri, root, collection)
    brought_up(replica_set.uri, tmp_path / "second", collection)
    put_back(root / "_tailrace", tmp_path / "second" / "_tailrace")
    with pytest.raises(SinkError, match=r"a table of .* that is not the one that its state knows"):
        brought_up(replica_set.uri, root, collection)


def test_tables_with_their_state_from_a_backup_go_on(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "t"
    made(replica_set.uri, root, collection)
    shutil.rmtree(root)
    shutil.copytree(root.with_name("backup"), root)
    collection.delete_one({"_id": 5})
    caplog.clear()
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)
    assert "rewritten" not in caplog.text
    assert "copied again" not in caplog.text


def test_tables_with_their_state_that_are_older_than_the_oplog_are_refused(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    replica_set = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    root = tmp_path / "t"
    with MongoClient[Any](replica_set.uri) as client, closing(MongodSource(replica_set.uri)) as source:
        collection = client["truncated"]["things"]
        made(replica_set.uri, root, collection)
        wait_until_truncated(source, source.newest())
        before = in_table(root, collection.full_name)
        collection.insert_one({"_id": "later"})
        with pytest.raises(ChangeStreamHistoryLost, match=r"UTC \(\d+,\d+\).*start again, give another dir") as lost:
            brought_up(replica_set.uri, root, collection)
        assert "Timestamp(" not in str(lost.value)
        assert in_table(root, collection.full_name) == before


@pytest.mark.parametrize("seed", range(amount(1, 4)))
def test_a_bit_of_the_state_is_without_effect_or_refused(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, seed: int
) -> None:
    """Documents, metadata, and rows that the table does not have yet because of a crash."""
    rng = random.Random(seed)
    root, copy, refused = tmp_path / "t", tmp_path / "copy" / "t", 0
    folder = made(replica_set.uri, root, collection)
    collection.update_many({}, {"$set": {"waits": True}})
    collection.delete_many({"_id": {"$gt": 25}})
    with dying_at("tables.state"), pytest.raises(KeyboardInterrupt):
        brought_up(replica_set.uri, root, collection)
    collection.update_many({"_id": {"$lt": 20}}, {"$inc": {"n": 1}})
    collection.delete_many({"_id": {"$lt": 3}})
    truth = in_collection(collection)
    whole = (root / "_tailrace" / "state" / "data.mdb").read_bytes()
    places = list(of_records(whole))
    for _ in range(amount(15, 60)):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root, copy)
        content = bytearray(whole)
        content[rng.choice(rng.choice(places))] ^= 1 << rng.randrange(8)
        (copy / "_tailrace" / "state" / "data.mdb").write_bytes(content)
        try:
            brought_up(replica_set.uri, copy, collection)
        except SinkError as error:
            assert "state is damaged: " in error.message  # noqa: PT017  what is found is counted
            refused += 1
            shutil.rmtree(copy / "_tailrace" / "state")
            brought_up(replica_set.uri, copy, collection)
        assert in_table(copy, collection.full_name) == truth
    assert refused
    assert folder.name == folder_of(collection.full_name)


def test_a_collection_with_a_damaged_document_is_copied_again_when_it_is_asked_for(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    root = tmp_path / "t"
    collection.insert_one({"_id": "damaged", "text": "what was written"})
    made(replica_set.uri, root, collection)
    path = root / "_tailrace" / "state" / "data.mdb"
    path.write_bytes(path.read_bytes().replace(b"what was written", b"what was changed"))
    collection.update_one({"_id": "damaged"}, {"$set": {"n": 1}})
    name = collection.full_name
    with pytest.raises(SinkError, match=f"state is damaged: a document of {name} in it .*`tailrace tables resync`"):
        brought_up(replica_set.uri, root, collection)
    assert main(["tables", "resync", str(root), name]) == 0
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, name) == in_collection(collection)


def test_a_table_of_a_collection_that_is_gone_is_emptied_again(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    root = tmp_path / "t"
    folder = made(replica_set.uri, root, collection)
    collection.drop()
    brought_up(replica_set.uri, root, collection)
    put_back(folder, root.with_name("backup") / folder.name)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == {}
    shutil.rmtree(folder)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) is None


@contextmanager
def dying_at(step: str) -> Iterator[None]:
    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        yield
    finally:
        durable.observe_steps(None)


@pytest.mark.parametrize("step", ["table.commit", "tables.done"])
def test_a_crash_while_a_table_is_written_anew(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, step: str
) -> None:
    root = tmp_path / "t"
    folder = made(replica_set.uri, root, collection)
    put_back(folder, root.with_name("backup") / folder.name)

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            brought_up(replica_set.uri, root, collection)
    finally:
        durable.observe_steps(None)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)


def test_two_writers_whose_lock_was_moved_away(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    root = tmp_path / "t"
    made(replica_set.uri, root, collection)
    with TablesWriter(replica_set.uri, settings_of(root, collection)) as writer:
        writer.run_to_present()
        (root / "_tailrace").rename(tmp_path / "moved")
        brought_up(replica_set.uri, root, collection)
        collection.update_one({"_id": 1}, {"$set": {"by": "the first"}})
        with pytest.raises(SinkError, match="another program has changed the table"):
            writer.step(at_once=True)
    brought_up(replica_set.uri, root, collection)
    assert in_table(root, collection.full_name) == in_collection(collection)


# -- other histories ------------------------------------------------------------------------------------------------


def files_of(root: Path) -> dict[str, bytes]:
    """Everything below ``root``, but for LMDB's lock file, which readers write too."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock.mdb"
    }


def test_another_deployment_is_refused_before_anything_is_written(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], collection: Any, tmp_path: Path
) -> None:
    """A's rows stayed beside those that B wrote."""
    root = tmp_path / "t"
    made(replica_set.uri, root, collection)
    other = start_replica_set()
    with MongoClient[Any](other.uri) as client:
        client[collection.database.name]["things"].insert_one({"_id": "other"})
    before = files_of(root)
    with pytest.raises(
        OtherHistoryError, match=r"the tables in .* another deployment: the id of the replica set rs0 was"
    ):
        brought_up(other.uri, root, collection)
    assert files_of(root) == before
    # The state is gone, but the tables tell whose they are.
    shutil.rmtree(root / "_tailrace")
    with pytest.raises(OtherHistoryError, match="is of another deployment"):
        brought_up(other.uri, root, collection)


def test_a_first_copy_of_another_deployment_is_refused(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], collection: Any, tmp_path: Path
) -> None:
    collection.insert_many([{"_id": number} for number in range(300)])

    def die(name: str) -> None:
        if name == "tables.copied":
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        with pytest.raises(KeyboardInterrupt):
            brought_up(replica_set.uri, tmp_path / "t", collection)
    finally:
        durable.observe_steps(None)
    with pytest.raises(OtherHistoryError, match="another deployment"):
        brought_up(start_replica_set().uri, tmp_path / "t", collection)
    brought_up(replica_set.uri, tmp_path / "t", collection)
    assert in_table(tmp_path / "t", collection.full_name) == in_collection(collection)


@pytest.mark.parametrize(
    "version",
    ["6.0.27", pytest.param("5.0.4", marks=pytest.mark.slow), pytest.param("4.4.2", marks=pytest.mark.slow)],
)
def test_a_deployment_that_was_restored_from_an_older_backup_is_refused(tmp_path: Path, version: str) -> None:
    """Updates that it had lost stayed in the tables: if it has not reached the same time again, if it has, and while a
    writer is running."""
    data = tmp_path / "data"
    with ReplicaSet(1, version=version, data_dir=data) as running, MongoClient[Any](running.uri) as client:
        client["restored"]["things"].insert_one({"_id": 1})
        running.stop(0)
        shutil.copytree(data, tmp_path / "backup")
        running.restart(0)
        client["restored"]["things"].update_one({"_id": 1}, {"$set": {"undone": True}})
        collection = client["restored"]["things"]
        direct = f"mongodb://{running.members[0].host}/?directConnection=true"
        brought_up(running.uri, tmp_path / "t", collection)
        before = files_of(tmp_path / "t")
        with TablesWriter(direct, settings_of(tmp_path / "t", collection)) as writer:
            writer.begin()
            running.stop(0)
            for path in (tmp_path / "backup").glob("member*"):
                put_back(data / path.name, path)
            running.restart(0)
            with MongoClient[Any](direct) as again:
                again["restored"]["things"].insert_one({"_id": 2})
            with pytest.raises(OtherHistoryError, match=r"(entry|oplog of rs0)"):
                writer.run_to_present()
        with pytest.raises(OtherHistoryError, match=r"another history|older backup"):
            brought_up(direct, tmp_path / "t", collection)
        after = files_of(tmp_path / "t")
        assert {name: one for name, one in after.items() if "_tailrace" not in name} == {
            name: one for name, one in before.items() if "_tailrace" not in name
        }


def test_a_first_copy_is_not_ended_on_a_set_that_was_restored_from_a_backup_from_its_middle(tmp_path: Path) -> None:
    """The copy knew only an entry from its beginning, which such a backup has too: what had been copied since stayed in
    the tables. Copies had been interrupted and deployments restored, but not one in the middle of the other."""
    data, backup, root = tmp_path / "data", tmp_path / "backup", tmp_path / "t"

    def die(name: str) -> None:
        if name == "tables.copied":
            raise KeyboardInterrupt

    with ReplicaSet(1, data_dir=data) as running, MongoClient[Any](running.uri) as client:
        for name in ("first", "second", "things"):
            client["middle"][name].insert_one({"_id": 1})
        for is_undone in (False, True):
            durable.observe_steps(die)
            try:
                with pytest.raises(KeyboardInterrupt):
                    brought_up(running.uri, root, client["middle"]["things"])
            finally:
                durable.observe_steps(None)
            running.stop(0)
            if not is_undone:
                shutil.copytree(data, backup)
                running.restart(0)
                client["middle"]["second"].insert_one({"_id": "undone"})
        for path in backup.glob("member*"):
            put_back(data / path.name, path)
        running.restart(0)
        client["middle"]["things"].insert_one({"_id": "after"})
        with pytest.raises(OtherHistoryError, match=r"another history|older backup"):
            brought_up(running.uri, root, client["middle"]["things"])


# -- answers as of a time -------------------------------------------------------------------------------------------


def test_as_of_refuses_a_table_that_was_set_back_and_an_archive_of_another_history(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], collection: Any, tmp_path: Path
) -> None:
    root = tmp_path / "t"
    client = collection.database.client
    folder = made(replica_set.uri, root, collection)
    collection.insert_one({"_id": "between"})
    between = ClusterTime.from_timestamp(client.admin.command("ping")["operationTime"])
    collection.insert_one({"_id": "later"})
    brought_up(replica_set.uri, root, collection)
    other = start_replica_set()
    with MongoClient[Any](other.uri) as there:
        there["x"]["y"].insert_one({})
        Recorder(there, None, tmp_path / "other", ArchivePolicy(once=True, images=False)).run()
    with pytest.raises(OtherHistoryError, match="another deployment"):
        as_of(root, collection.full_name, between, uri=other.uri)
    # An archive without an entry at any of our times does not tell; one with other entries does.
    Recorder(client, None, tmp_path / "own", ArchivePolicy(once=True, images=False)).run()
    assert as_of(root, collection.full_name, between, archive=tmp_path / "own").replayed == 1
    real = EntryMark.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EntryMark, "of", staticmethod(lambda time, entry: real(time, entry + b"another")))
        with pytest.raises(OtherHistoryError, match=r"a different history from the tables: at .* has another entry"):
            as_of(root, collection.full_name, between, archive=tmp_path / "own")
    put_back(folder, root.with_name("backup") / folder.name)
    with pytest.raises(SinkError, match="does not match its state"):
        as_of(root, collection.full_name, between, uri=replica_set.uri)
