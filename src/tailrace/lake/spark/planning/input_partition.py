"""One slice of a micro-batch: everything that a worker is given. Its output is a pure function of the slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.spark.query.offset import Resume
from tailrace.lake.spark.query.snapshot_position import PlannedChunk


class ShardRange(NamedTuple):
    """A shard's part of a slice: its name and address as in ``config.shards``, and the time after which it is read."""

    name: str
    host: str
    after: ClusterTime


@dataclass(frozen=True, eq=False)
class OplogSlice(InputPartition):
    """The entries with ``after`` < ts <= ``until``. ``resume`` is the token that the stream starts by, in the slice
    that holds it only; ``server_version`` and ``token_version`` were settled by the driver, once for all slices.
    ``filtered``: whether the server is to leave out what gives no event. ``shards`` are those of a sharded cluster,
    each read up to ``until``; a replica set has none. ``images`` is the id of the directory that exact images are
    computed from."""

    after: ClusterTime
    until: ClusterTime
    server_version: str
    token_version: int
    resume: Resume | None = None
    filtered: bool = True
    shards: tuple[ShardRange, ...] = ()
    images: str | None = None


@dataclass(frozen=True, eq=False)
class SnapshotSlice(InputPartition):
    """Chunks of a copy that began at ``start``, in their order."""

    start: ClusterTime
    chunks: tuple[PlannedChunk, ...]
