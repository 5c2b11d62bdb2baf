"""Date operators: parts of a date, and dates from parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tailrace.core.expression.language.core import operator_of, parse_operand
from tailrace.core.expression.language.expression import Bindings, Expression, Frame, constant
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.operators import calendar
from tailrace.core.expression.operators.calendar import Civil, civil_of
from tailrace.core.expression.operators.zones import UTC, Zone, zone_of
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import TailraceError

_DATE: Final = "date"


def moment_of(value: Value) -> int:
    """Milliseconds of a date, a timestamp or an object id; 16006 for anything else."""
    moment = moment_or_none(value)
    if moment is None:
        raise failure(16006, f"can't convert from BSON type {v.type_name(value)} to Date")
    return moment


def moment_or_none(value: Value) -> int | None:
    if value[0] == v.DATE:
        return v.integer_of(value)
    if value[0] == v.TIMESTAMP:
        return (v.unsigned_of(value) >> 32) * 1000
    if value[0] == v.OBJECT_ID:
        return int.from_bytes(value[1][:4], "big", signed=True) * 1000
    return None


def named(
    name: str, operand: Value, allowed: tuple[str, ...], codes: tuple[int, int], bindings: Bindings
) -> dict[str, Expression]:
    """An operator's named arguments, parsed; ``codes``: not a document, unknown name."""
    if operand[0] != v.OBJECT:
        raise parse_failure(codes[0], f"{name} only supports an object as its argument")
    given: dict[str, Expression] = {}
    for key, kind, data in v.fields_of(operand[1]):
        shown = key.decode("utf-8", "replace")
        if shown not in allowed:
            raise parse_failure(codes[1], f"Unrecognized argument to {name}: {shown}")
        given[shown] = parse_operand((kind, data), bindings)
    return given


def zone_at(given: dict[str, Expression], frame: Frame) -> Zone | None:
    """The evaluated zone: UTC where none is given, ``None`` where it is null."""
    if "timezone" not in given:
        return UTC
    value = given["timezone"].evaluate(frame)
    return None if value is None or value[0] in v.NULLISH else zone_of(value)


#: A named argument, what reads its value, and whether null there makes the whole null.
ArgumentReader = tuple[str, Callable[[Value], object], bool]


def read_beforehand(
    given: dict[str, Expression], readers: Iterable[ArgumentReader], bindings: Bindings
) -> Expression | None:
    """From 7.0 on a server reads constant arguments one after another when it optimizes, whatever the date will be.
    Notes the first that cannot be read; null where one is null that makes the whole so."""
    if not bindings.folding or not bindings.knows("7.0") or all(each.constant for each in given.values()):
        return None
    for name, read, nulls in readers:
        argument = given.get(name)
        if argument is None or not argument.constant:
            continue
        if argument.value is None or argument.value[0] in v.NULLISH:
            if nulls:
                return constant(v.NULL)
            continue
        try:
            read(argument.value)
        except TailraceError as error:
            bindings.fail_later(error.code, error.message)
            return None
    return None


# ── one part ─────────────────────────────────────────────────────────────────────────────────────────────────────────

DatePart = Callable[[int], Value]


def _part(name: str, since: str, part: DatePart) -> None:
    def parse(operand: Value, bindings: Bindings) -> Expression:
        given = _part_arguments(name, operand, bindings)
        read = given["date"].evaluate

        def evaluate(frame: Frame) -> Maybe:
            value = read(frame)
            if value is None or value[0] in v.NULLISH:
                return v.NULL
            moment = moment_of(value)
            if "timezone" not in given:
                return part(moment)
            where = given["timezone"].evaluate(frame)
            if where is None or where[0] in v.NULLISH:
                return v.NULL
            return part(_named_zone(name, where).local(moment))

        read_beforehand(given, [("timezone", lambda where: _named_zone(name, where), False)], bindings)
        return operator_of(name, list(given.values()), evaluate, bindings)

    register(name, _DATE, since, parse)


def _named_zone(name: str, where: Value) -> Zone:
    if where[0] != v.STRING:
        raise failure(
            40533, f"{name} requires a string for the timezone argument, but was given a {v.type_name(where)}"
        )
    return zone_of(where)


def _part_arguments(name: str, operand: Value, bindings: Bindings) -> dict[str, Expression]:
    if operand[0] == v.ARRAY:
        items = v.elements_of(operand)
        if len(items) != 1:
            raise parse_failure(
                40536, f"{name} accepts exactly one argument if given an array, but was given {len(items)}"
            )
        return {"date": parse_operand(items[0], bindings)}
    fields = v.fields_of(operand[1]) if operand[0] == v.OBJECT else []
    if operand[0] != v.OBJECT or (fields and fields[0][0][:1] == b"$"):
        return {"date": parse_operand(operand, bindings)}
    given: dict[str, Expression] = {}
    for key, kind, data in fields:
        shown = key.decode("utf-8", "replace")
        if shown not in ("date", "timezone"):
            raise parse_failure(40535, f'unrecognized option to {name}: "{shown}"')
        given[shown] = parse_operand((kind, data), bindings)
    if "date" not in given:
        raise parse_failure(40539, f"missing 'date' argument to {name}")
    return given


def sunday_week(civil: Civil) -> int:
    """Weeks that begin on Sunday; the days before the first Sunday are week 0."""
    days = calendar.days_of(civil.year, civil.month, civil.day)
    return (calendar.day_of_year(civil) - 1 - (calendar.weekday(days) + 1) % 7 + 7) // 7


def _days(moment: int) -> int:
    return moment // calendar.DAY


_part("$year", "2.2", lambda m: v.int32(civil_of(m).year))
_part("$month", "2.2", lambda m: v.int32(civil_of(m).month))
_part("$dayOfMonth", "2.2", lambda m: v.int32(civil_of(m).day))
_part("$hour", "2.2", lambda m: v.int32(civil_of(m).hour))
_part("$minute", "2.2", lambda m: v.int32(civil_of(m).minute))
_part("$second", "2.2", lambda m: v.int32(civil_of(m).second))
_part("$millisecond", "2.4", lambda m: v.int32(civil_of(m).millisecond))
_part("$dayOfYear", "2.2", lambda m: v.int32(calendar.day_of_year(civil_of(m))))
_part("$dayOfWeek", "2.2", lambda m: v.int32((calendar.weekday(_days(m)) + 1) % 7 + 1))
_part("$week", "2.2", lambda m: v.int32(sunday_week(civil_of(m))))
_part("$isoDayOfWeek", "3.4", lambda m: v.int32(calendar.weekday(_days(m)) + 1))
_part("$isoWeek", "3.4", lambda m: v.int32(calendar.iso_week(_days(m))[1]))
_part("$isoWeekYear", "3.4", lambda m: v.int64(calendar.iso_week(_days(m))[0]))


# ── $dateToParts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _to_parts(operand: Value, bindings: Bindings) -> Expression:
    given = named("$dateToParts", operand, ("date", "timezone", "iso8601"), (40524, 40520), bindings)
    if "date" not in given:
        raise parse_failure(40522, "Missing 'date' parameter to $dateToParts")

    def evaluate(frame: Frame) -> Maybe:
        value = given["date"].evaluate(frame)
        zone = zone_at(given, frame)
        if zone is None:
            return v.NULL
        iso = False
        if "iso8601" in given:
            wanted = given["iso8601"].evaluate(frame)
            if wanted is None or wanted[0] in v.NULLISH:
                return v.NULL
            if wanted[0] != v.BOOL:
                raise failure(40521, f"iso8601 must evaluate to a bool, found {v.type_name(wanted)}")
            iso = wanted == v.TRUE
        if value is None or value[0] in v.NULLISH:
            return v.NULL
        return _parts(zone.local(moment_of(value)), iso=iso)

    settled = read_beforehand(given, [("timezone", zone_of, True)], bindings)
    return settled or operator_of("$dateToParts", list(given.values()), evaluate, bindings)


def _parts(local: int, *, iso: bool) -> Value:
    civil = civil_of(local)
    days = local // calendar.DAY
    if iso:
        year, week = calendar.iso_week(days)
        head = [("isoWeekYear", year), ("isoWeek", week), ("isoDayOfWeek", calendar.weekday(days) + 1)]
    else:
        head = [("year", civil.year), ("month", civil.month), ("day", civil.day)]
    tail = [
        ("hour", civil.hour),
        ("minute", civil.minute),
        ("second", civil.second),
        ("millisecond", civil.millisecond),
    ]
    return v.object_of([(name.encode(), v.int32(number)) for name, number in head + tail])


register("$dateToParts", _DATE, "3.6", _to_parts)


# ── $dateFromParts ───────────────────────────────────────────────────────────────────────────────────────────────────

_NATURAL: Final = ("year", "month", "day")
_ISO: Final = ("isoWeekYear", "isoWeek", "isoDayOfWeek")
_TIME: Final = ("hour", "minute", "second", "millisecond")


def _from_parts(operand: Value, bindings: Bindings) -> Expression:
    given = named("$dateFromParts", operand, (*_NATURAL, *_ISO, *_TIME, "timezone"), (40519, 40518), bindings)
    if "year" not in given and "isoWeekYear" not in given:
        raise parse_failure(40516, "$dateFromParts requires either 'year' or 'isoWeekYear' to be present")
    if "year" in given and any(name in given for name in _ISO):
        raise parse_failure(40489, "$dateFromParts does not allow mixing natural dates with ISO dates")
    if "isoWeekYear" in given and any(name in given for name in _NATURAL):
        raise parse_failure(40525, "$dateFromParts does not allow mixing ISO dates with natural dates")

    names = _ISO if "isoWeekYear" in given else _NATURAL

    def evaluate(frame: Frame) -> Maybe:
        time = _numbers(given, _TIME, (0, 0, 0, 0), frame)
        zone = None if time is None else zone_at(given, frame)
        parts = None if zone is None else _numbers(given, names, (1970, 1, 1), frame)
        if time is None or zone is None or parts is None:
            return v.NULL
        if not 1 <= parts[0] <= 9999:
            code = 31095 if names is _ISO else 40523
            raise failure(code, f"'{names[0]}' must evaluate to an integer in the range 1 to 9999, found {parts[0]}")
        return _assembled([*parts, *time], names is _ISO, zone)

    settled = read_beforehand(given, [("timezone", zone_of, True)], bindings)
    return settled or operator_of("$dateFromParts", list(given.values()), evaluate, bindings)


def _numbers(
    given: dict[str, Expression], names: tuple[str, ...], defaults: tuple[int, ...], frame: Frame
) -> list[int] | None:
    """Parts one after another, in the server's order; ``None`` at the first null."""
    result: list[int] = []
    for name, default in zip(names, defaults, strict=True):
        number = _date_part(given, name, default, frame)
        if number is None:
            return None
        result.append(number)
    return result


def _assembled(parts: list[int], iso: bool, zone: Zone) -> Value:
    year, second, third, hour, minute, seconds, millisecond = parts
    if iso:
        fourth = calendar.days_of(year, 1, 4)
        days = fourth - calendar.weekday(fourth) + (second - 1) * 7 + third - 1
    else:
        days = calendar.days_of(year, second, 1) + third - 1
    local = days * calendar.DAY + hour * calendar.HOUR + minute * calendar.MINUTE + seconds * 1000 + millisecond
    if not v.INT64_MIN <= millisecond * 1000 <= v.INT64_MAX or not v.INT64_MIN <= local <= v.INT64_MAX:
        raise failure(159, "Overflow while assembling a date from its parts")
    moment = zone.moment(local)
    if not v.INT64_MIN <= moment <= v.INT64_MAX:
        raise failure(159, "Overflow while assembling a date from its parts")
    return v.date(moment)


def _date_part(given: dict[str, Expression], name: str, default: int, frame: Frame) -> int | None:
    if name not in given:
        return default
    value = given[name].evaluate(frame)
    if value is None or value[0] in v.NULLISH:
        return None
    number = whole_long(value)
    if number is None:
        raise failure(40515, f"'{name}' must evaluate to an integer, found {v.type_name(value)}")
    if name not in ("second", "millisecond", "year", "isoWeekYear") and not -32768 <= number <= 32767:
        raise failure(31034, f"'{name}' must evaluate to a value in the range [-32768, 32767]; value {number} is not")
    return number


def whole_long(value: Value) -> int | None:
    """A number that is a whole 64-bit integer, or ``None``."""
    if value[0] not in v.NUMERIC:
        return None
    number = v.number_of(value)
    if v.is_nan(number) or abs(number) == float("inf") or number != int(number):
        return None
    return int(number) if v.INT64_MIN <= number <= v.INT64_MAX else None


register("$dateFromParts", _DATE, "3.6", _from_parts)
