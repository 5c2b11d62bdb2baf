"""What plain Python makes of a document for a nested column, without the code that makes the columns: only the column's
type is taken from the table. A value that the column does not show is an error here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from math import isnan
from typing import Any

from bson import json_util
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId

from tailrace.lake.tables.nested import LeafType, ListType, NestedType, ObjectType

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN_FROM = datetime(1, 1, 3, tzinfo=UTC)


class NotShownError(AssertionError):
    """The column does not show a value of the document."""


def expected(type_: NestedType, value: Any, *, grows: bool = True) -> Any:
    """The value that a reader must find. Structs are mappings by the documents' names. ``grows``: a field that the type
    lacks is an error."""
    if value is None:
        return None
    if _is_text(type_):
        if grows:
            _check_empty(type_, value)
        return json_util.dumps(value, json_options=json_util.RELAXED_JSON_OPTIONS)
    if isinstance(type_, LeafType):
        return _scalar(type_.name, value)
    if isinstance(type_, ListType):
        if not isinstance(value, list):
            raise NotShownError(type_, value)
        return [expected(type_.element, one, grows=grows) for one in value]
    if not isinstance(value, dict):
        raise NotShownError(type_, value)
    types = dict(type_.fields)
    hidden = [name for name, one in value.items() if one is not None and name not in types]
    if hidden and grows:
        raise NotShownError(hidden, value)
    return {name: expected(one, value.get(name), grows=grows) for name, one in types.items()}


def renamed(type_: NestedType, names: Any, value: Any) -> Any:
    """What a reader found, with the documents' names. ``names``: the Arrow type, with its fields in order."""
    if value is None or _is_text(type_) or isinstance(type_, LeafType):
        return value
    if isinstance(type_, ListType):
        return [renamed(type_.element, names.value_type, one) for one in value]
    return {
        name: renamed(one, names.field(place).type, value[names.field(place).name])
        for place, (name, one) in enumerate(type_.fields)
    }


def _is_text(type_: NestedType) -> bool:
    return type_ == LeafType("json") or _holds_nothing(type_)


def _holds_nothing(type_: NestedType) -> bool:
    if isinstance(type_, ListType):
        return _holds_nothing(type_.element)
    return not type_.fields if isinstance(type_, ObjectType) else type_.name == "void"


def _check_empty(type_: NestedType, value: Any) -> None:
    """An array or object that has no type yet holds nothing."""
    if isinstance(type_, ListType) and not (isinstance(value, list) and all(map(_is_nothing, value))):
        raise NotShownError(type_, value)
    if isinstance(type_, ObjectType) and not (isinstance(value, dict) and all(one is None for one in value.values())):
        raise NotShownError(type_, value)


def _is_nothing(value: Any) -> bool:
    if isinstance(value, dict):
        return all(one is None for one in value.values())
    return value is None or (isinstance(value, list) and all(map(_is_nothing, value)))


def _scalar(name: str, value: Any) -> Any:
    if name == "timestamp" and isinstance(value, DatetimeMS):
        try:
            moment = _EPOCH + timedelta(milliseconds=int(value))
        except OverflowError:
            return None
        return moment if moment >= _SHOWN_FROM else None
    if name == "double" and isinstance(value, (int, float)) and not isinstance(value, bool):
        if float(value) != value and not isnan(value):
            raise NotShownError(name, value)
        return float(value)
    if name == "long" and isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    kinds: dict[str, Any] = {
        "boolean": bool, "binary": bytes, "string": (str, Decimal128, ObjectId), "objectid": ObjectId,
    }  # fmt: skip
    if name in kinds and isinstance(value, kinds[name]):
        return str(value) if name in ("string", "objectid") else value
    raise NotShownError(name, value)
