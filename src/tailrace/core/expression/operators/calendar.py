"""Days since 1970 and civil dates, for all 64-bit milliseconds (the ``datetime`` module ends at 9999)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from tailrace.core.expression.language.registry import failure

DAY: Final = 86400000
HOUR: Final = 3600000
MINUTE: Final = 60000
SECOND: Final = 1000


class Civil(NamedTuple):
    """A moment taken apart: month and day count from 1."""

    year: int
    month: int
    day: int
    hour: int
    minute: int
    second: int
    millisecond: int


def days_of(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01; ``month`` and ``day`` may lie outside their ranges."""
    year, month = year + (month - 1) // 12, (month - 1) % 12 + 1
    shifted = year - (month <= 2)
    era, of_era = shifted // 400, shifted % 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468 + day - 1


@lru_cache(maxsize=4096)
def civil_of_days(days: int) -> tuple[int, int, int]:
    """Year, month and day of a number of days since 1970-01-01."""
    days += 719468
    era, rest = days // 146097, days % 146097
    of_era = (rest - rest // 1460 + rest // 36524 - rest // 146096) // 365
    of_year = rest - (365 * of_era + of_era // 4 - of_era // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + (3 if shifted < 10 else -9)
    return era * 400 + of_era + (month <= 2), month, of_year - (153 * shifted + 2) // 5 + 1


def civil_of(milliseconds: int) -> Civil:
    days, rest = divmod(milliseconds, DAY)
    hour, rest = divmod(rest, HOUR)
    minute, rest = divmod(rest, MINUTE)
    second, millisecond = divmod(rest, SECOND)
    return Civil(*civil_of_days(days), hour, minute, second, millisecond)


def weekday(days: int) -> int:
    """0 is Monday."""
    return (days + 3) % 7


def day_of_year(civil: Civil) -> int:
    return days_of(civil.year, civil.month, civil.day) - days_of(civil.year, 1, 1) + 1


def iso_week(days: int) -> tuple[int, int]:
    """ISO 8601 year and week."""
    thursday = days - weekday(days) + 3
    year = civil_of_days(thursday)[0]
    return year, (thursday - days_of(year, 1, 1)) // 7 + 1


def check_year(year: int) -> int:
    """A year that can be written with four digits, or 18537."""
    if not 0 <= year <= 9999:
        raise failure(
            18537, "Could not convert date to string: date component was outside the supported range of 0-9999"
        )
    return year


def iso_string(milliseconds: int) -> str:
    """A date as the server converts it to a string: UTC, milliseconds, Z."""
    civil = civil_of(milliseconds)
    check_year(civil.year)
    return (
        f"{civil.year:04d}-{civil.month:02d}-{civil.day:02d}T{civil.hour:02d}:{civil.minute:02d}:{civil.second:02d}."
        f"{civil.millisecond:03d}Z"
    )
