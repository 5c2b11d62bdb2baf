"""The batch reader: a closed range of the oplogs, in the same slices as a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from tailrace.errors import UsageError
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.filters import match_of
from tailrace.lake.spark.query.options import SNAPSHOT, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa


class TailraceBatchReader(DataSourceReader):
    """The change events from a start (default: the oldest entry) to ``endAtOperationTime`` (default: now)."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        if self._options.start is not None and self._options.start.option == SNAPSHOT:
            raise UsageError(
                "startingFrom=snapshot is for streams", hint="Read the collection itself, or use spark.readStream"
            )
        deployment = open_deployment(self._options)
        try:
            start = deployment.start("oldest")
            until = deployment.newest()
            if self._options.end is not None:
                until = min(until, self._options.end)
            deployment.settle(until)
            slices: list[OplogSlice] = []
            while start.cluster_time < until and not start.invalidated:
                end = deployment.end(start, until, None)  # which is earlier where a shard was removed
                slices += deployment.slices(start, end)
                start = end
            return slices
        finally:
            deployment.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tailrace.lake.spark.reading.slice_reader import read_slice  # noqa: PLC0415 - the stages and Arrow: in the workers only

        assert isinstance(partition, OplogSlice)
        return read_slice(self._options, partition)


class TailraceFilteringReader(TailraceBatchReader):
    """The same, with Spark's filters pushed into the read. A reader that can do this is refused by a session whose
    ``spark.sql.python.filterPushdown.enabled`` is off, as it is by default: so it is a class of its own."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """All filters come back: Spark asks them again, of fewer rows."""
        match = match_of(filters)
        # An event that a filter hid could not be resumed from; and after the split stage no stage may stand.
        start = self._options.start
        if match is not None and (start is None or start.token is None) and not self._options.splits_events:
            self._options = replace(self._options, pipeline=(*self._options.pipeline, match))
        return filters
