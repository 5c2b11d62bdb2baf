"""Tables that are merged on read: rows are marked as deleted, and readers that do not support this cannot read the
table at all.

Each version is compared with its expected contents by other people's readers: deltalake's engine and Polars.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bson
import numpy as np
import polars
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError
from pymongo import MongoClient

from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg.settings import IcebergSettings
from tailrace.lake.store import delta
from tailrace.lake.tables import delta_commit, log_chain, merge_on_read, merging
from tailrace.lake.tables.data_files import TableDamageError, key_range, opened
from tailrace.lake.tables.deletion_vector import rows_of, vector_of
from tailrace.lake.tables.delta_commit import TableFile
from tailrace.lake.tables.delta_table import CHECKPOINT_EVERY_MERGED, CollectionTable
from tailrace.lake.tables.live_files import files_at, gone_of
from tailrace.lake.tables.merge_on_read import (
    GONE_MAX,
    LARGE_BYTES,
    LEAST_BYTES,
    PARTS,
    TOGETHER,
    part_rows,
    to_merge,
)
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.section import settings_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.version_rows import all_rows, batches, rows_in
from tailrace.lake.tables.versions import Keeping, names_at
from tailrace.lake.tables.writer import TablesWriter
from tests.products import nested
from tests.tables.equality import in_collection, in_table, key_of, read
from tests.tables.features import Made
from tests.tables.readers import MERGING_READERS, READERS

DECLARED = TableSchema.declared({"n": "int", "s": "string"})


def held(root: Path, version: int | None = None) -> dict[int, int]:
    """The rows of a version, by deltalake."""
    rows = read(DeltaTable(str(root), version=version), "_key", "_bson", "n")
    documents = [bson.decode(one) for one in rows.column("_bson").to_pylist()]
    assert len({one["_id"] for one in documents}) == len(documents), "a row is there twice"
    assert [one["n"] for one in documents] == rows.column("n").to_pylist()
    return {one["_id"]: one["n"] for one in documents}


def worked(root: Path, seed: int, steps: int, **options: Any) -> tuple[Made, list[dict[int, int]]]:
    """A table after random changes, and what each of its versions has to hold."""
    rng = random.Random(seed)
    made = Made(root, DECLARED, **{"merges": True, **options})
    truth = dict.fromkeys(range(300), 0)
    made.whole([{"_id": one, "n": 0, "s": "abc"[one % 3]} for one in truth])
    found = [dict(truth)]
    for step in range(steps):
        gone = rng.sample(sorted(truth), rng.randrange(6)) if truth else []
        changed = {one: step for one in rng.sample(range(400), rng.randrange(1, 25)) if one not in gone}
        made.change([{"_id": one, "n": n, "s": rng.choice("abc")} for one, n in changed.items()], gone)
        truth = {one: n for one, n in (truth | changed).items() if one not in gone}
        found.append(dict(truth))
        if merging.tidy(made.table)["numFilesRemoved"]:
            found.append(dict(truth))
    return made, found


# -- deletion vectors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 65_536, 150_000])
def test_a_vector_says_what_was_put_into_it(count: int) -> None:
    rows = np.sort(np.random.default_rng(count).choice(200_000, count, replace=False)).astype(np.int64)
    vector = vector_of(rows)
    assert (vector["cardinality"], vector["storageType"]) == (count, "i")
    assert np.array_equal(rows_of(json.loads(json.dumps(vector))), rows)
    assert len(rows_of(None)) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"storageType": "u"},
        {"cardinality": 2},
        {"sizeInBytes": 20},
        {"sizeInBytes": 0},
        {"pathOrInlineDv": "~" * 45},
        {"pathOrInlineDv": "#" * 45},
        {"pathOrInlineDv": "0" * 45},
        {"pathOrInlineDv": "0" * 44},
    ],
)
def test_a_vector_that_is_none_of_ours_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a deletion vector"):
        rows_of({**vector_of(np.array([5])), **other})


# -- versions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divide_by", [(), ("s",)])
def test_each_version_holds_its_rows_and_no_others(tmp_path: Path, divide_by: Any) -> None:
    root = tmp_path / "t"
    made, truth = worked(root, 1, CHECKPOINT_EVERY_MERGED + 8, partition_by=divide_by)
    assert made.table.version == len(truth) - 1
    assert len(truth) > CHECKPOINT_EVERY_MERGED + 9, "files were merged meanwhile"
    assert delta.checkpoints_in(root)
    for version in [*range(0, len(truth), 4), len(truth) - 1]:
        assert held(root, version) == truth[version], version
        found = polars.scan_delta(str(root), version=version).select("n").collect()["n"].to_list()
        assert sorted(found) == sorted(truth[version].values())
        ours = all_rows(root, DeltaTable(str(root), version=version))
        assert sorted(ours.column("n").to_pylist()) == sorted(truth[version].values())
    newest, last = DeltaTable(str(root)), truth[-1]
    assert made.table.rows() == CollectionTable(root, "shop.orders").rows() == len(last)
    assert sum(one.num_rows for one in batches(root, newest, ["_key"])) == len(last)
    keys = [key_of(bson.encode({"_id": one})) for one in range(400)]
    assert sorted(rows_in(root, newest, "_key", keys[::3], ["_key", "n"]).column("n").to_pylist()) == sorted(
        n for one, n in last.items() if one % 3 == 0
    )
    assert log_chain.harm(root, made.table.version, made.table.checkpoints) is None
    made.table.compact()
    assert held(root) == last
    assert not any(file.gone for file in made.table.files())
    made.table.expire(Keeping(0))
    assert held(root) == last
    assert names_at(root, made.table.version) == {file.name for file in made.table.files()}


def test_a_change_writes_its_own_rows_and_no_file_anew(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(1000)])
    [first] = made.table.files()
    made.change([{"_id": 7, "n": 1}, {"_id": 2000, "n": 1}], gone=[8, 9999])
    actions = delta_commit.actions_of(tmp_path / "t", 1)
    added = [one["add"] for one in actions if "add" in one]
    assert [json.loads(one["stats"])["numRecords"] for one in added] == [2, 1000]
    assert rows_of(added[1]["deletionVector"]).tolist() == [7, 8]
    assert json.loads(added[1]["stats"])["tightBounds"] is False
    assert [one["remove"]["path"] for one in actions if "remove" in one] == [first.path] == [added[1]["path"]]
    assert made.table.cost.replaced == 0
    made.change([{"_id": 7, "n": 2}, {"_id": 2000, "n": 2}])
    left = held(tmp_path / "t")
    assert (left[7], left[2000], 8 in left, len(left)) == (2, 2, False, 1000)
    assert len(list(made.table.files())) == 2, "the file whose rows have all gone has gone itself"


def test_a_key_that_has_gone_and_comes_again_is_there_once(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(10)])
    for number in range(1, 6):
        made.change([], gone=[3])
        made.change([], gone=[3])
        assert 3 not in held(tmp_path / "t")
        made.change([{"_id": 3, "n": number}, {"_id": 4, "n": number}])
        assert held(tmp_path / "t") == {**dict.fromkeys(range(10), 0), 3: number, 4: number}


def test_columns_that_come_later_are_null_in_older_files(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", TableSchema(), merges=True)
    made.whole([{"_id": one, "a": 1} for one in range(5)])
    made.change([{"_id": 1, "a": 2, "late": "x"}])
    rows = all_rows(tmp_path / "t", DeltaTable(str(tmp_path / "t"))).sort_by("_id")
    assert rows.select(["a", "late"]).to_pylist()[:2] == [{"a": 1, "late": None}, {"a": 2, "late": "x"}]
    merging.purge(made.table, [file.name for file in made.table.files() if file.gone])
    assert all_rows(tmp_path / "t", DeltaTable(str(tmp_path / "t"))).sort_by("_id").equals(rows)


# -- who reads it --------------------------------------------------------------------------------------------------


def test_readers_read_it_right_or_refuse_it_by_the_feature_s_name(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED, merges=True, bounds=("n",))
    made.whole([{"_id": one, "n": one, "s": "a"} for one in range(20)])
    made.change([{"_id": 5, "n": 5, "s": "b"}], gone=[0, 19])
    expected = [{"n": one, "s": "b" if one == 5 else "a"} for one in range(1, 19)]
    for name, reader in READERS.items():
        if name in MERGING_READERS:
            assert reader(tmp_path / "t", None, None) == expected, name
            for value in (0, 5, 19):
                assert reader(tmp_path / "t", "n", value) == [one for one in expected if one["n"] == value], name
        else:
            with pytest.raises(DeltaProtocolError, match="deletionVectors"):
                reader(tmp_path / "t", None, None)


def test_the_players_look_into_such_tables_and_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They had only been read by pyarrow, which refuses. That counts as right, so none of their columns had been
    compared."""
    made = Made(tmp_path / "shop.nested", TableSchema(nested=True), merges=True)
    made.whole([{"_id": one, "items": [{"n": one}]} for one in range(5)])
    made.change([{"_id": 2, "items": [{"n": 7, "late": ["x"]}]}], gone=[1])
    rule = TableRule("shop.nested", TableSchema(nested=True))
    assert read(DeltaTable(str(tmp_path / "shop.nested")), "_key", "_bson").sort_by("_key").num_rows == 4

    def told() -> list[str]:
        return nested.unlike_its_documents(tmp_path, rule, random.Random(1))

    assert told() == []
    for name in MERGING_READERS:
        monkeypatch.setitem(READERS, name, lambda *_, by=READERS[name]: [{**one, "items": []} for one in by(*_)])
    assert "not [{'n': 0" in told()[0]
    for file in made.table.files():
        (tmp_path / "shop.nested" / file.name).unlink()
    with pytest.raises(OSError, match="Object Store error"):  # as for a file that pyarrow does not find
        read(DeltaTable(str(tmp_path / "shop.nested")))


def test_whoever_stops_merging_gets_a_table_that_every_reader_reads(tmp_path: Path) -> None:
    root = tmp_path / "t"
    plain = Made(root, DECLARED)
    plain.whole([{"_id": one, "n": 0} for one in range(20)])
    assert DeltaTable(str(root)).protocol().reader_features is None
    made = Made(root, DECLARED, merges=True)
    made._number = 1
    assert not made.table.redeclared
    made.change([{"_id": 1, "n": 1}])
    protocol = DeltaTable(str(root)).protocol()
    assert (protocol.min_reader_version, protocol.reader_features) == (3, ["deletionVectors"])
    assert CollectionTable(root, "shop.orders").merges, "who maintains it finds that"
    fed = Made(root, DECLARED, merges=True, feed=True)
    fed._number = 2
    fed.change([{"_id": 2, "n": 2}])
    assert "changeDataFeed" in (DeltaTable(str(root)).protocol().writer_features or ())
    stopped = Made(root, DECLARED, merges=False)
    stopped._number = 3
    assert stopped.table.redeclared
    stopped.whole([{"_id": one, "n": 3} for one in range(20)])
    assert not stopped.table.redeclared
    assert DeltaTable(str(root)).to_pyarrow_table().num_rows == 20
    assert held(root, 1) == {**dict.fromkeys(range(20), 0), 1: 1}
    stopped.change([{"_id": 1, "n": 4}])
    assert held(root) == {**dict.fromkeys(range(20), 3), 1: 4}
    # Rows marked as deleted were removed before the files from which readers make the feed.
    assert stopped.table.version == 5
    assert [len(files_at(root, version)) for version in (0, 2, 3, 4, 5)] == [1, 3, 3, 1, 1]
    assert [sum(file.gone for file in files_at(root, version)) for version in (2, 3, 4)] == [2, 0, 0]


def test_what_cannot_go_with_it_is_refused(tmp_path: Path) -> None:
    settings = TableSettings(tmp_path, (TableRule("shop.*"),), merge_on_read=True)
    settings.check()
    with pytest.raises(UsageError, match="cannot be Iceberg tables too"):
        replace(settings, iceberg=IcebergSettings.of("sqlite:///x.db", "iceberg")).check()
    assert settings_of({"path": "t", "collections": ["shop.*"], "mergeOnRead": True}, tmp_path).merge_on_read
    assert not settings_of({"path": "t", "collections": ["shop.*"]}, tmp_path).merge_on_read
    with pytest.raises(UsageError, match=r"tables\.mergeOnRead must be true or false"):
        settings_of({"path": "t", "collections": ["shop.*"], "mergeOnRead": "yes"}, tmp_path)


# -- what is merged ------------------------------------------------------------------------------------------------


def file(name: str, rows: int, gone: int = 0, *, bytes_of: int = 100) -> TableFile:
    return TableFile(name, rows * bytes_of, rows, {"cardinality": gone} if gone else None)


def large(name: str, rows: int, gone: int = 0) -> TableFile:
    return file(name, rows, gone, bytes_of=1000)


def test_files_whose_rows_have_gone_are_written_anew_in_time() -> None:
    small = [file(f"s{one}", 10) for one in range(3)]
    assert to_merge([large("big", 1000, int(GONE_MAX * 1000)), *small]) == []
    # A file that is not small has younger rows, and stays.
    worn = [large("big", 1000, 450), *small, large("half", 500)]
    assert [sorted(group) for group in to_merge(worn)] == [["big", "s0", "s1", "s2"]]
    # The worst first, and no more than it takes.
    assert to_merge([large("a", 1000, 150), large("b", 1000, 500), large("c", 1000, 150)]) == [["b"]]


def test_small_files_are_those_of_less_than_a_twelfth_of_the_table() -> None:
    files = [large(f"f{one}", 1000) for one in range(10)]
    assert part_rows(files) == 1667
    assert part_rows([file("a", 100)]) * 100 == pytest.approx(LEAST_BYTES, rel=0.01)
    assert part_rows([large("a", 1_000_000, 500_000)]) * 1000 == pytest.approx(LARGE_BYTES, rel=0.01)
    assert to_merge(files) == [], "ten of one size, each of which is a tenth"
    assert len(to_merge([large(f"f{one}", 1000) for one in range(13)])[0]) == 13


def test_a_table_is_divided_into_files_of_different_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One large file had to be written anew as a whole each time."""
    made = Made(tmp_path / "t", DECLARED, merges=True)
    rng = random.Random(1)
    made.whole([{"_id": one, "n": one, "pad": rng.randbytes(300).hex()} for one in range(800)])
    made.change([], gone=[one for one in range(800) if one % 4 == 3])
    made.change([{"_id": 800, "n": 800}])
    truth = held(tmp_path / "t")
    monkeypatch.setattr(merge_on_read, "LEAST_BYTES", 1)
    assert merging.tidy(made.table) == {"numFilesRemoved": 2, "numFilesAdded": PARTS}
    assert held(tmp_path / "t") == truth
    rows = [one.rows or 0 for one in made.table.files()]
    assert (sum(rows), max(rows) - min(rows)) == (601, 1)
    ranges = []
    for one in made.table.files():
        with opened(tmp_path / "t", one.name) as parquet:
            ranges.append(key_range(parquet))
    ranges.sort()
    assert all(before[1] < after[0] for before, after in pairwise(ranges)), "each has keys of its own"
    made.change([], gone=[0, 1, 2])
    assert merging.tidy(made.table)["numFilesRemoved"] == 0


def test_many_files_of_one_size_are_merged_and_large_ones_are_left_alone() -> None:
    small = [file(f"s{one}", 10) for one in range(TOGETHER)]
    assert to_merge(small[1:]) == []
    assert [sorted(group) for group in to_merge(small)] == [sorted(one.path for one in small)]
    assert to_merge([file(f"l{one}", 10, bytes_of=10 << 20) for one in range(40)]) == []
    folders = [file(f"by-{one % 2}/{one}", 10) for one in range(2 * TOGETHER - 2)]
    assert to_merge(folders, divided=True) == to_merge(small, divided=True) == []


def test_what_is_merged_at_once_is_bounded() -> None:
    worn = [file(f"f{one}", 1000, 500, bytes_of=40_000) for one in range(100)]
    many = [file(f"f{one}", 1000, bytes_of=14_000) for one in range(100)]
    for files in (worn, many):
        assert 1 <= sum(map(len, to_merge(files))) <= 8


# -- what was changed from outside ---------------------------------------------------------------------------------


def test_a_vector_that_was_changed_in_the_log_is_found(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(50)])
    made.change([{"_id": 7, "n": 1}])
    made.change([{"_id": 8, "n": 1}])
    path = delta.commit_path(tmp_path / "t", 1)
    content = path.read_bytes()
    text = json.dumps(vector_of(np.array([7]))["pathOrInlineDv"])
    other = json.dumps(vector_of(np.array([9]))["pathOrInlineDv"])
    assert text.encode() in content
    path.write_bytes(content.replace(text.encode(), other.encode()))
    assert "version 1 was changed" in (log_chain.harm(tmp_path / "t", 2, {}) or "")


def test_a_checkpoint_of_others_has_to_agree_on_the_rows(tmp_path: Path) -> None:
    root = tmp_path / "t"
    made = Made(root, DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(50)])
    made.change([{"_id": 7, "n": 1}])
    made.change([{"_id": 8, "n": 1}])
    commit = delta.commit_path(root, 2)
    content = commit.read_bytes()
    right, wrong = (json.dumps(vector_of(np.array(rows))["pathOrInlineDv"]) for rows in ([7, 8], [7, 9]))
    assert right.encode() in content
    commit.write_bytes(content.replace(right.encode(), wrong.encode()))
    DeltaTable(str(root)).create_checkpoint()
    commit.write_bytes(content)
    assert "does not agree with its log" in (log_chain.harm(root, 2, {}) or "")
    for path in [*delta.checkpoints_in(root)[2], root / delta.LOG / delta.POINTER]:
        path.unlink()
    DeltaTable(str(root)).create_checkpoint()
    assert log_chain.harm(root, 2, {}) is None


def test_another_program_s_vector_is_refused_and_not_read_as_none(tmp_path: Path) -> None:
    root = tmp_path / "t"
    made = Made(root, DECLARED, merges=True)
    made.whole([{"_id": one, "n": 0} for one in range(50)])
    [one] = made.table.files()
    vector = {"storageType": "u", "pathOrInlineDv": "0" * 20, "offset": 1, "sizeInBytes": 34, "cardinality": 1}
    actions = [
        delta.commit_info(1, "DELETE", {}, ours={}),
        delta.remove(one.path, {}, one.size, 1, changes=False),
        delta.add(one.path, {}, one.size, 1, changes=False, stats=one.stats, vector=vector),
    ]
    delta.commit_path(root, 1).write_bytes(delta.content_of(actions, ascii_only=False))
    [marked] = files_at(root, 1)
    with pytest.raises(TableDamageError, match="a deletion vector that is not in the log"):
        gone_of(root, marked)
    with pytest.raises(SinkError, match="another program has changed the table"):
        CollectionTable(root, "shop.orders").compact()


# -- with a deployment ---------------------------------------------------------------------------------------------


@pytest.mark.mongod
def test_a_table_that_was_set_back_or_changed_is_written_anew(replica_set: ReplicaSet, tmp_path: Path) -> None:
    root = tmp_path / "tables"
    settings = TableSettings(root, (TableRule("merged_on_read.*"),), every_s=0.0, merge_on_read=True)
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database("merged_on_read")
        things, folder = client.merged_on_read.things, root / "merged_on_read.things"

        def brought_up(anew: int) -> None:
            with TablesWriter(replica_set.uri, settings) as writer:
                writer.run_to_present()
                assert writer.progress.anew == anew
            assert in_table(root, "merged_on_read.things") == in_collection(things)
            assert main(["tables", "verify", replica_set.uri, str(root)]) == 0

        things.insert_many([{"_id": one, "n": 0} for one in range(60)])
        brought_up(0)
        things.update_many({"_id": {"$lt": 5}}, {"$inc": {"n": 1}})
        brought_up(0)
        shutil.copytree(folder, tmp_path / "older")
        things.update_many({"_id": {"$lt": 3}}, {"$inc": {"n": 1}})
        brought_up(0)
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "older", folder)
        brought_up(1)
        things.delete_one({"_id": 7})
        brought_up(0)
        commit = delta.commit_path(folder, delta.commits_in(folder)[-1])
        content = commit.read_bytes()
        commit.write_bytes(content.replace(b'"cardinality": 1}', b'"cardinality": 2}', 1))
        assert commit.read_bytes() != content
        brought_up(1)
        others = client.merged_on_read.others
        others.insert_one({"_id": 1})
        things.rename("renamed")
        others.rename("things")
        things = client.merged_on_read.things
        brought_up(0)
        assert in_table(root, "merged_on_read.renamed") == in_collection(client.merged_on_read.renamed)
        things.drop()
        brought_up(0)
        client.drop_database("merged_on_read")
