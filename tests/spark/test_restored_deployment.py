"""A replica set that was restored from an older backup: the same set by its id, with another history."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pymongo
import pytest
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError
from tailrace.lake import verify
from tailrace.lake.spark.store.change import change_lake
from tailrace.lake.spark.store.failure import query_error
from tailrace.lake.spark.store.stream import write_stream
from tests.spark.streams import PATIENCE_S, available_now

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

_SAID: Final = "read from another history: the oplog of rs0 has no entry at"


def insert(uri: str, first: int, count: int) -> None:
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client["shop"]["orders"].insert_many([{"_id": n} for n in range(first, first + count)])


def refusal(run: Callable[[], Any]) -> str:
    """The message with which a query ends."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  Spark wraps what its Python processes raise
        run()
    error = query_error(caught.value)
    assert isinstance(error, OtherHistoryError), error
    return str(error)


@pytest.mark.parametrize(
    "version", ["6.0.27", *(pytest.param(one, marks=pytest.mark.slow) for one in ("5.0.4", "4.4.2"))]
)
def test_a_stream_and_a_lake_are_not_continued_on_a_set_that_was_restored_from_an_older_backup(
    spark: SparkSession, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str
) -> None:
    """Both went on: what the restoration had undone stayed, and what was written instead before the checkpoint's time
    was missing, with exit status 0. An offset held a time and the set's id, and a restored set has the same id. No test
    had restored a deployment's data."""
    data, lake, checkpoint = tmp_path / "data", tmp_path / "lake", tmp_path / "checkpoint"
    replica_set = start_replica_set(data_dir=data, version=version)
    uri = replica_set.uri
    options = {"uri": uri, "database": "shop", "columns": "event,token", "startingFrom": "oldest"}

    def fill(**more: Any) -> None:
        query = write_stream(spark, options, lake, available_now=True, **more)
        try:
            assert query.awaitTermination(PATIENCE_S), "it does not end"
        finally:
            query.stop()

    insert(uri, 0, 10)
    replica_set.stop(0)
    shutil.copytree(data, tmp_path / "backup")
    replica_set.restart(0)
    fill()
    insert(uri, 10, 10)
    fill()
    assert len(available_now(spark, options, checkpoint).events) >= 20
    # No refusal: the same history, after a restart.
    replica_set.stop(0)
    replica_set.restart(0)
    available_now(spark, options, checkpoint)
    fill()

    replica_set.stop(0)
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "backup", data)
    replica_set.restart(0)
    insert(uri, 100, 10)
    for said in (
        refusal(lambda: available_now(spark, options, checkpoint)),
        refusal(fill),
        refusal(lambda: fill(checkpoint=tmp_path / "fresh")),
    ):
        assert _SAID in said


def test_a_lake_that_is_changed_after_the_restoration_is_not_continued_either(
    spark: SparkSession, start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    """A change moves the old checkpoint aside, and with it the position that the next start compares. What the lake's
    log noted must do then. No test had changed a lake of a restored deployment."""
    data, lake = tmp_path / "data", tmp_path / "lake"
    replica_set = start_replica_set(data_dir=data)
    options = {
        "uri": replica_set.uri,
        "database": "shop",
        "collection": "orders",
        "columns": "event,token",
        "startingFrom": "oldest",
    }
    wider = {name: one for name, one in options.items() if name != "collection"}
    other_columns = {**options, "columns": "event,token,operation_type"}

    def fill(root: Path, source: dict[str, str]) -> None:
        query = write_stream(spark, source, root, available_now=True)
        try:
            assert query.awaitTermination(PATIENCE_S), "it does not end"
        finally:
            query.stop()

    insert(replica_set.uri, 0, 10)
    replica_set.stop(0)
    shutil.copytree(data, tmp_path / "backup")
    replica_set.restart(0)
    insert(replica_set.uri, 10, 10)
    fill(lake, options)
    rows = verify(lake).rows
    changed = {tmp_path / "columns": (other_columns, False), tmp_path / "from_now": (wider, True)}
    for root in changed:
        shutil.copytree(lake, root)
        shutil.copytree(tmp_path / "lake.checkpoint", tmp_path / f"{root.name}.checkpoint")

    replica_set.stop(0)
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "backup", data)
    replica_set.restart(0)
    insert(replica_set.uri, 100, 10)
    for root, (source, from_now) in changed.items():
        assert change_lake(source, root, from_now=from_now).superseded is not None
        said = refusal(lambda root=root, source=source: fill(root, source))  # type: ignore[misc]
        assert _SAID in said, root.name
        assert (verify(root).problems, verify(root).rows) == ([], rows), root.name
    # Events of a wider stream are not read from another history at all: the change itself is refused.
    with pytest.raises(OtherHistoryError):
        change_lake(wider, lake)
