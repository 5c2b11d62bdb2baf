"""How a lake grows, read from its log: events, rate and lag. It works while another process writes the lake."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.lake_root import LakeRoot

#: Over how many seconds the rate is taken: long enough to be steady, short enough to show a stop.
_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The newest micro-batch and what has come since the watch began. ``lag_ms`` is the time from an event's writing in
    MongoDB (its wall time) to its commit in the lake, for the last event of the micro-batch; ``None`` without that
    column. ``quarantined`` of the micro-batch's events were put aside."""

    commit: int
    batch: int | None
    batch_events: int
    events: int
    batches: int
    events_per_second: float
    lag_ms: int | None
    last_token: str
    quarantined: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "commit": self.commit,
            "batch": self.batch,
            "batchEvents": self.batch_events,
            "events": self.events,
            "eventsPerSecond": round(self.events_per_second, 1),
            "lagMs": self.lag_ms,
            "lastToken": self.last_token,
            "quarantined": self.quarantined,
        }

    def __str__(self) -> str:
        lag = "" if self.lag_ms is None else f"  lag {self.lag_ms / 1000:.2f} s"
        aside = f"  {self.quarantined:,} in quarantine" if self.quarantined else ""
        return f"micro-batch {self.batch}  {self.events:,} events  {self.events_per_second:,.0f} events/s{lag}{aside}"


class GrowthWatch:
    """Watches the lake at ``root`` from now on. The lake does not have to exist yet."""

    def __init__(self, root: LakeRoot) -> None:
        self._log = CommitLog(root)
        self._seen = max(0, self._log.head().number) if self._log.layout.identity.exists() else 0
        self._recent: deque[tuple[float, int]] = deque()
        self._began = time.monotonic()
        self._events = 0
        self._batches = 0

    @property
    def events(self) -> int:
        """Events committed since the watch began."""
        return self._events

    @property
    def batches(self) -> int:
        return self._batches

    def look(self) -> list[Growth]:
        """The commits that added events since the last look, oldest first."""
        grown: list[Growth] = []
        for commit in self._log.commits(self._seen):
            self._seen = commit.number
            if commit.batch is None:
                continue
            self._events += commit.rows
            self._batches += 1
            self._recent.append((time.monotonic(), commit.rows))
            wall = commit.last_wall_time
            lag = None if wall is None else max(0, round((commit.committed_at - wall).total_seconds() * 1000))
            grown.append(
                Growth(
                    commit=commit.number,
                    batch=commit.batch,
                    batch_events=commit.rows,
                    events=self._events,
                    batches=self._batches,
                    events_per_second=self.rate(),
                    lag_ms=lag,
                    last_token=commit.last_token,
                    quarantined=commit.quarantined_rows,
                )
            )
        return grown

    def rate(self) -> float:
        """Events a second over the last five seconds."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        window = min(_WINDOW_S, max(now - self._began, 0.5))
        return sum(rows for _, rows in self._recent) / window
