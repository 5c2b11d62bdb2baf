"""A lake with exact images: the server's own events, also with a new checkpoint; and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.sql import SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.lake.spark.store.failure import query_error
from tailrace.lake.spark.store.stream import write_stream
from tests.spark.lake_driving import options_for
from tests.spark.streams import newest, server_events
from tests.spark.test_lake import change, fill

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

DATABASE = "lake_exact"
MODES = {"fullDocument": "exact", "fullDocumentBeforeChange": "exact", "maxEventsPerTrigger": "70"}


def expected(uri: str, start: ClusterTime, until: ClusterTime) -> list[bytes]:
    required = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}
    return server_events(uri, (DATABASE, None), start, until, stage=required)


def test_a_lake_has_the_server_s_images(spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path) -> None:
    uri, lake, images = replica_set.uri, tmp_path / "lake", tmp_path / "images"
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        client.drop_database(DATABASE)
        client[DATABASE].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    start = newest(uri)
    options = options_for(uri, DATABASE, start, images=str(images), **MODES)
    until = change(uri, DATABASE, 0, 100)
    fill(spark, options, lake)
    first = expected(uri, start, until)
    assert len(first) > 150
    assert list(lake_events(lake)) == first
    # Once more, and with a new checkpoint, which begins at the lake's last event.
    change(uri, DATABASE, 100, 50)
    fill(spark, options, lake)
    until = change(uri, DATABASE, 150, 50)
    fill(spark, options, lake, checkpoint=tmp_path / "another")
    assert list(lake_events(lake)) == expected(uri, start, until)

    with pytest.raises(UsageError, match="a gap cannot be accepted in a lake with exact images"):
        write_stream(spark, options, lake, accept_gap=True, checkpoint=tmp_path / "another")

    # Without its directory of images the lake does not go on: a new one would know none of the documents.
    until = change(uri, DATABASE, 200, 20)
    images.rename(tmp_path / "kept")
    for checkpoint, said in (
        ("another", "not those of this checkpoint"),
        ("third", "the lake has events, but nothing in"),
    ):
        with pytest.raises(Exception, match=said) as failed:
            fill(spark, options, lake, checkpoint=tmp_path / checkpoint)
        assert isinstance(query_error(failed.value), UsageError)
        assert not images.exists()
        shutil.rmtree(tmp_path / "third", ignore_errors=True)
    (tmp_path / "kept").rename(images)
    fill(spark, options, lake, checkpoint=tmp_path / "fourth")
    assert list(lake_events(lake)) == expected(uri, start, until)
