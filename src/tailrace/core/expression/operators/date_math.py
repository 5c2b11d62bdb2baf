"""``$dateAdd``, ``$dateSubtract``, ``$dateDiff`` and ``$dateTrunc``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from tailrace.core.expression.language.core import operator_of
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import NOT_SUPPORTED, failure, parse_failure, register
from tailrace.core.expression.operators import calendar
from tailrace.core.expression.operators.calendar import civil_of, days_of
from tailrace.core.expression.operators.dates import (
    ArgumentReader,
    moment_or_none,
    named,
    read_beforehand,
    whole_long,
    zone_at,
)
from tailrace.core.expression.operators.zones import Zone, zone_of
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value

_DATE: Final = "date"
_UNITS: Final = ("year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond")
_FIXED: Final = {"hour": calendar.HOUR, "minute": calendar.MINUTE, "second": calendar.SECOND, "millisecond": 1}
_MONTHS: Final = {"year": 12, "quarter": 3, "month": 1}
_WEEKDAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
#: Milliseconds of each unit, for the bounds of what may be added.
_LENGTH: Final = {
    **_FIXED,
    "day": calendar.DAY,
    "week": 7 * calendar.DAY,
    "month": 28 * calendar.DAY,
    "quarter": 90 * calendar.DAY,
    "year": 365 * calendar.DAY,
}


def _add(name: str, sign: int) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        given = named(name, operand, ("startDate", "unit", "amount", "timezone"), (5166400, 5166401), bindings)
        if not {"startDate", "unit", "amount"} <= set(given):
            raise parse_failure(5166402, f"{name} requires startDate, unit, and amount to be present")

        later = bindings.knows("7.0")

        def evaluate(frame: Frame) -> Maybe:
            start = given["startDate"].evaluate(frame)
            if start is None or start[0] in v.NULLISH:
                return v.NULL
            unit = given["unit"].evaluate(frame)
            if unit is None or unit[0] in v.NULLISH:
                return v.NULL
            if later:
                _unit(name, unit, later=True)
            amount = given["amount"].evaluate(frame)
            if amount is None or amount[0] in v.NULLISH:
                return v.NULL
            zone = zone_at(given, frame)
            if zone is None:
                return v.NULL
            moment = moment_or_none(start)
            if moment is None:
                raise failure(5166403, f"{name} requires startDate to be convertible to a date")
            if unit[0] != v.STRING:
                raise failure(5166404, f"{name} expects string defining the time unit")
            shown = v.text_of(unit)
            if shown not in _UNITS:
                raise failure(9, f"unknown time unit value: {shown}")
            number = whole_long(amount)
            if number is None:
                raise failure(5166405, f"{name} expects integer amount of time units")
            if sign < 0 and number == v.INT64_MIN:
                raise failure(6045000, f"invalid dateSubtract 'amount' parameter value: {number} {shown}")
            return v.date(_added(moment, shown, number * sign, zone))

        readers: list[ArgumentReader] = [
            ("unit", lambda unit: _unit(name, unit, later=True), True),
            ("timezone", zone_of, True),
        ]
        return read_beforehand(given, readers, bindings) or operator_of(name, [*given.values()], evaluate, bindings)

    register(name, _DATE, "5.0", parse)


def _added(moment: int, unit: str, amount: int, zone: Zone) -> int:
    if unit != "millisecond" and abs(amount) > (1 << 64) // _LENGTH[unit]:
        raise failure(5976500, f"invalid dateAdd 'amount' parameter value: {amount} {unit}")
    if unit == "millisecond":
        result = moment + amount
    elif unit in _FIXED:
        result = _second_lost(moment) + amount * _FIXED[unit]
    else:
        local = zone.local(moment)
        days, rest = divmod(local, calendar.DAY)
        if unit in _MONTHS:
            civil = civil_of(local)
            months = civil.year * 12 + civil.month - 1 + amount * _MONTHS[unit]
            year, month = months // 12, months % 12 + 1
            last = days_of(year, month + 1, 1) - days_of(year, month, 1)
            days = days_of(year, month, min(civil.day, last))
        else:
            days += amount * (7 if unit == "week" else 1)
        result = _second_lost(zone.moment(days * calendar.DAY + rest), moment)
    if not v.INT64_MIN <= result <= v.INT64_MAX:
        raise failure(159 if unit == "millisecond" else 5166406, f"Overflow while adding {amount} {unit} to a date")
    return result


def _second_lost(result: int, start: int | None = None) -> int:
    """The server floors a moment before 1970 to its second and then adds the negative rest of milliseconds."""
    start = result if start is None else start
    return result - 1000 if start < 0 and start % 1000 else result


_add("$dateAdd", 1)
_add("$dateSubtract", -1)


# ── units and weeks, shared by $dateDiff and $dateTrunc ──────────────────────────────────────────────────────────────


def _unit(name: str, value: Value, *, later: bool = False) -> str:
    """The unit of that name; ``later``: as 7.0 reads it."""
    if value[0] != v.STRING:
        raise failure(5439013, f"{name} requires 'unit' to be a string, but got {v.type_name(value)}")
    unit = v.text_of(value)
    if unit not in _UNITS:
        raise failure(
            9 if later else 5439014, f"{name} parameter 'unit' value cannot be recognized as a time unit: {unit}"
        )
    return unit


def _week_start(name: str, value: Value) -> int:
    """The day on which weeks begin, 0 for Monday."""
    if value[0] != v.STRING:
        raise failure(5439015, f"{name} requires 'startOfWeek' to be a string, but got {v.type_name(value)}")
    shown = v.text_of(value).lower()
    for place, day in enumerate(_WEEKDAYS):
        if shown in (day, day[:3]):
            return place
    raise failure(5439016, f"{name} parameter 'startOfWeek' value cannot be recognized as a day of a week: {shown}")


_SUNDAY: Final = 6


def _diff(operand: Value, bindings: Bindings) -> Expression:
    allowed = ("startDate", "endDate", "unit", "timezone", "startOfWeek")
    given = named("$dateDiff", operand, allowed, (5166301, 5166302), bindings)
    for name, code in (("startDate", 5166303), ("endDate", 5166304), ("unit", 5166305)):
        if name not in given:
            raise parse_failure(code, f"Missing '{name}' parameter to $dateDiff")

    settings = _settings_of(bindings)

    def evaluate(frame: Frame) -> Maybe:
        values: dict[str, Value] = {}
        for name in ("startDate", "endDate", "unit"):
            value = given[name].evaluate(frame)
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            values[name] = value
        dates = (values["startDate"], values["endDate"])
        settled = settings("$dateDiff", given, values["unit"], frame, dates)
        if settled is None:
            return v.NULL
        start, end = (moment_or_none(date) or 0 for date in dates)
        return v.int64(_difference((start, end), *settled))

    settled = read_beforehand(given, _readers("$dateDiff"), bindings)
    return settled or operator_of("$dateDiff", list(given.values()), evaluate, bindings)


#: Unit, zone and first day of the week; ``None`` where one that matters is null.
_Truncation: TypeAlias = tuple[str, Zone, int] | None


def _readers(name: str) -> list[ArgumentReader]:
    """The arguments that 7.0 reads beforehand, in its order: the first day of the week whatever the unit is."""
    return [
        ("unit", lambda unit: _unit(name, unit, later=True), True),
        ("startOfWeek", lambda day: _week_start(name, day), True),
        ("timezone", zone_of, True),
    ]


def _settings_of(bindings: Bindings) -> Callable[..., _Truncation]:
    """How this server reads them. 7.0 reads each as soon as it is evaluated, and the bins' size before the others."""
    return _later_settings if bindings.knows("7.0") else _settings


def _check_dates(name: str, dates: tuple[Value, ...]) -> None:
    for date in dates:
        if moment_or_none(date) is None:
            code = 5439012 if name == "$dateTrunc" else 5166307
            raise failure(code, f"{name} requires a date, but got {v.type_name(date)}")


def _later_settings(
    name: str,
    given: dict[str, Expression],
    unit_value: Value,
    frame: Frame,
    dates: tuple[Value, ...],
    *,
    size: Maybe = None,
) -> _Truncation:
    unit = _unit(name, unit_value, later=True)
    first = _SUNDAY
    if unit == "week" and "startOfWeek" in given:
        day = given["startOfWeek"].evaluate(frame)
        if day is None or day[0] in v.NULLISH:
            return None
        first = _week_start(name, day)
    zone = zone_at(given, frame)
    if zone is None:
        return None
    _check_dates(name, dates)
    return unit, zone, first


def _settings(
    name: str,
    given: dict[str, Expression],
    unit_value: Value,
    frame: Frame,
    dates: tuple[Value, ...],
    *,
    size: Maybe = None,
) -> _Truncation:
    zone_value = given["timezone"].evaluate(frame) if "timezone" in given else v.string("UTC")
    if zone_value is None or zone_value[0] in v.NULLISH:
        return None
    weekly = unit_value[0] == v.STRING and v.text_of(unit_value) == "week"
    week_value: Maybe = None
    if weekly and "startOfWeek" in given:
        week_value = given["startOfWeek"].evaluate(frame)
        if week_value is None or week_value[0] in v.NULLISH:
            return None
    zone = zone_of(zone_value)
    _check_dates(name, dates)
    unit = _unit(name, unit_value)
    if size is not None:
        _bin_size(size)
    return unit, zone, _SUNDAY if week_value is None else _week_start(name, week_value)


def _difference(span: tuple[int, int], unit: str, zone: Zone, first: int) -> int:
    start, end = span
    if unit == "millisecond":
        if not v.INT64_MIN <= end - start <= v.INT64_MAX:
            raise failure(5166308, "dateDiff overflowed")
        return end - start
    left, right = zone.local(start), zone.local(end)
    if unit == "hour":  # the whole hours of the clock on both sides, counted in the time between them
        begun, ended = start - left % calendar.HOUR, end - right % calendar.HOUR
        hours = abs(ended - begun) // calendar.HOUR
        return hours if ended >= begun else -hours
    if unit in _FIXED:
        size = _FIXED[unit]
        return end // size - start // size
    if unit in _MONTHS:
        a, b = civil_of(left), civil_of(right)
        size = _MONTHS[unit]
        return (b.year * 12 + b.month - 1) // size - (a.year * 12 + a.month - 1) // size
    low, high = left // calendar.DAY, right // calendar.DAY
    if unit == "day":
        return high - low
    return (high + 3 - first) // 7 - (low + 3 - first) // 7


register("$dateDiff", _DATE, "5.0", _diff)


# ── $dateTrunc ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _trunc(operand: Value, bindings: Bindings) -> Expression:
    allowed = ("date", "unit", "binSize", "timezone", "startOfWeek")
    given = named("$dateTrunc", operand, allowed, (5439007, 5439008), bindings)
    for name, code in (("date", 5439009), ("unit", 5439010)):
        if name not in given:
            raise parse_failure(code, f"Missing '{name}' parameter to $dateTrunc")

    settings, later = _settings_of(bindings), bindings.knows("7.0")

    def evaluate(frame: Frame) -> Maybe:
        value = given["date"].evaluate(frame)
        if value is None or value[0] in v.NULLISH:
            return v.NULL
        size_value: Maybe = v.int32(1)
        if "binSize" in given:
            size_value = given["binSize"].evaluate(frame)
            if size_value is None or size_value[0] in v.NULLISH:
                return v.NULL
            if later:
                _bin_size(size_value)
        unit_value = given["unit"].evaluate(frame)
        if unit_value is None or unit_value[0] in v.NULLISH:
            return v.NULL
        settled = settings("$dateTrunc", given, unit_value, frame, (value,), size=size_value)
        if settled is None:
            return v.NULL
        moment = moment_or_none(value) or 0
        unit, zone, first = settled
        result = _truncated(moment, unit, _bin_size(size_value), zone, first)  # type: ignore[arg-type]
        if not v.INT64_MIN <= result <= v.INT64_MAX:
            raise failure(NOT_SUPPORTED, "$dateTrunc at the end of the range of dates is not supported")
        return v.date(result)

    settled = read_beforehand(given, [*_readers("$dateTrunc"), ("binSize", _bin_size, True)], bindings)
    return settled or operator_of("$dateTrunc", list(given.values()), evaluate, bindings)


def _bin_size(value: Value) -> int:
    size = whole_long(value)
    if size is None:
        raise failure(5439017, f"$dateTrunc requires 'binSize' to be a 64-bit integer, but got {v.type_name(value)}")
    if size <= 0:
        raise failure(5439018, f"$dateTrunc requires 'binSize' to be greater than 0, but got value {size}")
    return size


def _truncated(moment: int, unit: str, size: int, zone: Zone, first: int) -> int:
    """Bins are counted from 2000-01-01 in the zone (weeks from the first week that begins after it)."""
    if size > 100_000_000_000:
        raise failure(5439006, "dateTrunc unsupported binSize value")
    origin = days_of(2000, 1, 1)
    local = zone.local(moment)
    if unit in _FIXED:
        length = _FIXED[unit] * size
        start = zone.moment(origin * calendar.DAY)
        return start + (moment - start) // length * length
    if unit in _MONTHS:
        civil = civil_of(local)
        months = _MONTHS[unit] * size
        since = (civil.year - 2000) * 12 + civil.month - 1
        since = since // months * months
        return zone.moment(days_of(2000 + since // 12, since % 12 + 1, 1) * calendar.DAY)
    days = local // calendar.DAY
    if unit == "week":
        origin += (first - calendar.weekday(origin)) % 7
        size *= 7
    return zone.moment((origin + (days - origin) // size * size) * calendar.DAY)


register("$dateTrunc", _DATE, "5.0", _trunc)
