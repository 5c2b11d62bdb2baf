"""Documents as rows of a table: key, BSON, JSON, the time of the last change, and the typed columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import bson
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from bson import json_util

from tailrace.core import raw_bson
from tailrace.core.event.extended_json import with_lost_types
from tailrace.core.kernel import Part, encode_json, is_utf8
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.tables.names import BSON, CHANGED, JSON, KEY
from tailrace.lake.tables.nested import TooManyValuesError
from tailrace.lake.tables.schema import CODEC, TableSchema, convert
from tailrace.lake.tables.state import StoredDocument
from tailrace.lake.tables.typed import typed_columns

#: Cluster time as two numbers, as in a lake; NULL for a document that has not changed since it was copied.
CLUSTER_TIME: Final = pa.struct([pa.field("t", pa.int64()), pa.field("i", pa.int64())])
_OWN: Final = (
    pa.field(KEY, pa.binary(), nullable=False),
    pa.field(BSON, pa.binary(), nullable=False),
    pa.field(JSON, pa.string()),
    pa.field(CHANGED, CLUSTER_TIME),
)
#: At most this many documents, and about this many bytes of them, are made into columns at a time.
ROWS_MAX: Final = 16_384
_BYTES_MAX: Final = 32 << 20
_RELAXED: Final = json_util.RELAXED_JSON_OPTIONS


class Misfitting(NamedTuple):
    """A document that is not in its table, and why."""

    document: StoredDocument
    reason: str


class Rows(NamedTuple):
    """Rows of a table under ``schema``, and the documents that did not fit."""

    batch: pa.RecordBatch
    schema: TableSchema
    misfits: Sequence[Misfitting]
    retyped: bool


def arrow_schema(schema: TableSchema) -> pa.Schema:
    """The table's columns: ours, then the typed ones."""
    return pa.schema([*_OWN, *(pa.field(column.name, column.arrow) for column in schema.columns)])


def chunks(documents: Iterable[StoredDocument]) -> Iterator[list[StoredDocument]]:
    """The documents in groups that are made into columns together."""
    piece: list[StoredDocument] = []
    size = 0
    for document in documents:
        if piece and (len(piece) >= ROWS_MAX or size + len(document.document) > _BYTES_MAX):
            yield piece
            piece, size = [], 0
        piece.append(document)
        size += len(document.document)
    if piece:
        yield piece


def rows_of(schema: TableSchema, documents: Iterable[StoredDocument]) -> Iterator[Rows]:
    """The rows of documents, as many at a time as memory is meant for. Each time the schema may have got more columns
    or wider ones."""
    for piece in chunks(documents):
        waiting = [piece]
        while waiting:
            some = waiting.pop()
            try:
                found = make_rows(schema, some)
            except TooManyValuesError:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
                continue
            schema = found.schema
            yield found


def make_rows(schema: TableSchema, documents: Sequence[StoredDocument]) -> Rows:
    """The rows of some documents. ``schema`` may get more columns. Raises TooManyValuesError for more than one."""
    buffer = b"".join(one.document for one in documents)
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(one.document) for one in documents], out=offsets[1:])
    texts, whole = json_texts(buffer, offsets)
    try:
        made = typed_columns(schema, [one.document for one in documents], buffer, offsets, whole)
    except TooManyValuesError:
        if len(documents) > 1:
            raise
        made = convert(schema, [documents[0].document])
    bson_column = pa.Array.from_buffers(
        pa.binary(), len(documents), [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(buffer)]
    )
    keys = pa.array([one.key for one in documents], pa.binary())
    own = [keys, bson_column, texts, _times(documents)]
    batch = pa.RecordBatch.from_arrays([*own, *made.arrays], schema=arrow_schema(made.schema))
    misfits = [Misfitting(documents[number], why) for number, why in sorted(made.misfits.items())]
    if misfits:
        batch = batch.filter(pa.array([number not in made.misfits for number in range(len(documents))]))
    return Rows(batch, made.schema, misfits, made.retyped)


def _times(documents: Sequence[StoredDocument]) -> pa.Array:
    times = np.array([int(one.time) for one in documents], np.uint64)
    parts = [(times >> np.uint64(32)).astype(np.int64), (times & np.uint64(0xFFFFFFFF)).astype(np.int64)]
    return pa.StructArray.from_arrays(
        [pa.array(one) for one in parts], fields=list(CLUSTER_TIME), mask=pa.array(times == 0)
    )


def json_texts(buffer: bytes, offsets: npt.NDArray[np.int64]) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Relaxed Extended JSON (v2) of the documents that follow each other in ``buffer``, and which of them are made in
    compiled code."""
    count = len(offsets) - 1
    part = Part(offsets[:-1], offsets[1:], np.full(count, raw_bson.OBJECT, np.int64))
    column = encode_json(buffer, part)
    binary = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(column.offsets), pa.py_buffer(column.text)])
    if column.ok.all() and is_utf8(column.text):
        return binary.view(pa.string()), column.ok
    texts = [text.decode("utf-8", "replace") for text in binary.to_pylist()]
    for row in np.flatnonzero(~column.ok):
        texts[row] = _json_text(buffer[offsets[row] : offsets[row + 1]])
    return pa.array(texts, pa.string()), column.ok


def _json_text(document: bytes) -> str | None:
    try:
        _, changed = with_lost_types(raw_bson.OBJECT, document)
        text: str = json_util.dumps(bson.decode(changed, CODEC), json_options=_RELAXED)
    except Exception:  # noqa: BLE001  what the codec cannot read is in _bson alone
        return None
    return text.encode("utf-8", "replace").decode()


def changed_at(time: ClusterTime) -> dict[str, int]:
    """A cluster time as the column ``_changed`` has it."""
    return {"t": time.seconds, "i": time.increment}
