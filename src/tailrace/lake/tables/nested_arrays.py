"""Columns that hold others, of many documents at once: numpy finds where the values lie, and each type's code makes
them. Rare values are left to ``nested.nested_maker``, the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core import raw_bson
from tailrace.core.event.event_block import Bytes
from tailrace.core.kernel import Part
from tailrace.core.kernel.document_fields import FieldScan, words
from tailrace.lake.tables import nested
from tailrace.lake.tables.nested import (
    LeafType,
    ListType,
    NestedType,
    ObjectType,
    TooManyValuesError,
    has_leaf,
    nested_arrow,
)

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Numbers: TypeAlias = npt.NDArray[np.int64]
#: Makes the values of a scalar type, and says which ones it has made.
ScalarMaker: TypeAlias = Callable[[Bytes, Part, pa.DataType], tuple[pa.Array, _Mask]]

#: A longer array is left to the reference: each step here takes one element of all arrays.
_ELEMENTS_MAX: Final = 512
#: How many objects with fields that the type does not have are handled one by one.
_OTHERS_MAX: Final = 16
_KEY_BYTES: Final = 8
#: How many objects are made at once.
_OBJECTS_MAX: Final = 65_536


def _by_type(sizes: Mapping[int, int]) -> _Numbers:
    found = np.full(256, -1, np.int64)
    found[list(sizes)] = list(sizes.values())
    return found


#: Bytes of a value of each BSON type, and of those that tell their size the bytes besides.
_FIXED: Final = _by_type(raw_bson.FIXED_SIZES)
_SIZED: Final = _by_type(raw_bson.LENGTH_EXTRAS)


class ArrayElements(NamedTuple):
    """The elements of arrays, one array after the other: ``offsets`` says where each begins. ``made``: which arrays
    were gone through; the others seem empty."""

    offsets: _Numbers
    parts: Part
    made: _Mask


class NestedArrays:
    """Makes columns from the values in ``data``. ``scalars``: the makers of scalar types. ``grows``: an object with a
    field that its type does not have is left to the reference."""

    def __init__(self, data: Bytes, scalars: Mapping[str, ScalarMaker], *, grows: bool) -> None:
        self._data = data
        self._scalars = scalars
        self._grows = grows
        self._count = 0

    def column(self, type_: NestedType, part: Part) -> tuple[pa.Array, _Mask]:
        """The values of a column, and which of them are as they have to be: the others are for the reference. Raises
        TooManyValuesError."""
        self._count = 0
        self._add(type_, len(part.type))
        return self._make(type_, part)

    def _add(self, type_: NestedType, count: int) -> None:
        """Count the values of a type, but for what is inside of arrays in them."""
        self._count += count * _width(type_)
        if self._count > nested.VALUES_MAX:
            raise TooManyValuesError

    def _make(self, type_: NestedType, part: Part) -> tuple[pa.Array, _Mask]:
        nothing = (part.type == 0) | (part.type == raw_bson.NULL)
        if not has_leaf(type_):
            return pa.nulls(len(nothing), pa.string()), nothing
        if isinstance(type_, LeafType):
            arrow = nested_arrow(type_)
            if type_.name not in self._scalars:
                return pa.nulls(len(nothing), arrow), nothing
            array, made = self._scalars[type_.name](self._data, part, arrow)
            return array, made | nothing
        wanted = raw_bson.ARRAY if isinstance(type_, ListType) else raw_bson.OBJECT
        rows = np.flatnonzero(part.type == wanted)
        chosen = Part(part.start[rows], part.end[rows], part.type[rows])
        array, made = self._list(type_, chosen) if isinstance(type_, ListType) else self._objects(type_, chosen)
        good = nothing
        good[rows] = made
        return _spread(array, rows, len(good)), good

    def _objects(self, type_: ObjectType, part: Part) -> tuple[pa.Array, _Mask]:
        pieces = []
        for first in range(0, max(1, len(part.type)), _OBJECTS_MAX):
            some = slice(first, first + _OBJECTS_MAX)
            pieces.append(self._object(type_, Part(part.start[some], part.end[some], part.type[some])))
        if len(pieces) == 1:
            return pieces[0]
        return pa.concat_arrays([array for array, _ in pieces]), np.concatenate([made for _, made in pieces])

    def _object(self, type_: ObjectType, part: Part) -> tuple[pa.Array, _Mask]:
        scan = FieldScan(self._data, part)
        scan.look_for([name.encode("utf-8", "surrogatepass") for name, _ in type_.fields])
        made = self._scanned(scan, len(part.type))
        arrays = []
        for number, (_, inner) in enumerate(type_.fields):
            array, good = self._make(inner, scan.part(number))
            arrays.append(array)
            made &= good
        return pa.StructArray.from_arrays(arrays, fields=list(nested_arrow(type_))), made

    def _scanned(self, scan: FieldScan, count: int) -> _Mask:
        """Look for the fields. Returns which objects have no others."""
        made = np.ones(count, np.bool_)
        at = scan.run(0, stops=self._grows)
        for _ in range(_OTHERS_MAX):
            if at == count:
                return made
            made[at] = False
            at = scan.run(at + 1, stops=True)
        made[at:] = False
        return made

    def _list(self, type_: ListType, part: Part) -> tuple[pa.Array, _Mask]:
        elements = elements_of(self._data, part)
        self._add(type_.element, len(elements.parts.type))
        array, good = self._make(type_.element, elements.parts)
        bad = np.concatenate((np.zeros(1, np.int64), np.cumsum(~good)))
        made = elements.made & (bad[elements.offsets[1:]] == bad[elements.offsets[:-1]])
        offsets = pa.array(elements.offsets.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, array, type=nested_arrow(type_)), made


def _width(type_: NestedType) -> int:
    """How many scalars and arrays a value of that type has outside of arrays."""
    return sum(_width(one) for _, one in type_.fields) or 1 if isinstance(type_, ObjectType) else 1


def elements_of(data: Bytes, part: Part) -> ArrayElements:
    """The elements of arrays, which are valid BSON."""
    count = len(part.type)
    made = np.ones(count, np.bool_)
    rows, at, limit = np.arange(count), part.start + 4, part.end - 1
    found: list[tuple[_Numbers, _Numbers, _Numbers, _Numbers]] = []
    for _ in range(_ELEMENTS_MAX):
        more = at < limit
        rows, at, limit = rows[more], at[more], limit[more]
        if not rows.size:
            break
        types = data[at].astype(np.int64)
        start = _after_key(data, at + 1)
        end = _end_of(data, types, start)
        is_known = (start > 0) & (end > 0)
        made[rows[~is_known]] = False
        rows, limit = rows[is_known], limit[is_known]
        at = end[is_known]
        found.append((rows, start[is_known], at, types[is_known]))
    made[rows] = False  # they have more elements
    none = np.zeros(0, np.int64)
    owner, start, end, types = (np.concatenate([none, *(one[place] for one in found)]) for place in range(4))
    kept = made[owner]
    order = np.flatnonzero(kept)[np.argsort(owner[kept], kind="stable")]
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(owner[kept], minlength=count))))
    return ArrayElements(offsets, Part(start[order], end[order], types[order]), made)


def _after_key(data: Bytes, at: _Numbers) -> _Numbers:
    """Where the values begin whose keys begin at ``at``; 0 for a key that is longer than numbers are. A server takes
    any key, an empty one too."""
    found = np.zeros(len(at), np.int64)
    for size in range(_KEY_BYTES):
        place = np.minimum(at + size, len(data) - 1)
        found = np.where((found == 0) & (data[place] == 0), place + 1, found)
    return found


def _end_of(data: Bytes, types: _Numbers, start: _Numbers) -> _Numbers:
    """Where values end; 0 for one of a type that is rare."""
    found = np.where(_FIXED[types] >= 0, start + _FIXED[types], 0)
    sized = np.flatnonzero(_SIZED[types] >= 0)
    if sized.size:
        sizes = words(data, start[sized], 4).view("<i4")[:, 0]
        found[sized] = start[sized] + sizes + _SIZED[types[sized]]
    return found


def _spread(array: pa.Array, rows: _Numbers, count: int) -> pa.Array:
    """The values at ``rows``, and NULL between them."""
    if rows.size == count:
        return array
    places = np.zeros(count, np.int64)
    places[rows] = np.arange(rows.size)
    hidden = np.ones(count, np.bool_)
    hidden[rows] = False
    return array.take(pa.array(places, mask=hidden))
