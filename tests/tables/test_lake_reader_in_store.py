"""What ``tailrace.lake.read`` gives of a lake in an object store, as Spark's tasks call it; with Spark:
tests/spark/test_lake_in_store.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import obstore
import pyarrow as pa
import pytest

from tailrace.base.object_place import ObjectPlace
from tailrace.cli import console
from tailrace.cli.main import build_parser
from tailrace.cli.panels import sources
from tailrace.errors import SinkError
from tailrace.lake.spark.store import stored_rows
from tailrace.lake.store import part_writer
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.identity import read_identity
from tailrace.lake.store.status import lake_status
from tests.tables.object_server import ObjectServer
from tests.tables.test_lake_in_store import keys_from, opened, put, table_of


@pytest.fixture
def root(object_store: ObjectServer, prefix: str, tmp_path: Path) -> ObjectPlace:
    return object_store.place(prefix, tmp_path / "state")


def test_sparks_reader_gives_what_the_files_hold(
    object_store: ObjectServer, root: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys_from(object_store, monkeypatch)
    monkeypatch.setattr(stored_rows, "_TASK_BYTES", stored_rows._FILE_BYTES * 5 // 2)
    claim = opened(root, tmp_path / "checkpoint")
    for number in range(3):
        start = 86_400 - 15 + number * 10
        put(root, claim, number, range(start, start + 10), tmp_path / "checkpoint")
    known = read_identity(root)
    assert known is not None
    known["columns"] += [{"name": "later", "type": "string", "nullable": False, "metadata": {}}]
    schema, state = stored_rows.columns_of(known), CommitLog(root).state()
    listed = stored_rows.unpacked(stored_rows.packed(state.in_order))
    reader = stored_rows.StoredRowsReader(str(root), schema, listed)
    tasks = reader.partitions()
    assert len(tasks) == 2
    found = pa.Table.from_batches(batch for task in tasks for batch in reader.read(task))
    assert found.schema.names == ["token", "number", "event", "later", "day"]
    wanted = ["token", "number", "event", "day"]
    truth = table_of(root).to_pyarrow_table().sort_by("token").select(wanted)
    assert found.select(wanted).cast(truth.schema).equals(truth)
    assert found["later"].null_count == 30
    name = state.in_order[1].name
    content = (root / name).read_bytes()
    for damage, whole in ((content[:200] + b"x" + content[201:], 1 << 20), (content[:-1], 10)):
        monkeypatch.setattr(part_writer, "_WHOLE_MAX", whole)  # larger ones are compared by size and pages
        obstore.put(root.bucket.store, f"{root.key}/{name}", damage)
        with pytest.raises(SinkError, match="damaged"):
            list(reader.read(tasks[0]))
    (root / name).unlink()
    with pytest.raises(SinkError, match="cannot be read"):
        list(reader.read(tasks[0]))
    with pytest.raises(SinkError, match="cannot be a file of a lake"):
        stored_rows.unpacked(stored_rows.packed([dataclasses.replace(state.in_order[0], name="../x")]))


def test_the_console_shows_it_by_its_uri(
    object_store: ObjectServer, root: ObjectPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option accepted only paths: no test had used it for a lake in a store. A missing one does not affect
    others."""
    keys_from(object_store, monkeypatch)
    put(root, opened(root, tmp_path / "checkpoint"), 0, range(10), tmp_path / "checkpoint")
    given = ["console", "mongodb://h", "--lake", str(root), "--lake", f"{root}-not", "--lake", str(tmp_path / "none")]
    shown = sources.each_lake(console.targets_of(build_parser().parse_args(given)))
    assert [one["place"] for one in shown] == given[3::2]
    assert shown[0]["data"] == lake_status(root).to_json()
    assert shown[0]["data"]["rows"] == 10
    assert ["error" in one for one in shown] == [False, True, True]
