"""How far a sync has come: the numbers that its owner counts, and what others read from the target."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from tailrace.core.oplog.cluster_time import ClusterTime

#: Over how many seconds a rate is measured.
_RATE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """One look at a sync.

    Attributes:
        phase: copy, follow, cutOver; new: nothing has begun
        time: the target equals the source as it was at this time, once ``is_consistent``
        documents: how many were copied so far
        of: about how many documents must be copied
        seconds_left: how long the copy will still take
        changes: changes of documents that were carried out since the process began
        lag_s: by how much the target is behind the source
        reach_s: for how much longer the oplog, or the archive, will hold the next entry
        blocked_by: the definition that is being carried out
        verified: the last verification: its time, and what it found
        held_limits: limits of age (indexes) that a cut-over has not restored yet
    """

    name: str
    phase: str = "new"
    is_consistent: bool = False
    paused: bool = False
    owner: str | None = None
    time: ClusterTime | None = None
    documents: int = 0
    of: int = 0
    bytes: int = 0
    seconds_left: float | None = None
    changes: int = 0
    changes_per_second: float = 0.0
    lag_s: float | None = None
    reach_s: float | None = None
    blocked_by: str | None = None
    verified: Mapping[str, Any] | None = None
    held_limits: int = 0

    def to_json(self) -> dict[str, Any]:
        """For programs: the values under the names that ``--json`` prints."""
        found = asdict(self)
        del found["time"]
        return {
            "name": found.pop("name"),
            "phase": found.pop("phase"),
            "isConsistent": found.pop("is_consistent"),
            "time": None if self.time is None else f"{self.time.seconds},{self.time.increment}",
            "changesPerSecond": round(found.pop("changes_per_second"), 1),
            "secondsLeft": _rounded(found.pop("seconds_left")),
            "lagSeconds": _rounded(found.pop("lag_s")),
            "reachSeconds": _rounded(found.pop("reach_s")),
            "blockedBy": found.pop("blocked_by"),
            "heldLimits": found.pop("held_limits"),
            "verified": None if (verified := found.pop("verified")) is None else dict(verified),
            **found,
        }

    def __str__(self) -> str:
        parts = [f"{self.name}: {'paused' if self.paused else self.phase}"]
        if self.phase == "copy":
            left = "" if self.seconds_left is None else f", about {self.seconds_left:,.0f} s left"
            parts.append(f"{self.documents:,} of about {self.of:,} documents, {self.bytes / 1e6:,.0f} MB{left}")
        elif self.time is not None:
            equal = "equal to the source at" if self.is_consistent else "not yet equal, at"
            parts.append(f"{equal} {self.time.seconds},{self.time.increment}")
        if self.phase != "copy" and self.changes:
            parts.append(f"{self.changes:,} changes, {self.changes_per_second:,.0f} a second")
        if self.lag_s is not None:
            parts.append(f"{self.lag_s:,.0f} s behind")
        if self.reach_s is not None:
            parts.append(f"the oplog holds what comes next for {self.reach_s:,.0f} s more")
        if self.blocked_by:
            parts.append(f"applying {self.blocked_by}")
        if self.verified:
            parts.append(f"verified at {self.verified['time']}: {self.verified['differences']:,} differences")
        if self.held_limits:
            count = f"{self.held_limits:,} {'index' if self.held_limits == 1 else 'indexes'}"
            parts.append(f"expireAfterSeconds not restored on {count} of the target: run `tailrace sync cutover` again")
        return "; ".join(parts)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


class Counted:
    """What an owner counts. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changes = self._documents = self._of = self._bytes = 0
        self._looks: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._copy_begun: tuple[float, int] | None = None

    def changed(self, changes: int) -> None:
        """Count changes that were carried out."""
        with self._lock:
            self._changes += changes
            now = self._clock()
            self._looks.append((now, self._changes))
            while len(self._looks) > 2 and self._looks[1][0] < now - _RATE_S:
                self._looks.popleft()

    def copied(self, documents: int, of: int, size: int) -> None:
        """The copy has come so far in all."""
        with self._lock:
            if self._copy_begun is None:
                self._copy_begun = self._clock(), documents
            self._documents, self._of, self._bytes = documents, max(of, documents), size

    def fields(self) -> dict[str, Any]:
        """What ``SyncProgress`` has of it."""
        with self._lock:
            return {
                "documents": self._documents,
                "of": self._of,
                "bytes": self._bytes,
                "seconds_left": self._seconds_left(),
                "changes": self._changes,
                "changes_per_second": self._rate(),
            }

    def _rate(self) -> float:
        (then, before), now = self._looks[0], self._clock()
        return (self._changes - before) / (now - then) if now > then else 0.0

    def _seconds_left(self) -> float | None:
        if self._copy_begun is None:
            return None
        begun, before = self._copy_begun
        done = self._documents - before
        return (self._clock() - begun) / done * (self._of - self._documents) if done > 0 else None
