"""An archive's files: what goes in comes out, damaged and missing files are named, and old ones are removed when they
may be."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path

import bson
import numpy as np
import pytest
from bson.timestamp import Timestamp

from tailrace.cli.main import main
from tailrace.core import kernel, raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.compatibility import SettingRead
from tailrace.core.plan.request import PreImageKey
from tailrace.errors import ChangeStreamHistoryLost, OplogFormatError, SourceError, UsageError
from tailrace.read.archive import columns
from tailrace.read.archive.layout import (
    DESCRIPTION,
    HEAD,
    ArchiveSegment,
    Description,
    Membership,
    Reach,
    VersionNote,
    describe,
    head,
    listed,
    oplog_folder,
    segments,
)
from tailrace.read.archive.passing import passing
from tailrace.read.archive.record import write_record
from tailrace.read.archive.retention import Retention, remove_before
from tailrace.read.archive.segment import ImagesWriter, SegmentReader, SegmentWriter
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import status, verify

UUID = bytes(range(16))


def time_of(number: int) -> ClusterTime:
    return ClusterTime.of(1000 + number, 1)


def entry(number: int, namespace: str = "shop.c", op: str = "i") -> bytes:
    """With a user's fields named like an entry's own, before and inside of them."""
    document = {"_id": number, "ts": Timestamp(1, 1), "op": "x", "ns": "no", "pad": os.urandom(20)}
    return bson.encode(
        {"lsid": {"ns": 1}, "op": op, "ns": namespace, "o": document, "ts": time_of(number).to_timestamp()}
    )


def archive(root: Path, parts: list[list[bytes]], name: str = "rs0") -> Path:
    """An archive whose segments hold these entries; entry ``n`` has the time ``time_of(n)``."""
    write_record(root / DESCRIPTION, Description(name, (VersionNote("6.0.27"),), {}).document())
    folder = oplog_folder(root, name)
    folder.mkdir()
    start = after = time_of(0)
    previous = ""
    for part in parts:
        until = entry_time(part[-1])
        with SegmentWriter(folder, after) as writer, ImagesWriter(folder, after) as images:
            writer.add(b"".join(part))
            images.add([(PreImageKey(UUID, entry_time(one), 0), one) for one in part if bson.decode(one)["op"] in "cu"])
            images.publish(folder / f"{after:016x}-{until:016x}.images.parquet")
            previous = writer.publish(until, images, previous).digest
        after = until
        write_record(folder / HEAD, Reach(start, until, previous).document())
    return folder


def entry_time(raw: bytes) -> ClusterTime:
    return ClusterTime.from_timestamp(bson.decode(raw)["ts"])


@pytest.fixture
def entries() -> list[bytes]:
    namespaces = ["shop.c", "shop.d", "admin.$cmd", "имя.коллекция", "x.y\0z"[:3]]
    return [entry(number, namespaces[number % 5], "icdun"[number % 5]) for number in range(1, 101)]


@pytest.fixture
def root(tmp_path: Path, entries: list[bytes]) -> Path:
    archive(tmp_path, [entries[:30], entries[30:31], entries[31:]])
    return tmp_path


def given(source: ArchiveSource, after: ClusterTime, until: ClusterTime, query: object = None) -> list[bytes]:
    oplog_filter = None if query is None else bson.encode(query)  # type: ignore[arg-type]
    return [one for batch in source.read(after, until, oplog_filter=oplog_filter) for one in raw_bson.split(batch.raw)]


def test_every_range_gives_its_entries(root: Path, entries: list[bytes]) -> None:
    source = ArchiveSource(root)
    assert source.newest() == time_of(100)
    for first, last in [(0, 100), (0, 30), (29, 31), (30, 31), (31, 32), (50, 50), (99, 100), (12, 77)]:
        assert given(source, time_of(first), time_of(last)) == entries[first:last]
    assert source.entries([time_of(1), time_of(31), time_of(100), time_of(101), ClusterTime(time_of(5) + 1)]) == [
        entries[0],
        entries[30],
        entries[99],
        None,
        None,
    ]
    keys = [PreImageKey(UUID, time_of(number), 0) for number in (1, 2, 31, 98)]
    assert source.pre_images(keys) == [entries[0], None, entries[30], entries[97]]


def test_a_filter_leaves_out_what_cannot_pass_and_nothing_else(root: Path, entries: list[bytes]) -> None:
    source = ArchiveSource(root)
    every = (time_of(0), time_of(100))
    commands = [one for one in entries if bson.decode(one)["op"] == "d"]
    assert given(source, *every, {"op": "d"}) == commands
    some = given(source, *every, {"$or": [{"ns": {"$in": ["shop.c", "shop.d"]}}, {"ns": {"$regex": "^admin"}, "x": 1}]})
    assert some == [one for one in entries if bson.decode(one)["ns"] in ("shop.c", "shop.d", "admin.$cmd")]
    assert given(source, *every, {"o._id": 5}) == entries
    assert given(source, *every, {"ns": {"$not": {"$eq": "shop.c"}}}) == entries


@pytest.mark.parametrize(
    "query",
    [{"ns": {"$regex": "(?<x", "$options": ""}}, {"o.when": 5, "ns": {"$exists": True}}, {"$nor": [{"op": "i"}]}],
    ids=str,
)
def test_what_cannot_be_judged_may_pass(query: dict[str, object]) -> None:
    passes = passing(bson.encode(query))
    assert passes is None or passes("i", "shop.c")


def test_a_filter_with_values_that_python_lacks_leaves_out_nothing() -> None:
    """Found by the random workloads: a date in the year 292,278,994."""
    query = bson.encode({"o.when": 1})
    date = query.replace(b"\x10o.when\0\x01\0\0\0", b"\x09o.when\0\xff\xff\xff\xff\xff\xff\xff\x7f")
    date = len(date).to_bytes(4, "little") + date[4:]
    passes = passing(date)
    assert passes is None or passes("i", "shop.c")


def test_columns_are_the_same_with_and_without_compiled_code(
    entries: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b"".join(entries)
    compiled = columns.record_batch(raw)
    monkeypatch.setattr(kernel, "available", lambda: False)
    assert columns.record_batch(raw).equals(compiled)
    assert compiled.column("namespace").to_pylist() == [bson.decode(one)["ns"] for one in entries]
    assert columns.raw_entries(compiled.column("entry").slice(3, 5)) == b"".join(entries[3:8])
    assert columns.record_batch(b"").num_rows == 0


@pytest.mark.parametrize(
    "document",
    [{"op": "i", "ns": "a.b"}, {"ts": Timestamp(1, 1), "ns": "a.b"}, {"ts": Timestamp(1, 1), "op": 1, "ns": "a.b"}],
    ids=str,
)
def test_what_is_no_entry_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(OplogFormatError):
        columns.record_batch(bson.encode(document))


def test_a_whole_archive_is_said_to_be_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = verify(root)
    assert (report.faults, report.entries, report.segments, report.images) == ([], 100, 3, 40)
    assert main(["archive", "verify", str(root)]) == 0
    assert "100 entries, 40 pre-images in 3 segments" in capsys.readouterr().out
    assert main(["archive", "status", str(root)]) == 0


def middle(root: Path) -> ArchiveSegment:
    return listed(oplog_folder(root, "rs0"))[1]


def test_a_missing_segment_is_a_hole_with_its_ends(root: Path) -> None:
    middle(root).path.unlink()
    with pytest.raises(SourceError, match="hole") as caught:
        ArchiveSource(root)
    assert str(time_of(30)) in str(caught.value)
    assert str(time_of(31)) in str(caught.value)
    assert main(["archive", "verify", str(root)]) == 1


def test_the_last_segment_missing_is_noticed(root: Path) -> None:
    listed(oplog_folder(root, "rs0"))[-1].path.unlink()
    with pytest.raises(SourceError, match="hole"):
        segments(oplog_folder(root, "rs0"))


@pytest.mark.parametrize("size", [0, 3, 100, -1, -9])
def test_a_segment_cut_short_is_named(root: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = middle(root).path
    whole = path.read_bytes()
    path.write_bytes(whole[: size if size >= 0 else len(whole) + size])
    source = ArchiveSource(root)
    with pytest.raises(SourceError, match=path.name):
        given(source, time_of(0), time_of(100))
    assert main(["archive", "verify", str(root)]) == 1
    assert path.name in capsys.readouterr().out


def test_a_changed_byte_is_found(root: Path) -> None:
    path = listed(oplog_folder(root, "rs0"))[0].path
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    (report,) = verify(root)
    assert path.name in report.faults[0]
    assert status(root)[0].faults == []


def test_missing_pre_images_are_named(root: Path) -> None:
    middle(root).images_path.unlink()
    assert "pre-images" in verify(root)[0].faults[0]


def test_a_start_before_the_archive_is_history_lost(root: Path) -> None:
    with pytest.raises(ChangeStreamHistoryLost):
        given(ArchiveSource(root), ClusterTime(time_of(0) - 1), time_of(5))


def test_an_archive_that_is_being_begun_is_not_taken_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that looked while its recorder wrote the first record was refused, and a recorder that was killed at that
    moment left a directory that nobody could use any more."""
    seen = []

    def killed(_: int) -> None:
        seen.append(describe(tmp_path))
        raise KeyboardInterrupt

    record = Description("rs0", (VersionNote("6.0.27"),), {}).document()
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_record(tmp_path / DESCRIPTION, record)
    assert seen == [None]
    assert any(tmp_path.iterdir()), "as a kill leaves it"
    assert describe(tmp_path) is None


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is not an archive"):
        describe(tmp_path)
    with pytest.raises(UsageError, match="there is no archive"):
        ArchiveSource(tmp_path / "nowhere")
    write_record(tmp_path / DESCRIPTION, {"format": "tailrace-archive", "version": 99})
    with pytest.raises(UsageError, match="version"):
        describe(tmp_path)
    (tmp_path / DESCRIPTION).write_text("{")
    with pytest.raises(SourceError):
        describe(tmp_path)
    assert describe(tmp_path / "new") is None


def test_a_clusters_description_comes_back(tmp_path: Path) -> None:
    shards = {"a": Membership(ClusterTime(0)), "b": Membership(time_of(1), time_of(2))}
    write_record(tmp_path / DESCRIPTION, Description(None, (VersionNote("6.0.27"),), shards).document())
    found = describe(tmp_path)
    assert found is not None
    assert found.shards == shards
    assert found.oplogs == ("a", "b", "config.shards")
    with pytest.raises(UsageError, match="cluster"):
        ArchiveSource(tmp_path)


def test_retention_takes_the_oldest_and_leaves_an_archive_without_a_hole(root: Path, entries: list[bytes]) -> None:
    folder = oplog_folder(root, "rs0")
    found = listed(folder)
    assert Retention().expired(found, 1e12) == []
    assert Retention(seconds=60).expired(found, 1e12) == found[:2]
    assert Retention(seconds=1031.0 - 1030).expired(found, 1032.0) == found[:1]
    assert Retention(bytes=1).expired(found, 0) == found[:2]
    # Cut off between the head and the deletion.
    write_record(folder / HEAD, Reach(found[0].until, found[-1].until).document())
    source = ArchiveSource(root)
    assert given(source, time_of(30), time_of(100)) == entries[30:]
    (folder / ".left.unfinished").write_bytes(b"x")
    remove_before(folder)
    assert len(listed(folder)) == 2
    assert not list(folder.glob(".*.unfinished"))
    assert verify(root)[0].faults == []


def test_what_was_not_published_leaves_nothing(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, time_of(0)) as writer:
        writer.add(entry(1))
    assert list(tmp_path.iterdir()) == []


def test_row_groups_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.read.archive.segment.ROW_GROUP_BYTES", 1)
    many = [entry(number) for number in range(1, 11)]
    folder = oplog_folder(tmp_path, "rs0")
    write_record(tmp_path / DESCRIPTION, Description("rs0", (VersionNote("6.0.27"),), {}).document())
    folder.mkdir()
    with SegmentWriter(folder, time_of(0)) as writer:
        for one in many:
            writer.add(one)
        segment = writer.publish(time_of(10))
    reader = SegmentReader(segment)
    assert reader.row_groups == 10
    batches = list(reader.batches(time_of(0), time_of(10)))
    assert [batch.raw for batch in batches] == many
    assert all(before.high_water < after.high_water for before, after in pairwise(batches))
    assert np.array_equal(reader.times(3), [time_of(4)])


def test_the_parquet_files_are_read_by_others(root: Path, entries: list[bytes]) -> None:
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql(
        f"SELECT operation, count(*) FROM '{root}/rs0/*-????????????????.parquet' GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert found == [("c", 20), ("d", 20), ("i", 20), ("n", 20), ("u", 20)]
    copied = root.parent / "copy"
    shutil.copytree(root, copied)
    assert given(ArchiveSource(copied), time_of(0), time_of(100)) == entries


def test_a_head_says_again_what_entries_have_set_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    reach = Reach(
        time_of(1), time_of(9), "d1", "set", "", (SettingRead("5.0", time_of(3)), SettingRead("6.0", time_of(7)))
    )
    write_record(tmp_path / HEAD, reach.document())
    assert head(tmp_path) == reach
    for damaged in ("6.0", [{"version": "6.0"}], [{"version": "6.0", "since": "soon"}], 5):
        write_record(tmp_path / HEAD, {**reach.document(), "compatibility": damaged})
        with pytest.raises(SourceError, match="is damaged"):
            head(tmp_path)
