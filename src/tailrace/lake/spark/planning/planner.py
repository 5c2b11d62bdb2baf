"""Where a micro-batch ends and how it is cut into slices: arithmetic on counts, without any reading of its own.

A cut always falls between two cluster times, so a transaction is never split and a slice is complete in itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.outline import Bucket

#: A slice below this size of oplog costs more to start than it saves.
SLICE_BYTES_MIN: Final = 2 << 20
#: A bound of this many bytes or more is about the work of a micro-batch, not about memory, which is bounded elsewhere:
#: an estimate by the oplog's average will do.
_ROUGH_BYTES_MIN: Final = 128 << 20


class Limits(NamedTuple):
    """Bounds of a micro-batch in events and in bytes of oplog; ``None`` is no bound."""

    events: int | None = None
    bytes: int | None = None

    @property
    def is_rough(self) -> bool:
        """Whether an estimate of the bytes is exact enough."""
        return self.events is None and self.bytes is not None and self.bytes >= _ROUGH_BYTES_MIN

    def exceeded_by(self, events: int, size: int) -> bool:
        return (self.events is not None and events > self.events) or (self.bytes is not None and size > self.bytes)


def batch_end(
    buckets: Iterable[Bucket], refine: Callable[[Bucket], Sequence[Bucket]], limits: Limits
) -> ClusterTime | None:
    """The last cluster time that ``limits`` leave room for, or ``None`` where all of ``buckets`` fit.

    ``refine`` gives the entries of the one bucket in which the limit falls. At least one entry is taken, however large.
    """
    events = size = 0
    last: ClusterTime | None = None
    for bucket in buckets:
        if not limits.exceeded_by(events + bucket.events, size + bucket.bytes):
            events, size, last = events + bucket.events, size + bucket.bytes, bucket.last
            continue
        for entry in refine(bucket):
            events, size = events + entry.events, size + entry.bytes
            if limits.exceeded_by(events, size) and last is not None:
                return last
            last = entry.last
        return last
    return None


def cuts(
    buckets: Sequence[Bucket],
    parts: int,
    *,
    refine: Callable[[Bucket], Sequence[Bucket]] | None = None,
    least: int = 1,
) -> list[ClusterTime]:
    """Up to ``parts - 1`` cluster times, ascending, after which to cut ``buckets`` so that the parts weigh the same.

    ``least`` parts are made, however small they are; more of them weigh ``SLICE_BYTES_MIN`` or more. ``refine`` gives
    the entries of a bucket that weighs more than half a part, as where large documents were written at once.
    """
    total = sum(bucket.bytes for bucket in buckets)
    parts = min(parts, max(1, least, total // SLICE_BYTES_MIN))
    result: list[ClusterTime] = []
    size = 0
    for bucket in buckets if parts > 1 else ():
        heavy = refine is not None and bucket.entries > 1 and 2 * bucket.bytes * parts > total
        for piece in refine(bucket) if heavy and refine is not None else (bucket,):
            size += piece.bytes
            # Buckets of several shards overlap, and so may the entries of two of them.
            within = piece.last < buckets[-1].last and (not result or piece.last > result[-1])
            if within and size * parts >= total * (len(result) + 1) and len(result) < parts - 1:
                result.append(piece.last)
    return result


def parts_of_full(buckets: Sequence[Bucket], limits: Limits, parts: int) -> int:
    """Into how many parts to cut this micro-batch, where one that fills its ``limits`` is cut into ``parts``: its share
    of them."""
    shares = [sum(bucket.events for bucket in buckets) / limits.events] if limits.events else []
    shares += [sum(bucket.bytes for bucket in buckets) / limits.bytes] if limits.bytes else []
    return round(parts * min(1.0, max(shares, default=0.0)))


def slices(
    after: ClusterTime, until: ClusterTime, cut_at: Sequence[ClusterTime]
) -> list[tuple[ClusterTime, ClusterTime]]:
    """The range (``after``, ``until``] as ascending ranges that meet at ``cut_at``."""
    edges = [after, *cut_at, until]
    return list(pairwise(edges))
