"""How a result or a command is compared with what a unified test file expects of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bson.int64 import Int64
from bson.timestamp import Timestamp

_TYPES: dict[str, Any] = {
    "int": int,
    "long": (Int64, int),
    "string": str,
    "object": Mapping,
    "array": list,
    "bool": bool,
    "timestamp": Timestamp,
    "double": float,
}
_ABSENT = object()


def difference(expected: Any, found: Any, where: str = "", *, is_root: bool = True) -> str | None:
    """Where ``found`` is not as expected, in words; ``None`` where it is. A root document may have further fields."""
    special = _operator(expected)
    if special is not None:
        return _special(*special, found, where)
    if found is _ABSENT:
        return f"{where or 'the document'} is missing"
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            return f"{where or 'the result'} is {found!r}, not a document"
        if not is_root and (more := set(found) - set(expected)):
            return f"{where} has further fields {sorted(more)}"
        for name, value in expected.items():
            wrong = difference(value, found.get(name, _ABSENT), f"{where}.{name}".lstrip("."), is_root=False)
            if wrong:
                return wrong
        return None
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        if not isinstance(found, Sequence) or len(found) != len(expected):
            return f"{where} is {found!r}, not {expected!r}"
        pairs = zip(expected, found, strict=True)
        return next(filter(None, (difference(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(pairs))), None)
    same_kind = isinstance(expected, bool) == isinstance(found, bool)
    return None if same_kind and expected == found else f"{where} is {found!r}, not {expected!r}"


def _operator(expected: Any) -> tuple[str, Any] | None:
    if isinstance(expected, Mapping) and len(expected) == 1:
        name, argument = next(iter(expected.items()))
        if name.startswith("$$"):
            return name, argument
    return None


def _special(name: str, argument: Any, found: Any, where: str) -> str | None:
    if name == "$$exists":
        return None if (found is not _ABSENT) == argument else f"{where} {'is missing' if argument else 'is there'}"
    if name == "$$unsetOrMatches":
        return None if found is _ABSENT else difference(argument, found, where)
    if name == "$$type":
        names = [argument] if isinstance(argument, str) else argument
        return (
            None if any(isinstance(found, _TYPES[each]) for each in names) else f"{where} is no {argument}: {found!r}"
        )
    raise NotImplementedError(name)
