"""When a listener commits: after a number of changes, after a time, and when the stream is quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tailrace.errors import UsageError

IDLE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class CommitPolicy:
    """``every``     commit after this many changes: up to ``every - 1`` handled ones are handled again after a crash
    ``interval``     commit after this many seconds too; ``None``: only by number
    ``idle_seconds`` on a quiet stream, write the position forward this often, so that it does not fall off the oplog
    """

    every: int = 1
    interval: float | None = None
    idle_seconds: float = IDLE_S

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"commit_every must be a whole number, 1 or more, not {self.every!r}")
        if self.interval is not None and not self.interval > 0:
            raise UsageError(f"commit_interval must be a number of seconds above 0, not {self.interval!r}")
        if not self.idle_seconds > 0:
            raise UsageError(f"commit_idle must be a number of seconds above 0, not {self.idle_seconds!r}")

    @property
    def arguments(self) -> dict[str, int | float | None]:
        """The arguments of a listener with this policy."""
        return {"commit_every": self.every, "commit_interval": self.interval, "commit_idle": self.idle_seconds}

    def is_due(self, handled: int, since: float, now: float) -> bool:
        """Whether ``handled`` changes after the commit at ``since`` are to be committed at ``now`` (seconds)."""
        return handled >= self.every or (handled > 0 and self.interval is not None and now - since >= self.interval)

    def is_due_when_quiet(self, handled: int, since: float, now: float) -> bool:
        """The same when the stream has nothing to give at the moment."""
        return handled > 0 or now - since >= self.idle_seconds
