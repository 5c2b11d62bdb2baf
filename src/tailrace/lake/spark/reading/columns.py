"""Change events to Arrow record batches: the one place where columns are made.

Every column is read out of the finished event's own bytes, whatever made them: the plain stages, the batch kernel, or
a user's ``$project``. So a field that the pipeline removed is NULL, one that it changed is shown changed, and only the
columns asked for are computed. The kernel finds and copies the parts; what it leaves over is made here. Spark checks
types on the first batch only; the schema therefore comes from Spark's own conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import bson
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from bson import json_util
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from pyspark.sql.pandas.types import to_arrow_schema

import tailrace.core.kernel.reply  # noqa: F401  from now on replies are taken apart in compiled code
from tailrace.core import raw_bson
from tailrace.core.event.event_block import Bytes, EventBlock, Offsets
from tailrace.core.event.extended_json import with_lost_types
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.kernel import Part, encode_json, encode_variants, gather, is_utf8, locate
from tailrace.core.pipeline.quarantine import Aside
from tailrace.errors import SinkError
from tailrace.lake.spark.query.schema import DOCUMENT_COLUMNS, spark_schema
from tailrace.lake.spark.reading import variant

#: Batches of 1-5 thousand rows go through Spark fastest (20 thousand: 30 % slower); large events end one earlier.
ROWS_MAX: Final = 2_000
BYTES_MAX: Final = 8 << 20
#: Where a batch is written and not handed to Spark, a large one costs least: 0.3 to 0.7 µs an event less.
ROWS_MAX_WRITTEN: Final = 16_384

_CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    datetime_conversion=DatetimeConversion.DATETIME_AUTO, tz_aware=True, unicode_decode_error_handler="replace"
)
_JSON: Final = json_util.RELAXED_JSON_OPTIONS
#: Where a UUID's text has dashes and digits, and the two digits of each byte.
_UUID_DASHES: Final = [8, 13, 18, 23]
_UUID_DIGITS: Final = [place for place in range(36) if place not in _UUID_DASHES]
_HEX_DIGITS: Final = np.frombuffer(bytes(range(256)).hex().encode(), np.uint8).reshape(256, 2)

Bools: TypeAlias = npt.NDArray[np.bool_]


class EventColumns:
    """The columns of one reader. ``documents`` is ``variant``, ``json`` or ``bson``. An event that a column cannot take
    is added to ``aside``; without it the event is an error."""

    def __init__(
        self, columns: Sequence[str], documents: str, *, rows_max: int = ROWS_MAX, aside: Aside = None
    ) -> None:
        self._aside = aside
        self.arrow_schema: pa.Schema = to_arrow_schema(spark_schema(columns, documents), timezone="UTC")
        self._columns = tuple(columns)
        self._rows_max = rows_max
        self._documents = documents
        parts = [name for name in columns if name not in {"event", "transaction_id"}]
        self._wanted = parts + (["session", "txn_number"] if "transaction_id" in columns else [])

    def batches(self, blocks: Iterable[EventBlock]) -> Iterator[pa.RecordBatch]:
        """Record batches of at most ``rows_max`` events and, unless one event alone is larger, ``BYTES_MAX`` bytes."""
        for block in _filled(blocks):
            first = 0
            while first < len(block):
                fits = int(np.searchsorted(block.offsets, block.offsets[first] + BYTES_MAX, side="right")) - 1
                last = max(first + 1, min(fits, first + self._rows_max))
                yield from self._batches(block.cut(first, last))
                first = last

    def _batches(self, block: EventBlock) -> Iterator[pa.RecordBatch]:
        """The block's rows. If they cannot be made, the block is halved until the event at fault is alone."""
        try:
            made = self.batch(block)
        except (BSONError, ValueError, OverflowError, RecursionError, pa.ArrowInvalid) as error:
            if len(block) > 1:
                half = len(block) // 2
                yield from self._batches(block.cut(0, half))
                yield from self._batches(block.cut(half, len(block)))
                return
            found = QuarantinedEvent.of_document(next(iter(block.events())), f"a column cannot take it: {error}")
            if self._aside is None:
                raise SinkError(
                    f"the event of {found.namespace} with the token {found.token} does not fit the columns: {error}",
                    hint="Leave out the columns of its documents, or take them with documents=bson; a lake can put "
                    "such events aside (lake.onError: quarantine)",
                ) from error
            self._aside.append(found)
        else:
            yield made

    def batch(self, block: EventBlock) -> pa.RecordBatch:
        """One record batch. Raises ``OplogFormatError`` where an event is no BSON document."""
        low, high = int(block.offsets[0]), int(block.offsets[-1])
        # The kernel counts from the buffer's start; a view costs nothing and leaves small offsets.
        buffer, offsets = block.buffer[low:high], block.offsets - low
        parts = locate(buffer, offsets, self._wanted, block.places) if self._wanted else {}
        arrays = [
            self._column(name, field.type, buffer, offsets, parts)
            for name, field in zip(self._columns, self.arrow_schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)

    def _column(
        self, name: str, type_: pa.DataType, buffer: Bytes, offsets: Offsets, parts: dict[str, Part]
    ) -> pa.Array:
        if name == "event":
            return _binary_array(type_, buffer, offsets.astype(np.int32), None)
        if name == "transaction_id":
            return _transactions(type_, buffer, parts["session"], parts["txn_number"])
        if name in DOCUMENT_COLUMNS:
            return _DOCUMENT_MAKERS[self._documents](type_, buffer, parts[name])
        if name == "cluster_time":
            return _cluster_times(type_, parts[name])
        if name == "wall_time":
            return _wall_times(type_, parts[name])
        return _texts(type_, buffer, parts[name])


def _filled(blocks: Iterable[EventBlock]) -> Iterator[EventBlock]:
    """The same events with small blocks joined: a stage may finish them one by one."""
    pending: list[EventBlock] = []
    count = size = 0
    for block in blocks:
        pending.append(block)
        count, size = count + len(block), size + block.size
        if count >= ROWS_MAX or size >= BYTES_MAX:
            yield EventBlock.join(pending)
            pending, count, size = [], 0, 0
    if pending:
        yield EventBlock.join(pending)


def _validity(present: Bools) -> pa.Buffer | None:
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))


def _binary_array(type_: pa.DataType, data: Bytes, offsets: npt.NDArray[np.int32], present: Bools | None) -> pa.Array:
    """A binary or string array over the memory given: nothing is copied."""
    validity = None if present is None else _validity(present)
    return pa.Array.from_buffers(type_, len(offsets) - 1, [validity, pa.py_buffer(offsets), pa.py_buffer(data)])


def _gathered(type_: pa.DataType, buffer: Bytes, part: Part, present: Bools) -> pa.Array:
    start, end = np.where(present, part.start, 0), np.where(present, part.end, 0)
    data, offsets = gather(buffer, start, end)
    return _binary_array(type_, data, offsets, present)


def _texts(type_: pa.DataType, buffer: Bytes, part: Part) -> pa.Array:
    present = part.type != 0
    array = _gathered(pa.binary(), buffer, part, present)
    if is_utf8(np.frombuffer(array.buffers()[2] or b"", np.uint8)):
        return array.view(type_)
    texts = [None if text is None else text.decode(errors="replace") for text in array.to_pylist()]
    return pa.array(texts, type_)


def _cluster_times(type_: pa.DataType, part: Part) -> pa.Array:
    packed = part.start.view(np.uint64)
    seconds, increments = (packed >> np.uint64(32)).astype(np.int64), (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    absent = pa.array(part.type == 0)
    return pa.StructArray.from_arrays([pa.array(seconds), pa.array(increments)], fields=list(type_), mask=absent)


def _wall_times(type_: pa.DataType, part: Part) -> pa.Array:
    absent = (part.type == 0) | (part.start > variant.LAST_MS) | (part.start < variant.FIRST_MS)
    return pa.array(np.where(absent, 0, part.start) * 1000, pa.int64(), mask=absent).cast(type_)


def _transactions(type_: pa.DataType, buffer: Bytes, session: Part, number: Part) -> pa.Array:
    has_session, has_number = session.type != 0, number.type != 0
    arrays = [_uuids(buffer, session, has_session), pa.array(number.start, pa.int64(), mask=~has_number)]
    return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=pa.array(~(has_session | has_number)))


def _uuids(buffer: Bytes, part: Part, present: Bools) -> pa.Array:
    """UUIDs of 16 bytes as their text. Every event of a transaction has one."""
    data, _ = gather(buffer, np.where(present, part.start, 0), np.where(present, part.end, 0))
    texts = np.empty((int(present.sum()), 36), np.uint8)
    texts[:, _UUID_DASHES] = ord("-")
    texts[:, _UUID_DIGITS] = _HEX_DIGITS[data.reshape(-1, 16)].reshape(-1, 32)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(present * 36, dtype=np.int32)])
    return _binary_array(pa.string(), texts.reshape(-1), offsets, present)


def _bson_documents(type_: pa.DataType, buffer: Bytes, part: Part) -> pa.Array:
    """The documents' bytes; an empty value for a BSON null, which says that a look-up found nothing; NULL if there is
    no such field, or if a user's stage put something there that is not a document."""
    kinds = (raw_bson.OBJECT, raw_bson.ARRAY, raw_bson.NULL)
    return _gathered(type_, buffer, part, np.isin(part.type, kinds))


def _json_documents(type_: pa.DataType, buffer: Bytes, part: Part) -> pa.Array:
    """Relaxed Extended JSON (v2); a BSON null is the text ``null``."""
    column = encode_json(buffer, part)
    if column.ok.all():
        return _binary_array(type_, column.text, column.offsets, part.type != 0)
    # Rare types and shapes are left over by the kernel; PyMongo makes them.
    texts = _binary_array(type_, column.text, column.offsets, part.type != 0).to_pylist()
    for row in np.flatnonzero(~column.ok):
        texts[row] = _json_text(int(part.type[row]), buffer[part.start[row] : part.end[row]].tobytes())
    return pa.array(texts, type_)


def _json_text(kind: int, value: bytes) -> str:
    kind, value = with_lost_types(kind, value)
    document = bson.decode(raw_bson.encode_document(raw_bson.encode_element(kind, b"", value)), _CODEC)
    return json_util.dumps(document[""], json_options=_JSON)


def _variants(type_: pa.DataType, buffer: Bytes, part: Part) -> pa.Array:
    column = encode_variants(buffer, part)
    arrays = [
        _binary_array(pa.binary(), column.value, column.value_offsets, None),
        _binary_array(pa.binary(), column.metadata, column.metadata_offsets, None),
    ]
    if not column.ok.all():
        # Rare types and shapes are left over by the kernel; the plain encoder makes them.
        values, metadata = arrays[0].to_pylist(), arrays[1].to_pylist()
        for row in np.flatnonzero(~column.ok):
            value = buffer[part.start[row] : part.end[row]].tobytes()
            values[row], metadata[row] = variant.from_value(int(part.type[row]), value)
        arrays = [pa.array(values, pa.binary()), pa.array(metadata, pa.binary())]
    return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=pa.array(part.type == 0))


_DOCUMENT_MAKERS: Final[dict[str, Callable[[pa.DataType, Bytes, Part], pa.Array]]] = {
    "variant": _variants,
    "json": _json_documents,
    "bson": _bson_documents,
}
