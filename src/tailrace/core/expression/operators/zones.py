"""Time zones: fixed offsets, and the names of the IANA database.

The database comes from Python's ``zoneinfo``; the server carries one of its own. Both agree on the past up to the
server's release, which is why a rule that changed since then is the one known difference.
"""

from __future__ import annotations

import re
from datetime import UTC as UTC_CLOCK
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from tailrace.core.expression.language.registry import failure, not_exact
from tailrace.core.expression.language.version import Version, knows
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value

_OFFSET: Final = re.compile(r"([+-])(\d\d)(?::?(\d\d))?", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1)
#: Named zones are followed inside these bounds (milliseconds of 1902 and 2037): beyond, tables and rules differ.
_FIRST: Final = -2145916800000
_LAST: Final = 2114380800000


class Zone:
    """A fixed offset in seconds, or a named zone."""

    def __init__(self, name: str, offset: int | None, rules: ZoneInfo | None = None) -> None:
        self.name = name
        self.fixed = offset
        self.rules = rules

    def is_utc(self, version: Version) -> bool:
        """Whether it is UTC to a server of ``version``, so that a text may name its own zone too: an offset of
        0, and from 7.0 on the name "UTC"; neither "GMT" nor "Etc/UTC"."""
        return self.fixed == 0 and (self.name[0] in "+-" or (self.name == "UTC" and knows(version, "7.0")))

    def offset_at(self, milliseconds: int) -> int:
        """Seconds east of UTC at a moment."""
        if self.fixed is not None:
            return self.fixed
        self._check(milliseconds)
        return _offset_at(self.rules, milliseconds // 1000)

    def local(self, milliseconds: int) -> int:
        """Milliseconds of the wall clock, as if it showed UTC."""
        return milliseconds + self.offset_at(milliseconds) * 1000

    def moment(self, local: int) -> int:
        """The moment at which the wall clock shows ``local``; the earlier one where it shows it twice."""
        if self.fixed is not None:
            return local - self.fixed * 1000
        self._check(local)
        shown = (_EPOCH + timedelta(milliseconds=local)).replace(tzinfo=self.rules)
        return local - _seconds(shown.utcoffset()) * 1000

    def _check(self, milliseconds: int) -> None:
        if not _FIRST <= milliseconds <= _LAST:
            raise not_exact(f"the time zone {self.name} before 1902 or after 2036")


def _seconds(offset: timedelta | None) -> int:
    return 0 if offset is None else int(offset.total_seconds())


@lru_cache(maxsize=4096)  # the dates of neighbouring events are often the same
def _offset_at(rules: ZoneInfo | None, second: int) -> int:
    moment = datetime.fromtimestamp(0, UTC_CLOCK) + timedelta(seconds=second)
    return _seconds(moment.astimezone(rules).utcoffset())


UTC: Final = Zone("UTC", 0)


def _named(name: str) -> Zone | None:
    if name in ("UTC", "GMT"):
        return Zone(name, 0)
    match = _OFFSET.fullmatch(name)
    if match is not None:
        seconds = int(match[2]) * 3600 + int(match[3] or 0) * 60
        return Zone(name, -seconds if match[1] == "-" else seconds)
    if not name or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_+/-]*", name):
        return None
    try:
        return Zone(name, None, ZoneInfo(name))
    except (KeyError, ValueError, OSError):
        return None


@lru_cache(maxsize=256)
def zone_of(value: Value) -> Zone:
    """The zone that a string names. Raises 40517 for another type, 40485 for an unknown name."""
    if value[0] != v.STRING:
        raise failure(40517, f"timezone must evaluate to a string, found {v.type_name(value)}")
    name = v.text_of(value)
    zone = _named(name)
    if zone is None:
        raise failure(40485, f'unrecognized time zone identifier: "{name}"')
    return zone
