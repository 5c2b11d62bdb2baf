"""``@pytest.mark.by_turns``: of a test's combinations of parameters ``make test-landing`` takes a fixed slice.

Parameters that stand in one ``parametrize`` are one axis; each ``parametrize`` and each fixture with parameters is
another. The slice goes along the longest axis and takes the values of the others by turns: each value of each axis
comes at least once, and the test is run as often as its longest axis is long. The other combinations are marked
``slow``: ``make test-slow`` and ``make test-whole`` have them.

It is for axes that do not depend on each other: what is recorded, and whether the kernel or the plain stages give it,
of which tests/property says that they give the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mark_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark what is not in the slices of tests that have the mark ``by_turns``. What is slow already is no part of a
    slice: a value that comes in slow combinations alone would take the turn of another."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if item.get_closest_marker("by_turns") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for combinations in tests.values():
        places = [places_of(item) for item in combinations]
        for item, is_in in zip(combinations, in_slice(places), strict=True):
            if not is_in:
                item.add_marker(pytest.mark.slow)


def places_of(item: pytest.Function) -> tuple[Any, ...]:
    """What the item has on each axis: something that is equal for the same values."""
    params = item.callspec.params
    axes = [_names(mark.args[0]) for mark in item.iter_markers("parametrize")]
    of_fixtures = [[name] for name in params if not any(name in names for names in axes)]
    return tuple(tuple(id(params[name]) for name in names if name in params) for names in [*axes, *of_fixtures])


def _names(argument: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else list(argument)


def in_slice(places: Sequence[tuple[Any, ...]]) -> list[bool]:
    """Whether each of the combinations, given by its values on the axes, is in the slice."""
    ranks = [{value: rank for rank, value in enumerate(dict.fromkeys(axis))} for axis in zip(*places, strict=True)]
    longest = max(range(len(ranks)), key=lambda axis: len(ranks[axis]))
    found = []
    for place in places:
        turn = ranks[longest][place[longest]]
        is_in, rounds = True, turn
        for axis, known in enumerate(ranks):
            if axis == longest:
                continue
            # Each round of this axis starts at another place, so that the next axis does not move in step with it.
            is_in = is_in and known[place[axis]] == rounds % len(known)
            rounds += turn // len(known)
        found.append(is_in)
    return found
