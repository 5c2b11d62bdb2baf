"""File systems that cannot keep a lake's promises are refused, each with what it lacks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.base import durable
from tailrace.errors import SinkError
from tailrace.lake.store import file_system
from tailrace.lake.store.file_system import check_file_system, mount_of
from tests.unit.lake_events import make, put, stage


def test_the_machines_own_file_system_is_good_and_nothing_is_left(tmp_path: Path) -> None:
    check_file_system(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert mount_of(tmp_path) is not None


def test_a_lock_that_is_granted_twice_or_not_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(SinkError, match="grants a lock twice"):
        make(tmp_path / "lake", tmp_path / "checkpoint")

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(SinkError, match="does not lock: No locks available"):
        check_file_system(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lake"]


def test_a_rename_or_a_sync_that_does_not_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, other: Path(other).write_text("something else"))
        with pytest.raises(SinkError, match="does not replace a file by renaming"):
            check_file_system(tmp_path)
    for code, message in (
        (errno.EINVAL, "cannot replace a file by renaming, or sync a directory"),
        (errno.ENOSPC, "no room"),
    ):

        def fail(_: Path, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr("tailrace.base.durable.sync_directory", fail)
            with pytest.raises(SinkError, match=message):
                check_file_system(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "place", ["os.open", "fcntl.flock", "pathlib.Path.write_text", "pathlib.Path.replace", "fsync"]
)
@pytest.mark.parametrize(
    "code", ["EROFS", "EACCES", "ENOSPC", "EDQUOT", "ENOTSUP", "EIO", "ESTALE", "EMFILE", "ENAMETOOLONG", "ENOLCK"]
)
def test_whatever_the_system_answers_is_one_sentence(
    place: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier tests had only a missing rename, lock or sync and a full disk: other failures came out as bare
    OSErrors."""
    number = getattr(errno, code)
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(place)
        if place != "fcntl.flock" or len(calls) == 2:  # of the two locks the second
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("tailrace.base.durable.sync_directory" if place == "fsync" else place, fail)
        with pytest.raises(SinkError) as refused:
            check_file_system(tmp_path)
    assert calls
    assert str(tmp_path) in str(refused.value)
    assert os.strerror(number) in str(refused.value)
    assert isinstance(refused.value, durable.LakeFullError) == (code in ("ENOSPC", "EDQUOT"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mounted", "options", "message"),
    [
        ("y fuse.s3fs", "rw", "object store that is mounted as a file system"),
        ("y fuse.gcsfuse", "rw", "object store that is mounted as a file system"),
        # Mountpoint for Amazon S3: only what is mounted tells it from other FUSE file systems, which no case had.
        ("mountpoint-s3 fuse", "rw,nosuid,nodev", r"object store .*\(mountpoint-s3 at"),
        ("y fuse", "rw", None),
        ("y nfs4", "rw,vers=4.2,local_lock=flock", "NFS mounted with local_lock=flock"),
        ("y nfs", "rw,nolock,vers=3", "NFS mounted with nolock"),
        ("y nfs4", "rw,vers=4.2,local_lock=none", None),
        ("y ceph", "rw", None),
        ("y fuse.juicefs", "rw", None),
    ],
)
def test_what_a_mount_says_is_believed(
    mounted: str, options: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a b"
    (place / "lake").mkdir(parents=True)
    text = f"none / ext4 rw 0 0\nx {os.path.realpath(tmp_path)}/a fuse.s3fs rw 0 0\nnot a mount\n"
    device, kind = mounted.split()
    escaped = os.path.realpath(place).replace(" ", chr(92) + "040")
    (tmp_path / "mounts").write_text(f"{text}{device} {escaped} {kind} {options} 0 0\n")
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "mounts")
    assert mount_of(tmp_path) == ("/", "ext4", ("rw",), "none")
    if message is None:
        check_file_system(place / "lake")
        return
    with pytest.raises(SinkError, match=message):
        check_file_system(place / "lake")


def test_a_lake_that_was_moved_to_such_a_place_is_refused_and_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    claim = make(root, checkpoint).claim
    put(root, claim, 0, stage(root, range(5)))
    before = sorted(path.name for path in root.rglob("*"))
    (tmp_path / "mounts").write_text(f"x {os.path.realpath(tmp_path)} fuse.rclone rw 0 0\n")
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "mounts")
    with pytest.raises(SinkError, match=r"fuse\.rclone"):
        make(root, tmp_path / "fresh")
    assert sorted(path.name for path in root.rglob("*")) == before
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "nothing")
    assert make(root, tmp_path / "fresh").after is not None, "a system that does not tell is not refused"
