"""What is on a disk after a power cut at any moment, played back from a record of what a program syncs, links and
renames.

A file system only promises that a file's bytes are there once the file was synced, and a name once its directory was.
What was not synced may be there or not. Two disks stand for all possibilities:

``strict``   names that were synced, with the bytes that were synced
``eager``    every name that there is, with the bytes that were synced: names may reach the disk by themselves, before
             the bytes do

A moment is taken after each call that changes names or syncs. Files may be written by any library: their bytes are read
when they are synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: The calls that change names, and the one that makes bytes and names durable.
_CALLS = ("fsync", "fdatasync", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir")

#: Directories (``None``) and files by their paths below the top.
Disk = dict[str, bytes | None]


@dataclass(eq=False)
class _File:
    """A file or a directory under all its names, and what of it has reached the disk."""

    content: bytes = b""
    names: dict[str, _File] | None = None
    is_synced: bool = False


@dataclass
class Moment:
    """What the disks may hold after ``call``, and how much had been acknowledged."""

    call: str
    acknowledged: int
    disks: dict[str, Disk] = field(default_factory=dict)


class PowerCuts:
    """The moments at which the power may be cut while something below ``top`` is written."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.acknowledged = 0
        self.moments: list[Moment] = []
        self._files: dict[int, _File] = {}
        self._seen: list[tuple[int, Disk]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record while the block runs. What existed before counts as being on the disk."""
        self._note_all(synced=True)
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._followed(name, getattr(os, name)))
            yield

    def _followed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any, **more: Any) -> Any:
            if name in ("fsync", "fdatasync"):
                self._sync(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            result = call(*args, **more)
            self._moment(f"{name} {args[0]}")
            return result

        return followed

    def _file(self, path: str | os.PathLike[str]) -> _File:
        status = os.stat(path, follow_symlinks=False)
        names: dict[str, _File] | None = {} if os.path.isdir(path) else None
        return self._files.setdefault(status.st_ino, _File(names=names))

    def _sync(self, path: Path) -> None:
        if not path.is_relative_to(self.top):
            return
        file = self._file(path)
        file.is_synced = True
        if path.is_dir():
            file.names = {name: self._file(path / name) for name in os.listdir(path)}
        else:
            file.content = path.read_bytes()

    def _note_all(self, *, synced: bool = False) -> set[int]:
        """Note the existing files; one whose last name is gone is forgotten, as its number may be used again."""
        there = set()
        for folder, folders, files in os.walk(self.top):
            for path in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
                self._file(path)
                there.add(os.stat(path, follow_symlinks=False).st_ino)
                if synced:
                    self._sync(Path(path))
        return there

    def _moment(self, call: str) -> None:
        there = self._note_all()
        self._files = {number: file for number, file in self._files.items() if number in there}
        moment = Moment(call, self.acknowledged, {"strict": {}, "eager": {}})
        _strict(self._file(self.top), "", moment.disks["strict"])
        self._eager(moment.disks["eager"])
        for kind, disk in list(moment.disks.items()):
            if (self.acknowledged, disk) in self._seen:
                del moment.disks[kind]
            self._seen.append((self.acknowledged, disk))
        if moment.disks:
            self.moments.append(moment)

    def _eager(self, disk: Disk) -> None:
        for folder, folders, files in os.walk(self.top):
            for name in folders:
                disk[os.path.relpath(os.path.join(folder, name), self.top)] = None
            for name in files:
                path = os.path.join(folder, name)
                disk[os.path.relpath(path, self.top)] = self._file(path).content

    def played(self, below: Path) -> Iterator[tuple[Path, Moment, str]]:
        """Write out each disk, on which the store is opened after the cut."""
        number = 0
        for moment in self.moments:
            for kind, disk in moment.disks.items():
                number += 1
                top = below / str(number)
                top.mkdir(parents=True)
                for name, content in disk.items():
                    path = top / name
                    if content is None:
                        path.mkdir(parents=True, exist_ok=True)
                    else:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(content)
                yield top, moment, kind


def _strict(folder: _File, prefix: str, disk: Disk) -> None:
    for name, file in (folder.names or {}).items():
        path = f"{prefix}{name}"
        if file.names is None:
            disk[path] = file.content
        else:
            disk[path] = None
            _strict(file, f"{path}/", disk)
