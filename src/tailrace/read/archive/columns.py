"""Raw oplog entries as Arrow columns, and back: the entry as it is, and next to it the columns by which it is sorted
and found."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core import kernel, raw_bson
from tailrace.errors import OplogFormatError
from tailrace.read.source.batch import entry_time

#: One row is one oplog entry. ``cluster_time`` is the entry's ``ts`` as one number, seconds in the high 32 bits, so it
#: ascends; ``time`` is its seconds; ``operation`` and ``namespace`` are its ``op`` and ``ns``; ``entry`` is its BSON.
SCHEMA: Final = pa.schema(
    [
        pa.field("cluster_time", pa.uint64(), nullable=False),
        pa.field("time", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("entry", pa.binary(), nullable=False),
    ]
)


def record_batch(raw: bytes) -> pa.RecordBatch:
    """The rows of a run of entries (less than 2 GB). Raises OplogFormatError where one of them is no oplog entry."""
    compiled = _compiled(raw) if kernel.available() else None
    return _plain(raw) if compiled is None else compiled


def _compiled(raw: bytes) -> pa.RecordBatch | None:
    from tailrace.core.kernel.entry_columns import entry_columns, gathered  # noqa: PLC0415  not without numba

    found = entry_columns(raw)
    if found is None:
        return None
    count = len(found.times)
    texts = []
    for start, end in (
        (found.operation_start, found.operation_end),
        (found.namespace_start, found.namespace_end),
    ):
        data, offsets = gathered(raw, start, end)
        texts.append(_array(pa.string(), count, offsets, data))
    try:
        for text in texts:
            text.validate(full=True)  # a namespace that is no UTF-8 is the plain walk's affair
    except pa.ArrowInvalid:
        return None
    entries = _array(pa.binary(), count, found.offsets.astype(np.int32), np.frombuffer(raw, np.uint8))
    return _batch(found.times.view(np.uint64), texts[0], texts[1], entries)


def _array(type_: pa.DataType, count: int, offsets: npt.NDArray[np.int32], data: npt.NDArray[np.uint8]) -> pa.Array:
    return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _batch(
    times: npt.NDArray[np.uint64], operation: pa.Array, namespace: pa.Array, entries: pa.Array
) -> pa.RecordBatch:
    seconds = pa.array(((times >> np.uint64(32)) * np.uint64(1000)).astype(np.int64))
    columns = [pa.array(times), seconds.cast(SCHEMA.field("time").type), operation, namespace, entries]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _plain(raw: bytes) -> pa.RecordBatch:
    times, operations, namespaces, entries = [], [], [], []
    for entry in raw_bson.split(raw):
        times.append(int(entry_time(entry)))
        operations.append(_text(entry, b"op"))
        namespaces.append(_text(entry, b"ns"))
        entries.append(entry)
    return _batch(
        np.array(times, np.uint64),
        pa.array(operations, pa.string()),
        pa.array(namespaces, pa.string()),
        pa.array(entries, pa.binary()),
    )


def _text(entry: bytes, name: bytes) -> str:
    element = raw_bson.find(entry, name)
    if element is None or element.type != raw_bson.STRING:
        raise OplogFormatError(f"an oplog entry has no string '{name.decode()}'", position=str(entry_time(entry)))
    return entry[element.value_start + 4 : element.end - 1].decode("utf-8", "replace")


def raw_entries(column: pa.Array | pa.ChunkedArray) -> bytes:
    """The entries of a column ``entry`` one after another: the run that they were written from."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return b"".join(_raw_chunk(chunk) for chunk in chunks)


def _raw_chunk(chunk: pa.Array) -> bytes:
    _, offsets, data = chunk.buffers()
    if not len(chunk) or data is None:
        return b""
    bounds = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
    return memoryview(data)[int(bounds[0]) : int(bounds[-1])].tobytes()
