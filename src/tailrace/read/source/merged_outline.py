"""The outlines of several oplogs as one: how much lies in a range of cluster time over all shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import merge
from itertools import islice
from typing import Final, TypeVar

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.outline import Bucket, Outline, Weights

#: How many oplogs are asked at once.
_THREADS: Final = 32

_T = TypeVar("_T")


class MergedOutline:
    """Answers what one ``Outline`` answers, for all of ``outlines``.

    All oplogs are asked at once, so a cluster of a hundred shards is not planned a hundred times as slowly as a replica
    set.
    """

    def __init__(self, outlines: Sequence[Outline]) -> None:
        self._outlines = outlines

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The matching entries with ``after`` < ts <= ``until`` in ascending buckets that do not overlap."""
        return joined(merge(*in_waves([one.buckets(after, until) for one in self._outlines])))

    def mostly_matches(self, after: ClusterTime, until: ClusterTime) -> bool:
        """Whether of some shard's entries most match."""
        first, rest = self._outlines[:1], self._outlines[1:]
        return any(
            any(asked(one, lambda outline: outline.mostly_matches(after, until))) for one in (first, rest) if one
        )

    def even_buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The whole range, matching or not, in buckets by the time of their last entry; sizes are estimates."""
        waves = in_waves([one.even_buckets(after, until) for one in self._outlines])
        return merge(*waves, key=lambda bucket: bucket.last)

    def entries(self, bucket: Bucket) -> list[Bucket]:
        """The entries of ``bucket`` by cluster time; those of two shards at the same time are one, since no cut may
        fall between them."""
        return list(joined(merge(*asked(self._outlines, lambda outline: outline.entries(bucket)))))

    def weigh(self, after: ClusterTime, until: ClusterTime) -> Weights:
        """Where the range is best cut, and the largest part of any shard's entries that matches."""
        weights = asked(self._outlines, lambda outline: outline.weigh(after, until))
        by_end: dict[ClusterTime, list[Bucket]] = {}
        for bucket in (bucket for one in weights for bucket in one.buckets):
            by_end.setdefault(bucket.last, []).append(bucket)
        whole = [bucket for end in sorted(by_end) for bucket in joined(sorted(by_end[end]))]
        return Weights(whole, max(one.matching for one in weights))

    def is_smaller_than(self, size: int) -> bool:
        """Whether all oplogs together have at most ``size`` bytes, for certain."""
        each = size // max(1, len(self._outlines))
        return all(asked(self._outlines, lambda outline: outline.is_smaller_than(each)))


def asked(outlines: Sequence[Outline], ask: Callable[[Outline], _T]) -> list[_T]:
    """The answers of all of ``outlines``, in their order, asked at once."""
    if len(outlines) < 2:
        return [ask(outline) for outline in outlines]
    with ThreadPoolExecutor(min(_THREADS, len(outlines)), "tailrace-outline") as pool:
        return list(pool.map(ask, outlines))


def in_waves(sources: Sequence[Iterator[_T]]) -> list[Iterator[_T]]:
    """The same iterators, which ask their servers together: when one of them is asked for an item that it does not have
    yet, so are all others without one. No more than one item of each is waiting that nobody has taken."""
    waiting: list[deque[_T]] = [deque() for _ in sources]
    ended = [False] * len(sources)

    def fetch(place: int) -> None:
        for item in islice(sources[place], 1):
            waiting[place].append(item)
            return
        ended[place] = True

    def items(place: int) -> Iterator[_T]:
        while True:
            if not waiting[place] and not ended[place]:
                empty = [one for one in range(len(sources)) if not waiting[one] and not ended[one]]
                if len(empty) == 1:
                    fetch(place)
                else:
                    with ThreadPoolExecutor(min(_THREADS, len(empty)), "tailrace-outline") as pool:
                        list(pool.map(fetch, empty))
            if not waiting[place]:
                return
            yield waiting[place].popleft()

    return [items(place) for place in range(len(sources))]


def joined(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Ascending buckets, those that overlap made one."""
    whole: Bucket | None = None
    for bucket in buckets:
        if whole is None:
            whole = bucket
        elif bucket.first <= whole.last:
            whole = Bucket(
                whole.first,
                max(whole.last, bucket.last),
                whole.entries + bucket.entries,
                whole.events + bucket.events,
                whole.bytes + bucket.bytes,
            )
        else:
            yield whole
            whole = bucket
    if whole is not None:
        yield whole
