"""What differs between the languages of server versions: pipelines to open, and expressions on a document.

The answers of mongod 4.4.2, 5.0.4, 6.0.27 and 7.0.28 to these stand in ``data/language_versions.json``, made by
``python -m tests.golden.record_language``. A share of NaN in ``$percentile`` is not among them: 7.0.28 ends.
"""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

from bson import Binary, Decimal128, Int64

from tailrace.core.expression.language.registry import OPERATORS
from tailrace.core.expression.stages.forbidden import STAGES_SINCE

nan, inf = math.nan, math.inf

#: Expressions that name a later operator, in each place where an operator may stand.
_PLACES: list[dict[str, Any]] = [
    {"$project": {"x": {"$fooo": 1}}},
    {"$project": {"x": {"$firstN": {"n": 1, "input": "$a"}}}},
    {"$match": {"$expr": {"$firstN": {"n": 1, "input": "$a"}}}},
    {"$set": {"x": {"$firstN": {"n": 1, "input": "$a"}}}},
    {"$redact": {"$getField": "a"}},
]
_SHAPES: list[dict[str, Any]] = [{"$addFields": {}}, {"$set": {}}, {"$project": {}}, {"$unset": []}]
_SHAPES += [{"$set": {"x": {}}}, {"$set": {"x": {"y": {}}}}, {"$set": {"a.b": {}}}, {"$project": {"x": {}}}]
_VARIABLES = ["IS_MR", "JS_SCOPE", "SEARCH_META", "USER_ROLES", "CLUSTER_TIM", "", "9a", "a-b", "_a", ".a"]
_NAMES = ["", "9a", "a-b", "A", "_a", "USER_ROLES", "CURRENT", "ok"]
_QUERIES: list[dict[str, Any]] = [{"a": {name: [1, 1]}} for name in ("$near", "$nearSphere", "$geoNear")]
_QUERIES += [{".".join("a" * count): 1} for count in (180, 181, 190)] + [{"$sampleRate": 0}, {"$sampleRate": 1}]
_DENSIFY = {"$densify": {"field": "a", "range": {"step": 1, "bounds": "full"}}}
_FORBIDDEN: list[dict[str, Any]] = [{"$limit": each} for each in (0, -1, 1.5, "x", 1)]
_FORBIDDEN += [{"$skip": each} for each in (0, -1, 1.5, "x", 1)] + [{"$geoNear": each} for each in (5, {})]
_FORBIDDEN += [{"$unionWith": each} for each in (5, {}, {"x": 1}, {"pipeline": []}, "c")]
_FORBIDDEN += [
    {"$out": each} for each in ({}, {"db": "a"}, {"coll": "a"}, {"db": "a", "coll": "b", "x": 1}, 5, "", "c")
]
_FORBIDDEN += [{"$documents": 5}, {"$listSampledQueries": 5}, {"$listSampledQueries": {"x": 1}}]
_FORBIDDEN += [{"$facet": {"a": [stage]}} for stage in (_DENSIFY, {"$nope": {}}, {"$sort": {"a": 1}})]
_FORBIDDEN += [
    {"$group": {"_id": 1, "a": {name: argument}}}
    for name, argument in [
        ("$median", {}),
        ("$median", {"input": "$a", "method": "approximate"}),
        ("$percentile", {"input": "$a", "p": [0.5], "method": "approximate"}),
        ("$count", {}),
        ("$top", {"sortBy": {"a": 1}, "output": "$a"}),
        ("$nope", 1),
    ]
]

#: Stages to open a stream with: the code, or 0.
STAGES: list[dict[str, Any]] = [
    *(
        {"$replaceWith": {"x": {name: {"$$bad": 1, "zz": 2}}}}
        for name in sorted(set(OPERATORS) - {"$literal", "$const"})
    ),
    *({name: {}} for name in sorted(STAGES_SINCE)),
    *_PLACES,
    *_SHAPES,
    *({"$set": {"x": f"$${name}"}} for name in _VARIABLES),
    *({"$set": {"x": {"$let": {"vars": {name: 1}, "in": 1}}}} for name in _NAMES),
    {"$set": {"x": {"$map": {"input": [1], "as": "A", "in": 1}}}},
    {"$set": {"x": {"$ifNull": [1]}}},
    {"$set": {"x": {"$ifNull": [1, 2, 3]}}},
    {"$set": {"x": {"$filter": {"input": [1], "cond": True, "limit": 1}}}},
    *({"$match": query} for query in _QUERIES),
    *_FORBIDDEN,
]

#: The document that the expressions are evaluated on.
DOCUMENT: dict[str, Any] = {
    "_id": 0, "date": datetime(2020, 1, 1), "n": None, "bu": "bad", "five": 5, "day": "day", "week": "week",
    "tz": "Nowhere/Land", "sow": "bad", "zero": 0, "x": "x", "i": 5, "l": Int64(-7), "d": 1.5, "w": 2.0, "s": "x",
    "a": [1, 2], "dec": Decimal128("3"), "big": Int64(2**40), "b": True,
    "arr": [1, 2, {"a": 1}, [3, {"a": 2}]], "o": {"b": 1}, "text": "straße aab Kk\n1",
}  # fmt: skip


def _trunc(**more: Any) -> dict[str, Any]:
    return {"$dateTrunc": {"date": "$date", **more}}


def _add(**more: Any) -> dict[str, Any]:
    return {"$dateAdd": {"startDate": "$date", "amount": 1, **more}}


def _diff(**more: Any) -> dict[str, Any]:
    return {"$dateDiff": {"startDate": "$date", "endDate": "$date", **more}}


def _median(source: Any, **more: Any) -> dict[str, Any]:
    return {"$median": {"input": source, "method": "approximate", **more}}


def _shares(source: Any, shares: Any, **more: Any) -> dict[str, Any]:
    return {"$percentile": {"input": source, "p": shares, "method": "approximate", **more}}


_D, _X, _N = "$date", "$x", "$n"
_CONSTANTS: list[Any] = [
    {"$dateTrunc": {"date": _D, "unit": "day", "timezone": "Nowhere/Land"}},
    {"$dateTrunc": {"date": _D, "unit": "day", "timezone": 5}},
    {"$dateTrunc": {"date": _D, "unit": "day", "timezone": None}},
    {"$dateTrunc": {"date": _D, "unit": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": 5}},
    {"$dateTrunc": {"date": _D, "unit": None}},
    {"$dateTrunc": {"date": _D, "unit": "day", "binSize": 0}},
    {"$dateTrunc": {"date": _D, "unit": "day", "binSize": "x"}},
    {"$dateTrunc": {"date": _D, "unit": "day", "binSize": 1e12}},
    {"$dateTrunc": {"date": _D, "unit": "day", "binSize": None}},
    {"$dateTrunc": {"date": _D, "unit": "day", "binSize": 1.5}},
    {"$dateTrunc": {"date": _D, "unit": "week", "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": "week", "startOfWeek": 5}},
    {"$dateTrunc": {"date": _D, "unit": "week", "startOfWeek": None}},
    {"$dateTrunc": {"date": _D, "unit": "day", "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": "day", "startOfWeek": 5}},
    {"$dateTrunc": {"date": _D, "unit": _D, "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": "bad", "binSize": 0, "timezone": "Nowhere/Land", "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": "week", "binSize": 0, "timezone": "Nowhere/Land", "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": "week", "binSize": 0, "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": "bad", "startOfWeek": "bad"}},
    {"$dateTrunc": {"date": _D, "unit": None, "binSize": 0}},
    {"$dateTrunc": {"date": _D, "unit": None, "timezone": "Nowhere/Land"}},
    {"$dateTrunc": {"date": _D, "unit": "day", "binSize": None, "timezone": "Nowhere/Land"}},
    {"$dateTrunc": {"date": None, "unit": "day", "timezone": "Nowhere/Land"}},
    {"$dateTrunc": {"date": None, "unit": "day", "binSize": 0}},
    {"$dateTrunc": {"date": "$$REMOVE", "unit": "day", "binSize": 0}},
    {"$dateTrunc": {"date": {"$add": [_D, 1]}, "unit": "day", "binSize": {"$add": [0, 0]}}},
    {"$dateTrunc": {"date": _D, "unit": {"$concat": ["ba", "d"]}}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": "day", "timezone": "Nowhere/Land"}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": "bad"}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": 5}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": None}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": "week", "startOfWeek": "bad"}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": "day", "startOfWeek": "bad"}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": "week", "timezone": "Nowhere/Land", "startOfWeek": "bad"}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": "bad", "timezone": "Nowhere/Land", "startOfWeek": "bad"}},
    {"$dateDiff": {"startDate": _D, "endDate": _D, "unit": None, "timezone": "Nowhere/Land"}},
    {"$dateDiff": {"startDate": None, "endDate": _D, "unit": "day", "timezone": "Nowhere/Land"}},
    {"$dateAdd": {"startDate": _D, "unit": "day", "amount": 1, "timezone": "Nowhere/Land"}},
    {"$dateAdd": {"startDate": _D, "unit": "bad", "amount": 1}},
    {"$dateAdd": {"startDate": _D, "unit": 5, "amount": 1}},
    {"$dateAdd": {"startDate": _D, "unit": "day", "amount": "x"}},
    {"$dateAdd": {"startDate": _D, "unit": None, "amount": 1, "timezone": "Nowhere/Land"}},
    {"$dateAdd": {"startDate": _D, "unit": "bad", "amount": 1, "timezone": "Nowhere/Land"}},
    {"$dateSubtract": {"startDate": _D, "unit": "day", "amount": 1, "timezone": "Nowhere/Land"}},
    {"$dateSubtract": {"startDate": _D, "unit": "bad", "amount": 1}},
    {"$year": {"date": _D, "timezone": "Nowhere/Land"}},
    {"$year": {"date": _D, "timezone": 5}},
    {"$millisecond": {"date": _D, "timezone": "Nowhere/Land"}},
    {"$isoWeek": {"date": _D, "timezone": "Nowhere/Land"}},
    {"$year": {"date": None, "timezone": "Nowhere/Land"}},
    {"$dateToParts": {"date": _D, "timezone": "Nowhere/Land"}},
    {"$dateToParts": {"date": _D, "timezone": 5}},
    {"$dateToParts": {"date": _D, "iso8601": 5}},
    {"$dateToString": {"date": _D, "timezone": "Nowhere/Land"}},
    {"$dateToString": {"date": _D, "timezone": 5}},
    {"$dateToString": {"date": _D, "format": "%Q"}},
    {"$dateToString": {"date": _D, "format": 5}},
    {"$dateToString": {"date": _D, "format": "%Q", "timezone": "Nowhere/Land"}},
    {"$dateToString": {"date": None, "timezone": "Nowhere/Land"}},
    {"$dateToString": {"date": _D, "timezone": "Nowhere/Land", "onNull": 1}},
    {"$dateFromString": {"dateString": _D, "timezone": "Nowhere/Land"}},
    {"$dateFromString": {"dateString": _D, "timezone": 5}},
    {"$dateFromString": {"dateString": _D, "format": "%Q"}},
    {"$dateFromString": {"dateString": _D, "format": 5}},
    {"$dateFromString": {"dateString": _D, "format": "%Q", "onError": 1}},
    {"$dateFromString": {"dateString": _D, "format": "%Q", "timezone": "Nowhere/Land", "onError": 1}},
    {"$dateFromString": {"dateString": None, "format": "%Q", "onNull": 1}},
    {"$dateFromString": {"dateString": _D, "timezone": "Nowhere/Land", "onError": 1, "onNull": 2}},
    {"$dateFromParts": {"year": _D, "timezone": "Nowhere/Land"}},
    {"$dateFromParts": {"year": _D, "timezone": 5}},
    {"$dateFromParts": {"year": None, "timezone": "Nowhere/Land"}},
    {"$convert": {"input": _D, "to": "bad"}},
    {"$convert": {"input": _D, "to": 99}},
    {"$regexMatch": {"input": _D, "regex": "["}},
    {"$regexMatch": {"input": _D, "regex": "x", "options": "q"}},
    {"$dateAdd": {"startDate": _D, "unit": "day", "amount": 1, "timezone": None}},
]
_DATES: list[Any] = [
    _trunc(unit="day", binSize=0, timezone="Nowhere/Land"),
    {"$size": _trunc(unit=None)},
    {"$size": _trunc(unit="day", timezone=None)},
    {"$size": _trunc(unit="day", binSize=None)},
    {"$size": _trunc(unit="week", startOfWeek=None)},
    {"$size": _trunc(unit="day", startOfWeek=None)},
    {"$size": _trunc(unit="$day", startOfWeek=None)},
    {"$size": _add(unit=None)},
    {"$size": _add(unit="day", timezone=None)},
    {"$size": _add(unit="day", amount=None)},
    {"$size": {"$dateAdd": {"startDate": None, "amount": "$zero", "unit": "day"}}},
    {"$size": _diff(unit=None)},
    {"$size": _diff(unit="day", timezone=None)},
    {"$size": _diff(unit="week", startOfWeek=None)},
    {"$size": _diff(unit="day", startOfWeek=None)},
    {"$size": {"$dateDiff": {"startDate": None, "endDate": "$date", "unit": "day"}}},
    {"$size": {"$dateTrunc": {"date": None, "unit": "$day"}}},
    {"$size": {"$year": {"date": "$date", "timezone": None}}},
    {"$size": {"$dateToParts": {"date": "$date", "timezone": None}}},
    {"$size": {"$dateToString": {"date": "$date", "timezone": None}}},
    {"$size": {"$dateFromString": {"dateString": "$x", "timezone": None}}},
    {"$size": {"$dateFromParts": {"year": "$five", "timezone": None}}},
    {"$size": {"$dateToString": {"date": "$date", "format": None}}},
    # run time
    _trunc(unit="$bu"),
    _trunc(unit="$five"),
    _trunc(unit="$n"),
    _trunc(unit="$day", startOfWeek="$sow"),
    _trunc(unit="$week", startOfWeek="$sow"),
    _trunc(unit="$week", startOfWeek="$five"),
    _trunc(unit="$day", startOfWeek="$five"),
    _trunc(unit="$day", startOfWeek="$n"),
    _trunc(unit="day", startOfWeek="$sow"),
    _trunc(unit="day", startOfWeek="$n"),
    _trunc(unit="$bu", startOfWeek="$sow"),
    _trunc(unit="$bu", timezone="$tz"),
    _trunc(unit="$bu", binSize="$zero"),
    _trunc(unit="$day", timezone="$tz", binSize="$zero"),
    _trunc(unit="$week", timezone="$tz", binSize="$zero", startOfWeek="$sow"),
    _trunc(unit="$week", binSize="$zero", startOfWeek="$sow"),
    _trunc(unit="$bu", timezone="$n"),
    _trunc(unit="$bu", timezone="$n", binSize="$zero"),
    _trunc(unit="$bu", binSize="$n"),
    _trunc(unit="$n", binSize="$zero", timezone="$tz"),
    _trunc(unit="$week", startOfWeek="$n", timezone="$tz"),
    _trunc(unit="$week", startOfWeek="$sow", timezone="$n"),
    _trunc(date="$x", unit="$bu"),
    _trunc(date="$x", unit="$day", timezone="$tz"),
    _trunc(date="$x", unit="$day", binSize="$zero"),
    _trunc(date="$x", unit="$week", startOfWeek="$sow"),
    _trunc(date="$n", unit="$bu", timezone="$tz"),
    _trunc(date="$x", unit="day", binSize="$zero"),
    _trunc(date="$x", unit="day", timezone="$tz"),
    _trunc(date="$x", unit="week", startOfWeek="$sow"),
    _diff(unit="$bu"),
    _diff(unit="$five"),
    _diff(unit="$day", startOfWeek="$sow"),
    _diff(unit="$week", startOfWeek="$sow"),
    _diff(unit="$day", startOfWeek="$n"),
    _diff(unit="$day", startOfWeek="$five"),
    _diff(unit="$bu", startOfWeek="$sow", timezone="$tz"),
    _diff(unit="$week", startOfWeek="$sow", timezone="$tz"),
    _diff(unit="$bu", timezone="$tz"),
    _diff(endDate="$x", unit="$bu"),
    _diff(endDate="$x", unit="$day", timezone="$tz"),
    _diff(endDate="$x", unit="$week", startOfWeek="$sow"),
    _diff(endDate="$n", unit="$bu"),
    _diff(unit="$bu", timezone="$n"),
    _diff(unit="$week", startOfWeek="$n", timezone="$tz"),
    _diff(endDate="$x", unit="week", startOfWeek="$sow"),
    _diff(endDate="$x", unit="day", timezone="$tz"),
    _add(unit="$bu"),
    _add(unit="$five"),
    _add(unit="$n"),
    _add(unit="$bu", timezone="$tz"),
    _add(unit="$bu", amount="$x"),
    _add(unit="$day", amount="$x", timezone="$tz"),
    _add(startDate="$x", unit="$bu"),
    _add(startDate="$x", unit="$day", timezone="$tz"),
    _add(startDate="$x", unit="$day", amount="$x"),
    _add(unit="$bu", timezone="$n"),
    _add(unit="$bu", amount="$n"),
    _add(startDate="$x", unit="$five"),
    _add(startDate="$x", unit="day", timezone="$tz"),
    _add(unit="$five", amount="$x"),
    _add(startDate="$x", unit="day", amount="$x"),
    {"$year": {"date": "$date", "timezone": "$tz"}},
    {"$year": {"date": "$x", "timezone": "$tz"}},
    {"$year": {"date": "$n", "timezone": "$tz"}},
    {"$year": {"date": "$x", "timezone": "$n"}},
    {"$dateToString": {"date": "$date", "timezone": "$tz", "format": "$x"}},
    {"$dateToString": {"date": "$date", "timezone": "$tz", "format": "$five"}},
    {"$dateToString": {"date": "$x", "timezone": "$tz"}},
    {"$dateToString": {"date": "$date", "timezone": "$n", "format": "$five"}},
    {"$dateToParts": {"date": "$x", "timezone": "$tz"}},
    {"$dateToParts": {"date": "$date", "timezone": "$tz", "iso8601": "$five"}},
    {"$dateFromString": {"dateString": "$five", "timezone": "$tz"}},
    {"$dateFromString": {"dateString": "$five", "timezone": "$tz", "format": "$five"}},
    {"$dateFromString": {"dateString": "$n", "timezone": "$tz"}},
    {"$dateFromParts": {"year": "$x", "timezone": "$tz"}},
    {"$dateFromParts": {"year": "$n", "timezone": "$tz"}},
    {"$getField": {"field": "a", "input": {"a": _trunc(unit="day", timezone="Nowhere/Land")}}},
    {"$getField": {"field": "a", "input": {"a": _trunc(unit="bad", startOfWeek="bad")}}},
    {"$getField": {"field": "a", "input": {"a": _trunc(unit="day", startOfWeek="bad")}}},
    {"$getField": {"field": "a", "input": {"a": _trunc(unit="day", startOfWeek=None)}}},
    {"$getField": {"field": "a", "input": {"a": _add(unit=5)}}},
]
_BITS: list[Any] = [
    {"$bitAnd": []},
    {"$bitOr": []},
    {"$bitXor": []},
    {"$bitAnd": "$i"},
    {"$bitAnd": ["$i"]},
    {"$bitAnd": ["$i", "$l"]},
    {"$bitAnd": ["$i", 3]},
    {"$bitAnd": ["$i", Int64(3)]},
    {"$bitAnd": ["$l", "$i", 3]},
    {"$bitAnd": ["$i", "$d"]},
    {"$bitAnd": ["$i", "$w"]},
    {"$bitAnd": ["$i", "$dec"]},
    {"$bitAnd": ["$i", "$n"]},
    {"$bitAnd": ["$n", "$s"]},
    {"$bitAnd": ["$s", "$n"]},
    {"$bitAnd": ["$i", "$nope"]},
    {"$bitAnd": "$a"},
    {"$bitAnd": ["$a"]},
    {"$bitAnd": "$n"},
    {"$bitAnd": "$nope"},
    {"$bitAnd": ["$b"]},
    {"$bitAnd": ["$s"]},
    {"$bitAnd": ["$d"]},
    {"$bitOr": ["$i", "$big"]},
    {"$bitXor": ["$i", "$l", 1]},
    {"$bitXor": ["$n", "$s"]},
    {"$bitXor": ["$s", "$n"]},
    {"$bitOr": ["$i", {"$divide": [1, 0]}]},
    {"$bitOr": [None, {"$divide": [1, "$n"]}]},
    {"$bitOr": ["$n", {"$divide": ["$i", {"$subtract": ["$i", 5]}]}]},
    {"$bitAnd": [1, "$i", 2]},
    {"$bitAnd": ["$i", 1, 2, "x"]},
    {"$bitAnd": ["$i", {"$bitAnd": ["$l", 3]}]},
    {"$bitAnd": ["$s", 1, "x"]},
    {"$bitAnd": ["x", "$n"]},
    {"$bitAnd": [1, "x"]},
    {"$bitAnd": [1, "$n", "x"]},
    {"$bitAnd": [None, "x"]},
    {"$bitAnd": ["$n", 1, "x"]},
    {"$bitAnd": [Int64(1), 2]},
    {"$bitAnd": ["$i", Int64(-1), {"$bitAnd": [1, "$s"]}]},
    {"$bitNot": "$i"},
    {"$bitNot": "$l"},
    {"$bitNot": ["$i"]},
    {"$bitNot": ["$i", 1]},
    {"$bitNot": []},
    {"$bitNot": "$n"},
    {"$bitNot": "$nope"},
    {"$bitNot": "$s"},
    {"$bitNot": "$d"},
    {"$bitNot": "$dec"},
    {"$bitNot": "$a"},
    {"$bitNot": "$b"},
    {"$bitNot": "x"},
    {"$bitNot": 5},
    {"$bitNot": -2147483648},
    {"$bitAnd": {"$add": [1, 2]}},
    {"$bitAnd": 1},
    {"$bitOr": ["$i", "$i", "$i"]},
    {"$bitAnd": ["$i", 2147483648]},
    {"$bitOr": [Int64(1), "$n"]},
    {"$bitOr": ["$s", "$i"]},
    {"$bitAnd": ["$d", "$s"]},
]
_QUANTILES: list[Any] = [
    _median("$a"),
    _median([3, 1, 2, 4]),
    _median("$i"),
    _median("$s"),
    _median("$n"),
    _median("$nope"),
    _median([]),
    _median(["x", None]),
    _median(["x", 5]),
    _median([[1, 2], 7]),
    _median("$dec"),
    _median("$l"),
    _median("$d"),
    _median("$nope"),
    _median([nan, 1, 2]),
    _median([1, 2, nan, 3, 4]),
    _median([inf, 1, -inf]),
    _median(nan),
    _median(inf),
    _median([Decimal128("1.1"), Decimal128("1e400"), Decimal128("NaN")]),
    _median([Decimal128("1.1")]),
    _shares("$a", [0.5]),
    _shares("$a", [0, 0.5, 1]),
    _shares("$a", 0.5),
    _shares("$a", []),
    _shares("$a", [1.5]),
    _shares("$a", [-0.1]),
    _shares("$a", ["x"]),
    _shares("$a", ["$d"]),
    _shares("$a", "$a"),
    _shares("$a", [{"$add": [0.1, 0.2]}]),
    _shares("$a", {"$literal": [0.5]}),
    _shares("$a", [Decimal128("0.5")]),
    _shares("$s", [0.5, 0.1]),
    _shares("$i", [0.5, 0.1]),
    _shares([], [0.5, 0.1]),
    _shares("$a", [0.5], x=1),
    {"$median": {"input": "$a"}},
    {"$median": {"method": "approximate"}},
    {"$median": 5},
    {"$median": []},
    {"$median": {"input": "$a", "method": "exact"}},
    {"$median": {"input": "$a", "method": "continuous"}},
    {"$median": {"input": "$a", "method": 5}},
    {"$median": {"input": "$a", "method": "$s"}},
    {"$percentile": {"input": "$a", "method": "approximate"}},
    {"$percentile": {"p": [0.5], "method": "approximate"}},
    _median("$a", p=[0.5]),
    {"$median": {"input": "$a", "method": "discrete"}},
    _shares("$a", ["x"], method2=1),
    {"$percentile": {"input": "$a", "p": ["x"], "method": "bad"}},
    {"$percentile": {"input": {"$foo": 1}, "p": ["x"], "method": "bad"}},
    {"$percentile": {"input": {"$foo": 1}, "p": ["x"], "method": "approximate"}},
    {"$percentile": {"input": {"$foo": 1}, "p": [0.5], "method": "approximate"}},
    {"$median": {"input": {"$foo": 1}, "method": "bad"}},
    _median([1, None, "x", 3]),
    _median({"$divide": [1, 0]}),
    _shares([1, 2, 3], [0.5]),
    {"$size": _shares([1, 2, 3], [0.5])},
    {"$percentile": {"input": "$a", "p": "$nope", "method": "approximate"}},
    {"$percentile": {"input": "$a", "p": None, "method": "approximate"}},
    {"$median": {"input": "$a", "method": None}},
    {"$percentile": {"input": "$a", "p": {"$concatArrays": [[0.5], [0.2]]}, "method": "approximate"}},
    {"$percentile": {"input": "$a", "p": ["$$NOW"], "method": "approximate"}},
    {"$median": {"input": "$$REMOVE", "method": "approximate"}},
    _shares([nan, 1, 2], [0, 0.34, 0.5, 0.67, 1]),
    _shares([nan, nan], [0, 1]),
    _shares([nan], [0]),
    _shares([inf, inf, 1], [0, 0.5, 1]),
    _shares([-inf, nan, inf], [0, 0.3, 0.4, 0.6, 0.7, 1]),
    _shares([-0.0, 0.0, 1], [0, 0.5]),
    _shares([0.0, -0.0, 1], [0, 0.5]),
    _shares([Int64(2**53 + 1), 1], [1]),
    _shares([Decimal128("-Infinity"), Decimal128("NaN"), 3], [0, 0.5, 1]),
    _shares(Decimal128("NaN"), [0.5]),
    _shares(Decimal128("1.15"), [0.5]),
    {"$percentile": 5},
    {"$percentile": []},
    {"$percentile": {}},
    {"$median": {}},
    {"$median": {"input": 1, "method": Binary(b"x")}},
    {"$median": {"x": 1, "method": 5}},
    {"$median": {"method": 5, "x": 1}},
    {"$median": {"method": 5}},
    {"$median": "$a"},
    {"$median": {"$add": [1, 2]}},
    {"$size": {"$median": {"input": [1, 2], "method": "approximate"}}},
    {"$percentile": {"p": ["x"], "input": 5, "method": "approximate"}},
    {"$percentile": {"p": [0.5, "x", 2], "input": 5, "method": "approximate"}},
    {"$percentile": {"p": [2, "x"], "input": 5, "method": "approximate"}},
    {"$percentile": {"p": [{"$foo": 1}], "input": {"$bar": 1}, "method": "approximate"}},
    {"$percentile": {"p": {"$foo": 1}, "input": 5, "method": "bad"}},
    {"$percentile": {"p": [{"$divide": [1, 0]}], "input": 5, "method": "approximate"}},
    {"$percentile": {"p": [{"$divide": [1, 0]}], "input": {"$foo": 1}, "method": "approximate"}},
    {"$percentile": {"p": [1e-320], "input": [1, 2], "method": "approximate"}},
    {"$percentile": {"p": [-0.0], "input": [1, 2], "method": "approximate"}},
    {"$percentile": {"p": [Decimal128("1.0000000000000000001")], "input": [1, 2], "method": "approximate"}},
    {"$percentile": {"p": [True], "input": [1, 2], "method": "approximate"}},
]
#: Patterns that PCRE and PCRE2 read differently, or releases of PCRE2 do.
PATTERNS = Path(__file__).with_name("later_patterns.txt").read_text().splitlines()

#: Expressions to evaluate on the document: what they give, or the code.
EXPRESSIONS: list[Any] = [
    *_CONSTANTS,
    *_DATES,
    *_BITS,
    *_QUANTILES,
    *({"$regexFind": {"input": "$text", "regex": {"$literal": text}}} for text in PATTERNS),
]

_FAILS: dict[str, Any] = {"$expr": {"$toInt": "$s"}}
_TRUE: dict[str, Any] = {"$expr": {"$toUpper": "a"}}
_SET: list[Any] = [
    {"o": {}}, {"o.b": {}}, {"arr": {}}, {"o": {"c": {}}}, {"new": {"x": {}}}, {"o.c": 1, "o": {}}, {"o": {}, "o.c": 1},
    {"o": {"x": {}}, "o.x.y": 1}, {"o": {"b": {}}, "o.b": {}}, {"o": 1, "o.b": {}}, {"o.b": {}, "o": "$s"},
    {"new": {}, "then": 1, "new.x": 2}, {"new": "$s", "then": 1, "new.x": {}}, {"new.x": 1, "then": 1, "new": {}},
    {"new.x": {}, "then": "$s", "new.x.y": 1, "new.z": 2},
]  # fmt: skip
_QUERIES_OF_TRUTH: list[Any] = [
    {"$or": [_FAILS, _TRUE]}, {"$and": [_FAILS, {"$nor": [_TRUE, {"i": 1}]}]}, {"$or": [_FAILS, {"$expr": 1}]},
    {"$or": [_FAILS, {"$nor": [{"$alwaysFalse": 1}]}]}, {"$and": [_FAILS, {"$nor": [{"i": 2}, {"$alwaysTrue": 1}]}]},
    {"$or": [_FAILS, {"$nor": [{"$jsonSchema": {"enum": [18], "required": ["d"]}}]}]}, {"$and": [_FAILS, {"i": 2}]},
    {"": {"$exists": 0}}, {"$jsonSchema": {"properties": {"s": {"pattern": "(?n)(x)"}}}},
    {"$jsonSchema": {"patternProperties": {"(?n)^(s)": {"bsonType": "int"}}}}, {"s": {"$in": ["y"]}},
]  # fmt: skip
_ORDERS: list[Any] = [
    {name: arguments}
    for name in ("$add", "$multiply", "$concat")
    for arguments in (
        [None, "$b"],
        ["$b", None],
        [None, 2, "$b"],
        ["$d", 0.1, 0.2],
        [0.1, 0.2, "$d"],
        ["$d", {name: [0.1, "$d"]}],
    )
]
_CUT: dict[str, Any] = {"$project": {"arr.a": 1}}

#: Several stages on the document.
PIPELINES: list[list[dict[str, Any]]] = [
    *([{"$set": one}] for one in _SET),
    *([{"$match": one}] for one in _QUERIES_OF_TRUTH),
    *([{"$replaceWith": {"r": one}}] for one in _ORDERS),
    *(
        [_CUT, {"$set": one}]
        for one in ({"arr.x": 9}, {"n": {"$size": "$arr"}}, {"n": {"$arrayElemAt": ["$arr", 0]}}, {"k": "$arr.a"})
    ),
    [_CUT, {"$project": {"arr.x": {"$literal": 5}}}],
    [{"$project": {"arr.a": 0}}, {"$set": {"arr.y": 1}}],
    [_CUT, {"$unset": "arr.a"}, {"$set": {"arr.y": 1}}],
]
