"""The lake as a Spark streaming sink (Python Data Source API): the files that tasks have written are committed by the
driver's side.

Use ``tailrace.lake.spark.store.write_stream``, which opens the lake and hands over the options. The data source is
registered as ``tailrace-lake``; what it takes are the rows of ``LakeSource``, a finished file each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, UsageError
from tailrace.lake.spark.store.source import STATE
from tailrace.lake.spark.store.staged_rows import STAGED_SCHEMA, from_batches
from tailrace.lake.store.committer import abort_batch, commit_batch
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.lake_root import LakeRoot, state_of, writable_root
from tailrace.lake.store.manifest import Commit, PlannedRange, StagedFile
from tailrace.lake.store.retention import Release

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tailrace.lake.iceberg.lake_mirror import LakeMirror


#: The option that names the Iceberg catalogue. Sessions of ours redact options of such a name.
ICEBERG: Final = "icebergUri"


@dataclass
class LakeMessage(WriterCommitMessage):
    """What a task tells the driver: the files it has finished, in the order of the stream, and the range that their
    micro-batch was planned for (``None`` of a task that had no slice)."""

    files: tuple[StagedFile, ...]
    planned: PlannedRange | None = None


class LakeStreamWriter(DataSourceStreamArrowWriter):
    """``write`` runs in Spark's tasks, ``commit`` and ``abort`` in a Python process next to the driver. All of them see
    the lake's directory under the same path."""

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        try:
            self._lake = options["lake"], options.get(STATE) or None
            self.claim = options["claim"]
            self.checkpoint = Path(options["checkpoint"])
        except KeyError as error:
            raise UsageError(
                f"the option {error} is missing", hint="Start the stream with tailrace.lake.spark.store.write_stream"
            ) from None
        self.root = writable_root(*self._lake)
        self.policy = CompactionPolicy.from_options(options)
        self.iceberg = options.get(ICEBERG) or None
        if schema.fieldNames() != STAGED_SCHEMA.fieldNames():
            raise UsageError(
                "the lake takes only the rows of its own source",
                hint="Start the stream with tailrace.lake.spark.store.write_stream",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "root"}  # a store's holds keys

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.root = writable_root(*self._lake)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> LakeMessage:
        rows = list(from_batches(iterator))
        files = tuple(file for file, _ in rows if file is not None)
        return LakeMessage(files, rows[0][1] if rows else None)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        files, planned = _files(messages), _planned(messages)
        if planned is None:
            return
        commit = commit_batch(self.root, self.claim, batchId, planned, files, checkpoint=self.checkpoint)
        if self.iceberg is None:
            self._compact(commit, files, batchId)
            return
        mirror = _mirror_of(self.root, self.iceberg)
        mirror.follow()  # also where nothing is new: a run before this one may have ended between the two
        if self._compact(commit, files, batchId, mirror.release):
            mirror.follow()

    def _compact(
        self, commit: Commit | None, files: tuple[StagedFile, ...], batch: int, release: Release | None = None
    ) -> bool:
        """Whether files were merged, which is a commit."""
        if commit is not None and self.policy.due(commit.number):
            from tailrace.lake.store.compaction import compact_after  # noqa: PLC0415  Arrow and Parquet, now and then

            return compact_after(self.root, commit, self.policy, release).files_before > 0
        if not files and batch:  # an empty micro-batch comes every ten seconds at most
            from tailrace.lake.store.compaction import compact_idle  # noqa: PLC0415

            return compact_idle(self.root, self.policy, release).files_before > 0
        return False

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        abort_batch(self.root, _files(messages))


class LakeSink(DataSource):
    """The data source ``tailrace-lake``; it can be written as a stream only."""

    @classmethod
    def name(cls) -> str:
        return "tailrace-lake"

    def streamWriter(self, schema: StructType, overwrite: bool) -> LakeStreamWriter:  # noqa: N802
        if overwrite:
            raise UsageError("a lake holds every event: it can only be appended to", hint='Use outputMode("append")')
        return LakeStreamWriter(schema, self.options)


def _mirror_of(root: LakeRoot, iceberg: str) -> LakeMirror:
    """The process that commits keeps it: the next micro-batch need not ask the catalogue what it has. A lake in a store
    that is reached in another way, or from another state directory, has one of its own."""
    way = (str(state_of(root)), *sorted(root.bucket.options.items())) if isinstance(root, ObjectPlace) else ()
    return _mirror(root, iceberg, way)


@lru_cache(maxsize=4)
def _mirror(root: LakeRoot, iceberg: str, way: tuple[object, ...]) -> LakeMirror:
    from tailrace.lake.iceberg.lake_mirror import LakeMirror  # noqa: PLC0415  where it is asked for
    from tailrace.lake.iceberg.settings import IcebergSettings  # noqa: PLC0415

    return LakeMirror(root, IcebergSettings.from_text(iceberg))


def _files(messages: Sequence[WriterCommitMessage | None]) -> tuple[StagedFile, ...]:
    """The files of all tasks: messages come in the order of the partitions, and those in the stream's order."""
    return tuple(file for message in messages if isinstance(message, LakeMessage) for file in message.files)


def _planned(messages: Sequence[WriterCommitMessage | None]) -> PlannedRange | None:
    """The range that Spark planned the micro-batch for; ``None`` where it had no tasks."""
    found = {message.planned for message in messages if isinstance(message, LakeMessage) and message.planned}
    if len(found) > 1:
        raise SinkError(f"the tasks of one micro-batch were planned for different ranges: {sorted(map(str, found))}")
    return next(iter(found), None)
