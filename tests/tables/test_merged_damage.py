"""What may go wrong with a table that is merged on read, and who notices: a row that was not marked as deleted, merged
files that are lost or changed, a merge of a damaged file, a table that went on with a copy of its state.

`verify` compared the version that the state knows, by key, and so noticed neither a second row with a key nor files of
a later merge. Tests had damaged only the log, and only versions that the state knew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.store import delta
from tailrace.lake.tables import compaction, delta_commit, merging
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.live_files import files_at
from tailrace.lake.tables.merge_on_read import TOGETHER
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.row_search import RowSearch, WantedKeys
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.standing import fault_of, note
from tailrace.lake.tables.state import TableMark, TablesPosition
from tailrace.lake.tables.verification import TableReport, verify
from tailrace.lake.tables.versions import Keeping
from tailrace.lake.tables.writer import TablesWriter
from tests.tables.equality import in_collection, in_table, key_of
from tests.tables.features import Made
from tests.tables.test_merge_on_read import DECLARED, held

NAME = "merged_damage.things"


@pytest.fixture
def things(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database("merged_damage")
        yield client.merged_damage.things
        client.drop_database("merged_damage")


def writer_of(replica_set: ReplicaSet, root: Path) -> TablesWriter:
    return TablesWriter(replica_set.uri, TableSettings(root, (TableRule(NAME),), every_s=0.0, merge_on_read=True))


def verified(replica_set: ReplicaSet, root: Path) -> TableReport:
    [report] = verify(root, replica_set.uri, [NAME])
    return report


def flip(path: Path, column: str) -> None:
    """Change a byte in the middle of a column's values."""
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(file.schema_arrow.names.index(column))
        place = chunk.data_page_offset + chunk.total_compressed_size - 5
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.mongod
def test_a_row_that_is_there_twice_is_named(
    replica_set: ReplicaSet, things: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    things.insert_many([{"_id": one, "n": 0} for one in range(20)])
    with writer_of(replica_set, tmp_path) as writer:
        writer.run_to_present()
        assert verified(replica_set, tmp_path).good
        monkeypatch.setattr(RowSearch, "numbered", lambda *_, **__: None)  # the old row is not found
        things.update_one({"_id": 7}, {"$set": {"n": 1}})
        writer.run_to_present()
    found = verified(replica_set, tmp_path)
    assert [(one.id, one.how) for one in found.differences] == [("7", "is in the table more than once")]


@pytest.mark.mongod
def test_files_of_a_merge_are_verified_and_a_damaged_file_is_not_merged_for_ever(
    replica_set: ReplicaSet, things: Any, tmp_path: Path
) -> None:
    folder = place_of(tmp_path, NAME)
    assert isinstance(folder, Path)
    with writer_of(replica_set, tmp_path) as writer:
        for number in range(TOGETHER):
            things.insert_one({"_id": number, "n": 0})
            writer.run_to_present()
        [merged] = files_at(folder, delta.commits_in(folder)[-1])
        assert verified(replica_set, tmp_path).good
        path = folder / merged.name
        whole = path.read_bytes()
        path.unlink()
        assert "is missing" in verified(replica_set, tmp_path).faults[0]
        path.write_bytes(whole)
        flip(path, "_bson")
        assert "damaged" in verified(replica_set, tmp_path).faults[0]
        path.write_bytes(whole)
        commit = delta.commit_path(folder, delta.commits_in(folder)[-1])
        content = commit.read_bytes()
        commit.write_bytes(content.replace(b'"OPTIMIZE"', b'"optimize"'))
        assert "was changed after it was written" in verified(replica_set, tmp_path).faults[0]
        commit.write_bytes(content)
        assert verified(replica_set, tmp_path).good
        # Keys are read for each change, documents only by a merge, which then finds that the file is damaged.
        flip(path, "_bson")
        things.update_many({"_id": {"$lt": 3}}, {"$inc": {"n": 1}})
        writer.run_to_present()
        assert verified(replica_set, tmp_path).faults == ["the next run will rewrite it"]
        things.update_one({"_id": 0}, {"$inc": {"n": 1}})
        writer.run_to_present()
        assert writer.progress.anew == 1
        assert in_table(tmp_path, NAME) == in_collection(things)
        assert verified(replica_set, tmp_path).good


def test_a_table_that_went_on_with_a_copy_of_its_state_is_not_taken_for_its_own(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(5)])
    mark = note(TableMark("shop.orders", 1, 0, whole=False), made.table)
    made.change([{"_id": 1, "n": 1}])  # micro-batch 1, which ends at 102
    for seconds, faulty in ((102, False), (101, True)):
        at = TablesPosition(1, ClusterTime.of(seconds, 0), {})
        fault = fault_of(CollectionTable(tmp_path / "t", "shop.orders"), mark, at, "")
        assert (fault is not None and "another copy of its state" in fault.reason) == faulty


def test_rows_that_are_gone_stay_gone_where_the_log_does_not_count_the_rows(tmp_path: Path) -> None:
    """A file with an unknown number of rows is rewritten by a change: its deleted rows came back."""
    made = Made(tmp_path / "t", DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(5)])
    made.change([], gone=[2])
    [file] = made.table.files()
    found = made.table._search.divided(file._replace(rows=None), WantedKeys.of([key_of_id(3), key_of_id(2)]))
    assert found is not None
    assert [one.num_rows for one in found] == [3, 1]
    assert made.table._search.divided(file._replace(rows=None), WantedKeys.of([key_of_id(2)])) is None


def key_of_id(value: Any) -> bytes:
    return key_of(bson.encode({"_id": value}))


@pytest.mark.parametrize("merges", [True, False])
def test_half_a_checkpoint_of_another_program_is_none(tmp_path: Path, merges: bool) -> None:
    """Readers skip a checkpoint in several files if one is missing. It was taken for complete: the table's other files
    were forgotten, and the commits before it were removed, without which nobody could read the table."""
    root = tmp_path / "t"
    made = Made(root, DECLARED, merges=merges)
    made.whole([{"_id": one, "n": 0} for one in range(20)])
    for number in range(1, 4):
        made.change([{"_id": 100 + number, "n": 1}])
    truth = held(root)
    DeltaTable(str(root)).create_checkpoint()
    whole = delta.checkpoint_path(root, 3)
    half = whole.with_name(whole.name.replace(".parquet", ".0000000001.0000000002.parquet"))
    found = pq.read_table(whole)
    pq.write_table(found.slice(0, found.num_rows - 1), half)
    whole.unlink()
    (root / delta.LOG / delta.POINTER).unlink()
    assert (delta.checkpoints_in(root), delta.unfinished(root)) == ({}, {3: [half]})
    number, made = made._number, Made(root, DECLARED, merges=merges)
    made._number = number
    made.change([{"_id": one, "n": 2} for one in range(101, 104)])
    truth.update(dict.fromkeys(range(101, 104), 2))
    assert held(root) == truth
    made.table.expire(Keeping(0))
    assert held(root) == truth
    made.table.make_checkpoint()
    made.change([{"_id": 101, "n": 3}])
    made.table.expire(Keeping(0))
    assert held(root) == {**truth, 101: 3}
    assert (delta.commits_in(root)[0], delta.unfinished(root)) == (4, {}), "it goes with the log before"


def test_a_merge_has_no_more_rows_in_memory_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that compress well are small, but their rows are not: what is merged at once was limited only by file
    sizes."""
    made = Made(tmp_path / "t", DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(TOGETHER)])
    for number in range(1, TOGETHER + 1):
        made.change([{"_id": 100 * number + one, "n": 0, "pad": "x" * 100_000} for one in range(3)])
    before = held(tmp_path / "t")
    monkeypatch.setattr(compaction, "_MERGED_MAX", 1_500_000)
    groups = [[file.name for file in made.table.files()]]
    assert merging.merge(made.table, (), groups=groups) == {"numFilesRemoved": TOGETHER + 1, "numFilesAdded": 3}
    assert held(tmp_path / "t") == before
    assert delta_commit.newest_version(tmp_path / "t") == TOGETHER
