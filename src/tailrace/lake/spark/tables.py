"""Read a current-state table with Spark, without Delta's JARs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tailrace.errors import SinkError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(spark: SparkSession, path: Path | str, *, version: int | None = None) -> DataFrame:
    """The table at ``path`` (the directory of one collection) as a Spark DataFrame, with all its columns, at one
    version (default: the newest).

    The files are those that the log names now. They stay for ``tables.grace`` after they have been replaced, and a
    query that takes longer needs a longer ``grace``. Raises UsageError if ``path`` is not a table, and SinkError if its
    log cannot be read.
    """
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
    return spark.read.schema(schema).parquet(*map(str, names))
