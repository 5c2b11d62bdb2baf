"""Expressions that have no instructions, evaluated in plain code for a block of events.

The paths that a stage's expressions ask for are looked up in compiled code, for all events together; the plain closures
find them in their frame. What they compute is written by the stage's program with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tailrace.expression.language.expression import ROOT_SLOT, Compilation, Expression
from tailrace.expression.values import value as v
from tailrace.kernel import project
from tailrace.kernel.batch import Bytes, Offsets, address
from tailrace.kernel.project_look_up import look_up
from tailrace.kernel.project_pool import Pool

#: What is computed for one block is kept up to so many bytes; the events behind are left to the plain stages.
_BYTES_MAX: Final = 128 << 20


class External:
    """The expressions of one stage that only plain code evaluates."""

    def __init__(self, compilation: Compilation, expressions: Sequence[Expression]) -> None:
        self._compilation = compilation
        self._evaluate = [expression.evaluate for expression in expressions]
        self.count = len(self._evaluate)
        self._slots = list(compilation.paths.values())
        pool = Pool()
        rows = []
        for names in compilation.paths:
            table = pool.table([(pool.bytes(name), len(name)) for name in names], [0])
            rows.append((len(names), table))
        place = pool.table(rows, [1])
        self._pool = pool.placed()
        self._paths = address(self._pool) + place

    def values(self, buffer: Bytes, start: Offsets, end: Offsets) -> tuple[Offsets, Bytes, list[int]]:
        """For the events ``buffer[start[i] : end[i]]``, the first ones where there is no room for all: int64[n,
        expressions, 3], type, address and size of each value; the memory that the addresses lead to; and the numbers of
        the events on which an expression fails (the stage may not ask for it: inside an array of no elements)."""
        spans = self._looked_up(buffer, start, end).tolist()
        view = memoryview(np.ascontiguousarray(buffer))  # type: ignore[arg-type]
        types: list[int] = []
        parts: list[bytes] = []
        failed: list[int] = []
        size = 0
        nothing = [_MISSING] * self.count
        for first, last, row in zip(start.tolist(), end.tolist(), spans, strict=True):
            try:
                values = self._of(view[first:last].tobytes(), row)
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

    def _of(self, document: bytes, row: list[int]) -> list[v.Value]:
        frame = self._compilation.frame()
        frame[ROOT_SLOT] = (v.OBJECT, document)
        for at, slot in enumerate(self._slots):
            kind, start, end = row[3 * at : 3 * at + 3]
            if kind >= 0:
                frame[slot] = (kind, document[start:end]) if kind else None
        return [evaluate(frame) or _MISSING for evaluate in self._evaluate]

    def _looked_up(self, buffer: Bytes, start: Offsets, end: Offsets) -> Offsets:
        paths = len(self._slots)
        found = np.empty((start.size, 3 * paths), np.int64)
        state = np.zeros(project.STATE_SLOTS, np.int64)
        starts, ends = np.ascontiguousarray(start, np.int64), np.ascontiguousarray(end, np.int64)
        places = [address(state), self._paths, paths, address(buffer), address(starts), address(ends)]
        job = np.array([*places, start.size, address(found)], np.int64)
        look_up(address(job))
        return found


_MISSING: Final[v.Value] = (project.MISSING, b"")
