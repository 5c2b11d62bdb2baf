"""Delta's change feed of a table: applied to the version before, a commit's feed gives its version.

That is compared for each commit, with deltalake's own reader of feeds, for all rows and columns.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bson.raw_bson import RawBSONDocument
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.tables import versions
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.schema import Column, TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.versions import Keeping
from tailrace.lake.tables.writer import TablesWriter
from tests.differential import documents as docs
from tests.server_in_use import IN_BETWEEN
from tests.tables.change_feeds import check_feed, feed_of, in_version
from tests.tables.features import Made, batch

DECLARED = TableSchema.declared({"a": "long", "b": "string"})


def random_step(made: Made, there: set[int], rng: random.Random) -> None:
    """Documents that are inserted, changed and deleted, and documents that the batch names although they never
    existed."""
    some = rng.sample(range(60), rng.randint(1, 20))
    gone = [one for one in some if rng.random() < 0.3]
    documents = [{"_id": one, "a": rng.randint(0, 3), "b": rng.choice("xyz")} for one in some if one not in gone]
    made.change(documents, gone)
    there.difference_update(gone)
    there.update(one["_id"] for one in documents)


@pytest.mark.by_turns
@pytest.mark.by_turns
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("divide_by", [(), ("b",)])
@pytest.mark.parametrize("merges", [False, True])
def test_each_commit_s_feed_is_the_difference_of_two_versions(
    tmp_path: Path, seed: int, divide_by: Any, merges: bool
) -> None:
    rng, there = random.Random(seed), set[int]()
    made = Made(tmp_path / "t", DECLARED, feed=True, partition_by=divide_by, merges=merges)
    made.whole([{"_id": one, "a": 0, "b": "x"} for one in range(rng.randint(0, 30))])
    for step in range(12):
        random_step(made, there, rng)
        if step % 5 == 3:
            made.table.compact()
        if step == 7:
            made.whole([{"_id": one, "a": 9, "b": "x"} for one in sorted(there)])
    assert made.table.version > 12
    assert check_feed(tmp_path / "t") == made.table.version + 1


def test_a_row_before_and_after_is_told_from_one_that_comes_or_goes(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED, feed=True)
    made.whole([{"_id": 1, "a": 1}, {"_id": 2, "a": 2}])
    made.change([{"_id": 1, "a": 5}, {"_id": 3, "a": 3}], gone=[2, 4])
    found = [(one["_change_type"], one["a"]) for one in feed_of(tmp_path / "t", 1)]
    assert sorted(found) == [("delete", 2), ("insert", 3), ("update_postimage", 5), ("update_preimage", 1)]


def test_a_feed_begins_in_a_table_that_is_there_and_ends(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", DECLARED)
    made.whole([{"_id": 1, "a": 1}])
    made.change([{"_id": 1, "a": 2}])
    with_feed = Made(tmp_path / "t", DECLARED, feed=True)
    with_feed._number = 2
    with_feed.change([{"_id": 1, "a": 3}])
    assert check_feed(tmp_path / "t", first=2) == 1
    assert DeltaTable(tmp_path / "t").protocol().min_writer_version == delta.FEED_WRITER_VERSION
    assert CollectionTable(tmp_path / "t", "shop.orders").has_feed, "who maintains it finds the feed"
    without = Made(tmp_path / "t", DECLARED)
    without.table = CollectionTable(tmp_path / "t", "shop.orders", declared=DECLARED.declaration, feed=False)
    without._number = 3
    without.change([{"_id": 1, "a": 4}])
    assert "delta.enableChangeDataFeed" not in DeltaTable(tmp_path / "t").metadata().configuration


def test_new_columns_are_in_the_feed(tmp_path: Path) -> None:
    made = Made(tmp_path / "t", TableSchema(), feed=True)
    made.whole([{"_id": 1, "a": 1}])
    made.change([{"_id": 1, "a": 2, "new": "x"}])
    made.change([{"_id": 1, "a": 2, "new": "y", "newer": True}, {"_id": 2}])
    assert check_feed(tmp_path / "t") == 3


def test_fields_with_delta_s_names_get_other_columns(tmp_path: Path) -> None:
    """Delta's readers of feeds fail where a column has one of these names."""
    made = Made(tmp_path / "t", TableSchema(), feed=True)
    made.whole([{"_id": 1, "_change_type": "mine", "_commit_version": 5, "_commit_timestamp": 1}])
    made.change([{"_id": 1, "_change_type": "mine too", "_commit_version": 6}])
    assert check_feed(tmp_path / "t") == 2


def test_a_table_with_such_a_column_is_refused_a_feed(tmp_path: Path) -> None:
    schema = TableSchema((Column("_change_type", ("_change_type",), "string"),))
    old = Made(tmp_path / "t", schema)
    old.whole([{"_id": 1, "_change_type": "mine"}])
    table = CollectionTable(tmp_path / "t", "shop.orders", declared=schema.declaration, feed=True)
    with pytest.raises(SinkError, match="Delta reserves the name of its column _change_type"):
        table.write_whole(batch(1), schema, [], "whole")


def test_the_feed_reaches_back_as_far_as_it_is_kept(tmp_path: Path) -> None:
    """Compaction and expiry remove data files that no version needs, but the feed stays, also that of a rewritten
    table."""
    made = Made(tmp_path / "t", DECLARED, feed=True)
    made.whole([{"_id": one, "a": 0} for one in range(5)])
    for number in range(30):
        made.change([{"_id": number % 7, "a": number}])
        if number == 15:
            made.whole([{"_id": one, "a": 100} for one in range(7)])
    made.table.compact()
    made.table.make_checkpoint()
    hours_later = 3_600_000 * 3

    def feeds() -> list[list[str]]:
        return [sorted(map(repr, feed_of(tmp_path / "t", number))) for number in range(32)]

    before = feeds()
    expire(made, Keeping(0.0, feed_h=10.0), hours_later)
    assert feeds() == before
    expire(made, Keeping(0.0, feed_h=0.5), hours_later)
    assert not list((tmp_path / "t" / delta.FEED_FOLDER).glob("*.parquet"))
    assert in_version(tmp_path / "t", made.table.version)


def expire(made: Made, keeping: Keeping, later_ms: int) -> None:
    now = time.time_ns() // 1_000_000 + later_ms
    made.table.refresh()
    versions.expire(made.table.root, keeping, [file.name for file in made.table.files()], now)


def test_what_a_commit_did_not_come_to_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path / "t", DECLARED, feed=True)
    made.whole([{"_id": 1, "a": 1}])

    def fails() -> Any:
        yield pa.RecordBatch.from_pylist([], schema=pa.schema([]))
        raise OSError("the disk is full")

    with pytest.raises((OSError, KeyError)):
        made.table.change(batch(1), made.schema, [b"x"], fails())
    assert len(list((tmp_path / "t").glob("**/*.parquet"))) == 1


@pytest.mark.mongod
@pytest.mark.parametrize("version", ["6.0.27", "4.4.2", IN_BETWEEN])
def test_a_writer_s_feed_beside_a_server(tmp_path: Path, version: str, start_replica_set: Any) -> None:
    """Every commit of a writer, with documents of all types, and collections that are dropped, renamed and replaced."""
    server, rng = start_replica_set(version=version), random.Random(version)
    with MongoClient[Any](server.uri) as client:
        database = client["fed"]
        settings = TableSettings(tmp_path, (TableRule("fed.*"),), every_s=0.0, compact_every=3, feed_h=1.0)
        database.a.insert_many([{"_id": n, "n": n} for n in range(20)])
        with TablesWriter(server.uri, settings) as writer:
            writer.run_to_present()
            for step in range(8):
                for _ in range(12):
                    which, key = database[rng.choice("abc"[: 2 + (step > 2)])], rng.randint(0, 30)
                    raw = RawBSONDocument(docs.new_document(rng)) if version == "6.0.27" else {"x": rng.random()}
                    which.replace_one({"_id": key}, {"n": rng.choice([1, "x", None]), "raw": raw}, upsert=True)
                    which.delete_one({"_id": rng.randint(0, 30)})
                if step == 2:
                    database.a.rename("c")
                if step == 4:
                    database.b.drop()
                if step == 5:
                    database.c.aggregate([{"$match": {"n": 1}}, {"$out": "b"}])
                writer.run_to_present()
        compared = {name: check_feed(tmp_path / f"fed.{name}") for name in "abc"}
    assert min(compared.values()) > 2
    assert sum(compared.values()) > 15, compared


@pytest.mark.mongod
def test_the_command_line_says_how_far_the_feed_reaches(tmp_path: Path, replica_set: ReplicaSet) -> None:
    with MongoClient[Any](replica_set.uri) as client:
        client.fed_by_command.a.insert_one({"_id": 1})
    words = ["tables", "write", replica_set.uri, str(tmp_path / "t"), "fed_by_command.*", "--once", "--change-feed"]
    assert main([*words, "soon"]) == 1
    assert not (tmp_path / "t").exists()
    assert main([*words, "12h"]) == 0
    assert check_feed(tmp_path / "t" / "fed_by_command.a") == 1


@pytest.mark.mongod
def test_the_command_line_says_how_long_replaced_files_stay(
    tmp_path: Path, replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a file of `tailrace run` could say it."""
    kept: list[float] = []
    monkeypatch.setattr(TablesWriter, "run_to_present", lambda writer: kept.append(writer._settings.keeping.grace_h))
    words = ["tables", "write", replica_set.uri, str(tmp_path / "t"), "kept_by_command.*", "--once"]
    assert main([*words, "--grace", "soon"]) == 1
    assert not (tmp_path / "t").exists()
    assert main([*words, "--grace", "3m"]) == main(words) == 0
    assert kept == [3 / 60, TableSettings.grace_h]
