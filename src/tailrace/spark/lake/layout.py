"""Where things lie in a lake, and how its files are named.

::

    <lake>/
      day=2026-11-21/0000000017-00000.parquet     commit 17, file 0: what readers see
      day=2026-11-21/0000000003-00000-0000000020.parquet   the same, rewritten by compaction commit 20
      _tailrace/lake.json                          whose stream this is
      _tailrace/commits/0000000017.json            what commit 17 added or replaced
      _tailrace/head.json                          the newest commit (a copy, to find it fast)
      _staging/                                    files being written; nothing here counts

Names that begin with an underscore are skipped by Spark, pandas and Arrow; files in ``_staging`` do not end in
``.parquet``, so that no glob finds them either. The lexical order of a day's file names is the order of the stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tailrace.errors import SinkError, invariant
from tailrace.oplog.cluster_time import ClusterTime

_NAME = re.compile(r"(?P<origin>\d{10}-\d{5})(-\d{10})?\.parquet\Z")
_TOKEN = re.compile(r"82[0-9A-F]{16}")
DAY_PREFIX = "day="


@dataclass(frozen=True, slots=True)
class LakeLayout:
    """The paths of one lake."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "_tailrace"

    @property
    def commits(self) -> Path:
        return self.state / "commits"

    @property
    def identity(self) -> Path:
        return self.state / "lake.json"

    @property
    def head(self) -> Path:
        return self.state / "head.json"

    @property
    def snapshot(self) -> Path:
        return self.state / "snapshot.json"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def compaction_lock(self) -> Path:
        return self.state / "compaction.lock"

    @property
    def staging(self) -> Path:
        return self.root / "_staging"

    @property
    def swap_beside(self) -> Path:
        """Where compaction builds a new day directory: beside the lake, so that ``<lake>/**/*.parquet`` (DuckDB looks
        into hidden directories too) cannot find the same rows twice for a moment."""
        return self.root.parent / f".{self.root.name}.tailrace-swap"

    @property
    def swap_inside(self) -> Path:
        """The same where the lake is a mount point, or its parent may not be written."""
        return self.staging / "swap"

    def day_directories(self) -> list[Path]:
        return sorted(path for path in self.root.glob(f"{DAY_PREFIX}*") if path.is_dir())


def cluster_time_of(token: str) -> ClusterTime:
    """The cluster time in a resume token's ``_data``: it begins with a timestamp, type byte 0x82, in keystring form."""
    if not _TOKEN.match(token):
        raise SinkError(f"not a resume token: {token[:40]!r}")
    return ClusterTime(int(token[2:18], 16))


def day_of(time: ClusterTime) -> str:
    """The UTC day of a cluster time, ``2026-11-21``."""
    return datetime.fromtimestamp(time.seconds, UTC).strftime("%Y-%m-%d")


def first_token_of_next_day(token: str) -> str:
    """The smallest token of the day after ``token``'s: where a file of one day must end."""
    seconds = cluster_time_of(token).seconds
    return f"82{(seconds // 86400 + 1) * 86400:08X}"


def file_name(day: str, commit: int, index: int) -> str:
    """The name of file ``index`` of commit ``commit``, relative to the lake."""
    invariant(commit < 10**10 and index < 10**5, f"too many files for their names: commit {commit}, file {index}")
    return f"{DAY_PREFIX}{day}/{commit:010d}-{index:05d}.parquet"


def merged_name(first: str, commit: int) -> str:
    """The name of a file that compaction commit ``commit`` wrote from ``first`` and those after it.

    It sorts where ``first`` did, since ``-`` sorts before ``.``, and no other file ever had it: a reader that still
    holds an old listing finds a file or finds none, never other rows under a name it knows.
    """
    day, _, base = first.rpartition("/")
    match = _NAME.match(base)
    invariant(match is not None, f"not a file of a lake: {first}")
    assert match is not None
    return f"{day}/{match['origin']}-{commit:010d}.parquet"


def is_lake_file(name: str) -> bool:
    """Whether a name inside a day directory is one that a lake gives."""
    return _NAME.match(name) is not None
