"""An archive in a real object store: equal to one in a directory and to the server's own stream, whatever stores,
networks and other writers do, or refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import obstore
import pytest
from bson.raw_bson import RawBSONDocument
from pyarrow.fs import S3FileSystem
from pymongo import MongoClient

import tailrace
from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, object_place
from tailrace.cli.main import main
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, OtherHistoryError, SinkError, SourceError, UsageError
from tailrace.read.archive.claim import SESSIONS_MAX, STATE
from tailrace.read.archive.layout import DESCRIPTION, HEAD, oplog_folder, segments
from tailrace.read.archive.place import ArchiveAwayError
from tailrace.read.archive.retention import Retention
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import status, verify
from tailrace.read.source.mongod import MongodSource
from tailrace.sync import Sync
from tests.differential.stored_archives import (
    HAS_IMAGES,
    archive,
    assert_equal,
    change,
    drained,
    entries_of,
    events_of,
    steps,
    written_to,
)
from tests.tables.object_server import SECRET, ObjectServer, held_in, put_back
from tests.tables.unkind_proxy import Fault, UnkindProxy

pytestmark = pytest.mark.mongod

#: The least number of requests of a run that publishes four segments.
REQUESTS = 30


def test_its_events_are_the_servers_own(
    replica_set: ReplicaSet, object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    places = (root, tmp_path / "local")
    for place in places:
        archive(collection, place)
    start = collection.database.command("ping")["operationTime"]
    with (
        MongoClient[Any](replica_set.uri, document_class=RawBSONDocument) as raw,
        raw[collection.database.name].Things.watch(
            start_at_operation_time=start, full_document_before_change="whenAvailable", max_await_time_ms=200
        ) as native,
    ):
        for turn in range(3):
            change(collection, turn)
            for place in places:
                archive(collection, place)
        wanted = drained(native)
    assert len(wanted) > 300
    assert events_of(root, collection, start) == events_of(tmp_path / "local", collection, start) == wanted
    held = assert_equal(root, collection, 300)
    assert len(segments(oplog_folder(root, held.name))) > 5
    everything = [*held_in(root).values(), *(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())]
    assert SECRET.encode() not in b"".join(everything)
    assert not list((tmp_path / "state").rglob("*.parquet"))
    # The store's contents, copied to a directory, are an archive too.
    written_to(tmp_path / "copy", root)
    assert events_of(tmp_path / "copy", collection, start) == wanted
    change(collection, 3)
    archive(collection, tmp_path / "copy")
    assert_equal(tmp_path / "copy", collection)


def test_every_command(  # noqa: PLR0917
    replica_set: ReplicaSet,
    object_store: ObjectServer,
    collection: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in object_store.environment().items():
        monkeypatch.setenv("AWS_ENDPOINT_URL" if name == "AWS_ENDPOINT" else name, value)
    where, uri = object_store.uri(f"{prefix}/a"), replica_set.uri
    run = ["archive", uri, where, "--state", str(tmp_path / "state"), "--once", "--from", "now"]
    table = ["tables", "write", uri, str(tmp_path / "tables"), f"{collection.database.name}.*", "--once"]
    for command in (run, table):
        assert main(command) == 0
    start = collection.database.command("ping")["operationTime"]
    change(collection, 0)
    between = collection.database.command("ping")["operationTime"]
    change(collection, 1)
    for command in ([*run, "--segment-bytes", "6k"], table):
        assert main(command) == 0
    assert main(["archive", "status", where]) == 0
    end = ArchiveSource(where).newest()
    assert f"to   {end}" in capfd.readouterr().out
    assert main(["archive", "verify", where]) == 0
    assert "intact" in capfd.readouterr().out
    moment = f"{between.time},{between.inc}"
    assert main(["tables", "as-of", str(tmp_path / "tables"), collection.full_name, moment, "--archive", where]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 30
    since = ["--start-at-operation-time", f"{start.time},{start.inc}", "--format", "json"]
    assert main(["replay", where, collection.full_name, *since]) == 0
    replayed = capfd.readouterr().out
    assert len(replayed.splitlines()) == 330
    # As if the oplog no longer had most of it.
    with monkeypatch.context() as patch:
        patch.setattr(MongodSource, "oldest", lambda self: (ClusterTime(end - 1), False))
        streamed = ["watch", uri, collection.full_name, *since, "--archive", where, "--until", "now"]
        assert main(streamed) == 0
        assert capfd.readouterr().out == replayed
        with (
            tailrace.connect(uri, archive=where) as client,
            client[collection.database.name].Things.watch(start_at_operation_time=start) as stream,
        ):
            assert [stream.next()["operationType"] for _ in range(330)].count("delete") == 60
    erased = ["erase", "--archive", where, "--document", collection.full_name, "131"]
    assert main(erased) == 1
    assert "needs the state of its writer" in capfd.readouterr().out
    assert main([*erased, "--state", str(tmp_path / "state")]) == 0
    assert ("stored pre-images" in capfd.readouterr().out) == HAS_IMAGES
    for wrong in (
        ["archive", uri, where, "--once"],
        ["archive", uri, "gcs://bucket/archive", "--once"],
        ["archive", uri, str(tmp_path / "x"), "--state", str(tmp_path / "y")],
        ["archive", uri, str(tmp_path / "x"), "--take-over"],
        ["archive", "status", f"s3://tester:{SECRET}@tests/a"],
        ["archive", "status", object_store.uri(f"{prefix}/none")],
        ["replay", object_store.uri(f"{prefix}/none")],
    ):
        assert main(wrong) != 0
    text = capfd.readouterr()
    assert "needs --state" in text.err
    assert "URI that begins with 'gcs:'" in text.err
    assert "belong to an archive in an object store" in text.err
    assert "there is no archive at" in text.err
    assert SECRET not in text.err + text.out
    with pytest.raises(UsageError, match="records into a directory"):
        Sync(uri, uri, archive=where)


# -- what stores and networks do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["slow down", "cut", "lost", "slow"])
def test_a_bad_day(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, fault: Fault) -> None:
    """Every fourth request goes wrong, whatever it is, and so does the first try to write each object."""
    tried: set[str] = set()

    def chosen(number: int, method: str, path: str) -> Fault | None:
        is_first = method == "PUT" and path not in tried
        tried.update([path] if method == "PUT" else ())
        return fault if is_first or number % 4 == 0 else None

    with UnkindProxy(object_store.address, chosen) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address)
        archive(collection, root)
        change(collection, 0)
        collection.insert_one({"_id": "large", "text": os.urandom(9 << 20)})  # is uploaded in parts
        archive(collection, root)
        assert_equal(root, collection, 150)
        assert proxy.faults[fault] > 10
    held = assert_equal(object_store.place(prefix, tmp_path / "state"), collection, 150)
    there = [one.name for one in object_store.place(prefix, tmp_path).objects() if one.name.endswith(".parquet")]
    there = [name for name in there if "images" not in name]
    assert len(there) == len(segments(held._folder)), "a segment was written twice"


@pytest.mark.parametrize("places", [6, pytest.param(28, marks=pytest.mark.slow)])
def test_a_store_that_does_not_answer_is_no_damage(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, places: int
) -> None:
    """Wherever in a run it goes away, the run ends with an error that says so, and the next one goes on."""
    away = never = 1 << 30
    with UnkindProxy(object_store.address, lambda number, *_: "cut" if number >= away else None) as proxy:
        root = object_store.place(prefix, tmp_path / "state", address=proxy.address, retry_s=0.0)
        more = {"retention": Retention(bytes=20_000)}
        archive(collection, root)
        for turn in range(places):
            change(collection, turn)
            away = proxy.requests + 1 + turn * REQUESTS // places
            with pytest.raises((SinkError, ArchiveAwayError)) as caught:
                archive(collection, root, **more)
            assert SECRET not in f"{caught.value} {caught.value.hint}"
            assert "damaged" not in str(caught.value)
            with pytest.raises(ArchiveAwayError):
                verify(root)
            away = never
            if turn % 3 == 0:
                assert_equal(root, collection)
        archive(collection, root, **more)
        assert_equal(root, collection)
        asked = proxy.requests
        change(collection, places)
        archive(collection, root, **more)
        assert proxy.requests - asked > REQUESTS


def test_a_store_that_ignores_conditions_is_refused(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    with (
        UnkindProxy(object_store.address, lambda *_: "no condition") as proxy,
        pytest.raises(SinkError, match="overwrites an object"),
    ):
        archive(collection, object_store.place(prefix, tmp_path / "state", address=proxy.address))
    assert not held_in(object_store.place(prefix, tmp_path / "state"))


def test_wrong_keys(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path) -> None:
    """As with expired keys: nothing is reported as damaged, and the keys are not shown."""
    archive(collection, object_store.place(prefix, tmp_path / "state"))
    root = object_store.place(prefix, tmp_path / "state", **object_store.wrong)
    for attempt in (lambda: archive(collection, root), lambda: ArchiveSource(root), lambda: verify(root)):
        with pytest.raises(ArchiveAwayError, match=object_store.refusal) as caught:
            attempt()
        assert not any(one in f"{caught.value} {caught.value.hint}" for one in object_store.wrong.values())
    assert_equal(object_store.place(prefix, tmp_path / "state"), collection)


def test_a_long_history(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path) -> None:
    """More objects than a page of a listing has, most of them left by writers that were killed or replaced. A reader
    that follows lists what is new."""
    requests: list[str] = []

    def noted(number: int, method: str, path: str) -> None:
        requests.append(f"{method} {path}")

    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    change(collection, 0)
    archive(collection, root)
    held = assert_equal(root, collection)
    folder = oplog_folder(root, held.name)
    assert isinstance(folder, ObjectPlace)
    for number in range(1010):
        name = f"{held.start:016x}-{held.start + number + 2:016x}-{number:016x}.parquet"
        obstore.put(root.bucket.store, f"{folder.key}/{name}", b"left")
    with UnkindProxy(object_store.address, noted) as proxy:
        reader = ArchiveSource(object_store.place(prefix, tmp_path, address=proxy.address))
        assert sum(object_store.listing in one for one in requests) == (1 if object_store.page > 1010 else 2)
        assert_equal(root, collection)
        before = len(requests)
        for _ in range(3):
            reader.refresh()
        assert len(requests) == before + 3  # the head
        change(collection, 1)
        archive(collection, root)
        assert len(list(folder.objects())) < 100  # what was left is gone
        before = len(requests)
        reader.refresh()
        assert len(requests) == before + 3  # the head, and what is listed after the last segment
        assert reader.newest() == ArchiveSource(root).newest()
        assert entries_of(reader, reader.start, reader.newest())
    assert_equal(root, collection)


def test_reading_while_it_expires(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    change(collection, 0)
    archive(collection, root)
    reader = ArchiveSource(root)
    batches = reader.read(reader.start, reader.newest())
    next(batches)
    change(collection, 1)
    archive(collection, root, retention=Retention(bytes=1))
    with pytest.raises(ChangeStreamHistoryLost, match="has expired"):
        list(batches)
    reader.refresh()
    assert reader.start == ArchiveSource(root).start > ClusterTime(0)
    assert_equal(root, collection)
    folder = oplog_folder(root, reader.name)
    assert isinstance(folder, ObjectPlace)
    assert len([one for one in folder.objects() if one.name.endswith(".parquet")]) <= 2


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "harm", ["flipped", "cut", "lost", "swapped", "no head", "no newest", *(["images"] if HAS_IMAGES else [])]
)
def test_damage(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, harm: str) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    change(collection, 0)
    archive(collection, root)
    held = ArchiveSource(root)
    found = segments(held._folder)
    middle, next_one = found[len(found) // 2 : len(found) // 2 + 2]
    if harm in ("flipped", "cut", "swapped"):
        content = bytearray((next_one if harm == "swapped" else middle).path.read_bytes())
        content[len(content) // 3] ^= harm == "flipped"
        obstore.put(root.bucket.store, middle.path.key, bytes(content[: -1 if harm == "cut" else None]))  # type: ignore[union-attr]
    elif harm == "images":
        [one.unlink() for one in held._folder.iterdir() if "images" in one.name]
    else:
        {"lost": middle.path, "no head": held._folder / HEAD, "no newest": found[-1].path}[harm].unlink()
    reports = verify(root)
    assert any(report.faults for report in reports)
    if harm != "images":
        with pytest.raises(SourceError):
            entries_of(ArchiveSource(root), held.start, held.newest())
    else:
        with pytest.raises(SourceError, match="it is missing"):
            [reader.images() for reader in ArchiveSource(root).readers(held.start, held.newest())]
    if harm in ("lost", "no head", "no newest"):
        before = held_in(root)
        before.pop(DESCRIPTION)
        with pytest.raises(SourceError):
            archive(collection, root)
        assert {name: content for name, content in held_in(root).items() if name != DESCRIPTION} == before


# -- writers ----------------------------------------------------------------------------------------------------------


def test_two_writers(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path) -> None:
    """One that was stopped, and wakes up after another one has taken over: at whatever step, nothing of it counts."""
    one, other = (object_store.place(prefix, tmp_path / name) for name in ("one", "other"))
    archive(collection, one)
    with pytest.raises(SinkError, match="another state writes the archive"):
        archive(collection, other)
    for turn, step in enumerate(steps("archive.description", "archive.images", "archive.uploaded", "archive.head")):
        change(collection, turn)
        late, early = (one, other) if turn % 2 == 0 else (other, one)
        taken_over = False

        def stopped(name: str, step: str = step, early: ObjectPlace = early, turn: int = turn) -> None:
            nonlocal taken_over
            if name == step and not taken_over:
                taken_over = True
                archive(collection, early, take_over=True)
                change(collection, turn + 10)

        durable.observe_steps(stopped)
        try:
            with pytest.raises(SinkError, match="another process writes the archive"):
                archive(collection, late)
        finally:
            durable.observe_steps(None)
        assert taken_over
        assert_equal(early, collection)
        with pytest.raises(SinkError, match="another state writes the archive"):
            archive(collection, late)
        archive(collection, early)
        assert_equal(early, collection)


def test_the_state(object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path) -> None:
    """Copied, lost, damaged, another archive's, and in use."""
    root, copy = (object_store.place(prefix, tmp_path / name) for name in ("state", "copy"))
    archive(collection, root)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    archive(collection, copy)
    with pytest.raises(SinkError, match="a copy of this state, or a newer one, writes the archive"):
        archive(collection, root)
    archive(collection, root, take_over=True)
    with pytest.raises(SinkError, match="is the state of"):
        archive(collection, object_store.place(f"{prefix}-2", tmp_path / "state"))
    put_back(object_store.place(f"{prefix}-2", tmp_path), held_in(root))
    with pytest.raises(SinkError, match="another state writes the archive"):
        archive(collection, object_store.place(f"{prefix}-2", tmp_path / "new"))
    assert_equal(object_store.place(f"{prefix}-2", tmp_path / "new"), collection)
    with durable.locked(tmp_path / "state" / ".lock"), pytest.raises(SinkError, match="another process archives with"):
        archive(collection, root)
    path = tmp_path / "state" / STATE
    path.write_text(path.read_text().replace('"sessions"', '"session"'))
    with pytest.raises(SinkError, match="is damaged"):
        archive(collection, root)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(SinkError, match="another state") as caught:
        archive(collection, root)
    assert "--take-over" in (caught.value.hint or "")
    archive(collection, root, take_over=True)
    assert len(json.loads(path.read_text())["sessions"]) == 1 <= SESSIONS_MAX
    assert_equal(root, collection)


def test_a_store_that_was_set_back(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two runs the next one goes on from there; in the middle of a run, that run ends."""
    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    change(collection, 0)
    archive(collection, root)
    copy = held_in(root)
    change(collection, 1)
    archive(collection, root)
    put_back(root, copy)
    archive(collection, root)
    assert "was set back" in caplog.text
    assert_equal(root, collection, 300)
    change(collection, 2)
    is_back = False

    def back(name: str) -> None:
        nonlocal is_back
        if name == "archive.uploaded" and not is_back:
            is_back = True
            put_back(root, copy)

    durable.observe_steps(back)
    try:
        with pytest.raises(SinkError, match="or it was set back"):
            archive(collection, root)
    finally:
        durable.observe_steps(None)
    archive(collection, root)
    assert_equal(root, collection, 450)


@pytest.mark.parametrize("gone", [HEAD, ""])
def test_a_store_that_is_emptied_under_its_writer(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path, gone: str
) -> None:
    """By hand or by a rule of the bucket: the writer ends with an error that says so, at whichever step."""
    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    for turn, step in enumerate(steps("archive.images", "archive.uploaded", "archive.head")):
        change(collection, turn)
        copy = held_in(root)
        is_gone = False

        def emptied(name: str, step: str = step, copy: dict[str, bytes] = copy) -> None:
            nonlocal is_gone
            if name == step and not is_gone:
                is_gone = True
                put_back(root, {key: content for key, content in copy.items() if gone and not key.endswith(gone)})

        durable.observe_steps(emptied)
        try:
            with pytest.raises(SinkError, match="or it was set back"):
                archive(collection, root)
        finally:
            durable.observe_steps(None)
        assert is_gone
        put_back(root, copy)
    archive(collection, root)
    assert_equal(root, collection)


def test_the_archive_of_another_deployment(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    archive(collection, root)
    copy = held_in(root)
    said = json.loads(copy[DESCRIPTION])
    said.pop("sha256")
    said["identity"]["replicaSets"] = dict.fromkeys(said["identity"]["replicaSets"], "0" * 24)
    obstore.put(root.bucket.store, f"{root.key}/{DESCRIPTION}", durable.sealed(said))
    before = held_in(root)
    for take_over in (False, True):
        with pytest.raises(OtherHistoryError, match="another deployment"):
            archive(collection, root, take_over=take_over)
    assert held_in(root) == before
    with pytest.raises(SourceError, match="another archive"):
        ArchiveSource(root)


def test_a_prefix_that_holds_something_else(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    root = object_store.place(prefix, tmp_path / "state")
    (root / "letters" / "a.txt").create(b"dear reader")
    with pytest.raises(UsageError, match="is not an archive"):
        archive(collection, root)
    assert list(held_in(root)) == ["letters/a.txt"]


@pytest.mark.parametrize("object_store", ["s3"], indirect=True)
def test_the_folder_of_a_console_and_a_whole_bucket(
    object_store: ObjectServer, collection: Any, prefix: str, tmp_path: Path
) -> None:
    """An empty object stands for a folder; a bucket has no name below itself."""
    given = object_store.options()
    files = S3FileSystem(
        access_key=given["aws_access_key_id"],
        secret_key=given["aws_secret_access_key"],
        endpoint_override=given["aws_endpoint"],
        region=given["aws_region"],
        allow_bucket_creation=True,
    )
    files.create_dir(f"tests/{prefix}")
    files.create_dir("whole-bucket")
    whole = object_place("s3://whole-bucket", beside=tmp_path / "whole", options=given)
    for root in (object_store.place(prefix, tmp_path / "state"), whole):
        assert not root.is_dir()
        assert not list(root.iterdir())
        assert not list(root.objects())
        archive(collection, root)
        files.create_dir(
            f"{root.bucket.name.removeprefix('s3://')}/{root.key}/{status(root)[0].name}".replace("//", "/")
        )
        change(collection, root is whole)
        archive(collection, root, retention=Retention(bytes=6_000))
        assert_equal(root, collection)
