"""Blocks of finished events of several shards, merged by their tokens."""

from __future__ import annotations

import bson
import numpy as np
from bson.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tailrace.event.event_block import EventBlock
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.spark.reading.block_merge import ShardEvents, merge_blocks, up_to

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


@given(shards)
def test_the_order_is_that_of_the_tokens_and_then_of_the_shards(places: list[list[Place]]) -> None:
    made = events_of(places)
    keyed = [(place, one) for own, mine in zip(places, made, strict=True) for place, one in zip(own, mine, strict=True)]
    blocks = [EventBlock.of_bson(own) for own in made if own]
    if blocks:
        # Python's sort is stable, and the events stand in the order of their shards.
        assert merge_blocks(blocks).events() == [one for _, one in sorted(keyed, key=lambda pair: pair[0])]


@given(shards, st.lists(st.integers(0, 7), max_size=4).map(sorted))
def test_what_is_taken_up_to_ascending_times_is_all_of_it_once(places: list[list[Place]], limits: list[int]) -> None:
    for own, made in zip(places, events_of(places), strict=True):
        waiting = ShardEvents(ClusterTime(0))
        for first in range(0, len(made), 3):
            waiting.add(EventBlock.of_bson(made[first : first + 3]))
        taken: list[bytes] = []
        for limit in [*limits, 7]:
            block_or_none = waiting.take(ClusterTime.of(1700, limit))
            taken += [] if block_or_none is None else block_or_none.events()
            assert taken == [one for place, one in zip(own, made, strict=True) if place[0] <= limit]


@given(
    shards.map(lambda places: sorted(place for own in places for place in own)), st.integers(1, 6), st.integers(0, 3)
)
def test_nothing_stands_behind_the_end(places: list[Place], increment: int, rest: int) -> None:
    made = [event(place, 0, number) for number, place in enumerate(places)]
    if made:
        kept = up_to(EventBlock.of_bson(made), bson.encode({"_data": token((increment, rest))}))
        assert kept.events() == [one for place, one in zip(places, made, strict=True) if place <= (increment, rest)]


@given(shards, st.data())
def test_events_taken_in_any_order_keep_what_is_known_of_them(places: list[list[Place]], data: st.DataObject) -> None:
    whole = [one for own in events_of(places) for one in own]
    if not whole:
        return
    order = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=8))
    taken = EventBlock.of_bson(whole).take(np.array(order, np.int64))
    expected = EventBlock.of_bson([whole[number] for number in order])
    assert taken.events() == expected.events()
    for name in ("offsets", "cluster_time", "operation", "token_start", "token_end", "ns_start", "ns_end"):
        assert getattr(taken, name).tolist() == getattr(expected, name).tolist(), name
