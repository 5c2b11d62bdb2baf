"""What writers that were killed or replaced leave behind in an object store: it never counts, and is removed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tailrace.base.object_place import ObjectPlace
from tailrace.embedded import ReplicaSet
from tailrace.read.archive.layout import HEAD, listed, oplog_folder, oplog_of, segments
from tailrace.read.archive.retention import Retention
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import status
from tests import commands
from tests.differential.stored_archives import (
    CHILD,
    archive,
    assert_equal,
    change,
    steps,
    written_to,
)
from tests.tables.object_server import ObjectServer

pytestmark = pytest.mark.mongod

STEPS = steps(
    *("archive.description", "archive.head:1", "archive.images", "archive.uploaded", "archive.head:2"),
    *("archive.images:2", "archive.uploaded:2", "archive.head:4", "archive.removed", "archive.removed:3"),
)


def test_a_writer_that_is_killed(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """After each of its steps; a reader sees a whole archive, and the next writer goes on."""
    root = object_store.place(prefix, tmp_path / "state")
    options = json.dumps(object_store.options())
    archive(collection, root)
    for turn, step in enumerate(STEPS):
        change(collection, turn)
        ended = commands.run(
            replica_set.uri, object_store.uri(prefix), str(tmp_path / "state"), step, options, code=CHILD
        )
        assert ended.returncode == -signal.SIGKILL, step
        assert_equal(root, collection)
    archive(collection, root)
    (report,) = status(root)
    assert_equal(root, collection)
    folder = oplog_folder(root, report.name)
    assert isinstance(folder, ObjectPlace)
    there = [one.name for one in folder.objects() if one.name.endswith(".parquet") and "images" not in one.name]
    assert sorted(there) == [one.path.name for one in segments(folder)], "something was left"
    assert not list((tmp_path / "state").rglob("*.unfinished"))


def test_a_copy_with_what_a_killed_writer_left(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """In a directory the leftovers do not count either: no entry is there twice."""
    root, copy = object_store.place(prefix, tmp_path / "state"), tmp_path / "copy"
    archive(collection, root)
    change(collection, 0)
    code = CHILD.replace("bytes=6_000", "bytes=600_000").replace("bytes=20_000", "")
    arguments = (
        replica_set.uri,
        object_store.uri(prefix),
        str(tmp_path / "state"),
        "archive.uploaded",
        json.dumps(object_store.options()),
    )
    assert commands.run(*arguments, code=code).returncode == -signal.SIGKILL
    change(collection, 1)
    archive(collection, root)
    written_to(copy, root)
    held = assert_equal(copy, collection, 300)
    folder = oplog_folder(copy, held.name)
    assert len(listed(folder)) == len(segments(folder)) + 1 == len(segments(oplog_folder(root, held.name))) + 1
    assert [reader.segment for reader in held.readers(held.start, held.newest())] == segments(folder)
    change(collection, 2)
    archive(collection, copy)
    assert_equal(copy, collection, 450)
    archive(collection, copy, retention=Retention(bytes=1))
    change(collection, 3)
    archive(collection, copy, retention=Retention(bytes=1))
    assert_equal(copy, collection)


def test_names_that_are_quoted(object_store: ObjectServer, prefix: str, tmp_path: Path) -> None:
    """A copy from a store, or into one, has the folder of its oplog."""
    places = (tmp_path, object_store.place(prefix, tmp_path))
    names = (("rs%200", "rs!200"), ("rs!200", "rs%200"))
    for place, (usual, copied) in zip(places, names, strict=True):
        assert oplog_folder(place, "rs 0") == place / usual
        (place / copied).mkdir() if isinstance(place, Path) else None
        there = place / copied / HEAD
        there.write_bytes(b"{}") if isinstance(there, Path) else there.create(b"{}")
        assert oplog_folder(place, "rs 0") == place / copied
        assert oplog_of(place / copied) == oplog_of(place / usual) == "rs 0"
    assert oplog_of(oplog_folder(tmp_path, "a!%")) == "a!%"


def test_what_another_writer_has_just_uploaded_is_left_alone(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """It begins where the archive ends, and may soon count. Once the archive has gone past it, it is removed."""
    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    held = ArchiveSource(root)
    end = held.newest()
    left = held._folder / f"{end:016x}-{end + 1:016x}-{0:016x}.parquet"
    assert isinstance(left, ObjectPlace)
    left.create(b"another writer's")
    archive(collection, root)
    assert left.exists()
    change(collection, 0)
    for _ in range(2):
        archive(collection, root)
    assert not left.exists()
    assert_equal(root, collection)
