"""Spark's simple filters on the typed columns of a batch read, as a ``$match`` on the event.

Spark hands over only what all rows must pass, and applies its own filters again whatever is made of them here; so a
filter may be made wider, or left out, but never narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import bson
from bson.timestamp import Timestamp
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

#: Columns that are a text of the event.
_TEXTS: Final[Mapping[str, str]] = {"operation_type": "operationType", "database": "ns.db", "collection": "ns.coll"}
_SECONDS: Final = ("cluster_time", "t")
_SECONDS_MAX: Final = 0xFFFFFFFF


def match_of(filters: Iterable[Filter]) -> bytes | None:
    """A ``$match`` stage that passes every event whose row passes ``filters``; ``None`` where they say nothing."""
    parts = [part for one in filters if (part := _part(one)) is not None]
    return bson.encode({"$match": {"$and": parts}}) if parts else None


def _part(one: Filter) -> dict[str, Any] | None:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    if len(attribute) == 1 and attribute[0] in _TEXTS:
        return _text(one, _TEXTS[attribute[0]])
    if attribute == _SECONDS and isinstance(getattr(one, "value", None), int):
        make = _TIMES.get(type(one))
        return None if make is None else make(one.value)  # type: ignore[attr-defined]
    return None


def _text(one: Filter, path: str) -> dict[str, Any] | None:
    if isinstance(one, EqualTo) and isinstance(one.value, str):
        return {path: {"$eq": one.value}}
    if isinstance(one, In) and all(isinstance(value, str) or value is None for value in one.value):
        return {path: {"$in": [value for value in one.value if value is not None]}}
    if isinstance(one, StringStartsWith) and one.value:
        # As a range it needs no escaping: up to the text whose last character is the next one.
        last = ord(one.value[-1])
        if last < 0xD7FF:
            return {path: {"$gte": one.value, "$lt": one.value[:-1] + chr(last + 1)}}
        return {path: {"$gte": one.value}}
    return None


def _from(seconds: int) -> dict[str, Any]:
    if seconds > _SECONDS_MAX:
        return {"$alwaysFalse": 1}
    return {"clusterTime": {"$gte": Timestamp(max(0, seconds), 0)}}


def _before(seconds: int) -> dict[str, Any]:
    if seconds > _SECONDS_MAX:
        return {"$alwaysTrue": 1}
    return {"clusterTime": {"$lt": Timestamp(max(0, seconds), 0)}}


_TIMES: Final[dict[type[Filter], Callable[[int], dict[str, Any]]]] = {
    EqualTo: lambda seconds: {"$and": [_from(seconds), _before(seconds + 1)]},
    GreaterThan: lambda seconds: _from(seconds + 1),
    GreaterThanOrEqual: _from,
    LessThan: _before,
    LessThanOrEqual: lambda seconds: _before(seconds + 1),
}
