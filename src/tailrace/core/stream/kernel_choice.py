"""What works on a batch, and merges: the kernel where it is available and worth it, otherwise plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, Literal, TypeAlias

from tailrace.core import kernel
from tailrace.core.event.event_block import EventBlock
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.pipeline.task import Working
from tailrace.core.pipeline.waiting import merged_blocks
from tailrace.core.plan.request import OplogBatch

#: A smaller batch (some ten entries) is done by the plain stages before the kernel is set up; a stream on which little
#: happens never loads the compiled code.
KERNEL_BYTES_MIN: Final = 4_096

#: Which of a stream's batches the kernel works on: those that are worth it ("auto"), each, none, or those of whose size
#: in bytes somebody else says so, who is asked with 0 before a merge: the compiled merge is faster for any number of
#: events. Where it is not available, none. The events are the same.
KernelUse: TypeAlias = Literal["auto", "always", "never"] | Callable[[int], bool]

_available = cache(kernel.available)


def is_worth_it(size: int) -> bool:
    """Whether the kernel is there and worth it for a batch of ``size`` bytes."""
    return size >= KERNEL_BYTES_MIN and _available()


def working_on(pipeline: ChangeStreamPipeline, batch: OplogBatch, use: KernelUse) -> Working:
    """The work on one batch. Afterwards the pipeline is in the same state, whichever of the two has done it."""
    if batch.raw and _can_work(pipeline) and _is_used(use, len(batch.raw)) and _available():
        return kernel.process_batch(pipeline, batch)
    return pipeline.process(batch)


def merge_with(blocks: Sequence[EventBlock], use: KernelUse) -> EventBlock:
    """The events of several participants' blocks in the order of their tokens; of equal tokens the block that is named
    first goes first."""
    # Who decides for each batch also counts what was read, and nothing more was.
    size = 0 if callable(use) else sum(block.size for block in blocks)
    if len(blocks) > 1 and _is_used(use, size) and _available():
        return kernel.merge_blocks(blocks)
    return merged_blocks(blocks)


def _can_work(pipeline: ChangeStreamPipeline) -> bool:
    """Of a shard's part, blocks hold the user's events alone: not the witnesses of a search, nor an event whose changed
    ``_id`` the stages after the merge have to find."""
    return not pipeline.shard_part or not (pipeline.searches_unmatched or pipeline.user_stages.replaces_id)


def _is_used(use: KernelUse, size: int) -> bool:
    if callable(use):
        return use(size)
    return use == "always" or (use == "auto" and size >= KERNEL_BYTES_MIN)
