"""Read a current-state table with Spark, without Delta's JARs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tailrace.errors import SinkError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, path: Path | str, *, version: int | None = None) -> DataFrame:
    """The table at ``path`` (the directory of one collection) as a Spark DataFrame, with all its columns, at one
    version (default: the newest).

    The files are those that the log names now. They stay for ``tables.grace`` after they have been replaced, and a
    query that takes longer needs a longer ``grace``. Raises UsageError if ``path`` is not a table or lies in an object
    store, and SinkError if its log cannot be read.
    """
    if "://" in str(path):
        raise UsageError(
            "tailrace.tables.read reads tables in directories, and this one is in an object store",
            hint='Read it with spark.read.format("delta"), which needs Delta\'s JARs and those of the store, or give a '
            "copy of its directory",
        )
    import pyarrow as pa  # noqa: PLC0415  with the extra only
    from deltalake import DeltaTable  # noqa: PLC0415
    from deltalake.exceptions import DeltaError, TableNotFoundError  # noqa: PLC0415
    from pyspark.sql.types import StructType  # noqa: PLC0415

    root = Path(path).absolute()
    try:
        table = DeltaTable(root.as_uri(), version=version)
    except TableNotFoundError as error:
        raise UsageError(f"{root} is not a table of Tailrace") from error
    except (DeltaError, OSError, ValueError) as error:
        raise SinkError(f"the table {root} cannot be read: {error}") from error
    if table.metadata().partition_columns:
        raise UsageError(f"{root} is not a table of Tailrace: Delta divides it by partitions")
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    names = [root / unquote(name) for name in pa.table(table.get_add_actions()).column("path").to_pylist()]
    if not names:
        return spark.createDataFrame([], schema)
    rows = spark.read.schema(schema).parquet(*map(str, names))
    marked = _marked(root, table)
    return _without(rows, spark.createDataFrame(marked, "file string, vector string")) if marked else rows


def _marked(root: Path, table: DeltaTable) -> list[tuple[str, str]]:
    """For a table that is merged on read: the names of the files some of whose rows are gone, each with those rows."""
    from tailrace.lake.tables.live_files import files_at  # noqa: PLC0415
    from tailrace.lake.tables.merge_on_read import has_vectors  # noqa: PLC0415

    files = files_at(root, table.version()) if has_vectors(table) else []
    return [(file.name.rpartition("/")[2], json.dumps(file.vector)) for file in files if file.gone]


def _without(rows: DataFrame, marked: DataFrame) -> DataFrame:
    """The rows that are not gone. The executors make row numbers of the vectors."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    file, number = f"_file_{uuid.uuid4().hex}", f"_row_{uuid.uuid4().hex}"
    gone = marked.mapInArrow(_numbers, "file string, number long").toDF(file, number)
    numbered = rows.select("*", f.col("_metadata.file_name").alias(file), f.col("_metadata.row_index").alias(number))
    return numbered.join(gone, [file, number], "left_anti").drop(file, number)


def _numbers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa  # noqa: PLC0415

    from tailrace.lake.tables.deletion_vector import rows_of  # noqa: PLC0415

    for batch in batches:
        for file, vector in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            numbers = pa.array(rows_of(json.loads(vector)), pa.int64())
            yield pa.RecordBatch.from_arrays([pa.repeat(file, len(numbers)), numbers], ["file", "number"])
