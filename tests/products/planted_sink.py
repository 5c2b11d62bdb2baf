"""The lake's sink with a fault in it, which goes with it to Spark's processes."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace.lake.spark.store.sink import LakeSink, LakeStreamWriter
from tests.products.planted import plant

_FAULT = "a lake that was set back goes on"


class PlantedWriter(LakeStreamWriter):
    """Like its parent, but does not notice an older lake."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        plant(_FAULT)
        super().commit(messages, batchId)


class PlantedSink(LakeSink):
    """The sink of that writer."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> PlantedWriter:  # noqa: N802
        return PlantedWriter(schema, self.options)


class LaggingWriter(LakeStreamWriter):
    """Like its parent, but leaves the catalogue to the next start."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self.iceberg = None
        super().commit(messages, batchId)


class LaggingSink(LakeSink):
    """The sink of that writer."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> LaggingWriter:  # noqa: N802
        return LaggingWriter(schema, self.options)
