"""Spark's column of the matrix of readers (``tests/tables/test_readers.py``).

The page says that Spark reads tables, which no test had tried.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from tailrace.errors import UsageError
from tailrace.lake.spark.tables import read
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.schema import TableSchema
from tests.amounts import WHOLE
from tests.tables.features import FEATURES, ODD, Made, odd_texts
from tests.tables.readers import plain

pytestmark = pytest.mark.spark


def test_spark_reads_the_same_as_the_others(spark: SparkSession, tmp_path: Path) -> None:
    features = list(FEATURES.items())
    for name, made in features if WHOLE else features[::3]:  # the others have all, in tests/tables/test_readers.py
        expected = made(tmp_path / name)
        frame = read(spark, tmp_path / name)
        assert plain(frame.toArrow().to_pylist()) == expected, name
        if name == "far_dates":
            assert len(frame.collect()) == len(expected)  # as Python's own values


def test_spark_finds_the_rows_of_a_value(spark: SparkSession, tmp_path: Path) -> None:
    odd_texts(tmp_path / "t")
    frame = read(spark, tmp_path / "t")
    assert frame.where(f.col("c") == "x" * 300).count() == 2
    assert {row["c"]: row["count"] for row in frame.groupBy("c").count().collect()} == dict.fromkeys(ODD, 2)
    assert read(spark, tmp_path / "t", version=0).count() == len(ODD)
    with pytest.raises(UsageError, match="is not a table of Tailrace"):
        read(spark, tmp_path)


def test_spark_reads_no_row_that_is_marked_as_gone(spark: SparkSession, tmp_path: Path) -> None:
    made = Made(tmp_path / "t", TableSchema.declared({"n": "int", "file": "string"}), merges=True)
    made.whole([{"_id": one, "n": 0, "file": "x"} for one in range(1000)])
    made.change([{"_id": one, "n": 1, "file": "y"} for one in range(5, 20)], gone=[0, 999])
    made.change([{"_id": 6, "n": 2}], gone=[998])
    frame = read(spark, tmp_path / "t")
    expected = CollectionTable(tmp_path / "t", "shop.orders")
    assert frame.count() == expected.rows() == 997
    assert {row["n"]: row["count"] for row in frame.groupBy("n").count().collect()} == {0: 982, 1: 14, 2: 1}
    assert frame.where(f.col("file") == "y").count() == 14
    assert frame.columns == [field["name"] for field in expected.fields]
    assert [read(spark, tmp_path / "t", version=version).count() for version in (0, 1)] == [1000, 998]
