"""Random texts of dates, with a format and without: every notation that the server's library knows, and near misses."""

from __future__ import annotations

import random

MONTHS = (
    "January", "February", "march", "May", "JUNE", "September", "December", "Jan", "feb", "Mar", "may", "Sep", "sept",
    "Oct", "DEC", "I", "II", "iv", "XII",
)  # fmt: skip
WEEKDAYS = ("Monday", "tuesday", "Wed", "Thu", "fri", "Saturday", "sun")
ZONES = (
    "", "", "Z", " Z", "z", "+03", "+0300", "+03:00", "-5", "-05:30", " +01:00", " UTC", " GMT", " GMT+2", "GMT-0330",
    " EST", " cest", " (PST)", "(EST)", " A", "q", "+123456", "+24:00", "+25", "-00:00", " JST", "+3:5", " Nope",
    " Europe/Berlin", "+", "+1:2:3",
)  # fmt: skip
MOVES = (
    "+1 day", "-2 months", "3 weeks ago", "next year", "last month", "1 hour", "-5 sec", "+1 week 2 days", "ago",
    "first day of", "last day of", "2 years ago", "third day", "+36 hours", "next week", "500 msec", "next monday",
)  # fmt: skip


def date_text(rng: random.Random) -> str:
    """A text without a format."""
    date, time = _date(rng), _time(rng)
    if rng.random() < 0.12:
        date = rng.choice(WEEKDAYS) + rng.choice((" ", ", ", "")) + date
    between = rng.choice(("T", " ", " ", "t", "", "  ", ", ", " T", "\t")) if time else ""
    zone = rng.choice(ZONES)
    text = date + between + time + zone if rng.random() < 0.9 else f"{time}{zone} {date}"
    if rng.random() < 0.08:
        text += " " + rng.choice(MOVES)
    if rng.random() < 0.05:
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice("x .,;-+/0Z\n") + text[place:]
    return text


def _date(rng: random.Random) -> str:
    year = rng.choice((2020, 2019, 1999, 1970, 1969, 1900, 2038, 9999, 1, 70, 69, 5, 0))
    month, day = rng.randint(0, 13) if rng.random() < 0.1 else rng.randint(1, 12), rng.randint(1, 28)
    if rng.random() < 0.1:
        day = rng.choice((0, 29, 30, 31, 32))
    y = rng.choice((f"{year:04d}", str(year), f"{year % 100:02d}"))
    m, d = rng.choice((f"{month:02d}", str(month))), rng.choice((f"{day:02d}", str(day)))
    dash, blank = rng.choice(("-", "-", "/", ".", ":", " ", "")), rng.choice((" ", "-", ".", "", "  ", ", ", "\t"))
    name, ordinal = rng.choice(MONTHS), d + rng.choice(("", "", "st", "nd", "rd", "th"))
    week, year_day = rng.randint(0, 54), rng.randint(0, 370)
    return rng.choice(
        (
            *[y + dash + m + dash + d] * 5,
            d + dash + m + dash + y,
            f"{m}/{d}/{y}",
            f"{m}/{d}",
            ordinal + blank + name + blank + y,
            ordinal + blank + name,
            name + blank + y,
            f"{name}{blank}{ordinal}, {y}",
            name + blank + ordinal + blank + y,
            y + blank + name,
            y + blank + name + blank + d,
            f"{year:04d}W{week:02d}",
            f"{year:04d}-W{week:02d}-{rng.randint(0, 8)}",
            f"{year:04d}W{week:02d}{rng.randint(0, 8)}",
            f"{year:04d}{rng.choice(('', '.', '-'))}{year_day:03d}",
            f"{year:04d}{month:02d}{day:02d}",
            f"@{rng.randint(-(10**10), 10**10)}",
            f"@{rng.randint(-(10**6), 10**6)}.{rng.randint(0, 10**6)}",
            y,
            name,
            "",
            f"{year:04d}-{month:02d}",
            f"{rng.choice('+-')}{year:04d}-{month:02d}-{day:02d}",
            f"{rng.choice('+-')}{year:06d}-{month:02d}-{day:02d}",
            f"{d}/{name[:3]}/{year:04d}:03:04:05 +0100",
        )
    )


def _time(rng: random.Random) -> str:
    hour = rng.randint(0, 25) if rng.random() < 0.2 else rng.randint(0, 23)
    minute, second = (rng.choice((60, 61)) if rng.random() < 0.05 else rng.randint(0, 59) for _ in range(2))
    h = rng.choice((f"{hour:02d}", str(hour)))
    m, s = (rng.choice((f"{n:02d}", f"{n:02d}", f"{n:02d}", str(n))) for n in (minute, second))
    colon = rng.choice("::::.") if rng.random() < 0.9 else ""
    fraction = rng.choice(("", "", "", ".5", ".123", ".999999", ".1234567", ".57", ".0", ".", ",5", ":5"))
    half = rng.choice(("am", " PM", "p.m.", " a.m", ""))
    words = ("noon", "midnight", "today", "tomorrow", "yesterday", "now")
    full = h + colon + m + colon + s
    word = rng.choice(words)
    return rng.choice(("", full + fraction, full + fraction, full + half, h + colon + m + half, h + half, word))


_VALUES = {
    "%Y": ("2020", "1999", "20", "202", "5", "0", "20201"),
    "%m": ("1", "12", "02", "13", "00", "+1"),
    "%d": ("1", "28", "31", "0", "32", "05"),
    "%H": ("0", "23", "24", "5", "05"),
    "%M": ("00", "59", "60", "7"),
    "%S": ("00", "59", "60", "7"),
    "%L": ("1", "12", "123", "1234", "x"),
    "%z": ZONES,
    "%Z": ("+60", "-330", "+0", "60", "+", "-", "+99999", "+1x", "- 5"),
    "%G": ("2020", "1999", "20", "0", "x7"),
    "%V": ("1", "53", "54", "0", "05", "10", " 3"),
    "%u": tuple("1234567089"),
    "%%": ("%",),
}


def text_and_format(rng: random.Random) -> tuple[str, str]:
    """A text, and a format that mostly fits it."""
    roll = rng.random()
    if roll < 0.15:
        parts = ["%G", "%V", "%u"][: rng.randint(1, 3)] + rng.sample(["%H", "%z"], rng.randint(0, 2))
    elif roll < 0.65:
        parts = ["%Y", "%m", "%d", *rng.sample(["%H", "%M", "%S", "%L", "%z", "%Z", "%u"], rng.randint(0, 4))]
    else:
        parts = rng.sample([*_VALUES, "%d", "%Y"], rng.randint(2, 6))
    layout = text = ""
    for part in parts:
        before = rng.choice(("", "-", " ", "T", ":", "é", "/"))
        layout += before + part
        text += (before if rng.random() < 0.97 else rng.choice("- x")) + rng.choice(_VALUES[part])
    return text, layout
