"""One slice of a sharded cluster in a worker: every shard's part of it, merged where it is read.

The driver's side has settled the slice's end, so every shard is read up to there and then promises it; nobody is asked
for anything. What the merge waits for is read next, so no shard is far ahead of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pymongo import MongoClient

from tailrace.errors import InternalError, SourceError, TailraceError, on_shard
from tailrace.event.change_event import ChangeEvent
from tailrace.event.event_block import EventBlock
from tailrace.event.resume_token import ResumeToken
from tailrace.kernel.fast_path import settings_for
from tailrace.pipeline.merge import MergedChangeStream
from tailrace.pipeline.stream import ONE_OPLOG, open_stream
from tailrace.plan.plan import Plan
from tailrace.plan.request import (
    Answer,
    Emit,
    NeedDocuments,
    NeedEntries,
    NeedPreImages,
    NeedShardKeys,
    OplogBatch,
    Request,
    Running,
)
from tailrace.source.connection import open_client
from tailrace.source.drive import answers_of, drive
from tailrace.source.mongod import MongodSource
from tailrace.source.routing import OwnerLookup
from tailrace.source.topology import Cluster, ShardAddress
from tailrace.spark.planning.input_partition import OplogSlice, ShardRange
from tailrace.spark.reading.block_merge import ShardEvents, merge_blocks, up_to
from tailrace.spark.reading.slice_plan import slice_plan, token_not_found
from tailrace.spark.source.options import ReadOptions

#: Bytes of a shard's oplog that go through the stages at a time.
_BATCH_BYTES: Final = 4 << 20


@dataclass
class Connected:
    """A cluster and the sources of the shards that were read, kept by a worker's process."""

    client: MongoClient[Any]
    cluster: Cluster
    sources: dict[ShardAddress, MongodSource] = field(default_factory=dict)

    def source(self, shard: ShardRange) -> MongodSource:
        address = ShardAddress(shard.name, shard.host)
        source = self.sources.get(address)
        if source is None:
            source = self.sources[address] = MongodSource(self.cluster.client_at(address))
        return source


_connected: dict[tuple[int, str], Connected] = {}


def connect(uri: str) -> Connected:
    """This process's connections to the cluster at ``uri``; a fork leaves its parent's alone."""
    key = (os.getpid(), uri)
    found = _connected.get(key)
    if found is None:
        client = open_client(uri)
        cluster = Cluster.discover(client, uri, {})
        if cluster is None:
            raise SourceError("the uri led to a sharded cluster when the micro-batch was planned, and no longer does")
        found = _connected[key] = Connected(client, cluster)
    return found


class _Part:
    """One shard's part of a slice: read batch by batch, and each worked on in bounded steps."""

    def __init__(self, merged: MergedChangeStream, shard: ShardRange, slice_: OplogSlice, at: Connected) -> None:
        self._merged = merged
        self._name = shard.name
        source = at.source(shard)
        self._batches = source.read(shard.after, slice_.until, batch_bytes_max=_BATCH_BYTES)
        self._source, self._owners = source, OwnerLookup(at.cluster)
        self._running: Iterator[list[ChangeEvent]] | None = None

    def step(self) -> bool:
        """Read one more batch; False if the shard has been read to the end of the slice."""
        if self._running is None:
            batch = self._next_batch()
            if batch is None:
                return False
            self._running = _drive(self._merged.process(self._name, batch), self._answer)
        if next(self._running, None) is None:
            self._running = None
        return True

    def _answer(self, request: Request) -> list[bytes | None]:
        """Oplog entries and pre-images are the shard's own; documents and shard keys the cluster's."""
        if isinstance(request, NeedEntries):
            return self._source.entries(request.times)
        if isinstance(request, NeedPreImages):
            return self._source.pre_images(request.keys)
        if isinstance(request, NeedDocuments):
            return self._owners.documents(request.lookups)
        if isinstance(request, NeedShardKeys):
            return self._owners.shard_keys(request.uuids)
        raise InternalError(f"a shard's part asks for {type(request).__name__}")

    def _next_batch(self) -> OplogBatch | None:
        try:
            return next(self._batches, None)
        except TailraceError as error:
            raise on_shard(error, self._name) from None


def merged_slice_events(options: ReadOptions, slice_: OplogSlice) -> Iterator[EventBlock]:
    """The slice's events in the order of the cluster, in blocks. Raises what a source, a shard's stages or the router's
    raise."""
    plan, at = slice_plan(options, slice_), connect(options.uri)
    if slice_.resume is None and settings_for(plan) is not None and not _makes_plain(plan):
        yield from blocks_of_kernel(plan, slice_, at)
        return
    for events in events_of_stages(plan, slice_, at):
        yield EventBlock.of(events)


def _makes_plain(plan: Plan) -> bool:
    """Whether a stream needs more of a shard than its oplog, or a shard of its version shows what a router hides."""
    options, profile = plan.options, plan.profile
    looks_up = options.full_document != "default" or options.full_document_before_change != "off"
    more = bool(options.pipeline) or looks_up
    return more or profile.insert_keys_from_catalog or profile.always_shows_new_shards


def blocks_of_kernel(plan: Plan, slice_: OplogSlice, at: Connected) -> Iterator[EventBlock]:
    """The slice where the kernel can make the events: each shard's finished events are merged as they lie.

    Without a search, the user's stages and images, a shard's own stream differs from its part of the merged one only
    in what ``settings_for`` sees and in what ``_makes_plain`` tells.
    """
    parts = [_KernelPart(plan, shard, slice_, at) for shard in slice_.shards]
    while True:
        unread = [part for part in parts if not part.is_over]
        limit = min((part.events.promised for part in unread), default=slice_.until)
        blocks = [block for part in parts if (block := part.events.take(limit)) is not None]
        end = min((part.end for part in parts if part.end is not None), default=None)
        over = end is not None and end.cluster_time <= limit
        if blocks:
            block = merge_blocks(blocks)
            yield up_to(block, end.to_bson()) if end is not None and over else block
        if over or not unread:
            return
        min(unread, key=lambda part: part.events.promised).step()


class _KernelPart:
    """One shard's part of a slice as finished events.

    ``end``  the token of the invalidate that ended it
    """

    def __init__(self, plan: Plan, shard: ShardRange, slice_: OplogSlice, at: Connected) -> None:
        source = at.source(shard)
        self.events = ShardEvents(shard.after)
        self.end: ResumeToken | None = None
        self.is_over = False
        self._name = shard.name
        self._stream = open_stream(replace(plan, start=shard.after.tick()), mid_stream=True)
        wanted = self._stream.oplog_filter if slice_.filtered else None
        self._batches = source.read(shard.after, slice_.until, batch_bytes_max=_BATCH_BYTES, oplog_filter=wanted)
        self._answers = answers_of(source)

    def step(self) -> None:
        """Read a batch and make its events."""
        try:
            batch = next(self._batches, None)
            if batch is None:
                self.is_over = True
                return
            self._stream.feed(ONE_OPLOG, batch)
            for block in drive(self._stream, self._answers):
                self.events.add(block)
        except TailraceError as error:
            raise on_shard(error, self._name) from None
        self.events.promised = batch.high_water
        if self._stream.invalidated:
            self.end, self.is_over = self._stream.token, True


def events_of_stages(plan: Plan, slice_: OplogSlice, at: Connected) -> Iterator[list[ChangeEvent]]:
    """The slice through the plain stages and the plain merge."""
    from_start = [shard.name for shard in slice_.shards if shard.after == slice_.after]
    merged = MergedChangeStream(plan, from_start, mid_stream=slice_.resume is None)
    for shard in slice_.shards:
        merged.open_shard(shard.name, shard.after.tick())  # those that were added in the slice
    parts = {shard.name: _Part(merged, shard, slice_, at) for shard in slice_.shards}
    while True:
        yield from _drive(merged.take(), lambda request: None)
        name = next((name for name in merged.waiting_for if name in parts), None)
        if merged.invalidated or name is None:
            break
        if not parts[name].step():
            del parts[name]
    if merged.searching:
        raise token_not_found(slice_)


def _drive(running: Running, answer_to: Callable[[Request], Answer]) -> Iterator[list[ChangeEvent]]:
    """Run the plain merge, answering what it asks for."""
    answer: Answer = None
    failure: TailraceError | None = None
    try:
        while True:
            try:
                request = running.send(answer) if failure is None else running.throw(failure)
            except StopIteration:
                return
            answer = failure = None
            if isinstance(request, Emit):
                yield request.events
                continue
            try:
                answer = answer_to(request)
            except TailraceError as error:
                failure = error
    finally:
        running.close()
