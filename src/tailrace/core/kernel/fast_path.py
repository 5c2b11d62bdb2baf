"""A change stream's batches through the kernel, and through the plain stages where the kernel leaves an entry.

A batch becomes a ``KernelBatch``, which goes through *block steps* in the order of the stages: transform, the user's
``$match`` as far as it stands before images, images, the user's stages, the limit of an event's size. A step that
cannot handle an entry leaves it to the plain stages, which process all of it at its place in the stream. The pipeline's
state changes as if it had done all the work itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from tailrace.core.kernel.batch import (
    CHAIN_ENTRY,
    MEMBER_ENTRY,
    PLAIN,
    SKIPPED,
    KernelBatch,
    KernelSettings,
    transform_batch,
)
from tailrace.core.kernel.blocks import Blocks, joined, of_plain_stages
from tailrace.core.kernel.steps import block_of, block_steps, through
from tailrace.core.kernel.unwind import Unwinding
from tailrace.core.oplog.cluster_time import ZERO
from tailrace.core.oplog.entry import parse_entry
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.request import OplogBatch


def settings_for(plan: Plan) -> KernelSettings | None:
    """What the transform must know about a plan; ``None`` where every entry needs the plain stages: system or migration
    events."""
    options, profile = plan.options, plan.profile
    if options.show_system_events or options.show_migration_events:
        return None
    return KernelSettings(
        scope=options.scope,
        start=plan.start or ZERO,
        token_version=plan.token_version,
        wall_time=plan.shows_wall_time,
        collection_uuid=options.show_expanded_events,
        raw_updates=options.show_raw_update_description,
        disambiguated_paths=options.show_expanded_events and profile.disambiguated_paths,
        unwinds_apply_ops_without_session=profile.unwinds_apply_ops_without_session,
        multi_op_is_no_transaction=profile.multi_op_is_no_transaction,
        ns_type=profile.ns_type,
        refuses_old_updates=profile.refuses_old_updates,
        replacements_may_have_v=profile.replacements_may_have_v,
    )


def process_batch(pipeline: ChangeStreamPipeline, batch: OplogBatch) -> Blocks:
    """The events of one batch, in blocks, and requests: send their answers, or throw what the source raised. Afterwards
    the pipeline stands where ``pipeline.process(batch)`` would leave it.

    For a shard's part of a merged stream, the blocks leave out what is only for the merge: witnesses (while the
    pipeline ``searches_unmatched``), and the announcements of new shards, which the router's stages leave out.

    Ends early when the pipeline is invalidated. Raises what the plain stages raise, after the events that come before
    it.
    """
    settings = None if _is_shards_own(pipeline) else settings_for(pipeline.plan)
    steps = block_steps(pipeline)
    if settings is None or steps is None or not batch.raw or not _is_under_way(pipeline):
        yield from of_plain_stages(pipeline.process(batch), pipeline)
        return
    made = _remembered(pipeline, transform_batch(batch.raw, settings))
    give = partial(_given, Unwinding(pipeline, settings, steps))
    yield from joined(through(pipeline, made, steps, give))
    if not pipeline.invalidated:
        pipeline.advance(None, batch.high_water)


def _given(unwinding: Unwinding, made: KernelBatch) -> Blocks:
    """A batch's events, and between them those of the entries that the kernel left."""
    pipeline = unwinding.pipeline
    left = np.flatnonzero((made.kind == PLAIN) | (made.kind == CHAIN_ENTRY))
    places = np.searchsorted(made.entry_number, left)
    chained = made.kind[left] == CHAIN_ENTRY
    first = 0
    # Entries for the plain stages go through them together where no event of the kernel lies between.
    cuts = np.flatnonzero((np.diff(places) > 0) | chained[1:] | chained[:-1]) + 1
    for entries in np.split(left, cuts) if left.size else ():
        before = int(np.searchsorted(made.entry_number, entries[0]))
        yield from block_of(pipeline, made, first, before)
        first = before
        raw = b"".join(made.entry(entry) for entry in entries)
        if made.kind[entries[0]] == CHAIN_ENTRY:
            yield from unwinding.events(raw)
        else:
            # The promised time stays as it was: later entries of the batch are not given yet.
            yield from of_plain_stages(pipeline.process(OplogBatch(raw, pipeline.high_water)), pipeline)
        if pipeline.invalidated:
            return
    yield from block_of(pipeline, made, first, len(made))


def _remembered(pipeline: ChangeStreamPipeline, made: KernelBatch) -> KernelBatch:
    """The batch as its steps expect it; entries to which a later batch's transaction may refer are remembered."""
    members = np.flatnonzero(made.kind == MEMBER_ENTRY)
    if not members.size:
        return made
    for entry in members.tolist():
        raw = made.entry(entry)
        pipeline.unwind.remember(parse_entry(raw).cluster_time, raw)
    return replace(made, kind=np.where(made.kind == MEMBER_ENTRY, np.uint8(SKIPPED), made.kind))


def _is_shards_own(pipeline: ChangeStreamPipeline) -> bool:
    """Whether events go to a merge by the server, with a sort key in each."""
    return pipeline.plan.options.needs_merge and not pipeline.shard_part


def _is_under_way(pipeline: ChangeStreamPipeline) -> bool:
    """Whether the stream has not ended and is no longer looking for the event that it resumes from. Up to that event's
    time tokens have the version of the token given, so the kernel comes in after it."""
    token = pipeline.plan.start_token
    if token is not None and not token.is_high_water_mark and pipeline.high_water < token.cluster_time:
        return False
    if pipeline.shard_part and pipeline.searches_unmatched:
        return False
    return not pipeline.searching and not pipeline.invalidated
