"""The outlines of many shards are asked at once. No test had checked this: a planner that asks one shard after the
other is correct, but a hundred times as slow with a hundred shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.read.source.merged_outline import MergedOutline, in_waves
from tailrace.read.source.outline import Bucket, Weights

SHARDS = 6
#: How long a shard waits until the others are asked too; in a passing test nothing waits that long.
PATIENCE_S = 20


class TogetherOutline:
    """An outline whose answers come only when all shards have been asked."""

    def __init__(self, number: int, together: threading.Barrier, buckets: int = 3) -> None:
        self._number = number
        self._together = together
        self._buckets = buckets

    def buckets(self, after: ClusterTime, until: ClusterTime) -> Iterator[Bucket]:
        for place in range(self._buckets):
            self._together.wait(PATIENCE_S)
            yield self._bucket(place)

    even_buckets = buckets

    def _bucket(self, place: int) -> Bucket:
        time = ClusterTime(1 + place * SHARDS + self._number)
        return Bucket(time, time, 1, 1, 100)

    def mostly_matches(self, after: ClusterTime, until: ClusterTime) -> bool:
        if self._number:
            self._together.wait(PATIENCE_S)
        return False

    def weigh(self, after: ClusterTime, until: ClusterTime) -> Weights:
        self._together.wait(PATIENCE_S)
        return Weights([self._bucket(0)], 1.0)

    def entries(self, bucket: Bucket) -> list[Bucket]:
        self._together.wait(PATIENCE_S)
        return [self._bucket(0)]

    def is_smaller_than(self, size: int) -> bool:
        self._together.wait(PATIENCE_S)
        return size == 100


def shards(parties: int = SHARDS) -> MergedOutline:
    together = threading.Barrier(parties)
    return MergedOutline([TogetherOutline(number, together) for number in range(SHARDS)])


RANGE = (ClusterTime(0), ClusterTime(100))
QUESTIONS: dict[str, Callable[[MergedOutline], Any]] = {
    "buckets": lambda outline: [bucket.last for bucket in outline.buckets(*RANGE)],
    "even_buckets": lambda outline: [bucket.last for bucket in outline.even_buckets(*RANGE)],
    "weigh": lambda outline: [bucket.last for bucket in outline.weigh(*RANGE).buckets],
    "entries": lambda outline: [bucket.last for bucket in outline.entries(Bucket(*RANGE, 1, 1, 1))],
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_shard_is_asked_before_the_first_one_answers(question: str) -> None:
    found = QUESTIONS[question](shards())
    many = 3 if question.endswith("buckets") else 1
    assert found == list(range(1, 1 + many * SHARDS))


def test_sizes_are_asked_at_once_too() -> None:
    assert shards().is_smaller_than(SHARDS * 100)
    assert not shards().is_smaller_than(SHARDS * 100 + SHARDS)


def test_only_if_the_first_shard_does_not_match_are_the_others_asked_and_then_at_once() -> None:
    assert not shards(SHARDS - 1).mostly_matches(*RANGE)


def test_a_shard_is_not_asked_for_more_than_one_item_that_nobody_has_taken() -> None:
    asked = [0, 0]

    def items(place: int, count: int) -> Iterator[int]:
        for number in range(count):
            asked[place] += 1
            yield number

    quick, slow = in_waves([items(0, 50), items(1, 50)])
    assert list(quick) == list(range(50))
    assert asked == [50, 1]
    assert list(slow) == list(range(50))


def test_what_one_shard_raises_is_raised() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("away")

    first, second = in_waves([failing(), iter([1, 2])])
    assert next(first) == 1
    assert next(second) == 1
    with pytest.raises(ValueError, match="away"):
        next(first)
