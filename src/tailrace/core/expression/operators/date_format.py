"""A text read by a format such as "%Y-%m-%d": ``$dateFromString`` with ``format``.

The server reads part after part, each as many digits as it can use; if a part comes twice, the last one counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from tailrace.core.expression.language.registry import failure, not_exact
from tailrace.core.expression.language.version import Version, knows
from tailrace.core.expression.operators import calendar
from tailrace.core.expression.operators.calendar import civil_of, days_of
from tailrace.core.expression.operators.zone_names import read_zone

_FAILED: Final = 241
#: How many digits, at most, each part takes.
_WIDTHS: Final = {"Y": 4, "m": 2, "d": 2, "H": 2, "M": 2, "S": 2, "L": 3, "G": 4, "V": 2, "u": 1}
#: A sign and digits; without digits the library counts a number after blanks, and stays where it is.
_MINUTES: Final = re.compile(r"([+-])([0-9]*)(?:[ \t\n\v\f\r]*([+-]?[0-9]+))?")
_ISO: Final = frozenset("GVu")
_NATURAL: Final = frozenset("Ymd")


@dataclass(slots=True)
class Parts:
    """What a text said: numbers by their letters, and the offset from UTC in seconds where it has one."""

    numbers: dict[str, int] = field(default_factory=dict)
    offset: int | None = None
    milliseconds: int = 0


def read(text: str, layout: str, version: Version) -> tuple[int, int | None]:
    """The moment on the wall clock in milliseconds, and the offset in seconds that the text gives, as a server of
    ``version`` reads it. Raises 241."""
    parts = _parts(text, layout, version)
    numbers = parts.numbers
    days = _days(numbers, text)
    hour, minute, second = numbers.get("H", 0), numbers.get("M", 0), numbers.get("S", 0)
    if hour > 23 or minute > 59 or second > 59:
        raise _wrong(text, "The parsed time was invalid")
    local = days * calendar.DAY + hour * calendar.HOUR + minute * calendar.MINUTE + second * 1000
    return local + parts.milliseconds, parts.offset


def _wrong(text: str, reason: str) -> Exception:
    return failure(_FAILED, f"Error parsing date string '{text}'; {reason}")


def _parts(text: str, layout: str, version: Version) -> Parts:
    text, layout = text.partition("\0")[0], layout.partition("\0")[0]  # the server's library reads to the first NUL
    parts = Parts()
    at = place = 0
    while place < len(layout) and at < len(text):
        letter = layout[place + 1] if layout[place] == "%" else ""
        place += 2 if letter else 1
        if letter in _WIDTHS:
            at = _number(letter, text, at, parts)
        elif letter == "z":
            offset, end = read_zone(text, at)
            if not knows(version, "6.0") and _is_read_otherwise(text, at, end):
                raise not_exact(f"the time zone in the date text {text!r} before MongoDB 6.0")
            if offset is None:
                raise _wrong(text, f"{at}: no time zone that may stand in a text")
            parts.offset, at = offset, end
        elif letter == "Z":
            match = _MINUTES.match(text, at)
            if match is None:
                raise _wrong(text, f"{at}: Invalid timezone offset in minutes")
            seconds = _minutes(match[2] or match[3] or "0")
            parts.offset, at = (-seconds if match[1] == "-" else seconds), match.end(2)
        elif text[at] == layout[place - 1]:
            at += 1
        else:
            raise _wrong(text, f"{at}: Format literal not found")
    if at < len(text):
        raise _wrong(text, f"{at}: Trailing data")
    if place < len(layout):
        raise _wrong(text, f"{at}: Not enough data available to satisfy format")
    return parts


def _is_read_otherwise(text: str, at: int, end: int) -> bool:
    """Whether the libraries of 4.4 and 5.0 may find another zone in the part that ends at ``end``: they read a word up
    to a blank, and know no seconds."""
    zone = text[at:end]
    if "+" in zone or "-" in zone:
        return not 0 < sum(map(str.isdigit, zone)) <= 4 or zone.count(":") > 1
    return text[end : end + 1] not in ("", " ", ")")


def _minutes(digits: str) -> int:
    """Minutes as seconds: the library reads 64 bits, and keeps 32."""
    minutes = int(digits) if len(digits) < 20 else (1 << 63) - 1
    seconds = min(minutes, (1 << 63) - 1) * 60 & 0xFFFFFFFF
    return seconds - (1 << 32) if seconds >> 31 else seconds


def _number(letter: str, text: str, at: int, parts: Parts) -> int:
    if letter in _ISO:  # of these the library skips what stands before the digits
        while at < len(text) and not "0" <= text[at] <= "9":
            at += 1
    end = at
    while end < len(text) and end - at < _WIDTHS[letter] and "0" <= text[end] <= "9":
        end += 1
    if end == at:
        raise _wrong(text, f"{at}: Unexpected data found.")
    if letter in "MS" and end - at < 2:
        raise _wrong(text, f"{at}: A two digit minute or second could not be found")
    number = int(text[at:end])
    if letter == "L":
        parts.milliseconds = int(text[at:end].ljust(3, "0"))
    elif letter == "V" and not 1 <= number <= 53:
        raise _wrong(text, f"{at}: ISO Week must be between 1 and 53")
    elif letter == "u" and not 1 <= number <= 7:
        raise _wrong(text, f"{at}: Day of week must be between 1 and 7")
    else:
        parts.numbers[letter] = number
    return end


def _days(numbers: dict[str, int], text: str) -> int:
    """Days since 1970 of a natural date, or of an ISO week's day: the first week and day where none is said."""
    given = numbers.keys()
    if given & _ISO:
        if given & _NATURAL:
            raise _wrong(text, "Mixing of ISO dates with natural dates is not allowed")
        if "G" not in given:
            raise _wrong(text, "The parsed date was invalid")
        fourth = days_of(numbers["G"], 1, 4)
        return fourth - calendar.weekday(fourth) + (numbers.get("V", 1) - 1) * 7 + numbers.get("u", 1) - 1
    if not given >= _NATURAL:
        raise failure(_FAILED, f'an incomplete date/time string has been found, with elements missing: "{text}"')
    return valid_days(numbers["Y"], numbers["m"], numbers["d"], text)


def valid_days(year: int, month: int, day: int, text: str) -> int:
    """Days since 1970 of a date that the calendar has; else 241."""
    days = days_of(year, month, day)
    if not 1 <= month <= 12 or not 1 <= day <= 31 or civil_of(days * calendar.DAY)[:3] != (year, month, day):
        raise _wrong(text, "The parsed date was invalid")
    return days
