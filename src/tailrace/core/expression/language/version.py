"""Which server's language is spoken: operators, stages and variables have come one version after the other."""

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


def is_unmeasured(version: Version) -> bool:
    """Whether a server of ``version`` may have names that are not known here."""
    return version[:2] > NEWEST
