"""Merging finished events of several shards by their tokens, without taking them apart.

The batch kernel makes each shard's events as bytes in one buffer. Their order over all shards is that of the cluster
times, which arrays tell quickly; only where two shards have events of the same time the tokens themselves are compared.
The plain merge (``tailrace.pipeline.merge``) is the reference, and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tailrace.kernel import gather, locate
from tailrace.kernel.batch import Bytes, Offsets
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.spark.reading.columns import EventBlock

_WANTED: Final = ("cluster_time", "token")

Numbers = npt.NDArray[np.int64]


class ShardEvents:
    """One shard's finished events that wait for the others, in order.

    ``promised``  everything of the shard at or before this cluster time is here or was taken
    """

    def __init__(self, promised: ClusterTime) -> None:
        self.promised = promised
        self._blocks: list[EventBlock] = []
        self._times: list[Numbers] = []

    def add(self, buffer: Bytes, offsets: Offsets) -> None:
        if len(offsets) > 1:
            self._blocks.append(EventBlock(buffer, offsets))
            self._times.append(locate(buffer, offsets, _WANTED[:1])[_WANTED[0]].start)

    @property
    def size(self) -> int:
        """Bytes of all events that wait."""
        return sum(block.size for block in self._blocks)

    def take(self, until: ClusterTime) -> EventBlock | None:
        """The events at or before ``until``, in one block; ``None`` where there are none."""
        taken: list[EventBlock] = []
        while self._blocks:
            block, times = self._blocks[0], self._times[0]
            count = int(np.searchsorted(times, until, side="right"))
            if count == 0:
                break
            taken.append(EventBlock(block.buffer, block.offsets[: count + 1]))
            if count < block.events:
                self._blocks[0] = EventBlock(block.buffer, block.offsets[count:])
                self._times[0] = times[count:]
                break
            del self._blocks[0], self._times[0]
        return EventBlock.join(taken) if taken else None


def merge_blocks(blocks: Sequence[EventBlock]) -> EventBlock:
    """The events of all blocks, each of one shard and in order, in the order of their tokens. Of equal tokens the block
    that is named first goes first."""
    if len(blocks) == 1:
        return blocks[0]
    whole = EventBlock.join(blocks)
    parts = locate(whole.buffer, whole.offsets, _WANTED)
    times = parts["cluster_time"].start
    shards = np.repeat(np.arange(len(blocks)), [block.events for block in blocks])
    order = np.lexsort((shards, times))
    token = parts["token"]

    def place(event: int) -> tuple[bytes, int]:
        return whole.buffer[token.start[event] : token.end[event]].tobytes(), int(shards[event])

    for tied in _ties(times[order], shards[order]):
        order[tied] = sorted(order[tied], key=place)
    buffer, offsets = gather(whole.buffer, whole.offsets[:-1][order], whole.offsets[1:][order])
    return EventBlock(buffer, offsets.astype(np.int64))


def _ties(times: Numbers, shards: Numbers) -> Iterator[slice]:
    """Where events of one cluster time come from several shards. Both arrays are in the order of time, then shard."""
    same_time = np.diff(times) == 0
    done = 0
    for place in np.flatnonzero(same_time & (np.diff(shards) != 0)):
        if place < done:
            continue
        first = int(np.searchsorted(times, times[place], side="left"))
        done = int(np.searchsorted(times, times[place], side="right"))
        yield slice(first, done)


def up_to(block: EventBlock, token: str) -> EventBlock:
    """The events of ``block`` at or before ``token``, a token's hexadecimal digits."""
    part = locate(block.buffer, block.offsets, ("token",))["token"]
    count, last = block.events, token.encode()
    while count and block.buffer[part.start[count - 1] : part.end[count - 1]].tobytes() > last:
        count -= 1
    return EventBlock(block.buffer, block.offsets[: count + 1])
