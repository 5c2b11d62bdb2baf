"""The outlines of several oplogs as one: how much lies in a range of cluster time over all shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import merge

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.outline import Bucket, Outline, Weights


class MergedOutline:
    """Answers what one ``Outline`` answers, for all of ``outlines``."""

    def __init__(self, outlines: Sequence[Outline]) -> None:
        self._outlines = outlines

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The matching entries with ``after`` < ts <= ``until`` in ascending buckets that do not overlap."""
        return joined(merge(*(outline.buckets(after, until) for outline in self._outlines)))

    def mostly_matches(self, after: ClusterTime, until: ClusterTime) -> bool:
        """Whether of some shard's entries most match."""
        return any(outline.mostly_matches(after, until) for outline in self._outlines)

    def even_buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        """The whole range, matching or not, in buckets by the time of their last entry; sizes are estimates."""
        return merge(*(one.even_buckets(after, until) for one in self._outlines), key=lambda bucket: bucket.last)

    def entries(self, bucket: Bucket) -> list[Bucket]:
        """The entries of ``bucket`` by cluster time; those of two shards at the same time are one, since no cut may
        fall between them."""
        return list(joined(merge(*(outline.entries(bucket) for outline in self._outlines))))

    def weigh(self, after: ClusterTime, until: ClusterTime) -> Weights:
        """Where the range is best cut, and the largest part of any shard's entries that matches."""
        with ThreadPoolExecutor(max(1, len(self._outlines)), "tailrace-outline") as pool:
            weights = list(pool.map(lambda outline: outline.weigh(after, until), self._outlines))
        by_end: dict[ClusterTime, list[Bucket]] = {}
        for bucket in (bucket for one in weights for bucket in one.buckets):
            by_end.setdefault(bucket.last, []).append(bucket)
        whole = [bucket for end in sorted(by_end) for bucket in joined(sorted(by_end[end]))]
        return Weights(whole, max(one.matching for one in weights))

    def is_smaller_than(self, size: int) -> bool:
        """Whether all oplogs together have at most ``size`` bytes, for certain."""
        return all(outline.is_smaller_than(size // max(1, len(self._outlines))) for outline in self._outlines)


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
