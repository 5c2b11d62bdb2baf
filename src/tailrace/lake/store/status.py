"""A lake in a few numbers, read from its log alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.identity import read_identity
from tailrace.lake.store.lake_root import LakeRoot, present, rooted
from tailrace.lake.store.layout import QUARANTINE, cluster_time_of
from tailrace.lake.store.manifest import Erasure, Gap, LakeChange, WrittenVersion
from tailrace.lake.store.quarantine_index import checked_files

#: Files below this are worth merging where many of them come together.
SMALL_BYTES = 16 << 20
_TRIES = 5


@dataclass(frozen=True, slots=True)
class LakeStatus:
    """``rows`` events in ``files`` files of ``size`` bytes, of ``days`` days (``first_day`` to ``last_day``, ISO
    dates). ``small`` files are below 16 MB. ``replaced`` files are kept for readers.

    ``stream``       what the lake holds: scope, options, columns
    ``versions``     the server versions whose events it holds, oldest first; of an earlier release's lake, those since
    ``quarantined``  events that were put aside because they could not be written
    ``last_commit``  when the newest micro-batch was committed; ``lag_ms`` is the time from the writing of its last
                     event to that. ``None`` where the log does not say (any more)
    """

    stream: Mapping[str, Any]
    commits: int
    files: int
    rows: int
    size: int
    small: int
    days: int
    first_day: str | None
    last_day: str | None
    last_token: str | None
    last_time: ClusterTime | None
    last_commit: datetime | None
    lag_ms: int | None
    replaced: int
    replaced_bytes: int
    gaps: tuple[Gap, ...]
    erasures: tuple[Erasure, ...] = ()
    versions: tuple[WrittenVersion, ...] = ()
    quarantined: int = 0
    changes: tuple[LakeChange, ...] = ()

    def to_json(self) -> dict[str, Any]:
        time = self.last_time
        return {
            "stream": dict(self.stream),
            "commits": self.commits,
            "files": self.files,
            "rows": self.rows,
            "bytes": self.size,
            "smallFiles": self.small,
            "days": self.days,
            "firstDay": self.first_day,
            "lastDay": self.last_day,
            "lastToken": self.last_token,
            "lastClusterTime": None if time is None else {"t": time.seconds, "i": time.increment},
            "lastCommit": None if self.last_commit is None else self.last_commit.isoformat(),
            "lagMs": self.lag_ms,
            "replacedFiles": self.replaced,
            "replacedBytes": self.replaced_bytes,
            "gaps": [str(gap) for gap in self.gaps],
            "erasures": [str(erasure) for erasure in self.erasures],
            "serverVersions": [
                {"version": note.version, "after": {"t": note.after.seconds, "i": note.after.increment}}
                for note in self.versions
            ],
            "quarantined": self.quarantined,
            "changes": [str(change) for change in self.changes],
        }


def lake_status(path: LakeRoot | str) -> LakeStatus:
    """The state of the lake at ``path``. Changes nothing and waits for nobody. Raises UsageError where it is no lake,
    SinkError where its log is damaged."""
    root = rooted(path)
    identity = read_identity(root)
    if identity is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    log = CommitLog(root)
    state, head = log.state(), log.head()
    files = state.in_order
    found = present(root, state.removed)
    there = [one for one in state.removed.values() if one.name in found and one.name not in state.files]
    last_commit, lag = _last_batch(log, head.newest.number if head.newest else None)
    token = head.last_token
    return LakeStatus(
        stream=identity["stream"].get("settings", {}),
        commits=state.number + 1,
        files=len(files),
        rows=sum(file.rows for file in files),
        size=sum(file.size for file in files),
        small=sum(file.size < SMALL_BYTES for file in files),
        days=len({file.day for file in files}),
        first_day=files[0].day if files else None,
        last_day=files[-1].day if files else None,
        last_token=token,
        last_time=None if token is None else cluster_time_of(token),
        last_commit=last_commit,
        lag_ms=lag,
        replaced=len(there),
        replaced_bytes=sum(one.size for one in there),
        gaps=state.gaps,
        erasures=state.erasures,
        versions=state.versions,
        quarantined=_quarantined(log, head),
        changes=state.changes,
    )


def _quarantined(log: CommitLog, head: Head) -> int:
    """How many events are in the quarantine. Its files may be replaced while they are read. Raises SinkError where a
    file is missing or is not the lake's, or, in a store, its index was lost or set back."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return quarantine.rows_in(_aside(log, head))
    raise SinkError(f"the files in {log.layout.root / QUARANTINE} keep changing", hint="Try again")


def _aside(log: CommitLog, head: Head) -> Sequence[LakeRoot]:
    if isinstance(log.layout.root, ObjectPlace):
        return checked_files(log.layout, lambda: log.newest_batch(log.head()), log.commits)
    fault = quarantine.directory_fault(log.layout, lambda: log.newest_batch(log.head()), log.commits)
    if fault is not None:
        raise SinkError(fault[0], hint=fault[1])
    return quarantine.files_of(log.layout, log.newest_batch(head))


def _last_batch(log: CommitLog, number: int | None) -> tuple[datetime | None, int | None]:
    if number is None:
        return None, None
    for commit in log.commits(number - 1):
        if commit.number != number:
            break  # it is kept in a checkpoint of the log alone
        wall = commit.last_wall_time
        lag = None if wall is None else max(0, round((commit.committed_at - wall).total_seconds() * 1000))
        return commit.committed_at, lag
    return None, None
