"""The types of typed columns that hold no other types: what a value of each of them is, and which values fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, cast

import pyarrow as pa
from bson import json_util
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId

_RELAXED: Final = json_util.RELAXED_JSON_OPTIONS
_DECIMAL: Final = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_INT32, _INT64, _EXACT = 2**31, 2**63, 2**53
DAY_MS: Final = 86_400_000
#: The years 1 to 9999: the dates that every reader of Delta knows. One date of another year makes a whole column
#: unreadable for programs that make Python's dates of it.
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
#: Times of day begin two days later: PySpark makes them local with Python's ``fromtimestamp``, which looks a day back.
FIRST_MS, LAST_MS = (FIRST_DAY + 2) * DAY_MS, (LAST_DAY + 1) * DAY_MS - 1


class MisfitError(ValueError):
    """A value that its column cannot hold."""


class FarDateError(MisfitError):
    """A date that the readers of a column fail on."""


def scalar_arrow(type_: str) -> pa.DataType | None:
    """The Arrow type of a scalar type; ``None`` if it is not one."""
    arrow = _ARROW.get(type_)
    if arrow is not None:
        return arrow
    match = _DECIMAL.fullmatch(type_)
    if match is None or not 1 <= int(match[1]) <= 38 or int(match[2]) > int(match[1]):
        return None
    return pa.decimal128(int(match[1]), int(match[2]))


def type_of(value: Any) -> str:
    """The column type for a value. A value without a counterpart outside BSON is text in Extended JSON."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "long"
    if isinstance(value, bytes):
        return "binary"
    return _INFERRED.get(type(value), "json")


def scalar_maker(type_: str) -> Callable[[Any], Any]:
    """What makes a column's value of a document's, for a type that ``scalar_arrow`` knows. It raises MisfitError for a
    value that does not fit, or what Python says about it."""
    maker = _MAKERS.get(type_)
    if maker is not None:
        return maker
    match = _DECIMAL.fullmatch(type_)
    assert match is not None
    return lambda value: _decimal(value, int(match[1]), int(match[2]))


def _string(value: Any) -> str:
    if isinstance(value, (str, Decimal128, ObjectId)):
        return str(value).encode("utf-8", "replace").decode()
    raise MisfitError


def _bounded_integer(value: Any, bound: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -bound <= value < bound:
        return int(value)
    raise MisfitError


def _double(value: Any) -> float:
    if isinstance(value, float):
        return value
    return float(_bounded_integer(value, _EXACT))


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise MisfitError


def is_far(value: Any, type_: str) -> bool:
    """Whether a value is a date that a column of that type, ``date`` or ``timestamp``, does not show."""
    first = FIRST_MS if type_ == "timestamp" else FIRST_DAY * DAY_MS
    return isinstance(value, DatetimeMS) and not first <= int(value) <= LAST_MS


def _milliseconds(value: Any, type_: str) -> int:
    if not isinstance(value, DatetimeMS):
        raise MisfitError
    if is_far(value, type_):
        raise FarDateError
    return int(value)


def _timestamp(value: Any) -> int:
    """Microseconds."""
    return _milliseconds(value, "timestamp") * 1000


def _date(value: Any) -> int:
    """Days."""
    return _milliseconds(value, "date") // DAY_MS


def _binary(value: Any) -> bytes:
    if isinstance(value, bytes):
        return bytes(value)
    raise MisfitError


def _object_id(value: Any) -> str:
    if isinstance(value, ObjectId):
        return str(value)
    raise MisfitError


def _decimal(value: Any, precision: int, scale: int) -> Decimal:
    number = value.to_decimal() if isinstance(value, Decimal128) else Decimal(_bounded_integer(value, _INT64))
    if not number.is_finite():
        raise MisfitError
    sign, digits, exponent = number.as_tuple()
    # Not normalize(): it rounds to the 28 digits of Python's context.
    text = "".join(map(str, digits)).lstrip("0")
    kept = text.rstrip("0")
    places = -(cast("int", exponent) + len(text) - len(kept)) if kept else 0
    if places > scale or len(kept) - places > precision - scale:
        raise MisfitError
    return Decimal((sign, tuple(map(int, kept)), -places))


def json_text(value: Any) -> str:
    """A value in relaxed Extended JSON."""
    text: str = json_util.dumps(value, json_options=_RELAXED)
    return text.encode("utf-8", "replace").decode()


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "string": _string,
    "int": lambda value: _bounded_integer(value, _INT32),
    "long": lambda value: _bounded_integer(value, _INT64),
    "double": _double,
    "boolean": _boolean,
    "timestamp": _timestamp,
    "date": _date,
    "binary": _binary,
    "objectid": _object_id,
    "json": json_text,
}
_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
    "binary": pa.binary(),
    "objectid": pa.string(),
    "json": pa.string(),
}
_INFERRED: Final[dict[type, str]] = {
    float: "double",
    str: "string",
    DatetimeMS: "timestamp",
    ObjectId: "objectid",
    Decimal128: "string",
}

#: The scalar types by name; besides these there are ``decimal(p,s)``.
SCALARS: Final = tuple(_ARROW)
