"""A directory of exact images that does not match the stream's token: older, newer, lost, partly lost, damaged.

In earlier tests, streams always found their directory as they had left it, or had none from the beginning. So if one
was lost, ``exactWhenAvailable`` gave null for every document without saying why.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure

import tailrace
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError, SinkError, TailraceError, UsageError
from tailrace.read.images import source as images_source
from tailrace.read.images.bucket import ImageStateError
from tailrace.read.images.directory import Mark, StateNote
from tailrace.read.images.state import ImageState
from tailrace.watch.client.request import SNAPSHOT

pytestmark = pytest.mark.mongod

OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
NAME = "images_set_back"
EXACT = {"full_document": "exact", "full_document_before_change": "exact"}


@pytest.fixture
def orders(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database(NAME)
        yield client[NAME]["orders"]
        client.drop_database(NAME)


class Followed:
    """A stream with exact images of ``orders``, and each time the events of the changes that were made meanwhile."""

    def __init__(self, uri: str, folder: Path, orders: Any) -> None:
        self._uri = uri
        self._orders = orders
        self.folder = folder
        self._number = 0
        self.token: Any = None

    def change(self) -> None:
        """Each document once."""
        self._number += 1
        for number in range(10):
            self._orders.update_one({"_id": number}, {"$set": {"n": self._number}})

    def follow(self, token: Any = None, changes: int = 1, **modes: str) -> list[bytes]:
        """Change everything ``changes`` times, and the events from ``token`` on, as bytes."""
        start = {} if token is None else {"resume_after": token}
        with (
            tailrace.connect(self._uri, images=self.folder, document_class=RawBSONDocument) as client,
            client[NAME]["orders"].watch(**(modes or EXACT), **start) as stream,
        ):
            for _ in range(changes):
                self.change()
            end = self._orders.insert_one({}).inserted_id
            events: list[bytes] = []
            for event in stream:
                events.append(bytes(event.raw))
                if event["documentKey"]["_id"] == end:
                    break
            self.token = stream.resume_token
        return events


@pytest.fixture
def followed(replica_set: ReplicaSet, orders: Any, tmp_path: Path) -> Followed:
    orders.insert_many([{"_id": number, "n": 0, "text": "x" * number * 1000} for number in range(10)])
    found = Followed(replica_set.uri, tmp_path / "images", orders)
    found.follow()
    return found


def copy_of(folder: Path) -> Path:
    return shutil.copytree(folder, folder.with_name("copy"))


def put_back(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("copy"), folder)


def test_an_older_directory_goes_on_under_a_newer_token(followed: Followed, replica_set: ReplicaSet) -> None:
    copy_of(followed.folder)
    followed.follow(followed.token, changes=3)
    token = followed.token
    never_set_back = followed.folder.with_name("never")
    shutil.copytree(followed.folder, never_set_back)
    put_back(followed.folder)
    found = followed.follow(token, changes=2)
    assert len(found) == 21
    beside = Followed(replica_set.uri, never_set_back, followed._orders)
    assert beside.follow(token, changes=0)[:21] == found


def test_an_older_token_goes_on_as_far_back_as_the_directory_reaches(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = followed.token
    first = followed.follow(token, changes=2)
    assert followed.follow(token, changes=0)[: len(first)] == first
    with ImageState.open(followed.folder) as state:
        state.settle()  # as though more had come than is kept to undo
    with pytest.raises(ImageStateError, match=r"can be taken back to .* and no further"):
        followed.follow(token, changes=0)


@pytest.mark.parametrize("mode", ["exact", "exactWhenAvailable"])
def test_where_the_whole_directory_is_lost_nothing_is_known_and_the_log_says_so(
    followed: Followed, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(followed.folder)
    caplog.clear()
    modes = {"full_document": mode, "full_document_before_change": mode}
    if mode == "exact":
        with pytest.raises(OperationFailure) as raised:
            followed.follow(followed.token, **modes)
        assert raised.value.code == 47
    else:
        events = [RawBSONDocument(event) for event in followed.follow(followed.token, **modes)]
        assert {event["fullDocument"] for event in events if event["operationType"] == "update"} == {None}
    assert "begin at" in caplog.text
    assert "with no document" in caplog.text
    assert "put their directory back" in caplog.text
    assert str(followed.folder) in caplog.text


def test_a_directory_that_was_not_lost_is_not_told(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    followed.follow(followed.token)
    assert "no document" not in caplog.text


PARTS = {
    "the buckets": ["generation-1"],
    "one bucket": ["generation-1/0002"],
    "the layout": ["layout.json"],
    "the buckets and the layout": ["generation-1", "layout.json"],
    "whose it is": ["stream.json"],
    "all but the note that it has begun": ["generation-1", "layout.json", "stream.json"],
}


@pytest.mark.parametrize("mode", ["exact", "exactWhenAvailable"])
@pytest.mark.parametrize("part", PARTS)
def test_a_directory_of_which_a_part_is_lost_is_refused(followed: Followed, part: str, mode: str) -> None:
    for name in PARTS[part]:
        path = followed.folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    token = followed.token
    for _ in range(2):  # opening it does not turn it into a new one
        with pytest.raises(TailraceError, match=str(followed.folder)) as raised:
            followed.follow(token, full_document=mode)
        assert isinstance(raised.value, ImageStateError)
        said = ("had begun, and the directory is empty", "is missing", "no longer holds the same bucket of this state")
        assert any(words in str(raised.value) for words in said)


def test_a_state_of_another_stream_in_the_place_of_one_is_refused(
    followed: Followed, replica_set: ReplicaSet, tmp_path: Path
) -> None:
    """Its buckets and what says how many there are fit together; only the scope is another."""
    with tailrace.connect(replica_set.uri, images=tmp_path / "other") as client:
        client[NAME]["others"].watch(**EXACT).close()
    for name in ("generation-1", "layout.json"):
        (followed.folder / name).rename(tmp_path / "away")
        (tmp_path / "other" / name).rename(followed.folder / name)
        (tmp_path / "away").rename(tmp_path / "other" / name)
    for mode in ("exact", "exactWhenAvailable"):
        with pytest.raises(UsageError, match=rf"belong to {NAME}.others on rs0, and the stream is of {NAME}.orders"):
            followed.follow(followed.token, full_document=mode)


def test_what_is_lost_can_be_seeded_again_by_a_stream_that_begins_now(followed: Followed) -> None:
    shutil.rmtree(followed.folder / "generation-1")
    (followed.folder / "layout.json").unlink()
    assert len(followed.follow()) == 11


def flipped(path: Path) -> Iterator[int]:
    """The file with one bit of each byte changed, one after the other; at the end as it was."""
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        yield place
    path.write_bytes(whole)


def test_a_flipped_bit_in_a_small_file_is_refused(tmp_path: Path) -> None:
    """What a directory says about its contents was plain JSON: a changed number of a scope or a folder was believed."""
    ImageState.open(tmp_path).close()
    Mark.make(tmp_path)
    note = StateNote(tmp_path, of_shard=False)
    note.write()
    reads: dict[str, Callable[[], object]] = {
        "layout.json": lambda: closing(ImageState.open(tmp_path)).__exit__(),
        "directory.json": lambda: Mark.read(tmp_path),
        "begun.json": lambda: note.is_there,
    }
    for name, read in reads.items():
        before = read()
        path = tmp_path / name
        for place in flipped(path):
            with suppress(SinkError):
                assert read() == before, (name, place)
                assert path.read_bytes()[place] in b" \t\n\r", (name, place)


def test_a_flipped_bit_in_the_file_that_says_whose_images_they_are_is_refused(followed: Followed) -> None:
    path = followed.folder / "stream.json"
    whole = path.read_text()
    path.write_text(whole.replace("orders", "orderz"))
    with pytest.raises(SinkError, match="is damaged: it was changed after it was written"):
        followed.follow(followed.token)
    path.write_text(whole)
    assert len(followed.follow(followed.token)) == 11


@pytest.mark.parametrize("version", ["6.0.27", *OLDER, pytest.param("7.0.28", marks=pytest.mark.slow)])
def test_images_and_a_half_copy_are_refused_by_a_set_that_was_restored_from_an_older_backup(
    tmp_path: Path, version: str
) -> None:
    """Only a test on a cluster had covered this. Here the restored member brings back the replica set's only oplog."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ReplicaSet(1, version=version, data_dir=data) as running:
        direct = f"mongodb://{running.members[0].host}/?directConnection=true"
        with MongoClient[Any](direct) as client:
            orders = client[NAME]["orders"]
            orders.insert_many([{"_id": number, "n": 0} for number in range(10)])
            running.stop(0)
            shutil.copytree(data, backup)
            running.restart(0)
            followed = Followed(direct, tmp_path / "images", orders)
            followed.follow()
            followed.follow(followed.token)
        with tailrace.connect(direct) as ours, ours[NAME].watch(start="snapshot") as stream:
            next(stream)
            half = stream.resume_token
        running.stop(0)
        shutil.rmtree(data)
        shutil.copytree(backup, data)
        running.restart(0)
        with MongoClient[Any](direct) as client:
            client[NAME]["orders"].insert_one({"_id": "another history"})
            for mode in ("exact", "exactWhenAvailable"):
                for start in ({}, {"resume_after": followed.token}):
                    with (
                        tailrace.connect(direct, images=followed.folder) as ours,
                        pytest.raises(OtherHistoryError, match=r"the images in .*(another history|were read up to)"),
                    ):
                        ours[NAME]["orders"].watch(full_document=mode, **start)
            assert SNAPSHOT in half
            with (
                tailrace.connect(direct) as ours,
                pytest.raises(OtherHistoryError, match=r"the snapshot of .*(another history|were read up to)"),
            ):
                ours[NAME].watch(resume_after=half)


def test_the_images_of_a_running_set_are_not_taken_for_damaged(followed: Followed) -> None:
    """The first stream was of an earlier version, which left no note that it had begun."""
    (followed.folder / "begun.json").unlink()
    assert len(followed.follow(followed.token)) == 11
    assert (followed.folder / "begun.json").exists()
    assert images_source.StateNote(followed.folder, of_shard=False).is_there
