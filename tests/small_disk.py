"""A disk that can be filled up to the last page."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: The least that a file takes on the disk.
PAGE = 4096


class SmallDisk:
    """A file system of a test's own at ``path``; ``ballast`` is a file that takes its room away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def leave(self, room: int) -> None:
        """Leave only about ``room`` bytes free."""
        self.make_room()
        found = os.statvfs(self.path)
        with self._ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_frsize - room))

    def make_room(self) -> None:
        """Give back what ``leave`` took."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """A file system of ``size`` at ``path``. Skips the test where none may be mounted."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
