"""LMDB files that are shorter than their number of pages: sound if the missing pages are unused, otherwise damaged.

Now and then a state of exact images was taken for damaged after a stream had gone back to a token: tests had cut files,
but none had a page missing that LMDB itself does not write.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tailrace.base.lmdb_file import is_whole
from tailrace.errors import SinkError
from tailrace.lake.tables.state import TableState
from tailrace.read.images.bucket import ImageBucket, ImageStateError


def opened(directory: Path) -> Any:
    return lmdb.open(str(directory), map_size=64 << 20, max_dbs=3)


def missing(directory: Path) -> int:
    """How many bytes the file is shorter than its pages."""
    with opened(directory) as env:
        pages, page = env.info()["last_pgno"] + 1, env.stat()["psize"]
    return int(pages * page - (directory / "data.mdb").stat().st_size)


def test_a_state_that_has_such_a_page_is_opened_again(tmp_path: Path) -> None:
    bucket = ImageBucket(tmp_path, b"0")
    bucket.begin()
    bucket.put({b"stays": b"s" * 3_000})
    bucket.put({b"goes": b"g" * 9_000})
    bucket.put({b"goes": None})
    bucket.commit()
    bucket.close()
    assert missing(tmp_path) > 0
    bucket = ImageBucket(tmp_path, b"0")
    assert bucket.get([b"stays", b"goes"]) == [b"s" * 3_000, None]
    bucket.close()


_READ_ALL = """
import hashlib, sys, lmdb
found = hashlib.sha256()
with lmdb.open(sys.argv[1], map_size=64 << 20, max_dbs=3) as env:
    databases = [env.open_db(name) for name in (b"documents", b"undo")]
    for database in databases:
        with env.begin(db=database) as txn:
            for key, value in txn.cursor():
                found.update(key + value)
    with env.begin(write=True, db=databases[0]) as txn:  # reads the list of free pages
        txn.put(b"one more", b"x")
print(found.hexdigest())
"""


def what_lmdb_reads(directory: Path) -> str | None:
    """A digest of the contents; ``None`` if reading them kills the process."""
    done = subprocess.run([sys.executable, "-c", _READ_ALL, directory], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.mark.parametrize("seed", range(3))
def test_a_file_is_whole_if_lmdb_can_read_it(tmp_path: Path, seed: int) -> None:
    """Random files, cut ever shorter until a page is missed. LMDB itself says whether one is."""
    rng = random.Random(seed)
    with opened(tmp_path) as env:
        databases = [env.open_db(name) for name in (b"documents", b"undo")]
        for _ in range(12):
            with env.begin(write=True) as txn:
                for _ in range(rng.randrange(60)):
                    key = bytes([rng.randrange(90)]) * rng.randrange(1, 40)
                    if rng.random() < 0.6:
                        txn.put(key, rng.randbytes(rng.choice((10, 300, 1_500, 5_000))), db=rng.choice(databases))
                    else:
                        txn.delete(key, db=rng.choice(databases))
        with env.begin(write=True, db=databases[1]) as txn:  # many pages at the end are free
            for number in range(20):
                txn.put(b"%d" % number, b"x" * 5_000)
            for number in range(rng.randrange(8, 20), 20):
                txn.delete(b"%d" % number)
        page = env.stat()["psize"]
    data = tmp_path / "data.mdb"
    copy = tmp_path / "copy"
    expected, whole = None, True
    for pages in range(data.stat().st_size // page, 2, -1):
        cut(data, copy, pages * page)
        whole = is_whole(copy / "data.mdb")
        found = what_lmdb_reads(copy)
        expected = expected or found
        assert whole == (found == expected is not None), (seed, pages)
        if not whole:
            break
    assert not whole
    for _ in range(2):
        with pytest.raises(ImageStateError, match="shorter than what it claims"):
            ImageBucket(cut(data, copy, pages * page), b"0")
        with pytest.raises(SinkError, match="is damaged: the file is shorter"):
            TableState(cut(data, copy, pages * page))


def cut(data: Path, copy: Path, size: int) -> Path:
    """A copy of the file, of that length."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    shutil.copy(data, copy)
    os.truncate(copy / "data.mdb", size)
    return copy


def hundred_documents(directory: Path) -> tuple[Path, int, int]:
    """A file with a hundred documents, the size of its pages in bytes, and how many there are."""
    with opened(directory) as env:
        with env.begin(write=True, db=env.open_db(b"documents")) as txn:
            for number in range(100):
                txn.put(b"%d" % number, b"x" * 1_000)
        return directory / "data.mdb", env.stat()["psize"], env.info()["last_pgno"] + 1


def test_noise_in_a_page_is_damage(tmp_path: Path) -> None:
    data, page, pages = hundred_documents(tmp_path)
    whole = data.read_bytes()
    assert is_whole(data)
    damaged = 0
    for number in range(2, pages):
        data.write_bytes(whole[: number * page] + b"\xff" * page + whole[(number + 1) * page :])
        damaged += not is_whole(data)
    assert damaged > 25  # the others are free


def test_pages_that_lead_round_in_a_circle_are_damage(tmp_path: Path) -> None:
    """One wrong number in a branch page: following it never came to an end."""
    data, page, pages = hundred_documents(tmp_path)
    whole = data.read_bytes()
    starts = range(2 * page, pages * page, page)
    (branch,) = (start for start in starts if int.from_bytes(whole[start + 10 : start + 12], "little") == 1)
    node = branch + int.from_bytes(whole[branch + 16 : branch + 18], "little")
    data.write_bytes(whole[:node] + (branch // page).to_bytes(2, "little") + whole[node + 2 :])
    assert not is_whole(data)
