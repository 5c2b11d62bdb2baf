"""Spark reads a lake beside appends and compactions, as the page recommends; the other readers are among the unit
tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tailrace.lake import read
from tests.unit.lake_readers import Seen, growing, read_often

pytestmark = pytest.mark.spark


@pytest.mark.slow  # other readers: tests/unit/test_lake_readers.py
@pytest.mark.parametrize("times", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_spark_beside_appends_and_compactions_misses_nothing(spark: SparkSession, tmp_path: Path, times: int) -> None:
    root = tmp_path / "lake"

    def by_spark() -> Seen:
        number = f.col("number")
        chosen = [f.count("*"), f.count_distinct(number), f.min(number), f.max(number)]
        return tuple(read(spark, root).agg(*chosen).first())  # type: ignore[return-value]

    with growing(root, pause=0.1):
        wrong, commits = read_often(root, by_spark, times)
    print(f"spark: {times} reads, {commits} commits meanwhile, {wrong} wrong")
    assert (wrong, commits >= 3) == (0, True)
