"""A lake in an object store that was changed holds what a lake would hold that had been begun so, in a directory.

What comes in between is in test_lake_changing_in_store.py.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pymongo
import pytest

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, UsageError
from tailrace.lake import change_lake, files, verify
from tailrace.lake.iceberg.lake_mirror import identifier_of
from tailrace.lake.spark.store import stored_rows
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.places import delta_table
from tailrace.lake.store.status import lake_status
from tailrace.read.archive.place import archive_place
from tests.differential.stored_archives import archive, written_to
from tests.products.archive import beginning_at
from tests.small_disk import small_disk
from tests.spark.lake_driving import options_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import newest
from tests.spark.test_lake_changed import _CHANGES, _DATABASE, History, _match, work
from tests.tables.iceberg import catalog_uri, sql_catalog
from tests.tables.object_server import ObjectServer
from tests.tables.test_iceberg_in_store import at_step
from tests.tables.test_lake_in_store import keys_from

pytestmark = [pytest.mark.mongod]


@pytest.fixture(scope="module")
def history(replica_set: ReplicaSet) -> History:
    start = newest(replica_set.uri)
    middle = work(replica_set.uri, 2000)
    return History(replica_set.uri, start, middle, work(replica_set.uri, 3000))


@pytest.fixture
def lake(object_store: ObjectServer, prefix: str, tmp_path: Path) -> ObjectPlace:
    return object_store.place(prefix, tmp_path / "state")


def rows(lake: Any) -> list[dict[str, Any]]:
    """Every row, in the order of the stream, as each file has it."""

    def found() -> Iterator[dict[str, Any]]:
        for file in files(lake):
            where: Any = file
            if isinstance(lake, ObjectPlace):
                where = io.BytesIO((lake / file.removeprefix(f"{lake}/")).read_bytes())
            yield from pq.ParquetFile(where).read().to_pylist()

    return sorted(found(), key=lambda row: str(row["token"]))


def assert_equal(lake: Any, fresh: Path) -> None:
    report = verify(lake, full=True)
    assert (report.problems, report.leftovers) == ([], 0)
    assert rows(lake) == rows(fresh) != []
    one, other = (CommitLog(place).state() for place in (lake, fresh))
    assert sum(file.rows for file in one.files.values()) == sum(file.rows for file in other.files.values())


def as_sparks_tasks_read(lake: ObjectPlace, version: int | None = None) -> pa.Table:
    schema, listed = stored_rows.columns_and_files(lake, version)
    reader = stored_rows.StoredRowsReader(str(lake), schema, listed)
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    return pa.Table.from_batches(batches).sort_by("token")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("json", "bson"),
        pytest.param("bson", "variant", marks=pytest.mark.slow),  # the same, as is the next: the line above
        pytest.param("variant", "json", marks=pytest.mark.slow),
    ],
)
def test_spark_reads_both_versions_with_their_own_columns(  # noqa: PLR0917
    history: History,
    object_store: ObjectServer,
    lake: ObjectPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
) -> None:
    """An older version was read with the columns that the lake has now: JSON text was given for BSON. No test had read
    an older version of a changed lake."""
    keys_from(object_store, monkeypatch)
    narrow = history.source(documents=before, collection="orders")
    wide = history.source(documents=after, columns="token,event,full_document,cluster_time,document_key")
    fill(narrow, lake, history.middle)
    version, there = CommitLog(lake).head().number, as_sparks_tasks_read(lake)
    change_lake(wide, lake)
    assert as_sparks_tasks_read(lake, version).equals(there)
    fresh = tmp_path / "fresh"
    fill(wide, fresh, history.middle)
    found = as_sparks_tasks_read(lake)
    assert found.column("event").to_pylist() == [row["event"] for row in rows(fresh)]
    assert found.column("full_document").to_pylist() == [row["full_document"] for row in rows(fresh)]
    assert found.schema.names == ["token", "event", "full_document", "cluster_time", "document_key", "day"]


@pytest.mark.parametrize(
    ("change", "partition_by"),
    [
        ("scope", ("day",)),
        ("both", ("day",)),
        ("documents", ("day", "collection")),
        *(
            pytest.param(change, ("day",), marks=pytest.mark.slow)  # the same: spark/test_lake_changed.py
            for change in _CHANGES
            if change not in ("scope", "both")
        ),
    ],
)
def test_a_changed_lake_is_the_one_that_would_have_been_written(
    history: History, lake: ObjectPlace, tmp_path: Path, change: str, partition_by: tuple[str, ...]
) -> None:
    fresh, (before, after) = tmp_path / "fresh", _CHANGES[change]
    old, new = history.source(**before), history.source(**after)
    fill(old, lake, history.middle, partition_by=partition_by)
    held = CommitLog(lake).head().number
    assert change_lake(new, lake, dry_run=True).differences
    assert CommitLog(lake).head().number == held
    superseded = change_lake(new, lake).superseded
    assert superseded is not None
    assert superseded.parent == tmp_path / "state"
    fill(new, fresh, history.middle, partition_by=partition_by)
    assert_equal(lake, fresh)
    with pytest.raises(UsageError, match="belongs to another stream"):
        fill(old, lake, history.until)
    fill(new, lake, history.until, partition_by=partition_by)
    fill(new, fresh, history.until, checkpoint=tmp_path / "another", partition_by=partition_by)
    assert_equal(lake, fresh)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"collection": "other"}, "is not among those of the new stream"),
        ({"pipeline": json.dumps([{"$set": {"more": 1}}])}, "is another one there"),
        ({"fullDocument": "updateLookup"}, "fullDocument=updateLookup cannot be backfilled"),
    ],
)
def test_what_would_not_be_exact_is_refused_and_the_lake_stays(
    history: History, lake: ObjectPlace, tmp_path: Path, options: Mapping[str, str], said: str
) -> None:
    old = history.source(collection="orders", pipeline=_match("insert"))
    fill(old, lake, history.middle)
    held = rows(lake), sorted(one.name for one in lake.objects()), lake_status(lake)
    with pytest.raises(UsageError, match=said):
        change_lake(history.source(**options), lake)
    assert (rows(lake), sorted(one.name for one in lake.objects()), lake_status(lake)) == held
    fill(old, lake, history.until, checkpoint=tmp_path / "another")  # it is that stream's still


def test_what_was_erased_is_not_backfilled(history: History, lake: ObjectPlace, tmp_path: Path) -> None:
    fill(history.source(collection="orders", pipeline=_match("insert")), lake, history.middle)
    erase(lake, {"documentKey._id": 2003})
    wider = history.source(collection="orders")
    with pytest.raises(UsageError, match="they would come back"):
        change_lake(wider, lake)
    held = rows(lake)
    report = change_lake(wider, lake, from_now=True)
    assert (report.since, report.rows, rows(lake)) == (history.middle, 0, held)
    fill(wider, lake, history.until)
    fill(wider, tmp_path / "fresh", history.until)
    later = [row for row in rows(tmp_path / "fresh") if int(row["token"][2:18], 16) > int(history.middle)]
    assert rows(lake)[len(held) :] == later
    assert verify(lake, full=True).problems == []


def test_an_event_in_quarantine_stays_there(history: History, lake: ObjectPlace, tmp_path: Path) -> None:
    divided = {"$set": {"more": {"$divide": [1, {"$subtract": ["$documentKey._id", 2007]}]}}}
    numbers = {"$match": {"operationType": "insert", "documentKey._id": {"$type": "number"}}}
    old, wider, right = (
        history.source(columns="event,token", collection="orders", pipeline=json.dumps(stages))
        for stages in (
            [numbers, {"$match": {"documentKey._id": {"$lt": 2010}}}, divided],
            [numbers, divided],
            [numbers, {"$match": {"documentKey._id": {"$ne": 2007}}}, divided],
        )
    )
    fill(old, lake, history.middle, quarantines=True)
    with pytest.raises(UsageError, match="is in the lake's quarantine, and the new stream does not put it aside"):
        change_lake(right, lake)
    change_lake(wider, lake)
    fill(wider, tmp_path / "fresh", history.middle, quarantines=True)
    assert_equal(lake, tmp_path / "fresh")
    assert lake_status(lake).quarantined == lake_status(tmp_path / "fresh").quarantined == 1


def test_a_lake_that_began_with_a_copy(replica_set: ReplicaSet, lake: ObjectPlace, tmp_path: Path) -> None:
    """Its columns can be changed. What a copy of a wider stream would have held is not known."""
    database = "lakestorecopied"
    with pymongo.MongoClient[Any](replica_set.uri, w="majority") as client:
        client.drop_database(database)
        client[database].a.insert_many([{"_id": number} for number in range(20)])
        client[database].b.insert_many([{"_id": number} for number in range(5)])
        start = newest(replica_set.uri)
        wide = options_for(replica_set.uri, database, start, startingFrom="snapshot", columns="event,token")
        del wide["startAtOperationTime"]
        narrow = {**wide, "collection": "a"}
        fill(narrow, lake, newest(replica_set.uri))
        with pytest.raises(UsageError, match=r"only the copy of the documents so far|began with a copy"):
            change_lake(wide, lake)
        client[database].a.insert_one({"_id": 99})
        until = newest(replica_set.uri)
    fill(narrow, lake, until, checkpoint=tmp_path / "second")
    with pytest.raises(UsageError, match="began with a copy of the documents"):
        change_lake(wide, lake)
    more = {**narrow, "columns": "event,token,operation_type,document_key"}
    change_lake(more, lake)
    assert [row["operation_type"] for row in rows(lake)] == ["snapshot"] * 20 + ["insert"]
    assert json.loads(rows(lake)[3]["document_key"]) == {"_id": 3}
    change_lake({**more, "collection": "a", "pipeline": _match("insert")}, lake, from_now=True)
    assert verify(lake, full=True).problems == []


@pytest.mark.parametrize("where", ["a store", "a directory"])
def test_what_the_oplog_no_longer_has_comes_from_an_archive(  # noqa: PLR0917
    replica_set: ReplicaSet, object_store: ObjectServer, lake: ObjectPlace, tmp_path: Path, where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keys_from(object_store, monkeypatch)
    database, fresh = f"lakestorearchived{where[2:5]}", tmp_path / "fresh"
    uri = f"{lake.as_uri()}-archive"
    kept = archive_place(uri, tmp_path / "archive-state") if where == "a store" else tmp_path / "archive"
    with pymongo.MongoClient[Any](replica_set.uri, w="majority") as client:
        archive(client[database].a, kept)
        start = newest(replica_set.uri)
        client[database].a.insert_many([{"_id": number} for number in range(50)])
        client[database].b.insert_many([{"_id": number} for number in range(20)])
        middle = newest(replica_set.uri)
        archive(client[database].a, kept)
        client[database].b.delete_many({"_id": {"$lt": 5}})
        until = newest(replica_set.uri)
    wide = options_for(replica_set.uri, database, start)
    fill({**wide, "collection": "a"}, lake, until)
    fill(wide, fresh, until)
    named = {**wide, "archive": str(kept)}
    with beginning_at(middle):
        for without in (wide, {**wide, "archive": str(tmp_path / "archive" / "..")}):
            with pytest.raises((ChangeStreamHistoryLost, UsageError)):
                change_lake(without, lake)
        report = change_lake(named, lake)
    assert (report.since, report.rows) == (ClusterTime(int(start)), 25)
    assert_equal(lake, fresh)
    if where == "a store":
        assert isinstance(kept, ObjectPlace)
        written_to(tmp_path / "copy", kept)  # it has not been written to
        assert (tmp_path / "copy" / "archive.json").exists()


def pipeline_of(history: History, lake: ObjectPlace, state: Path, further: str = "") -> str:
    """A pipeline file for the lake, with ``further`` settings of it."""
    start = history.start.tick()
    return (
        f"source: {{uri: '{history.uri}', database: {_DATABASE}, "
        f"startAtOperationTime: '{start.seconds},{start.increment}'}}\n"
        f"lake: {{path: '{lake.as_uri()}', state: {state}{further}}}\n"
    )


def test_the_command(  # noqa: PLR0917
    history: History,
    object_store: ObjectServer,
    lake: ObjectPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys_from(object_store, monkeypatch)
    state, file = tmp_path / "state", tmp_path / "pipeline.yaml"
    text = pipeline_of(history, lake, state)
    file.write_text(text)
    fill(history.source(collection="orders"), lake, history.middle)
    assert main(["lake", "change", str(file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f'settings.scope: "{_DATABASE}.orders" becomes "{_DATABASE}"\n' in out
    assert out.endswith("Nothing was changed.\n")
    file.write_text(text.replace(str(state), str(tmp_path / "another")))
    assert main(["lake", "change", str(file)]) == 1
    assert "another state directory" in capsys.readouterr().err
    file.write_text(text.replace("lake: {", "lake: {partitionBy: [day, collection], "))
    assert main(["lake", "change", str(file)]) == 1
    assert f"the lake {lake.as_uri()} is partitioned by day" in capsys.readouterr().err
    file.write_text(text)
    assert main(["lake", "change", str(file), "--archive", f"{lake.as_uri()}-no"]) == 1
    assert "there is no archive at" in capsys.readouterr().err
    assert main(["lake", "change", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"the checkpoint of the old stream is at {state / 'checkpoint.superseded-'}" in out
    assert main(["lake", "change", str(file)]) == 0
    assert "already matches the pipeline file" in capsys.readouterr().out
    fill(history.source(), tmp_path / "fresh", history.middle)
    assert_equal(lake, tmp_path / "fresh")
    assert main(["lake", "status", lake.as_uri()]) == 0
    assert "change: settings.scope" in capsys.readouterr().out


@pytest.mark.parametrize("object_store", ["s3"], indirect=True)
def test_a_catalogue_that_fails_after_the_change(  # noqa: PLR0917
    history: History,
    object_store: ObjectServer,
    lake: ObjectPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lake is changed then, and the command says so: it had printed nothing but the catalogue's error. No test had
    let a catalogue fail in between."""
    keys_from(object_store, monkeypatch)
    state, file = tmp_path / "state", tmp_path / "pipeline.yaml"
    with small_disk(tmp_path / "disk", "2m") as disk:
        file.write_text(pipeline_of(history, lake, state, f", iceberg: '{catalog_uri(disk.path)}'"))
        fill(history.source(collection="orders"), lake, history.middle)
        at_step("change.checkpoint", 1, lambda: disk.leave(0))
        assert main(["lake", "change", str(file)]) == 1
        durable.observe_steps(None)
        told = capsys.readouterr()
        assert "events added" in told.out
        assert f"the checkpoint of the old stream is at {state / 'checkpoint.superseded-'}" in told.out
        assert "has no room left" in told.err
        disk.make_room()
        assert main(["lake", "change", str(file)]) == 0
        assert "already matches the pipeline file" in capsys.readouterr().out
        found = sql_catalog(disk.path, **object_store.for_iceberg()).load_table(identifier_of(lake))
        given, expected = found.scan().to_arrow(), delta_table(lake).to_pyarrow_table()
        assert given.num_rows > 0
        assert given.sort_by("token").select(["token", "event"]) == expected.sort_by("token").select(["token", "event"])
