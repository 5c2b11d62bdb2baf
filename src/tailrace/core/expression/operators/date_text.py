"""Dates as text: ``$dateToString``, ``$dateFromString`` and the parsing that ``$toDate`` shares."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from tailrace.core.expression.language.core import operator_of
from tailrace.core.expression.language.expression import Bindings, Expression, Frame
from tailrace.core.expression.language.registry import failure, parse_failure, register
from tailrace.core.expression.language.version import Version
from tailrace.core.expression.operators import calendar, date_format, date_words
from tailrace.core.expression.operators.calendar import Civil, civil_of, days_of
from tailrace.core.expression.operators.dates import moment_of, named, read_beforehand, sunday_week, zone_at
from tailrace.core.expression.operators.zone_names import read_zone
from tailrace.core.expression.operators.zones import Zone, zone_of
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Maybe, Value
from tailrace.errors import TailraceError

_DATE: Final = "date"
_FAILED: Final = 241
ISO_FORMAT: Final = "%Y-%m-%dT%H:%M:%S.%LZ"


#: Layouts of fewer bytes are remembered. A document may hold one of 16 MB.
_SHORT: Final = 256


def _checked_layout(data: bytes, letters: str) -> str:
    """The layout that a string's bytes hold. Raises 18535 and 18536 for one with other letters after a %."""
    return (_known_layout if len(data) < _SHORT else _read_layout)(data, letters)


def _read_layout(data: bytes, letters: str) -> str:
    text = v.text_of((v.STRING, data))
    at = 0
    while at < len(text):
        if text[at] != "%":
            at += 1
            continue
        if at + 1 == len(text):
            raise failure(18535, "Unmatched '%' at end of format string")
        if text[at + 1] not in letters:
            raise failure(18536, f"Invalid format character '%{text[at + 1]}' in format string")
        at += 2
    return text


_known_layout = lru_cache(maxsize=256)(_read_layout)


def _to_string(operand: Value, bindings: Bindings) -> Expression:
    given = named("$dateToString", operand, ("date", "format", "timezone", "onNull"), (18629, 18534), bindings)
    if "date" not in given:
        raise parse_failure(18628, "Missing 'date' parameter to $dateToString")

    def evaluate(frame: Frame) -> Maybe:
        value = given["date"].evaluate(frame)
        layout: str | None = ISO_FORMAT
        if "format" in given:
            wanted = given["format"].evaluate(frame)
            if wanted is None or wanted[0] in v.NULLISH:
                layout = None
            elif wanted[0] != v.STRING:
                raise failure(18533, f"$dateToString requires that 'format' be a string, found: {v.type_name(wanted)}")
            else:
                layout = _checked_layout(wanted[1], "dGHjLmMSuUVwYzZ%")
        zone = zone_at(given, frame)
        if value is None or value[0] in v.NULLISH:
            return v.NULL if "onNull" not in given else given["onNull"].evaluate(frame)
        if zone is None or layout is None:
            return v.NULL
        return v.string(written(moment_of(value), layout, zone))

    read_beforehand(given, [("timezone", zone_of, False)], bindings)
    return operator_of("$dateToString", list(given.values()), evaluate, bindings)


register("$dateToString", _DATE, "3.0", _to_string)


class _Shown(NamedTuple):
    """A moment on a wall clock: taken apart, as days since 1970, and the clock's minutes east of UTC."""

    civil: Civil
    days: int
    offset: int


def _sunday_first(days: int) -> int:
    return (calendar.weekday(days) + 1) % 7 + 1


def _hours_of(offset: int) -> str:
    return f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02d}{abs(offset) % 60:02d}"


#: What each letter after a % writes.
_PARTS: Final[dict[str, Callable[[_Shown], str]]] = {
    "Y": lambda shown: f"{calendar.check_year(shown.civil.year):04d}",
    "m": lambda shown: f"{shown.civil.month:02d}",
    "d": lambda shown: f"{shown.civil.day:02d}",
    "H": lambda shown: f"{shown.civil.hour:02d}",
    "M": lambda shown: f"{shown.civil.minute:02d}",
    "S": lambda shown: f"{shown.civil.second:02d}",
    "L": lambda shown: f"{shown.civil.millisecond:03d}",
    "j": lambda shown: f"{calendar.day_of_year(shown.civil):03d}",
    "w": lambda shown: str(_sunday_first(shown.days)),
    "u": lambda shown: str(calendar.weekday(shown.days) + 1),
    "U": lambda shown: f"{sunday_week(shown.civil):02d}",
    "V": lambda shown: f"{calendar.iso_week(shown.days)[1]:02d}",
    "G": lambda shown: f"{calendar.check_year(calendar.iso_week(shown.days)[0]):04d}",
    "z": lambda shown: _hours_of(shown.offset),
    "Z": lambda shown: str(shown.offset),
}


def _divided(layout: str) -> tuple[tuple[str, ...], tuple[Callable[[_Shown], str], ...]]:
    """What stands between the parts of a layout, one text more than there are parts; and what writes the parts."""
    between, letters = [""], []
    for text, letter in re.findall(r"([^%]+)|%(.)", layout, re.DOTALL):
        if letter in _PARTS:
            letters.append(_PARTS[letter])
            between.append("")
        else:
            between[-1] += text or letter
    return tuple(between), tuple(letters)


_known_division = lru_cache(maxsize=256)(_divided)


def written(moment: int, layout: str, zone: Zone) -> str:
    """A date in a layout such as "%Y-%m-%d"."""
    local = zone.local(moment)
    shown = _Shown(civil_of(local), local // calendar.DAY, (local - moment) // 60000)
    between, letters = (_known_division if len(layout) < _SHORT else _divided)(layout)
    text = between[0]
    for write, after in zip(letters, between[1:], strict=True):
        text += write(shown) + after
    return text


# ── parsing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_PLAIN: Final = re.compile(
    r"(?P<year>\d{4})(?:-(?P<month>\d\d)-(?P<day>\d\d)|/(?P<month2>\d\d)/(?P<day2>\d\d))"
    r"(?:[Tt ](?P<hour>\d\d):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.(?P<fraction>\d{1,7}))?)?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?)?",
    re.ASCII,
)


def parse_date_text(text: str, version: Version, *, code: int = _FAILED, zone: Zone | None = None) -> int:
    """Milliseconds of a text: ISO 8601 at once, other notations by ``date_words``, as a server of ``version`` does.

    Raises ``code`` where the server finds no date, and 115 for what is not read here.
    """
    if text == "":
        raise failure(code, "Error parsing date string ''; 0: Empty string")
    match = _PLAIN.fullmatch(text)
    if match is None:
        local, rest, offset = date_words.read(text, version)
        return _toward_zero(placed(local, offset, zone, text, version, code=code), rest)
    month, day = int(match["month"] or match["month2"]), int(match["day"] or match["day2"])
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    if not 1 <= month <= 12 or not 1 <= day <= 31 or hour > 23 or minute > 59 or second > 59:
        raise failure(code, f"Error parsing date string '{text}'; Unexpected character")
    days = days_of(int(match["year"]), month, day)
    if civil_of(days * calendar.DAY)[:3] != (int(match["year"]), month, day):
        raise failure(code, f"Error parsing date string '{text}'; The parsed date was invalid")
    fraction, rest = divmod(int(float("0." + (match["fraction"] or "0")) * 1000000), 1000)
    local = days * calendar.DAY + hour * calendar.HOUR + minute * calendar.MINUTE + second * 1000 + fraction
    offset = None if match["zone"] is None else read_zone(match["zone"], 0)[0]
    return _toward_zero(placed(local, offset, zone, text, version, code=code), rest)


def _toward_zero(moment: int, rest: int) -> int:
    """Milliseconds without the microseconds left over: the server cuts, which before 1970 is a later moment."""
    return moment + 1 if rest and moment < 0 else moment


def placed(
    local: int, offset: int | None, zone: Zone | None, text: str, version: Version, *, code: int = _FAILED
) -> int:
    """The moment at which a wall clock shows ``local``: by the text's own offset in seconds, or else by the zone."""
    if offset is None:
        return local if zone is None else zone.moment(local)
    if zone is not None and not zone.is_utc(version):
        raise failure(
            code,
            f"you cannot pass in a date/time string with time zone information ('{text}') with a timezone argument",
        )
    return local - offset * 1000


def _from_string(operand: Value, bindings: Bindings) -> Expression:
    allowed = ("dateString", "format", "timezone", "onError", "onNull")
    given = named("$dateFromString", operand, allowed, (40540, 40541), bindings)
    if "dateString" not in given:
        raise parse_failure(40542, "Missing 'dateString' parameter to $dateFromString")

    def evaluate(frame: Frame) -> Maybe:
        value = given["dateString"].evaluate(frame)
        layout, no_layout = _layout(given, frame)
        zone: Zone | None = None
        no_zone = False
        if "timezone" in given:
            where = given["timezone"].evaluate(frame)
            no_zone = where is None or where[0] in v.NULLISH
            zone = None if where is None or no_zone else zone_of(where)
        if value is None or value[0] in v.NULLISH:
            return v.NULL if "onNull" not in given else given["onNull"].evaluate(frame)
        if (no_layout or no_zone) and value[0] == v.STRING:
            return v.NULL
        try:
            return v.date(_read(value, layout, zone, bindings.version))
        except TailraceError as error:
            if error.code != _FAILED or "onError" not in given:
                raise
            return given["onError"].evaluate(frame)

    read_beforehand(given, [("timezone", zone_of, False)], bindings)
    return operator_of("$dateFromString", list(given.values()), evaluate, bindings)


def _layout(given: dict[str, Expression], frame: Frame) -> tuple[str | None, bool]:
    """The format, and whether it is given but null."""
    if "format" not in given:
        return None, False
    wanted = given["format"].evaluate(frame)
    if wanted is None or wanted[0] in v.NULLISH:
        return None, True
    if wanted[0] != v.STRING:
        raise failure(40684, f"$dateFromString requires that 'format' be a string, found: {v.type_name(wanted)}")
    return _checked_layout(wanted[1], "dGHLmMSuVYzZ%"), False


def _read(value: Value, layout: str | None, zone: Zone | None, version: Version) -> int:
    if value[0] != v.STRING:
        raise failure(_FAILED, f"$dateFromString requires that 'dateString' be a string, found: {v.type_name(value)}")
    text = v.text_of(value)
    if layout is None:
        return parse_date_text(text, version, zone=zone)
    local, offset = date_format.read(text, layout, version)
    return placed(local, offset, zone, text, version)


register(
    "$dateFromString",
    _DATE,
    "3.6",
    _from_string,
    note="texts that move a date by weekdays are refused when they are met",
)
