"""Expressions that have no instructions, evaluated in plain code for a block of events.

The paths that a stage's expressions ask for are looked up in compiled code, for all events together; the plain closures
find them in their frame. What they compute is written by the stage's program with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.expression.language.core import follow
from tailrace.core.expression.language.expression import ROOT_SLOT, Compilation, Expression, Frame
from tailrace.core.expression.values import value as v
from tailrace.core.kernel import project
from tailrace.core.kernel.batch import address
from tailrace.core.kernel.project_look_up import NOT_FOUND_OUT, look_up
from tailrace.core.kernel.project_pool import Pool

#: How many computed bytes are kept for one block; the events after those are left to the plain stages.
_BYTES_MAX: Final = 128 << 20


class PathLookUps:
    """Paths that are looked up in all events of a block together."""

    def __init__(self, paths: Sequence[tuple[bytes, ...]]) -> None:
        self._count = len(paths)
        pool = Pool()
        rows = []
        for names in paths:
            table = pool.table([(pool.bytes(name), len(name)) for name in names], [0])
            rows.append((len(names), table))
        place = pool.table(rows, [1])
        self._pool = pool.placed()
        self._paths = address(self._pool) + place

    def spans(self, buffer: Bytes, start: Offsets, end: Offsets) -> Offsets:
        """int64[events, 3 * paths]: of each path the value's type, and where it starts and ends in its event;
        ``project.MISSING`` where there is none, below 0 where plain code has to look (``NOT_FOUND_OUT``)."""
        found = np.empty((start.size, 3 * self._count), np.int64)
        state = np.zeros(project.STATE_SLOTS, np.int64)
        starts, ends = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
        places = [address(state), self._paths, self._count, address(buffer), address(starts), address(ends)]
        job = np.array([*places, start.size, address(found)], np.int64)
        look_up(address(job))
        return found


class External:
    """The expressions of one stage that only plain code evaluates."""

    def __init__(self, compilation: Compilation, expressions: Sequence[Expression]) -> None:
        self._compilation = compilation
        self._evaluate = [expression.evaluate for expression in expressions]
        self.count = len(self._evaluate)
        self._look_ups = PathLookUps(list(compilation.paths))
        # A first name alone is asked for where a longer path has to be followed in plain code; else hardly ever.
        longer = {names[0] for names in compilation.paths if len(names) > 1}
        slots = [(names, 3 * place, slot) for place, (names, slot) in enumerate(compilation.paths.items())]
        self._slots = [(at, slot, names) for names, at, slot in slots if len(names) > 1 or names[0] not in longer]
        self._first = [(at, slot) for names, at, slot in slots if len(names) == 1 and names[0] in longer]

    def values(self, buffer: Bytes, start: Offsets, end: Offsets) -> tuple[Offsets, Bytes, list[int]]:
        """For the events ``buffer[start[i] : end[i]]``, the first ones where there is no room for all: int64[n,
        expressions, 3], type, address and size of each value; the memory that the addresses lead to; and the numbers of
        the events on which an expression fails (the stage may not ask for it: inside an array of no elements)."""
        spans = self._look_ups.spans(buffer, start, end).tolist()
        view = memoryview(np.ascontiguousarray(buffer))  # type: ignore[arg-type]
        types: list[int] = []
        parts: list[bytes] = []
        failed: list[int] = []
        size = 0
        nothing = [_MISSING] * self.count
        evaluate, frame_of, empty = self._evaluate, self._frame, self._compilation.frame()
        for first, last, row in zip(start.tolist(), end.tolist(), spans, strict=True):
            try:
                frame = frame_of(empty, view[first:last].tobytes(), row)
                values = [each(frame) or _MISSING for each in evaluate]
            except Exception:  # noqa: BLE001  whatever it is, the plain stages raise it again, at its place
                failed.append(len(types) // self.count)
                values = nothing
            for kind, data in values:
                types.append(kind)
                parts.append(data)
                size += len(data)
            if size > _BYTES_MAX:
                break
        sizes = np.array([len(part) for part in parts], np.int64)
        memory: Bytes = np.frombuffer(b"".join(parts) or b"\0", np.uint8)
        places = address(memory) + np.cumsum(sizes) - sizes
        whole = np.stack([np.array(types, np.int64), places, sizes], 1)
        return whole.reshape(-1, self.count, 3), memory, failed

    def truths(self, buffer: Bytes, start: Offsets, end: Offsets) -> list[bool | None]:
        """Whether the first expression is true of each event, as ``$expr`` asks; ``None`` where it fails."""
        spans = self._look_ups.spans(buffer, start, end).tolist()
        view = memoryview(np.ascontiguousarray(buffer))  # type: ignore[arg-type]
        evaluate, truthy, frame_of, empty = self._evaluate[0], v.truthy, self._frame, self._compilation.frame()
        found: list[bool | None] = []
        for first, last, row in zip(start.tolist(), end.tolist(), spans, strict=True):
            try:
                found.append(truthy(evaluate(frame_of(empty, view[first:last].tobytes(), row))))
            except Exception:  # noqa: BLE001  whatever it is, the plain stages raise it again, at its place
                found.append(None)
        return found

    def _frame(self, empty: Frame, document: bytes, row: list[int]) -> Frame:
        """The frame of an event whose paths ``row`` gives; ``empty`` is one in which nothing was looked up."""
        frame = empty.copy()
        frame[ROOT_SLOT] = (v.OBJECT, document)
        follows = False
        for at, slot, names in self._slots:
            kind = row[at]
            if kind > 0:
                frame[slot] = (kind, document[row[at + 1] : row[at + 2]])
            elif kind == 0:
                frame[slot] = None
            elif kind < NOT_FOUND_OUT:
                frame[slot] = follow((v.ARRAY, document[row[at + 1] : row[at + 2]]), names[kind - NOT_FOUND_OUT :], 0)
            else:
                follows = True
        for at, slot in self._first if follows else ():
            if row[at] >= 0:
                frame[slot] = (row[at], document[row[at + 1] : row[at + 2]]) if row[at] else None
        return frame


_MISSING: Final[v.Value] = (project.MISSING, b"")
