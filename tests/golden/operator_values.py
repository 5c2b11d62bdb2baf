"""The values that the table of operators gives to each operator, by the kind of argument that an operator wants.

Every list holds the edges of its kind, and then values of other kinds, null and missing ones. They are kept apart from
those of the expression fuzz, which may change without asking a server again.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, Final

import bson
from bson import Binary, Code, DatetimeMS, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe

MISSING: Final = object()


def value_of(given: Any) -> Maybe:
    """A value as the core has it: ``None`` is a missing one."""
    if given is MISSING:
        return None
    ((_, kind, data),) = v.fields_of(bson.encode({"": given}))
    return kind, data


def _date(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc]


_I32, _I64 = 2**31, 2**63
_MOMENT = _date(2021, 3, 4, 5, 6, 7, 89000)
_ID = ObjectId("5f0000000000000000000001")
_DECIMALS = ["0", "-1.50", "1E-7", "2.5", "9999999999999999999999999999999999", "1E+6144", "NaN", "-Infinity"]
_INTEGERS = [0, 1, -1, 3, -3, 7, -7, 120, _I32 - 1, -_I32, Int64(5), Int64(-5), Int64(2**53 + 1)]
_INTEGERS += [Int64(_I64 - 1), Int64(-_I64), Int64(-_I64 + 1)]
_DOUBLES = [0.0, -0.0, 2.5, -2.5, 0.5, -0.75, 1e300, 5e-324, 2.0**31, 2.0**63, math.inf, -math.inf, math.nan]
_BESIDE = [None, MISSING, "x", True, [1], _MOMENT]

#: Anything at all: each type of BSON, and the edges of some.
ANY: Final[list[Any]] = [
    MISSING, None, -7, 0, _I32 - 1, Int64(-_I64), Int64(3), 2.5, math.nan, -0.0, math.inf, Decimal128("1.50"),
    Decimal128("NaN"), "", "abc", "12", {}, {"a": 1, "b": None}, [], [1, "a", None], [[2, 1], {"a": 1}],
    Binary(b"\x01\xff"),
    _ID, True, False, _MOMENT, Timestamp(1600000000, 7), Regex("^a", "i"), MinKey(), MaxKey(), Code("f()"),
]  # fmt: skip
NUMBERS: Final[list[Any]] = [*_INTEGERS, *_DOUBLES, *map(Decimal128, _DECIMALS), *_BESIDE]
SMALL: Final[list[Any]] = [
    0,
    1,
    2,
    -1,
    -2,
    5,
    20,
    _I32 - 1,
    -_I32,
    Int64(1),
    1.0,
    1.5,
    Decimal128("2"),
    None,
    MISSING,
    "1",
]
#: For ``$range``: servers before 6.0 die of one that is too long.
BOUNDS: Final[list[Any]] = [value for value in SMALL if not isinstance(value, int) or abs(value) < 100]
TEXTS: Final[list[Any]] = [
    "", "a", "b", "A", "abc", "aBc1", "x,y,,z", " pad \t", "naïve", "日本語", "émoji 😀 end", "abab", "12", "-7",
    "3.5e2", "0x1A",
    "true", "5f0000000000000000000001", "2021-03-04T05:06:07.089Z", "a\x00b", "ÀÉ", "ß", None, MISSING, 5, _MOMENT,
    [1],
    Binary(b"ab"),
]  # fmt: skip
ARRAYS: Final[list[Any]] = [
    [], [1], [3, 1, 2], [1, 1.0, Int64(1), Decimal128("1")], ["b", "a", "B"], [None, 1, None], [[1, 2], [1]],
    [{"a": 2}, {"a": 1, "b": 1}, {}], [["k", 1], ["k", 2]], [{"k": "a", "v": 1}, {"k": "b", "v": None}], [math.nan,
    1, -0.0],
    [True, "x", _MOMENT, None, {"a": 1}], [False, 0], [0, None], list(range(12)), [-5, 2.5, Int64(2**40)],
    None, MISSING, "abc", 5, {"a": 1},
]  # fmt: skip
OBJECTS: Final[list[Any]] = [
    {}, {"a": 1}, {"a": None, "b": [1, 2]}, {"b": 1, "a": {"b": 2}}, {"a": {"a": {"a": 1}}}, {"": 1, "a.b": 2},
    {"$x": 1},
    {"a": 1, "c": math.nan}, None, MISSING, [], [{"a": 1}], "x", 5, _MOMENT,
]  # fmt: skip
BOOLEANS: Final[list[Any]] = [
    True,
    False,
    0,
    1,
    0.0,
    -0.0,
    math.nan,
    Decimal128("0"),
    "",
    "x",
    [],
    {},
    None,
    MISSING,
    _MOMENT,
]
TIMESTAMPS: Final[list[Any]] = [
    Timestamp(1600000000, 7), Timestamp(2**32 - 1, 2**32 - 1), Timestamp(1, 2**31), None, MISSING, 5, _MOMENT, "x",
]  # fmt: skip
#: The first and the last days of years that begin on each day of the week, of leap years and centuries, and what is no
#: date.
DATES: Final[list[Any]] = [
    *(_date(year, 1, 1) for year in (2017, 2018, 2019, 2014, 2015, 2016, 2011)),
    *(_date(year, 1, day) for year in (2017, 2018, 2016) for day in (2, 3, 4, 7, 8)),
    *(_date(year, 12, day, 23, 59, 59, 999000) for year in (2016, 2017, 2018, 2020) for day in (28, 31)),
    _date(2020, 2, 29, 12), _date(2000, 2, 29), _date(1900, 3, 1), _date(2021, 3, 28, 1), _date(2021, 10, 31, 0,
    30), _MOMENT,
    _date(1970, 1, 1), DatetimeMS(-1), _date(1969, 12, 31), _date(1583, 1, 2), DatetimeMS(-62135596800001),
    DatetimeMS(253402300800000), DatetimeMS(-_I64), DatetimeMS(_I64 - 1),
    _ID, Timestamp(1600000000, 7), None, MISSING, "2021-03-04", 5, Decimal128("1"),
]  # fmt: skip
ZONES: Final[list[Any]] = [
    "UTC", "+01:30", "-0500", "+14", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe",
    "Nowhere/Land", "", None, MISSING, 5,
]  # fmt: skip
UNITS: Final[list[Any]] = [
    "year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond", "decade", None, MISSING, 5,
]  # fmt: skip
#: A few dates, for operators that have other arguments to vary.
SOME_DATES: Final[list[Any]] = [
    _date(2016, 2, 29, 12, 30), _date(2021, 3, 28, 0, 59, 59), _date(2020, 12, 31, 23, 59, 59, 999000), _date(1969,
    12, 31, 23),
    _date(2017, 1, 1), _date(1950, 7, 2), DatetimeMS(_I64 - 1), _ID, None, MISSING, "x",
]  # fmt: skip
AMOUNTS: Final[list[Any]] = [
    0,
    1,
    -1,
    3,
    12,
    -13,
    400,
    Int64(_I64 - 1),
    Int64(2**40),
    2.0,
    1.5,
    Decimal128("2"),
    None,
    MISSING,
    "1",
]
WEEKDAYS: Final[list[Any]] = [MISSING, "monday", "sun", "Friday", "x", None, 5]
FORMATS: Final[list[Any]] = [
    "%Y-%m-%d", "%H:%M:%S.%L", "%d/%m/%Y %z", "%G-W%V-%u", "%j %w %U %Z %%", "%Y%m%d", "%q", "%", "", None, MISSING,
    5,
]  # fmt: skip
DATE_TEXTS: Final[list[Any]] = [
    "2021-03-04", "2021-03-04T05:06:07.089Z", "2021-03-04 05:06:07", "2021-03-04T05:06:07+0100", "20210304",
    "2021/03/04",
    "04/03/2021 +0100", "2021-W09-4", "2021-02-30", "2021-13-01", "x", "", "2021-063", "2021-03-04T05:06",
    "2017-07-06T12:35:37 America/New_York", "1600-01-01", None, MISSING, 5,
]  # fmt: skip
PARTS: Final[list[Any]] = [0, 1, -1, 13, 31, 32, 99, -40, 2000, Int64(7), 2.0, 1.5, Decimal128("3"), None, MISSING, "1"]
YEARS: Final[list[Any]] = [
    1,
    0,
    1969,
    1970,
    2016,
    2020,
    9999,
    10000,
    -1,
    Int64(2021),
    2021.0,
    2020.5,
    None,
    MISSING,
    "x",
]
TYPES: Final[list[Any]] = [
    "int", "long", "double", "decimal", "bool", "string", "date", "objectId", 1, 16, 18, 19, "array", "x", None,
    MISSING, 1.5,
]  # fmt: skip
PATTERNS: Final[list[Any]] = [
    "a",
    "^a",
    "b$",
    "[a-c]+",
    "(a)(b)?",
    "日",
    "(",
    Regex("A", "i"),
    Regex("^b", "m"),
    "",
    None,
    MISSING,
    5,
]
SHARES: Final[list[Any]] = [[0.5], [0, 0.25, 1], [0.1, 0.9], [Decimal128("0.5")]]

#: The letters of ``SIMPLE`` in tests/differential/expression_grammar.py.
BY_KIND: Final[dict[str, list[Any]]] = {
    "x": ANY, "n": NUMBERS, "i": SMALL, "s": TEXTS, "a": ARRAYS, "o": OBJECTS, "b": BOOLEANS, "t": TIMESTAMPS,
    "d": DATES,
    "A": ARRAYS, "r": PATTERNS,
}  # fmt: skip
