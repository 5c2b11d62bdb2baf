"""Run a change stream into a lake: ``write_stream``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import UsageError
from tailrace.spark import options as source_options
from tailrace.spark.deployment import open_deployment
from tailrace.spark.lake.compaction_policy import CompactionPolicy
from tailrace.spark.lake.identity import Opening, open_lake
from tailrace.spark.lake.layout import cluster_time_of
from tailrace.spark.lake.sink import LakeSink
from tailrace.spark.lake.source import AFTER, FILE_BYTES, LAKE, TOKEN, LakeSource
from tailrace.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Where the checkpoint lies when none is named. Readers skip it, as everything that begins with an underscore.
DEFAULT_CHECKPOINT = "_checkpoint"


def write_stream(
    spark: SparkSession,
    source: Mapping[str, str],
    lake: Path | str,
    *,
    checkpoint: Path | str | None = None,
    processing_time: str | None = None,
    available_now: bool = False,
    compaction: CompactionPolicy | None = None,
    sink: type[LakeSink] = LakeSink,
) -> StreamingQuery:
    """Start a query that writes the change stream given by ``source`` into the lake at ``lake``, exactly once.

    ``source`` holds the options of ``format("tailrace")`` (``uri``, ``database``, ``fullDocument``, ...); the column
    ``token`` must be among its ``columns``. ``checkpoint`` is Spark's checkpoint directory, by default
    ``<lake>/_checkpoint``. With ``available_now`` the query ends when it has reached the end of the oplog; otherwise it
    runs until stopped, a micro-batch every ``processing_time`` ("1 second"; default: as soon as there is something).

    A lake belongs to one stream and is written by one checkpoint at a time. A fresh checkpoint on a lake that is there
    goes on right after the lake's last event, whatever start ``source`` names, and shuts the older checkpoint out.

    Raises UsageError where the options are wrong or lake and checkpoint do not belong together, SourceError where
    MongoDB cannot be read, LakeFullError and SinkError where the lake cannot be written.
    """
    if processing_time is not None and available_now:
        raise UsageError("processing_time and available_now exclude each other")
    root = Path(lake).absolute()
    where = Path(checkpoint).absolute() if checkpoint is not None else root / DEFAULT_CHECKPOINT
    policy = compaction or CompactionPolicy()
    opening = open_lake(root, where, stream_of(source))
    register(spark, LakeSource)
    if sink is LakeSink:
        register(spark, sink)
    else:
        spark.dataSource.register(sink)
    reader = spark.readStream.format(LakeSource.name()).options(**start_after(opening, source))
    reader = reader.options(**{LAKE: str(root), AFTER: opening.after or "", FILE_BYTES: str(4 * policy.target_bytes)})
    writer = reader.load().writeStream.format(sink.name()).option("checkpointLocation", str(where))
    writer = writer.options(lake=str(root), claim=opening.claim, **policy.to_options())
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif processing_time is not None:
        writer = writer.trigger(processingTime=processing_time)
    return writer.start()


def stream_of(source: Mapping[str, str]) -> dict[str, object]:
    """What makes two lakes hold the same: the stream's identity as its source tells it, and the form of its columns.
    Connects to MongoDB. No address, user or password is in it."""
    options = source_options.parse(source)
    if TOKEN not in options.columns:
        raise UsageError("a lake needs the column 'token': its order and its days come from it")
    deployment = open_deployment(options)
    try:
        identity = deployment.identity.to_json()
    finally:
        deployment.close()
    return {**identity, "columns": list(options.columns), "documents": options.documents}


def start_after(opening: Opening, source: Mapping[str, str]) -> dict[str, str]:
    """The source's options, with the start replaced where the lake says where to go on.

    It starts at the cluster time of the lake's last event, and the sink leaves out what the lake has
    (``source.behind``): a start by token would need the token's type bits, which no column holds.
    """
    if opening.after is None:
        return dict(source)
    starts = {name.lower() for name in source_options.START_OPTIONS}
    kept = {name: value for name, value in source.items() if name.lower() not in starts}
    time = cluster_time_of(opening.after)
    return {**kept, "startAtOperationTime": f"{time.seconds},{time.increment}"}
