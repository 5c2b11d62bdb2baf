"""The directory of a store is private to its owner, unless the owner has created it with another mode.

No test had checked a mode before: lakes and archives were created with the umask's mode, which is 0755 nearly
everywhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.base import durable


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_for_its_owner_alone_and_those_above_it_are_as_usual(tmp_path: Path) -> None:
    with umask(0o022):
        durable.make_private(tmp_path / "data" / "store")
    assert mode(tmp_path / "data" / "store") == 0o700
    assert mode(tmp_path / "data") == 0o755


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2750)
    durable.make_private(tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o2750


def test_the_umask_is_respected(tmp_path: Path) -> None:
    with umask(0o277):
        durable.make_private(tmp_path / "store")
    assert mode(tmp_path / "store") == 0o500


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        durable.make_private(tmp_path / "file")
