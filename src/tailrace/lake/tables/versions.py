"""Which versions of a table are kept, which files that needs, and which version a time is read from.

Every version is kept for the *grace*: a reader that has begun with one can finish. Of older ones, up to the
*retention*, the last one of each of a few equal spans of time is kept for ``as of``, with the commit after it, which
says until when the version is exact. All other files are removed, including those of the log.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake.exceptions import DeltaError

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import delta, places
from tailrace.lake.store.mirrored import ICEBERG
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit
from tailrace.lake.tables.delta_commit import WITHOUT_FEED, DamagedCommitError, Stated

_HOUR_MS: Final = 3_600_000
#: Longer than a commit comes after its files.
_BETWEEN_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of a table besides its newest version.

    ``grace_h``      replaced files stay for this many hours, and so does every version
    ``retention_h``  ``as of`` reaches back this many hours
    ``versions``     of the time between these two, this many versions are kept
    ``feed_h``       the change feed reaches back this many hours, beyond the grace; 0 for a table without one
    """

    grace_h: float
    retention_h: float = 0.0
    versions: int = 0
    feed_h: float = 0.0


def around(root: TablePlace, moment: ClusterTime) -> tuple[Stated | None, Stated | None]:
    """The newest version at or before ``moment`` that is still whole, and the one that came next."""
    following: Stated | None = None
    for one in delta_commit.stated(root, strict=True):
        if one.time <= moment and _follows(root, one, following) and is_whole(root, one.version):
            return one, following
        following = one
    return None, following


def oldest_whole(root: TablePlace) -> Stated | None:
    """The oldest of our versions that is still whole."""
    found = sorted(delta_commit.stated(root), key=lambda one: one.version)
    return next((one for one in found if is_whole(root, one.version)), None)


def _follows(root: TablePlace, one: Stated, following: Stated | None) -> bool:
    """Whether no version between the two was removed: it would have said until when ``one`` is exact."""
    return following is None or all(
        delta.commit_path(root, number).exists() for number in range(one.version + 1, following.version)
    )


def is_whole(root: TablePlace, version: int) -> bool:
    """Whether a version can be read: its log, and all its files."""
    names = names_at(root, version)
    return names is not None and len(places.sizes(root, names)) == len(names)


def made_at(root: TablePlace, number: int) -> int | None:
    """When a version was made, in milliseconds; ``None`` if the log no longer says."""
    found = _head(root, number)
    return None if found is None else found.at


def expire(root: TablePlace, keeping: Keeping, latest: Iterable[str], now_ms: int | None = None) -> list[str]:
    """Remove what ``keeping`` does not keep. ``latest``: the files of the newest version. Returns their names.

    The caller is the table's writer, and has just read its log."""
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    horizon = now - int(keeping.grace_h * _HOUR_MS)
    numbers = delta.commits_in(root)
    heads = {number: head for number in numbers if (head := _head(root, number)) is not None}
    recent = [number for number in numbers if number not in heads or heads[number].at >= horizon]
    kept = sorted(set(_kept(root, heads, keeping, now, horizon)))
    needed = set(latest)
    for number in recent:
        needed |= _removed_by(root, number)
    for number in kept:
        needed |= names_at(root, number) or set()
    fed_from = horizon - int(keeping.feed_h * _HOUR_MS)
    fed = [number for number, head in heads.items() if head.at >= fed_from] if keeping.feed_h else []
    for number in fed:
        if heads[number].kind in WITHOUT_FEED:
            needed |= _moved_by(root, number)
    gone = list(_remove_files(root, needed, horizon / 1000))
    # A feed's file goes after the commit that names it.
    gone += _remove_files(root, set(), fed_from / 1000 - _BETWEEN_S, delta.FEED_FOLDER)
    _remove_log(root, heads, recent, kept, fed)
    return gone


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What a table takes on the disk: bytes of all its files, its data files, and the files of its log and of
    Iceberg's."""

    bytes: int
    files: int
    log: int


def disk_use(root: TablePlace) -> DiskUse:
    """The table's files, those of older versions too."""
    size = data = log = 0
    for file in places.files_below(root):
        is_log = PurePosixPath(file.name).parts[0] in (delta.LOG, ICEBERG)
        size, data, log = size + file.size, data + (not is_log), log + is_log
    return DiskUse(size, data, log)


@dataclass(frozen=True, slots=True)
class _Head:
    """When a commit was made, in milliseconds, whether it is one of ours that states a time, and of which kind."""

    at: int
    states: bool
    kind: str = ""


def _head(root: TablePlace, number: int) -> _Head | None:
    """From the commit's first line alone, if it is ours; ``None`` if the commit does not say."""
    try:
        with places.open_file(delta.commit_path(root, number)) as file:
            info = json.loads(file.readline()).get("commitInfo")
        if info is None:
            actions = delta_commit.actions_of(root, number)
            info = next((one["commitInfo"] for one in actions if "commitInfo" in one), {})
        return _Head(int(info["timestamp"]), delta_commit.TIME in info, str(info.get(delta_commit.KIND)))
    except (OSError, ValueError, KeyError, AttributeError, SinkError):
        return None


def _kept(root: TablePlace, heads: dict[int, _Head], keeping: Keeping, now: int, horizon: int) -> Iterator[int]:
    """The versions that stay for ``as of``: the last one of each span of time, and the one that held when the first of
    these began, or the table's first one."""
    if not keeping.versions:
        return
    first = now - int(keeping.retention_h * _HOUR_MS)
    span = max(1, int(keeping.retention_h * _HOUR_MS) // keeping.versions)
    places: dict[int, list[int]] = {}
    for number in sorted(heads, reverse=True):
        head = heads[number]
        if head.states and head.at < horizon:
            places.setdefault(head.at // span if head.at >= first else -1, []).append(number)
    for numbers in places.values():
        last = next((number for number in numbers if is_whole(root, number)), None)
        if last is not None:
            yield last
    oldest = [] if -1 in places else next(reversed(places.values()), [])
    begun = next((number for number in reversed(oldest) if is_whole(root, number)), None)
    if begun is not None:
        yield begun


def names_at(root: TablePlace, version: int) -> set[str] | None:
    """The names of a version's files; ``None`` if it cannot be read."""
    try:
        with places.asking(root):
            found = pa.table(places.delta_table(root, version).get_add_actions())
    except (DeltaError, OSError, ValueError):
        return None
    return {unquote(name) for name in found.column("path").to_pylist()}


def _removed_by(root: TablePlace, number: int) -> set[str]:
    with contextlib.suppress(FileNotFoundError, DamagedCommitError):
        actions = delta_commit.actions_of(root, number)
        return {unquote(one["remove"]["path"]) for one in actions if "remove" in one}
    return set()


def _moved_by(root: TablePlace, number: int) -> set[str]:
    """The files that a commit without a feed of its own brings and takes: readers make its feed of them."""
    with contextlib.suppress(FileNotFoundError, DamagedCommitError):
        actions = delta_commit.actions_of(root, number)
        return {unquote(one[name]["path"]) for one in actions for name in ("add", "remove") if name in one}
    return set()


def _remove_files(root: TablePlace, needed: set[str], before: float, within: str = "") -> Iterator[str]:
    """Remove the data files that no kept version has, if they were written before; also those of commits that never
    came about. ``within``: the files of this folder, and no others."""
    folders: set[str] = set()
    before += places.clock_difference(root)
    for file in list(places.files_below(root)):
        *above, name = file.name.split("/")
        if above != [within] if within else any(part[0] in "_." for part in above):
            continue
        folders.add("/".join(above))
        if not name.endswith(".parquet") or file.name in needed or file.modified >= before:
            continue
        place: TablePlace = root / file.name
        with (
            contextlib.suppress(FileNotFoundError),
            durable.writing(place if isinstance(place, Path) else Path(file.name)),
        ):
            place.unlink()
            yield file.name
    if isinstance(root, Path):
        for folder in sorted(folders - {""}, reverse=True):
            with contextlib.suppress(OSError):
                (root / folder).rmdir()  # only an empty one can be removed


def _remove_log(root: TablePlace, heads: dict[int, _Head], recent: list[int], kept: list[int], fed: list[int]) -> None:
    """Remove the commits and checkpoints that no kept version needs. ``fed``: commits that the change feed has."""
    numbers, names = delta.listed(root)
    first = min(recent, default=numbers[-1] if numbers else 0)
    # The version that held when the grace began belongs to it.
    first = max((number for number in numbers if number < first), default=first)
    base = max((number for number in names if number <= first), default=None)
    if base is None:
        return
    commits = {number for number in numbers if number >= base} | set(fed)
    checkpoints = {number for number in names if number >= base}
    for version in kept:
        begin = max((number for number in names if number <= version), default=None)
        if begin is not None:
            checkpoints.add(begin)
        following = min((number for number in heads if number > version and heads[number].states), default=version)
        commits |= set(range(0 if begin is None else begin, following + 1))
    for number in numbers:
        if number not in commits:
            delta.commit_path(root, number).unlink(missing_ok=True)
    left = {number: paths for number, paths in delta.unfinished(root).items() if number < base}
    for path in (path for number, paths in names.items() if number not in checkpoints for path in paths):
        path.unlink(missing_ok=True)
    for path in (path for paths in left.values() for path in paths):
        path.unlink(missing_ok=True)
