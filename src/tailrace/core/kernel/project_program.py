"""The parsed projections and replacements as programs for ``tailrace.core.kernel.project_stage``."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.expression.language.expression import Expression
from tailrace.core.expression.stages.compiled import Stage
from tailrace.core.expression.stages.projection import Projection
from tailrace.core.expression.values import value as v
from tailrace.core.kernel import project, project_finish, project_stage
from tailrace.core.kernel.batch import address
from tailrace.core.kernel.lent import lend
from tailrace.core.kernel.project_external import External
from tailrace.core.kernel.project_pool import Pool

PASSES: Final = project_stage.PASSES
FAILS: Final = project_stage.FAILS
NOT_KNOWN: Final = project_stage.NOT_KNOWN
#: The rest of a block whose results need too much room: left to the plain stages.
LEFT: Final = 3

#: More names than this at one level are looked up faster by the reference's sets; and each needs its bit in a word.
_NAMES_MAX: Final = 60
#: If one event's result needs more room than this, it is left to the plain stages, and so is the rest of a block after
#: that many bytes of results.
_EVENT_ROOM: Final = 40 << 20
_BLOCK_ROOM: Final = 128 << 20
_MARGIN: Final = 1 << 12


class Run(NamedTuple):
    """Events one after another in one buffer: event ``i`` is ``buffer[offsets[i] : offsets[i + 1]]`` (int64[n + 1])
    while its ``verdict`` (uint8[n]) is ``PASSES``. ``places``, of the last step: int64[n, 4], where token and ``ns``
    start and end."""

    buffer: Bytes
    offsets: Offsets
    verdict: Bytes
    places: Offsets | None = None


class Tokens(NamedTuple):
    """The original resume tokens of a block's events, which must still be in ``_id`` at the end."""

    buffer: Bytes
    start: Offsets
    end: Offsets


class _NotCompiledError(Exception):
    """A stage that this module has no program for."""


def room_for(size: int) -> Bytes:
    """Memory for the events that a step writes. Only what is written to is ever backed by pages."""
    return lend(size)


class StageProgram:
    """One step over a block of events: what an operation of ``project_stage`` does with its target in the pool."""

    def __init__(
        self,
        operation: int,
        pool: Pool | None = None,
        target: int = 0,
        *,
        places_mode: int = 0,
        external: External | None = None,
    ) -> None:
        self._operation, self._places_mode, self._external = operation, places_mode, external
        self._pool = None if pool is None else pool.placed()
        self._target = 0 if self._pool is None else address(self._pool) + target

    def run(self, run: Run, tokens: Tokens | None = None) -> Run:
        """The events after the step. With ``tokens`` they are checked as events that are given to the user."""
        count = run.verdict.size
        verdict = run.verdict.copy()
        given = np.ascontiguousarray(run.offsets, np.int64)
        computed, memory = self._computed(run, verdict)
        offsets = np.zeros(count + 1, np.int64)
        places = np.zeros((count, 4), np.int64)
        spans = None if tokens is None else np.ascontiguousarray(np.stack([tokens.start, tokens.end], 1), np.int64)
        state = np.zeros(project.STATE_SLOTS, np.int64)
        size = int(np.diff(given)[verdict == PASSES].sum())
        out = room_for(size + size // 8 + 128 * count + _MARGIN)
        slots = {
            project_stage.OPERATION: self._operation,
            project_stage.TARGET: self._target,
            project_stage.PLACES_MODE: self._places_mode,
            project_stage.STATE: address(state),
            project_stage.BASE: address(run.buffer),
            project_stage.GIVEN: address(given),
            project_stage.COUNT: count,
            project_stage.VERDICTS: address(verdict),
            project_stage.OFFSETS: address(offsets),
            project_stage.TOKENS: 0 if spans is None else address(spans),
            project_stage.TOKEN_BASE: 0 if tokens is None else address(tokens.buffer),
            project_stage.PLACES: address(places),
            project_stage.EXTERNAL_ROWS: address(computed),
            project_stage.EXTERNAL_ROW: project.EXTERNAL_SIZE * computed.shape[1],
        }
        job = np.zeros(project_stage.JOB_SLOTS, np.int64)
        for slot, value in slots.items():
            job[slot // 8] = value
        out = _worked_through(job, state, out, verdict, offsets)
        del memory
        return Run(out, offsets, verdict, None if tokens is None else places)

    def _computed(self, run: Run, verdict: Bytes) -> tuple[Offsets, Bytes]:
        """What the plain code computes for each event: int64[n, expressions, 3], and the memory that it leads to. An
        event on which it raises is not known, and those that it has no room for are left."""
        external = self._external
        if external is None:
            return np.zeros((1, 0, 3), np.int64), verdict
        passing = np.flatnonzero(verdict == PASSES)
        values, memory, failed = external.values(run.buffer, run.offsets[passing], run.offsets[passing + 1])
        verdict[passing[failed]] = NOT_KNOWN
        verdict[passing[len(values) :]] = LEFT
        rows = np.zeros((verdict.size, external.count, 3), np.int64)
        rows[passing[: len(values)]] = values
        return rows, memory


def _worked_through(job: Offsets, state: Offsets, out: Bytes, verdict: Bytes, offsets: Offsets) -> Bytes:
    """Run the job, with more room as it is needed; gives what is written."""
    written = 0
    while True:
        job[project_stage.OUT // 8] = address(out)
        job[project_stage.NEXT // 8] = address(out) + written
        state[project.OUT_END // 8] = address(out) + out.size
        full = project_stage.stage(address(job))
        written = int(job[project_stage.NEXT // 8]) - address(out)
        if not full:
            return out[:written]
        index = int(job[project_stage.INDEX // 8])
        if written > _BLOCK_ROOM:
            verdict[index:] = np.where(verdict[index:] == PASSES, LEFT, verdict[index:])
            offsets[index:] = written
            return out[:written]
        if out.size - written >= _EVENT_ROOM:
            verdict[index] = NOT_KNOWN
            continue
        larger = room_for(2 * out.size)
        larger[:written] = out[:written]
        out = larger


def stage_program(stage: Stage) -> StageProgram | None:
    """The program of a projection or a replacement; ``None`` where it has none."""
    pool, expressions = Pool(), _Expressions(stage.compilation.places)
    try:
        if isinstance(stage.parsed, Projection):
            operation, target = project_stage.PROJECT, _node(pool, stage.parsed, expressions)
        elif stage.name in ("$replaceRoot", "$replaceWith") and isinstance(stage.parsed, Expression):
            operation, target = project_stage.REPLACE, expressions.place(pool, stage.parsed)
        else:
            return None
    except _NotCompiledError:
        return None
    left = expressions.external
    return StageProgram(operation, pool, target, external=External(stage.compilation, left) if left else None)


def places_program(*, expanded: bool, documents_only: bool = False) -> StageProgram:
    """Puts back the places of an event's absent fields (``with_places``)."""
    mode = expanded * project_finish.EXPANDED | documents_only * project_finish.DOCUMENTS_ONLY
    pool = Pool()
    names = [(pool.bytes(name), len(name)) for name in project_finish.PLACE_NAMES]
    return StageProgram(project_stage.SET_PLACES, pool, pool.table(names, [0]), places_mode=mode)


def strip_program() -> StageProgram:
    """Takes out the places of fields that went (``stripped``)."""
    return StageProgram(project_stage.STRIP)


def copy_program() -> StageProgram:
    """Leaves each event as it is."""
    return StageProgram(project_stage.COPY)


def _node(pool: Pool, node: Projection, expressions: _Expressions) -> int:
    names = {*node.names, *node.order}
    if len(names) > _NAMES_MAX:
        raise _NotCompiledError
    rows = []
    for name in node.order:
        expression = node.expressions.get(name)
        if expression is not None:
            what, target = project.EXPRESSION, expressions.place(pool, expression)
        else:
            what, target = project.CHILD, _node(pool, node.children[name], expressions)
        rows.append((pool.bytes(name), len(name), what, target))
    # A name without a target points nowhere in particular.
    rows += [(pool.bytes(name), len(name), project.NAMED, 0) for name in node.names - set(node.order)]
    table = pool.table(rows, [0, 3])
    empty = pool.bytes(v.EMPTY_OBJECT[1])
    keeps = int(node.mode == "include")
    words = [
        keeps,
        int(node.places) + int(node.element_places),
        int(node.computes),
        len(node.order),
        len(rows),
        table,
        empty,
    ]
    return pool.words(words, [5, 6])


#: Which word of an instruction is a place in the pool.
_POINTER: Final = {project.CONSTANT: 2, project.PATH: 2, project.PART: 1}


class _Expressions:
    """The expressions of one stage as instructions; ``external`` are the parts that have none."""

    def __init__(self, places: bool) -> None:
        self._places = places
        self.external: list[Expression] = []

    def place(self, pool: Pool, expression: Expression) -> int:
        """Where the instructions of an expression are in the pool."""
        rows: list[tuple[int, int, int, int]] = []
        self._write(pool, expression, rows)
        rows.append((project.END, 0, 0, 0))
        flat = [word for row in rows for word in row]
        pointers = [4 * number + _POINTER[row[0]] for number, row in enumerate(rows) if row[0] in _POINTER]
        return pool.words(flat, pointers)

    def _write(self, pool: Pool, expression: Expression, rows: list[tuple[int, int, int, int]]) -> None:
        if expression.kind == "constant":
            kind, data = (project.MISSING, b"") if expression.value is None else expression.value
            rows.append((project.CONSTANT, kind, pool.bytes(data), len(data)))
        elif expression.kind == "field" and expression.name == "ROOT":
            names = [(pool.bytes(name), len(name)) for name in expression.path]
            rows.append((project.PATH, len(names), pool.table(names, [0]), 0))
        elif expression.kind in ("object", "array"):
            is_object = expression.kind == "object"
            names_of = expression.names if is_object else [b"%d" % index for index in range(len(expression.args))]
            rows.append((project.OPEN, 0, 0, 0))
            for name, part in zip(names_of, expression.args, strict=True):
                rows.append((project.PART, pool.bytes(name), len(name), 0))
                self._write(pool, part, rows)
                rows.append((project.SETTLE, int(is_object and self._places), int(not is_object), 0))
            rows.append((project.CLOSE, v.OBJECT if is_object else v.ARRAY, 0, 0))
        else:
            rows.append((project.EXTERNAL, len(self.external), 0, 0))
            self.external.append(expression)
