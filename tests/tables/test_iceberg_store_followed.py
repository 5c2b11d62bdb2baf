"""Iceberg tables in an object store that follow a server: the command line, SIGKILL at each step, a writer that takes
over, and few rights.

``test_iceberg_in_store.py`` has the same steps without a server.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from tailrace.base.object_place import ObjectPlace
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests import commands
from tests.tables.equality import in_collection
from tests.tables.iceberg import catalog_uri, compared, iceberg_table, newest_is_shown, sql_settings
from tests.tables.object_server import SECRET, ObjectServer
from tests.tables.test_object_store import assert_equal, collection
from tests.tables.test_writer import work

__all__ = ["collection"]
pytestmark = [pytest.mark.mongod, pytest.mark.parametrize("object_store", ["s3"], indirect=True)]

_SERVER: Final = commands.CommandServer("tests.tables.iceberg", "tailrace.lake.tables.writer")
_CHILD = """
import json, os, signal, sys
from pathlib import Path
from tailrace.base import durable
from tailrace.base.object_place import object_place
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
uri, place, state, pattern, catalog, options, step, number = sys.argv[1:]
root = object_place(place, beside=Path(state), options=json.loads(options))
iceberg = IcebergSettings.of(catalog, "catalog")
settings = TableSettings(root, (TableRule(pattern),), every_s=0.0, compact_every=2, iceberg=iceberg)
left = [int(number)]
def die(name):
    left[0] -= name == step
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
with TablesWriter(uri, settings) as writer:
    writer.begin()
    durable.observe_steps(die)
    print("begun", flush=True)
    writer.run()
"""


def shown_tables(root: ObjectPlace, folder: Path, *patterns: str, **more: Any) -> TableSettings:
    rules = tuple(TableRule(pattern) for pattern in patterns)
    return TableSettings(root, rules, **{"every_s": 0.0, "compact_every": 3} | more, iceberg=sql_settings(folder))


def check(root: ObjectPlace, store: ObjectServer, folder: Path, collection: Any) -> None:
    """The newest snapshot equals the collection, and each one its version."""
    place = place_of(root, collection.full_name)
    found = iceberg_table(folder, collection.full_name, **store.for_iceberg())
    compared(place, found)
    assert newest_is_shown(place, found)
    rows = found.scan(selected_fields=("_key", "_bson")).to_arrow().to_pylist()
    assert {row["_key"]: row["_bson"] for row in rows} == in_collection(collection)
    assert_equal(root, collection)


def test_the_command_line(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    root, name = object_store.place(prefix, tmp_path / "state"), collection.full_name
    where = [object_store.uri(prefix), "--state", str(tmp_path / "state")]
    iceberg = ["--iceberg", catalog_uri(tmp_path)]
    write = ["tables", "write", replica_set.uri, *where, name, "--once", *iceberg]
    verify = ["tables", "verify", replica_set.uri, *where, *iceberg]
    for turn in range(3):
        collection.insert_one({"_id": turn, "n": turn})
        assert main(write) == 0
    check(root, object_store, tmp_path, collection)
    assert main(verify) == 0
    assert f"{name}: the Iceberg table has the files of the version that it states" in capsys.readouterr().out
    assert main(["tables", "expire", *where, "--keep", "0s"]) != 0
    assert "Iceberg snapshots, which would lose their files" in capsys.readouterr().err
    assert main(["tables", "compact", *where]) == 0
    assert main(["tables", "expire", *where, "--keep", "0s", *iceberg]) == 0
    found = iceberg_table(tmp_path, name, **object_store.for_iceberg())
    assert [version_of(one) for one in found.snapshots()] == [3]
    check(root, object_store, tmp_path, collection)
    erase = ["erase", "--document", name, "2", "--tables", object_store.uri(prefix)]
    collection.delete_one({"_id": 2})
    assert main(write) == 0
    capsys.readouterr()
    assert main([*erase, "--state", str(tmp_path / "state"), "--json"]) == 0
    assert any("Iceberg" in one for one in json.loads(capsys.readouterr().out)["stores"][0]["kept"])
    assert main(write) == 0
    assert main(["tables", "expire", *where, "--keep", "0s", *iceberg]) == 0  # older snapshots have lost a file
    check(root, object_store, tmp_path, collection)
    next(one for one in place_of(root, name).iterdir() if one.name.endswith(".parquet")).unlink()
    assert main(verify) != 0
    assert "the Iceberg table lacks its data file" in capsys.readouterr().out
    azure = ["tables", "write", replica_set.uri, "az://container/tables", name, "--state", str(tmp_path / "other")]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "tester")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert main([*azure, "--once", *iceberg]) != 0
    told = capsys.readouterr()
    assert "tables in Azure cannot have Iceberg snapshots" in told.err
    assert SECRET not in told.err + told.out


def test_a_writer_that_takes_over(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """The other one has not noticed yet: whatever it does then, the catalogue has nothing older."""
    name = collection.full_name
    first = object_store.place(prefix, tmp_path / "state")
    other = object_store.place(prefix, tmp_path / "other")
    collection.insert_one({"_id": 1})
    with TablesWriter(replica_set.uri, shown_tables(first, tmp_path, name)) as slow:
        slow.run_to_present()
        table = slow._tables.table(name)
        collection.insert_one({"_id": 2})
        with TablesWriter(replica_set.uri, shown_tables(other, tmp_path, name, take_over=True)) as writer:
            writer.run_to_present()
        check(other, object_store, tmp_path, collection)
        with pytest.raises(SinkError, match="another writer has"):
            slow.run_to_present()
        slow._iceberg._shown.clear()
        assert slow._iceberg._mirror is not None
        slow._iceberg._mirror._held.clear()  # as one that has to ask
        with pytest.raises(SinkError, match="another writer has made a later version"):
            slow._iceberg.follow([table])
    check(other, object_store, tmp_path, collection)


@pytest.mark.slow  # test_iceberg_in_store.py::test_a_kill_at_each_step
def test_killed_at_each_step(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    chosen = random.Random(37)
    root = object_store.place(prefix, tmp_path / "state")
    work(collection, chosen, 50)
    settings = shown_tables(root, tmp_path, collection.full_name)
    with TablesWriter(replica_set.uri, settings) as writer:
        writer.run_to_present()
    steps = [("iceberg.put", 1), ("iceberg.put", 2), ("iceberg.put", 3)]
    for step, number in [("table.commit", 1), *steps, ("iceberg.written", 1), ("iceberg.shown", 1)]:
        place, state = object_store.uri(prefix), str(tmp_path / "state")
        options = json.dumps(object_store.options())
        given = (replica_set.uri, place, state, collection.full_name, catalog_uri(tmp_path), options, step, str(number))
        child = commands.Piped(*given, code=_CHILD, server=_SERVER)
        assert child.stdout.readline() == b"begun\n"
        work(collection, chosen, 20)
        assert child.wait() == -signal.SIGKILL, step
        child.stdout.close()
        found = iceberg_table(tmp_path, collection.full_name, **object_store.for_iceberg())
        compared(place_of(root, collection.full_name), found)
    with TablesWriter(replica_set.uri, settings) as writer:
        writer.run_to_present()
    check(root, object_store, tmp_path, collection)
