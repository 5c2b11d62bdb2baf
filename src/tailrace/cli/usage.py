"""Errors in the arguments of a command."""

from __future__ import annotations

from tailrace.errors import UsageError


class WrongUsageError(UsageError):
    """The command was not carried out, because of its arguments alone: exit status 2, as when the parser refuses
    them."""
