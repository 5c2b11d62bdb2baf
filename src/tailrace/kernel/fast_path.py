"""A change stream's batches through the kernel, and through the plain stages where the kernel leaves an entry.

This is what Spark's readers and other bulk consumers drive. The events come in stream order as runs of one buffer,
ready for ``tailrace.kernel.locate``; the pipeline's state moves as if it had done all the work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from tailrace.event.change_event import ChangeEvent
from tailrace.event.event_block import OPERATION_TYPES, EventBlock
from tailrace.expression.match import tree
from tailrace.kernel.arrays import gather, locate
from tailrace.kernel.batch import EVENT, PLAIN, SKIPPED, KernelBatch, KernelSettings, Offsets, transform_batch
from tailrace.kernel.match import FAILS, PASSES, UNKNOWN
from tailrace.kernel.match_program import MatchProgram, match_program
from tailrace.oplog.cluster_time import ZERO
from tailrace.pipeline.stream import ChangeStreamPipeline
from tailrace.plan.plan import Plan
from tailrace.plan.request import OplogBatch, Running

#: Runs the plain stages and answers their requests: ``functools.partial(drive, source=source)``.
Run: TypeAlias = Callable[[Running], Iterator[list[ChangeEvent]]]

#: Where the token lies in an event, and how far into ``ns`` the database's text is: behind ``{db: `` and its length.
_TOKEN_PLACE = 9
_DATABASE_PLACE = 12
#: The numbers of the kernel's four operation types by their first letters, which differ.
_OPERATIONS = np.zeros(256, np.uint8)
for _number, _name in enumerate(OPERATION_TYPES[1:5], 1):
    _OPERATIONS[ord(_name[0])] = _number


def settings_for(plan: Plan, *, without_stages: bool = False) -> KernelSettings | None:
    """What the kernel must know of a plan; ``None`` where every entry needs the plain stages: images to look up, user's
    stages, system or migration events, a shard's part of a merged stream. ``without_stages``:
    of the events before the user's stages."""
    options, profile = plan.options, plan.profile
    if (
        (options.pipeline and not without_stages)
        or options.full_document != "default"
        or options.full_document_before_change != "off"
        or options.show_system_events
        or options.show_migration_events
        or options.needs_merge
    ):
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


def process_batch(pipeline: ChangeStreamPipeline, batch: OplogBatch, run: Run) -> Iterator[EventBlock]:
    """The events of one batch. Afterwards the pipeline stands where ``pipeline.process(batch)`` would leave it.

    Ends early when the pipeline is invalidated. What the source and the plain stages raise passes through, after the
    events that come before it.
    """
    matching = _matching(pipeline)
    settings = settings_for(pipeline.plan, without_stages=matching is not None)
    if settings is None or not batch.raw or not _is_under_way(pipeline):
        yield from _plain(pipeline, batch, run)
        return
    made = transform_batch(batch.raw, settings)
    if matching is not None:
        made = _matched(made, matching)
    *stretches, last = _stretches(made)
    for entries in stretches:
        if made.kind[entries[0]] == EVENT:
            yield _block(made, entries)
            continue
        # What is promised stays as it was: later entries of the batch are not given yet.
        yield from _plain(pipeline, OplogBatch(_entries(made, entries), pipeline.high_water), run)
        if pipeline.invalidated:
            return
    yield from _plain(pipeline, OplogBatch(_entries(made, last), batch.high_water), run)


def _matching(pipeline: ChangeStreamPipeline) -> MatchProgram | None:
    """The program of the user's stages, where they are nothing but ``$match`` by the bytes of strings."""
    user, options = pipeline.user_stages, pipeline.plan.options
    nodes = [stage.parsed for stage in user.stages if stage.name == "$match"]
    if not nodes or len(nodes) < len(user.stages) or user.split_large_event or options.collation is not None:
        return None
    return match_program(tree.And(tuple(nodes)))  # type: ignore[arg-type]


def _matched(made: KernelBatch, matching: MatchProgram) -> KernelBatch:
    """The batch after the user's ``$match``: events that fail it are skipped, and entries of which the program does not
    know are left to the plain stages."""
    answers = matching.answers(made.events, made.event_start)
    is_event = made.kind == EVENT
    passes = is_event & (answers == PASSES)
    kind = made.kind.copy()
    kind[is_event & (answers == FAILS)] = SKIPPED
    kind[is_event & (answers == UNKNOWN)] = PLAIN
    starts = np.where(passes, made.event_start[:-1], 0)
    events, offsets = gather(made.events, starts, np.where(passes, made.event_start[1:], 0))
    return KernelBatch(made.raw, kind, made.entry_start, made.entry_end, events, offsets.astype(np.int64))


def _is_under_way(pipeline: ChangeStreamPipeline) -> bool:
    """Whether the stream has neither ended nor is it still looking for the event resumed from. Up to that event's time
    tokens have the version of the token given, so the kernel comes in behind it."""
    token = pipeline.plan.start_token
    if token is not None and not token.is_high_water_mark and pipeline.high_water < token.cluster_time:
        return False
    return not pipeline.searching and not pipeline.invalidated


def _plain(pipeline: ChangeStreamPipeline, batch: OplogBatch, run: Run) -> Iterator[EventBlock]:
    for events in run(pipeline.process(batch)):
        if events:
            yield EventBlock.of(events)


def _entries(made: KernelBatch, entries: Offsets) -> bytes:
    return b"".join(made.entry(entry) for entry in entries)


def _block(made: KernelBatch, entries: Offsets) -> EventBlock:
    """The events of these entries. Each begins with its ``_id``, and has a namespace of database and collection."""
    offsets = np.append(made.event_start[entries], made.event_start[entries[-1] + 1])
    parts = locate(made.events, offsets, ("cluster_time", "operation_type", "database", "collection"))
    token = offsets[:-1] + _TOKEN_PLACE
    size = sum(made.events[token + place].astype(np.int64) << 8 * place for place in range(4))
    return EventBlock(
        made.events,
        offsets,
        parts["cluster_time"].start.view(np.uint64),
        _OPERATIONS[made.events[parts["operation_type"].start]],
        token,
        token + size,
        parts["database"].start - _DATABASE_PLACE,
        parts["collection"].end + 2,
    )


def _stretches(made: KernelBatch) -> list[Offsets]:
    """The entries that matter, as indices: in turn some that the kernel made and some for the plain stages.

    The last stretch is one for the plain stages, though it may be empty. The last event is left to them in any case, so
    that the pipeline knows the token that it would resume after.
    """
    events = np.flatnonzero(made.kind == EVENT)
    if events.size:
        made.kind[events[-1]] = PLAIN
    entries = np.flatnonzero(made.kind != SKIPPED)
    return np.split(entries, np.flatnonzero(np.diff(made.kind[entries])) + 1)
