"""Where micro-batches end and slices are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.spark.planning.planner import SLICE_BYTES_MIN, Limits, batch_end, cuts, parts_of_full, slices
from tailrace.read.source.outline import Bucket

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


def test_a_full_micro_batch_has_as_many_slices_as_were_asked_for() -> None:
    """With ``maxBytesPerTrigger=4m`` and ``partitions=4`` every stage had one task: a slice had 2 MB at least, and a
    full micro-batch has a little less than 4. No test had bounded micro-batches and asked for slices at once."""
    buckets = single([(1, 100_000)] * 41)
    limits = Limits(None, 4 << 20)
    assert parts_of_full(buckets, limits, 4) == 4
    assert len(cuts(buckets, 4, least=4)) == 3
    assert cuts(buckets, 4) == []
    assert parts_of_full(buckets[:10], limits, 4) == 1, "one that is not full has fewer"
    assert parts_of_full(single([(1, 10)] * 98), Limits(100, 1 << 30), 4) == 4


def test_large_documents_that_were_written_at_once_are_cut_between() -> None:
    """They are in one bucket, which used to make one task."""
    entries = single([(1, 3 << 20)] * 40)
    whole = Bucket(entries[0].first, entries[-1].last, 40, 40, 120 << 20)
    assert len(cuts([whole], 4, refine=lambda _: entries)) == 3
    assert cuts([whole], 4) == []


@given(entries, entries, st.integers(2, 8))
def test_cuts_ascend_where_the_buckets_of_two_shards_overlap(
    one: list[tuple[int, int]], other: list[tuple[int, int]], parts: int
) -> None:
    pieces = [single(one), single(other)]
    buckets = sorted(
        (
            Bucket(rows[0].first, rows[-1].last, len(rows), len(rows), sum(row.bytes for row in rows))
            for rows in pieces
            if rows
        ),
        key=lambda bucket: bucket.last,
    )
    found = cuts(
        buckets,
        parts,
        refine=lambda bucket: [row for rows in pieces for row in rows if row.last <= bucket.last],
        least=parts,
    )
    assert all(low < high for low, high in pairwise(found))
    assert not buckets or all(cut < buckets[-1].last for cut in found)
