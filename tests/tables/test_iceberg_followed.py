"""Iceberg snapshots of tables that follow a server: under SIGKILL, with a catalogue that goes away, and with erased
documents."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.lake.iceberg import catalog as iceberg_catalog
from tailrace.lake.iceberg.catalog import CatalogError
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests import commands
from tests.tables.equality import in_collection
from tests.tables.iceberg import catalog_uri, compared, iceberg_table, newest_is_shown, sql_settings
from tests.tables.rest_catalog import TOKEN, rest_catalog
from tests.tables.test_writer import brought_up, collection, work
from tests.traces import traces

__all__ = ["collection"]
pytestmark = pytest.mark.mongod

_SERVER: Final = commands.CommandServer("tests.tables.iceberg", "tailrace.lake.tables.writer")
MARKER = "anna-4711@example.com"
_CHILD = """
import os, signal, sys
from pathlib import Path
from tailrace.base import durable
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
uri, root, pattern, catalog, step = sys.argv[1:]
iceberg = IcebergSettings.of(catalog, "catalog")
settings = TableSettings(Path(root), (TableRule(pattern),), every_s=0.0, compact_every=2, iceberg=iceberg)
def die(name):
    if name == step:
        os.kill(os.getpid(), signal.SIGKILL)
with TablesWriter(uri, settings) as writer:
    writer.begin()
    durable.observe_steps(die)
    print("begun", flush=True)
    writer.run()
"""


def shown_tables(root: Path, *patterns: str, iceberg: IcebergSettings | None = None) -> TableSettings:
    rules = tuple(TableRule(pattern) for pattern in patterns)
    return TableSettings(root, rules, every_s=0.0, compact_every=3, iceberg=iceberg or sql_settings(root.parent))


def check(root: Path, collection: Any) -> None:
    """The newest snapshot equals the collection, and each one its version."""
    folder, found = root / folder_of(collection.full_name), iceberg_table(root.parent, collection.full_name)
    compared(folder, found)
    assert newest_is_shown(folder, found)
    rows = found.scan(selected_fields=("_key", "_bson")).to_arrow().to_pylist()
    assert {row["_key"]: row["_bson"] for row in rows} == in_collection(collection)


def steps(writer: TablesWriter) -> None:
    """Go on at a point where the catalogue is asked before anything is written, not at the beginning."""
    while True:
        writer.step(at_once=True)


def test_killed_between_the_commits_of_delta_and_iceberg(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    chosen = random.Random(36)
    root = tmp_path / "t"
    work(collection, chosen, 50)
    brought_up(replica_set.uri, shown_tables(root, collection.full_name))
    for step in ("table.commit", "iceberg.written", "iceberg.shown"):
        given = (replica_set.uri, str(root), collection.full_name, catalog_uri(tmp_path), step)
        child = commands.Piped(*given, code=_CHILD, server=_SERVER)
        assert child.stdout.readline() == b"begun\n"
        work(collection, chosen, 20)
        assert child.wait() == -signal.SIGKILL, step
        child.stdout.close()
        compared(root / folder_of(collection.full_name), iceberg_table(tmp_path, collection.full_name))
    brought_up(replica_set.uri, shown_tables(root, collection.full_name))
    check(root, collection)


def test_collections_that_are_renamed_and_dropped(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    root, other = tmp_path / "t", collection.database["Other.Things"]
    settings = shown_tables(root, f"{collection.database.name}.*")
    collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": "x"}])
    brought_up(replica_set.uri, settings)
    collection.rename("Other.Things")
    other.update_one({"_id": 1}, {"$set": {"n": 2.5}})
    brought_up(replica_set.uri, settings)
    check(root, other)
    check(root, collection)
    assert len(iceberg_table(tmp_path, collection.full_name).scan().to_arrow()) == 0
    other.drop()
    collection.insert_one({"_id": 3})
    brought_up(replica_set.uri, settings)
    check(root, other)
    check(root, collection)


def test_a_catalogue_that_goes_away(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_catalog, "RETRY_S", 0.0)
    root = tmp_path / "t"
    collection.insert_one({"_id": 1})
    with rest_catalog(tmp_path / "catalog.db") as rest:
        iceberg = IcebergSettings.of({"uri": rest.uri, "token": TOKEN}, "iceberg")
        with TablesWriter(replica_set.uri, shown_tables(root, collection.full_name, iceberg=iceberg)) as writer:
            writer.run_to_present()
            check(root, collection)
            collection.insert_one({"_id": 2})
            rest.broken = [503]
            with pytest.raises(CatalogError, match="does not answer"):
                steps(writer)
    assert not newest_is_shown(root / folder_of(collection.full_name), iceberg_table(tmp_path, collection.full_name))
    brought_up(replica_set.uri, shown_tables(root, collection.full_name))
    check(root, collection)


def test_the_command_line(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, name = str(tmp_path / "t"), collection.full_name
    iceberg = ["--iceberg", catalog_uri(tmp_path)]
    write = ["tables", "write", replica_set.uri, root, name, "--once", *iceberg]
    verify = ["tables", "verify", replica_set.uri, root, *iceberg]
    collection.insert_one({"_id": "anna", "name": MARKER})
    assert main(write) == 0
    collection.replace_one({"_id": "anna"}, {"name": "gone"})
    collection.insert_one({"_id": 1})
    assert main(write) == 0
    check(tmp_path / "t", collection)
    assert main(verify) == 0
    assert f"{name}: the Iceberg table has the files of the version that it states" in capsys.readouterr().out
    assert main(["tables", "expire", root, "--keep", "0s"]) != 0
    assert "Iceberg snapshots, which would lose their files" in capsys.readouterr().err
    assert main(["tables", "compact", root, *iceberg]) != 0
    assert "--iceberg belongs to write, verify and expire" in capsys.readouterr().err

    collection.delete_one({"_id": "anna"})
    assert main(write) == 0
    erase = ["erase", "--document", name, '"anna"', "--tables", root, "--json"]
    assert main(erase) == 0
    report = json.loads(capsys.readouterr().out)["stores"][0]
    assert any("Iceberg snapshots" in note for note in report["kept"])
    assert not traces(tmp_path, MARKER.encode())
    found = iceberg_table(tmp_path, name)
    assert found.scan().to_arrow().num_rows == 1
    with pytest.raises(FileNotFoundError):
        found.scan(snapshot_id=found.snapshots()[0].snapshot_id).to_arrow()
    assert main(["tables", "expire", root, "--keep", "0s", *iceberg]) == 0
    assert [version_of(one) for one in iceberg_table(tmp_path, name).snapshots()] == [version_of(found.snapshots()[-1])]
    assert main(verify) == 0

    collection.insert_one({"_id": 2})
    assert main(write) == 0
    assert main(["tables", "compact", root]) == 0
    assert "files became 1" in capsys.readouterr().out
    # The catalogue did not have the version that compact made, and expire failed until a writer had run.
    assert main(["tables", "expire", root, "--keep", "0s", *iceberg]) == 0
    assert iceberg_table(tmp_path, name).scan().to_arrow().num_rows == 2
    next((tmp_path / "t" / folder_of(name)).glob("*.parquet")).unlink()
    assert main(verify) != 0
    assert "the Iceberg table lacks its data file" in capsys.readouterr().out
