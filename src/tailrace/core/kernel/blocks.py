"""Generators of blocks and requests: what the plain stages give, and small blocks made larger."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias

from tailrace.core.event.event_block import EventBlock
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.pipeline.task import relayed
from tailrace.core.plan.request import Answer, Emit, Request, Running

#: Events as they are finished, and what must be answered meanwhile.
Blocks: TypeAlias = Generator[EventBlock | Request, Answer, None]

#: Smaller blocks are joined with what comes next, since each block has a cost of its own.
_JOINED_BYTES: Final = 1 << 17


def of_plain_stages(running: Running, pipeline: ChangeStreamPipeline) -> Blocks:
    """The plain stages' events as blocks; their requests pass through. Of a shard's part, only the events that are the
    user's."""

    def block(given: Emit | Request) -> Blocks:
        if isinstance(given, Emit):
            events = [event for event in given.events if not event.bypasses] if pipeline.shard_part else given.events
            if events:
                yield EventBlock.of(events)

    return relayed(running, block)


def joined(blocks: Blocks) -> Blocks:
    """The same with small blocks joined to larger ones, so that a command among writes does not cut them up. Finished
    blocks are given before any request or error."""
    pending: list[EventBlock] = []
    size = 0

    def all_pending() -> Blocks:
        nonlocal pending, size
        if pending:
            block = EventBlock.join(pending)
            pending, size = [], 0
            yield block

    def gathered(given: EventBlock | Request) -> Blocks:
        nonlocal size
        if isinstance(given, EventBlock):
            pending.append(given)
            size += given.size
            if size < _JOINED_BYTES:
                return
        yield from all_pending()

    try:
        yield from relayed(blocks, gathered)
    except Exception:
        yield from all_pending()
        raise
    yield from all_pending()
