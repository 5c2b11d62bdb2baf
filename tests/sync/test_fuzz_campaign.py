"""What ``python -m tests.sync.fuzz`` plays between two versions, and what it counts as equal."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from tests.sync import fuzz
from tests.sync.both import normal


@pytest.mark.parametrize(
    ("between", "seed", "columns"),
    [
        (["--version", "4.4.2", "--to-version", "6.0.27"], 7, False),
        (["--version", "5.0.4", "--to-version", "6.0.27"], 10, True),
        (["--version", "5.0.4"], 7, True),
        (["--version", "6.0.27"], 7, True),
    ],
)
def test_values_that_the_target_refuses_are_left_out_of_most_seeds(
    between: list[str], seed: int, columns: bool
) -> None:
    options = fuzz._arguments([*between, "--seed", str(seed)])
    assert fuzz._chosen(options, seed).columns is columns


def test_what_a_newer_server_makes_of_an_index_is_no_difference() -> None:
    left: dict[str, Any] = {"v": 2, "key": {"p": "2d"}, "name": "flat", "min": -10, "sparse": 1, "bits": 20}
    right = {"v": 2, "key": {"p": "2d"}, "name": "flat", "sparse": True, "bits": 20, "min": -10.0}
    other = {**right, "min": -11.0}
    known = normal("4.4.2", "6.0.27", ages=False)
    assert known("index", bson.encode(left)) == known("index", bson.encode(right))
    assert known("index", bson.encode(left)) != known("index", bson.encode(other))
    alike = normal("5.0.4", "6.0.27", ages=False)
    assert alike("index", bson.encode(left)) != alike("index", bson.encode(right))
