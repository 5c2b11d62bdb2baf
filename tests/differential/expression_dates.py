"""Date operators of the expression fuzz: units, time zones and formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value
from tests.differential.date_texts import date_text, text_and_format

if TYPE_CHECKING:
    from tests.differential.expression_grammar import Grammar

UNITS = ("year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond")
ZONES = (
    "UTC", "GMT", "+01:30", "-0500", "+03", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe",
    "Europe/London", "America/Sao_Paulo", "Pacific/Apia", "Asia/Tokyo", "Asia/Kathmandu", "EST5EDT", "Nowhere/Land",
)  # fmt: skip
FORMATS = (
    "%Y-%m-%d",
    "%H:%M:%S.%L",
    "%Y-%m-%dT%H:%M:%S.%LZ",
    "%d/%m/%Y %z",
    "%G-W%V-%u",
    "%j %w %U %Z %%",
    "%Y%m%d",
    "%q",
    "%",
)


def _zone(g: Grammar) -> dict[str, Value]:
    roll = g.rng.random()
    if roll < 0.5:
        return {}
    if roll < 0.95:
        return {"timezone": v.string(g.rng.choice(ZONES))}
    return {"timezone": g.expression("s", 0)}


def _doc(**fields: Value) -> Value:
    return v.object_of([(name.encode(), value) for name, value in fields.items()])


def _part(g: Grammar, depth: int) -> Value:
    date = g.expression("d", depth)
    return date if g.rng.random() < 0.5 else _doc(date=date, **_zone(g))


def _unit(g: Grammar) -> Value:
    return v.string(g.rng.choice(UNITS)) if g.rng.random() < 0.95 else g.expression("x", 0)


def _date_add(g: Grammar, depth: int) -> Value:
    amount = v.int32(g.rng.choice((0, 1, -1, 3, 12, 31, 400, -7))) if g.rng.random() < 0.8 else g.expression("n", 0)
    return _doc(startDate=g.expression("d", depth), unit=_unit(g), amount=amount, **_zone(g))


def _start(g: Grammar) -> dict[str, Value]:
    if g.rng.random() < 0.6:
        return {}
    return {"startOfWeek": v.string(g.rng.choice(("monday", "sun", "Friday", "x")))}


def _date_diff(g: Grammar, depth: int) -> Value:
    return _doc(
        startDate=g.expression("d", depth), endDate=g.expression("d", depth), unit=_unit(g), **_zone(g), **_start(g)
    )


def _date_trunc(g: Grammar, depth: int) -> Value:
    fields = {"date": g.expression("d", depth), "unit": _unit(g)}
    if g.rng.random() < 0.5:
        fields["binSize"] = v.int32(g.rng.choice((1, 2, 3, 5, 7, 12, 100, 0)))
    return _doc(**fields, **_zone(g), **_start(g))


def _from_parts(g: Grammar, depth: int) -> Value:
    def part(low: int, high: int) -> Value:
        return v.int32(g.rng.randint(low, high)) if g.rng.random() < 0.85 else g.expression("n", 0)

    iso = g.rng.random() < 0.3
    fields: dict[str, Value] = {"isoWeekYear" if iso else "year": part(1969, 2030)}
    names = ("isoWeek", "isoDayOfWeek") if iso else ("month", "day")
    for name, low, high in (
        (names[0], -3, 15),
        (names[1], -5, 40),
        ("hour", -2, 30),
        ("minute", -10, 100),
        ("second", 0, 100),
        ("millisecond", 0, 2000),
    ):
        if g.rng.random() < 0.5:
            fields[name] = part(low, high)
    return _doc(**fields, **_zone(g))


def _to_parts(g: Grammar, depth: int) -> Value:
    fields = {"date": g.expression("d", depth), **_zone(g)}
    if g.rng.random() < 0.4:
        fields["iso8601"] = v.boolean(g.rng.random() < 0.7)
    return _doc(**fields)


def _to_string(g: Grammar, depth: int) -> Value:
    fields = {"date": g.expression("d", depth), **_zone(g)}
    if g.rng.random() < 0.7:
        fields["format"] = v.string(g.rng.choice(FORMATS))
    if g.rng.random() < 0.3:
        fields["onNull"] = g.expression("x", 0)
    return _doc(**fields)


_STRINGS = (
    "2021-03-04", "2021-03-04T05:06:07Z", "2021-03-04T05:06:07.089Z", "2021-03-04 05:06:07", "2021-03-04T05:06:07+0100",
    "20210304", "2021/03/04", "04/03/2021 +0100", "2021-W09-4", "2021-02-30", "2021-13-01", "x", "", "2021-063",
    "2021-03-04T05:06", "2021-03-04T05:06:07.1234567Z", "2017-07-06T12:35:37 America/New_York",
)  # fmt: skip


def _literal(text: str) -> Value:
    return _doc(**{"$literal": v.string(text)})


def _from_string(g: Grammar, depth: int) -> Value:
    roll = g.rng.random()
    if roll < 0.3:
        text, layout = text_and_format(g.rng)
        fields = {"dateString": _literal(text), "format": _literal(layout)}
    elif roll < 0.55:
        fields = {"dateString": _literal(date_text(g.rng))}
    else:
        fields = {"dateString": v.string(g.rng.choice(_STRINGS)) if roll < 0.85 else g.expression("s", 0)}
        if g.rng.random() < 0.4:
            fields["format"] = v.string(g.rng.choice(FORMATS)) if g.rng.random() < 0.9 else g.expression("x", 0)
    if g.rng.random() < 0.4:
        fields.update(_zone(g))
    if g.rng.random() < 0.3:
        fields["onError"] = g.expression("x", 0)
    if g.rng.random() < 0.3:
        fields["onNull"] = g.expression("x", 0)
    return _doc(**fields)


DATE_OPERATORS: dict[str, tuple[str, Callable[[Grammar, int], Value]]] = {
    **dict.fromkeys(("$year", "$month", "$dayOfMonth", "$dayOfWeek", "$dayOfYear", "$hour",
    "$minute", "$second", "$millisecond", "$week", "$isoWeek", "$isoWeekYear", "$isoDayOfWeek"), ("n", _part)),
    "$dateAdd": ("d", _date_add), "$dateSubtract": ("d", _date_add), "$dateDiff": ("n", _date_diff),
    "$dateTrunc": ("d", _date_trunc), "$dateFromParts": ("d", _from_parts), "$dateToParts": ("o", _to_parts),
    "$dateToString": ("s", _to_string), "$dateFromString": ("d", _from_string),
}  # fmt: skip
