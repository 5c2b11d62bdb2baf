"""One slice of a sharded cluster in a worker: every shard's part of it, merged where it is read.

The driver's side has settled the slice's end, so every shard is read up to there and then promises it; nobody is asked
for anything. What the merge waits for is read next, so no shard is far ahead of the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pymongo import MongoClient

from tailrace.core.event.event_block import EventBlock
from tailrace.core.pipeline.quarantine import Aside
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import Answer, OplogBatch
from tailrace.core.stream.kernel_choice import KernelUse
from tailrace.core.stream.merge import MergedStream
from tailrace.core.stream.stream import Need
from tailrace.errors import SourceError, TailraceError, on_shard
from tailrace.lake.spark.planning.input_partition import OplogSlice, ShardRange
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.lake.spark.reading.exact_slice import Sources, sources_of
from tailrace.lake.spark.reading.slice_plan import report_skipped, slice_plan, token_not_found
from tailrace.read.source.connection import open_client
from tailrace.read.source.drive import answer_request, drive
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import MongodSource
from tailrace.read.source.routing import OwnerLookup
from tailrace.read.source.topology import Cluster, ShardAddress

if TYPE_CHECKING:
    from tailrace.read.archive.cluster_hybrid import ArchivedShards

#: Bytes of a shard's oplog that go through the stages at a time.
_BATCH_BYTES: Final = 4 << 20


@dataclass
class Connected:
    """A cluster and the sources of the shards that were read, kept by a worker's process."""

    client: MongoClient[Any]
    cluster: Cluster
    archive: ArchivedShards | None = None
    sources: dict[ShardAddress, LiveSource] = field(default_factory=dict)

    def source(self, shard: ShardRange) -> LiveSource:
        address = ShardAddress(shard.name, shard.host)
        source = self.sources.get(address)
        if source is None:
            client = self.cluster.client_at(address)
            source = MongodSource(client) if self.archive is None else self.archive.bounded_source(shard.name, client)
            self.sources[address] = source
        return source


_connected: dict[tuple[int, str, str | None], Connected] = {}


def connect(uri: str, archive: str | None = None) -> Connected:
    """This process's connections to the cluster at ``uri``, and its archive; a fork leaves its parent's alone."""
    key = (os.getpid(), uri, archive)
    found = _connected.get(key)
    if found is None:
        client = open_client(uri)
        cluster = Cluster.discover(client, uri, {})
        if cluster is None:
            raise SourceError("the uri led to a sharded cluster when the micro-batch was planned, and no longer does")
        found = _connected[key] = Connected(client, cluster, _archived(archive))
    return found


def _archived(folder: str | None) -> ArchivedShards | None:
    if folder is None:
        return None
    from tailrace.read.archive.cluster_hybrid import ArchivedShards  # noqa: PLC0415  only where an archive is read

    return ArchivedShards(folder)


def merged_slice_events(options: ReadOptions, slice_: OplogSlice, aside: Aside = None) -> Iterator[EventBlock]:
    """The slice's events in the order of the cluster, in blocks. Raises what a source, a shard's stages or the router's
    raise."""
    plan = slice_plan(options, slice_, quarantines=aside is not None)
    with sources_of(options, slice_) as through:
        yield from stream_of_slice(plan, slice_, connect(options.uri, options.archive), aside=aside, through=through)


def stream_of_slice(
    plan: Plan,
    slice_: OplogSlice,
    at: Connected,
    *,
    kernel: KernelUse = "auto",
    aside: Aside = None,
    through: Sources = lambda shard, source: source,
) -> Iterator[EventBlock]:
    """The same over a cluster that is connected. What the merge waits for is read next."""
    from_start = [shard.name for shard in slice_.shards if shard.after == slice_.after]
    searches = slice_.resume is not None
    stream = MergedStream(plan, from_start, mid_stream=not searches, kernel=kernel)
    for shard in slice_.shards:
        stream.open_shard(shard.name, shard.after.tick())  # those that were added in the slice
    wanted = stream.oplog_filter if slice_.filtered and not searches else None
    parts = {shard.name: _ShardOfSlice(shard, slice_, at, wanted, through) for shard in slice_.shards}
    answers = partial(_answer, parts)
    while True:
        yield from drive(stream, answers)
        if aside is not None:
            aside += stream.take_quarantined()
        report_skipped(stream)
        waiting = [name for name in stream.waiting_for if name in parts]
        if stream.invalidated or not waiting:
            break
        # Each of them holds the next event back. Looking at all shards after every single batch took a slice of a
        # hundred shards three times as long.
        for name in waiting:
            batch = parts[name].next_batch()
            if batch is None:
                del parts[name]
            else:
                stream.feed(name, batch)
    if stream.searching:
        raise token_not_found(slice_)


class _ShardOfSlice:
    """One shard's part of a slice: its batches, and who answers for it."""

    def __init__(
        self, shard: ShardRange, slice_: OplogSlice, at: Connected, wanted: bytes | None, through: Sources
    ) -> None:
        self._name = shard.name
        try:
            self.source, self.owners = through(shard.name, at.source(shard)), OwnerLookup(at.cluster)
        except TailraceError as error:
            raise on_shard(error, shard.name) from None
        self._batches = self.source.read(shard.after, slice_.until, batch_bytes_max=_BATCH_BYTES, oplog_filter=wanted)

    def next_batch(self) -> OplogBatch | None:
        """What comes next; ``None`` at the end of the slice."""
        try:
            return next(self._batches, None)
        except TailraceError as error:
            raise on_shard(error, self._name) from None


def _answer(parts: dict[str, _ShardOfSlice], need: Need) -> Answer:
    part = parts[need.participant]
    return answer_request(need.request, part.source, part.owners)
