"""The copy of existing documents into a lake whose disk is full: it says so, and goes on where it was when there is
room.

Full disks had been tried with a lake of changes, and with the first copy of tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.lake import verify
from tailrace.lake.spark.store.failure import query_error
from tailrace.lake.spark.store.stream import write_stream
from tailrace.lake.store.commit_log import CommitLog
from tests.small_disk import PAGE, small_disk
from tests.spark.test_snapshot import check, lake_rows

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

DATABASE = "copied_full_disk"
_DOCUMENTS = 3000


@pytest.fixture
def db(replica_set: ReplicaSet) -> Iterator[Any]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database(DATABASE)
        yield client[DATABASE]
        client.drop_database(DATABASE)


def pad() -> bytes:
    return os.urandom(400)


def change(db: Any, turn: int) -> None:
    """Change documents that are already copied and others."""
    for name in ("a", "b"):
        db[name].update_many({"_id": {"$mod": [7, turn]}}, {"$set": {"turn": turn}})
        db[name].delete_many({"_id": {"$mod": [101, turn]}})
        db[name].insert_many([{"_id": _DOCUMENTS + 10 * turn + number, "pad": pad()} for number in range(10)])


def is_copying(lake: Path) -> bool:
    newest = CommitLog(lake).head().newest
    assert newest is not None
    return bool(newest.planned.snapshot)


@pytest.mark.slow  # a stream: test_lake.py; kills in a copy: test_snapshot.py
@pytest.mark.parametrize("where", [pytest.param("the lake", marks=pytest.mark.slow), "the lake and the checkpoint"])
@pytest.mark.parametrize("rooms", [(120,), pytest.param((0, 1, 2, 5, 10, 20, 30, 60, 90, 150), marks=pytest.mark.slow)])
def test_a_copy_says_that_there_is_no_room_and_goes_on_where_it_was(
    spark: SparkSession, replica_set: ReplicaSet, db: Any, tmp_path: Path, rooms: tuple[int, ...], *, where: str
) -> None:
    for name in ("a", "b"):
        db[name].insert_many([{"_id": number, "pad": pad()} for number in range(_DOCUMENTS)])
    options = {"uri": replica_set.uri, "database": DATABASE, "startingFrom": "snapshot"}
    options |= {"fullDocument": "updateLookup", "maxEventsPerTrigger": "250", "partitions": "2"}
    options["columns"] = "event,token"
    with small_disk(tmp_path / "disk", "32m") as disk:
        lake = disk.path / "lake"
        checkpoint = (tmp_path if where == "the lake" else disk.path) / "checkpoint"

        def run() -> None:
            query = write_stream(spark, options, lake, checkpoint=checkpoint, available_now=True)
            try:
                query.awaitTermination()
            finally:
                query.stop()

        known: list[dict[str, Any]] = []
        for turn, pages in enumerate(rooms):
            disk.leave(pages * PAGE)
            with pytest.raises((PySparkException, SinkError)) as caught:
                run()
            disk.make_room()
            told = str(query_error(caught.value))
            assert "no room left to write" in told, (pages, told)
            assert "make room and start again" in told, (pages, told)
            if (lake / "_tailrace" / "lake.json").exists():
                assert verify(lake, full=True).problems == [], pages
                found = lake_rows(lake)
                assert found[: len(known)] == known, pages
                known = found
            change(db, turn)
        assert 0 < len(known) < 2 * _DOCUMENTS
        assert is_copying(lake), "the copy is to be cut off in the middle"
        run()
        assert verify(lake, full=True).problems == []
        found = lake_rows(lake)
        assert found[: len(known)] == known
        target = check(found, [db.a, db.b])
        assert target.snapshots > 0.9 * 2 * _DOCUMENTS
        assert list((lake / "_staging").iterdir()) == []
