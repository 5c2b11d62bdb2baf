"""``tables verify`` and ``tables resync``: what differs is named, and one table is copied again while others go on."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.base.metrics_server import serve_metrics
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SinkError
from tailrace.lake.tables import resync as resync_module
from tailrace.lake.tables.fold import StateMismatchError
from tailrace.lake.tables.holding import STATE
from tailrace.lake.tables.metrics import TablesCollector
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.resync import Resync, leave_request, request_resync, take_requests
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.state import TableState
from tailrace.lake.tables.verification import verify
from tailrace.lake.tables.writer import TablesWriter
from tests import commands
from tests.patience import PATIENCE_S
from tests.snapshot.test_snapshot_sharded import spread_over
from tests.tables.equality import in_collection, in_table
from tests.tables.test_as_of import change
from tests.tables.test_sharded_equality import truth

pytestmark = pytest.mark.mongod


@pytest.fixture
def database(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = request.node.name.split("[")[0][-50:]
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database(name)
        yield client[name]
        client.drop_database(name)


def settings_of(root: Path, database: Any, **options: Any) -> TableSettings:
    rules = (TableRule(f"{database.name}.strict", TableSchema.declared({"n": "int"})), TableRule(f"{database.name}.*"))
    return TableSettings(root, rules, every_s=0.0, **options)


def brought_up(uri: str, root: Path, database: Any) -> None:
    with TablesWriter(uri, settings_of(root, database)) as writer:
        writer.run_to_present()


def spoil(root: Path, *, deletes: bool = True) -> None:
    """Change the state's documents as a fault of ours would, with valid checksums, so that the tables take the changes
    over."""
    state = TableState(root / "_tailrace" / "state")
    for collection in state.collections():
        spoiled = [one for one in state.documents(collection.number) if b"spoil" in one.document]
        with state.writing() as writing:
            for number, one in enumerate(spoiled):
                if number % 2 or not deletes:
                    writing.put(collection.number, one.key, one.time, one.document.replace(b"spoil", b"SPOIL"))
                else:
                    writing.delete(collection.number, one.key)
            writing.wait(collection.number, [one.key for one in spoiled])
    state.close()


def wait_until(holds: Callable[[], bool]) -> None:
    given_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < given_up
        time.sleep(0.02)


@contextmanager
def writing(uri: str, name: str) -> Iterator[None]:
    stop = threading.Event()
    chosen = random.Random(5)

    def work() -> None:
        with MongoClient[Any](uri) as client:
            while not stop.wait(0.03):
                change(client[name]["busy"], chosen)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def following(uri: str, settings: TableSettings) -> Iterator[TablesWriter]:
    with TablesWriter(uri, settings) as writer:
        writer.run_to_present()
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(writer.run)
            try:
                yield writer
            finally:
                writer.stop()
                run.result()


def test_what_differs_is_named_while_a_writer_runs(
    replica_set: ReplicaSet, database: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "t"
    database["things"].insert_many([{"_id": number, "v": "spoil" if number in {3, 4} else "v"} for number in range(50)])
    database["strict"].insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": "two"}])
    database["gone"].insert_one({"_id": 1})
    brought_up(replica_set.uri, root, database)
    database["gone"].drop()
    with writing(replica_set.uri, database.name), following(replica_set.uri, settings_of(root, database)):
        # LMDB opens a state only once in a process, and in this one the writer has it open.
        done = commands.run_text("tables", "verify", replica_set.uri, str(root))
        assert (done.returncode, done.stderr) == (0, "")
        out = done.stdout
        assert f"{database.name}.things: equal at" in out
        assert f"{database.name}.busy: equal at" in out
        assert f"{database.name}.gone: equal at" in out
        assert "2 documents compared, 1 of them in quarantine" in out
        sampled = commands.run_text("tables", "verify", replica_set.uri, str(root), "--sample", "10")
        assert sampled.returncode == 0, sampled.stdout
    spoil(root)
    database["things"].insert_one({"_id": "new"})
    brought_up(replica_set.uri, root, database)
    capsys.readouterr()
    assert main(["tables", "verify", replica_set.uri, str(root), f"{database.name}.things"]) == 1
    out, err = capsys.readouterr()
    assert f"{database.name}.things: _id 3 is missing from the table" in out
    assert f"{database.name}.things: _id 4 is a different document in the table" in out
    assert "2 of 51 documents differ" in out
    assert "1 table differs from what MongoDB holds" in err
    assert main(["tables", "verify", replica_set.uri, str(root), "no.such"]) == 1


def test_a_flipped_bit_of_any_column_is_found(replica_set: ReplicaSet, database: Any, tmp_path: Path) -> None:
    root = tmp_path / "t"
    database["things"].insert_many([{"_id": number, "v": random.Random(number).random()} for number in range(500)])
    brought_up(replica_set.uri, root, database)
    folder = root / folder_of(f"{database.name}.things")
    path = folder / Path(DeltaTable(str(folder)).file_uris()[0]).name
    whole = path.read_bytes()
    chosen = random.Random(3)
    for _ in range(20):
        content = bytearray(whole)
        content[chosen.randrange(4, len(whole) - 8)] ^= 1 << chosen.randrange(8)
        path.write_bytes(content)
        try:
            [report] = verify(root, replica_set.uri, [f"{database.name}.things"])
        except SinkError:
            continue
        rows = None if not report.good else in_table(root, f"{database.name}.things")
        # A changed bit in the file's description that is not needed for reading the rows does no harm.
        assert not report.good or rows == in_collection(database["things"])


def test_one_table_is_copied_again_while_the_others_go_on(
    replica_set: ReplicaSet, database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resync_module, "_KEPT_BYTES", 1)
    may_copy, copies = threading.Event(), Resync._copy_documents

    def copied(self: Resync) -> None:
        may_copy.wait(PATIENCE_S)
        copies(self)

    monkeypatch.setattr(Resync, "_copy_documents", copied)
    root = tmp_path / "t"
    name = f"{database.name}.busy"
    database["things"].insert_many([{"_id": number, "v": "spoil"} for number in range(4)])
    database["busy"].insert_many([{"_id": number, "v": "spoil", "n": 0} for number in range(40)])
    brought_up(replica_set.uri, root, database)
    spoil(root, deletes=False)
    with (
        writing(replica_set.uri, database.name),
        following(replica_set.uri, settings_of(root, database)) as writer,
    ):
        for one in (name, f"{database.name}.things"):
            leave_request(root, one)
        wait_until(lambda: len(writer.resyncing) == 2)
        database["others"].insert_one({"_id": 1})
        wait_until(lambda: in_table(root, f"{database.name}.others") is not None)
        assert len(writer.resyncing) == 2, "the others went on only after the copy"
        may_copy.set()
        wait_until(lambda: not writer.resyncing)
    brought_up(replica_set.uri, root, database)
    for one in ("busy", "things", "others"):
        assert in_table(root, f"{database.name}.{one}") == in_collection(database[one])
    assert all(report.good for report in verify(root, replica_set.uri))


def test_a_change_that_does_not_fit_is_mended_by_copying_again(
    replica_set: ReplicaSet, database: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "t"
    name = f"{database.name}.things"
    database["things"].insert_many([{"_id": number, "v": "spoil", "list": [1]} for number in range(4)])
    brought_up(replica_set.uri, root, database)
    spoil(root)
    database["things"].update_many({}, {"$push": {"list": 2}})
    with pytest.raises(StateMismatchError, match=r"does not fit what the tables' state holds.*tailrace tables resync"):
        brought_up(replica_set.uri, root, database)
    assert main(["tables", "resync", str(root), name]) == 0
    database["things"].rename("named")
    database["things"].insert_one({"_id": "another"})
    brought_up(replica_set.uri, root, database)
    for one in ("things", "named"):
        assert in_table(root, f"{database.name}.{one}") == in_collection(database[one])
    assert main(["tables", "resync", str(root), "no.such"]) == 1
    assert "has no table" in capsys.readouterr().err


def test_a_copy_that_was_cut_short_begins_again(replica_set: ReplicaSet, database: Any, tmp_path: Path) -> None:
    root = tmp_path / "t"
    name = f"{database.name}.things"
    database["things"].insert_many([{"_id": number, "v": "spoil"} for number in range(400)])
    brought_up(replica_set.uri, root, database)
    spoil(root)
    request_resync(root, name)
    with TablesWriter(replica_set.uri, settings_of(root, database, documents_per_second=100)) as writer:
        writer.begin()
        database["things"].insert_one({"_id": "meanwhile"})
        writer.step(at_once=True)
        assert writer.resyncing == [name]
    database["things"].update_one({"_id": 1}, {"$set": {"n": 1}})
    brought_up(replica_set.uri, root, database)
    assert in_table(root, name) == in_collection(database["things"])


def test_a_request_that_was_changed_is_refused(tmp_path: Path) -> None:
    """The name was used unchecked: another table was copied again, or none."""
    (tmp_path / STATE).mkdir()
    leave_request(tmp_path, "shop.orders")
    [path] = take_requests(tmp_path).values()
    path.write_text(path.read_text().replace("orders", "orderz"))
    with pytest.raises(SinkError, match="is damaged") as raised:
        take_requests(tmp_path)
    assert "run tailrace tables resync again" in str(raised.value.hint)
    leave_request(tmp_path, "shop.orders")
    assert take_requests(tmp_path) == {"shop.orders": path}


def test_tables_of_a_cluster(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    router = sharded_cluster.router
    namespace = spread_over(sharded_cluster, "verified", {"region": 1, "_id": 1})
    settings = TableSettings(tmp_path, (TableRule("verified.*"),), every_s=0.0)
    try:
        for number in range(60):
            router.insert_one(
                namespace, {"region": "agntxz"[number % 6], "_id": number, "v": "spoil"[: 5 - number % 2]}
            )
        router.insert_one("verified.plain", {"_id": 1})
        with TablesWriter(sharded_cluster.uri, settings) as writer:
            writer.run_to_present()
        router.update_one("verified.plain", {"_id": 1}, {"$set": {"later": 1}})
        assert [one.documents for one in verify(tmp_path, sharded_cluster.uri)] == [60, 1]
        assert all(one.good for one in verify(tmp_path, sharded_cluster.uri))
        assert all(one.good for one in verify(tmp_path, sharded_cluster.uri, sample=5))
        spoil(tmp_path)
        router.insert_one(namespace, {"region": "a", "_id": "new"})
        with TablesWriter(sharded_cluster.uri, settings) as writer:
            writer.run_to_present()
        [report] = verify(tmp_path, sharded_cluster.uri, [namespace])
        assert len(report.differences) == 30
        request_resync(tmp_path, namespace)
        with TablesWriter(sharded_cluster.uri, settings) as writer:
            writer.run_to_present()
        assert in_table(tmp_path, namespace) == truth(sharded_cluster, namespace)
    finally:
        router.drop_database("verified")


def test_nothing_is_said_to_be_equal_where_nothing_matches(
    replica_set: ReplicaSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tables", "write", replica_set.uri, str(tmp_path), "no_such_database.*", "--once"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"tailrace: writing tables of no_such_database.* into {tmp_path}",
        "No collection matches no_such_database.*: there is no table yet",
    ]
    assert main(["tables", "status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "There are no tables: no collection matches\n"


def test_prometheus_reads_the_writers_statistics(replica_set: ReplicaSet, database: Any, tmp_path: Path) -> None:
    database["things"].insert_one({"_id": 1})
    with TablesWriter(replica_set.uri, settings_of(tmp_path, database)) as writer:
        writer.run_to_present()
        with serve_metrics(TablesCollector(writer), "127.0.0.1", 0) as url, urllib.request.urlopen(url) as reply:
            text = reply.read().decode()
    assert "tailrace_tables_documents_copied_total 1.0" in text
    assert "tailrace_tables_tables 1.0" in text
    assert "tailrace_tables_lag_seconds" in text
