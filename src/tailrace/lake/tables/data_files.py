"""A table's data files: Parquet, written with a checksum for each page, and read with all of them checked.

A file's name ends with a digest of its footer, which the checksums of pages do not cover: it says where each column is
and which keys the file holds. Files that other programs wrote have neither, and are read as they are.

Where a table is divided by columns, each file holds the rows of one value of these, in a folder named after a hash of
the values: any value has a folder, however long it is and whatever characters it holds. The columns are in the files
like all others, and their bounds are in the log, so every reader gives the same values and skips files by them. Delta's
own partitions were given up, because their values are in paths: readers that take them from there (Polars) cannot read
long ones, and an empty text is NULL.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.errors import SinkError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.store.places import UPLOADS, open_file, parquet_file
from tailrace.lake.tables.deletion_vector import RowNumbers
from tailrace.lake.tables.delta_commit import NewFile
from tailrace.lake.tables.names import BSON, CHANGED, JSON, KEY

#: A data file grows to about this many bytes of rows (before compression).
FILE_BYTES: Final = 256 << 20
REBUILD: Final = "`tailrace tables rebuild` lets the next run rewrite the table from its state"
#: Rows of a divided table wait in memory until there are this many bytes of them, so that files are not tiny.
_WAITING_BYTES: Final = 128 << 20
_OPEN_MAX: Final = 64
#: A longer text is cut in the log's bounds.
_BOUND_MAX: Final = 1024
_DIGITS: Final = 16
_NAME: Final = re.compile(rf"[0-9a-f]{{32}}-([0-9a-f]{{{_DIGITS}}})\.parquet")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST_US: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST_CHARACTER, _SURROGATES = 0x10FFFF, range(0xD800, 0xE000)


class TableDamageError(SinkError):
    """A data file of a table is missing or damaged. What it held is in the state."""


@contextlib.contextmanager
def opened(root: TablePlace, name: str) -> Iterator[pq.ParquetFile]:
    """A data file of the table at ``root``. What is read of it is checked against its checksums. Raises
    TableDamageError."""
    path = root / name
    try:
        match = _NAME.fullmatch(path.name)
        if match is not None and _footer_digest(path) != match[1]:
            raise TableDamageError(f"{path} is damaged: its footer is not the one that was written", hint=REBUILD)
        with parquet_file(path) as file:
            yield file
    except FileNotFoundError as error:
        raise TableDamageError(f"a file of the table {root} is missing: {name}", hint=REBUILD) from error
    except (pa.ArrowException, OSError) as error:
        raise TableDamageError(f"{path} is damaged: {error}", hint=REBUILD) from error


def _footer_digest(path: TablePlace) -> str:
    """Of the footer: Parquet's last eight bytes say how long it is."""
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        end = file.read(8)
        file.seek(max(0, size - 8 - int.from_bytes(end[:4], "little")))
        return sha256(file.read()).hexdigest()[:_DIGITS]


def key_range(file: pq.ParquetFile) -> tuple[bytes, bytes] | None:
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


def with_columns(file: pq.ParquetFile, wanted: Sequence[pa.Field]) -> pa.Table:
    """A file's rows with these columns: those that are younger than the file are NULL."""
    there = set(file.schema_arrow.names)
    table = file.read(columns=[one.name for one in wanted if one.name in there])
    if not any(one.name in there for one in wanted):
        return pa.table({one.name: pa.nulls(file.metadata.num_rows, one.type) for one in wanted})
    arrays = [
        table.column(one.name).cast(one.type) if one.name in there else pa.nulls(table.num_rows, one.type)
        for one in wanted
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(wanted))


def without(table: pa.Table, gone: RowNumbers) -> pa.Table:
    """The rows but those with these numbers."""
    if not len(gone):
        return table
    stay = np.ones(table.num_rows, np.bool_)
    stay[gone] = False
    return table.filter(pa.array(stay))


def divided(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows by their values in ``columns``, each group with its folder."""
    if not columns:
        yield "", table
        return
    codes = np.zeros(table.num_rows, np.int64)
    for name in columns:
        encoded = table.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
        encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
        _, codes = np.unique(codes * len(encoded.dictionary) + encoded.indices.to_numpy(), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        group = table if len(rows) == table.num_rows else table.take(pa.array(rows))
        yield folder_of_values([group.column(name)[0].as_py() for name in columns]), group


def folder_of_values(values: Sequence[Any]) -> str:
    """The folder of the rows with these values."""
    texts = json.dumps([None if value is None else str(value) for value in values])
    return f"by-{sha256(texts.encode()).hexdigest()[:_DIGITS]}"


class Writers:
    """The files that a version adds: one is open for each folder, and a new one begins when it is full.

    ``divide_by``  the columns that the table is divided by
    ``bounds``     the columns whose minimum and maximum the log gets
    ``folder``     where the files of a table that is not divided are
    """

    def __init__(
        self, root: TablePlace, divide_by: Sequence[str] = (), bounds: Sequence[str] = (), *, folder: str = ""
    ) -> None:
        self._root = root
        self._folder = folder
        self._divide_by = divide_by
        self._bounds = bounds
        self._waiting: dict[str, list[pa.Table]] = {}
        self._sizes: dict[str, int] = {}
        self._open: dict[str, _File] = {}
        self._done: list[_File] = []

    def write(self, table: pa.Table) -> None:
        """Write rows to the files of their folders."""
        if not table.num_rows:
            return
        for folder, rows in divided(table, self._divide_by):
            if not self._divide_by:
                self._put(self._folder, rows)
                continue
            self._waiting.setdefault(folder, []).append(rows)
            self._sizes[folder] = self._sizes.get(folder, 0) + rows.nbytes
        if sum(self._sizes.values()) > _WAITING_BYTES:
            largest = sorted(self._sizes, key=self._sizes.__getitem__, reverse=True)
            for folder in largest[: (len(largest) + 1) // 2]:
                self._flush(folder)

    def _flush(self, folder: str) -> None:
        del self._sizes[folder]
        for rows in self._waiting.pop(folder):
            self._put(folder, rows)

    def _put(self, folder: str, table: pa.Table) -> None:
        file = self._open.get(folder)
        if file is None or file.size > FILE_BYTES or not file.takes(table.schema):
            if file is not None or len(self._open) >= _OPEN_MAX:
                old = folder if file is not None else next(iter(self._open))
                self._done.append(self._open.pop(old).close())
            file = self._open[folder] = _File(self._root, folder, table.schema, self._bounds)
        file.write(table)

    def next_file(self) -> None:
        """Let rows that are written from now on begin files of their own."""
        for folder in list(self._waiting):
            self._flush(folder)
        while self._open:
            self._done.append(self._open.pop(next(iter(self._open))).close())

    def finish(self) -> list[NewFile]:
        """Close all files and sync them to the device. Returns them."""
        self.next_file()
        if isinstance(self._root, Path):
            with durable.writing(self._root):
                folders = {self._root / file.folder for file in self._done}
                for folder in folders | ({self._root} if self._done else set()):
                    durable.sync_directory(folder)
        return [file.new_file() for file in self._done]

    def abandon(self) -> None:
        """Delete what was written. No version refers to it."""
        for file in (*self._done, *self._open.values()):
            file.abandon()


@contextlib.contextmanager
def new_files(root: TablePlace, divide_by: Sequence[str], bounds: Sequence[str]) -> Iterator[Writers]:
    """Data files for a commit, which are removed again if the commit is not made."""
    writers = Writers(root, divide_by, bounds)
    try:
        yield writers
    except BaseException:
        writers.abandon()
        raise


class _File:
    """A data file that is being written: in its folder under a hidden name, or, for an object store, in a local folder
    from which it is uploaded when it is whole."""

    def __init__(self, root: TablePlace, folder: str, schema: pa.Schema, bounds: Sequence[str]) -> None:
        self._root = root
        self.folder = folder
        number = uuid.uuid4().hex
        self._path = (
            root.bucket.beside / UPLOADS / f".{number}.parquet"
            if isinstance(root, ObjectPlace)
            else Path(str(root)) / folder / f".{number}.parquet"
        )
        self._size = 0
        self._uploaded: TablePlace | None = None
        self._schema = schema
        self._bounds = [name for name in bounds if name in schema.names and bounded(schema.field(name).type)]
        self._stats: dict[str, list[Any]] = {name: [None, None, 0] for name in self._bounds}
        self.size = 0
        self._rows = 0
        plain = [name for name in schema.names if name not in (KEY, BSON, JSON)]
        with durable.writing(self._path):
            durable.make_directory(self._path.parent)
            self._writer = pq.ParquetWriter(
                self._path,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=[path for name in plain for path in _leaves(name, schema.field(name).type)],
                write_statistics=[KEY, *(name for name in plain if name != CHANGED)],
                write_page_checksum=True,
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
            name = f"{self._path.stem[1:]}-{_footer_digest(self._path)}.parquet"
            self._path = self._path.rename(self._path.parent / name)
            self._size = self._path.stat().st_size
            if not isinstance(self._root, ObjectPlace):
                durable.sync_file(self._path)
        if isinstance(self._root, ObjectPlace):
            place = self._root / self._name
            self._uploaded = place
            place.upload(self._path)
            self._path.unlink()
            durable.step("table.uploaded")
        return self

    @property
    def _name(self) -> str:
        return f"{self.folder}/{self._path.name}" if self.folder else self._path.name

    def abandon(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._path.unlink(missing_ok=True)
        if self._uploaded is not None:
            with contextlib.suppress(StoreAwayError):  # it goes with what is expired
                self._uploaded.unlink(missing_ok=True)

    def new_file(self) -> NewFile:
        stats: dict[str, Any] = {}
        if self._stats:
            stats = {
                "minValues": {name: _stat(found[0]) for name, found in self._stats.items() if found[0] is not None},
                "maxValues": {name: _above(found[1]) for name, found in self._stats.items() if found[1] is not None},
                "nullCount": {name: found[2] for name, found in self._stats.items()},
            }
        return NewFile(self._name, self._size, self._rows, stats)


def _leaves(path: str, type_: pa.DataType) -> Iterator[str]:
    """A column's scalars, as Parquet calls them."""
    if pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    else:
        yield path


def bounded(type_: pa.DataType) -> bool:
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
    return value[:_BOUND_MAX] if isinstance(value, str) else value


def _above(value: Any) -> Any:
    """The bound above a value: the value, or for a long text the next text of the allowed length."""
    if not isinstance(value, str) or len(value) <= _BOUND_MAX:
        return _stat(value)
    cut = value[:_BOUND_MAX].rstrip(chr(_LAST_CHARACTER))
    if not cut:
        return value
    following = ord(cut[-1]) + 1
    return cut[:-1] + chr(_SURROGATES.stop if following in _SURROGATES else following)
