"""When small files are merged, and up to which size. Values only: every process that plans or writes loads this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tailrace.errors import UsageError

#: How long a replaced file stays for readers that opened the lake earlier it was replaced. A stream that commits
#: each second replaces some 90,000 files in a day.
RETENTION = timedelta(days=1)
_RETENTION_MAX = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """``target_bytes``: the size that files are merged up to. ``every``: check after this many commits (0: never).
    ``fan_in``: in a day that is still being written, merge only this many files or more at once, and never a large one
    with a few small ones, so that a row is rewritten a few times at most, not once for each commit. ``retention``: how
    long replaced files are kept for readers, at most 30 days."""

    target_bytes: int = 128 << 20
    every: int = 64
    fan_in: int = 8
    retention: timedelta = RETENTION

    def __post_init__(self) -> None:
        if self.target_bytes < 1 or self.every < 0 or self.fan_in < 2:
            raise UsageError("compaction needs a target size of 1 byte or more, every >= 0 and fan_in >= 2")
        if not timedelta(0) <= self.retention <= _RETENTION_MAX:
            raise UsageError("replaced files can be kept for 0 to 30 days")

    def due(self, commit: int) -> bool:
        """Whether to look for files to merge after commit number ``commit``."""
        return self.every > 0 and commit % self.every == 0

    def to_options(self) -> dict[str, str]:
        """As options of the sink, which are text."""
        return {
            "compactionTargetBytes": str(self.target_bytes),
            "compactionEvery": str(self.every),
            "compactionFanIn": str(self.fan_in),
            "compactionRetentionSeconds": str(round(self.retention.total_seconds())),
        }

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> CompactionPolicy:
        default = cls()
        try:
            return cls(
                target_bytes=int(options.get("compactionTargetBytes", default.target_bytes)),
                every=int(options.get("compactionEvery", default.every)),
                fan_in=int(options.get("compactionFanIn", default.fan_in)),
                retention=timedelta(
                    seconds=int(options.get("compactionRetentionSeconds", default.retention.total_seconds()))
                ),
            )
        except ValueError as error:
            raise UsageError(f"compaction options must be whole numbers: {error}") from None
