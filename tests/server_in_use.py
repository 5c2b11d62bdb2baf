"""The server that a run of the tests is about: 6.0.27, or what ``$TAILRACE_MONGOD`` names (``make test-version``).

A test that starts servers of several versions names ``SERVER_VERSION`` where it would be run on one alone, and the
others beside it. A run on another server than the default leaves out what names only others: ``make test`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from tailrace.embedded.binary import DEFAULT_VERSION, find_mongod
from tailrace.embedded.errors import EmbeddedError


def _version_in_use() -> str:
    try:
        return find_mongod().version
    except EmbeddedError:
        return DEFAULT_VERSION  # each test that wants a server says why there is none


SERVER_VERSION: Final = _version_in_use()

#: Among the versions of a test: the one between the newest and the oldest server has its turn in ``make test-slow``,
#: where it answers as one of the two. Where it is known to answer otherwise, it stands there as "5.0.4".
IN_BETWEEN: Final = pytest.param("5.0.4", marks=pytest.mark.slow)


def major(version: str) -> int:
    """The first number of a version: from 6 on servers have images and the events of definitions."""
    return int(version.partition(".")[0])


def is_of_other_versions(versions: Sequence[str]) -> bool:
    """Whether a test that names these versions is left out by a run on another server than the default."""
    return SERVER_VERSION != DEFAULT_VERSION and bool(versions) and SERVER_VERSION not in versions
