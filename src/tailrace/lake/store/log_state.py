"""What the lake's log adds up to: the state after a number of commits."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.store.manifest import (
    Commit,
    Erasure,
    FileEntry,
    Gap,
    LakeChange,
    Removal,
    WrittenVersion,
    with_erasure,
    with_version,
)


@dataclass(slots=True)
class LogState:
    """What the log says up to commit ``number``: the lake's files by name, those that were replaced and when, the gaps
    that were accepted, what was erased, the server versions whose events it holds, how it was changed, and the cluster
    time after which its stream begins (``None`` of an earlier release's lake)."""

    number: int = -1
    files: dict[str, FileEntry] = field(default_factory=dict)
    removed: dict[str, Removal] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    erasures: tuple[Erasure, ...] = ()
    versions: tuple[WrittenVersion, ...] = ()
    changes: tuple[LakeChange, ...] = ()
    begins: ClusterTime | None = None

    @property
    def in_order(self) -> list[FileEntry]:
        """The files in the order of the stream."""
        return sorted(self.files.values(), key=lambda file: file.first_token)

    def apply(self, commit: Commit) -> None:
        for removal in commit.removed:
            self.files.pop(removal.name, None)
            self.removed[removal.name] = removal
        self.files.update((file.name, file) for file in commit.files)
        if commit.gap is not None:
            self.gaps = (*self.gaps, commit.gap)
        if commit.erasure is not None:
            self.erasures = with_erasure(self.erasures, commit.erasure)
        if commit.change is not None:
            self.changes = (*self.changes, commit.change)
        if self.begins is None:
            self.begins = commit.begins
        if commit.planned is not None:
            self.versions = with_version(self.versions, commit.planned)
        self.number = commit.number
