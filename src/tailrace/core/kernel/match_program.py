"""The parsed ``$match`` as a program for ``tailrace.core.kernel.match``."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.expression.language.expression import Expression
from tailrace.core.expression.match import tree
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.compare import SIMPLE
from tailrace.core.expression.values.value import Value
from tailrace.core.kernel import match, match_expression, match_path, match_test
from tailrace.core.kernel.batch import address, as_bytes, as_signed
from tailrace.core.kernel.match_constant import beside, holds_scoped_code
from tailrace.core.kernel.match_noted import NOTED_FIELDS
from tailrace.core.plan.conjuncts import may_fail

#: Longer paths, deeper queries and more positions of bits than these are left to the reference.
_NAMES_MAX: Final = 200
_POSITIONS_MAX: Final = 4096
_ORDERS: Final = {
    "$eq": match_test.EQUAL,
    "$ne": match_test.LESS | match_test.GREATER,
    "$lt": match_test.LESS,
    "$lte": match_test.LESS | match_test.EQUAL,
    "$gt": match_test.GREATER,
    "$gte": match_test.GREATER | match_test.EQUAL,
}
_TYPE_BITS: Final = {v.MIN_KEY: 32, v.MAX_KEY: 33}
#: A pattern that is a text: perhaps an anchor at the beginning, literal characters, perhaps an anchor at the end.
_TEXT: Final = rb"(?s)(\^?)((?:[^\\^$.\[|()?*+{]|\\[!-/:-@\[-`{-~])*)(\$?)"
_ESCAPED: Final = rb"(?s)\\(.)"


class _InPool(NamedTuple):
    """A place in the pool; an address in the end."""

    place: int


class _InMemory(NamedTuple):
    """A place among the walks of the working memory."""

    place: int


class _Row(NamedTuple):
    """A row before places are known. ``target`` and ``extra`` of a jump are numbers of rows."""

    operation: int
    target: int = 0
    path: _InPool | int = 0
    chain: _InPool | int = 0
    argument: int = 0
    constant: _InPool | int = 0
    extra: _InPool | int = 0
    walk: _InMemory | int = 0


class _Place(NamedTuple):
    """What a test looks at: its path (0: the current value), the path's look-ups in the event (0: it begins at the
    current value) and its walk."""

    path: _InPool | int
    chain: _InPool | int
    walk: _InMemory

    def of(self, row: _Row) -> _Row:
        return row._replace(path=self.path, chain=self.chain, walk=self.walk)


class MatchProgram:
    """A ``$match`` that compiled code can answer for most events. It may be asked by several threads at once.

    ``answers(buffer, offsets)`` gives uint8[n]: ``FAILS``, ``PASSES`` or ``UNKNOWN`` for the events
    ``[offsets[i], offsets[i + 1])``; the reference (``document_test``) answers for those that are unknown. With
    ``noted`` (``EventBlock.places`` of these events) the same answers take less time.
    """

    def __init__(self, rows: npt.NDArray[np.int64], pool: Bytes, memory: _Memory) -> None:
        self._rows = rows
        self._pool = pool
        self._memory = memory

    def answers(
        self, buffer: bytes | memoryview | Bytes, offsets: Offsets, noted: npt.NDArray[np.int64] | None = None
    ) -> Bytes:
        data, ends = as_bytes(buffer), np.ascontiguousarray(offsets, np.int64)
        result = np.empty(ends.size - 1, np.uint8)
        parts = self._memory
        longest = int(np.diff(ends).max(initial=0)) if parts.gathers else 0
        memory = np.empty(parts.gathered + 2 * longest + match_expression.VALUE_SIZE, np.uint8)
        memory[: parts.start.size] = parts.start
        first = address(memory)
        memory[match_expression.GATHERED_END :][:8].view(np.int64)[0] = first + memory.size
        job = np.array(
            [
                address(self._rows),
                first,
                match_expression.MEMORY_HEAD,
                parts.lookups,
                parts.answers,
                parts.values,
                first + parts.gathered,
                address(data),
                address(ends),
                result.size,
                address(result),
                0 if noted is None else address(noted),
                address(parts.noted),
                len(parts.noted),
            ],
            np.int64,
        )
        match.match(address(job))
        return result


class _Memory(NamedTuple):
    """The working memory of a program: what it begins with, how many look-ups it has, and where the rest is: the two
    stacks, and the room for arrays that expressions gather. ``noted``: the fields of ``match_noted``."""

    start: Bytes
    lookups: int
    answers: int
    values: int
    gathered: int
    gathers: bool
    noted: npt.NDArray[np.int64]


def match_program(node: tree.Node) -> MatchProgram | None:
    """The program of a ``$match`` under the simple collation; ``None`` if it would never decide anything.

    Where the reference could fail (an ``$expr`` other than of comparisons and logic), the program answers only what is
    decided before.
    """
    writer = _Writer(node)
    return writer.finish() if writer.add(node) else None


def _asks_for_nameless(node: tree.Node) -> bool:
    """Whether a test names a field without a name: the server then takes such fields out of what is tested."""
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(_asks_for_nameless, node.children))
    if isinstance(node, tree.Not):
        return _asks_for_nameless(node.child)
    path = _path_of(node)
    return path is not None and path[:1] in (b"", b".")


def _path_of(node: tree.Node) -> bytes | None:
    path: bytes | None = getattr(node, "path", None)
    return path


def _has_expression(node: tree.Node) -> bool:
    if isinstance(node, tree.And | tree.Or | tree.Nor):
        return any(map(_has_expression, node.children))
    if isinstance(node, tree.Not):
        return _has_expression(node.child)
    return isinstance(node, tree.ExpressionIsTrue)


def _cost(node: tree.Node) -> int:
    """What to ask first: few names, then simple tests."""
    if isinstance(node, tree.Not):
        return _cost(node.child)
    return node.path.count(b".") if isinstance(node, tree.Compare | tree.In | tree.Exists | tree.TypeIs) else 100


class _Writer:
    """Rows in the order in which they run, and the pool of what they point to."""

    def __init__(self, node: tree.Node) -> None:
        self._nameless = _asks_for_nameless(node)
        self._rows: list[_Row] = []
        self._pool = bytearray(8)  # no place is 0
        self._pointers: list[int] = []  # places in the pool that hold an offset into it
        self._lookups: dict[tuple[bytes, ...], int] = {(): 0}
        self._texts: dict[bytes, int] = {}
        self._walks = 0
        self._gathers = False

    def add(self, node: tree.Node, mode: str = "event") -> bool:
        """Append the rows of a node. Returns whether it can ever decide anything. ``mode`` says what its tests are of:
        paths in the "event", paths in the current "document", or the current "value" itself."""
        if isinstance(node, tree.And | tree.Or | tree.Nor):
            return self._logic(node, mode)
        if isinstance(node, tree.Not):
            decides = self.add(node.child, mode)
            self._rows.append(_Row(match.NEGATE))
            return decides
        if isinstance(node, tree.Always):
            self._rows.append(_Row(match.ANSWER, argument=int(node.truth)))
            return True
        if isinstance(node, tree.ExpressionIsTrue):
            return self._expression(node)
        if isinstance(node, tree.ElementMatchesObject | tree.ElementMatchesValue):
            return self._elements(node, mode)
        if isinstance(node, tree.In) and node.patterns:
            return self._logic(tree.Or((replace(node, patterns=()), *node.patterns)), mode)
        leaf = self._leaf(node, mode)
        self._rows.append(leaf or _Row(match.ANSWER, argument=match_test.UNKNOWN))
        return leaf is not None

    def _logic(self, node: tree.And | tree.Or | tree.Nor, mode: str) -> bool:
        is_and = isinstance(node, tree.And)
        children: Iterable[tree.Node] = node.children
        if not any(map(_has_expression, node.children)):  # else the order shows where an error comes first
            children = sorted(node.children, key=_cost)
        self._rows.append(_Row(match.ANSWER, argument=int(is_and)))
        merges = []
        decided = False
        for child in children:
            decided |= self.add(child, mode)
            merges.append(len(self._rows))
            self._rows.append(_Row(match.MERGE, argument=int(not is_and)))
        self._jump_here(merges)
        if isinstance(node, tree.Nor):
            self._rows.append(_Row(match.NEGATE))
        return decided

    def _jump_here(self, rows: Iterable[int]) -> None:
        """Let jumps lead to the row after those so far."""
        for number in rows:
            row = self._rows[number]
            self._rows[number] = row._replace(target=len(self._rows))

    # ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _leaf(self, node: tree.Node, mode: str) -> _Row | None:
        """The row of a test; ``None`` where only the reference can say."""
        maker = _LEAVES.get(type(node))
        row = None if maker is None else maker(self, node)
        if row is None or row.operation == match.ANSWER:
            return row
        place = self._place_of(_path_of(node), mode)
        return None if place is None else place.of(row)

    def _place_of(self, path: bytes | None, mode: str, before: int = 0) -> _Place | None:
        """The place of a test; ``before``: memory in front of the walk."""
        if mode == "value":
            return _Place(0, 0, self._walk(before, 0))
        names = tuple((path or b"").split(b"."))
        if len(names) > _NAMES_MAX:
            return None
        chain = self._chain(names) if mode == "event" else 0
        return _Place(self._path(names), chain, self._walk(before, len(names)))

    def compare(self, node: tree.Compare) -> _Row:
        kind, operator = node.value[0], node.operator
        if kind == v.NULL_TYPE:
            if operator in ("$gt", "$lt"):
                return _Row(match.ANSWER, argument=match_test.FAILS)
            return _Row(match_test.IS_NULL)
        if kind in (v.MIN_KEY, v.MAX_KEY):
            others = ("$gt", "$gte") if kind == v.MIN_KEY else ("$lt", "$lte")
            same = int(operator in ("$eq", "$gte", "$lte"))
            return _Row(match_test.IS_EXTREME, argument=kind, constant=same, extra=int(operator in others))
        return _Row(match_test.COMPARE, argument=_ORDERS[operator], constant=self._constants([node.value]))

    def is_in(self, node: tree.In) -> _Row | None:
        if any(map(holds_scoped_code, node.values)):
            return None
        values = SIMPLE.sorted(node.values)
        with_null = int(any(kind == v.NULL_TYPE for kind, _ in values))
        return _Row(match_test.IS_IN, argument=len(values), constant=self._constants(values), extra=with_null)

    def exists(self, node: tree.Exists) -> _Row:
        return _Row(match_test.EXISTS)

    def is_of_type(self, node: tree.TypeIs) -> _Row:
        return _Row(match_test.IS_OF_TYPE, argument=sum(1 << _TYPE_BITS.get(kind, kind) for kind in node.types))

    def size(self, node: tree.Size) -> _Row:
        return _Row(match_test.HAS_SIZE, argument=node.size)

    def rest(self, node: tree.Mod) -> _Row:
        return _Row(match_test.HAS_REST, argument=node.divisor, extra=node.remainder)

    def bits(self, node: tree.Bits) -> _Row | None:
        positions = node.positions
        if len(positions) > _POSITIONS_MAX:
            return None
        options = 2 * int("All" in node.operator) + int(node.operator.endswith("Clear"))
        return _Row(
            match_test.HAS_BITS,
            argument=node.mask,
            constant=_InPool(self._place(struct.pack(f"<{len(positions)}q", *positions))),
            extra=4 * len(positions) + options,
        )

    def pattern(self, node: tree.Pattern) -> _Row | None:
        """A text, perhaps at the beginning or at the end; other patterns are left to the reference."""
        found = re.fullmatch(_TEXT, node.pattern)
        if found is None or set(node.options) & set(b"imx" if found[1] or found[3] else b"ix"):
            return None
        text = re.sub(_ESCAPED, rb"\1", found[2])
        data = node.pattern + b"\x00" + node.options + b"\x00"
        own = self._text(data)
        return _Row(
            match_test.CONTAINS,
            argument=len(found[1]) + 2 * len(found[3]),
            constant=_InPool(self._text(text)),
            extra=_InPool(self._table([(len(text), own, len(data))], 1)),
        )

    def _elements(self, node: tree.ElementMatchesObject | tree.ElementMatchesValue, mode: str) -> bool:
        """``$elemMatch``: a loop over the elements of the arrays at a path."""
        place = self._place_of(node.path, mode, match.EACH_SIZE)
        if place is None:
            self._rows.append(_Row(match.ANSWER, argument=match_test.UNKNOWN))
            return False
        of_objects = isinstance(node, tree.ElementMatchesObject)
        self._rows.append(place.of(_Row(match.EACH, argument=int(of_objects))))
        first = len(self._rows)
        self._rows.append(place.of(_Row(match.EACH_NEXT, argument=int(of_objects))))
        if isinstance(node, tree.ElementMatchesObject):
            self.add(node.child, "document")
        else:
            self.add(tree.And(node.children), "value")
        last = len(self._rows)
        self._rows.append(place.of(_Row(match.EACH_MERGE, extra=first)))
        self._jump_here([first, last])
        return True  # where there is no array, it fails

    # ── expressions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _expression(self, node: tree.ExpressionIsTrue) -> bool:
        before = len(self._rows)
        stops = may_fail(node) or node.bindings.compilation.after_places
        known = node.bindings.order.simple and not node.bindings.compilation.after_places
        if known and self._value(node.expression):
            self._rows.append(_Row(match.TRUTH))
            return True
        del self._rows[before:]
        self._rows.append(_Row(match.STOP) if stops else _Row(match.ANSWER, argument=match_test.UNKNOWN))
        return False

    def _value(self, expression: Expression) -> bool:
        """Append the rows that push an expression's value; gives whether there are such."""
        if expression.kind == "constant":
            self._push(expression.value)
            return True
        if expression.kind == "field":
            return self._field(expression)
        maker = _OPERATORS.get(expression.name) if expression.kind == "operator" else None
        return maker is not None and maker(self, expression)

    def _push(self, value: Value | None) -> None:
        if value is None:
            self._rows.append(_Row(match_expression.PUSH))
            return
        kind, data = value
        start = self._text(data)
        self._rows.append(
            _Row(match_expression.PUSH, argument=kind, constant=_InPool(start), extra=_InPool(start + len(data)))
        )

    def _field(self, expression: Expression) -> bool:
        names = expression.path
        if expression.name != "ROOT" or len(names) > _NAMES_MAX:
            return False
        if not names:
            self._rows.append(_Row(match_expression.FIELD))
            return not self._nameless
        self._gathers |= len(names) > 1
        place = _Place(self._path(names), self._chain(names), self._walk(0, len(names)))
        self._rows.append(place.of(_Row(match_expression.FIELD)))
        return True

    def ordered(self, expression: Expression) -> bool:
        done = all(map(self._value, expression.args))
        self._rows.append(_Row(match_expression.IS_ORDER, argument=_ORDERS[expression.name]))
        return done

    def order_of(self, expression: Expression) -> bool:
        done = all(map(self._value, expression.args))
        self._rows.append(_Row(match_expression.ORDER_OF))
        return done

    def among(self, expression: Expression) -> bool:
        done = all(map(self._value, expression.args))
        self._rows.append(_Row(match_expression.IS_AMONG))
        return done

    def negated(self, expression: Expression) -> bool:
        done = all(map(self._value, expression.args))
        self._rows.append(_Row(match_expression.IS_NOT))
        return done

    def junction(self, expression: Expression) -> bool:
        """``$and`` and ``$or``: the first argument that decides ends it."""
        decides = expression.name == "$or"
        jumps = []
        for argument in expression.args:
            if not self._value(argument):
                return False
            jumps.append(len(self._rows))
            self._rows.append(_Row(match.JUMP_IF, argument=int(decides)))
        self._push(v.boolean(not decides))
        over = len(self._rows)
        self._rows.append(_Row(match.JUMP))
        self._jump_here(jumps)
        self._push(v.boolean(decides))
        self._jump_here([over])
        return True

    def conditional(self, expression: Expression) -> bool:
        condition, then, otherwise = expression.args
        if not self._value(condition):
            return False
        fork = len(self._rows)
        self._rows.append(_Row(match.JUMP_IF, argument=0))
        if not self._value(then):
            return False
        over = len(self._rows)
        self._rows.append(_Row(match.JUMP))
        self._jump_here([fork])
        done = self._value(otherwise)
        self._jump_here([over])
        return done

    def if_null(self, expression: Expression) -> bool:
        jumps = []
        for argument in expression.args[:-1]:
            if not self._value(argument):
                return False
            jumps.append(len(self._rows))
            self._rows.append(_Row(match.JUMP_NOT_NULL))
        done = self._value(expression.args[-1])
        self._jump_here(jumps)
        return done

    # ── the pool and the working memory ──────────────────────────────────────────────────────────────────────────────

    def _place(self, data: bytes) -> int:
        place = len(self._pool)
        self._pool += data + bytes(-len(data) % 8 + 8)
        return place

    def _text(self, data: bytes) -> int:
        """The place of bytes that may be shared."""
        if data not in self._texts:
            self._texts[data] = self._place(data)
        return self._texts[data]

    def _table(self, entries: Sequence[tuple[int, ...]], *pointers: int) -> int:
        """Rows of numbers in the pool; the slots ``pointers`` of each hold an offset, unless they are 0."""
        place = self._place(b"".join(struct.pack(f"<{len(entry)}q", *entry) for entry in entries))
        for number, entry in enumerate(entries):
            self._pointers += [place + 8 * (len(entry) * number + slot) for slot in pointers if entry[slot]]
        return place

    def _path(self, names: tuple[bytes, ...]) -> _InPool:
        entries = [(self._text(name), len(name), int(name.isdigit())) for name in names]
        numbers = [number for entry in entries for number in entry]
        return _InPool(self._table([(len(names), *numbers)], *range(1, len(numbers) + 1, 3)))

    def _chain(self, names: tuple[bytes, ...]) -> _InPool:
        """The look-ups of a path, by their offsets in the working memory."""
        numbers = [self._lookups.setdefault(names[:end], len(self._lookups)) for end in range(1, len(names) + 1)]
        offsets = [match_expression.MEMORY_HEAD + match_path.LOOKUP_SIZE * number for number in numbers]
        return _InPool(self._place(struct.pack(f"<{len(offsets)}q", *offsets)))

    def _walk(self, before: int, names: int) -> _InMemory:
        place = self._walks
        self._walks += before + match_path.walk_size(names)
        return _InMemory(place)

    def _constants(self, values: Sequence[Value]) -> _InPool:
        entries = []
        for value in values:
            kind, data = value
            start, special = self._text(data), beside(value)
            entries.append((kind, start, start + len(data), self._text(special) if special else 0))
        return _InPool(self._table(entries, 1, 2, 3))

    def _lookup_table(self) -> Bytes:
        """The working memory's beginning: the results that are constant, and the tree of look-ups."""
        head, size = match_expression.MEMORY_HEAD, match_path.LOOKUP_SIZE
        start = np.zeros(head + size * len(self._lookups), np.uint8)
        start[match_expression.ANSWERS + 1] = 1
        start[match_expression.ORDERS :][:12] = np.frombuffer(struct.pack("<3i", -1, 0, 1), np.uint8)
        words = start[head:].view(np.int64).reshape(-1, size // 8)
        for names, number in self._lookups.items():
            if not names:
                continue
            words[number, match_path.NAME // 8] = self._text(names[-1])
            words[number, match_path.NAME_SIZE // 8] = len(names[-1])
            parent = words[self._lookups[names[:-1]]]
            words[number, match_path.NEXT // 8] = parent[match_path.CHILD // 8]
            parent[match_path.CHILD // 8] = head + size * number
        return start

    def _noted(self) -> npt.NDArray[np.int64]:
        """The rows of ``match_noted``: the event's fields that are looked up and may be noted."""
        rows = [
            (match_expression.MEMORY_HEAD + match_path.LOOKUP_SIZE * number, *NOTED_FIELDS[names[0]])
            for names, number in self._lookups.items()
            if len(names) == 1 and names[0] in NOTED_FIELDS
        ]
        return np.array(rows, np.int64).reshape(-1, 6)

    def finish(self) -> MatchProgram:
        self._rows.append(_Row(match.END))
        start = self._lookup_table()
        pool: npt.NDArray[np.uint8] = np.frombuffer(self._pool, np.uint8)
        base = address(pool)
        for place in self._pointers:
            pool[place : place + 8].view(np.int64)[0] += base
        names = start[match_expression.MEMORY_HEAD :].view(np.int64).reshape(-1, match_path.LOOKUP_SIZE // 8)
        names[1:, match_path.NAME // 8] += base
        walks = start.size
        answers = walks + self._walks
        values = answers + 8 * (len(self._rows) + 1)
        gathered = values + match_expression.VALUE_SIZE * (len(self._rows) + 1)
        memory = _Memory(start, len(self._lookups), answers, values, gathered, self._gathers, self._noted())
        numbers = [[_resolved(slot, base, walks) for slot in _slots(row)] for row in self._rows]
        return MatchProgram(np.array(numbers, np.int64), pool, memory)


def _slots(row: _Row) -> tuple[_InPool | _InMemory | int, ...]:
    """A row's slots in the order in which the kernel reads them."""
    return (row.operation, row.target, row.path, row.chain, row.argument, row.constant, row.extra, row.walk)


def _resolved(slot: _InPool | _InMemory | int, pool: int, walks: int) -> int:
    if isinstance(slot, _InPool):
        return slot.place + pool
    return slot.place + walks if isinstance(slot, _InMemory) else as_signed(slot)


_Maker: TypeAlias = Callable[[_Writer, Any], _Row | None]

_LEAVES: Final[dict[type, _Maker]] = {
    tree.Compare: _Writer.compare,
    tree.In: _Writer.is_in,
    tree.Exists: _Writer.exists,
    tree.TypeIs: _Writer.is_of_type,
    tree.Size: _Writer.size,
    tree.Mod: _Writer.rest,
    tree.Bits: _Writer.bits,
    tree.Pattern: _Writer.pattern,
}
_OPERATORS: Final[dict[str, Callable[[_Writer, Expression], bool]]] = {
    **dict.fromkeys(_ORDERS, _Writer.ordered),
    "$cmp": _Writer.order_of,
    "$in": _Writer.among,
    "$not": _Writer.negated,
    "$and": _Writer.junction,
    "$or": _Writer.junction,
    "$cond": _Writer.conditional,
    "$ifNull": _Writer.if_null,
}
