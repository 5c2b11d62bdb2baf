"""Which combinations of a test's parameters ``make test-landing`` takes (tests/by_turns.py)."""

from __future__ import annotations

from itertools import product

import pytest

from tests.by_turns import in_slice


@pytest.mark.parametrize("axes", [(1, 1), (2, 7), (7, 2), (2, 2), (3, 3, 3), (2, 2, 6), (5, 3), (2, 4, 3, 9)], ids=str)
def test_a_slice_has_each_value_of_each_axis_and_is_as_long_as_the_longest(axes: tuple[int, ...]) -> None:
    places = list(product(*(range(length) for length in axes)))
    taken = [place for place, is_in in zip(places, in_slice(places), strict=True) if is_in]
    assert len(taken) == max(axes)
    for axis, length in enumerate(axes):
        assert {place[axis] for place in taken} == set(range(length))


def test_two_short_axes_do_not_go_along_with_each_other() -> None:
    places = list(product(range(2), range(2), range(8)))
    taken = [place for place, is_in in zip(places, in_slice(places), strict=True) if is_in]
    assert {place[:2] for place in taken} == set(product(range(2), range(2)))
