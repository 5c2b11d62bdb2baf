"""What lies where in an archive, and whether it is whole.

    archive.json                              what the directory is, and of which deployment
    <oplog>/head.json                         from where and up to where this oplog is archived
    <oplog>/<after>-<until>-<digest>.parquet  a segment: every entry with after < ts <= until
    <oplog>/<after>-<until>.images.parquet    the pre-images of these entries, where there are any

``<oplog>`` is the replica set's or shard's name, ``config.shards`` the config server's. Times are written as 16
hexadecimal digits, so names sort as the stream does; the digest is the beginning of the file's SHA-256. A segment
appears whole, by a rename, and is never changed. Two neighbours share a time: where they do not, one is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from tailrace.durable import read_json
from tailrace.errors import SinkError, SourceError, UsageError
from tailrace.oplog.cluster_time import ZERO, ClusterTime

FORMAT: Final = "tailrace-archive"
VERSION: Final = 1
DESCRIPTION: Final = "archive.json"
HEAD: Final = "head.json"
LOCK: Final = ".lock"
#: The config server's oplog, as in a merged stream.
CONFIG_OPLOG: Final = "config.shards"

_SEGMENT: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})\.parquet")
IMAGES: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.images\.parquet")
_TRIES: Final = 5


@dataclass(frozen=True, slots=True, order=True)
class ArchiveSegment:
    """A file with every entry of one oplog with ``after`` < ts <= ``until``."""

    after: ClusterTime
    until: ClusterTime
    digest: str
    path: Path

    @property
    def images_path(self) -> Path:
        return self.path.with_name(f"{self.after:016x}-{self.until:016x}.images.parquet")


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an oplog's archive reaches: every entry with ``start`` < ts <= ``until``."""

    start: ClusterTime
    until: ClusterTime

    def document(self) -> dict[str, object]:
        return {
            "after": {"clusterTime": f"{self.start:016x}", "readable": str(self.start)},
            "until": {"clusterTime": f"{self.until:016x}", "readable": str(self.until)},
        }


class Membership(NamedTuple):
    """A shard was one of its cluster's with ``after`` < cluster time <= ``until``."""

    after: ClusterTime
    until: ClusterTime | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What ``archive.json`` says: a replica set's archive or a cluster's, and the version of its servers.

    ``name``    the replica set's; ``None`` for a cluster
    ``shards``  of a cluster, by name: between which cluster times each was one. The start is 0 where it was one before
                the archive began, the end ``None`` where it is one still
    ``since``   of a cluster: from this cluster time on it is known who was a shard, so streams begin behind it
    """

    name: str | None
    server_version: str
    shards: dict[str, Membership]
    since: ClusterTime = ZERO

    @property
    def is_cluster(self) -> bool:
        return self.name is None

    @property
    def oplogs(self) -> tuple[str, ...]:
        return (*self.shards, CONFIG_OPLOG) if self.name is None else (self.name,)

    def document(self) -> dict[str, Any]:
        kind = {"sharded": {name: _membership_document(shard) for name, shard in self.shards.items()}}
        return {
            "format": FORMAT,
            "version": VERSION,
            "serverVersion": self.server_version,
            **({**kind, "since": f"{self.since:016x}"} if self.name is None else {"replicaSet": self.name}),
        }


def describe(folder: Path) -> Description | None:
    """What an archive says of itself; ``None`` where the directory is empty or not there. Raises UsageError where it
    holds something else."""
    path = folder / DESCRIPTION
    try:
        found = read_json(path)
        if found is None:
            if folder.is_dir() and any(folder.iterdir()):
                raise UsageError(
                    f"{folder} is no archive: it holds files, but no {DESCRIPTION}",
                    hint="Name an archive that 'tailrace archive' made, or a new directory",
                )
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is no directory")
            return None
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise UsageError(
                f"{path} is of another format or version ({found.get('format')!r}, {found.get('version')!r})",
                hint=f"This Tailrace reads version {VERSION}",
            )
        name = found.get("replicaSet")
        shards: Any = found.get("sharded", {})
        version = str(found["serverVersion"])
        since = ClusterTime(int(str(found.get("since", "0")), 16))
        members = {str(shard): _membership(document) for shard, document in shards.items()}
    except SinkError as error:
        raise SourceError(error.message, hint=error.hint) from None
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise SourceError(f"{path} is damaged: {error!r}") from None
    except OSError as error:
        raise SourceError(f"cannot read {folder}: {error.strerror}") from None
    return Description(None if name is None else str(name), version, members, since)


def _membership_document(shard: Membership) -> dict[str, str]:
    until = {} if shard.until is None else {"until": f"{shard.until:016x}"}
    return {"after": f"{shard.after:016x}", **until}


def _membership(document: Any) -> Membership:
    until = document.get("until")
    return Membership(ClusterTime(int(document["after"], 16)), None if until is None else ClusterTime(int(until, 16)))


def existing(folder: Path) -> Description:
    """As ``describe``, for a reader: an archive must be there."""
    found = describe(folder)
    if found is None:
        raise UsageError(f"there is no archive at {folder}", hint="Make one: tailrace archive URI DIR")
    return found


def oplog_folder(folder: Path, oplog: str) -> Path:
    return folder / quote(oplog, safe="")


def head(folder: Path) -> Reach | None:
    """How far the archive of one oplog reaches; ``None`` where nothing was archived yet. Raises SourceError."""
    try:
        found = read_json(folder / HEAD)
        if found is None:
            return None
        parts: list[Any] = [found["after"], found["until"]]
        start, until = (ClusterTime(int(part["clusterTime"], 16)) for part in parts)
    except SinkError as error:
        raise SourceError(error.message) from None
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{folder / HEAD} is damaged: {error!r}") from None
    return Reach(start, until)


def segments(folder: Path) -> list[ArchiveSegment]:
    """The segments of one oplog in order, checked: none is missing between the first and the last that the head names.

    Raises SourceError that says which range is not there.
    """
    for _ in range(_TRIES):
        reach = head(folder)
        if reach is None:
            return []
        found = [segment for segment in listed(folder) if segment.until > reach.start]
        hole = first_hole(reach, found)
        if hole is None:
            return found
        # Retention may have taken segments away while we looked.
        if head(folder) == reach:
            raise missing(folder, *hole)
    raise SourceError(f"the archive {folder} changes faster than it can be read")


def missing(folder: Path, after: ClusterTime, until: ClusterTime) -> SourceError:
    """The entries of a range are not in the archive, though they were."""
    return SourceError(
        f"the archive {folder} has a hole: the entries after {after} up to {until} are not there",
        hint="Bring the missing file back. If it is lost, archive anew into another directory",
    )


def listed(folder: Path) -> list[ArchiveSegment]:
    """The segments that are there, whole or not, in order."""
    found = []
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise SourceError(f"cannot read {folder}: {error.strerror}") from None
    for name in names:
        match = _SEGMENT.fullmatch(name)
        if match is not None:
            after, until, digest = match.groups()
            found.append(
                ArchiveSegment(ClusterTime(int(after, 16)), ClusterTime(int(until, 16)), digest, folder / name)
            )
    return sorted(found)


def first_hole(reach: Reach, found: list[ArchiveSegment]) -> tuple[ClusterTime, ClusterTime] | None:
    """The first range that the head promises and no segment holds."""
    edge = reach.start
    for segment in found:
        if segment.after > edge:
            return edge, segment.after
        edge = max(edge, segment.until)
    return None if edge >= reach.until else (edge, reach.until)
