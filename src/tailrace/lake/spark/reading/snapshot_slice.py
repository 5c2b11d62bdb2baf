"""Reading a slice of a copy in a worker: the documents of its chunks, as events in the order of their tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pymongo import MongoClient

from tailrace.core import raw_bson
from tailrace.core.event.event_block import EventBlock
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.expression.stages.pipeline import CompiledPipeline
from tailrace.core.kernel import gather, locate
from tailrace.core.pipeline.quarantine import Aside
from tailrace.core.stage.user_stages import check_id
from tailrace.errors import ChangeStreamFatal, ServerError
from tailrace.lake.spark.planning.input_partition import SnapshotSlice
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.lake.spark.query.snapshot_position import PlannedChunk
from tailrace.read.snapshot.block import snapshot_block
from tailrace.read.snapshot.reader import range_reader
from tailrace.read.snapshot.stages import compiled_for
from tailrace.read.source.connection import open_client
from tailrace.read.source.topology import Cluster

_deployments: Final[dict[tuple[int, str], MongoClient[Any] | Cluster]] = {}


def deployment(uri: str) -> MongoClient[Any] | Cluster:
    """This process's connections to what ``uri`` leads to; a fork leaves its parent's alone."""
    key = (os.getpid(), uri)
    found = _deployments.get(key)
    if found is None:
        client = open_client(uri)
        found = _deployments[key] = Cluster.discover(client, uri, {}) or client
    return found


def snapshot_slice_events(options: ReadOptions, slice_: SnapshotSlice, aside: Aside = None) -> Iterator[EventBlock]:
    """The events of the slice's chunks, which ascend by token. Raises what the reader of a chunk and the user's stages
    raise; with ``aside`` an event at which a stage raises is added to it."""
    stages = user_stages(options)
    for chunk in slice_.chunks:
        block = chunk_events(options, slice_, chunk)
        yield block if stages is None else staged(block, stages, aside)


def chunk_events(options: ReadOptions, slice_: SnapshotSlice, chunk: PlannedChunk) -> EventBlock:
    """A chunk's events, in the order of their tokens. Usually that is the order of ``_id``; in collections with a
    collation and on clusters it need not be, and the events are sorted."""
    read = range_reader(deployment(options.uri), slice_.start, whole=True)
    blocks = [
        snapshot_block(part.documents, chunk.namespace, chunk.uuid, slice_.start, part.key, position=chunk.number)
        for part in read(chunk.namespace, chunk.uuid, chunk.range)
    ]
    if not blocks:
        return snapshot_block([], chunk.namespace, chunk.uuid, slice_.start, None)
    return ascending(EventBlock.join(blocks))


def ascending(block: EventBlock) -> EventBlock:
    """The block, sorted by token if it is not yet."""
    low, high = int(block.offsets[0]), int(block.offsets[-1])
    buffer, offsets = block.buffer[low:high], block.offsets - low
    part = locate(buffer, offsets, ["token"])["token"]
    data, ends = gather(buffer, part.start, part.end)
    tokens = pa.Array.from_buffers(pa.binary(), len(block), [None, pa.py_buffer(ends), pa.py_buffer(data)])
    if pc.all(pc.less(tokens.slice(0, max(0, len(tokens) - 1)), tokens.slice(1))).as_py() is not False:
        return block
    order = pc.sort_indices(tokens).to_numpy()
    return rearranged(block, [buffer[offsets[place] : offsets[place + 1]].tobytes() for place in order])


def rearranged(block: EventBlock, events: list[bytes]) -> EventBlock:
    """A block of these events, which have the same time as the block's."""
    offsets = np.zeros(len(events) + 1, np.int64)
    np.cumsum([len(event) for event in events], out=offsets[1:])
    nowhere = np.zeros(len(events), np.int64)
    times, kinds = block.cluster_time[: len(events)], np.zeros(len(events), np.uint8)
    return EventBlock(
        np.frombuffer(b"".join(events), np.uint8), offsets, times, kinds, nowhere, nowhere, nowhere, nowhere
    )


def user_stages(options: ReadOptions) -> CompiledPipeline | None:
    """The stages of the stream's pipeline, which the copy's events go through too. One that divides large events is
    left out: a column has room for them."""
    if not options.pipeline:
        return None
    return compiled_for(deployment(options.uri), options.pipeline, collation=options.collation)


def staged(block: EventBlock, stages: CompiledPipeline, aside: Aside = None) -> EventBlock:
    """What the user's stages make of the block's events."""
    events = []
    for event in block.events():
        try:
            shown = stages.apply(event)
            if shown is not None and shown is not event:
                token = raw_bson.find(event, b"_id")
                assert token is not None
                check_id(raw_bson.value(event, token), shown)
        except (ServerError, ChangeStreamFatal) as error:
            if aside is None:
                raise
            aside.append(QuarantinedEvent.of_document(event, error.message, error.code))
            continue
        if shown is not None:
            events.append(shown)
    return rearranged(block, events)
