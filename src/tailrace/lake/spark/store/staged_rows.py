"""How finished files travel from the tasks that read the stream to the sink: as rows, one for each file.

The events themselves are in the files by then. Carrying them through Spark as rows (Python to the JVM and back) cost
as much as reading, transforming and writing them together (``docs/reference/measurements.md``). Each row also says for
which range of the stream the micro-batch was planned. A task without events gives one row that names no file: so the
lake knows how far the stream was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, TimestampType

from tailrace.lake.store.delta_log import guarded, range_from_text, range_to_text
from tailrace.lake.store.layout import checked_name, is_quarantine
from tailrace.lake.store.manifest import PlannedRange, StagedFile

if TYPE_CHECKING:
    import pyarrow as pa

_KINDS: Final[dict[Any, DataType]] = {
    str: StringType(),
    int: LongType(),
    datetime | None: TimestampType(),
    str | None: StringType(),
}
_REQUIRED: Final = (str, int)
_FILE_FIELDS: Final = [
    StructField(name, _KINDS[kind], kind not in _REQUIRED) for name, kind in get_type_hints(StagedFile).items()
]
#: The number of a slice's rows by operation, as JSON text, in the row of its first file; "{}" in the others.
OPERATIONS: Final = "operations"
#: What stands in the row of a task that has written nothing.
_NO_FILE: Final = StagedFile("", 0, 0, "", "", "")
#: The fields of a ``StagedFile``, the rows by operation, and the range that its micro-batch was planned for.
STAGED_SCHEMA: Final = StructType(
    [*_FILE_FIELDS, StructField(OPERATIONS, StringType(), False), StructField("planned", StringType(), False)]
)


def to_batch(
    files: Sequence[StagedFile], planned: PlannedRange, operations: Mapping[str, int] | None = None
) -> pa.RecordBatch:
    """The files as rows of ``STAGED_SCHEMA``, in their order; where there are none, a row that has the range alone."""
    import pyarrow as pa  # noqa: PLC0415  in the tasks only: the planner's process has no use for it

    kinds = {LongType: pa.int64(), StringType: pa.string(), TimestampType: pa.timestamp("us", tz="UTC")}
    schema = pa.schema([pa.field(f.name, kinds[type(f.dataType)], nullable=f.nullable) for f in STAGED_SCHEMA.fields])
    text = range_to_text(planned)
    counts = chain([json.dumps(dict(operations or {}))], repeat("{}"))
    rows = [
        {**{name: getattr(file, name) for name in schema.names[:-2]}, OPERATIONS: count, "planned": text}
        for file, count in zip(files or [_NO_FILE], counts, strict=False)
    ]
    return pa.RecordBatch.from_pylist(rows, schema)


def from_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[StagedFile | None, PlannedRange]]:
    """The files again, in the order of the rows, each with its micro-batch's range; ``None`` for no file."""
    for batch in batches:
        for row in batch.to_pylist():
            yield guarded(partial(_read, row), "a row of the lake's source")


def _read(row: dict[str, Any]) -> tuple[StagedFile | None, PlannedRange]:
    planned = range_from_text(row.pop("planned"))
    row.pop(OPERATIONS)
    if not row["name"]:
        return None, planned
    if not is_quarantine(row["name"]):
        checked_name(row["name"], "a row of the lake's source")
    return StagedFile(**row), planned
