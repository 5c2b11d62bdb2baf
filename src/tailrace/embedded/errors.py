"""The errors that the embedded MongoDB raises."""

from __future__ import annotations

from tailrace.errors import TailraceError


class EmbeddedError(TailraceError):
    """The machine cannot provide what was asked for: no mongod is available, a port is taken, mongod does not start."""
