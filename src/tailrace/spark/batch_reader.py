"""The batch reader: a closed range of the oplog, in the same slices as a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from tailrace.spark.deployment import Deployment
from tailrace.spark.input_partition import OplogSlice
from tailrace.spark.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa


class TailraceBatchReader(DataSourceReader):
    """The change events from a start (default: the oldest entry) to ``endAtOperationTime`` (default: now)."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        deployment = Deployment(self._options)
        try:
            start = deployment.start("oldest")
            until = deployment.newest()
            if self._options.end is not None:
                until = min(until, self._options.end)
            until = deployment.first_invalidating(start, until) or until
            return deployment.slices(start, start.advanced(until)) if until > start.cluster_time else []
        finally:
            deployment.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tailrace.spark.slice_reader import read_slice  # noqa: PLC0415 - the stages and Arrow: in the workers only

        assert isinstance(partition, OplogSlice)
        return read_slice(self._options, partition)
