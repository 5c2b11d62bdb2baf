"""Sorting as the server's C++ library sorts: elements that compare equal are left in an order of its own.

Up to sixteen elements they keep their order; longer arrays are partitioned first, around the median of three, and there
equal elements change places. The order is the library's (libstdc++), and so it is the same in every mongod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from tailrace.core.expression.language.registry import not_exact

_SHORT: Final = 16

T = TypeVar("T")


def introsorted(items: Iterable[T], less: Callable[[T, T], bool]) -> list[T]:
    """The items in order. Raises 115 where an array is such that the library would change its method."""
    found = list(items)
    spans = [(0, len(found), 2 * (len(found).bit_length() - 1))]
    while spans:
        first, last, depth = spans.pop()
        while last - first > _SHORT:
            if depth == 0:
                raise not_exact("sorting an array so arranged")
            depth -= 1
            cut = _part(found, first, last, less)
            spans.append((cut, last, depth))
            last = cut
    for place in range(1, len(found)):  # what is left is nearly in order
        item = found[place]
        to = place
        while to > 0 and less(item, found[to - 1]):
            found[to] = found[to - 1]
            to -= 1
        found[to] = item
    return found


def _part(found: list[T], first: int, last: int, less: Callable[[T, T], bool]) -> int:
    """Bring the median of three to the front, and part the rest around it; where the upper part begins."""
    _median_to(found, first, (first + 1, first + (last - first) // 2, last - 1), less)
    pivot = found[first]
    low, high = first + 1, last
    while True:
        while less(found[low], pivot):
            low += 1
        high -= 1
        while less(pivot, found[high]):
            high -= 1
        if low >= high:
            return low
        found[low], found[high] = found[high], found[low]
        low += 1


def _median_to(found: list[T], first: int, places: tuple[int, int, int], less: Callable[[T, T], bool]) -> None:
    a, b, c = places
    if less(found[a], found[b]):
        chosen = b if less(found[b], found[c]) else c if less(found[a], found[c]) else a
    else:
        chosen = a if less(found[a], found[c]) else c if less(found[b], found[c]) else b
    found[first], found[chosen] = found[chosen], found[first]
