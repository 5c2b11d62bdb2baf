"""The directory of exact images: its mark, and the file systems that it cannot be on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import UsageError
from tailrace.read.images.directory import Mark, is_new, refuse_network, shard_folder

_MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
31 22 0:40 / /mnt/nfs rw,relatime shared:2 - nfs4 server:/export rw,vers=4.2
32 31 259:2 / /mnt/nfs/local rw - xfs /dev/sdb rw
33 22 0:41 / /mnt/with\\040space rw - fuse.sshfs me@there:/ rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(_MOUNTS)
    return path


@pytest.mark.parametrize("path", ["/mnt/nfs", "/mnt/nfs/images/of/orders", "/mnt/with space/images"])
def test_a_network_file_system_is_refused(mounts: Path, path: str) -> None:
    with pytest.raises(UsageError, match=r"on a network file system \((nfs4|fuse.sshfs)\)"):
        refuse_network(Path(path), mounts)


@pytest.mark.parametrize("path", ["/images", "/mnt/nfs2/images", "/mnt/nfs/local/images"])
def test_a_disk_is_not(mounts: Path, path: str) -> None:
    refuse_network(Path(path), mounts)


def test_where_the_system_has_no_list_nothing_is_refused(tmp_path: Path) -> None:
    refuse_network(tmp_path, tmp_path / "none")


def test_a_mark_stays(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    assert Mark.read(folder) is None
    assert is_new(folder)
    made = Mark.make(folder, replaces="lost")
    assert Mark.read(folder) == made
    assert made.replaces == ("lost",)
    assert not is_new(folder)
    assert Mark.make(tmp_path / "other").id != made.id


def test_a_directory_with_states_is_not_new(tmp_path: Path) -> None:
    shard_folder(tmp_path, "shard/0", "rs0").mkdir(parents=True)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-shard%2F0"]
    assert not is_new(tmp_path)
