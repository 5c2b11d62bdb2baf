"""A source for a lake that sees the oplog begin later than it does, in Spark's processes too, so that everything
earlier is read from an archive. A real oplog takes minutes to lose its beginning, and all other products would lose it
too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.lake.spark.store import stream
from tailrace.lake.spark.store.source import LakePlace, LakeSource, LakeStreamReader
from tests.products.archive import beginning_at
from tests.products.following import keeping

if TYPE_CHECKING:
    import pyarrow as pa


class LateReader(LakeStreamReader):
    """Like its parent, in each of Spark's processes, whenever it is asked for something."""

    def __init__(self, options: ReadOptions, place: LakePlace, begins: int) -> None:
        super().__init__(options, place)
        self._begins = ClusterTime(begins)

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": (self._options, self._place, int(self._begins))}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        with beginning_at(self._begins):
            return super().initialOffset()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        with beginning_at(self._begins):
            return super().reportLatestOffset()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with beginning_at(self._begins):
            return super().latestOffset(start, limit)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with beginning_at(self._begins):
            return super().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with beginning_at(self._begins):
            yield from super().read(partition)


class LateSource(LakeSource):
    """The source of that reader. Spark makes it again in each process from nothing but its options, so the time at
    which the oplog is to begin is in a file beside the archive."""

    @classmethod
    def name(cls) -> str:
        return "late-lake-source"  # a session keeps the first source of a name

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        assert self._parsed.archive is not None
        return LateReader(self._parsed, self._place, int(_begins_in(Path(self._parsed.archive)).read_text()))


@contextmanager
def lakes_beginning_at(time: ClusterTime, archive: Path) -> Iterator[None]:
    """Let the oplog begin then for lakes that are started inside the block, and let them read this archive."""
    own = stream.LakeSource
    with keeping():
        _begins_in(archive).write_text(str(int(time)))
    stream.LakeSource = LateSource  # type: ignore[misc]
    try:
        with beginning_at(time):
            yield
    finally:
        stream.LakeSource = own  # type: ignore[misc]


def _begins_in(archive: Path) -> Path:
    return archive.with_name("archive.begins")
