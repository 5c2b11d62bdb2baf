"""Run a change stream into a lake: ``write_stream``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.core.oplog.witness import marks_to_json
from tailrace.errors import UsageError
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query import options as source_options
from tailrace.lake.spark.query.schema import spark_schema
from tailrace.lake.spark.runtime.session import register
from tailrace.lake.spark.store.gap import find_gap, set_aside
from tailrace.lake.spark.store.sink import ICEBERG, LakeSink
from tailrace.lake.spark.store.source import (
    AFTER,
    COPIED,
    ENTRIES,
    FILE_BYTES,
    LAKE,
    ON_ERROR,
    PARTITION,
    STATE,
    TOKEN,
    LakeSource,
)
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.identity import Opening, open_lake, partitioning_of, read_identity
from tailrace.lake.store.lake_root import LakeRoot, state_of, writable_root
from tailrace.lake.store.layout import LakeLayout, cluster_time_of
from tailrace.lake.store.local_path import local_path
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.quarantine import ON_ERRORS
from tailrace.read.source.mask_file import Masks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from tailrace.lake.iceberg.settings import IcebergSettings

_log = logging.getLogger("tailrace.lake")

#: How the documents' columns come in a lake where the source's options do not say: every reader knows text.
DOCUMENTS = "json"
_VARIANT: dict[str, Any] = {
    "type": "struct",
    "fields": [{"name": name, "type": "binary", "nullable": False, "metadata": {}} for name in ("value", "metadata")],
}


def write_stream(
    spark: SparkSession,
    source: Mapping[str, str],
    lake: Path | str,
    *,
    state: Path | str | None = None,
    checkpoint: Path | str | None = None,
    processing_time: str | None = None,
    available_now: bool = False,
    compaction: CompactionPolicy | None = None,
    accept_gap: bool = False,
    partition_by: Sequence[str] | None = None,
    on_error: str = "fail",
    iceberg: IcebergSettings | None = None,
    sink: type[LakeSink] = LakeSink,
) -> StreamingQuery:
    """Start a query that writes the change stream given by ``source`` into the lake at ``lake``, exactly once.

    ``source`` holds the options of ``format("tailrace")`` (``uri``, ``database``, ``fullDocument``, ...); the column
    ``token`` must be among its ``columns``, and ``documents`` is ``json`` unless it says otherwise. ``checkpoint`` is
    Spark's checkpoint directory, by default ``<lake>.checkpoint``, next to the lake; it lies on a local or shared POSIX
    file system. The lake does too, or it is in an object store: ``s3://BUCKET/PREFIX``, ``az://CONTAINER/PREFIX`` or
    ``gs://BUCKET/PREFIX``. Then ``state`` is a local directory for its locks and for files on their way, and, unless
    ``checkpoint`` is given, for the checkpoint; keys come from the environment, that of executors too.

    With ``available_now`` the query ends when it has reached the end of the oplog; otherwise it runs until stopped, a
    micro-batch every ``processing_time`` ("1 second"; default: as soon as there is something).

    A lake belongs to one stream and is written by one checkpoint at a time. A new checkpoint on an existing lake
    continues right after the lake's last event, whatever start ``source`` names, and shuts the older checkpoint out.

    If the oplog has lost events that the lake does not have yet, the query fails with 286. ``accept_gap`` continues
    after them: the gap is recorded in the lake's log, the checkpoint that cannot be continued is moved aside, and the
    stream begins with the oldest entry that the oplog has. If nothing was lost, it does nothing.

    ``partition_by`` names what a new lake's files are divided by: ``day`` (always), ``hour`` and ``collection``. A lake
    keeps its partitions.

    An event that cannot be written ends the query: it is larger than 16 MB, a stage of the pipeline fails on it, an
    image that is required is missing, a column cannot take it. With ``on_error="quarantine"`` it is written to the
    lake's ``_quarantine`` instead, with the reason, in the commit of its micro-batch.

    ``iceberg`` names a catalogue that has the lake as an Iceberg table (``<lake's directory>.events``, in a store
    ``<last part of its URI>.events``): each commit is its newest snapshot. If it does not answer for a minute, the
    query ends; the next one brings it up.

    In ``query.lastProgress`` Spark's ``numInputRows`` counts files. Events are in
    ``observedMetrics["tailrace"].events``, and next to it by operation (``insert``, ``update``, ...) where the column
    ``operation_type`` is kept; ``quarantined`` counts those that were put aside.

    Raises UsageError if the options are wrong or lake and checkpoint do not belong together, SourceError if MongoDB
    cannot be read, LakeFullError and SinkError if the lake cannot be written.
    """
    _check_arguments(processing_time, on_error, available_now=available_now)
    from tailrace.lake.spark.monitoring import counted_files  # noqa: PLC0415  so that --help needs no pyspark

    root = writable_root(lake, state)
    where = local_path(checkpoint, "the checkpoint") if checkpoint is not None else LakeLayout(root).default_checkpoint
    policy = compaction or CompactionPolicy()
    source = lake_source(with_columns_of(root, source))
    with _brought_up(root, iceberg):
        opening = _opened(root, where, source, accept_gap=accept_gap, partition_by=partition_by)
    _register_both(spark, sink)
    reader = spark.readStream.format(LakeSource.name()).options(**start_after(opening, source))
    reader = reader.options(**_place(root), **_lake_options(root, opening, policy, on_error))
    writer = counted_files(reader.load()).writeStream.format(sink.name()).option("checkpointLocation", str(where))
    writer = writer.options(**_place(root), claim=opening.claim, checkpoint=str(where), **policy.to_options())
    writer = writer.option(ICEBERG, "" if iceberg is None else iceberg.to_text())
    return _started(spark, _triggered(writer, processing_time, available_now=available_now))


def _triggered(writer: DataStreamWriter, processing_time: str | None, *, available_now: bool) -> DataStreamWriter:
    if available_now:
        return writer.trigger(availableNow=True)
    return writer if processing_time is None else writer.trigger(processingTime=processing_time)


def _place(root: LakeRoot) -> dict[str, str]:
    """Where the lake is, for the source and the sink. Keys of a store are not among it."""
    return {LAKE: str(root), STATE: str(state_of(root) or "")}


def _lake_options(root: LakeRoot, opening: Opening, policy: CompactionPolicy, on_error: str) -> dict[str, str]:
    """What the lake's source is told beside the stream's options."""
    return {
        AFTER: opening.after or "",
        FILE_BYTES: str(4 * policy.target_bytes),
        PARTITION: ",".join(partitioning_of(read_identity(root) or {}).names),
        ON_ERROR: on_error,
        ENTRIES: json.dumps(marks_to_json(opening.entries)),
    }


def _register_both(spark: SparkSession, sink: type[LakeSink]) -> None:
    register(spark, LakeSource)
    if sink is LakeSink:
        register(spark, sink)
    else:
        spark.dataSource.register(sink)


@contextmanager
def _brought_up(root: LakeRoot, iceberg: IcebergSettings | None) -> Iterator[None]:
    """Around the opening of a lake: before it, the catalogue has to answer and let this lake write its table; after it,
    the table is brought up to what the lake has."""
    from tailrace.lake.iceberg.lake_mirror import LakeMirror, left_behind  # noqa: PLC0415

    if iceberg is None:
        if (left := left_behind(root)) is not None:
            _log.warning("%s", left)
        yield
        return
    mirror = LakeMirror(root, iceberg)
    try:
        mirror.check()
        yield
        mirror.follow()
    finally:
        mirror.close()


def _started(spark: SparkSession, writer: DataStreamWriter) -> StreamingQuery:
    """The query, begun while its session is the active one of this thread: Spark looks a sink up there, and a thread
    that was not there when the session was made has none, or that of a query. (PySpark does the same where it makes a
    DataFrame.)"""
    jvm = getattr(spark, "_jvm", None)  # a Connect session has none
    if jvm is not None:
        spark._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)
    return writer.start()


def _check_arguments(processing_time: str | None, on_error: str, *, available_now: bool) -> None:
    if processing_time is not None and available_now:
        raise UsageError("processing_time and available_now cannot be used together")
    if on_error not in ON_ERRORS:
        raise UsageError(f"on_error must be one of {', '.join(ON_ERRORS)}, not {on_error!r}")


def lake_source(source: Mapping[str, str]) -> dict[str, str]:
    """The options of a lake's source: what the user gave, the lake's own default for the documents' form, and masks
    with the key that is there now and no other, since each worker reads it for itself."""
    made = {
        name: Masks.from_text(text).pinned().to_json() if name == "masks" else text for name, text in source.items()
    }
    return made if any(name.lower() == "documents" for name in source) else {**made, "documents": DOCUMENTS}


def with_columns_of(root: LakeRoot, source: Mapping[str, str]) -> Mapping[str, str]:
    """The source's options, with the lake's own columns if they name none: a lake keeps the columns that it was begun
    with, even if a later Tailrace has more."""
    known = None if any(name.lower() == "columns" for name in source) else read_identity(root)
    columns = [] if known is None else known["stream"].get("columns", [])
    return source if not columns else {**source, "columns": ",".join(map(str, columns))}


def _opened(
    root: LakeRoot, checkpoint: Path, source: Mapping[str, str], *, accept_gap: bool, partition_by: Sequence[str] | None
) -> Opening:
    partitioning = None if partition_by is None else Partitioning.of(partition_by)
    options = source_options.parse(source)
    if accept_gap and options.exact:
        raise UsageError(
            "a gap cannot be accepted in a lake with exact images: what changed in the gap would be missing in them",
            hint="Begin a new lake, with a new directory for the images",
        )
    if partitioning is not None:
        partitioning.check_columns(options.columns)
    stream = stream_of(source)
    gap = find_gap(root, checkpoint, source) if accept_gap else None
    if gap is not None:
        set_aside(checkpoint, gap)
    columns = lake_columns(options.columns, options.documents)
    return open_lake(root, checkpoint, stream, columns, gap=gap, partitioning=partitioning)


def lake_columns(columns: Sequence[str], documents: str) -> list[dict[str, Any]]:
    """The fields of the lake's table in Spark's JSON form, which is Delta's. VARIANT is a struct of two binaries there:
    the older readers of Delta have no such type, and Spark finds its own in the files."""
    fields: list[dict[str, Any]] = spark_schema(columns, documents).jsonValue()["fields"]
    return [{**field, "type": _VARIANT} if field["type"] == "variant" else field for field in fields]


def stream_of(source: Mapping[str, str]) -> dict[str, object]:
    """What decides that two lakes hold the same: the stream's identity, as its source reports it, and the form of its
    columns. Connects to MongoDB. No address, user or password is in it."""
    options = source_options.parse(lake_source(source))
    if TOKEN not in options.columns:
        raise UsageError("a lake needs the column 'token': its order and its days come from it")
    deployment = open_deployment(options)
    try:
        identity = deployment.identity.to_json()
    finally:
        deployment.close()
    masks = {} if options.masks is None else {"masks": options.masks.witness}
    return {**identity, **masks, "columns": list(options.columns), "documents": options.documents}


def start_after(opening: Opening, source: Mapping[str, str]) -> dict[str, str]:
    """The source's options, with the start replaced if the lake says where to continue.

    It starts at the cluster time of the lake's last event, and the sink leaves out what the lake has
    (``source.after_edge``): a start by token would need the token's type bits, which no column holds. After an accepted
    gap it starts where the gap ends; a copy that had not ended goes on where it was.
    """
    if opening.after is None and opening.start is None:
        return dict(source)
    if opening.snapshot is not None:
        return {**_without_start(source), "startingFrom": source_options.SNAPSHOT, COPIED: opening.snapshot}
    time = opening.start if opening.start is not None else cluster_time_of(opening.after or "")
    return {**_without_start(source), "startAtOperationTime": f"{time.seconds},{time.increment}"}


def _without_start(source: Mapping[str, str]) -> dict[str, str]:
    starts = {name.lower() for name in source_options.START_OPTIONS}
    return {name: value for name, value in source.items() if name.lower() not in starts}
