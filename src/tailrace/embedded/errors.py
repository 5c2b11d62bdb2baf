"""What the embedded MongoDB raises."""

from __future__ import annotations

from tailrace.errors import TailraceError


class EmbeddedError(TailraceError):
    """The machine cannot give what was asked for: no mongod can be had, a port is taken, mongod does not start."""
