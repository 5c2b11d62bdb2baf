"""The user's stages on blocks of events."""

from __future__ import annotations

from collections.abc import Generator

from tailrace.expression.match import tree
from tailrace.kernel.batch import KernelBatch, Step
from tailrace.kernel.match import FAILS, UNKNOWN
from tailrace.kernel.match_program import MatchProgram, match_program
from tailrace.pipeline.shard import ChangeStreamPipeline
from tailrace.plan.request import Answer, Request


def user_steps(pipeline: ChangeStreamPipeline) -> list[Step] | None:
    """The steps of the user's stages; ``None`` where only the plain stages can do them."""
    if not pipeline.user_stages.stages and not pipeline.user_stages.split_large_event:
        return []
    program = _matching(pipeline)
    return None if program is None else [match_step(program)]


def match_step(program: MatchProgram) -> Step:
    """Takes away the events that fail, and leaves entries of which the program does not know to the plain stages."""

    def step(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
        yield from ()
        block = made.block()
        answers = program.answers(block.buffer, block.offsets)
        kept = made.kept(answers != FAILS)
        return kept.left_plain_by_event(answers[answers != FAILS] == UNKNOWN)

    return step


def _matching(pipeline: ChangeStreamPipeline) -> MatchProgram | None:
    """The program of the user's stages, where they are nothing but ``$match`` by the bytes of strings."""
    user, options = pipeline.user_stages, pipeline.plan.options
    nodes = [stage.parsed for stage in user.stages if stage.name == "$match"]
    if not nodes or len(nodes) < len(user.stages) or user.split_large_event or options.collation is not None:
        return None
    return match_program(tree.And(tuple(nodes)))  # type: ignore[arg-type]
