"""Deleted documents, erased from everything that tables keep of the past: no byte of them is left below the
directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.holding import lock
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.state import TableState
from tailrace.lake.tables.writer import TablesWriter
from tests.tables.equality import in_collection, in_table
from tests.traces import traces

pytestmark = pytest.mark.mongod

MARKER = "anna-4711@example.com"


@pytest.fixture(scope="module")
def shop(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database("tables_erase")
        yield client["tables_erase"]
        client.drop_database("tables_erase")


def settings_of(root: Path) -> TableSettings:
    schema = TableSchema.declared({"name": "string", "n": "int"})
    rule = TableRule("tables_erase.people", schema=schema, z_order=("name",))
    rules = (rule, TableRule("tables_erase.*"))
    return TableSettings(root, rules, every_s=0.0, compact_every=0, feed_h=1.0)


def brought_up(uri: str, root: Path) -> None:
    with TablesWriter(uri, settings_of(root)) as writer:
        writer.run_to_present()


@pytest.fixture(scope="module")
def kept(replica_set: ReplicaSet, shop: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables that hold Anna's documents in every place where they can: older versions, the feed, the log's bounds, the
    quarantine, the state. At the source they are deleted, and the tables have not caught up yet."""
    root = tmp_path_factory.mktemp("kept") / "tables"
    shop.people.insert_many([{"_id": number, "name": f"p{number}", "n": number} for number in range(8)])
    shop.people.insert_one({"_id": "anna", "name": MARKER, "n": 1, "more": "x" * 6_000 + MARKER})
    shop.orders.insert_many([{"_id": 1, "of": MARKER}, {"_id": 2, "of": "somebody"}])
    brought_up(replica_set.uri, root)
    shop.people.update_one({"_id": "anna"}, {"$set": {"n": f"no number: {MARKER}"}})
    shop.people.update_one({"_id": 3}, {"$set": {"n": "no number"}})
    shop.orders.update_one({"_id": 1}, {"$set": {"x": 1}})
    brought_up(replica_set.uri, root)
    assert shop.people.delete_one({"_id": "anna"}).deleted_count == shop.orders.delete_one({"_id": 1}).deleted_count
    return root


def erase(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    which = ["--document", "tables_erase.people", '"anna"', "--document", "tables_erase.orders", "1"]
    status = main(["erase", *which, "--tables", str(root), "--json", *more])
    return status, json.loads(capsys.readouterr().out)["stores"][0]


def contents(root: Path) -> dict[str, bytes]:
    """All files, except those that reading may touch."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name not in {"lock", "lock.mdb", "closed"})
    return {str(path): path.read_bytes() for path in files}


def check_equal(root: Path, shop: Any) -> None:
    assert in_table(root, "tables_erase.orders") == in_collection(shop.orders)
    table, truth = in_table(root, "tables_erase.people"), in_collection(shop.people)
    assert table is not None
    assert len(truth.keys() - table.keys()) == 1, "the one in quarantine"
    assert all(truth[key] == document for key, document in table.items())


def test_what_is_gone_at_the_source_leaves_no_byte(
    replica_set: ReplicaSet, shop: Any, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "tables"
    shutil.copytree(kept, root)
    before = contents(root)
    status, found = erase(root, capsys)
    assert (status, found["erased"], contents(root)) == (1, 0, before)
    assert "still in the table of tables_erase.people" in found["left"][0]
    brought_up(replica_set.uri, root)
    before = contents(root)
    places = {name.split("/")[1] for name in traces(root, MARKER.encode())}
    assert len(traces(root / "_tailrace", MARKER.encode())) == 1, "LMDB leaves deleted records where they were"
    assert any("_delta_log" in name and name.endswith(".json") for name in traces(root, MARKER.encode())), "bounds"
    assert "_change_data" in places
    held = lock(root)
    assert "another process writes the tables" in erase(root, capsys)[1]["left"][0]
    durable.os.close(held)
    # What killed writers leave: a file that was begun, and a copy of the log for a checkpoint.
    folder = root / folder_of("tables_erase.people")
    (folder / f".{'0' * 32}.parquet").write_bytes(MARKER.encode())
    shutil.copytree(folder / "_delta_log", folder / "_checkpoint" / "_delta_log")
    (folder / "_checkpoint" / "_delta_log" / "x.checkpoint.parquet").write_bytes(MARKER.encode())
    before = contents(root)
    status, found = erase(root, capsys, "--dry-run")
    assert (status, found["erased"], contents(root)) == (1, 0, before)
    assert found["found"].keys() == {"rows of earlier versions", "rows of the change feed", "rows of the quarantine"}
    counted = sum(found["found"].values())
    status, found = erase(root, capsys)
    assert (status, found["erased"], found["left"]) == (0, counted, [])
    assert traces(root, MARKER.encode()) == []
    check_equal(root, shop)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 0
    capsys.readouterr()
    assert erase(root, capsys)[1]["found"] == {}
    # What is not the document's is still there, and the writer goes on.
    assert len(list((root / folder_of("tables_erase.orders") / "_delta_log").glob("*.json"))) == 3
    shop.people.update_one({"_id": 3}, {"$set": {"n": "still none"}})
    brought_up(replica_set.uri, root)
    check_equal(root, shop)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 0


def test_a_row_that_was_marked_as_gone_leaves_no_byte(
    replica_set: ReplicaSet, shop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Its file belongs to the newest version: in no other test does such a file hold a deleted document.
    root, people = tmp_path / "tables", shop.marked
    people.insert_many([{"_id": number, "name": f"p{number}"} for number in range(50)])
    people.insert_one({"_id": "anna", "name": MARKER})
    rule = TableRule("tables_erase.marked")
    settings = TableSettings(root, (rule,), every_s=0.0, feed_h=1.0, merge_on_read=True)
    for change in (lambda: None, lambda: people.delete_one({"_id": "anna"})):
        change()
        with TablesWriter(replica_set.uri, settings) as writer:
            writer.run_to_present()
    table = CollectionTable(root / folder_of("tables_erase.marked"), "tables_erase.marked")
    assert [file.gone for file in table.files()] == [1]
    which = ["erase", "--document", "tables_erase.marked", '"anna"', "--tables", str(root), "--json"]
    before = contents(root)
    assert main([*which, "--dry-run"]) == 1
    assert contents(root) == before
    assert main(which) == 0
    assert traces(root, MARKER.encode()) == []
    assert in_table(root, "tables_erase.marked") == in_collection(people)
    people.update_one({"_id": 1}, {"$set": {"n": 1}})
    with TablesWriter(replica_set.uri, settings) as writer:
        writer.run_to_present()
        assert writer.progress.anew == 0
    assert in_table(root, "tables_erase.marked") == in_collection(people)
    assert main(["tables", "verify", replica_set.uri, str(root)]) == 0


STEPS = (
    "tables.log_erased", "tables.erased", "tables.quarantine_written", "tables.quarantine_erased", "state.rewritten",
    "state.put_aside", "state.replaced",
)  # fmt: skip


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def followed(replica_set: ReplicaSet, kept: Path) -> Path:
    root = kept.with_name("followed")
    shutil.copytree(kept, root)
    brought_up(replica_set.uri, root)
    return root


def test_what_a_kill_has_left_the_next_run_finishes(
    shop: Any, followed: Path, tmp_path: Path, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "tables"
    shutil.copytree(followed, root)

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        assert main(["erase", "--document", "tables_erase.people", '"anna"', "--tables", str(root)]) == 130
    finally:
        durable.observe_steps(None)
    if step.startswith("state"):  # a writer that comes first finds its state
        brought_up(f"mongodb://{shop.client.address[0]}:{shop.client.address[1]}/?replicaSet=rs0", root)
    capsys.readouterr()
    status, found = erase(root, capsys)
    assert (status, found["left"], traces(root, MARKER.encode())) == (0, [], [])
    assert sorted(path.name for path in (root / "_tailrace").iterdir() if path.is_dir()) == ["state"]
    check_equal(root, shop)
    state = TableState(root / "_tailrace" / "state", readonly=True)
    assert state.position() is not None
    state.close()


def test_what_holds_no_tables_and_what_is_damaged_is_refused(
    followed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no tables" in erase(tmp_path / "empty", capsys)[1]["left"][0]
    assert list((tmp_path / "empty").iterdir()) == []
    root = tmp_path / "tables"
    shutil.copytree(followed, root)
    folder = root / folder_of("tables_erase.orders")
    some = min(path for path in folder.glob("*.parquet"))
    some.write_bytes(some.read_bytes()[:-20])
    before = contents(root)
    status, found = erase(root, capsys)
    assert (status, found["erased"], contents(root)) == (1, 0, before)
    assert "damaged" in found["left"][0]
