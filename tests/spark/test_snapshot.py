"""``startingFrom=snapshot``: the existing documents, and then every change, with writers and through crashes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo.collation import Collation
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.lake import files, verify
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.commit_log import CommitLog
from tests.amounts import amount
from tests.snapshot.copies import Target, truth
from tests.snapshot.test_snapshot import fill, ids_of_every_type, in_the_middle
from tests.spark.dying_sink import dying_sink
from tests.spark.readers import CrashingQuery
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

DATABASE = "copied"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 300


@pytest.fixture
def db(replica_set: ReplicaSet) -> Iterator[Any]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database(DATABASE)
        yield client[DATABASE]
        client.drop_database(DATABASE)


def options_of(uri: str, **more: str) -> dict[str, str]:
    return {"uri": uri, "database": DATABASE, "startingFrom": "snapshot", "fullDocument": "updateLookup", **more}


def kind_of(row: dict[str, Any]) -> str:
    return str(RawBSONDocument(row["event"])["operationType"])


def run_to(query: CrashingQuery, until: ClusterTime) -> None:
    """Run the query until it stands at a time, with nothing left to copy."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        query.step()
        kept = query.checkpoint
        if kept.planned and kept.done == len(kept.planned):
            offset = Offset.from_json(kept.planned[-1])
            if offset.snapshot is None and offset.cluster_time >= until:
                return
        assert time.monotonic() < deadline


def check(rows: list[dict[str, Any]], collections: list[Any]) -> Target:
    """Check that the rows ascend, contain no event twice, and lead to what the collections hold."""
    tokens = [row["token"] for row in rows]
    assert all(left < right for left, right in pairwise(tokens))
    kinds = [kind_of(row) for row in rows]
    assert "snapshot" not in kinds[kinds.count("snapshot") :]
    target = Target()
    for row in rows:
        target.apply(row["event"])
    for collection in collections:
        assert target.collections.get(collection.full_name, {}) == truth(collection)
    return target


def test_documents_with_ids_of_every_type_come_once_and_in_order(replica_set: ReplicaSet, db: Any) -> None:
    documents = ids_of_every_type()
    db.odd.insert_many(documents)
    db.plain.insert_many([{"_id": number} for number in range(500)])
    db.create_collection("french", collation=Collation(locale="fr", caseLevel=True))
    db.french.insert_many([{"_id": text} for text in ("cote", "côte", "Cote", "coté", "a", "Z", "é")])
    db.create_collection("view", viewOn="plain", pipeline=[])
    query = CrashingQuery(options_of(replica_set.uri, maxEventsPerTrigger="7", partitions="3"))
    run_to(query, newest(replica_set.uri))
    query.close()
    target = check(query.rows, [db.odd, db.plain, db.french])
    assert target.snapshots == len(documents) + 507
    assert {kind_of(row) for row in query.rows} == {"snapshot"}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_beside_four_writers_and_through_twenty_crashes_nothing_is_lost_or_twice(
    replica_set: ReplicaSet, db: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lake.spark.planning.snapshot.CHUNK_BYTES", 4_000)
    monkeypatch.setattr("tailrace.lake.spark.planning.snapshot.BATCH_BYTES", 12_000)
    names = ["a", "b"]
    fill(db, names)
    query = CrashingQuery(options_of(replica_set.uri, partitions="2"), seed=seed, chance=0.25)

    def copy() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not query.checkpoint.planned or "snapshot" in query.offset:
            query.step()
            assert time.monotonic() < deadline

    in_the_middle(db, names, copy)
    db.later.insert_many([{"_id": 1}, {"_id": 2}])  # a new collection of the database is taken in
    run_to(query, newest(replica_set.uri))
    query.close()
    assert query.crashes >= 10
    target = check(query.rows, [db.a, db.b, db.later])
    assert target.snapshots > 500
    # After the copy comes the server's own stream, from the copy's time on.
    start = Offset.from_json(query.checkpoint.planned[0])
    stage = {"fullDocument": "updateLookup"}
    events = [row["event"] for row in query.rows if kind_of(row) != "snapshot"]
    native = server_events(replica_set.uri, (DATABASE, None), start.cluster_time, newest(replica_set.uri), stage=stage)
    assert [token_of(event) for event in events] == [token_of(event) for event in native]


def token_of(event: bytes) -> Any:
    return RawBSONDocument(event)["_id"]["_data"]


@pytest.mark.parametrize("what", ["dropped", "replaced", "renamed"])
def test_a_collection_that_goes_in_the_middle_of_its_copy(
    replica_set: ReplicaSet, db: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.lake.spark.planning.snapshot.CHUNK_BYTES", 2_000)
    monkeypatch.setattr("tailrace.lake.spark.planning.snapshot.BATCH_BYTES", 4_000)
    db.a.insert_many([{"_id": number, "old": True} for number in range(300)])
    db.b.insert_one({"_id": 1})
    query = CrashingQuery(options_of(replica_set.uri))
    for _ in range(3):
        query.step()
    assert 0 < len(query.rows) < 300
    if what == "renamed":
        db.a.rename("c")
    else:
        db.a.drop()
    if what == "replaced":
        db.a.insert_many([{"_id": number, "old": False} for number in range(200)])
    run_to(query, newest(replica_set.uri))
    query.close()
    check(query.rows, [db.a, db.b, db.c])


def test_the_users_stages_go_over_what_is_copied_too(replica_set: ReplicaSet, db: Any) -> None:
    db.a.insert_many([{"_id": number, "even": number % 2 == 0, "n": number} for number in range(50)])
    pipeline = [{"$match": {"fullDocument.even": True}}, {"$project": {"fullDocument.n": 0}}]
    query = CrashingQuery(options_of(replica_set.uri, pipeline=json.dumps(pipeline)))
    run_to(query, newest(replica_set.uri))
    db.a.insert_many([{"_id": 100, "even": True, "n": 1}, {"_id": 101, "even": False}])
    run_to(query, newest(replica_set.uri))
    query.close()
    found = [bson.decode(row["event"]) for row in query.rows]
    assert [one["fullDocument"] for one in found] == [
        {"_id": number, "even": True} for number in [*range(0, 50, 2), 100]
    ]


def test_a_limit_of_documents_a_second_and_progress_that_can_be_read(replica_set: ReplicaSet, db: Any) -> None:
    db.a.insert_many([{"_id": number} for number in range(300)])
    query = CrashingQuery(options_of(replica_set.uri, snapshotDocumentsPerSecond="150"))
    begun = time.monotonic()
    for _ in range(3):
        query.step()
    position = Offset.from_json(query.offset).snapshot
    assert position is not None
    assert (position.documents, position.estimate) == (300, 300)
    assert query.offset["version"] == 2
    assert query.offset["snapshot"]["state"]["collections"][0]["namespace"] == f"{DATABASE}.a"
    run_to(query, newest(replica_set.uri))
    query.close()
    assert len(query.rows) == 300
    assert time.monotonic() - begun >= 1  # it is never faster


def test_a_batch_read_of_a_snapshot_is_refused(spark: SparkSession, replica_set: ReplicaSet) -> None:
    with pytest.raises(Exception, match="startingFrom=snapshot is for streams"):
        spark.read.format("tailrace").options(**options_of(replica_set.uri)).load().collect()


def lake_rows(lake: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return [row for file in files(lake) for row in pq.read_table(file, columns=["event", "token"]).to_pylist()]


@pytest.mark.parametrize("drivers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lake_begins_with_what_was_there_also_through_kills_and_a_lost_checkpoint(
    spark: SparkSession, replica_set: ReplicaSet, db: Any, tmp_path: Path, drivers: int
) -> None:
    """The committing process is killed in the middle of a commit; or so many drivers are, at any moment."""
    names = ["a", "b"]
    fill(db, names)
    count = amount(800, 8000)
    db.big.insert_many([{"_id": number, "pad": os.urandom(500)} for number in range(count)])
    lake = tmp_path / "lake"
    options = options_of(replica_set.uri, maxEventsPerTrigger="300", partitions="2")
    rng = random.Random()

    def run() -> None:
        if not drivers:
            query = write_stream(spark, options, lake, sink=dying_sink("commit.log", 1, batch=3))
            with pytest.raises(StreamingQueryException):
                query.awaitTermination(PATIENCE_S)
        for number in range(drivers):
            with lake_driver(options, lake) as process:
                wait_for_commits(process, lake, 2 * number + 2)
                time.sleep(rng.uniform(0, 1))
        newest_batch = CommitLog(lake).head().newest
        assert newest_batch is not None
        assert newest_batch.planned.snapshot, "the copy is to be cut off in the middle"

    in_the_middle(db, names, run, writers=1)
    # The checkpoint is lost: a fresh one goes on with the copy where the lake is.
    options["maxEventsPerTrigger"] = "1000000"
    write_stream(spark, options, lake, available_now=True, checkpoint=tmp_path / "fresh").awaitTermination()
    assert verify(lake, full=True).problems == []
    target = check(lake_rows(lake), [db.a, db.b, db.big])
    assert target.snapshots > count


class lake_driver:  # noqa: N801  a context
    """A driver of its own that is killed at the end, with its JVM and its workers."""

    def __init__(self, options: dict[str, str], lake: Path) -> None:
        self._command = [sys.executable, "-m", "tests.spark.lake_driver", json.dumps(options), str(lake)]
        self._log = lake.parent / "driver.log"

    def __enter__(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        return self._process

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for_commits(process: subprocess.Popen[bytes], lake: Path, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (lake / "_tailrace" / "lake.json").exists() or CommitLog(lake).head().number < number:
        assert process.poll() is None, (lake.parent / "driver.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_the_same_on_older_servers(start_replica_set: Callable[..., ReplicaSet], version: str) -> None:
    older = start_replica_set(1, version=version)
    with pymongo.MongoClient[dict[str, Any]](older.uri) as client:
        db = client[DATABASE]
        fill(db, ["a"])
        query = CrashingQuery(options_of(older.uri, partitions="2"), seed=5, chance=0.2)
        in_the_middle(db, ["a"], lambda: [query.step() for _ in range(12)])
        run_to(query, newest(older.uri))
        query.close()
        check(query.rows, [db.a])


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="'snapshotDocumentsPerSecond': expected a whole number"):
        CrashingQuery({"uri": "mongodb://h", "startingFrom": "snapshot", "snapshotDocumentsPerSecond": "fast"})
