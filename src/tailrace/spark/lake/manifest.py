"""What a commit says: the files it added, with their rows and token ranges, and those it replaced. Values and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from tailrace.errors import SinkError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.spark.lake.layout import cluster_time_of

#: The format of the manifests. A lake with a higher one was written by a later version and is refused.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that a task has finished in ``_staging``: its rows, all of one day, ascend from first to last token.

    ``last_wall_time`` is when the last of them was written to MongoDB, where the column is kept.
    """

    staged: str
    day: str
    rows: int
    size: int
    first_token: str
    last_token: str
    last_wall_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the lake: ``name`` relative to the lake, ``staged`` where it was written, ``size`` in bytes."""

    name: str
    staged: str
    rows: int
    size: int
    first_token: str
    last_token: str
    last_wall_time: datetime | None = None

    @property
    def day(self) -> str:
        return self.name.split("/", 1)[0].partition("=")[2]

    def to_json(self) -> dict[str, Any]:
        first, last = cluster_time_of(self.first_token), cluster_time_of(self.last_token)
        return {
            "name": self.name,
            "staged": self.staged,
            "rows": self.rows,
            "bytes": self.size,
            "firstToken": self.first_token,
            "lastToken": self.last_token,
            "firstClusterTime": [first.seconds, first.increment],
            "lastClusterTime": [last.seconds, last.increment],
            "lastWallTime": None if self.last_wall_time is None else self.last_wall_time.isoformat(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileEntry:
        return cls(
            name=value["name"],
            staged=value["staged"],
            rows=value["rows"],
            size=value["bytes"],
            first_token=value["firstToken"],
            last_token=value["lastToken"],
            last_wall_time=_moment(value.get("lastWallTime")),
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """One step of the lake: a micro-batch added (``batch`` is its number under ``claim``) or files compacted.

    ``files`` ascend in the stream's order; ``removed`` names the files, all of one day, that a compaction replaced by
    them, ``offline`` that it did so file by file because the file system cannot swap directories.
    """

    number: int
    claim: str
    batch: int | None
    files: tuple[FileEntry, ...]
    removed: tuple[str, ...] = ()
    offline: bool = False
    committed_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def kind(self) -> str:
        return "compaction" if self.batch is None else "append"

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def first_token(self) -> str:
        return self.files[0].first_token

    @property
    def last_token(self) -> str:
        return self.files[-1].last_token

    @property
    def last_cluster_time(self) -> ClusterTime:
        return cluster_time_of(self.last_token)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "number": self.number,
            "kind": self.kind,
            "claim": self.claim,
            "batch": self.batch,
            "committedAt": self.committed_at.isoformat(timespec="microseconds"),
            "rows": self.rows,
            "files": [file.to_json() for file in self.files],
            "removed": list(self.removed),
            "offline": self.offline,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: object) -> Commit:
        """From a manifest's object; ``where`` names it in errors."""
        try:
            check_format(value, where)
            return cls(
                number=value["number"],
                claim=value["claim"],
                batch=value["batch"],
                files=tuple(FileEntry.from_json(file) for file in value["files"]),
                removed=tuple(value["removed"]),
                offline=bool(value.get("offline", False)),
                committed_at=datetime.fromisoformat(value["committedAt"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SinkError(f"{where} is damaged: {error!r}") from error


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def check_format(value: Mapping[str, Any], where: object) -> None:
    """Refuse what a later version of Tailrace has written."""
    written = value.get("format")
    if not isinstance(written, int) or written > FORMAT:
        raise SinkError(f"{where} has format {written!r}, and this version of Tailrace knows formats up to {FORMAT}")


def check_ascending(files: tuple[StagedFile, ...]) -> None:
    """Refuse a micro-batch whose files do not follow each other in the stream's order, or share a token."""
    for before, after in pairwise(files):
        if before.last_token >= after.first_token:
            raise SinkError(
                f"events are out of order: token {after.first_token} follows {before.last_token}",
                hint="Partitions of a micro-batch must be ascending slices of the stream",
            )
