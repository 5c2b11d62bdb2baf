"""The user's ``$match`` on blocks of events, as far as it stands before images."""

from __future__ import annotations

from tailrace.core.expression.match import tree
from tailrace.core.kernel.batch import KernelStep
from tailrace.core.kernel.match_program import match_program
from tailrace.core.kernel.user_stages import match_step
from tailrace.core.pipeline.shard import ChangeStreamPipeline


def ahead_steps(pipeline: ChangeStreamPipeline) -> list[KernelStep] | None:
    """The steps of ``MatchAhead`` before images. None are needed where no images are looked up; ``None`` where only the
    plain stages can."""
    pushdown = pipeline.pushdown
    if not pushdown.looks_up or not pushdown.before_images:
        return []
    if not pushdown.order.simple:
        return None
    program = match_program(tree.And(tuple(one.node for one in pushdown.before_images)))
    return None if program is None else [match_step(program)]
