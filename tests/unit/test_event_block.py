"""Blocks that are cut, joined and reordered: each event keeps its bytes and everything that is known about it."""

from __future__ import annotations

from typing import Any

import bson
import numpy as np
import pytest

from tailrace.core.event.event_block import EventBlock

EVENTS = [
    bson.encode({"_id": {"_data": "01"}, "operationType": "insert", "ns": {"db": "shop", "coll": "orders"}}),
    bson.encode({"n": 1}),
    bson.encode({"_id": {"_data": "0203"}, "operationType": "drop"}),
    bson.encode({"operationType": "delete", "ns": {"db": "shop"}, "_id": {"_data": "03"}}),
]


def known(block: EventBlock) -> list[tuple[Any, ...]]:
    """For each event: its bytes, and those of its token and namespace; 0 stands for a missing one."""
    found = []
    for number in range(len(block)):
        start, end = int(block.offsets[number]), int(block.offsets[number + 1])
        parts: list[Any] = [block.buffer[start:end].tobytes()]
        for first, last in ((block.token_start, block.token_end), (block.ns_start, block.ns_end)):
            place = int(first[number]), int(last[number])
            parts.append(block.buffer[slice(*place)].tobytes() if any(place) else 0)
        found.append((*parts, int(block.operation[number])))
    return found


def expected(*numbers: int) -> list[tuple[Any, ...]]:
    found = []
    operations = {"insert": 1, "delete": 4, "drop": 6, None: 0}
    for number in numbers:
        event = bson.decode(EVENTS[number])
        parts = [bson.encode(event[name]) if name in event else 0 for name in ("_id", "ns")]
        found.append((EVENTS[number], *parts, operations[event.get("operationType")]))
    return found


@pytest.mark.parametrize("numbers", [(0,), (1,), (0, 1, 2, 3)], ids=["one", "a bare one", "all"])
def test_a_block_of_bytes_knows_where_tokens_and_namespaces_are(numbers: tuple[int, ...]) -> None:
    block = EventBlock.of_bson([EVENTS[number] for number in numbers])
    assert known(block) == expected(*numbers)
    assert block.size == sum(len(EVENTS[number]) for number in numbers)
    assert block.events() == [EVENTS[number] for number in numbers]


@pytest.mark.parametrize("order", [[], [0], [3, 2, 1, 0], [0, 1, 2, 3], [1, 2, 0], [2, 2, 3]])
def test_events_are_taken_in_any_order(order: list[int]) -> None:
    block = EventBlock.of_bson(EVENTS).take(np.array(order, np.int64))
    assert known(block) == expected(*order)
    assert block.events() == [EVENTS[number] for number in order]


def test_parts_of_blocks_are_joined() -> None:
    whole = EventBlock.of_bson(EVENTS)
    assert known(whole.cut(1, 3)) == expected(1, 2)
    joined = EventBlock.join([whole.cut(2, 4), EventBlock.of_bson(EVENTS[:2]), whole.cut(1, 1), whole.cut(0, 1)])
    assert known(joined) == expected(2, 3, 0, 1, 0)
    assert joined.events() == [EVENTS[number] for number in (2, 3, 0, 1, 0)]
