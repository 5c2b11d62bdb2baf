"""Generators of blocks and requests: what the plain stages give, and small blocks made larger."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias

from tailrace.errors import TailraceError
from tailrace.event.event_block import EventBlock
from tailrace.pipeline.shard import ChangeStreamPipeline
from tailrace.plan.request import Answer, Emit, Request, Running

#: Events as they are finished, and what must be answered meanwhile.
Blocks: TypeAlias = Generator[EventBlock | Request, Answer, None]

#: Blocks of fewer bytes are joined with what comes next: a block has a price of its own.
_JOINED_BYTES: Final = 1 << 17


def of_plain_stages(running: Running, pipeline: ChangeStreamPipeline) -> Blocks:
    """The plain stages' events as blocks; their requests pass through. Of a shard's part, only the events that are the
    user's."""
    answer: Answer = None
    failure: TailraceError | None = None
    while True:
        try:
            given = running.send(answer) if failure is None else running.throw(failure)
        except StopIteration:
            return
        answer = failure = None
        if isinstance(given, Emit):
            events = [event for event in given.events if not event.bypasses] if pipeline.shard_part else given.events
            if events:
                yield EventBlock.of(events)
            continue
        try:
            answer = yield given
        except TailraceError as error:
            failure = error


def joined(blocks: Blocks) -> Blocks:
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
