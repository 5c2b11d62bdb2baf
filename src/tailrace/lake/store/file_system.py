"""Whether a directory's file system can keep what a lake promises. It is tried when a lake is made or opened.

A commit must appear whole and once, be on the device before the next step, and be made by one process at a time. So a
file system must lock, replace a file by renaming, and sync directories; and locks must reach other machines where it is
shared. Some say that they do all this and do not: file systems that show an object store as directories.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tailrace.base import durable
from tailrace.errors import SinkError

_MOUNTS: Final = Path("/proc/self/mounts")
#: Object stores behind a file system: a rename is a copy there, and a directory's entries are not what they seem.
_OBJECT_STORES: Final = re.compile(
    r"fuse\.(s3fs|goofys|geesefs|mountpoint-s3|gcsfuse|gcsfs|blobfuse2?|rclone|ossfs|cosfs|obsfs|s3backer_files)"
)
#: The same, known by what is mounted: their type is only ``fuse``.
_OBJECT_STORE_DEVICES: Final = ("mountpoint-s3",)
#: Mount options of NFS with which a lock is seen by this machine alone.
_LOCAL_LOCKS: Final = ("nolock", "local_lock=all", "local_lock=flock")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_GIVE: Final = (
    "Give a directory of a local disk, or of a shared POSIX file system (docs/how-to/lake.md, 'Where it runs')"
)


class Mount(NamedTuple):
    """Where a file system is mounted, its type, the options of the mount, and what is mounted."""

    place: str
    kind: str
    options: tuple[str, ...]
    device: str


def check_file_system(directory: Path) -> None:
    """Try what a lake needs in ``directory``, which exists. Raises SinkError that says what its file system lacks,
    LakeFullError where there is no room."""
    mount = mount_of(directory)
    if mount is not None and (_OBJECT_STORES.fullmatch(mount.kind) or mount.device in _OBJECT_STORE_DEVICES):
        kind = mount.device if mount.device in _OBJECT_STORE_DEVICES else mount.kind
        raise SinkError(
            f"{directory} is an object store that is mounted as a file system ({kind} at {mount.place}): renames "
            "are not atomic there",
            hint=_GIVE,
        )
    if mount is not None and mount.kind.startswith("nfs") and (local := set(mount.options) & set(_LOCAL_LOCKS)):
        raise SinkError(
            f"{directory} is on NFS mounted with {min(local)}: locks do not reach other machines, so two writers would "
            "not see each other",
            hint="Mount it without that option",
        )
    first, second = (directory / f".{uuid.uuid4().hex}.json.{n}" for n in (1, 2))
    try:
        with durable.writing(directory):
            _try_locks(first)
            _try_rename(first, second)
    except OSError as error:
        raise SinkError(f"{directory} cannot be used: {error.strerror or error}", hint=_GIVE) from error
    finally:
        for path in (first, second):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def mount_of(directory: Path) -> Mount | None:
    """The mount that ``directory`` is on; ``None`` where the system does not tell."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
        real = os.path.realpath(directory)
    except OSError:
        return None
    found = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        place = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = place in ("/", real) or real.startswith(f"{place}/")
        if inside and (found is None or len(place) >= len(found.place)):  # of two at one place the later covers
            found = Mount(place, fields[2], tuple(fields[3].split(",")), fields[0])
    return found


def _try_locks(path: Path) -> None:
    """Two open files of one process are two owners of a lock."""
    one = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    other = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SinkError(f"the file system of {path.parent} does not lock: {error.strerror}", hint=_GIVE) from error
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise SinkError(
            f"the file system of {path.parent} grants a lock twice: two writers would not see each other", hint=_GIVE
        )
    finally:
        os.close(other)
        os.close(one)


def _try_rename(path: Path, other: Path) -> None:
    path.write_text("new")
    other.write_text("old")
    try:
        path.replace(other)
        durable.sync_directory(path.parent)
    except OSError as error:
        if error.errno in durable.NO_ROOM or error.errno in (errno.EACCES, errno.EROFS):
            raise
        reason = error.strerror
        raise SinkError(
            f"the file system of {path.parent} cannot replace a file by renaming, or sync a directory: {reason}",
            hint=_GIVE,
        ) from error
    if path.exists() or other.read_text() != "new":
        raise SinkError(f"the file system of {path.parent} does not replace a file by renaming", hint=_GIVE)
