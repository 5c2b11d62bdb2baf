"""The lake as a Spark streaming sink (Python Data Source API): tasks write files, the driver commits them.

Use ``tailrace.spark.lake.write_stream``, which opens the lake and hands over the options. The data source is
registered as ``tailrace-lake``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from tailrace.errors import SinkError, UsageError
from tailrace.spark.lake.committer import abort_batch, commit_batch
from tailrace.spark.lake.compaction import CompactionPolicy, compact_after
from tailrace.spark.lake.layout import LakeLayout
from tailrace.spark.lake.manifest import StagedFile
from tailrace.spark.lake.part_writer import TOKEN, FileLimits, PartWriter, spark_metadata

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

#: Spark's name for the local property that holds the micro-batch's number (measured with PySpark 4.3).
_BATCH_ID = "streaming.sql.batchId"


@dataclass
class LakeMessage(WriterCommitMessage):
    """What a task tells the driver: the files it has finished, in the order of the stream."""

    files: tuple[StagedFile, ...]


class LakeStreamWriter(DataSourceStreamArrowWriter):
    """``write`` runs in Spark's tasks, ``commit`` and ``abort`` in a Python process beside the driver. All of them see
    the lake's directory under the same path."""

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        try:
            self.root = Path(options["lake"])
            self.claim = options["claim"]
        except KeyError as error:
            raise UsageError(
                f"the option {error} is missing", hint="Start the stream with tailrace.spark.lake.write_stream"
            ) from None
        self.after = options.get("after") or None
        self.policy = CompactionPolicy.from_options(options)
        self.limits = FileLimits(file_bytes=4 * self.policy.target_bytes)
        self.schema_json = schema.json()
        if TOKEN not in schema.fieldNames():
            raise UsageError("a lake needs the column 'token': its order and its days come from it")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> LakeMessage:
        task = TaskContext.get()
        if task is None:
            raise SinkError("the lake is written inside a Spark task only")
        batch = task.getLocalProperty(_BATCH_ID) or "x"
        stem = f"{batch}-{task.partitionId():05d}-{uuid.uuid4().hex}"
        writer = PartWriter(
            LakeLayout(self.root).staging, stem, limits=self.limits, metadata=spark_metadata(self.schema_json)
        )
        return LakeMessage(writer.write_all(_behind(self.after, iterator)))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        commit = commit_batch(self.root, self.claim, batchId, _files(messages))
        if commit is not None:
            compact_after(self.root, commit, self.policy)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        abort_batch(self.root, _files(messages))


class LakeSink(DataSource):
    """The data source ``tailrace-lake``; it can be written as a stream only."""

    @classmethod
    def name(cls) -> str:
        return "tailrace-lake"

    def streamWriter(self, schema: StructType, overwrite: bool) -> LakeStreamWriter:  # noqa: N802
        if overwrite:
            raise UsageError("a lake holds every event: it can be appended to only", hint='Use outputMode("append")')
        return LakeStreamWriter(schema, self.options)


def _files(messages: Sequence[WriterCommitMessage | None]) -> tuple[StagedFile, ...]:
    """The staged files of all tasks: messages come in the order of the partitions, and those in the stream's order."""
    return tuple(file for message in messages if isinstance(message, LakeMessage) for file in message.files)


def _behind(after: str | None, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Leave out the events up to and with token ``after``.

    A fresh checkpoint starts its stream at the cluster time of the lake's last event, which gives that event again
    and, where it belongs to a transaction, its neighbours of the same time. The cut is by token and so exact.
    """
    if after is None:
        yield from batches
        return
    import pyarrow.compute as pc  # noqa: PLC0415  loaded in the tasks, not where Spark only plans

    for batch in batches:
        if batch.num_rows and batch.column(TOKEN)[0].as_py() > after:
            yield batch
        else:
            yield batch.filter(pc.greater(batch.column(TOKEN), after))
