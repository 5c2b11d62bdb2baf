"""The server that a run of the tests is about: 6.0.27, or what ``$TAILRACE_MONGOD`` names (``make test-version``).

A test that starts servers of several versions names ``SERVER_VERSION`` where it would be run on one alone, and the
others beside it. A run on another server than the default leaves out what names only others: ``make test-landing``
has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from tailrace.core.expression.language.version import Version
from tailrace.core.plan.profile import profile_for
from tailrace.embedded.binary import DEFAULT_VERSION, find_mongod
from tailrace.embedded.errors import EmbeddedError


def _version_in_use() -> str:
    try:
        return find_mongod().version
    except EmbeddedError:
        return DEFAULT_VERSION  # each test that wants a server says why there is none


def major(version: str) -> int:
    """The first number of a version: from 6 on servers have images and the events of definitions."""
    return int(version.partition(".")[0])


SERVER_VERSION: Final = _version_in_use()

#: The language of its pipelines: what is compiled beside it is compiled for it.
LANGUAGE: Final[Version] = profile_for(SERVER_VERSION).version

#: Whether it is a program for Windows, under Wine: its C library reads numbers out of texts in its own way.
IS_FOR_WINDOWS: Final = major(SERVER_VERSION) == 7

#: Among the versions of a test: the one between the newest and the oldest server has its turn in ``make test-slow``,
#: where it answers as one of the two. Where it is known to answer otherwise, it stands there as "5.0.4".
IN_BETWEEN: Final = pytest.param("5.0.4", marks=pytest.mark.slow)


def is_of_other_versions(versions: Sequence[str]) -> bool:
    """Whether a test that names these versions is left out by a run on another server than the default."""
    return SERVER_VERSION != DEFAULT_VERSION and bool(versions) and SERVER_VERSION not in versions
