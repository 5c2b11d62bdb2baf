"""The table of operators: each operator of the language over lists of values, as expressions and documents.

A *form* is an expression over the fields ``a``, ``b``, ``c``,
... and a list of values for each; its documents hold the
combinations. An operator that is new to the registry has no form, and ``test_operators.py`` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import bson

from tailrace.core.expression.values import value as v
from tests.differential.expression_dates import DATE_OPERATORS
from tests.differential.expression_grammar import SIMPLE
from tests.golden import operator_values as values

#: The largest number of combinations of a form.
COMBINATIONS_MAX = 400
#: The same where a form has three arguments or more, or is one of many forms of its operator.
FEWER = 130
#: The fields of the documents.
NAMES = "abcdefgh"


@dataclass(frozen=True)
class Form:
    """An expression, and the documents that it is evaluated on."""

    expression: Any
    pools: tuple[list[Any], ...]
    limit: int = COMBINATIONS_MAX

    def stage(self) -> bytes:
        return bson.encode({"$replaceWith": {"r": self.expression}})

    @functools.cached_property
    def documents(self) -> tuple[bytes, ...]:
        return tuple(map(_document_of, _thinned(self.pools, self.limit)))


def _document_of(combination: tuple[Any, ...]) -> bytes:
    named = zip(NAMES, map(values.value_of, combination), strict=False)
    return v.object_of((name.encode(), value) for name, value in named if value is not None)[1]


def _thinned(pools: tuple[list[Any], ...], limit: int) -> Iterator[tuple[Any, ...]]:
    """Every combination, or ``limit`` of them that lie evenly among all: with a step that has no factor in common with
    a list's length, each value of each list is among them."""
    every = 1
    for pool in pools:
        every *= len(pool)
    if every <= limit:
        yield from product(*pools)
        return
    step = next(step for step in range(-(-every // limit), every) if all(_coprime(step, len(pool)) for pool in pools))
    for at in range(0, every, step):
        combination, rest = [], at
        for pool in reversed(pools):
            rest, place = divmod(rest, len(pool))
            combination.append(pool[place])
        yield tuple(reversed(combination))


def _coprime(one: int, other: int) -> bool:
    while other:
        one, other = other, one % other
    return one == 1


@functools.cache
def forms_of(name: str) -> list[Form]:
    """The forms of an operator, arguments that are wrong in number or shape first; none for one that is not known."""
    if name in SHAPED:
        made = [Form(expression, pools, FEWER) for expression, pools in SHAPED[name]]
    elif name in SIMPLE:
        made = _simple(name, SIMPLE[name][1])
    elif name in DATE_OPERATORS:
        made = _parts_of_dates(name)
    else:
        return []
    return [*_misshapen(name), *made]


def _misshapen(name: str) -> list[Form]:
    """One document each: what the parser says, or what an operator makes of an odd argument that it takes."""
    arguments: list[Any] = [[], {}, None, "$b", {"x": 1}, {"x": "$a", "input": "$a"}, ["$a"], ["$a"] * 2, ["$a"] * 3]
    arguments += [["$a"] * 4, ["$a"] * 5, {"$add": ["$b", 1]}, "text", 5]
    return [Form({name: argument}, ([2.5], [3])) for argument in arguments]


def _simple(name: str, kinds: str) -> list[Form]:
    """``kinds`` in the notation of ``SIMPLE``: with the fewest arguments, with each optional one, and with one, two and
    three where any number is allowed."""
    marked: list[tuple[str, str]] = []
    for letter in kinds:
        if letter in "*?":
            marked[-1] = (marked[-1][0], letter)
        else:
            marked.append((letter, ""))
    needed = [kind for kind, mark in marked if not mark]
    more = [kind for kind, mark in marked if mark == "?"]
    any_number = [kind for kind, mark in marked if mark == "*"]
    rows = [needed + more[:count] for count in range(len(more) + 1)]
    if any_number:
        rows = [needed + any_number * count for count in range(0 if needed else 1, 4 - len(needed))]
    return [_row(name, row) for row in rows]


def _row(name: str, kinds: list[str]) -> Form:
    pools = [values.BY_KIND[kind] for kind in kinds]
    paths: list[Any] = [f"${letter}" for letter, _ in zip(NAMES, kinds, strict=False)]
    if len(kinds) == 1:
        others = [] if pools[0] is values.ANY else values.ANY
        wrapped = [paths[0]] if kinds == ["A"] else paths[0]
        return Form({name: wrapped if kinds == ["A"] else [paths[0]]}, ([*pools[0], *others],))
    return Form({name: paths}, tuple(pools), COMBINATIONS_MAX if len(kinds) == 2 else FEWER)


def _parts_of_dates(name: str) -> list[Form]:
    """``$year`` and its like."""
    return [
        Form({name: "$a"}, (values.DATES,)),
        Form({name: {"date": "$a", "timezone": "$b"}}, (values.DATES, values.ZONES), FEWER),
    ]


def _each(
    fields: dict[str, list[Any]], *, keep: tuple[str, ...] = ()
) -> list[tuple[dict[str, Any], tuple[list[Any], ...]]]:
    """An argument that is a document: with those of its fields that are in ``keep``, and with all."""
    rows = [{name: fields[name] for name in keep}] if keep else []
    return [
        ({name: f"${letter}" for letter, name in zip(NAMES, row, strict=False)}, tuple(row.values()))
        for row in [*rows, fields]
    ]


def _shaped(name: str, fields: dict[str, list[Any]], *keep: str) -> list[tuple[Any, tuple[list[Any], ...]]]:
    return [({name: argument}, pools) for argument, pools in _each(fields, keep=keep)]


_BODY = {"$add": ["$$this", 1]}
_REGEX_FIELDS: dict[str, list[Any]] = {"input": values.TEXTS, "regex": values.PATTERNS}
_OPTIONS: dict[str, list[Any]] = {**_REGEX_FIELDS, "options": [values.MISSING, "", "i", "m", "sx", "q", None, 5]}
_SOME_N: dict[str, list[Any]] = {"n": values.SMALL, "input": values.ARRAYS}
_TRIM: dict[str, list[Any]] = {"input": values.TEXTS, "chars": values.TEXTS}
_REPLACE: dict[str, list[Any]] = {"input": values.TEXTS, "find": values.TEXTS, "replacement": ["", "X", "日", None, 5]}
_DATE_ADD: dict[str, list[Any]] = {
    "startDate": values.SOME_DATES, "unit": values.UNITS, "amount": values.AMOUNTS, "timezone": values.ZONES
}  # fmt: skip
_FROM_PARTS: dict[str, list[Any]] = {"year": values.YEARS, "month": values.PARTS, "day": values.PARTS}
_TIMES: dict[str, list[Any]] = dict.fromkeys(("hour", "minute", "second", "millisecond"), values.PARTS)
_ISO: dict[str, list[Any]] = {"isoWeekYear": values.YEARS, "isoWeek": values.PARTS, "isoDayOfWeek": values.PARTS}
_FIELDS = ["a", "b", "a.b", "$x", ""]

#: Operators whose argument has a shape of its own: expressions and the lists of values of their fields.
SHAPED: dict[str, list[tuple[Any, tuple[list[Any], ...]]]] = {
    "$literal": [({"$literal": given}, ([1],)) for given in ("$a", {"$add": ["$a", 1]}, [1, "$a"], None, 2.5)],
    "$const": [({"$const": given}, ([1],)) for given in ("$a", {"$add": ["$a", 1]}, [1, "$a"], None, 2.5)],
    "$meta": [({"$meta": given}, ([1],)) for given in ("textScore", "searchScore", "geoNearPoint", "x", "")],
    "$cond": [
        ({"$cond": ["$a", "$b", "$c"]}, (values.BOOLEANS, values.ANY[:4], values.ANY[:4])),
        ({"$cond": {"if": "$a", "then": 1, "else": "$b"}}, (values.ANY, values.ANY[:4])),
    ],
    "$switch": [
        ({"$switch": {"branches": [{"case": "$a", "then": 1}, {"case": "$b", "then": "$c"}], "default": "$d"}},
         (values.BOOLEANS, values.BOOLEANS, values.ANY[:3], values.ANY[:3])),
        ({"$switch": {"branches": [{"case": "$a", "then": 1}]}}, (values.ANY,)),
    ],
    "$let": [({"$let": {"vars": {"v": "$a"}, "in": ["$$v", "$$v.a"]}}, (values.ANY,))],
    "$map": [
        ({"$map": {"input": "$a", "in": ["$$this", "$b"]}}, (values.ARRAYS, values.ANY[:4])),
        ({"$map": {"input": "$a", "as": "one", "in": {"$add": ["$$one", 1]}}}, (values.ARRAYS,)),
    ],
    "$filter": [
        ({"$filter": {"input": "$a", "cond": {"$gt": ["$$this", "$b"]}}}, (values.ARRAYS, values.ANY)),
        ({"$filter": {"input": "$a", "cond": "$$this", "limit": "$b"}}, (values.ARRAYS, values.SMALL)),
    ],
    "$reduce": [
        ({"$reduce": {"input": "$a", "initialValue": "$b", "in": {"$concatArrays": ["$$value", ["$$this"]]}}},
         (values.ARRAYS, [[], [1], None, values.MISSING, 5])),
        ({"$reduce": {"input": "$a", "initialValue": "$b", "in": {"$add": ["$$this", "$$value"]}}},
         (values.ARRAYS, values.SMALL)),
    ],
    "$zip": [
        ({"$zip": {"inputs": ["$a", "$b"]}}, (values.ARRAYS, values.ARRAYS)),
        ({"$zip": {"inputs": ["$a", "$b"], "useLongestLength": True, "defaults": ["$c", 0]}},
         (values.ARRAYS, values.ARRAYS, [None, 1, "x"])),
    ],
    "$sortArray": [
        ({"$sortArray": {"input": "$a", "sortBy": by}}, (values.ARRAYS,)) for by in (1, -1, {"a": 1}, {"b": -1,
        "a": 1}, 2)
    ],
    **{name: _shaped(name, _SOME_N) for name in ("$firstN", "$lastN", "$minN", "$maxN")},
    **{name: _shaped(name, _TRIM, "input") for name in ("$trim", "$ltrim", "$rtrim")},
    **{name: _shaped(name, _OPTIONS, "input", "regex") for name in ("$regexFind", "$regexFindAll", "$regexMatch")},
    **{name: _shaped(name, _REPLACE) for name in ("$replaceOne", "$replaceAll")},
    "$convert": _shaped("$convert", {"input": [*values.ANY, *values.TEXTS, *values.NUMBERS], "to": values.TYPES})
    + _shaped("$convert", {"input": values.ANY, "to": values.TYPES, "onError": ["e", None], "onNull": ["n",
    values.MISSING]}),
    "$getField": [
        *(({"$getField": name}, (values.OBJECTS,)) for name in _FIELDS),
        *(({"$getField": {"field": name, "input": "$a"}}, (values.OBJECTS,)) for name in _FIELDS),
    ],
    "$setField": [
        ({"$setField": {"field": name, "input": "$a", "value": "$b"}}, (values.OBJECTS,
        values.ANY[:5])) for name in _FIELDS
    ] + [({"$setField": {"field": "a", "input": "$a", "value": "$$REMOVE"}}, (values.OBJECTS,))],
    "$unsetField": [({"$unsetField": {"field": name, "input": "$a"}}, (values.OBJECTS,)) for name in _FIELDS],
    "$median": [({"$median": {"input": "$a", "method": "approximate"}}, ([*values.ARRAYS, *values.NUMBERS],))],
    "$percentile": [
        ({"$percentile": {"input": "$a", "p": shares, "method": "approximate"}}, ([*values.ARRAYS, *values.NUMBERS],))
        for shares in values.SHARES
    ],
    "$range": [
        ({"$range": ["$a", "$b"]}, (values.BOUNDS, values.BOUNDS)),
        ({"$range": ["$a", "$b", "$c"]}, (values.BOUNDS, values.BOUNDS, values.BOUNDS)),
    ],
    "$round": [({"$round": ["$a", "$b"]}, (values.NUMBERS, values.SMALL)), ({"$round": "$a"}, (values.NUMBERS,))],
    "$trunc": [({"$trunc": ["$a", "$b"]}, (values.NUMBERS, values.SMALL)), ({"$trunc": "$a"}, (values.NUMBERS,))],
    "$dateAdd": _shaped("$dateAdd", _DATE_ADD, "startDate", "unit", "amount"),
    "$dateSubtract": _shaped("$dateSubtract", _DATE_ADD, "startDate", "unit", "amount"),
    "$dateDiff": _shaped(
        "$dateDiff",
        {"startDate": values.SOME_DATES, "endDate": values.DATES, "unit": values.UNITS, "timezone": values.ZONES,
         "startOfWeek": values.WEEKDAYS},
        "startDate", "endDate", "unit",
    ),
    "$dateTrunc": _shaped(
        "$dateTrunc",
        {"date": values.DATES, "unit": values.UNITS, "binSize": values.AMOUNTS, "timezone": values.ZONES,
         "startOfWeek": values.WEEKDAYS},
        "date", "unit",
    ),
    "$dateFromParts": _shaped("$dateFromParts", _FROM_PARTS, "year")
    + _shaped("$dateFromParts", {"year": values.YEARS, **_TIMES})
    + _shaped("$dateFromParts", {**_ISO, "timezone": values.ZONES}, "isoWeekYear", "isoWeek"),
    "$dateToParts": _shaped(
        "$dateToParts", {"date": values.DATES, "timezone": values.ZONES, "iso8601": values.BOOLEANS}, "date"
    ),
    "$dateToString": _shaped(
        "$dateToString",
        {"date": values.DATES, "format": values.FORMATS, "timezone": values.ZONES, "onNull": ["n", values.MISSING]},
        "date", "format",
    ),
    "$dateFromString": _shaped(
        "$dateFromString",
        {"dateString": values.DATE_TEXTS, "format": values.FORMATS, "timezone": values.ZONES, "onError": ["e", None]},
        "dateString",
    ) + _shaped("$dateFromString", {"dateString": [*values.DATE_TEXTS, *values.TEXTS], "timezone": values.ZONES}),
}  # fmt: skip
