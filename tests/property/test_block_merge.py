"""Blocks of finished events of several shards, merged by their tokens."""

from __future__ import annotations

from dataclasses import replace

import bson
import numpy as np
from bson.timestamp import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.event.event_block import EventBlock
from tailrace.core.kernel import merge_blocks
from tailrace.core.kernel.event_parts import PARTS
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.waiting import Place as Bound
from tailrace.core.pipeline.waiting import WaitingEvents, merged_blocks, merged_events
from tailrace.core.pipeline.waiting import events_of as events_of_block

Place = tuple[int, int]

#: A time in the year 2057: as a signed number it is negative.
SECONDS = 0xA4_00_00_00

#: For each shard the events' places: an increment, and what follows in the token. Few of each, so that many are equal.
shards = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=12).map(sorted), min_size=1, max_size=4
)


def token(place: Place) -> str:
    return f"82{SECONDS:08X}{place[0]:08X}2B{place[1]:02X}" + "04" * (place[1] % 2)


def event(place: Place, shard: int, number: int) -> bytes:
    return bson.encode(
        {
            "_id": {"_data": token(place)},
            "operationType": "insert",
            "clusterTime": Timestamp(SECONDS, place[0]),
            "from": f"{shard}.{number}" + "x" * number,
        }
    )


def with_places(block: EventBlock, shard: int, *, known: bool) -> EventBlock:
    """The block as if something had been noted of each of its events, or of none."""
    rows = np.arange(len(block) * PARTS, dtype=np.int64).reshape(-1, PARTS) + 1_000_000 * (shard + 1)
    return replace(block, places=rows if known else None)


def row_of(block: EventBlock, number: int) -> list[int]:
    """What is noted of an event; zeros where nothing is."""
    return [0] * PARTS if block.places is None else block.places[number].tolist()


def events_of(places: list[list[Place]]) -> list[list[bytes]]:
    return [[event(place, shard, n) for n, place in enumerate(own)] for shard, own in enumerate(places)]


@given(shards, st.data())
def test_the_order_is_that_of_the_tokens_and_then_of_the_shards(places: list[list[Place]], data: st.DataObject) -> None:
    """The result in blocks, also in compiled code, and as single events."""
    made = events_of(places)
    keyed = [(place, one) for own, mine in zip(places, made, strict=True) for place, one in zip(own, mine, strict=True)]
    # Cut out of larger ones, like blocks that wait.
    noted = data.draw(st.lists(st.booleans(), min_size=len(made), max_size=len(made)))
    blocks = [
        with_places(EventBlock.of_bson([own[-1], *own, own[0]]), shard, known=known).cut(1, len(own) + 1)
        for shard, (own, known) in enumerate(zip(made, noted, strict=True))
        if own
    ]
    if not blocks:
        return
    # Python's sort is stable, and the events stand in the order of their shards.
    expected = [one for _, one in sorted(keyed, key=lambda pair: pair[0])]
    merged = merged_blocks(blocks)
    assert merged.events() == expected
    compiled = merge_blocks(blocks)
    assert compiled.events() == expected
    for name in EventBlock.__slots__ if len(blocks) > 1 else ():  # a single block stays as it is
        if name == "places" and all(block.places is None for block in blocks):
            assert compiled.places is merged.places is None
            continue
        assert getattr(compiled, name).tolist() == getattr(merged, name).tolist(), name
        assert getattr(compiled, name).dtype == getattr(merged, name).dtype, name
    expected_rows = {own.event(n): row_of(own, n) for own in blocks for n in range(len(own))}
    assert [row_of(compiled, n) for n in range(len(compiled))] == [expected_rows[one] for one in expected]
    parts = [[block, events_of_block(block)][data.draw(st.integers(0, 1))] for block in blocks]
    assert [one.to_bson() for one in merged_events([[part] for part in parts])] == expected


@given(shards, st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=4).map(sorted), st.booleans())
def test_what_is_taken_up_to_ascending_bounds_is_all_of_it_once(
    places: list[list[Place]], bounds: list[Place], in_lists: bool
) -> None:
    for own, made in zip(places, events_of(places), strict=True):
        waiting = WaitingEvents()
        for first in range(0, len(made), 3):
            block = EventBlock.of_bson(made[first : first + 3])
            waiting.add(events_of_block(block) if in_lists else block)
        taken: list[bytes] = []
        for bound in [*bounds, (7, 4)]:
            time = ClusterTime.of(SECONDS, bound[0])
            # 4 stands for all that has this time.
            limit = Bound.after(time) if bound[1] == 4 else Bound(time, token(bound).encode())
            pieces = waiting.take(limit)
            taken += [event.to_bson() for event in merged_events([pieces])]
            assert taken == [one for place, one in zip(own, made, strict=True) if place <= bound]
            left = [place for place in own if place > bound]
            assert bool(waiting) == bool(left)
            if left:
                assert waiting.first.token == token(left[0]).encode()
                assert waiting.last.token == token(left[-1]).encode()
        assert waiting.bytes == 0


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
