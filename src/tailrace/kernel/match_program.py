"""The parsed ``$match`` as a program for ``tailrace.kernel.match``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.expression.match import tree
from tailrace.expression.values import value as v
from tailrace.expression.values.value import Value
from tailrace.kernel import match
from tailrace.kernel.batch import Bytes, Offsets, address, as_bytes, as_signed

#: More values in ``$in`` than this are looked up faster by the reference's set.
_IN_MAX: Final = 64
_OPERATORS: Final = {
    "$eq": match.EQUAL,
    "$lt": match.LESS,
    "$lte": match.LESS | match.EQUAL,
    "$gt": match.GREATER,
    "$gte": match.GREATER | match.EQUAL,
}
_LOGIC: Final[dict[type, int]] = {tree.And: match.AND, tree.Or: match.OR, tree.Nor: match.NOR}
_TYPE_BITS: Final = {v.MIN_KEY: 32, v.MAX_KEY: 33}
_PLAIN_TYPES: Final = frozenset({v.STRING, v.OBJECT_ID, v.BOOL, v.DATE, v.TIMESTAMP})


class Constant(NamedTuple):
    """A value as the program holds it: the type class that it is compared in, and its data without a length."""

    kind: int
    data: bytes


class MatchProgram:
    """A ``$match`` that compiled code can answer for most events.

    ``answers(buffer, offsets)`` gives uint8[n]: ``FAILS``, ``PASSES`` or ``UNKNOWN`` for the events
    ``[offsets[i], offsets[i + 1])``; the reference (``document_test``) answers for those that are unknown.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]], pool: Bytes) -> None:
        self._rows = np.array(rows, np.int64)
        self._pool = pool
        self._stack = np.zeros(len(rows) + 1, np.int64)

    def answers(self, buffer: bytes | memoryview | Bytes, offsets: Offsets) -> Bytes:
        data, ends = as_bytes(buffer), np.ascontiguousarray(offsets, np.int64)
        result = np.empty(ends.size - 1, np.uint8)
        program = [address(self._rows), len(self._rows), address(self._stack)]
        job = np.array([*program, address(data), address(ends), result.size, address(result)], np.int64)
        match.match(address(job))
        return result


def match_program(node: tree.Node) -> MatchProgram | None:
    """The program of a ``$match``; ``None`` where asking it of many events at once could be noticed (``$expr`` may
    fail) or would never decide anything."""
    if _may_fail(node):
        return None
    writer = _Writer()
    return writer.finish() if writer.add(node) else None


_PATHS: Final = frozenset({match.COMPARE, match.IS_NULL, match.IS_IN, match.EXISTS, match.IS_OF_TYPE})


def _may_fail(node: tree.Node) -> bool:
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(_may_fail, node.children))
    if isinstance(node, tree.Not):
        return _may_fail(node.child)
    return isinstance(node, tree.ExpressionIsTrue)


def _constant(value: Value) -> Constant | None:
    """``None`` for what only the reference compares."""
    kind, data = value
    if kind in (v.INT32, v.INT64):
        return Constant(v.INT64, struct.pack("<q", v.integer_of(value)))
    if kind == v.DOUBLE:
        return None if v.is_nan(v.number_of(value)) else Constant(v.DOUBLE, data)
    if kind not in _PLAIN_TYPES:
        return None
    return Constant(kind, data[4:] if kind == v.STRING else data)


class _Writer:
    """Rows in postfix order, and the pool of what they point to; offsets in the pool become addresses at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._pool = bytearray()
        self._pointers: list[int] = []  # places in the pool that hold an offset into it

    def add(self, node: tree.Node) -> bool:
        """Append the rows of a node; gives whether it can ever decide anything."""
        kind = type(node)
        if isinstance(node, tree.And | tree.Or | tree.Nor):
            decided = [self.add(child) for child in node.children]
            self.rows.append((_LOGIC[kind], len(node.children), 0, 0, 0, 0))
            return any(decided)
        if isinstance(node, tree.Not):
            decides = self.add(node.child)
            self.rows.append((match.NOR, 1, 0, 0, 0, 0))
            return decides
        row = self._leaf(node)
        self.rows.append(row or (match.ANSWER, 0, match.UNKNOWN, 0, 0, 0))
        return row is not None

    def _leaf(self, node: tree.Node) -> tuple[int, ...] | None:
        if isinstance(node, tree.Always):
            return (match.ANSWER, 0, match.PASSES if node.truth else match.FAILS, 0, 0, 0)
        maker = _LEAVES.get(type(node))
        path = getattr(node, "path", b"")
        # Names without characters follow rules of their own, and so do numbers inside arrays, which are unknown anyway.
        if maker is None or not all(path.split(b".")):
            return None
        return maker(self, node)

    def compare(self, node: tree.Compare) -> tuple[int, ...] | None:
        if node.value[0] == v.NULL_TYPE:
            null = node.operator not in ("$gt", "$lt")
            return (match.IS_NULL, self._path(node.path), 0, 0, 0, 0) if null else None
        constant = _constant(node.value)
        if constant is None:
            return None
        place = self._constants([constant])
        return (match.COMPARE, self._path(node.path), _OPERATORS[node.operator], place, 0, 0)

    def is_in(self, node: tree.In) -> tuple[int, ...] | None:
        values = [value for value in node.values if value[0] != v.NULL_TYPE]
        constants = [constant for constant in map(_constant, values) if constant is not None]
        if node.patterns or len(constants) < len(values) or len(values) > _IN_MAX:
            return None
        with_null = int(len(values) < len(node.values))
        return (match.IS_IN, self._path(node.path), len(constants), self._constants(constants), with_null, 0)

    def exists(self, node: tree.Exists) -> tuple[int, ...]:
        return (match.EXISTS, self._path(node.path), 0, 0, 0, 0)

    def is_of_type(self, node: tree.TypeIs) -> tuple[int, ...]:
        bits = sum(1 << _TYPE_BITS.get(kind, kind) for kind in node.types)
        return (match.IS_OF_TYPE, self._path(node.path), bits, 0, 0, 0)

    def _place(self, data: bytes) -> int:
        place = len(self._pool)
        self._pool += data + bytes(-len(data) % 8 + 8)
        return place

    def _table(self, entries: Sequence[tuple[int, ...]], pointer: int) -> int:
        """Rows of numbers in the pool; slot ``pointer`` of each holds an offset."""
        place = self._place(b"".join(struct.pack(f"<{len(entry)}q", *entry) for entry in entries))
        size = 8 * len(entries[0]) if entries else 0
        self._pointers += [place + size * i + 8 * pointer for i in range(len(entries))]
        return place

    def _path(self, path: bytes) -> int:
        names = path.split(b".")
        places = [(self._place(name), len(name)) for name in names]
        # The count stands right before the table of the names.
        place = self._place(struct.pack("<q", len(names)) + b"".join(struct.pack("<2q", *one) for one in places))
        self._pointers += [place + 8 + 16 * i for i in range(len(names))]
        return place

    def _constants(self, constants: Sequence[Constant]) -> int:
        return self._table([(one.kind, self._place(one.data), len(one.data)) for one in constants], 1)

    def finish(self) -> MatchProgram:
        pool: npt.NDArray[np.uint8] = np.frombuffer(bytearray(self._pool or b"\0"), np.uint8)
        base = address(pool)
        for place in self._pointers:
            word = pool[place : place + 8].view(np.int64)
            word += base
        rows = []
        for operation, first, argument, constant, with_null, spare in self.rows:
            path = first + base if operation in _PATHS else first
            holds = operation in (match.COMPARE, match.IS_IN)
            rows.append(
                (operation, path, as_signed(argument), constant + base if holds else constant, with_null, spare)
            )
        return MatchProgram(rows, pool)


_LEAVES: Final[dict[type, Callable[[_Writer, object], tuple[int, ...] | None]]] = {
    tree.Compare: _Writer.compare,  # type: ignore[dict-item]
    tree.In: _Writer.is_in,  # type: ignore[dict-item]
    tree.Exists: _Writer.exists,  # type: ignore[dict-item]
    tree.TypeIs: _Writer.is_of_type,  # type: ignore[dict-item]
}
