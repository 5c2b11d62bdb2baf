"""Merging finished events of several shards by their tokens, without taking them apart.

The batch kernel makes each shard's events as bytes in one buffer. Their order over all shards is that of the cluster
times, which arrays tell quickly; only where two shards have events of the same time the tokens themselves are compared.
The plain merge (``tailrace.pipeline.merge``) is the reference, and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tailrace.event.event_block import EventBlock, Offsets, Times
from tailrace.event.resume_token import token_order
from tailrace.oplog.cluster_time import ClusterTime


class ShardEvents:
    """One shard's finished events that wait for the others, in order.

    ``promised``  everything of the shard at or before this cluster time is here or was taken
    """

    def __init__(self, promised: ClusterTime) -> None:
        self.promised = promised
        self._blocks: list[EventBlock] = []

    def add(self, block: EventBlock) -> None:
        if len(block):
            self._blocks.append(block)

    @property
    def size(self) -> int:
        """Bytes of all events that wait."""
        return sum(block.size for block in self._blocks)

    def take(self, until: ClusterTime) -> EventBlock | None:
        """The events at or before ``until``, in one block; ``None`` where there are none."""
        taken: list[EventBlock] = []
        while self._blocks:
            block = self._blocks[0]
            count = int(np.searchsorted(block.cluster_time, np.uint64(until), side="right"))
            if count == 0:
                break
            taken.append(block.cut(0, count))
            if count < len(block):
                self._blocks[0] = block.cut(count, len(block))
                break
            del self._blocks[0]
        return EventBlock.join(taken) if taken else None


def merge_blocks(blocks: Sequence[EventBlock]) -> EventBlock:
    """The events of all blocks, each of one shard and in order, in the order of their tokens. Of equal tokens the block
    that is named first goes first."""
    if len(blocks) == 1:
        return blocks[0]
    whole = EventBlock.join(blocks)
    times = whole.cluster_time
    shards = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    order = np.lexsort((shards, times))

    def place(event: int) -> tuple[bytes, int]:
        return token_order(whole.token(event)), int(shards[event])

    for tied in _ties(times[order], shards[order]):
        order[tied] = sorted(order[tied], key=place)
    return whole.take(order)


def _ties(times: Times, shards: Offsets) -> Iterator[slice]:
    """Where events of one cluster time come from several shards. Both arrays are in the order of time, then shard."""
    same_time = np.diff(times) == 0
    done = 0
    for place in np.flatnonzero(same_time & (np.diff(shards) != 0)):
        if place < done:
            continue
        first = int(np.searchsorted(times, times[place], side="left"))
        done = int(np.searchsorted(times, times[place], side="right"))
        yield slice(first, done)


def up_to(block: EventBlock, token: bytes) -> EventBlock:
    """The events of ``block`` at or before ``token``, a token's document."""
    count, last = len(block), token_order(token)
    while count and token_order(block.token(count - 1)) > last:
        count -= 1
    return block.cut(0, count)
