"""The layout of a lake, and the names of its files.

::

    <lake>/
      _delta_log/00000000000000000017.json         what commit 17 added or replaced; only the log says what is there
      day=2026-11-21/6920ACF000000001-00000-a<id>.parquet    a data file: written once, never renamed, never reused
      day=2026-11-21/6920ACF000000001-00000-m<id>.parquet    the same rows and those after them, merged by compaction
      day=2026-11-21/hour=07/collection-orders/...           the same, of a lake that is divided by hour and collection
      _tailrace/lake.json                          whose stream this is
      _tailrace/head.json                          which commit is the newest (a witness, should the log lose its end)
      _tailrace/quarantine-ledger.json             which files the quarantine holds
      _quarantine/6920ACF000000001-<id>.parquet    events that could not be written as rows, if that was asked for
      _staging/                                    files being written; nothing here counts

A file's name begins with the cluster time of its first event, so that names sort in the stream's order; the random part
makes it unique for ever. Only the log says which files belong to the lake, and to which collection a file: the name
of its directory is shortened where the collection's cannot be part of a path.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, invariant
from tailrace.lake.store import delta
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.partitioning import BY_DAY, Partitioning

_NAME = re.compile(
    r"(?P<place>day=(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})/"
    r"(?:hour=(?P<hour>[0-9]{2})/)?(?:collection-(?P<folder>[A-Za-z0-9_.-]{1,120})/)?)"
    r"(?P<time>[0-9A-F]{16})-(?P<index>[0-9]{5})-(?P<kind>[am])(?P<id>[0-9a-f]{32})\.parquet"
)
_TOKEN = re.compile(r"82[0-9A-F]{16}")
#: This many of a token's hexadecimal digits are the cluster time and the type byte before it.
TIME_END: Final = 18
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_FOLDER_MAX = 100
DAY_PREFIX = "day="
QUARANTINE = "_quarantine"
_QUARANTINE = re.compile(QUARANTINE + r"/[0-9A-F]{16}-[0-9a-f]{32}\.parquet")


@dataclass(frozen=True, slots=True)
class LakeLayout:
    """The paths of one lake."""

    root: LakeRoot

    @property
    def state(self) -> LakeRoot:
        return self.root / "_tailrace"

    @property
    def local(self) -> Path:
        """Where locks are, and what else is this machine's own: in a directory the lake's state, of a lake in a store
        the directory beside it."""
        return self.root.bucket.beside if isinstance(self.root, ObjectPlace) else self.root / "_tailrace"

    @property
    def log(self) -> LakeRoot:
        return self.root / delta.LOG

    @property
    def identity(self) -> LakeRoot:
        return self.state / "lake.json"

    @property
    def head(self) -> LakeRoot:
        return self.state / "head.json"

    @property
    def lock(self) -> Path:
        return self.local / "lock"

    @property
    def compaction_lock(self) -> Path:
        return self.local / "compaction.lock"

    @property
    def staging(self) -> Path:
        """Files that are being written, on a file system in any case."""
        return self.local / "uploads" if isinstance(self.root, ObjectPlace) else self.root / "_staging"

    @property
    def default_checkpoint(self) -> Path:
        """Spark's checkpoint lies next to the lake: readers that take every file of a directory must not find it."""
        if isinstance(self.root, ObjectPlace):
            return self.local / "checkpoint"
        return self.root.with_name(f"{self.root.name}.checkpoint")

    def commit(self, number: int) -> LakeRoot:
        return delta.commit_path(self.root, number)

    def checkpoint(self, number: int) -> LakeRoot:
        return delta.checkpoint_path(self.root, number)

    def readable(self, checkpoints: Mapping[int, Sequence[LakeRoot]]) -> list[int]:
        """Those ``checkpoints`` of the log that a lake reads, ascending: in one file, as ``deltalake`` writes them."""
        return sorted(number for number, files in checkpoints.items() if self.checkpoint(number) in files)

    def day_directories(self) -> list[Path]:
        """The lake's own directories of days. A link leads elsewhere and is not ours."""
        if isinstance(self.root, ObjectPlace):
            return []
        found = self.root.glob(f"{DAY_PREFIX}*")
        return sorted(path for path in found if path.is_dir() and not path.is_symlink())

    def is_behind_link(self, name: str) -> bool:
        """Whether a directory on the way to the file ``name`` is a link, which leads elsewhere."""
        if isinstance(self.root, ObjectPlace):
            return False
        return any((self.root / parent).is_symlink() for parent in Path(name).parents[:-1])

    def files_present(self) -> Iterator[str]:
        """What lies in the directories of days, however deep, by its name relative to the lake."""
        if isinstance(self.root, ObjectPlace):
            yield from (one.name for one in self.root.objects() if one.name.startswith(DAY_PREFIX))
            return
        for day in self.day_directories():
            for path in day.rglob("*"):
                if path.is_symlink() or not path.is_dir():
                    yield str(path.relative_to(self.root))


def cluster_time_of(token: str) -> ClusterTime:
    """The cluster time in a resume token's ``_data``: it begins with a timestamp, type byte 0x82, in keystring form."""
    if not _TOKEN.match(token):
        raise SinkError(f"not a resume token: {token[:40]!r}")
    return ClusterTime(int(token[2:TIME_END], 16))


def period_of(time: ClusterTime, *, hour: bool) -> str:
    """The directories of a cluster time: of its day, and of its hour where the lake is divided by it."""
    moment = datetime.fromtimestamp(time.seconds, UTC)
    return moment.strftime("day=%Y-%m-%d/hour=%H" if hour else "day=%Y-%m-%d")


def first_token_after_period(token: str, *, hour: bool) -> str:
    """The smallest token of the period after ``token``'s: where a file of one period must end."""
    seconds, length = cluster_time_of(token).seconds, 3600 if hour else 86400
    return f"82{(seconds // length + 1) * length:08X}"


def folder_of(collection: str | None) -> str:
    """A collection's directory: its name, or, where that has other characters than letters, digits and ``_.-`` or is
    long, the beginning of it and a hash. Events of no collection are in ``_``.

    It has no ``=``: Polars and Spark would read a partition's value from it, and not from the log."""
    if not collection:
        return "collection-_"
    safe = _UNSAFE.sub("_", collection)[:_FOLDER_MAX]
    return (
        f"collection-{safe}"
        if safe == collection
        else f"collection-{safe}-{sha256(collection.encode()).hexdigest()[:16]}"
    )


def new_name(first_token: str, index: int, partitioning: Partitioning = BY_DAY, collection: str | None = None) -> str:
    """A name, relative to the lake, for the ``index``-th file of a task, that no file has had or will have."""
    time = cluster_time_of(first_token)
    invariant(index < 10**5, f"too many files of one task: {index}")
    folder = f"{folder_of(collection)}/" if partitioning.collection else ""
    period = period_of(time, hour=partitioning.hour)
    return f"{period}/{folder}{time:016X}-{index:05d}-a{uuid.uuid4().hex}.parquet"


def partition_values(name: str, collection: str | None) -> dict[str, str | None]:
    """The partition columns of the file ``name``, as Delta's log has them; ``collection`` is that of its rows, where
    the lake is divided by it."""
    match = _NAME.fullmatch(name)
    invariant(match is not None, f"not a file of a lake: {name}")
    assert match is not None
    values: dict[str, str | None] = {"day": match["day"]}
    if match["hour"] is not None:
        values["hour"] = str(int(match["hour"]))
    if match["folder"] is not None:
        values["collection"] = collection
    return values


def is_in_period(name: str, token: str) -> bool:
    """Whether the event of ``token`` belongs in the file ``name``, by its day and hour."""
    period = period_of(cluster_time_of(token), hour="/hour=" in name)
    return name.startswith(f"{period}/")


def merged_name(first: str) -> str:
    """A new name for the file that compaction makes of ``first`` and those after it; it sorts where ``first`` did."""
    match = _NAME.fullmatch(first)
    invariant(match is not None, f"not a file of a lake: {first}")
    assert match is not None
    return f"{match['place']}{match['time']}-{match['index']}-m{uuid.uuid4().hex}.parquet"


def is_merged(name: str) -> bool:
    """Whether a lake's file name is one that compaction gives."""
    match = _NAME.fullmatch(name)
    return match is not None and match["kind"] == "m"


def is_lake_file(name: str) -> bool:
    """Whether ``name``, relative to the lake, is one that a lake gives."""
    return _NAME.fullmatch(name) is not None


def is_quarantine(name: object) -> bool:
    """Whether a file of this name, relative to the lake, holds events that were put aside."""
    return isinstance(name, str) and _QUARANTINE.fullmatch(name) is not None


def checked_quarantine_name(name: object, where: object) -> str:
    """``name`` if it is that of a file of events that were put aside, as ``checked_name``."""
    if not is_quarantine(name):
        raise SinkError(f"{where} is damaged: it names {str(name)[:120]!r}, which cannot be a file of the quarantine")
    return str(name)


def checked_name(name: object, where: object) -> str:
    """``name`` if it is that of a lake's data file. Every name that a log, a snapshot or a task brings comes through
    here before it becomes a path: ``../``, absolute names and numbers end here. Raises SinkError, naming ``where``."""
    if not isinstance(name, str) or not is_lake_file(name):
        raise SinkError(f"{where} is damaged: it names {str(name)[:120]!r}, which cannot be a file of a lake")
    return name
