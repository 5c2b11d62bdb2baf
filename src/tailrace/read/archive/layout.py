"""The layout of an archive, and whether it is whole.

    archive.json                              what the directory is, and of which deployment
    <oplog>/head.json                         from where and up to where this oplog is archived
    <oplog>/<after>-<until>-<digest>.parquet  a segment: every entry with after < ts <= until
    <oplog>/<after>-<until>.images.parquet    the pre-images of these entries, where there are any

``<oplog>`` is the replica set's or shard's name, ``config.shards`` the config server's. Times are written as 16
hexadecimal digits, so names sort as the stream does; the digest is that of the file's footer, which holds sums of the
rest (``checked_file``). A segment appears whole, by a rename, and is never changed. Two neighbours share a time: where
they do not, one is missing. Each names the digest of the one before it and that of its pre-images, and the head names
the newest one's, so no file of another archive can take the place of one of this.

In an object store the name of pre-images has their digest too. Only the head says which segments count (``chained``): a
writer that was killed or replaced may have left others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from tailrace.base.object_place import ObjectPlace
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.compatibility import SettingRead
from tailrace.core.oplog.witness import DeploymentIdentity, Witness
from tailrace.core.plan.profile import profile_for
from tailrace.errors import SourceError, UsageError
from tailrace.read.archive.place import ArchivePlace, asking, files_in, has_files, is_there
from tailrace.read.archive.record import read_record

FORMAT: Final = "tailrace-archive"
VERSION: Final = 1
DESCRIPTION: Final = "archive.json"
HEAD: Final = "head.json"
LOCK: Final = ".lock"
#: The config server's oplog, as in a merged stream.
CONFIG_OPLOG: Final = "config.shards"

_SEGMENT: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{16})\.parquet")
IMAGES: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})(?:-[0-9a-f]{16})?\.images\.parquet")
#: What lies next to an archive in an object store while its writer tries what the store can do.
_PROBES: Final = "_tailrace"
_TRIES: Final = 5
_BRING_BACK: Final = "Restore the missing file. If it is lost, start a new archive in another directory"


@dataclass(frozen=True, slots=True, order=True)
class ArchiveSegment:
    """A file with every entry of one oplog with ``after`` < ts <= ``until``.

    ``size``  of an object, in bytes, as the store lists it; -1 of a file
    """

    after: ClusterTime
    until: ClusterTime
    digest: str
    path: ArchivePlace = field(compare=False)
    size: int = field(default=-1, compare=False)

    @property
    def span(self) -> str:
        """The range, as the names of its files begin."""
        return f"{self.after:016x}-{self.until:016x}"

    @property
    def images_path(self) -> ArchivePlace:
        """The pre-images' file in a directory."""
        return self.path.parent / f"{self.span}.images.parquet"

    def images_place(self, digest: str) -> ArchivePlace:
        """The pre-images' file with this digest: in a store, or copied from there, its name has it."""
        named = self.path.parent / f"{self.span}-{digest}.images.parquet"
        return named if digest and is_there(named) else self.images_path


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an oplog's archive reaches: every entry with ``start`` < ts <= ``until``.

    ``newest``       the digest of the segment that ends at ``until``; ``""`` where there is none yet
    ``replica_set``  the id of the replica set whose oplog this is, ``cluster`` that of its cluster; ``""`` if unknown
    ``settings``     what archived entries have set the feature compatibility version to, oldest first
    """

    start: ClusterTime
    until: ClusterTime
    newest: str = ""
    replica_set: str = ""
    cluster: str = ""
    settings: tuple[SettingRead, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was published yet."""
        return self.until <= self.start

    def identity(self, oplog: str) -> DeploymentIdentity:
        return DeploymentIdentity({oplog: self.replica_set}, self.cluster)

    def document(self) -> dict[str, object]:
        settings = [{"version": one.version, "since": f"{one.time:016x}"} for one in self.settings]
        known = {
            "newest": self.newest,
            "replicaSetId": self.replica_set,
            "clusterId": self.cluster,
            "compatibility": settings,
        }
        return {
            "after": {"clusterTime": f"{self.start:016x}", "readable": self.start.for_programs()},
            "until": {"clusterTime": f"{self.until:016x}", "readable": self.until.for_programs()},
            **{name: value for name, value in known.items() if value},
        }


class Membership(NamedTuple):
    """A shard was one of its cluster's with ``after`` < cluster time <= ``until``."""

    after: ClusterTime
    until: ClusterTime | None = None


class VersionNote(NamedTuple):
    """From ``since`` on the servers were known to have this version: of a cluster, the oldest shard. The first note's
    ``since`` is 0. A lower feature compatibility version is a part of the text: "6.0.27-fcv5.0"."""

    version: str
    since: ClusterTime = ZERO


class VersionSpan(NamedTuple):
    """What was written under one server version, up to and with cluster time ``until``; ``None``: to the end."""

    version: str
    until: ClusterTime | None


@dataclass(frozen=True, slots=True)
class Description:
    """What ``archive.json`` says: a replica set's archive or a cluster's, and the versions of its servers.

    ``versions``  the servers' versions over time, oldest first
    ``name``    the replica set's; ``None`` for a cluster
    ``shards``  of a cluster, by name: between which cluster times each was one. The start is 0 where it was one before
                the archive began, the end ``None`` where it is one still
    ``since``   of a cluster: from this cluster time on it is known who was a shard, so streams begin after it
    ``identity``  of the deployment
    """

    name: str | None
    versions: tuple[VersionNote, ...]
    shards: dict[str, Membership]
    since: ClusterTime = ZERO
    identity: DeploymentIdentity = field(default_factory=DeploymentIdentity)

    @property
    def is_cluster(self) -> bool:
        return self.name is None

    @property
    def server_version(self) -> str:
        """The newest version."""
        return max((note.version for note in self.versions), key=lambda version: profile_for(version).rank)

    def spans(self, start: ClusterTime) -> list[VersionSpan]:
        """The versions of the entries from ``start`` on, oldest first."""
        notes = self.versions
        ends = [*(ClusterTime(note.since - 1) for note in notes[1:]), None]
        spans = [VersionSpan(note.version, end) for note, end in zip(notes, ends, strict=True)]
        return [span for span in spans if span.until is None or span.until >= start]

    def with_version(self, version: str, since: ClusterTime) -> Description:
        """The description with the version that the servers have from ``since`` on; itself, if they had it before."""
        if self.versions[-1].version == version:
            return self
        return replace(self, versions=(*self.versions, VersionNote(version, since)))

    @property
    def oplogs(self) -> tuple[str, ...]:
        return (*self.shards, CONFIG_OPLOG) if self.name is None else (self.name,)

    def document(self) -> dict[str, Any]:
        kind = {"sharded": {name: _membership_document(shard) for name, shard in self.shards.items()}}
        return {
            "format": FORMAT,
            "version": VERSION,
            "serverVersions": [
                {"version": note.version, "since": f"{note.since:016x}", "readable": note.since.for_programs()}
                for note in self.versions
            ],
            **({**kind, "since": f"{self.since:016x}"} if self.name is None else {"replicaSet": self.name}),
            "identity": Witness(self.identity).to_document(),
        }


def _others_than_description(folder: ArchivePlace) -> bool:
    """Whether a directory holds anything but a description that is being written, or was when its writer was killed."""
    with asking():
        return folder.is_dir() and any(
            not one.name.startswith(f".{DESCRIPTION}.") and one.name != _PROBES for one in folder.iterdir()
        )


def describe(folder: ArchivePlace) -> Description | None:
    """What an archive says about itself; ``None`` where the directory is empty or not there. Raises UsageError where it
    holds something else."""
    path = folder / DESCRIPTION
    try:
        record = read_record(path)
        if record is None:
            others = _others_than_description(folder)
            record = read_record(path)  # it may have been begun since
        if record is None:
            if others:
                raise UsageError(
                    f"{folder} is not an archive: it holds files, but no {DESCRIPTION}",
                    hint="Name an archive that 'tailrace archive' made, or a new directory",
                )
            if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is not a directory")
            return None
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            raise UsageError(
                f"{path} is of another format or version ({record.get('format')!r}, {record.get('version')!r})",
                hint=f"This Tailrace reads version {VERSION}",
            )
        name = record.get("replicaSet")
        shards: Any = record.get("sharded", {})
        notes: Any = record["serverVersions"]
        versions = tuple(VersionNote(str(note["version"]), ClusterTime(int(note["since"], 16))) for note in notes)
        for note in versions:
            profile_for(note.version)
        since = ClusterTime(int(str(record.get("since", "0")), 16))
        members = {str(shard): _membership(document) for shard, document in shards.items()}
        said: Any = record["identity"]
        identity = Witness.from_document(said).identity
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise SourceError(f"{path} is damaged: {error!r}") from None
    except OSError as error:
        raise SourceError(f"cannot read {folder}: {error.strerror}") from None
    return Description(None if name is None else str(name), versions, members, since, identity)


def _membership_document(shard: Membership) -> dict[str, str]:
    until = {} if shard.until is None else {"until": f"{shard.until:016x}"}
    return {"after": f"{shard.after:016x}", **until}


def _membership(document: Any) -> Membership:
    until = document.get("until")
    return Membership(ClusterTime(int(document["after"], 16)), None if until is None else ClusterTime(int(until, 16)))


def existing(folder: ArchivePlace) -> Description:
    """As ``describe``, for a reader: an archive must be there."""
    description = describe(folder)
    if description is None:
        raise UsageError(f"there is no archive at {folder}", hint="Make one: tailrace archive URI DIR")
    return description


def oplog_folder(folder: ArchivePlace, oplog: str) -> ArchivePlace:
    """The folder of an oplog. Characters that are quoted begin with ``%`` in a directory, with ``!`` in a store; one
    that was copied from one to the other keeps its name."""
    name = quote(oplog, safe="")
    if "%" not in name:
        return folder / name
    usual, copied = folder / name, folder / name.replace("%", "!")
    if isinstance(folder, ObjectPlace):
        usual, copied = copied, usual
    return copied if not has_files(usual) and has_files(copied) else usual


def oplog_of(folder: ArchivePlace) -> str:
    """The oplog's name, by its folder. (A ``!`` of its own is quoted.)"""
    return unquote(folder.name.replace("!", "%"))


def head(folder: ArchivePlace) -> Reach | None:
    """How far the archive of one oplog reaches; ``None`` where nothing was archived yet. Raises SourceError."""
    try:
        record = read_record(folder / HEAD)
        if record is None:
            return None
        parts: list[Any] = [record["after"], record["until"]]
        start, until = (ClusterTime(int(part["clusterTime"], 16)) for part in parts)
        newest, replica_set, cluster = (str(record.get(name, "")) for name in ("newest", "replicaSetId", "clusterId"))
        noted: list[Any] = record.get("compatibility", [])
        settings = tuple(SettingRead(str(one["version"]), ClusterTime(int(one["since"], 16))) for one in noted)
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{folder / HEAD} is damaged: {error!r}") from None
    return Reach(start, until, newest, replica_set, cluster, settings)


def segments(folder: ArchivePlace, known: Sequence[ArchiveSegment] = ()) -> list[ArchiveSegment]:
    """The segments of one oplog in order, checked: none is missing between the first and the last that the head names.
    ``known`` were found before: a store lists only later ones.

    Raises SourceError that says which range is not there.
    """
    seen: list[ArchiveSegment] | None = None
    for _ in range(_TRIES):
        reach = head(folder)
        if reach is None:
            if has_files(folder) and listed(folder):
                raise headless(folder)
            return []
        is_partial = bool(known) and isinstance(folder, ObjectPlace)
        there = [*known, *listed(folder, known[-1].path.name)] if is_partial else listed(folder)
        known = ()
        found = counting(folder, reach, there)
        hole = first_hole(reach, found)
        other = other_newest(reach, found)
        if hole is None and other is None:
            return found
        # Retention may have taken segments away while we looked, and erasing puts others in their places.
        is_same, seen = there == seen, there
        if not is_partial and is_same and head(folder) == reach:
            raise (missing(folder, *hole) if hole is not None else SourceError(other or "", hint=_BRING_BACK))
    raise SourceError(f"the archive {folder} changes faster than it can be read")


def archived_until(folder: ArchivePlace) -> ClusterTime | None:
    """Up to where one oplog is archived; ``None`` where nothing was yet. Raises SourceError."""
    found, reach = segments(folder), head(folder)
    # A writer that was killed between the two has published a segment that its head does not name.
    return None if reach is None else max([reach.until, *(segment.until for segment in found)])


def unfinished(name: str, shard: Membership, until: ClusterTime | None) -> str | None:
    """What an archive lacks of a shard that has been removed, in words; ``None`` where it lacks nothing.

    ``until``  up to where that shard's oplog is archived; ``None`` where nothing of it is
    """
    if shard.until is None or (until is not None and until >= shard.until):
        return None
    there = "nothing of it is archived" if until is None else f"its oplog is archived only up to {until}"
    return f"the shard {name} was removed from the cluster at {shard.until}, and {there}"


def missing(folder: ArchivePlace, after: ClusterTime, until: ClusterTime) -> SourceError:
    """The entries of a range are not in the archive, though they were."""
    return SourceError(
        f"the archive {folder} has a hole: the entries after {after} up to {until} are missing",
        hint=_BRING_BACK,
    )


def headless(folder: ArchivePlace) -> SourceError:
    """There are segments, and nothing says how far they reach."""
    return SourceError(f"{folder / HEAD} is missing, and there are segments", hint=_BRING_BACK)


def other_newest(reach: Reach, found: list[ArchiveSegment]) -> str | None:
    """What is wrong with the segment that the head names; ``None`` where it is there, or where none is named."""
    last = [segment for segment in found if segment.until == reach.until]
    if not last or not reach.newest or reach.newest in {segment.digest for segment in last}:
        return None
    return f"{last[-1].path} is not the segment that {HEAD} names, which has the digest {reach.newest}"


def followed(segment: ArchiveSegment, said: str, found: list[ArchiveSegment]) -> bool:
    """Whether the segment that ends where ``segment`` begins is the one that it was written after, or took the place of
    that one when documents were erased from it. ``said`` is its digest; ``""`` where there was none."""
    before = [one for one in found if one.until == segment.after]
    return not before or any(one.digest == said or (said and original_digest(one) == said) for one in before)


def listed(folder: ArchivePlace, after: str = "") -> list[ArchiveSegment]:
    """The segments that are there, whole or not, in order; of a store those whose names sort after ``after``."""
    found = (segment_named(folder, one.name, one.size) for one in files_in(folder, after))
    return sorted(one for one in found if one is not None)


def segment_named(folder: ArchivePlace, name: str, size: int = -1) -> ArchiveSegment | None:
    """The segment with this name; ``None`` if it is not one's."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    after, until, digest = match.groups()
    return ArchiveSegment(ClusterTime(int(after, 16)), ClusterTime(int(until, 16)), digest, folder / name, size)


def counting(folder: ArchivePlace, reach: Reach, there: Iterable[ArchiveSegment]) -> list[ArchiveSegment]:
    """Of the segments that are there, those that hold what the head promises, in order. In a directory that has one
    writer, it is all of them, and one more that its head does not name yet. None overlap there, unless they were copied
    from a store with what a killed writer had left."""
    found = [segment for segment in there if segment.until > reach.start]
    if isinstance(folder, ObjectPlace):
        return chained(reach, found)
    if not _overlap(found):
        return found
    later = [segment for segment in found if segment.after >= reach.until]
    named = chained(reach, [segment for segment in found if segment.after < reach.until])
    return named if _overlap(later) else [*named, *later]


def _overlap(found: Sequence[ArchiveSegment]) -> bool:
    """Whether a cluster time is in the ranges of two of these segments, which are in order."""
    return any(after.after < before.until for before, after in pairwise(found))


def chained(reach: Reach, found: Sequence[ArchiveSegment]) -> list[ArchiveSegment]:
    """The segments from the one that the head names back to its start, each the one that the next was written after.
    Others may be there: a writer was killed, or replaced, before the head named what it had written. Where the chain
    ends early, what lies before it is given as it is: something is missing between the two.

    Raises SourceError where a segment cannot be read that says which of several comes before it.
    """
    ends: dict[ClusterTime, list[ArchiveSegment]] = {}
    for segment in found:
        if segment.after < segment.until:
            ends.setdefault(segment.until, []).append(segment)
    chain: list[ArchiveSegment] = []
    edge, wanted = reach.until, reach.newest
    while edge > reach.start:
        there = ends.get(edge, [])
        if chain and len(there) > 1:
            wanted = _previous(chain[-1])
        if wanted:
            there = [segment for segment in there if segment.digest == wanted]
        if not there:
            break
        chain.append(there[0])
        edge, wanted = there[0].after, ""
    before = [segment for segment in found if segment.until < edge] if edge > reach.start else []
    return [*sorted(before), *reversed(chain)]


def _previous(segment: ArchiveSegment) -> str:
    """The digest of the segment that this one was written after."""
    return str(_about(segment).get("previous", ""))


def original_digest(segment: ArchiveSegment) -> str:
    """The digest that the segment had when it was written: another one if documents were erased from it since."""
    return str(_about(segment).get("replaces", segment.digest))


def _about(segment: ArchiveSegment) -> dict[str, Any]:
    from tailrace.read.archive.checked_file import CheckedFile  # noqa: PLC0415  Arrow, and seldom

    return CheckedFile(segment.path, segment.digest).about


def first_hole(reach: Reach, found: list[ArchiveSegment]) -> tuple[ClusterTime, ClusterTime] | None:
    """The first range that the head promises and no segment holds."""
    edge = reach.start
    for segment in found:
        if segment.after > edge:
            return edge, segment.after
        edge = max(edge, segment.until)
    return None if edge >= reach.until else (edge, reach.until)
