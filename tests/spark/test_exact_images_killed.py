"""Exact images through real Spark, killed with its workers: the sink has the server's own stream, once.

``make test-landing`` has the crashes of test_exact_images.py, between all steps and in the middle of a slice, and kills
of a driver in test_crash.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pymongo
import pytest
from pyspark.sql import SparkSession

from tailrace.embedded import ReplicaSet
from tests.spark.test_crash import check_through_kills

pytestmark = [pytest.mark.spark, pytest.mark.mongod, pytest.mark.slow]
REQUIRED = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}


def test_after_kills_the_sink_holds_the_servers_images_once(
    spark: SparkSession, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    database = "exact_crash"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        client[database].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    exact = {"fullDocument": "exact", "fullDocumentBeforeChange": "exact", "images": str(tmp_path / "images")}
    check_through_kills(spark, replica_set, database, tmp_path, 5, more=exact, stage=REQUIRED)
