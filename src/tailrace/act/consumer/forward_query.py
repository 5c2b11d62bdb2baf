"""``rules.forward`` as a query: the part of a commit's filter which demands that its position is not behind the
record's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.act.consumer.rules.forward import progress


def forward(position: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions under which a record's position is not ahead of ``position``."""
    new = progress(position)
    if new.generation:
        return {"position.generation": _not_above(Int64(new.generation))}
    conditions: dict[str, Any] = {}
    if new.place is not None:
        conditions["position.token._data"] = _not_above(new.place)
    if new.time is not None:
        conditions["position.at"] = _not_above(new.time)
        if new.copied is not None and new.at:
            conditions["$nor"] = _further_copies(new.time, *new.copied)
    return conditions


def forward_expressions(position: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The same as conditions of an update pipeline, or stricter where the record holds values of other types. ``None``
    where only a query says it: while a snapshot is under way."""
    new = progress(position)
    if new.generation:
        return [_not_beyond("$position.generation", Int64(new.generation))]
    if new.copied is not None:
        return None
    conditions = []
    if new.place is not None:
        conditions.append(_not_beyond("$position.token._data", new.place))
    if new.time is not None:
        conditions.append(_not_beyond("$position.at", new.time))
    return conditions


def _not_beyond(path: str, value: object) -> dict[str, Any]:
    """A missing field is less than any value."""
    return {"$lte": [path, {"$literal": value}]}


def _not_above(value: object) -> dict[str, Any]:
    """A condition that also holds for values of other types and for a missing field."""
    return {"$not": {"$gt": value}}


def _further_copies(at: Timestamp, restarts: int, documents: int) -> list[dict[str, Any]]:
    """The record holds the same snapshot, complete or further advanced."""
    begun, copied = ({"$sum": f"$position.snapshot.collections.{name}"} for name in ("restarts", "documents"))
    further = {
        "$or": [{"$gt": [begun, restarts]}, {"$and": [{"$eq": [begun, restarts]}, {"$gt": [copied, documents]}]}]
    }
    return [
        {"position.at": at, "position.snapshot": {"$exists": False}},
        {"position.at": at, "$expr": further},
    ]
