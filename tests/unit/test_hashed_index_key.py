"""``$toHashedIndexKey`` beyond the table of operators: what mongod 6.0.27 answers at the edges."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.decimal128 import Decimal128
from bson.int64 import Int64

from tailrace.core.expression import compile_stages
from tailrace.errors import ServerError


def hashed(expression: Any, document: dict[str, Any]) -> int:
    pipeline = compile_stages([bson.encode({"$replaceWith": {"r": {"$toHashedIndexKey": expression}}})], now=0)
    made = pipeline.apply(bson.encode(document))
    assert made is not None
    return int(bson.decode(made)["r"])


@pytest.mark.parametrize(
    ("number", "same"),
    [
        (2.0**63, -(2**63)),
        (2.0**63 + 2048, 2**63 - 1),
        (-(2.0**70), -(2**63)),
        (Decimal128("9223372036854775808"), 2**63 - 1),
        (Decimal128("2.5"), 2),
        (2.5, 2),
        (-2.5, -2),
        (Decimal128("NaN"), 0),
    ],
)
def test_a_number_is_hashed_as_the_long_that_the_server_makes_of_it(number: Any, same: int) -> None:
    assert hashed("$a", {"a": number}) == hashed("$a", {"a": Int64(same)})


def test_an_error_among_constants_waits_for_an_event() -> None:
    with pytest.raises(ServerError) as caught:
        hashed({"$divide": [1, 0]}, {})
    assert caught.value.code == 2


def test_a_value_that_nests_as_deep_as_a_document_may_is_hashed_and_a_deeper_one_is_not() -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {"$reduce": {"input": {"$range": [0, levels]}, "initialValue": 1, "in": ["$$value"]}}

    hashed(nested(199), {})
    with pytest.raises(ServerError) as caught:
        hashed(nested(200), {})
    assert caught.value.code == 15
