"""The directory of exact images: whose it is, and whether its file system can hold LMDB's files."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from tailrace.base import durable
from tailrace.errors import UsageError

#: File systems of other machines. LMDB maps its files into memory and locks them, and these do neither reliably.
_NETWORK: Final = frozenset(
    {"9p", "afs", "cifs", "fuse.gcsfuse", "fuse.s3fs", "fuse.sshfs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs"}
)
_MOUNTS: Final = Path("/proc/self/mountinfo")
_MARK: Final = "directory.json"


def make_folder(folder: Path) -> None:
    """Make the directory of a stream's images if it is missing: it holds documents, so it is for its owner alone."""
    with durable.writing(folder):
        durable.make_private(folder)


def shard_folder(folder: Path, shard: str, replica_set: str) -> Path:
    """Where a shard's state lies: under the shard's name and, below that, its replica set's, since another replica set
    may get the shard's name."""
    return folder / f"shard-{quote(shard, safe='')}" / quote(replica_set, safe="")


def check_kind(folder: Path, *, sharded: bool) -> None:
    """Raises UsageError if ``folder`` has the states of the other kind of deployment."""
    if sharded and (folder / "layout.json").exists():
        raise other_stream(f"the images in {folder} belong to a replica set, and this is a sharded cluster")
    if not sharded and any(folder.glob("shard-*")):
        raise other_stream(f"the images in {folder} belong to a sharded cluster, and this is a replica set")


class StateNote:
    """Notes that a state has begun, in a file that is not lost with it: next to a shard's folder, and apart
    from the documents of a replica set. Without it a directory that is not whole would be taken for a new one."""

    def __init__(self, state: Path, *, of_shard: bool) -> None:
        self._path = state / "begun.json"
        if of_shard:
            self._path = state.parent.parent / f"begun-{state.parent.name.removeprefix('shard-')}+{state.name}.json"

    @property
    def is_there(self) -> bool:
        """Whether the state has begun. Raises SinkError where the file is damaged."""
        return durable.read_sealed(self._path) is not None

    def write(self) -> None:
        """Note that it has begun."""
        if not self.is_there:
            durable.write_sealed(self._path, {"begun": True})

    def remove(self) -> None:
        """The state is about to be emptied."""
        self._path.unlink(missing_ok=True)


def other_stream(message: str) -> UsageError:
    """The error for a directory that another stream uses."""
    return UsageError(message, hint="Give each stream a directory of its own")


@dataclass(frozen=True, slots=True)
class Mark:
    """Identifies a directory wherever it is seen. ``replaces``: the ids of lost ones, in whose place it was made."""

    id: str
    replaces: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Mark | None:
        """That of ``folder``; ``None`` if it has none."""
        record = durable.read_sealed(folder / _MARK)
        if record is None:
            return None
        replaces: Any = record["replaces"]
        return cls(str(record["id"]), tuple(replaces))

    @classmethod
    def make(cls, folder: Path, *, replaces: str | None = None) -> Mark:
        """Mark ``folder``."""
        made = cls(uuid.uuid4().hex, () if replaces is None else (replaces,))
        make_folder(folder)
        durable.write_sealed(folder / _MARK, {"id": made.id, "replaces": list(made.replaces)})
        return made


def is_new(folder: Path) -> bool:
    """Whether nothing was ever kept in ``folder``."""
    return not any((folder / name).exists() for name in (_MARK, "layout.json")) and not any(folder.glob("shard-*"))


def refuse_network(folder: Path, mounts: Path = _MOUNTS) -> None:
    """Raises UsageError if ``folder`` is known to lie on a network file system. ``mounts``: Linux's list of mounts;
    where there is none, nothing is known."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    place, kind = "", ""
    real = folder.resolve()
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        if len(point) >= len(place) and real.is_relative_to(point):
            place, kind = point, rest.partition(" ")[0]
    if kind in _NETWORK:
        raise UsageError(
            f"{folder} is on a network file system ({kind}), where the state of exact images cannot be kept safely",
            hint="Give a directory on a local disk of the machine that runs the driver and the executors",
        )
