"""Blocks of finished events of several shards, merged by their tokens."""

from __future__ import annotations

import bson
from bson.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tailrace.kernel import EventRun
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.spark.reading.block_merge import ShardEvents, merge_blocks, up_to
from tailrace.spark.reading.columns import EventBlock

Place = tuple[int, int]

#: For each shard the events' places: an increment, and what follows in the token. Few of each, so that many are equal.
shards = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=12).map(sorted), min_size=1, max_size=4
)


def token(place: Place) -> str:
    return f"82{1700:08X}{place[0]:08X}2B{place[1]:02X}"


def event(place: Place, shard: int, number: int) -> bytes:
    return bson.encode(
        {
            "_id": {"_data": token(place)},
            "operationType": "insert",
            "clusterTime": Timestamp(1700, place[0]),
            "from": f"{shard}.{number}" + "x" * number,
        }
    )


def events_of(places: list[list[Place]]) -> list[list[bytes]]:
    return [[event(place, shard, n) for n, place in enumerate(own)] for shard, own in enumerate(places)]


def events(block: EventBlock) -> list[bytes]:
    return EventRun(block.buffer, block.offsets).events()


@given(shards)
def test_the_order_is_that_of_the_tokens_and_then_of_the_shards(places: list[list[Place]]) -> None:
    made = events_of(places)
    keyed = [(place, one) for own, mine in zip(places, made, strict=True) for place, one in zip(own, mine, strict=True)]
    blocks = [EventBlock.of(own) for own in made if own]
    if blocks:
        # Python's sort is stable, and the events stand in the order of their shards.
        assert events(merge_blocks(blocks)) == [one for _, one in sorted(keyed, key=lambda pair: pair[0])]


@given(shards, st.lists(st.integers(0, 7), max_size=4).map(sorted))
def test_what_is_taken_up_to_ascending_times_is_all_of_it_once(places: list[list[Place]], limits: list[int]) -> None:
    for own, made in zip(places, events_of(places), strict=True):
        waiting = ShardEvents(ClusterTime(0))
        for first in range(0, len(made), 3):
            block = EventBlock.of(made[first : first + 3])
            waiting.add(block.buffer, block.offsets)
        taken: list[bytes] = []
        for limit in [*limits, 7]:
            block_or_none = waiting.take(ClusterTime.of(1700, limit))
            taken += [] if block_or_none is None else events(block_or_none)
            assert taken == [one for place, one in zip(own, made, strict=True) if place[0] <= limit]


@given(
    shards.map(lambda places: sorted(place for own in places for place in own)), st.integers(1, 6), st.integers(0, 3)
)
def test_nothing_stands_behind_the_end(places: list[Place], increment: int, rest: int) -> None:
    made = [event(place, 0, number) for number, place in enumerate(places)]
    if made:
        kept = up_to(EventBlock.of(made), token((increment, rest)))
        assert events(kept) == [one for place, one in zip(places, made, strict=True) if place <= (increment, rest)]
