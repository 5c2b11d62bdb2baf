"""The rows of a lake in an object store, for Spark: each task reads its files by the store's own client.

Spark reaches a store by Hadoop's JARs and keys in its own settings; this needs neither. Use ``tailrace.lake.read``,
which names the files: they are the lake at one version. Keys come from the environment, that of executors too.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType, VariantType

from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, UsageError
from tailrace.lake.spark.query.schema import DOCUMENT_COLUMNS
from tailrace.lake.store.changing_note import set_back
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.identity import partitioning_of, read_identity, require_changed
from tailrace.lake.store.lake_root import LakeRoot, rooted
from tailrace.lake.store.layout import checked_name, partition_values
from tailrace.lake.store.manifest import FileEntry, StagedFile
from tailrace.lake.store.partitioning import DAY, HOUR

if TYPE_CHECKING:
    import pyarrow as pa

#: The lake's URI, its columns as Spark's JSON, and its files (``packed``).
LAKE, COLUMNS, FILES = "lake", "lakeColumns", "lakeFiles"
#: As Spark reads files: a task has so many bytes, and a file counts as so many more.
_TASK_BYTES: Final = 128 << 20
_FILE_BYTES: Final = 4 << 20
#: As many rows go to Spark at once as it takes fastest.
_ROWS: Final = 2_000
_TRIES: Final = 5


@dataclass(frozen=True, eq=False)
class StoredFiles(InputPartition):
    """Files of the lake that one task reads."""

    files: tuple[StagedFile, ...]


class StoredRowsReader(DataSourceReader):
    """The rows of the files named, checked as they are read."""

    def __init__(self, lake: str, schema: StructType, files: Sequence[StagedFile]) -> None:
        self._lake, self._schema, self._files = lake, schema, tuple(files)

    def partitions(self) -> Sequence[InputPartition]:
        groups: list[list[StagedFile]] = []
        size = _TASK_BYTES
        for file in self._files:
            size += file.size + _FILE_BYTES
            if size > _TASK_BYTES:
                groups.append([])
                size = file.size + _FILE_BYTES
            groups[-1].append(file)
        return [StoredFiles(tuple(group)) for group in groups] or [StoredFiles(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415  with Arrow: in the tasks only

        from tailrace.lake.store.part_writer import opened_to_read  # noqa: PLC0415  the same

        assert isinstance(partition, StoredFiles)
        root: LakeRoot = rooted(self._lake)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for file in partition.files:
            with opened_to_read(root, file) as parquet:
                for batch in parquet.iter_batches(batch_size=_ROWS):
                    yield as_spark_has_it(batch, schema, _constants(file.name))


class StoredRows(DataSource):
    """The data source ``tailrace-lake-rows``, made for ``tailrace.lake.read``."""

    @classmethod
    def name(cls) -> str:
        return "tailrace-lake-rows"

    def schema(self) -> StructType:
        return StructType.fromJson(json.loads(self._option(COLUMNS)))

    def reader(self, schema: StructType) -> DataSourceReader:
        return StoredRowsReader(self._option(LAKE), schema, unpacked(self._option(FILES)))

    def _option(self, name: str) -> str:
        found = {key.lower(): text for key, text in self.options.items()}.get(name.lower())
        if found is None:
            raise UsageError(f"the option {name!r} is missing", hint="Read a lake with tailrace.lake.read")
        return str(found)


def columns_of(known: Mapping[str, Any]) -> StructType:
    """The columns of the lake with this ``lake.json``, as Spark reads them from files: any may be NULL."""
    schema = StructType.fromJson(
        {"type": "struct", "fields": [*known["columns"], *partitioning_of(known).fields()]}  # the log's own columns
    )
    for field in schema.fields:
        field.nullable = True
        if field.name in DOCUMENT_COLUMNS and known["stream"].get("documents") == "variant":
            field.dataType = VariantType()
    return schema


def columns_and_files(root: ObjectPlace, version: int | None) -> tuple[StructType, list[FileEntry]]:
    """What Spark reads of the lake at ``root``: the columns as they were at ``version``, which a change may have
    rebuilt since. Raises UsageError where it is no lake, SinkError where its log is damaged or lacks that version."""
    log = CommitLog(root)
    for _ in range(_TRIES):
        known = read_identity(root)
        if known is None:
            raise UsageError(f"{root} is not a lake of Tailrace")
        state = log.state(version)
        newest = state if version is None else log.state()
        if not set_back(known, newest):  # otherwise it was changed between the two
            since = newest.changes[len(state.changes) :]
            rebuilt = any(key in ("columns", "documents") for change in since for key in change.keys)
            return (_columns_at(root, state.number) if rebuilt else columns_of(known)), state.in_order
    require_changed(log, known or {})
    raise SinkError(f"the lake {root} keeps changing", hint="Try again")


def _columns_at(root: ObjectPlace, version: int) -> StructType:
    """The columns of an older version, as the log has them."""
    from deltalake.exceptions import DeltaError  # noqa: PLC0415  for a lake that was changed only

    from tailrace.lake.store.places import delta_table  # noqa: PLC0415  the same

    try:
        schema = StructType.fromJson(json.loads(delta_table(root, version).schema().to_json()))
    except (DeltaError, OSError, ValueError) as error:
        raise SinkError(f"version {version} of the lake {root} cannot be read: {error}") from error
    for field in schema.fields:
        field.nullable = True
        if field.name in DOCUMENT_COLUMNS and isinstance(field.dataType, StructType):
            field.dataType = VariantType()
    return schema


def packed(files: Sequence[StagedFile]) -> str:
    """The files as an option's text: a lake may have many thousands."""
    rows = [[file.name, file.rows, file.size, file.sha256, file.first_token, file.last_token] for file in files]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def unpacked(text: str) -> list[StagedFile]:
    """The files again."""
    rows = json.loads(zlib.decompress(base64.b64decode(text)))
    return [StagedFile(checked_name(row[0], "the list of files"), *row[1:]) for row in rows]


def as_spark_has_it(batch: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, Any]) -> pa.RecordBatch:
    """A file's rows with all columns of the lake: NULL where the file is older than a column."""
    import pyarrow as pa  # noqa: PLC0415

    arrays = []
    for field in schema:
        if field.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), batch.num_rows))
        elif field.name in batch.schema.names:
            column = batch.column(field.name)
            arrays.append(column if column.type == field.type else column.cast(field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _constants(name: str) -> dict[str, Any]:
    """The partition columns that no file holds."""
    values = partition_values(name, None)
    hour = values.get(HOUR)
    found: dict[str, Any] = {DAY: date.fromisoformat(str(values[DAY]))}
    return found if hour is None else {**found, HOUR: int(hour)}
