"""Write the events of one slice as Parquet files: ordered, of one partition of the lake each, bounded in size.

A file is written in ``_staging``, and moved to its place, under the name that it will always have, when it is whole and
on the device. Nothing refers to it until a commit does. Row groups are bounded so that a reader's memory is; pages
carry checksums; a file's footer says which tokens it holds (``tailrace.firstToken`` and ``tailrace.lastToken``), and
Spark's own schema in it lets Spark read VARIANT columns back as such.

Tokens ascend strictly, with one exception: two shards of a cluster that log, say, a collection's drop at the same
cluster time give two events with the same token, and the server gives both. Such events are never divided among files,
so that files still follow each other strictly, and the footer says how many rows repeat the token before them
(``tailrace.equalTokens``): that many are right, and one more means an event that occurs twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.errors import SinkError, invariant
from tailrace.lake.store.lake_root import LakeRoot, sha256_of, size_of, sync_directories
from tailrace.lake.store.layout import LakeLayout, cluster_time_of, first_token_after_period, new_name, period_of
from tailrace.lake.store.manifest import StagedFile
from tailrace.lake.store.partitioning import BY_DAY, COLLECTION, Partitioning

TOKEN: Final = "token"
WALL_TIME: Final = "wall_time"
_CLUSTER_TIME: Final = "cluster_time"
FIRST_TOKEN: Final = b"tailrace.firstToken"
LAST_TOKEN: Final = b"tailrace.lastToken"
EQUAL_TOKENS: Final = b"tailrace.equalTokens"
SPARK_SCHEMA: Final = b"org.apache.spark.sql.parquet.row.metadata"

#: At most this many files are open at once, and at most this many row groups' worth of rows wait to be written: a lake
#: that is divided by collection may have very many of them. A file is opened when its first rows are written, so that a
#: collection of few rows has one file, however many others there are.
_OPEN_MAX: Final = 64
_HELD_MAX: Final = 4
#: Objects up to this size are read in one request.
_WHOLE_MAX: Final = 16 << 20
#: Columns of few distinct values: the only ones where trying a dictionary is worth its time.
_DICTIONARY: Final = ("operation_type", "database", "collection")
#: What stands in a required field of a struct that is NULL as a whole.
_EMPTY: Final = {pa.int64(): 0, pa.string(): "", pa.binary(): b""}
#: Columns that a reader prunes by. Bounds of whole documents would only make the footer long.
_STATISTICS: Final = ("token", "cluster_time", "wall_time", *_DICTIONARY)


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Bounds in rows and bytes (of Arrow memory, before compression). A file ends at the first row group that reaches
    ``file_bytes``; a row group at the first batch that reaches one of its bounds."""

    row_group_rows: int = 65_536
    row_group_bytes: int = 32 << 20
    file_bytes: int = 512 << 20


@dataclass(slots=True)
class _OpenFile:
    path: Path
    number: int
    period: str
    collection: str | None
    first_token: str
    last_token: str
    writer: pq.ParquetWriter | None = None
    last_wall_time: datetime | None = None
    bounds: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    rows: int = 0
    equal_tokens: int = 0
    written: int = 0
    held: list[pa.RecordBatch] = field(default_factory=list)
    held_rows: int = 0
    held_bytes: int = 0


class PartWriter:
    """Writes ascending Arrow batches to files of the lake at ``root`` and remembers what it wrote. While they are
    written they are named ``_staging/<stem>-<n>.staged``; ``name`` makes a final name of a first token, a count, and
    what the lake is divided by.

    ``one_token`` is how many neighbouring rows may have one token: the number of shards that the rows come from.
    ``equal_tokens`` counts the rows of all files so far that repeat the token before them.

    Raises SinkError where the rows do not ascend by token or have none, LakeFullError where there is no room; its own
    files are gone then.
    """

    def __init__(
        self,
        root: LakeRoot,
        stem: str,
        *,
        limits: FileLimits = FileLimits(),
        metadata: Mapping[bytes, bytes] | None = None,
        partitioning: Partitioning = BY_DAY,
        name: Callable[[str, int, Partitioning, str | None], str] = new_name,
        one_token: int = 1,
    ) -> None:
        self._root = root
        self._staging = LakeLayout(root).staging
        self._partitioning = partitioning
        self._name = name
        self._stem = stem
        self._limits = limits
        self._metadata = dict(metadata or {})
        self._open: dict[str | None, _OpenFile] = {}  # by collection; the one that was written last is last
        self._last_token = ""
        self._one_token = one_token
        self._run = 0  # how many of the last rows have the last token
        self.equal_tokens = 0
        self._done: list[StagedFile] = []
        self._count = 0

    def write_all(self, batches: Iterable[pa.RecordBatch]) -> tuple[StagedFile, ...]:
        """Write every batch and give the finished files, in order and on disk (synced)."""
        try:
            with durable.writing(self._staging):
                if isinstance(self._root, ObjectPlace):
                    durable.make_private(self._staging)
                for batch in batches:
                    self._write(batch)
                self._close_all()
                sync_directories({(self._root / file.name).parent for file in self._done})
        except BaseException:
            self._remove_everything()
            raise
        return tuple(sorted(self._done, key=lambda file: file.first_token))

    def _write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        repeats = self._check_ascending(batch)
        for period, part in _by_period(batch, hour=self._partitioning.hour):
            if any(file.period != period for file in self._open.values()):
                self._close_all()
            for collection, rows in self._by_collection(part):
                self._take(rows, period, collection, repeats=repeats)
        if self._partitioning.collection:
            self._bound()

    def _take(self, rows: pa.RecordBatch, period: str, collection: str | None, *, repeats: bool) -> None:
        """Rows of one partition. A file that is large enough ends where the next token is another one."""
        file = self._open.get(collection)
        if file is not None and file.written >= self._limits.file_bytes and _token(rows, 0) != file.last_token:
            self._close(file)
        file = self._open.pop(collection, None) or self._start(rows, period, collection)
        self._open[collection] = file
        if repeats:
            equal = count_equal(rows.column(TOKEN), file.last_token if file.rows or file.held else "")
            file.equal_tokens += equal
            self.equal_tokens += equal
        file.held.append(_without_inner_nulls(rows))
        file.held_rows += rows.num_rows
        file.held_bytes += rows.nbytes
        file.last_token = _token(rows, -1)
        file.last_wall_time = _wall_time(rows)
        _widen(file.bounds, rows)
        if file.held_rows >= self._limits.row_group_rows or file.held_bytes >= self._limits.row_group_bytes:
            self._flush(file)

    def _by_collection(self, batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        if not self._partitioning.collection:
            yield None, batch
            return
        column = batch.column(COLLECTION)
        found = pc.unique(column).to_pylist()
        for value in found:
            wanted = pc.is_null(column) if value is None else pc.equal(column, value)
            yield value or None, batch if len(found) == 1 else batch.filter(wanted)

    def _bound(self) -> None:
        """Keep open files and waiting rows few. The next event may have the last one's token and belong to its file."""
        while sum(file.held_bytes for file in self._open.values()) > _HELD_MAX * self._limits.row_group_bytes:
            self._flush(max(self._open.values(), key=lambda file: file.held_bytes))
        opened = [file for file in self._open.values() if file.writer is not None]
        for file in opened[:-_OPEN_MAX]:
            if file.last_token != self._last_token:
                self._close(file)

    def _check_ascending(self, batch: pa.RecordBatch) -> bool:
        """Whether a row repeats the token before it."""
        if TOKEN not in batch.schema.names:
            raise SinkError("a lake needs the column 'token': its order and its days come from it")
        tokens = batch.column(TOKEN)
        if tokens.null_count:
            raise SinkError("an event without a token cannot be put in order")
        before, self._last_token = self._last_token, _token(batch, -1)
        ascending = pc.all(pc.less(tokens.slice(0, len(tokens) - 1), tokens.slice(1))).as_py()
        if ascending is not False and _token(batch, 0) > before:
            self._run = 1
            return False
        for token in tokens.to_pylist():
            self._run = self._run + 1 if token == before else 1
            if token < before or self._run > self._one_token:
                raise SinkError(
                    "events of a partition are out of order, or one is there twice", hint=f"After token {before}"
                )
            before = token
        return True

    def _start(self, batch: pa.RecordBatch, period: str, collection: str | None) -> _OpenFile:
        number = self._count
        path = self._staging / f"{self._stem}-{number:04d}.staged"
        self._count += 1
        token = _token(batch, 0)
        return _OpenFile(path, number, period, collection, token, token)

    def _flush(self, file: _OpenFile) -> None:
        if file.held:
            table = pa.Table.from_batches(file.held).replace_schema_metadata(None)
            file.writer = file.writer or _writer(file.path, table.schema)
            file.writer.write_table(table, row_group_size=self._limits.row_group_rows)
            file.rows += file.held_rows
            file.written += file.held_bytes
            file.held, file.held_rows, file.held_bytes = [], 0, 0

    def _close_all(self) -> None:
        for file in list(self._open.values()):
            self._close(file)

    def _close(self, file: _OpenFile) -> None:
        self._flush(file)
        invariant(file.writer is not None, "a file is begun with rows")
        assert file.writer is not None
        says = {**self._metadata, FIRST_TOKEN: file.first_token.encode(), LAST_TOKEN: file.last_token.encode()}
        if file.equal_tokens:
            says[EQUAL_TOKENS] = str(file.equal_tokens).encode()
        file.writer.add_key_value_metadata(says)
        file.writer.close()
        del self._open[file.collection]
        durable.sync_file(file.path)
        name = self._name(file.first_token, file.number, self._partitioning, file.collection)
        finished = StagedFile(
            name=name,
            rows=file.rows,
            size=file.path.stat().st_size,
            sha256=sha256_of(file.path),
            first_token=file.first_token,
            last_token=file.last_token,
            stats=_stats(file),
            last_wall_time=file.last_wall_time,
            collection=file.collection,
        )
        place = self._root / name
        if isinstance(place, ObjectPlace):
            place.upload(file.path)
            file.path.unlink()
        else:
            durable.make_directory(place.parent)
            file.path.rename(place)
        self._done.append(finished)

    def _remove_everything(self) -> None:
        for file in self._open.values():
            # There may be no room for its footer either. The file goes, and the first error is the one to tell.
            with suppress(OSError, pa.ArrowException):
                if file.writer is not None:
                    file.writer.close()
        self._open = {}
        for index in range(self._count):
            (self._staging / f"{self._stem}-{index:04d}.staged").unlink(missing_ok=True)
        with suppress(StoreAwayError):  # the next start removes them
            for finished in self._done:
                (self._root / finished.name).unlink(missing_ok=True)


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=[name for name in _DICTIONARY if name in schema.names],
        write_statistics=[name for name in _STATISTICS if name in schema.names],
        write_page_checksum=True,
        sorting_columns=[pq.SortingColumn(schema.get_field_index(TOKEN))],
    )


@contextmanager
def opened_checked(root: LakeRoot, entry: StagedFile) -> Iterator[pq.ParquetFile]:
    """A file of the lake, of which new ones are made: its bytes are those that the log knows, its footer's too, which
    no checksum of a page covers. Raises SinkError where they are not."""
    path = root / entry.name
    try:
        content = path.read_bytes() if isinstance(path, ObjectPlace) and entry.size <= _WHOLE_MAX else None
        found = (size_of(path), sha256_of(path)) if content is None else (len(content), sha256(content).hexdigest())
        if found != (entry.size, entry.sha256):
            raise SinkError(
                f"{path} is damaged: its bytes are not those that were written", hint="Restore it from a copy"
            )
        with (
            parquet_file(path)
            if content is None
            else pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file
        ):
            yield file
    except (OSError, pa.ArrowException) as error:
        raise SinkError(f"{path} cannot be read: {error}", hint="Restore it from a copy") from error


@contextmanager
def opened_to_read(root: LakeRoot, entry: StagedFile) -> Iterator[pq.ParquetFile]:
    """A file of the lake, for a reader: a small one is compared with the log as a whole, of a larger one the size and
    the checksums of the pages that are read. Raises SinkError where it is missing, or not what was written."""
    if entry.size <= _WHOLE_MAX:
        with opened_checked(root, entry) as file:
            yield file
        return
    path = root / entry.name
    try:
        if size_of(path) != entry.size:
            raise SinkError(f"{path} is damaged: its size is not the log's", hint="Restore it from a copy")
        with parquet_file(path, entry.size) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise SinkError(f"{path} cannot be read: {error}", hint="Restore it from a copy") from error


@contextmanager
def parquet_file(place: LakeRoot, size: int | None = None) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read; the checksums of its pages are compared. An object that is known to be small is read in
    one request. Raises FileNotFoundError."""
    with ExitStack() as stack:
        source: Any = place
        if isinstance(place, ObjectPlace):
            is_small = size is not None and size <= _WHOLE_MAX
            source = pa.BufferReader(place.read_bytes()) if is_small else stack.enter_context(place.open())
        yield stack.enter_context(pq.ParquetFile(source, page_checksum_verification=True))


def kept_metadata(root: LakeRoot, entry: StagedFile) -> dict[bytes, bytes]:
    """What of a file's footer also holds for a file that is made from it: Spark's own schema. Raises as
    ``opened_checked``."""
    with opened_checked(root, entry) as file:
        found = file.metadata.metadata or {}
    return {SPARK_SCHEMA: found[SPARK_SCHEMA]} if SPARK_SCHEMA in found else {}


def equal_tokens_in(root: LakeRoot, entry: StagedFile) -> int:
    """How many rows of a file repeat the token before them, as its footer says. The footer is not compared with the
    log here: read the rows by ``opened_checked``. Raises SinkError where there is no footer."""
    path = root / entry.name
    try:
        with parquet_file(path, entry.size) as file:
            return footer_equal_tokens(file.metadata.metadata)
    except (OSError, pa.ArrowException) as error:
        raise SinkError(f"{path} cannot be read: {error}", hint="Restore it from a copy") from error


def _widen(bounds: dict[str, tuple[Any, Any]], rows: pa.RecordBatch) -> None:
    """Take ``rows`` into the least and greatest values. They are the columns' own: a pipeline may have changed them."""
    columns = {}
    if _CLUSTER_TIME in rows.schema.names and pa.types.is_struct(rows.column(_CLUSTER_TIME).type):
        columns[_CLUSTER_TIME] = pc.struct_field(rows.column(_CLUSTER_TIME), "t")
    if WALL_TIME in rows.schema.names:
        columns[WALL_TIME] = rows.column(WALL_TIME).cast(pa.int64())
    for name, column in columns.items():
        found = pc.min_max(column).as_py()
        if found["min"] is not None:
            least, most = bounds.get(name, (found["min"], found["max"]))
            bounds[name] = min(least, found["min"]), max(most, found["max"])


def _stats(file: _OpenFile) -> str:
    """The file's statistics as Delta's log keeps them. Moments there have milliseconds: the last is rounded up."""
    least: dict[str, Any] = {TOKEN: file.first_token}
    most: dict[str, Any] = {TOKEN: file.last_token}
    if _CLUSTER_TIME in file.bounds:
        low, high = file.bounds[_CLUSTER_TIME]
        least[_CLUSTER_TIME], most[_CLUSTER_TIME] = {"t": low}, {"t": high}
    if WALL_TIME in file.bounds:
        low, high = file.bounds[WALL_TIME]
        with suppress(OverflowError, ValueError):  # a year that ISO 8601 has no four digits for: no bound
            first, last = _iso(low // 1000), _iso(-(-high // 1000))
            least[WALL_TIME], most[WALL_TIME] = first, last
    return json.dumps({"numRecords": file.rows, "minValues": least, "maxValues": most, "nullCount": {TOKEN: 0}})


def _iso(milliseconds: int) -> str:
    return (datetime(1970, 1, 1) + timedelta(milliseconds=milliseconds)).isoformat(timespec="milliseconds") + "Z"


def _token(batch: pa.RecordBatch, index: int) -> str:
    value = batch.column(TOKEN)[index].as_py()
    invariant(isinstance(value, str), "the column 'token' is text")
    return str(value)


def _without_inner_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give the required fields of NULL structs a value.

    Arrow leaves NULLs there, its Parquet writer refuses them, and Spark reads a VARIANT only where they are required.
    """
    arrays = [_filled(array) if pa.types.is_struct(array.type) else array for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _filled(array: pa.StructArray) -> pa.StructArray:
    fields = list(array.type)
    children = [array.field(number) for number in range(len(fields))]
    if not any(child.null_count and not field.nullable for child, field in zip(children, fields, strict=True)):
        return array
    filled = [
        child if field.nullable or not child.null_count else child.fill_null(_EMPTY.get(child.type, b""))
        for child, field in zip(children, fields, strict=True)
    ]
    return pa.StructArray.from_arrays(filled, fields=fields, mask=array.is_null())


def _wall_time(batch: pa.RecordBatch) -> datetime | None:
    """When the batch's last event was written, where that column is kept (it is what the lag is measured by)."""
    if WALL_TIME not in batch.schema.names:
        return None
    try:
        value = batch.column(WALL_TIME)[-1].as_py()
    except (OverflowError, ValueError):
        return None  # a pipeline has put a year there that Python has no date for
    return value if isinstance(value, datetime) else None


def _by_period(batch: pa.RecordBatch, *, hour: bool) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Cut an ascending batch where the UTC day or hour changes. Nearly always it does not, and nothing is copied."""
    start, end = 0, batch.num_rows
    while start < end:
        first = _token(batch, start)
        period = period_of(cluster_time_of(first), hour=hour)
        if period_of(cluster_time_of(_token(batch, end - 1)), hour=hour) == period:
            stop = end
        else:
            next_one = first_token_after_period(first, hour=hour)
            stop = int(pc.index(pc.greater_equal(batch.column(TOKEN), next_one), True).as_py())
        yield period, batch if (start, stop) == (0, end) else batch.slice(start, stop - start)
        start = stop


def spark_metadata(schema_json: str) -> dict[bytes, bytes]:
    """Footer metadata by which Spark finds its own types again (VARIANT is a struct for everybody else)."""
    json.loads(schema_json)  # a damaged one would make every file unreadable for Spark
    return {SPARK_SCHEMA: schema_json.encode()}


def footer_range(metadata: Mapping[bytes, Any] | None) -> tuple[str, str] | None:
    """First and last token as a file's footer gives them, or ``None`` where it has none."""
    if not metadata or FIRST_TOKEN not in metadata or LAST_TOKEN not in metadata:
        return None
    return metadata[FIRST_TOKEN].decode(), metadata[LAST_TOKEN].decode()


def footer_equal_tokens(metadata: Mapping[bytes, Any] | None) -> int:
    """How many of a file's rows repeat the token before them, as its footer says; 0 for a damaged file."""
    text = (metadata or {}).get(EQUAL_TOKENS, b"")
    return int(text) if text.isdigit() else 0


def count_equal(tokens: pa.Array, before: str) -> int:
    """How many of ``tokens`` are the one before it; ``before`` is that before the first."""
    inner = pc.sum(pc.equal(tokens.slice(0, len(tokens) - 1), tokens.slice(1))).as_py() or 0
    return int(inner) + int(tokens[0].as_py() == before)
