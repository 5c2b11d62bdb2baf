"""Random commands of clients that follow no rules are answered as by the server: field by field, on three versions.

The first runs found: batch sizes and time limits that are decimals, fractions or large; on 4.4 the words around an
error of execution; names that no collection can have; nulls among the cursors of a killCursors; which of two errors is
reported; errors of the optimizer. All earlier tests of fields had changed one field of one command, and none had given
odd numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64

from tests.differential.wire import ANY_VALUE
from tests.gateway.side_by_side import BETWEEN_IS_SLOW, SideBySide, side_by_side
from tests.gateway.strangers import NUMBERS, meet

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module", params=BETWEEN_IS_SLOW)
def sides(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    with side_by_side(request.param) as made:
        yield made


def test_strangers_are_answered_as_by_the_server(sides: SideBySide) -> None:
    found = meet(sides, seed=1, steps=300)
    assert found["good"] > 50
    assert len(found) > 10, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_strangers_are_answered_as_by_the_server(sides: SideBySide, seed: int) -> None:
    meet(sides, seed, steps=1000)


_ODD = (*NUMBERS, *map(Decimal128, ("0.5", "2.5", "1.4", "-0.4", "-0.6", "-1.5", "Infinity", "1E30", "-1E30")), 2.0**63)


def test_numbers_of_every_kind_are_read_as_by_the_server(sides: SideBySide) -> None:
    """A decimal is rounded, a double is truncated; 4.4 reads null, NaN and large numbers like no other version."""
    time = sides.server.run("admin", {"ping": 1})["operationTime"]
    concern = {"writeConcern": {"w": "majority"}}
    sides.server.run("numbers", {"insert": "c", "documents": [{"_id": number} for number in range(5)], **concern})
    stages = [{"$changeStream": {"startAtOperationTime": time}}, {"$match": {"operationType": "insert"}}]
    stream: dict[str, Any] = {"aggregate": "c", "pipeline": stages}

    def outcome(wire: Any, command: dict[str, Any]) -> tuple[Any, ...]:
        reply = bson.decode(wire.exchange(bson.encode({**command, "$db": "numbers"})), ANY_VALUE)
        if reply["ok"]:
            return (len(reply["cursor"].get("firstBatch", reply["cursor"].get("nextBatch"))),)
        text = reply["errmsg"].partition(" in: {")[0]  # 4.4 repeats the command, with the cursor's id
        # Whether the server exceeds so short a time limit does not matter.
        return ("opened or out of time",) if reply["code"] == 50 else (reply["code"], text)

    found = {}
    for number in _ODD:
        for name in ("aggregate size", "getMore size", "aggregate time", "getMore time"):
            both = []
            for wire in (sides.server, sides.gateway):
                if name == "aggregate size":
                    both.append(outcome(wire, {**stream, "cursor": {"batchSize": number}}))
                elif name == "aggregate time":
                    both.append(outcome(wire, {**stream, "cursor": {"batchSize": 1}, "maxTimeMS": number}))
                else:
                    cursor = wire.run("numbers", {**stream, "cursor": {"batchSize": 0}})["cursor"]["id"]
                    read: dict[str, Any] = {"getMore": Int64(cursor), "collection": "c", "maxTimeMS": 1}
                    odd = {"batchSize": number} if name == "getMore size" else {"batchSize": 1, "maxTimeMS": number}
                    both.append(outcome(wire, {**read, **odd}))
            if both[0] != both[1] and both[0] != ("opened or out of time",):
                found[name, repr(number)] = both
    assert found == {}
