"""Reading one slice in a worker: raw oplog batches through kernel and stages to Arrow record batches.

Spark forks its Python workers and uses them again, so each process keeps one source open for each deployment, opened
after the fork. Nothing else outlives a slice, and a slice's memory is bounded by one reply of the server and one record
batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from tailrace.core.event.event_block import EventBlock
from tailrace.core.pipeline.quarantine import Aside
from tailrace.core.stream.stream import ONE_OPLOG, open_stream
from tailrace.lake.spark.planning.input_partition import OplogSlice, SnapshotSlice
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.lake.spark.reading.columns import ROWS_MAX, EventColumns
from tailrace.lake.spark.reading.exact_slice import sources_of
from tailrace.lake.spark.reading.masked import masked_events
from tailrace.lake.spark.reading.merged_slice import merged_slice_events
from tailrace.lake.spark.reading.slice_plan import report_skipped, slice_plan, token_not_found
from tailrace.lake.spark.reading.snapshot_slice import snapshot_slice_events
from tailrace.read.source.drive import answers_of, drive
from tailrace.read.source.live import LiveSource
from tailrace.read.source.mongod import MongodSource

#: Bytes of oplog that go through the stages at a time. A reply of the server may hold 16 MB.
_BATCH_BYTES: Final = 4 << 20

_sources: dict[tuple[int, str, str | None], LiveSource] = {}


def _source(uri: str, archive: str | None) -> LiveSource:
    """This process's source for ``uri``. A forked child finds its parent's under another process id and leaves it."""
    key = (os.getpid(), uri, archive)
    source = _sources.get(key)
    if source is None:
        source = MongodSource(uri)
        if archive is not None:
            from tailrace.read.archive.hybrid import HybridSource  # noqa: PLC0415  where one is read only
            from tailrace.read.archive.source import ArchiveSource  # noqa: PLC0415

            source = HybridSource(source, ArchiveSource(archive))
        _sources[key] = source
    return source


def read_slice(
    options: ReadOptions, slice_: OplogSlice | SnapshotSlice, *, rows_max: int = ROWS_MAX, aside: Aside = None
) -> Iterator[pa.RecordBatch]:
    """The slice's events as record batches, in stream order. Raises what the source and the stages raise, and
    ``SinkError`` for an event that a column cannot take.

    With ``aside`` an event that a stage or a column cannot handle is added to it instead, and the others go on.
    """
    columns = EventColumns(options.columns, options.documents, rows_max=rows_max, aside=aside)

    def read(aside: Aside) -> Iterator[EventBlock]:
        if isinstance(slice_, SnapshotSlice):
            return snapshot_slice_events(options, slice_, aside)
        if slice_.shards:
            return merged_slice_events(options, slice_, aside)
        return slice_events(options, slice_, _source(options.uri, options.archive), aside)

    if options.masks is None:
        return columns.batches(read(aside))
    return columns.batches(masked_events(options.masks, read, aside))


def slice_events(
    options: ReadOptions, slice_: OplogSlice, source: LiveSource, aside: Aside = None
) -> Iterator[EventBlock]:
    """The events of a replica set's slice, in blocks."""
    with sources_of(options, slice_) as through:
        yield from _events_of(options, slice_, through(None, source), aside)


def _events_of(options: ReadOptions, slice_: OplogSlice, source: LiveSource, aside: Aside) -> Iterator[EventBlock]:
    plan = slice_plan(options, slice_, quarantines=aside is not None)
    stream = open_stream(plan, mid_stream=slice_.resume is None)
    answers = answers_of(source)
    wanted = stream.oplog_filter if slice_.filtered else None
    for batch in source.read(slice_.after, slice_.until, batch_bytes_max=_BATCH_BYTES, oplog_filter=wanted):
        stream.feed(ONE_OPLOG, batch)
        yield from drive(stream, answers)
        if aside is not None:
            aside += stream.take_quarantined()
        report_skipped(stream)
        if stream.invalidated:
            return
    if stream.searching:
        raise token_not_found(slice_)
