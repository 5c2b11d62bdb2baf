"""The server on which the tests are run: 6.0.27, or the one that ``$TAILRACE_MONGOD`` names (``make test-version``).

A test that starts servers of several versions lists ``SERVER_VERSION`` and the others beside it. A run on a server
other than the default leaves out tests that name only other versions: ``make test-landing`` runs them.
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

#: The language of its pipelines, for which pipelines that are compared with it are compiled.
LANGUAGE: Final[Version] = profile_for(SERVER_VERSION).version

#: Whether it is a program for Windows, under Wine: its C library reads numbers out of texts in its own way.
IS_FOR_WINDOWS: Final = major(SERVER_VERSION) == 7

#: Among the versions of a test, the one between the oldest and the newest: it is slow if it answers like one of these
#: two. If it is known to answer differently, the test names "5.0.4" instead.
IN_BETWEEN: Final = pytest.param("5.0.4", marks=pytest.mark.slow)


def is_of_other_versions(versions: Sequence[str]) -> bool:
    """Whether a test that names these versions is left out by a run on another server than the default."""
    return SERVER_VERSION != DEFAULT_VERSION and bool(versions) and SERVER_VERSION not in versions
