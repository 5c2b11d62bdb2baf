"""The user's pipeline over a block of finished events.

It is compiled once into a row of block programs: the ``$match`` stages, the projections and the replacements that
compiled code knows. If these end before the pipeline does, only events that passed go through the other stages, in
plain code and event by event; so does an event about which a program cannot decide. An event on which the plain code
fails is left to the caller, and so is everything after it: the plain stages then raise the error at its place.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tailrace.core.event.event_block import Bytes, Offsets
from tailrace.core.expression import CompiledPipeline
from tailrace.core.expression.match import tree
from tailrace.core.expression.stages.compiled import Stage
from tailrace.core.kernel import event_record
from tailrace.core.kernel.arrays import gather
from tailrace.core.kernel.batch import NOTED, KernelBatch, KernelStep
from tailrace.core.kernel.match_program import MatchProgram, match_program
from tailrace.core.kernel.plain_match import PlainMatch, plain_match
from tailrace.core.kernel.project_finish import GIVEN_MAX
from tailrace.core.kernel.project_program import (
    FAILS,
    LEFT,
    NOT_KNOWN,
    PASSES,
    Run,
    StageProgram,
    Tokens,
    copy_program,
    places_program,
    stage_program,
    strip_program,
)
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.request import Answer, Request

#: A verdict inside this module: the event waits for the plain code.
_WAITS: Final = 4
#: How many bytes of the plain results of one block are kept; what comes after is left to the plain stages.
_PLAIN_MAX: Final = 128 << 20


class _Step(NamedTuple):
    """A program; the number of the user's stage that the plain code goes on with where the program does not know; and
    whether the events that come to it have the places of fields that a stage may set."""

    program: MatchProgram | PlainMatch | StageProgram
    stage: int
    placed: bool


class _Waiting(NamedTuple):
    """An event that the plain code goes on with: its number, the stage, and what it is by then."""

    number: int
    stage: int
    placed: bool
    document: bytes


class StagedEvents(NamedTuple):
    """What the user's stages make of ``n`` events.

    ``verdict``   uint8[n]: ``PASSES``, ``FAILS`` (filtered out) or ``NOT_KNOWN``: the plain stages have to do it
    ``buffer``    uint8: event ``i``, where it passes, is ``buffer[offsets[i] : offsets[i + 1]]``
    ``offsets``   int64[n + 1]
    ``places``    int64[n, 4]: where the token and the document ``ns`` of an event that passes start and end in the
                  buffer; 0 and 0 where there is no ``ns``. ``None``: buffer and offsets are those that were given
    """

    verdict: Bytes
    buffer: Bytes
    offsets: Offsets
    places: Offsets | None


class BlockStages:
    """The user's stages as block programs, and the plain ones for the rest.

    ``compiled``  how many of the stages have a program
    ``ahead``     of parts of the ``$match`` stages that may be asked before all stages: what certainly fails goes first
    """

    def __init__(
        self, user: CompiledPipeline, steps: Sequence[_Step], compiled: int, ahead: MatchProgram | None = None
    ) -> None:
        self._user, self._steps, self.compiled, self._ahead = user, tuple(steps), compiled, ahead
        self._is_whole = compiled == len(user.stages)
        changes = any(isinstance(step.program, StageProgram) for step in steps)
        # After the last change an event is checked as one that is given to the user.
        self._checked = steps[-1] if steps and self._is_whole and changes and not user.keeps_places else None
        if self._checked is not None and not isinstance(self._checked.program, StageProgram):
            self._checked = None
        self._changes = changes
        self._only_matches = all(stage.name == "$match" for stage in user.stages)
        self._finish = strip_program() if user.keeps_places else copy_program()

    def run(
        self,
        buffer: Bytes,
        offsets: Offsets,
        token_start: Offsets | None,
        token_end: Offsets | None,
        noted: Offsets | None = None,
    ) -> StagedEvents:
        """What becomes of the events ``buffer[offsets[i] : offsets[i + 1]]``, whose resume tokens are where the others
        say; without these, of documents that are no events. An event of no bytes fails. ``noted``:
        ``EventBlock.places`` of the events."""
        given = Run(buffer, offsets, np.where(np.diff(offsets) > 0, PASSES, FAILS).astype(np.uint8))
        tokens = None if token_start is None or token_end is None else Tokens(buffer, token_start, token_end)
        if self._ahead is not None:
            given.verdict[self._ahead.answers(buffer, offsets, noted) == FAILS] = FAILS
        run, waiting = given, []
        for step in self._steps:
            before = run
            if isinstance(step.program, MatchProgram | PlainMatch):
                run = _matched(step.program, before, noted)
            else:
                noted = None  # of the events that were given
                run = step.program.run(before, tokens if step is self._checked else None)
            waiting += _set_aside(before, run, NOT_KNOWN, step)
        if not self._is_whole:
            placed = self._user.sets_event_fields and any(step.placed for step in self._steps)
            waiting += _set_aside(run, run, PASSES, _Step(self._finish, self.compiled, placed))
        if waiting or (self._changes and self._checked is None):
            run = self._finished(run, waiting, tokens)
        verdict = np.where(run.verdict >= NOT_KNOWN, NOT_KNOWN, run.verdict).astype(np.uint8)
        return StagedEvents(verdict, run.buffer, run.offsets, run.places)

    def _finished(self, run: Run, waiting: list[_Waiting], tokens: Tokens | None) -> Run:
        """The events of a run and those that waited, in order and finished."""
        verdict = run.verdict.copy()
        numbers, documents = self._plain(waiting, verdict)
        if self._only_matches or (self._checked is not None and not documents):
            return Run(run.buffer, run.offsets, verdict, run.places)
        if documents:
            run = _joined(run, numbers, documents)
        return self._finish.run(Run(run.buffer, run.offsets, verdict), tokens)

    def _plain(self, waiting: list[_Waiting], verdict: Bytes) -> tuple[list[int], list[bytes]]:
        """The rest of the stages for each event that waits: the numbers of those that pass, and what they become."""
        numbers: list[int] = []
        documents: list[bytes] = []
        user, size = self._user, 0
        in_order = sorted(waiting)
        for place, one in enumerate(in_order):
            try:
                document = one.document
                if user.sets_event_fields and not one.placed:
                    document = user.with_places(document)
                result = user.apply_rest(document, one.stage)
            except Exception:  # noqa: BLE001  whatever it is, the plain stages raise it again, at its place
                size = _PLAIN_MAX + 1
                result = None
            if size > _PLAIN_MAX:
                verdict[[left.number for left in in_order[place:]]] = LEFT
                break
            verdict[one.number] = FAILS if result is None else PASSES
            if result is not None:
                numbers.append(one.number)
                documents.append(result)
                size += len(result)
        return numbers, documents


def _matched(program: MatchProgram | PlainMatch, run: Run, noted: Offsets | None) -> Run:
    if isinstance(program, MatchProgram):
        answers = program.answers(run.buffer, run.offsets, noted)
    else:
        answers = program.answers(run.buffer, run.offsets)
    return Run(run.buffer, run.offsets, np.where(run.verdict == PASSES, answers, run.verdict).astype(np.uint8))


def _set_aside(before: Run, after: Run, verdict: int, step: _Step) -> list[_Waiting]:
    """The events of a verdict wait for the plain code, in the form that they had before the step."""
    chosen = np.flatnonzero(after.verdict == verdict)
    if not chosen.size:
        return []
    after.verdict[chosen] = _WAITS
    view = memoryview(np.ascontiguousarray(before.buffer))  # type: ignore[arg-type]
    spans = zip(chosen.tolist(), before.offsets[chosen].tolist(), before.offsets[chosen + 1].tolist(), strict=True)
    return [_Waiting(index, step.stage, step.placed, view[start:end].tobytes()) for index, start, end in spans]


def _joined(run: Run, numbers: list[int], documents: list[bytes]) -> Run:
    """The events of a run that pass, and ``documents`` at their ``numbers``, one after another."""
    passing = run.verdict == PASSES
    data = np.frombuffer(b"".join(documents), np.uint8)
    places = np.cumsum([0] + [len(document) for document in documents])
    if not passing.any():
        sizes = np.zeros(passing.size, np.int64)
        sizes[numbers] = np.diff(places)
        return Run(data, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), run.verdict)
    start, end = np.where(passing, run.offsets[:-1], 0), np.where(passing, run.offsets[1:], 0)
    start[numbers], end[numbers] = places[:-1] + run.buffer.size, places[1:] + run.buffer.size
    gathered, offsets = gather(np.concatenate([run.buffer, data]), start, end)
    return Run(gathered, offsets.astype(np.int64), run.verdict)


def compile_user_stages(
    user: CompiledPipeline, *, collated: bool = False, ahead: Sequence[tree.Node] = ()
) -> BlockStages | None:
    """The user's pipeline for blocks of events; ``None`` where it has no stage.

    ``collated``  strings are compared in an order that compiled code does not know
    ``ahead``     parts of its ``$match`` stages that may be asked of an event before all stages, and never fail
    """
    if not user.stages:
        return None
    steps: list[_Step] = []
    placed = False
    compiled = 0
    for place, stage in enumerate(user.stages):
        program = _program(stage, collated=collated)
        if program is None:
            break
        if isinstance(program, StageProgram) and user.sets_event_fields and not placed:
            documents_only = user.event_places == "documents"
            program_of_places = places_program(expanded=user.show_expanded_events, documents_only=documents_only)
            steps.append(_Step(program_of_places, place, placed))
            placed = True
        steps.append(_Step(program, place, placed))
        compiled = place + 1
    asked = None if collated or not ahead else match_program(tree.And(tuple(ahead)))
    return BlockStages(user, steps, compiled, asked)


def _program(stage: Stage, *, collated: bool) -> MatchProgram | PlainMatch | StageProgram | None:
    if stage.name == "$match":
        parsed: Any = stage.parsed
        return None if collated else match_program(parsed) or plain_match(parsed)
    return stage_program(stage)


# ── the step of a stream ─────────────────────────────────────────────────────────────────────────────────────────────


def user_steps(pipeline: ChangeStreamPipeline) -> list[KernelStep] | None:
    """The steps of the user's stages; ``None`` where only the plain stages can do them: a ``$match`` that is asked of
    the entry's session, and a stream that is resumed from a fragment of an event."""
    user, plan, pushdown = pipeline.user_stages, pipeline.plan, pipeline.pushdown
    if pushdown.entry_test is not None and pushdown.entry_test.asks_for_session:
        return None
    token = plan.start_token
    if user.split_large_event and token is not None and token.fragment_num is not None:
        return None
    moved = [one.node for one in pushdown.conjuncts if one.moved and not one.fails]
    stages = compile_user_stages(user, collated=plan.options.collation is not None, ahead=moved)
    steps = [] if stages is None else [stages_step(stages)]
    return [*steps, _leave_large] if user.split_large_event else steps


def match_step(program: MatchProgram) -> KernelStep:
    """Removes the events that fail, and leaves entries that the program cannot decide to the plain stages."""

    def step(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
        yield from ()
        block = made.block()
        answers = program.answers(block.buffer, block.offsets, block.places)
        kept = made.kept(answers != FAILS)
        return kept.left_plain_by_event(answers[answers != FAILS] == NOT_KNOWN)

    return step


def stages_step(stages: BlockStages) -> KernelStep:
    """The user's stages on a batch. What they do not know is left to the plain stages by its entry."""

    def step(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
        yield from ()
        if not len(made):
            return made
        block = made.block()
        staged = stages.run(block.buffer, block.offsets, block.token_start, block.token_end, block.places)
        if staged.places is not None:
            made = made.rewritten(staged.buffer, _records(made.records, staged.offsets, staged.places))
        left = staged.verdict != FAILS
        return made.kept(left).left_plain_by_event(staged.verdict[left] == NOT_KNOWN)

    return step


def _records(records: Offsets, offsets: Offsets, places: Offsets) -> Offsets:
    """The records of events that were rewritten: of what is in an event, only its token and ``ns`` are known."""
    made = records.copy()
    made[:, event_record.START // 8], made[:, event_record.END // 8] = offsets[:-1], offsets[1:]
    made[:, _PLACES] = places
    made[:, _LOST] = 0
    made[:, NOTED] = 0
    return made


_PLACES: Final = [
    slot // 8 for slot in (event_record.TOKEN_START, event_record.TOKEN_END, event_record.NS_START, event_record.NS_END)
]
_LOST: Final = [slot // 8 for slot in (event_record.KEY_START, event_record.KEY_END, event_record.SPLICE)]


def _leave_large(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
    """An event that may have to be split is left to the plain stages."""
    yield from ()
    return made.left_plain_by_event(made.end - made.start >= GIVEN_MAX)
