"""Transactions of which earlier entries are not in the batch: entry after entry through the kernel, in pieces.

The plain stage finds the chain's entries, remembered or by request, so memory is bounded by one of them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Final

from tailrace.core.event.event_block import EventBlock
from tailrace.core.kernel.batch import PLAIN, KernelBatch, KernelSettings, KernelStep, transform_operations
from tailrace.core.kernel.blocks import Blocks, of_plain_stages
from tailrace.core.kernel.steps import block_of, through
from tailrace.core.oplog.entry import OplogEntry, apply_ops, parse_entry
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.request import Answer, Request
from tailrace.errors import OplogFormatError

#: How many operations the plain stages handle first where the kernel stops, and twice as many each time after that,
#: since they get to their place by skipping all operations before it.
_PLAIN_OPERATIONS: Final = 50


@dataclass(frozen=True)
class Unwinding:
    """How a stream handles its transactions."""

    pipeline: ChangeStreamPipeline
    settings: KernelSettings
    steps: list[KernelStep]

    def events(self, raw: bytes) -> Blocks:
        """The events of the transaction that the entry ``raw`` commits. Raises what ``UnwindTransaction`` raises."""
        unwind, commit = self.pipeline.unwind, parse_entry(raw)
        chain = yield from unwind.chain_before(commit)
        index = 0
        for time, term in chain:
            member = yield from unwind.member(time, term)
            index = yield from self._operations(commit, raw, member, index)
            if self.pipeline.invalidated:
                return
        if b"applyOps" in commit.command_fields():
            yield from self._operations(commit, raw, raw, index)

    def _operations(
        self, commit: OplogEntry, raw: bytes, member: bytes, index: int
    ) -> Generator[EventBlock | Request, Answer, int]:
        """The operations of one entry; gives what the next entry's are counted from."""
        first, plain, count = 0, _PLAIN_OPERATIONS, -1
        while True:
            piece = transform_operations(member, raw, self.settings, index=index, first=first)
            give = partial(self._give, commit, member, index, slice(first, piece.end))
            yield from through(self.pipeline, piece.made, self.steps, give)
            if piece.is_last or self.pipeline.invalidated:
                return index + piece.end
            part = slice(piece.end, piece.end + plain)
            yield from of_plain_stages(self.pipeline.process_operations(commit, member, index, part), self.pipeline)
            count = _count(member) if count < 0 else count
            first, plain = part.stop, 2 * plain
            if first >= count or self.pipeline.invalidated:
                return index + count

    def _give(self, commit: OplogEntry, member: bytes, index: int, part: slice, made: KernelBatch) -> Blocks:
        """The events of a part of an entry's operations, or those of the plain stages where a step has left them."""
        if made.kind[0] == PLAIN:
            yield from of_plain_stages(self.pipeline.process_operations(commit, member, index, part), self.pipeline)
        else:
            yield from block_of(self.pipeline, made, 0, len(made))


def _count(member: bytes) -> int:
    """How many operations an entry has, the first one that cannot be read included."""
    count = 0
    try:
        for _ in apply_ops(parse_entry(member)):
            count += 1
    except OplogFormatError:
        count += 1
    return count
