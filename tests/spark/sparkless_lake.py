"""A lake written as Spark writes it, but without Spark: the same plan, slices, files and commits, in this process.

A session would cost more than everything else here, and nothing in a lake comes from it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.spark.planning.input_partition import OplogSlice, SnapshotSlice
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.planning.planner import Limits
from tailrace.lake.spark.planning.snapshot import snapshot_slices
from tailrace.lake.spark.query import options as source_options
from tailrace.lake.spark.query.schema import spark_schema
from tailrace.lake.spark.query.snapshot_position import SnapshotPosition
from tailrace.lake.spark.reading.slice_reader import read_slice
from tailrace.lake.spark.store.source import COPIED, after_edge, edge_of, planned_range
from tailrace.lake.spark.store.stream import lake_columns, lake_source, start_after, stream_of, with_columns_of
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.identity import open_lake, partitioning_of, read_identity
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.manifest import StagedFile
from tailrace.lake.store.part_writer import PartWriter, spark_metadata
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.quarantine import stage


def fill(
    source: Mapping[str, str],
    root: Path,
    until: ClusterTime,
    *,
    checkpoint: Path | None = None,
    partition_by: tuple[str, ...] = ("day",),
    quarantines: bool = False,
) -> None:
    """Read a stream up to ``until`` into the lake at ``root``, in micro-batches of ``maxEventsPerTrigger``; a copy
    that it begins with, all of it. Each call needs a fresh checkpoint: it takes the lake over."""
    where = LakeLayout(root).default_checkpoint if checkpoint is None else checkpoint
    source = lake_source(with_columns_of(root, source))
    options = source_options.parse(source)
    columns = lake_columns(options.columns, options.documents)
    opening = open_lake(root, where, stream_of(source), columns, partitioning=Partitioning.of(partition_by))
    given = start_after(opening, source)
    copied = given.pop(COPIED, None)
    options = source_options.parse(given)
    partitioning = partitioning_of(read_identity(root) or {})
    deployment = open_deployment(options)
    try:
        if copied is None:
            position = deployment.start("oldest")
        else:
            position = deployment.copied(SnapshotPosition.from_json(json.loads(copied)))
        deployment.settle(until)
        first = CommitLog(root).head().number == 0
        if first:  # a stream's first micro-batch is empty
            begun = planned_range(position, position, "")
            commit_batch(root, opening.claim, 0, begun, (), checkpoint=where)
        (where / "offsets").mkdir(exist_ok=True)
        batch = 0
        while position.snapshot is not None or (position.cluster_time < until and not position.invalidated):
            batch += 1
            limits = Limits(options.max_events, options.max_bytes)
            if position.snapshot is not None:
                planned_copy = deployment.snapshots.next(position.snapshot, limits)
                if planned_copy is None:
                    position = replace(position, snapshot=None)
                    continue
                end = deployment.copying(position, planned_copy)
            else:
                end = deployment.end(position, until, limits)
            (where / "offsets" / str(batch)).write_text(json.dumps(end.to_json()))
            planned = planned_range(position, end, end.server_version or "")
            files: list[StagedFile] = []
            parts: Sequence[OplogSlice | SnapshotSlice] = (
                deployment.slices(position, end) if end.snapshot is None else snapshot_slices(end.snapshot, 1)
            )
            for part in parts:
                shards = max(1, len(part.shards)) if isinstance(part, OplogSlice) else 1
                aside: list[QuarantinedEvent] | None = [] if quarantines else None
                writer = PartWriter(
                    root,
                    f"{batch}-{uuid.uuid4().hex}",
                    metadata=spark_metadata(spark_schema(options.columns, options.documents).json()),
                    partitioning=partitioning,
                    one_token=shards,
                )
                rows = read_slice(options, part, aside=aside)
                files += writer.write_all(after_edge(edge_of(opening.after, part), rows))
                if aside:
                    files.append(stage(root, aside, one_token=shards))
            commit_batch(root, opening.claim, batch, planned, tuple(files), checkpoint=where)
            position = end
    finally:
        deployment.close()
