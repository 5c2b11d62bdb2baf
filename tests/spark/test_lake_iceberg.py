"""Lakes of a server's events as Iceberg tables: all columns and forms of documents, changed lakes, and Spark's own runs
with kills between the lake's commit and the catalogue's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.iceberg.lake_mirror import LakeMirror
from tailrace.lake.spark.query.options import COLUMNS
from tailrace.lake.spark.store.change import change_lake
from tailrace.lake.store.layout import LakeLayout
from tests.spark.lake_driving import PATIENCE_S, driver, options_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import newest
from tests.unit.lake_iceberg import is_shown, mirror_of, newest_rows, settings_of, versions_shown

pytestmark = [pytest.mark.mongod, pytest.mark.filterwarnings("ignore:Iceberg scan planning")]
_DATABASE = "lakeiceberg"


def work(uri: str, first: int) -> ClusterTime:
    """Events of two collections, of all kinds of documents, and one without a collection."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        orders, other = client[_DATABASE]["orders"], client[_DATABASE]["näme %20"]
        for number in range(first, first + 8):
            orders.insert_one({"_id": number, "n": {"deep": [number, None, "x" * 20]}})
            other.insert_one({"_id": float(number)})
        orders.update_many({"_id": {"$lt": first + 5}}, {"$inc": {"m": 100}})
        with client.start_session() as session, session.start_transaction():
            orders.delete_one({"_id": first}, session=session)
            other.insert_one({"_id": f"t{first}"}, session=session)
    return newest(uri)


@pytest.mark.parametrize(
    ("documents", "partition_by"),
    [
        ("json", ("day", "collection")),
        # The first one, and tests/unit/test_lake_iceberg.py, are their guards.
        pytest.param("variant", ("day",), marks=pytest.mark.slow),
        pytest.param("bson", ("day", "hour", "collection"), marks=pytest.mark.slow),
    ],
)
def test_all_columns_of_a_server_s_events(
    replica_set: ReplicaSet, tmp_path: Path, documents: str, partition_by: tuple[str, ...]
) -> None:
    uri, lake = replica_set.uri, tmp_path / "lake"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(_DATABASE)  # of the test before
    source = options_for(
        uri, _DATABASE, newest(uri), maxEventsPerTrigger="15", columns=",".join(COLUMNS), documents=documents
    )
    mirror = mirror_of(lake)
    fill(source, lake, work(uri, 0), partition_by=partition_by)
    mirror.follow()
    until = work(uri, 100)
    fill(source, lake, until, partition_by=partition_by, checkpoint=tmp_path / "another")
    mirror.follow()
    assert len(versions_shown(lake)) == 2
    rows = newest_rows(lake)
    assert len(rows) >= 46
    assert {*COLUMNS, *partition_by} == set(rows[0])
    assert mirror.fault() is None
    change_lake({**source, "documents": "bson" if documents == "json" else "json"}, lake)
    mirror.follow()
    assert len(versions_shown(lake)) == 1  # the others would be misread
    assert [row["event"] for row in newest_rows(lake)] == [row["event"] for row in rows]
    assert verify(lake, full=True).sound


@pytest.mark.spark
def test_tailrace_run_keeps_a_catalogue(tailrace_run: Any, replica_set: ReplicaSet, tmp_path: Path) -> None:
    uri, lake, path = replica_set.uri, tmp_path / "lake", tmp_path / "pipeline.yaml"
    catalogue = settings_of(tmp_path).properties["uri"]
    start = newest(uri).tick()
    text = (
        f"source: {{uri: '${{TEST_URI}}', database: {_DATABASE}, startAtOperationTime: '{start.seconds},"
        f"{start.increment}'}}\n"
        "limits: {maxEventsPerTrigger: 10}\ncompaction: {every: 2, fanIn: 2, retention: 1 minute}\n"
        "spark: {cores: 2, config: {spark.sql.shuffle.partitions: 2}}\n"
    )
    path.write_text(f"{text}lake: {{path: lake, iceberg: '{catalogue}'}}\n")
    work(uri, 200)
    code, _, err = tailrace_run(path, "--available-now", uri=uri)
    assert code == 0, err
    assert len(versions_shown(lake)) > 2
    assert is_shown(lake)
    before = newest_rows(lake)
    path.write_text(f"{text}lake: {{path: lake}}\n")
    work(uri, 300)
    code, _, err = tailrace_run(path, "--available-now", uri=uri)
    assert code == 0, err
    assert "its Iceberg snapshots get no new events" in err
    assert not is_shown(lake)
    code, _, err = tailrace_run(path, "--compact", uri=uri)
    assert (code, "would lose their files" in err) == (1, True), err
    code, out, err = tailrace_run(path, "--compact", "--iceberg", catalogue, uri=uri)
    assert code == 0, err
    assert len(newest_rows(lake)) > len(before)
    assert is_shown(lake)
    code, out, err = tailrace_run(path, "--verify", "--iceberg", catalogue, uri=uri)
    assert (code, "has the files of the commit that it states" in out) == (0, True), out + err


@pytest.mark.spark
@pytest.mark.slow  # tests/unit/test_lake_iceberg.py dies at the same steps, without Spark
@pytest.mark.parametrize("step", ["commit.log", "iceberg.written", "iceberg.shown"])
def test_a_run_that_is_killed_catches_up(replica_set: ReplicaSet, tmp_path: Path, step: str) -> None:
    uri, lake = replica_set.uri, tmp_path / "lake"
    options = options_for(uri, _DATABASE, newest(uri), maxEventsPerTrigger="5")
    settings = settings_of(tmp_path)
    work(uri, 400)
    for _ in range(2):
        arguments = ("--available-now", "--iceberg", settings.to_text(), "--die-at", step, "1")
        with driver(options, lake, *arguments) as process:
            assert process.wait(PATIENCE_S) != 0, (lake.parent / "driver.log").read_text()[-4000:]
        if (lake / "_iceberg").exists():
            versions_shown(lake)
    with driver(options, lake, "--available-now", "--iceberg", settings.to_text()) as process:
        assert process.wait(PATIENCE_S) == 0, (lake.parent / "driver.log").read_text()[-4000:]
    assert is_shown(lake)
    versions_shown(lake)
    assert len(newest_rows(lake)) >= 23
    assert LakeMirror(lake, settings).fault() is None
    assert verify(lake, full=True, checkpoint=LakeLayout(lake).default_checkpoint).sound
