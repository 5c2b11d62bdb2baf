"""The first copy of tables, and the state of exact images, on a full disk and on one with little room: each says so in
a sentence, and goes on when there is room.

Without any room the process was killed (SIGBUS: a mapped file lacked its page), and a write that was cut short was
reported as an input/output error. The earlier tests had no full disk: they limited the size of files, or raised an
error themselves.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base.durable import LakeFullError
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.state import TableState
from tailrace.read.images.bucket import ImageStateError
from tailrace.read.images.state import ImageState
from tests import commands
from tests.small_disk import PAGE, small_disk
from tests.tables.equality import in_collection, in_table

DATABASE = "tables_full_disk"


def write(uri: str, root: Path) -> subprocess.CompletedProcess[str]:
    return commands.run_text("tables", "write", uri, str(root), f"{DATABASE}.*", "--once")


@pytest.mark.slow  # test_writer.py, where a sync fails; the disk itself: the test below
@pytest.mark.mongod
@pytest.mark.parametrize(
    "rooms", [(0, 20), pytest.param((1, 2, 3, 5, 8, 12, 30, 40, 50, 60, 70), marks=pytest.mark.slow)]
)
def test_tables_say_that_there_is_no_room_and_go_on(
    replica_set: ReplicaSet, tmp_path: Path, rooms: tuple[int, ...]
) -> None:
    chosen = random.Random(1)
    with MongoClient[Any](replica_set.uri) as client, small_disk(tmp_path / "disk", "8m") as disk:
        collection = client[DATABASE]["c"]
        collection.drop()
        collection.insert_many([{"_id": number, "pad": chosen.randbytes(300)} for number in range(300)])
        for pages in rooms:
            root = disk.path / str(pages)
            disk.leave(pages * PAGE)
            full = write(replica_set.uri, root)
            disk.make_room()
            assert full.returncode == 1, (pages, full.stderr)
            assert "no room left to write" in full.stderr, pages
            good = write(replica_set.uri, root)
            assert good.returncode == 0, (pages, good.stderr)
            assert in_table(root, collection.full_name) == in_collection(collection)
        client.drop_database(DATABASE)


_IMAGES = """
import sys
from tailrace.read.images.state import ImageState
from tests.unit.test_image_state import keys
with ImageState.open(sys.argv[1], buckets=2, map_bytes=64 << 20) as state:
    for number in range(0 if state.position is None else state.position + 1, int(sys.argv[2])):
        with state.batch(number) as batch:
            batch.put((name, b"%d" % number * 900) for name in keys(40 + number))
        print(number, flush=True)
    assert set(state.get(keys(40 + state.position))) == {b"%d" % state.position * 900}
"""


def test_the_state_of_exact_images_says_that_there_is_no_room_and_goes_on(tmp_path: Path) -> None:
    def run(until: int) -> subprocess.CompletedProcess[str]:
        return commands.run_text(str(disk.path / "images"), str(until), code=_IMAGES)

    with small_disk(tmp_path / "disk", "8m") as disk:
        for pages in (0, 25, 60):
            disk.leave(pages * PAGE)
            full = run(1000)
            assert full.returncode == 1, (pages, full.stderr)
            assert "is full. Make room, and start again" in full.stderr, (pages, full.stderr)
            disk.make_room()
            good = run(12)
            assert good.returncode == 0, (pages, good.stderr)


def begin_images(directory: Path) -> None:
    ImageState.open(directory, buckets=2, map_bytes=1 << 20).close()


@pytest.mark.parametrize("begin", [lambda directory: TableState(directory).close(), begin_images])
def test_a_state_that_could_not_be_begun_is_begun_when_there_is_room(
    begin: Callable[[Path], None], tmp_path: Path
) -> None:
    """With room for only one of LMDB's first two pages, the file counted as damaged for ever. Only the slow test above
    tried so little room, and only for tables."""
    said = []
    with small_disk(tmp_path / "disk", "8m") as disk:
        for pages in range(24):
            directory = disk.path / str(pages)
            disk.leave(pages * PAGE)
            try:
                begin(directory)
            except (LakeFullError, ImageStateError) as error:
                said.append(str(error))
            disk.make_room()
            begin(directory)
            begin(directory)
    assert len(said) > 2
    assert all("no room left" in text or "is full" in text for text in said), said
