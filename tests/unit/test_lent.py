"""Lent buffers come back when nobody uses them any more, and not before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from tailrace.core.kernel import lent
from tailrace.core.kernel.lent import KEPT_MAX, LENT_MAX, LENT_MIN, lend


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """What is kept: nothing to begin with."""
    gc.collect()
    mine: dict[int, np.ndarray] = {}
    monkeypatch.setattr(lent, "_kept", mine)
    return mine


def place_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_buffer_that_nobody_has_is_lent_again() -> None:
    first = lend(LENT_MIN)
    place = place_of(first)
    assert (first.size, first.dtype, first.flags.writeable) == (LENT_MIN, np.uint8, True)
    other = lend(LENT_MIN)
    assert place_of(other) != place
    del first
    again = lend(LENT_MIN)
    assert place_of(again) == place


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array[5:9],
        lambda array: array[8:64].view(np.int64).reshape(-1, 7)[:, 2:3],
        lambda array: memoryview(array)[100:],
        lambda array: np.frombuffer(array, np.uint8, 10),
        lambda array: pa.py_buffer(array).slice(3, 4),
        lambda array: pa.Array.from_buffers(pa.uint8(), 16, [None, pa.py_buffer(array[:16])]),
        iter,
    ],
    ids=["slice", "columns", "memoryview", "frombuffer", "Arrow buffer", "Arrow array", "iterator"],
)
def test_a_part_keeps_the_whole(part: Callable[[np.ndarray], object], kept: dict[int, np.ndarray]) -> None:
    whole = lend(LENT_MIN)
    place = place_of(whole)
    some = part(whole)
    del whole
    gc.collect()
    assert not kept
    others = [lend(LENT_MIN) for _ in range(KEPT_MAX)]
    assert place not in map(place_of, others)
    del some
    gc.collect()
    assert place in kept


def test_small_and_very_large_buffers_are_not_kept(kept: dict[int, np.ndarray]) -> None:
    for size in (0, 1, LENT_MIN - 1, LENT_MAX + 1):
        assert lend(size).size == size
    assert not kept


def test_buffers_of_any_size_leave_few_classes_behind() -> None:
    sizes = range(LENT_MIN + 1, LENT_MIN + 50)
    assert {lend(size).size for size in sizes} == set(sizes)
    assert len({type(lend(size).base) for size in sizes}) == 1


def test_a_buffer_that_is_too_small_is_not_lent(kept: dict[int, np.ndarray]) -> None:
    small, large = lend(LENT_MIN), lend(3 * LENT_MIN)
    places = place_of(small), place_of(large)
    del small, large
    assert len(kept) == 2
    middle = lend(2 * LENT_MIN)
    assert middle.size == 2 * LENT_MIN
    assert place_of(middle) == places[1]
    assert place_of(lend(3 * LENT_MIN)) not in places


def test_no_more_are_kept_than_said(kept: dict[int, np.ndarray]) -> None:
    several = [lend(LENT_MIN) for _ in range(3 * KEPT_MAX)]
    places = [place_of(one) for one in several]
    while several:
        several.pop(0)
    assert list(kept) == places[-KEPT_MAX:]


def test_threads_never_have_the_same_buffer() -> None:
    def work(mark: int) -> bool:
        same = True
        for turn in range(200):
            mine = lend(LENT_MIN + mark)
            mine[:: LENT_MIN // 16] = mark
            part = mine[turn:]
            del mine
            same &= bool((part[-turn % (LENT_MIN // 16) :: LENT_MIN // 16] == mark).all())
        return same

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(1, 9)))
