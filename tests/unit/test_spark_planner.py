"""Where micro-batches end and slices are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.outline import Bucket
from tailrace.spark.planning.planner import SLICE_BYTES_MIN, Limits, batch_end, cuts, slices

entries = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4 << 20)), max_size=60)


def single(rows: list[tuple[int, int]]) -> list[Bucket]:
    return [Bucket(ClusterTime(i + 1), ClusterTime(i + 1), 1, events, size) for i, (events, size) in enumerate(rows)]


def grouped(rows: list[Bucket], width: int) -> list[Bucket]:
    return [
        Bucket(group[0].first, group[-1].last, len(group), sum(b.events for b in group), sum(b.bytes for b in group))
        for group in (rows[i : i + width] for i in range(0, len(rows), width))
    ]


@given(
    entries, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 50)), st.one_of(st.none(), st.integers(1, 9 << 20))
)
def test_a_micro_batch_takes_all_that_the_limits_allow_and_no_more(
    rows: list[tuple[int, int]], width: int, events: int | None, size: int | None
) -> None:
    all_ = single(rows)
    by_time = {bucket.first: bucket for bucket in all_}
    limits = Limits(events, size)
    end = batch_end(
        grouped(all_, width), lambda b: [by_time[ClusterTime(t)] for t in range(b.first, b.last + 1)], limits
    )
    if end is None:
        assert not limits.exceeded_by(sum(b.events for b in all_), sum(b.bytes for b in all_)) or len(all_) == 1
        return
    taken = [b for b in all_ if b.first <= end]
    assert taken, "at least one entry is taken, or the stream would stand still"
    if len(taken) > 1:
        assert not limits.exceeded_by(sum(b.events for b in taken), sum(b.bytes for b in taken))
    if len(taken) < len(all_):
        more = all_[: len(taken) + 1]
        assert limits.exceeded_by(sum(b.events for b in more), sum(b.bytes for b in more))


@given(entries, st.integers(1, 8))
def test_slices_are_ascending_balanced_and_lose_nothing(rows: list[tuple[int, int]], parts: int) -> None:
    all_ = single(rows)
    after, until = ClusterTime(0), ClusterTime(len(all_) + 5)
    cut_at = cuts(all_, parts)
    ranges = slices(after, until, cut_at)
    assert ranges[0][0] == after
    assert ranges[-1][1] == until
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert all(low < high for low, high in ranges)
    assert len(ranges) <= parts
    total = sum(b.bytes for b in all_)
    largest = max((b.bytes for b in all_), default=0)
    for low, high in ranges:
        weight = sum(b.bytes for b in all_ if low < b.first <= high)
        assert weight <= total / len(ranges) + 2 * largest


def test_a_small_range_is_one_slice() -> None:
    assert cuts(single([(1, SLICE_BYTES_MIN // 2)] * 3), 8) == []
