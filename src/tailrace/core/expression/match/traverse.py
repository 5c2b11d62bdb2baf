"""Dotted paths of the query language: which values of a document a path stands for.

Different from the paths of expressions: arrays on the way are entered, a numeric part may be an index as well as a
name, and an array at the end stands for its elements and for itself. ``None`` in a result means "nothing there".
"""

from __future__ import annotations

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe


def values_at(document: bytes, names: tuple[bytes, ...], index: int, leaf_arrays: bool) -> list[Maybe]:
    """The values that ``names[index:]`` stands for. ``leaf_arrays``: an array at the end also gives its elements."""
    last = len(names) - 1
    while True:
        found = v.field(document, names[index])
        if found is None:
            return [None]
        kind, data = found
        if kind == v.ARRAY:
            if index < last and names[index + 1 :] != (b"",):  # "a." ends at an array as "a" does
                return _inside(data, names, index + 1, leaf_arrays)
            return [*v.elements_of(found), found] if leaf_arrays else [found]
        if index == last:
            return [found]
        if kind != v.OBJECT:
            return [None]
        document = data
        index += 1


def _inside(array: bytes, names: tuple[bytes, ...], index: int, leaf_arrays: bool) -> list[Maybe]:
    """The values that ``names[index:]`` stands for in the elements of an array in the middle of a path."""
    wanted = names[index]
    numeric = wanted.isdigit()
    at_end = index == len(names) - 1
    result: list[Maybe] = []
    for name, kind, data in v.fields_of(array):
        hit = numeric and name == wanted
        if kind == v.OBJECT:
            result += values_at(data, names, index, leaf_arrays)
            if hit:
                result += [(kind, data)] if at_end else values_at(data, names, index + 1, leaf_arrays)
        elif hit:
            if at_end:
                result.append((kind, data))
            elif kind == v.ARRAY:
                result += _inside(data, names, index + 1, leaf_arrays)
    return result
