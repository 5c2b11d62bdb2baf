"""The lake's own streaming source: its tasks read a slice of the stream, write it, and pass on what they wrote.

The same offsets, slices and events as ``format("tailrace")``; what differs is that the rows given to Spark name files
of the lake (``staged_rows.py``). Files that are never committed, because a task was repeated or the driver died, stay
until the lake is next opened: no commit names them.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from tailrace.core.oplog.witness import EntryMark, marks_from_json
from tailrace.errors import ChangeStreamHistoryLost, SinkError, UsageError
from tailrace.lake.spark.planning.input_partition import OplogSlice, SnapshotSlice
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.lake.spark.query.schema import spark_schema
from tailrace.lake.spark.source.data_source import TailraceDataSource
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader
from tailrace.lake.spark.store.gap import HISTORY_HINT, copied_position
from tailrace.lake.spark.store.staged_rows import STAGED_SCHEMA
from tailrace.lake.store.lake_root import LakeRoot, writable_root
from tailrace.lake.store.layout import TIME_END
from tailrace.lake.store.manifest import PlannedRange
from tailrace.lake.store.partitioning import DAY, Partitioning

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.core.event.quarantined import QuarantinedEvent

TOKEN: Final = "token"
_OPERATION: Final = "operation_type"
#: The name under which events that were put aside are counted among the operations.
QUARANTINED: Final = "quarantined"
#: The local directory of a lake in an object store, on each machine.
STATE: Final = "lakeState"
#: Options of the lake in addition to those of the stream: its directory or URI, the token after which it goes on, the
#: size up to which a file grows, how far the copy has come that the stream continues, the lake's partition columns,
#: what is done with an event that cannot be written, and the marks of oplog entries that the lake was read up to.
LAKE, AFTER, FILE_BYTES, COPIED, PARTITION = "lake", "lakeAfter", "lakeFileBytes", "lakeCopied", "lakePartitionBy"
ON_ERROR: Final = "lakeOnError"
ENTRIES: Final = "lakeEntries"
FILE_BYTES_DEFAULT: Final = 512 << 20
#: Spark's name for the local property that holds the micro-batch's number (measured with PySpark 4.3).
_BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class LakePlace:
    """Where a stream's files go: the lake at ``lake``, a path or a URI (then with its local directory ``state``), after
    its token ``after``, up to ``file_bytes`` each; ``copied`` says how far the copy has come that the stream continues,
    ``quarantines`` whether events that cannot be written are put aside, and ``entries`` which oplog entries the
    deployment must still hold."""

    lake: str
    state: str | None
    after: str | None
    file_bytes: int
    copied: str | None
    partitioning: Partitioning
    quarantines: bool = False
    entries: Mapping[str, EntryMark] = field(default_factory=dict)

    def open(self) -> LakeRoot:
        """The lake's place. A store is opened where it is needed, with the keys that are there: none travel."""
        return writable_root(self.lake, self.state)


@dataclass(frozen=True, eq=False)
class LakeSlice(InputPartition):
    """A slice of the stream, and the range of the whole micro-batch that it was planned for. Without a slice it only
    carries the range to the lake: the first micro-batch of a stream is empty, and says where the stream begins."""

    part: OplogSlice | SnapshotSlice | None
    planned: PlannedRange


class LakeStreamReader(TailraceStreamReader):
    """A change stream whose slices are written to files of the lake where they are read."""

    def __init__(self, options: ReadOptions, place: LakePlace) -> None:
        super().__init__(options)
        self._place = place

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": (self._options, self._place)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        with _lake_hint():
            if self._initial is None:
                self._require_states()
                self.deployment.require_marked(self._place.entries, self.deployment.at(self.deployment.newest()))
            if self._initial is None and self._place.copied is not None:
                copied = copied_position(self._place.copied)
                self._initial = self.deployment.copied(copied).to_json()
                self.deployment.require_history(self.deployment.offset(self._initial))
            return super().initialOffset()

    def _require_states(self) -> None:
        """A new checkpoint continues a lake: with exact images it needs the states that the lake was written with."""
        states = self.deployment.states
        if states is not None and states.are_lost and (self._place.after or self._place.copied):
            raise UsageError(
                f"the lake has events, but nothing in {self._options.images} to compute the next images from",
                hint="Give the directory that the lake was written with, or the option 'archive', from which the "
                "images are made again; otherwise begin a new lake",
            )

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with _lake_hint():
            return super().latestOffset(start, limit)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        slices = super().partitions(start, end)
        # An offset that an earlier release has planned does not say it.
        version = next((part.server_version for part in slices if isinstance(part, OplogSlice)), "")
        planned = planned_range(Offset.from_json(start), Offset.from_json(end), version)
        parts = [LakeSlice(part, planned) for part in slices if isinstance(part, OplogSlice | SnapshotSlice)]
        return parts or [LakeSlice(None, planned)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Only the workers load the stages, Arrow and Parquet.
        from tailrace.lake.spark.reading.columns import ROWS_MAX_WRITTEN  # noqa: PLC0415
        from tailrace.lake.spark.reading.slice_reader import read_slice  # noqa: PLC0415
        from tailrace.lake.spark.store.staged_rows import to_batch  # noqa: PLC0415
        from tailrace.lake.store.part_writer import FileLimits, PartWriter, spark_metadata  # noqa: PLC0415
        from tailrace.lake.store.quarantine import stage  # noqa: PLC0415

        assert isinstance(partition, LakeSlice)
        if partition.part is None:
            yield to_batch((), partition.planned)
            return
        task = TaskContext.get()
        if task is None:
            raise SinkError("the lake is written inside a Spark task only")
        schema = spark_schema(self._options.columns, self._options.documents)
        # Each shard may have logged an event of its own with one token, such as a collection's drop.
        shards = max(1, len(partition.part.shards)) if isinstance(partition.part, OplogSlice) else 1
        root = self._place.open()
        writer = PartWriter(
            root,
            f"{task.getLocalProperty(_BATCH_ID) or 'x'}-{task.partitionId():05d}-{uuid.uuid4().hex}",
            limits=FileLimits(file_bytes=self._place.file_bytes),
            metadata=spark_metadata(schema.json()),
            partitioning=self._place.partitioning,
            one_token=shards,
        )
        aside: list[QuarantinedEvent] | None = [] if self._place.quarantines else None
        batches = read_slice(self._options, partition.part, rows_max=ROWS_MAX_WRITTEN, aside=aside)
        operations: Counter[str] = Counter()
        edge = edge_of(self._place.after, partition.part)
        files = writer.write_all(counting(operations, after_edge(edge, batches)))
        kept = [event for event in aside or () if _is_after(edge, event.token)]
        if kept:
            staged = stage(root, kept, one_token=shards)
            operations[QUARANTINED] = staged.rows
            files = (*files, staged)
        yield to_batch(files, partition.planned, operations)


class LakeSource(TailraceDataSource):
    """The data source ``tailrace-lake-source``, made for ``tailrace.lake.spark.store.write_stream``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        given = {name.lower(): text for name, text in options.items()}
        names = (LAKE, STATE, AFTER, FILE_BYTES, COPIED, PARTITION, ON_ERROR, ENTRIES)
        lake, state, after, file_bytes, copied, partition, on_error, entries = (
            given.pop(name.lower(), None) for name in names
        )
        super().__init__(given)
        self.options = options
        if lake is None:
            raise UsageError(
                "the option 'lake' is missing", hint="Start the stream with tailrace.lake.spark.store.write_stream"
            )
        if TOKEN not in self._parsed.columns:
            raise UsageError("a lake needs the column 'token': its order and its days come from it")
        partitioning = Partitioning.of((partition or DAY).split(","))
        size = int(file_bytes or FILE_BYTES_DEFAULT)
        marks = marks_from_json(json.loads(entries or "{}"))
        self._place = LakePlace(
            lake, state or None, after or None, size, copied or None, partitioning, on_error == "quarantine", marks
        )

    @classmethod
    def name(cls) -> str:
        return "tailrace-lake-source"

    def schema(self) -> StructType:
        return STAGED_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        raise UsageError("the lake's source is a stream", hint='Read the stream itself with format("tailrace")')

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return LakeStreamReader(self._parsed, self._place)


@contextmanager
def _lake_hint() -> Iterator[None]:
    """For a lake the advice on lost history is different from that for a plain stream."""
    try:
        yield
    except ChangeStreamHistoryLost as error:
        raise ChangeStreamHistoryLost(error.message, hint=HISTORY_HINT) from error


def counting(operations: Counter[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; their rows are counted by operation, if the column is kept."""
    for batch in batches:
        if _OPERATION in batch.schema.names:
            for found in batch.column(_OPERATION).value_counts():
                operations[found["values"].as_py() or ""] += found["counts"].as_py()
        yield batch


def edge_of(after: str | None, part: OplogSlice | SnapshotSlice) -> str:
    """How the tokens begin of what the lake has already, up to its token ``after``: of a copy, whose events have one
    time, these are whole tokens. Of a stream the lake has all events of a cluster time or none, so the time says it,
    which is the same in the tokens of every server version: an upgrade may have changed the rest."""
    if after is None:
        return ""
    return after if isinstance(part, SnapshotSlice) else after[:TIME_END]


def _is_after(edge: str, token: str) -> bool:
    return token[: len(edge)] > edge if edge else True


def planned_range(start: Offset, until: Offset, server_version: str) -> PlannedRange:
    """What a micro-batch between two offsets is planned for."""
    snapshot = "" if until.snapshot is None else json.dumps(until.snapshot.to_json(), sort_keys=True)
    token_time = None if start.resume is None else start.resume.token.cluster_time
    return PlannedRange(
        start.cluster_time, until.cluster_time, snapshot, dict(until.entries), server_version, token_time
    )


def after_edge(edge: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Leave out the events whose tokens begin with ``edge`` or with less; none where it is empty.

    A fresh checkpoint starts its stream at the cluster time of the lake's last event, which gives that event again
    and, where it belongs to a transaction, its neighbours of the same time.
    """
    if not edge:
        yield from batches
        return
    import pyarrow.compute as pc  # noqa: PLC0415  loaded in the tasks, not where Spark only plans

    for batch in batches:
        if batch.num_rows and _is_after(edge, batch.column(TOKEN)[0].as_py()):
            yield batch
        else:
            beginnings = pc.utf8_slice_codeunits(batch.column(TOKEN), 0, len(edge))
            yield batch.filter(pc.greater(beginnings, edge))
