"""Which server's language is used: operators, stages and variables were added version by version."""

from __future__ import annotations

from functools import cache
from typing import Final, TypeAlias

#: The parts of a server version, such as ``(6, 0)`` or ``(7, 0, 28)``.
Version: TypeAlias = tuple[int, ...]

#: The language where nobody says whose it is.
USUAL: Final[Version] = (6, 0)
#: The newest version whose language was measured. What a later one knows beyond it is not known here.
NEWEST: Final[Version] = (7, 0)


@cache
def parts_of(since: str) -> Version:
    """The version that a row of the reference names, as numbers."""
    return tuple(map(int, since.split(".")))


def knows(version: Version, since: str) -> bool:
    """Whether a server of ``version`` has what came with ``since``."""
    return version[:2] >= parts_of(since)


def buffer_limit(version: Version) -> int:
    """The bytes that a string or an event may have while a server of ``version`` makes it (13548 beyond): 64 MB, and
    125 MB from 7.0 on. What it ends up with is limited by itself, to 16 MB."""
    return (125 if knows(version, "7.0") else 64) << 20


def is_unmeasured(version: Version) -> bool:
    """Whether a server of ``version`` may have names that are not known here."""
    return version[:2] > NEWEST
