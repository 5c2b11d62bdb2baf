"""The cluster's clock: causal order under random messages, and gossip with the same result in any order."""

from __future__ import annotations

import bson
import pytest
from bson.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.oplog.cluster_clock import ClusterClock, SeenTime
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import UsageError
from tests.property.steady import STEADY
from tests.property.unsigned import unsigned_document

SHARDS = 4

cluster_times = st.builds(ClusterTime.of, st.integers(0, 5), st.integers(1, 5))
signatures = st.binary(min_size=20, max_size=20)
documents = st.builds(
    lambda time, hash_: bson.encode(
        {"clusterTime": time.to_timestamp(), "signature": {"hash": hash_, "keyId": bson.Int64(7)}}
    ),
    cluster_times,
    signatures,
)
#: A write on a shard with any wall clock, or a message from one shard to another.
actions = st.one_of(
    st.tuples(st.just("write"), st.integers(0, SHARDS - 1), st.integers(0, 3)),
    st.tuples(st.just("message"), st.integers(0, SHARDS - 1), st.integers(0, SHARDS - 1)),
)


@STEADY
@given(st.lists(actions, max_size=60))
def test_a_write_that_another_knew_of_has_the_smaller_time(script: list[tuple[str, int, int]]) -> None:
    clocks = [ClusterClock() for _ in range(SHARDS)]
    # What each shard knows, as numbers of writes by shard: the definition of happened-before, without any clock.
    known = [[0] * SHARDS for _ in range(SHARDS)]
    writes: list[tuple[ClusterTime, int, tuple[int, ...]]] = []
    for kind, shard, argument in script:
        if kind == "write":
            known[shard][shard] += 1
            writes.append((clocks[shard].tick(argument), shard, tuple(known[shard])))
        elif shard != argument:
            clocks[argument].gossip(unsigned_document(clocks[shard].now))
            known[argument] = [max(pair) for pair in zip(known[argument], known[shard], strict=True)]
    for time, shard, number in writes:
        for later_time, _, seen in writes:
            if seen != number and seen[shard] >= number[shard]:
                assert time < later_time


@STEADY
@given(st.lists(documents, max_size=12), st.randoms(use_true_random=False))
def test_gossip_comes_to_the_same_in_any_order_and_any_number(received: list[bytes], random: object) -> None:
    clock, other = ClusterClock(), ClusterClock()
    now = ZERO
    for document in received:
        clock.gossip(document)
        assert clock.now >= now
        now = clock.now
        assert clock.gossip(document) is False
    shuffled = [*received, *received]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for document in shuffled:
        other.gossip(document)
    assert clock.now == other.now == max((SeenTime.parse(one).cluster_time for one in received), default=ZERO)
    if received:
        assert clock.document in received
        assert clock.document is not None
        assert SeenTime.parse(clock.document).cluster_time == clock.now


@STEADY
@given(st.lists(documents, min_size=1, max_size=6), cluster_times)
def test_the_signed_document_is_passed_on_as_it_came_even_where_a_bare_time_is_larger(
    received: list[bytes], bare: ClusterTime
) -> None:
    clock = ClusterClock()
    clock.advance(bare)
    for document in received:
        clock.gossip(document)
    largest = max(received, key=lambda one: SeenTime.parse(one).cluster_time)
    expected = next(one for one in received if SeenTime.parse(one).cluster_time == SeenTime.parse(largest).cluster_time)
    assert clock.document == expected
    assert clock.now == max(bare, SeenTime.parse(expected).cluster_time)


@STEADY
@given(st.integers(0, 1 << 31), st.integers(0, (1 << 31) - 1), st.integers(0, 1 << 31))
def test_a_tick_is_larger_than_all_that_was_seen_and_a_time_that_a_timestamp_holds(
    seconds: int, increment: int, wall: int
) -> None:
    clock = ClusterClock(ClusterTime.of(seconds, increment))
    before = clock.now
    ticked = clock.tick(wall)
    assert ticked > before
    assert ticked.seconds >= wall
    assert ClusterTime.from_timestamp(ticked.to_timestamp()) == ticked
    assert 1 <= ticked.increment < 1 << 31


@STEADY
@given(cluster_times, cluster_times)
def test_times_compare_as_pairs(left: ClusterTime, right: ClusterTime) -> None:
    assert (left < right) == ((left.seconds, left.increment) < (right.seconds, right.increment))


def test_an_unsigned_document_is_what_a_deployment_without_keys_sends() -> None:
    decoded = bson.decode(unsigned_document(ClusterTime.of(5, 6)))
    assert decoded == {"clusterTime": Timestamp(5, 6), "signature": {"hash": bytes(20), "keyId": 0}}


@pytest.mark.parametrize("document", [{}, {"clusterTime": 5}, {"signature": {}}])
def test_a_document_without_a_time_is_refused_and_changes_nothing(document: dict[str, object]) -> None:
    clock = ClusterClock(ClusterTime.of(1, 1))
    with pytest.raises(UsageError, match="clusterTime"):
        clock.gossip(bson.encode(document))
    assert (clock.now, clock.document) == (ClusterTime.of(1, 1), None)
