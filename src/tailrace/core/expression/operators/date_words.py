"""A date's text without a format: the many notations that the server's library (timelib) reads.

The library cuts a text into tokens, always the longest that fits any of its notations, and each token gives its part of
the date. A part that is given twice is an error; only the time of day and the zone may be missing. Words that move the
date by weekdays ("next monday", "5 weekdays") are refused by name. All of it was measured on mongod 6.0.27; what
differs on 7.0 is beside it, measured on 7.0.28. The libraries of 5.0.4 and 4.4.2 read some of the notations in another
way or not at all: those are refused by name for their servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from tailrace.core.expression.language.registry import failure, not_exact
from tailrace.core.expression.language.version import Version, knows
from tailrace.core.expression.operators import calendar
from tailrace.core.expression.operators.calendar import days_of
from tailrace.core.expression.operators.date_format import valid_days
from tailrace.core.expression.operators.zone_names import read_zone

_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ROMAN: Final = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
_WEEKDAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
#: What the library takes for "not set": a year, and the microseconds of a time of day that was written without colons,
#: which it forgets to set. The second one is that of 7.0's library.
_UNSET: Final = -99999
_UNSET_SINCE_7_0: Final = -9999999
#: Since when the library is a later one.
_LATER_LIBRARY: Final = "7.0"
#: The microseconds that 64 bits hold, and how many digits a number may have without reaching them.
_MOST: Final = (1 << 63) - 1
_DIGITS: Final = 18


@dataclass(slots=True)
class _Date:
    """What the tokens have said so far."""

    text: str
    version: Version
    year: int | None = None
    month: int | None = None
    day: int | None = None
    time: tuple[int, int, int] | None = None
    #: ``None`` until something sets it.
    microseconds: int | None = None
    offset: int | None = None
    dates: int = 0
    zones: int = 0
    #: Years, months, days and microseconds to move by; the last numbers and units may still be turned by "ago".
    moves: list[int] | None = None
    weekday: int | None = None
    #: Whether the first or the last day of the month is meant.
    edge: str = ""

    @property
    def unset(self) -> int:
        return _UNSET_SINCE_7_0 if knows(self.version, _LATER_LIBRARY) else _UNSET

    def refuse_before(self, since: str) -> None:
        """Raise 115 where the server is earlier: its library reads this text in another way."""
        if not knows(self.version, since):
            raise not_exact(f"the date text {self.text!r} before MongoDB {since}")

    def wrong(self, reason: str) -> Exception:
        return failure(241, f"Error parsing date string '{self.text}'; {reason}")

    def set_date(self, year: str | None, month: int, day: int) -> None:
        if self.dates:
            raise self.wrong("Double date specification")
        self.dates = 1
        self.month, self.day = month, day
        if year is not None:
            if len(year) > _DIGITS + 1:
                raise not_exact(f"the date text {self.text!r}")
            number = int(year)
            short = len(year.lstrip("+-")) < 4 and 0 <= number < 100
            self.year = number + (2000 if number < 70 else 1900) if short else number

    def set_time(self, hour: int, minute: int, second: int, microseconds: int | None = 0) -> None:
        if self.time is not None:
            raise self.wrong("Double time specification")
        self.time = (hour, minute, second)
        self.microseconds = microseconds

    def offset_of(self, token: str) -> int | None:
        if sum(map(str.isdigit, token)) > 4:  # with seconds
            self.refuse_before("6.0")
        return read_zone(token, 0)[0]

    def set_zone(self, token: str) -> None:
        offset = self.offset_of(token)
        if self.zones or offset is None:
            raise self.wrong("Double timezone specification" if self.zones else "no time zone that may stand in a text")
        self.zones, self.offset = 1, offset

    def unset_time(self) -> None:
        self.time, self.microseconds = None, 0

    def set_days(self, days: int) -> None:
        """Move by days, whatever was said before."""
        self.move()
        if self.moves is not None:
            self.moves[2] = days

    def move(self, years: int = 0, months: int = 0, days: int = 0, microseconds: int = 0) -> None:
        found = self.moves or [0, 0, 0, 0]
        self.moves = [a + b for a, b in zip(found, (years, months, days, microseconds), strict=True)]


def read(text: str, version: Version) -> tuple[int, int, int | None]:
    """The moment on the wall clock in milliseconds, the microseconds left over, and the offset in seconds that the text
    gives. Raises 241. ``version``: of the server whose library reads it."""
    date = _Date(text, version)
    padded = text.strip("\t\n\v\f\r ") + "\0" * 4
    if padded[0] == "\0":
        raise date.wrong("Empty string")
    at = 0
    while at < len(padded):
        if padded[at] in " .,\t\n\0":
            at += 1
            continue
        best: tuple[re.Match[str], _Notation] | None = None
        for notation in _NOTATIONS:
            match = notation.pattern.match(padded, at)
            if match is not None and (best is None or match.end() > best[0].end()):
                best = (match, notation)
        if best is None:
            raise date.wrong(f"{at}: Unexpected character")
        date.refuse_before(best[1].since)
        best[1].action(date, best[0])
        at = best[0].end()
    moment = _moment(date)
    if abs(moment - (date.offset or 0) * 1000000) > _MOST:
        raise failure(159, "Overflow casting from a lower-precision duration to a higher-precision duration")
    return (*divmod(moment, 1000), date.offset)


def _moment(date: _Date) -> int:
    """Microseconds since 1970 on the wall clock."""
    hour, minute, second = date.time or (0, 0, 0)
    if hour > 23 or second > 59:
        raise date.wrong("The parsed time was invalid")
    year, month, day = date.year, date.month, date.day
    if year is None or year == date.unset or month is None or day is None:
        raise failure(241, f'an incomplete date/time string has been found, with elements missing: "{date.text}"')
    valid_days(year, month, day, date.text)
    years, months, days, microseconds = date.moves or (0, 0, 0, 0)
    if date.weekday is not None and (date.edge or year < 0):
        raise not_exact(f"the date text {date.text!r}")
    if date.weekday is not None:  # before it moves by anything else
        day += (date.weekday - calendar.weekday(days_of(year, month, day))) % 7
        year, month, day = calendar.civil_of_days(days_of(year, month, day))
    year, month, day = year + years, month + months, day + days
    if date.edge:
        month, day = (month, 1) if date.edge == "first" else (month + 1, 0)
    whole = days_of(year, month, day)
    local = whole * calendar.DAY + hour * calendar.HOUR + minute * calendar.MINUTE + second * 1000
    return local * 1000 + (date.microseconds or 0) + microseconds


# ── the notations ────────────────────────────────────────────────────────────────────────────────────────────────────

#: GMT+1, -0230, +01:30, +013000, +01:30:00
_CORRECTION: Final = (
    r"(?:GMT)?[+-](?:(?:2[0-4]|[01][0-9]):?[0-5][0-9]:?[0-5][0-9]|(?:2[0-4]|[01]?[0-9]):?(?:[0-5]?[0-9])?)"
)

_PIECES: Final = {
    "hour": r"(?P<h>2[0-4]|[01]?[0-9])",
    "hour2": r"(?P<h>2[0-4]|[01][0-9])",
    "hour12": r"(?P<h>1[0-2]|0?[1-9])",
    "minute": r"(?P<i>[0-5]?[0-9])",
    "minute2": r"(?P<i>[0-5][0-9])",
    "second": r"(?P<s>60|[0-5]?[0-9])",
    "second2": r"(?P<s>60|[0-5][0-9])",
    "fraction": r"\.(?P<f>[0-9]+)",
    "half": r"(?P<half>[AaPp])\.?[Mm]\.?[\0\t ]",
    "zone": rf"(?P<z>{_CORRECTION}|\(?[A-Za-z]{{1,6}}\)?|[A-Z][a-z]+(?:[_/-][A-Za-z]+)+)",
    "correction": rf"(?P<z>{_CORRECTION})",
    "month": r"(?P<m>1[0-2]|0?[0-9])",
    "month2": r"(?P<m>1[0-2]|0[0-9])",
    "monthname": r"(?P<n>(?i:january|february|march|april|may|june|july|august|september|october|november|december"
    r"|jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec)|VIII|VII|VI|IV|IX|XII|XI|III|II|I|V|X)",
    "monthshort": r"(?P<n>(?i:jan|feb|mar|apr|may|jun|jul|aug|sept|sep|oct|nov|dec))",
    "day": r"(?P<d>3[01]|[0-2]?[0-9])(?:st|nd|rd|th)?",
    "plainday": r"(?P<d>3[01]|[0-2]?[0-9])",
    "day2": r"(?P<d>3[01]|[0-2][0-9])",
    "year": r"(?P<y>[0-9]{1,4})",
    "year2": r"(?P<y>[0-9]{2})",
    "year4": r"(?P<y>[0-9]{4})",
    "signed": r"(?P<y>[+-]?[0-9]{4})",
    "long": r"(?P<y>[+-][0-9]{5,19})",
    "yearday": r"(?P<d>00[1-9]|0[1-9][0-9]|[12][0-9][0-9]|3[0-5][0-9]|36[0-6])",
    "week": r"(?P<w>0[1-9]|[1-4][0-9]|5[0-3])",
    "number": r"(?P<r>[+-]*[ \t]*[0-9]{1,13})",
    "count": r"(?P<c>(?i:first|second|third|fourth|fifth|sixth|seventh|eighth?|ninth|tenth|eleventh|twelfth"
    r"|next|last|previous|this))",
    "unit": r"(?P<u>(?i:msecs?|milliseconds?|ms|usecs?|microseconds?|µsecs?|µs|secs?|seconds?|mins?|minutes?|hours?"
    r"|days?|weeks?|forth?nights?|fortnights?|months?|years?))",
    "weekday": r"(?P<k>(?i:mondays?|tuesdays?|wednesdays?|thursdays?|fridays?|saturdays?|sundays?"
    r"|mon|tue|wed|thu|fri|sat|sun))",
}


class _Notation(NamedTuple):
    """What texts look like, what they say, and the first server whose library reads them so."""

    pattern: re.Pattern[str]
    action: Callable[[_Date, re.Match[str]], None]
    since: str


_NOTATIONS: Final[list[_Notation]] = []


def _notation(*layouts: str, since: str = "4.4") -> Callable[[Callable[[_Date, re.Match[str]], None]], None]:
    """Register what to do with texts of these layouts; of two that fit equally far the first registered counts."""

    def register(action: Callable[[_Date, re.Match[str]], None]) -> None:
        for layout in layouts:
            source = re.sub(r"(?<!\?P)<(\w+)>", lambda piece: _PIECES[piece[1]], layout)
            _NOTATIONS.append(_Notation(re.compile(source, re.ASCII), action, since))

    return register


def _month_of(name: str) -> int:
    return _ROMAN.index(name) + 1 if name in _ROMAN else _MONTHS.index(name[:3].lower()) + 1


def _fraction(digits: str | None) -> int:
    return int(float("0." + digits) * 1000000) if digits else 0


def _date(date: _Date, found: re.Match[str]) -> None:
    given = found.groupdict()
    name = given.get("n")
    month = _month_of(name) if name else int(given["m"])
    date.set_date(given.get("y"), month, int(given.get("d") or 1))


def _time(date: _Date, found: re.Match[str]) -> None:
    given = found.groupdict()
    hour = int(given["h"])
    if given.get("half"):
        hour = hour % 12 + (12 if given["half"] in "Pp" else 0)
    if len(given.get("f") or "") > 7:  # 4.4 finds no date in some of them
        date.refuse_before("5.0")
    date.set_time(hour, int(given.get("i") or 0), int(given.get("s") or 0), _fraction(given.get("f")))
    if given.get("z"):  # a zone inside a longer notation does not count: another may follow
        date.offset = date.offset_of(given["z"])


def _both(date: _Date, found: re.Match[str]) -> None:
    _time(date, found)
    _date(date, found)


@_notation("(?i:yesterday|tomorrow)")
def _near(date: _Date, found: re.Match[str]) -> None:
    date.unset_time()
    date.set_days(-1 if found[0][0] in "yY" else 1)


@_notation("(?i:now)")
def _now(date: _Date, found: re.Match[str]) -> None:
    pass


@_notation("(?i:noon)")
def _noon(date: _Date, found: re.Match[str]) -> None:
    date.unset_time()
    date.set_time(12, 0, 0)


@_notation("(?i:midnight|today)")
def _midnight(date: _Date, found: re.Match[str]) -> None:
    date.unset_time()


@_notation(r"@(?P<r>-?[0-9]+)(?:\.(?P<f>[0-9]{0,6}))?")
def _timestamp(date: _Date, found: re.Match[str]) -> None:
    date.unset_time()
    date.year, date.month, date.day = 1970, 1, 1
    date.set_zone("UTC")
    part = int((found["f"] or "").ljust(6, "0"))
    if found["f"] is not None and len(found["f"]) != 6:
        date.refuse_before("5.0")
    if found["r"][0] == "-" and part:
        date.refuse_before("6.0")  # they add it
    seconds = int(found["r"]) if len(found["r"]) <= _DIGITS else _many_seconds(date, found["r"])
    date.move(microseconds=seconds * 1000000 + (-part if found["r"][0] == "-" else part))


def _many_seconds(date: _Date, digits: str) -> int:
    """A number that 64 bits may not hold. 7.0 refuses it, and 6.0 takes the largest one."""
    magnitude = digits.lstrip("-0") or "0"
    limit = _MOST + (digits[0] == "-")
    fits = len(magnitude) <= len(str(limit)) and int(magnitude) <= limit
    if not fits and knows(date.version, _LATER_LIBRARY):
        raise date.wrong("0: Number out of range '@'")
    return int(digits) if fits else _MOST


@_notation("(?P<edge>(?i:first|last))(?i: day of)", since="5.0")
def _edge(date: _Date, found: re.Match[str]) -> None:
    date.unset_time()
    date.edge = found["edge"].lower()


_time_of_day = _notation(
    "<hour12>[ \\t]*<half>",
    "<hour12>[:.]<minute2>[ \\t]*<half>",
    "<hour12>[:.]<minute>[:.]<second2>[ \\t]*<half>",
    "[Tt]?<hour>[:.]<minute>",
    "[Tt]?<hour>[:.]<minute>[:.]<second>",
    "[Tt]?<hour>[:.]<minute>[:.]<second><fraction>",
)
_time_of_day(_time)
_notation("[Tt]<hour>", since="6.0")(_time)


@_notation("[Tt]?<hour2><minute2>")
def _bare(date: _Date, found: re.Match[str]) -> None:
    """Four digits: a time of day first, then a year."""
    if date.time is None:
        date.set_time(
            int(found["h"]), int(found["i"]), 0, date.unset if date.microseconds is None else date.microseconds
        )
        return
    if found[0][0] in "tT" or date.year is not None:
        raise not_exact(f"the date text {date.text!r}")
    date.year = int(found["h"] + found["i"])


_notation("[Tt]?<hour2><minute2><second2>")(_time)
_notation("<month>/<plainday>", "<month>/<plainday>/<year>")(_date)
_notation("<year4>/<month>/<plainday>/?", "<signed>-<month2>-<day2>", "<year2>-<month2>-<day2>")(_date)
_notation("<long>-<month2>-<day2>", since="5.0")(_date)
_notation("<year4>-<month>", "<year>-<month>-<plainday>")(_date)
_notation("<day>[ \\t.-]*<monthname>[ \\t.-]*<year>")(_date)
_notation("<plainday>[.\\t-]<month>[.-]<year4>", "<plainday>[.\\t]<month>\\.<year2>")(_date)
_notation("<monthname>[ .\\t-]*<year4>", "<year4>[ .\\t-]*<monthname>")(_date)
_notation("<monthname>[ .\\t-]*<plainday>[,.stndrh\\t ]+<year>")(_date)


@_notation("<monthname>[ .\\t-]*<plainday>(?:[,.stndrh\\t ]+|\\0)")
def _without_year(date: _Date, found: re.Match[str]) -> None:
    _date(date, found)
    date.year = None  # one that was said before is forgotten


_notation("<day>[ .\\t-]*<monthname>")(_date)
_notation("<year4><month2><day2>")(_date)
_notation(
    "<year4><month2><day2>T<hour>:<minute2>:<second2>",
    "<year4>-<month2>-<day2>T<hour2>:<minute2>:<second2><fraction><correction>?",
    "<year4>-<month>-<plainday>T<hour>:<minute>:<second>",
    "<year4>:<month2>:<day2> <hour2>:<minute2>:<second2>",
    "<plainday>/<monthshort>/<year4>:<hour2>:<minute2>:<second2>[ \\t]+<correction>",
)(_both)


@_notation("<year4><month2><day2>[tT](?P<t>(?:2[0-4]|[01]?[0-9])[0-5][0-9][0-5][0-9])")
def _compact(date: _Date, found: re.Match[str]) -> None:
    """Cut into twos whatever made it fit: five digits are an hour, minutes and one digit of seconds."""
    digits = found["t"]
    if int(digits[2:4]) > 59:
        raise date.wrong("The parsed time was invalid")
    date.set_time(int(digits[:2]), int(digits[2:4]), int(digits[4:]))
    _date(date, found)


def _of_year(date: _Date, found: re.Match[str]) -> None:
    date.set_date(found["y"], 1, int(found["d"]))


_notation("<year4>\\.?<yearday>")(_of_year)
_notation("<year4>-<yearday>", since="6.0")(_of_year)


@_notation("<year4>-?W<week>(?:-?(?P<d>[0-7]))?")
def _of_week(date: _Date, found: re.Match[str]) -> None:
    date.set_date(found["y"], 1, 1)
    year, week, day = int(found["y"]), int(found["w"]), int(found["d"] or 1)
    fourth = days_of(year, 1, 4)
    monday = fourth - calendar.weekday(fourth) + (week - 1) * 7
    date.set_days(monday + day - 1 - days_of(year, 1, 1))


_notation("<monthshort>-<day2>-<year>", "<year>-<monthshort>-<day2>")(_date)


@_notation("<year4>")
def _year(date: _Date, found: re.Match[str]) -> None:
    date.year = int(found["y"])


@_notation("<monthname>")
def _month(date: _Date, found: re.Match[str]) -> None:
    if date.dates:
        raise date.wrong("Double date specification")
    date.dates = 1
    date.month = _month_of(found["n"])


_notation(
    *(
        f"<monthname>[ .\\t-]*<plainday>(?:[,.stndrh\\t ]+|\\0){rest}"
        for rest in (
            "<hour12>[:.]<minute2>[ \\t]*<half>",
            "<hour12>[:.]<minute>[:.]<second2>[ \\t]*<half>",
            "[Tt]?<hour>[:.]<minute>",
            "[Tt]?<hour>[:.]<minute>[:.]<second>",
        )
    )
)(_both)


@_notation("<weekday>")
def _weekday(date: _Date, found: re.Match[str]) -> None:
    date.unset_time()
    date.weekday = _WEEKDAYS.index(found["k"][:3].lower())


_COUNTS: Final = {
    **{"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9},
    **{"eight": 8, "tenth": 10, "eleventh": 11, "twelfth": 12, "next": 1, "last": -1, "previous": -1, "this": 0},
}
_UNITS: Final = {
    **{"usec": 1, "microsecond": 1, "msec": 1000, "ms": 1000, "millisecond": 1000, "sec": 1000000, "second": 1000000},
    **{"min": 60000000, "minute": 60000000, "hour": 3600000000},
}


def _shift(date: _Date, amount: int, unit: str) -> None:
    name = unit.lower().removesuffix("s") if unit.lower() != "ms" else "ms"
    if name in _UNITS:
        date.move(microseconds=amount * _UNITS[name])
    elif name in ("day", "week", "fortnight", "forthnight"):
        date.move(days=amount * {"day": 1, "week": 7}.get(name, 14))
    elif name in ("month", "year"):
        date.move(**{name + "s": amount})
    else:
        raise not_exact(f"the date text {date.text!r}")


@_notation("<number>[ \\t]*<unit>")
def _relative(date: _Date, found: re.Match[str]) -> None:
    amount = int(re.sub(r"[^0-9]", "", found["r"])) * (-1) ** found["r"].count("-")
    _shift(date, amount, found["u"])


@_notation("<count>[ \\t]+<unit>")
def _counted(date: _Date, found: re.Match[str]) -> None:
    if found["u"][0] in "wW":  # moves by weekdays too
        raise not_exact(f"the date text {date.text!r}")
    _shift(date, _COUNTS[found["c"].lower()], found["u"])


@_notation("(?i:ago)")
def _ago(date: _Date, found: re.Match[str]) -> None:
    date.moves = [-move for move in date.moves or (0, 0, 0, 0)]
    if date.weekday is not None:
        raise not_exact(f"the date text {date.text!r}")


@_notation(
    "<number>[ \\t]*<weekday>",
    "<number>[ \\t]*(?i:weekdays?)",
    "<count>[ \\t]+<weekday>",
    "<count>[ \\t]+<weekday>[ \\t]+(?i:of)",
    "<count>[ \\t]+(?i:weekdays?)",
    "(?i:weekdays?)",
    "(?i:back|front) (?i:of) <hour>(?:[ \\t]*<half>)?",
    "<unit>[ \\t]+[A-Za-z]+",
    "<hour12>:<minute2>:<second2>[:.][0-9]+<half>",
)
def _refused(date: _Date, found: re.Match[str]) -> None:
    raise not_exact(f"the date text {date.text!r}")


@_notation("<zone>")
def _zone(date: _Date, found: re.Match[str]) -> None:
    date.set_zone(found["z"])
