"""How staged files travel from the tasks that read the stream to the sink: as rows, one for each file.

The events themselves are in the files by then. Carrying them through Spark as rows (Python to the JVM and back) cost
as much as reading, transforming and writing them together (``docs/reference/measurements.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from tailrace.spark.lake.manifest import StagedFile

if TYPE_CHECKING:
    import pyarrow as pa

STAGED_SCHEMA: Final = StructType(
    [
        StructField("staged", StringType(), False),
        StructField("day", StringType(), False),
        StructField("rows", LongType(), False),
        StructField("size", LongType(), False),
        StructField("first_token", StringType(), False),
        StructField("last_token", StringType(), False),
        StructField("last_wall_time", TimestampType(), True),
    ]
)


def to_batch(files: Iterable[StagedFile]) -> pa.RecordBatch:
    """The files as rows of ``STAGED_SCHEMA``, in their order."""
    import pyarrow as pa  # noqa: PLC0415  in the tasks only: the planner's process has no use for it

    texts = pa.field("", pa.string(), nullable=False)
    types = {
        "staged": texts.type,
        "day": texts.type,
        "rows": pa.int64(),
        "size": pa.int64(),
        "first_token": texts.type,
        "last_token": texts.type,
        "last_wall_time": pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([pa.field(name, kind, nullable=name == "last_wall_time") for name, kind in types.items()])
    rows = list(files)
    return pa.record_batch(
        [pa.array([getattr(row, name) for row in rows], kind) for name, kind in types.items()], schema
    )


def from_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[StagedFile]:
    """The files again, in the order of the rows."""
    for batch in batches:
        for row in batch.to_pylist():
            yield StagedFile(**row)
