"""The typed columns of many documents, in compiled code. ``schema.convert`` is the reference: rare cases are left to
its code, whether one value, one document or all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import bson
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core import raw_bson
from tailrace.core.event.event_block import Bytes
from tailrace.core.kernel import Part, encode_json, gather
from tailrace.core.kernel.document_fields import FieldScan, words
from tailrace.lake.tables import column_values, nested
from tailrace.lake.tables import schema as slow
from tailrace.lake.tables.nested_arrays import NestedArrays
from tailrace.lake.tables.schema import Column, Converted, TableSchema

RowMask = npt.NDArray[np.bool_]
#: An Arrow array, and which of its values are made: the others are null in it.
MadeValues = tuple[pa.Array, RowMask]

_DOUBLE_MAX: Final = 2**53
_HEX: Final = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(256, 2)


def typed_columns(
    schema: TableSchema, documents: Sequence[bytes], buffer: bytes, offsets: npt.NDArray[np.int64], whole: RowMask
) -> Converted:
    """The documents' typed columns, by the schema's policy. Raises SinkError with the policy ``fail``, and
    TooManyValuesError for documents that are too many to be made together.

    ``buffer``, ``offsets``  the same documents, one after another
    ``whole``                which of them ``encode_json`` took: valid, without rare types, no name twice
    """
    data = np.frombuffer(buffer, np.uint8)
    rows = slow.Decoded(documents)
    fields = _FieldTree(data, Part(offsets[:-1], offsets[1:], whole * np.int64(raw_bson.OBJECT)))
    columns, cut = _found(schema, fields, rows, whole)
    others = np.flatnonzero(~whole)
    misfits = {int(row): why for row in others if (why := rows.why(int(row))) is not None} if columns else {}
    if misfits and schema.policy == "fail":
        return slow.convert(schema, documents)
    arrays: list[pa.Array] = []
    inner = NestedArrays(data, _MAKERS, grows=schema.grows)
    for column in columns:
        part = fields.part(column.path)
        if nested.is_nested(column.type):
            array, made = inner.column(nested.parsed(column.type), part)
        else:
            array, made = _MAKERS.get(column.type, _nothing)(data, part, column.arrow)
        left = np.flatnonzero(~whole | ~made & (part.type != 0) & (part.type != raw_bson.NULL))
        if left.size:
            if nested.is_nested(column.type):
                found = [
                    _value(buffer, part, row) if whole[row] else slow.value_at(rows[row], column.path)
                    for row in left.tolist()
                ]
            else:
                found = [slow.value_at(rows[row], column.path) for row in left.tolist()]
            values, bad = slow.fill_values(column, found, far_is_null=schema.widens, grows=schema.grows)
            if bad and schema.policy != "quarantine":
                return slow.convert(schema, documents)
            for number, why in bad.items():
                misfits.setdefault(int(left[number]), why)
            array = _patched(array, left, slow.typed_array(values, column.arrow))
        arrays.append(array)
    if schema.widens:
        misfits = {}
    return Converted(schema.with_columns(columns, cut), arrays, misfits)


class _FieldTree:
    """The fields of documents, and those of the objects in them."""

    def __init__(self, data: Bytes, documents: Part) -> None:
        self._data = data
        self._scan = FieldScan(data, documents)
        self._numbers: dict[str, int] = {}
        self._inner: dict[str, _FieldTree] = {}

    def look_for(self, names: Sequence[str]) -> None:
        """Look for these names from now on."""
        new = [name for name in dict.fromkeys(names) if name not in self._numbers]
        for name in new:
            self._numbers[name] = len(self._numbers)
        self._scan.look_for([name.encode("utf-8", "surrogatepass") for name in new])

    def run(self, first: int = 0, *, stops: bool = False) -> int:
        """See ``FieldScan.run``."""
        return self._scan.run(first, stops=stops)

    def part(self, path: Sequence[str]) -> Part:
        """Where the values at a path are."""
        name, rest = path[0], path[1:]
        if name not in self._numbers:
            self.look_for([name])
            self.run()
        part = self._scan.part(self._numbers[name])
        if not rest:
            return part
        if name not in self._inner:
            objects = np.where(part.type == raw_bson.OBJECT, part.type, 0)
            self._inner[name] = _FieldTree(self._data, Part(part.start, part.end, objects))
        return self._inner[name].part(rest)


def _found(
    schema: TableSchema, fields: _FieldTree, rows: slow.Decoded, whole: RowMask
) -> tuple[list[Column], list[str]]:
    """The schema's columns, and those that are inferred from the documents in their order; and the names of fields for
    which there is no room. The fields are scanned."""
    columns, cut = list(schema.columns), list(schema.cut)
    infers = schema.inferred and (schema.policy == "evolve" or not columns)
    at = 0
    while True:
        fields.look_for([*(column.path[0] for column in columns), *cut])
        infers = infers and (len(columns) < slow.COLUMNS_MAX or len(cut) < slow.CUT_MAX)
        at = fields.run(at, stops=infers)
        if at == len(whole):
            return columns, cut
        slow.infer(columns, cut, [rows[at]], schema)
        at += not whole[at]


def _value(buffer: bytes, part: Part, row: int) -> Any:
    """The value of a field, without the rest of its document."""
    value = buffer[part.start[row] : part.end[row]]
    one = raw_bson.encode_document(raw_bson.encode_element(int(part.type[row]), b"v", value))
    return bson.decode(one, slow.CODEC)["v"]


def _patched(array: pa.Array, rows: npt.NDArray[np.int64], values: pa.Array) -> pa.Array:
    """The array with other values in some rows."""
    places = np.arange(len(array))
    places[rows] = len(array) + np.arange(rows.size)
    return pa.concat_arrays([array, values]).take(pa.array(places))


# --- one type each ---------------------------------------------------------------------------------------------------


def _array(type_: pa.DataType, made: RowMask, *buffers: Any) -> MadeValues:
    validity = pa.py_buffer(np.packbits(made, bitorder="little").tobytes())
    return pa.Array.from_buffers(type_, len(made), [validity, *map(pa.py_buffer, buffers)]), made


def _nothing(_data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    return pa.nulls(len(part.type), type_), np.zeros(len(part.type), np.bool_)


def _read(data: Bytes, part: Part, bson_type: int, kind: str) -> tuple[npt.NDArray[np.int64], Any]:
    """The rows with a value of one BSON type, and these values."""
    rows = np.flatnonzero(part.type == bson_type)
    return rows, words(data, part.start[rows], np.dtype(kind).itemsize).view(kind)[:, 0]


def _integers(data: Bytes, part: Part, bound: int) -> tuple[npt.NDArray[np.int64], RowMask]:
    """The whole numbers from ``-bound`` to ``bound - 1``, and which rows have one."""
    values, made = np.zeros(len(part.type), np.int64), np.zeros(len(part.type), np.bool_)
    for bson_type, kind in ((raw_bson.INT32, "<i4"), (raw_bson.INT64, "<i8")):
        rows, found = _read(data, part, bson_type, kind)
        values[rows] = found
        made[rows] = (found >= -bound) & (found <= bound - 1)
    return values, made


def _long(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    values, made = _integers(data, part, 2**63)
    return _array(type_, made, values)


def _int(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    values, made = _integers(data, part, 2**31)
    return _array(type_, made, values.astype(np.int32))


def _double(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    whole, made = _integers(data, part, _DOUBLE_MAX)
    values = whole.astype(np.float64)
    rows, found = _read(data, part, raw_bson.DOUBLE, "<f8")
    values[rows] = found
    made[rows] = True
    return _array(type_, made, values)


def _boolean(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    rows, found = _read(data, part, raw_bson.BOOL, "u1")
    values = np.zeros(len(part.type), np.bool_)
    values[rows] = found == 1
    return _array(type_, part.type == raw_bson.BOOL, np.packbits(values, bitorder="little"))


def _milliseconds(data: Bytes, part: Part) -> npt.NDArray[np.int64]:
    values = np.zeros(len(part.type), np.int64)
    rows, found = _read(data, part, raw_bson.DATE, "<i8")
    values[rows] = found
    return values


def _timestamp(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    values = _milliseconds(data, part)
    made = (part.type == raw_bson.DATE) & (values >= column_values.FIRST_MS) & (values <= column_values.LAST_MS)
    return _array(type_, made, np.where(made, values, 0) * 1000)


def _date(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    days = _milliseconds(data, part) // column_values.DAY_MS
    made = (part.type == raw_bson.DATE) & (days >= column_values.FIRST_DAY) & (days <= column_values.LAST_DAY)
    return _array(type_, made, days.astype(np.int32))


def _runs(data: Bytes, made: RowMask, start: Any, end: Any, type_: pa.DataType) -> MadeValues:
    gathered, offsets = gather(data, np.where(made, start, 0), np.where(made, end, 0))
    return _array(type_, made, offsets, gathered)


def _string(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    return _runs(data, part.type == raw_bson.STRING, part.start + 4, part.end - 1, type_)


def _binary(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    made = part.type == raw_bson.BINARY
    start = part.start + 5
    rows = np.flatnonzero(made)
    start[rows] += 4 * (data[part.start[rows] + 4] == 2)  # the old form holds its size twice
    return _runs(data, made, start, part.end, type_)


def _object_id(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    made = part.type == raw_bson.OBJECT_ID
    text = _HEX[words(data, part.start[made], 12)]
    offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(24 * made, dtype=np.int32)))
    return _array(type_, made, offsets, np.ascontiguousarray(text))


def _json(data: Bytes, part: Part, type_: pa.DataType) -> MadeValues:
    part = part._replace(type=np.where(part.type == raw_bson.NULL, 0, part.type))
    column = encode_json(data, part)
    return _array(type_, column.ok & (part.type != 0), column.offsets, column.text)


_MAKERS: Final[dict[str, Callable[[Bytes, Part, pa.DataType], MadeValues]]] = {
    "string": _string,
    "int": _int,
    "long": _long,
    "double": _double,
    "boolean": _boolean,
    "timestamp": _timestamp,
    "date": _date,
    "binary": _binary,
    "objectid": _object_id,
    "json": _json,
}
