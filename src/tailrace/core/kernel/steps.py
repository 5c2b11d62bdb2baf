"""The block steps: what a batch of finished events goes through after the transform, in the order of the stages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final

from tailrace.core.kernel.batch import KernelBatch, KernelStep
from tailrace.core.kernel.blocks import Blocks
from tailrace.core.kernel.images import AddImages, image_steps
from tailrace.core.kernel.insert_keys import insert_key_steps
from tailrace.core.kernel.job import EVENT_MAX
from tailrace.core.kernel.match_ahead import ahead_steps
from tailrace.core.kernel.user_stages import user_steps
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.request import Answer, AnswerTooLargeError, Request

_STEPS: Final[tuple[Callable[[ChangeStreamPipeline], list[KernelStep] | None], ...]] = (
    insert_key_steps,
    ahead_steps,
    image_steps,
    user_steps,
)


def block_steps(pipeline: ChangeStreamPipeline) -> list[KernelStep] | None:
    """The steps after the transform, in order; ``None`` where a stage of the stream can only be done plain."""
    steps: list[KernelStep] = []
    for build in _STEPS:
        built = build(pipeline)
        if built is None:
            return None
        steps += built
    if steps:
        steps.append(_check_size)
    return steps


def through(
    pipeline: ChangeStreamPipeline,
    made: KernelBatch,
    steps: Sequence[KernelStep],
    give: Callable[[KernelBatch], Blocks],
) -> Blocks:
    """A batch through its steps; from the look-up of images on in pieces, each of which is given before the next."""
    place = next((place for place, step in enumerate(steps) if isinstance(step, AddImages)), len(steps))
    for step in steps[:place]:
        made = yield from step(made)
    images = steps[place] if place < len(steps) else None
    for piece in images.pieces(made) if isinstance(images, AddImages) else (made,):
        finished = piece
        try:
            for step in steps[place : place + 1]:
                finished = yield from step(finished)
        except AnswerTooLargeError:
            continue  # the next piece begins where this one does
        for step in steps[place + 1 :]:
            finished = yield from step(finished)
        yield from give(finished)
        if pipeline.invalidated:
            return


def block_of(pipeline: ChangeStreamPipeline, made: KernelBatch, first: int, last: int) -> Blocks:
    """The events [first, last) as a block, if there are any; the pipeline moves on to the last one's token."""
    if first < last:
        pipeline.advance(made.token(last - 1), pipeline.high_water)
        yield made.block(first, last)


def _check_size(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
    """Events that a step has made too large are left to the plain stages, which raise."""
    yield from ()
    return made.left_plain_by_event(made.end - made.start > EVENT_MAX)
