"""What the drivers' protocol says about a server's version: the number that each member gives in its hello, which
PyMongo keeps for every member that it knows (the drivers' server discovery specification; measured on 4.4.2 to
7.0.28)."""

from __future__ import annotations

from typing import Final

#: ``maxWireVersion`` of the first release of each series, oldest first.
_SERIES: Final = (
    (9, "4.4"),
    (13, "5.0"),
    (14, "5.1"),
    (15, "5.2"),
    (16, "5.3"),
    (17, "6.0"),
    (18, "6.1"),
    (19, "6.2"),
    (20, "6.3"),
    (21, "7.0"),
    (22, "7.1"),
    (23, "7.2"),
    (24, "7.3"),
    (25, "8.0"),
    (26, "8.1"),
    (27, "8.2"),
)


def series_of(wire_version: int) -> str:
    """The server series of a ``maxWireVersion``, such as "7.0"; of one that is not known, the newest before it."""
    known = [series for first, series in _SERIES if first <= wire_version]
    return known[-1] if known else _SERIES[0][1]
