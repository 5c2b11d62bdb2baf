"""A change stream's batches through the kernel, and through the plain stages where the kernel leaves an entry.

A batch becomes a ``KernelBatch``, which goes through *block steps* in the order of the stages: transform, the user's
``$match`` as far as it stands before images, images, the user's stages, the limit of an event's size. A step that
cannot do an entry leaves it to the plain stages, which do it whole, in its place in the stream. The pipeline's state
moves as if it had done all the work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final, TypeAlias

import numpy as np

from tailrace.errors import TailraceError
from tailrace.event.event_block import EventBlock
from tailrace.kernel.batch import PLAIN, KernelBatch, KernelSettings, Step, transform_batch
from tailrace.kernel.images import AddImages, image_steps
from tailrace.kernel.match_ahead import ahead_steps
from tailrace.kernel.transform import EVENT_MAX
from tailrace.kernel.user_stages import user_steps
from tailrace.oplog.cluster_time import ZERO
from tailrace.pipeline.stream import ChangeStreamPipeline
from tailrace.plan.plan import Plan
from tailrace.plan.request import Answer, Emit, OplogBatch, Request, Running

#: Events as they are finished, and what must be answered meanwhile.
Blocks: TypeAlias = Generator[EventBlock | Request, Answer, None]

#: Blocks of fewer bytes are joined with what comes next: a block has a price of its own.
_JOINED_BYTES: Final = 1 << 17


def settings_for(plan: Plan) -> KernelSettings | None:
    """What the transform must know of a plan; ``None`` where every entry needs the plain stages: system or migration
    events, a shard's part of a merged stream."""
    options, profile = plan.options, plan.profile
    if options.show_system_events or options.show_migration_events or options.needs_merge:
        return None
    return KernelSettings(
        scope=options.scope,
        start=plan.start or ZERO,
        token_version=plan.token_version,
        wall_time=profile.wall_time,
        collection_uuid=options.show_expanded_events,
        raw_updates=options.show_raw_update_description,
        disambiguated_paths=options.show_expanded_events and profile.disambiguated_paths,
    )


_STEPS: Final[tuple[Callable[[ChangeStreamPipeline], list[Step] | None], ...]] = (ahead_steps, image_steps, user_steps)


def block_steps(pipeline: ChangeStreamPipeline) -> list[Step] | None:
    """The steps behind the transform, in order; ``None`` where a stage of the stream can only be done plain."""
    steps: list[Step] = []
    for build in _STEPS:
        built = build(pipeline)
        if built is None:
            return None
        steps += built
    if steps:
        steps.append(_check_size)
    return steps


def process_batch(pipeline: ChangeStreamPipeline, batch: OplogBatch) -> Blocks:
    """The events of one batch, in blocks, and requests: send their answers, or throw what the source raised. Afterwards
    the pipeline stands where ``pipeline.process(batch)`` would leave it.

    Ends early when the pipeline is invalidated. Raises what the plain stages raise, after the events that come before
    it.
    """
    settings = settings_for(pipeline.plan)
    steps = block_steps(pipeline)
    if settings is None or steps is None or not batch.raw or not _is_under_way(pipeline):
        yield from _plain(pipeline, batch)
        return
    made = transform_batch(batch.raw, settings)
    yield from _joined(_through(pipeline, made, steps))
    if not pipeline.invalidated:
        pipeline.advance(None, batch.high_water)


def _through(pipeline: ChangeStreamPipeline, made: KernelBatch, steps: list[Step]) -> Blocks:
    """A batch through its steps; from the look-up of images on in pieces, each of which is given before the next."""
    place = next((place for place, step in enumerate(steps) if isinstance(step, AddImages)), len(steps))
    for step in steps[:place]:
        made = yield from step(made)
    images = steps[place] if place < len(steps) else None
    for piece in images.pieces(made) if isinstance(images, AddImages) else (made,):
        finished = piece
        for step in steps[place:]:
            finished = yield from step(finished)
        yield from _given(pipeline, finished)
        if pipeline.invalidated:
            return


def _given(pipeline: ChangeStreamPipeline, made: KernelBatch) -> Blocks:
    """A batch's events, those of the plain stages between those of the kernel."""
    plain = np.flatnonzero(made.kind == PLAIN)
    places = np.searchsorted(made.entry_number, plain)
    first = 0
    # Entries for the plain stages go through them together where no event of the kernel lies between.
    for entries in np.split(plain, np.flatnonzero(np.diff(places)) + 1) if plain.size else ():
        before = int(np.searchsorted(made.entry_number, entries[0]))
        yield from _block(pipeline, made, first, before)
        first = before
        raw = b"".join(made.entry(entry) for entry in entries)
        # What is promised stays as it was: later entries of the batch are not given yet.
        yield from _plain(pipeline, OplogBatch(raw, pipeline.high_water))
        if pipeline.invalidated:
            return
    yield from _block(pipeline, made, first, len(made))


def _block(pipeline: ChangeStreamPipeline, made: KernelBatch, first: int, last: int) -> Blocks:
    if first < last:
        pipeline.advance(made.token(last - 1), pipeline.high_water)
        yield made.block(first, last)


def _is_under_way(pipeline: ChangeStreamPipeline) -> bool:
    """Whether the stream has neither ended nor is it still looking for the event resumed from. Up to that event's time
    tokens have the version of the token given, so the kernel comes in behind it."""
    token = pipeline.plan.start_token
    if token is not None and not token.is_high_water_mark and pipeline.high_water < token.cluster_time:
        return False
    return not pipeline.searching and not pipeline.invalidated


def _plain(pipeline: ChangeStreamPipeline, batch: OplogBatch) -> Blocks:
    """The plain stages' events as blocks; their requests pass through."""
    running: Running = pipeline.process(batch)
    answer: Answer = None
    failure: TailraceError | None = None
    while True:
        try:
            given = running.send(answer) if failure is None else running.throw(failure)
        except StopIteration:
            return
        answer = failure = None
        if isinstance(given, Emit):
            if given.events:
                yield EventBlock.of(given.events)
            continue
        try:
            answer = yield given
        except TailraceError as error:
            failure = error


def _joined(blocks: Blocks) -> Blocks:
    """The same with small blocks joined to larger ones, so that a command among writes does not cut them up."""
    pending: list[EventBlock] = []
    size = 0
    answer: Answer = None
    failure: TailraceError | None = None
    while True:
        try:
            given = blocks.send(answer) if failure is None else blocks.throw(failure)
        except StopIteration:
            break
        except Exception:
            if pending:
                yield EventBlock.join(pending)
            raise
        answer = failure = None
        if isinstance(given, EventBlock):
            pending.append(given)
            size += given.size
            if size < _JOINED_BYTES:
                continue
        if pending:
            yield EventBlock.join(pending)
            pending, size = [], 0
        if not isinstance(given, EventBlock):
            try:
                answer = yield given
            except TailraceError as error:
                failure = error
    if pending:
        yield EventBlock.join(pending)


def _check_size(made: KernelBatch) -> Generator[Request, Answer, KernelBatch]:
    """Events that a step has made too large are the plain stages', which say so."""
    yield from ()
    return made.left_plain_by_event(made.end - made.start >= EVENT_MAX)
