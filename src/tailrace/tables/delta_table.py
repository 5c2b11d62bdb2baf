"""One collection's Delta table: read, written whole, or changed by rows.

A micro-batch rewrites only the files that hold rows of its documents: keys are compared, the rows that stay are copied
as columns, and the new rows are added. This is a MERGE without its join, since it is known which documents a batch
changes and what each of them holds afterwards.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace import durable
from tailrace.errors import SinkError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.tables import delta_commit
from tailrace.tables.delta_commit import Actions, Batch, NewFile
from tailrace.tables.names import BSON, JSON, KEY
from tailrace.tables.schema import Column, TableSchema

#: A data file grows to about this many bytes of rows (before compression).
FILE_BYTES: Final = 256 << 20
#: A checkpoint of the log is written every this many versions.
CHECKPOINT_EVERY: Final = 50
_NAMESPACE: Final = "tailrace.namespace"
_DECLARED: Final = "tailrace.declared"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST_US: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_OPEN_MAX: Final = 64

Partition = Mapping[str, str | None]


class HasColumns(Protocol):
    """An object with the typed columns as they are now."""

    @property
    def columns(self) -> Sequence[Column]: ...


class CollectionTable:
    """The table at ``root``. It has one writer; the caller holds the lock.

    ``partition_by``  names of typed columns
    ``bounds``        names of typed columns whose minimum and maximum are kept for each file
    ``declared``      the declaration of the columns (``TableSchema.declaration``), which the table keeps
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        partition_by: Sequence[str] = (),
        bounds: Sequence[str] = (),
        declared: str | None = None,
    ) -> None:
        self.root = root
        self.namespace = namespace
        self._partition_by = tuple(partition_by)
        self._bounds = tuple(name for name in bounds if name not in partition_by)
        self._declared = declared
        self._app = f"tailrace/{namespace}"
        self._ranges: dict[str, tuple[bytes, bytes] | None] = {}
        self._seen = -1
        self._delta: DeltaTable | None = None
        try:
            self._delta = DeltaTable(root.absolute().as_uri())
        except TableNotFoundError:
            pass
        except (DeltaError, OSError, ValueError) as error:
            raise SinkError(f"the table {root} cannot be read: {error}", hint=_REBUILD) from error

    # -- what is there ----------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the table has been created."""
        return self._delta is not None

    @property
    def version(self) -> int:
        """The newest version; -1 if there is none."""
        return -1 if self._delta is None else self._delta.version()

    @property
    def batch(self) -> int:
        """The last micro-batch that it has taken over; -1 if there is none."""
        found = None if self._delta is None else self._delta.transaction_version(self._app)
        return -1 if found is None else found

    @property
    def stated(self) -> ClusterTime | None:
        """The time at which its newest version equals the collection; ``None`` if it has no version of ours."""
        return next((one.time for one in delta_commit.stated(self.root)), None) if self.exists else None

    def schema(self, given: TableSchema) -> TableSchema:
        """The columns of the table under the rules of ``given``; if the table was made from another declaration, the
        columns of ``given``."""
        if self._delta is None or self.redeclared:
            return given
        fields = json.loads(self._delta.schema().to_json())["fields"]
        return given.with_columns(delta_commit.columns_of(fields))

    @property
    def redeclared(self) -> bool:
        """Whether the table was made from another declaration or divided by other columns than are given now."""
        if self._delta is None or self._declared is None:
            return False
        metadata = self._delta.metadata()
        if tuple(metadata.partition_columns) != self._partition_by:
            return True
        return bool(metadata.configuration.get(_DECLARED, self._declared) != self._declared)

    def refresh(self) -> None:
        """Read new versions of the log. Raises SinkError if another program has changed rows."""
        if self._delta is None:
            return
        before = self._seen if self._seen >= 0 else self._ours_last()
        self._delta.update_incremental()
        for number in range(before + 1, self._delta.version() + 1):
            try:
                actions = delta_commit.actions_of(self.root, number)
            except FileNotFoundError:
                raise delta_commit.changed_by_others(self.root, number) from None
            if delta_commit.statement(actions, number) is None and delta_commit.changes_data(actions):
                raise delta_commit.changed_by_others(self.root, number)
        self._seen = self._delta.version()

    def look(self) -> None:
        """Load the newest version, whoever wrote it. For use before the whole table is rewritten."""
        if self._delta is not None:
            self._delta.update_incremental()

    def _ours_last(self) -> int:
        return next((one.version for one in delta_commit.stated(self.root)), -1)

    def rows(self) -> int:
        """How many rows the newest version has."""
        return 0 if self._delta is None else int(self._delta.count())

    def files(self) -> Iterator[tuple[str, Partition]]:
        """The data files of the newest version: path relative to the table as the log has it, partition values."""
        if self._delta is None:
            return
        for one in pa.table(self._delta.get_add_actions()).to_pylist():
            partition = {
                name: value if value is None else _partition_text(value)
                for name, value in (one.get("partition") or {}).items()
            }
            yield one["path"], partition

    # -- changing it ------------------------------------------------------------------------------------------------

    def write_whole(self, batch: Batch, schema: HasColumns, pieces: Iterable[pa.RecordBatch], kind: str) -> None:
        """Rewrite all rows. ``schema`` is read after the last row was made."""
        writers = _Writers(self.root, self._partition_by, self._bounds)
        try:
            for piece in pieces:
                writers.write(piece)
            added = writers.finish()
        except BaseException:
            writers.abandon()
            raise
        removed = list(self.files())
        self._commit(batch, schema, Actions(kind, added, removed))

    def change(self, batch: Batch, schema: HasColumns, keys: Sequence[bytes], rows: Iterable[pa.RecordBatch]) -> None:
        """Remove the rows with these keys, and add ``rows``. ``schema`` is read after the last row was made."""
        writers = _Writers(self.root, self._partition_by, self._bounds)
        removed: list[tuple[str, Partition]] = []
        try:
            if keys:
                wanted = pa.array(keys, pa.binary())
                low, high = min(keys), max(keys)
                for path, partition in self.files():
                    left = self._without(path, wanted, low, high)
                    if left is not None:
                        removed.append((path, partition))
                        writers.copy(left, partition)
            for piece in rows:
                writers.write(piece)
            added = writers.finish()
        except BaseException:
            writers.abandon()
            raise
        self._commit(batch, schema, Actions("changes", added, removed))

    def _without(self, path: str, keys: pa.Array, low: bytes, high: bytes) -> pa.Table | None:
        """A file's rows without those with the keys; ``None`` if it has none of them."""
        try:
            # Delta's log has paths as URIs: what deltalake names after a partition's value is escaped in it.
            with pq.ParquetFile(self.root / unquote(path)) as file:
                known = self._ranges.setdefault(path, _key_range(file))
                if known is not None and (known[0] > high or known[1] < low):
                    return None
                found = pc.is_in(file.read(columns=[KEY]).column(KEY), value_set=keys)
                if not pc.any(found).as_py():
                    return None
                return file.read().filter(pc.invert(found))
        except FileNotFoundError as error:
            raise SinkError(f"a file of the table {self.root} is missing: {path}", hint=_REBUILD) from error
        except pa.ArrowException as error:
            raise SinkError(f"{self.root / path} is damaged: {error}", hint=_REBUILD) from error

    def _commit(self, batch: Batch, schema: HasColumns, actions: Actions) -> None:
        fields = delta_commit.delta_fields(schema.columns)
        if self._delta is None or self.redeclared or json.loads(self._delta.schema().to_json())["fields"] != fields:
            table_id = str(uuid.uuid4()) if self._delta is None else str(self._delta.metadata().id)
            configuration = self._configuration(schema.columns)
            actions.metadata = delta_commit.metadata_action(table_id, fields, self._partition_by, configuration)
            if self._delta is None:
                actions.kind = "create"
        with durable.writing(self.root):
            (self.root / "_delta_log").mkdir(parents=True, exist_ok=True)
        number = self.version + 1
        delta_commit.publish(self.root, number, self._app, batch, actions)
        if self._delta is None:
            self._delta = DeltaTable(self.root.absolute().as_uri())
        else:
            self._delta.update_incremental()
        self._seen = number  # another program may have come behind it already
        if self._seen and self._seen % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _configuration(self, columns: Sequence[Column]) -> dict[str, str]:
        # deltalake treats a missing bound as NULL, and leaves the file out of every query that filters by the column.
        bounds = [one.name for one in columns if one.name in self._bounds and _bounded(one.arrow)]
        stats = {"delta.dataSkippingStatsColumns": ",".join(bounds)} if bounds else {}
        return {
            _NAMESPACE: self.namespace,
            **({} if self._declared is None else {_DECLARED: self._declared}),
            "delta.enableExpiredLogCleanup": "false",
            **(stats or {"delta.dataSkippingNumIndexedCols": "0"}),
        }

    def _checkpoint(self) -> None:
        assert self._delta is not None
        try:
            self._delta.create_checkpoint()
        except (OSError, DeltaError):
            return  # only a shortcut for readers: the next one is written later

    # -- its daily life ---------------------------------------------------------------------------------------------

    def compact(self, *, target_bytes: int | None = None, z_order: Sequence[str] = ()) -> Mapping[str, Any]:
        """Merge small files, or Z-order all rows by columns. Returns deltalake's metrics."""
        self.refresh()
        if self._delta is None:
            return {}
        try:
            optimize = self._delta.optimize
            found = (
                optimize.z_order(list(z_order), target_size=target_bytes)
                if z_order
                else optimize.compact(target_size=target_bytes)
            )
        except (DeltaError, OSError, ValueError) as error:
            raise SinkError(f"the table {self.root} cannot be compacted: {error}") from error
        self._seen = self._delta.version()
        return dict(found)

    def expire(self, hours: float) -> list[str]:
        """Remove files and versions that were replaced more than ``hours`` ago. Returns the files' names."""
        self.refresh()
        if self._delta is None:
            return []
        try:
            gone = self._delta.vacuum(retention_hours=int(hours), dry_run=False, enforce_retention_duration=False)
        except (DeltaError, OSError) as error:
            raise SinkError(f"old versions of {self.root} cannot be removed: {error}") from error
        self._seen = self._delta.version()
        return list(gone)


def tables_in(root: Path) -> dict[str, int]:
    """The tables in ``root`` that can be read, by namespace, with the last micro-batch that each has taken over."""
    found = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not (folder / "_delta_log").is_dir():
            continue
        with contextlib.suppress(DeltaError, OSError, ValueError):
            namespace = DeltaTable(folder.absolute().as_uri()).metadata().configuration.get(_NAMESPACE)
            if namespace is not None:
                found[namespace] = CollectionTable(folder, namespace).batch
    return found


_REBUILD: Final = "`tailrace tables rebuild` lets the next run rewrite the table from its state"


def _partition_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _key_range(file: pq.ParquetFile) -> tuple[bytes, bytes] | None:
    """The smallest and the largest key of a file; ``None`` if its statistics do not say."""
    metadata = file.metadata
    column = metadata.schema.names.index(KEY) if KEY in metadata.schema.names else -1
    low, high = [], []
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics if column >= 0 else None
        if statistics is None or not statistics.has_min_max or not isinstance(statistics.min, bytes):
            return None
        low.append(statistics.min)
        high.append(statistics.max)
    return (min(low), max(high)) if low else None


class _Writers:
    """The files that a version adds: one is open for each partition, and a new one begins when it is full."""

    def __init__(self, root: Path, partition_by: Sequence[str], bounds: Sequence[str]) -> None:
        self._root = root
        self._partition_by = partition_by
        self._bounds = bounds
        self._open: dict[tuple[tuple[str, str | None], ...], _File] = {}
        self._done: list[_File] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows to the files of their partitions."""
        if not batch.num_rows:
            return
        table = pa.Table.from_batches([batch])
        if not self._partition_by:
            self.copy(table, {})
            return
        texts = [_partition_texts(table.column(name)) for name in self._partition_by]
        whose: dict[tuple[str | None, ...], list[int]] = {}
        for row, values in enumerate(zip(*texts, strict=True)):
            whose.setdefault(values, []).append(row)
        rest = table.drop_columns(list(self._partition_by))
        for values, rows in whose.items():
            self.copy(rest.take(pa.array(rows)), dict(zip(self._partition_by, values, strict=True)))

    def copy(self, table: pa.Table, partition: Partition) -> None:
        """Write rows without the partition columns to the file of their partition."""
        if not table.num_rows:
            return
        place = tuple(sorted(partition.items()))
        file = self._open.get(place)
        if file is None or file.size > FILE_BYTES or not file.takes(table.schema):
            if file is not None or len(self._open) >= _OPEN_MAX:
                old = place if file is not None else next(iter(self._open))
                self._done.append(self._open.pop(old).close())
            file = self._open[place] = _File(self._root, table.schema, dict(partition), self._bounds)
        file.write(table)

    def finish(self) -> list[NewFile]:
        """Close all files and sync them to the device. Returns them."""
        self._done += [file.close() for file in self._open.values()]
        self._open = {}
        return [file.new_file() for file in self._done]

    def abandon(self) -> None:
        """Delete what was written. No version refers to it."""
        for file in (*self._done, *self._open.values()):
            file.abandon()


class _File:
    """A data file that is being written."""

    def __init__(self, root: Path, schema: pa.Schema, partition: Partition, bounds: Sequence[str]) -> None:
        self._name = f"{uuid.uuid4().hex}.parquet"
        self._path = root / self._name
        self._partition = partition
        self._schema = schema
        self._bounds = [name for name in bounds if name in schema.names and _bounded(schema.field(name).type)]
        self._stats: dict[str, list[Any]] = {name: [None, None, 0] for name in self._bounds}
        self.size = 0
        self._rows = 0
        plain = [name for name in schema.names if name not in (KEY, BSON, JSON)]
        with durable.writing(self._path):
            root.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._path,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=plain,
                write_statistics=[KEY, *(name for name in plain if name != "_changed")],
            )

    def takes(self, schema: pa.Schema) -> bool:
        """Whether rows of this schema can be added."""
        return bool(self._schema.equals(schema))

    def write(self, table: pa.Table) -> None:
        with durable.writing(self._path):
            self._writer.write_table(table, row_group_size=65_536)
        self.size += table.nbytes
        self._rows += table.num_rows
        for name, found in self._stats.items():
            column = table.column(name)
            for place, (choose, value) in enumerate(zip((min, max), _least_and_greatest(column), strict=True)):
                if value is not None:
                    found[place] = value if found[place] is None else choose(found[place], value)
            found[2] += column.null_count

    def close(self) -> _File:
        with durable.writing(self._path):
            self._writer.close()
            durable.sync_file(self._path)
        return self

    def abandon(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._path.unlink(missing_ok=True)

    def new_file(self) -> NewFile:
        stats: dict[str, Any] = {}
        if self._stats:
            stats = {
                "minValues": {name: _stat(found[0]) for name, found in self._stats.items() if found[0] is not None},
                "maxValues": {name: _stat(found[1]) for name, found in self._stats.items() if found[1] is not None},
                "nullCount": {name: found[2] for name, found in self._stats.items()},
            }
        return NewFile(self._name, self._partition, self._path.stat().st_size, self._rows, stats)


def _bounded(type_: pa.DataType) -> bool:
    """Whether a column of that type can have bounds in the log: JSON has no decimals, no bytes, and no infinity."""
    test = pa.types
    return bool(
        test.is_string(type_)
        or test.is_integer(type_)
        or test.is_boolean(type_)
        or test.is_date(type_)
        or test.is_timestamp(type_)
    )


def _least_and_greatest(column: pa.ChunkedArray) -> tuple[Any, Any]:
    found = pc.min_max(column)
    if pa.types.is_timestamp(column.type):
        # A time that no reader has a literal for counts as the last or the first that there is one for.
        found = {name: found[name].cast(pa.int64()).as_py() for name in ("min", "max")}
        return tuple(  # type: ignore[return-value]
            None if value is None else _EPOCH + min(max(value, _FIRST_US), _LAST_US) * _MICROSECOND
            for value in found.values()
        )
    return found["min"].as_py(), found["max"].as_py()


def _stat(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat().replace("+00:00", "Z")
    return value


def _partition_texts(column: pa.ChunkedArray) -> list[str | None]:
    """A partition column's values as Delta writes them; an empty string is NULL there."""
    return [None if value in (None, "") else _partition_text(value) for value in column.to_pylist()]
