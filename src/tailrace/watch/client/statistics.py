"""How a stream is doing, as ``ChangeStream.statistics`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.read.snapshot.reader import SnapshotProgress
from tailrace.read.source.sharded import ShardStatistics


@dataclass(frozen=True)
class StreamStatistics:
    """How a stream is doing now.

    Attributes:
        shards: each shard of a cluster; the config server, whose oplog shows new shards, is ``config.shards``
        waiting_for: the shards whose promise the next event, or the resume token, is waiting for
        forced_noops: no-ops that shards wrote because this stream asked them for a promise
        unknown_operations: how many oplog entries, and operations inside of entries, were skipped because their kind is
            not known, by kind: ``"xi"`` after the letters of ``op``, ``"command NAME"``, ``"no-op NAME"``
        snapshot: how far the copy of ``watch(start="snapshot")`` has come; ``None`` if no copy is under way
    """

    shards: Mapping[str, ShardStatistics] = field(default_factory=dict)
    waiting_for: tuple[str, ...] = ()
    forced_noops: int = 0
    unknown_operations: Mapping[str, int] = field(default_factory=dict)
    snapshot: SnapshotProgress | None = None
