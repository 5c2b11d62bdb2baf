"""Documents that are erased from an archive: nothing of them is left, and everything else is unchanged, killed or
not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.erased import erased_collections, erased_entry, is_same_entry, without_operations
from tailrace.core.oplog.witness import EntryMark
from tailrace.core.plan.request import PreImageKey
from tailrace.read.archive.layout import DESCRIPTION, HEAD, Description, Reach, VersionNote, oplog_folder, segments
from tailrace.read.archive.record import write_record
from tailrace.read.archive.retention import remove_before
from tailrace.read.archive.segment import ImagesWriter, SegmentWriter
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import verify
from tests.traces import traces
from tests.unit.test_archive import time_of

PEOPLE, OTHERS = bytes(range(16)), bytes(range(1, 17))
COPY = "shop.system.resharding.00010203-0405-0607-0809-0a0b0c0d0e0f"
MARKER = b"Anna Musterfrau"
WHO = ("--document", "shop.people", "1")
SECRET = {"_id": 1, "who": MARKER.decode(), "pad": "p" * 40}


def entry(number: int, op: str, where: str, uuid: bytes = PEOPLE, **body: Any) -> bytes:
    head = {"op": op, "ns": where, "ui": Binary(uuid, 4)}
    return bson.encode({**head, **body, "ts": time_of(number).to_timestamp(), "t": 1, "v": 2, "wall": None})


def transaction(number: int, *operations: dict[str, Any], **more: Any) -> bytes:
    inner = [{"ui": Binary(PEOPLE, 4), **one} for one in operations]
    return entry(number, "c", "admin.$cmd", o={"applyOps": inner, **more}, lsid={"id": 1}, txnNumber=1)


def insert(document: dict[str, Any], where: str = "shop.people") -> dict[str, Any]:
    return {"op": "i", "ns": where, "o": document}


def history() -> list[list[bytes]]:
    """Three segments, with all the ways in which an oplog can hold a document, and others beside it."""
    whole = {"op": "i", "ns": "shop.people", "ui": Binary(PEOPLE, 4), "o": SECRET}
    return [
        [
            entry(1, "i", "shop.people", o=SECRET),
            entry(2, "i", "shop.people", o={"_id": 2, "who": "Bertha"}),
            entry(3, "i", "shop.x", OTHERS, o={"_id": 1, "n": 1}),
            transaction(
                4, {"op": "u", "ns": "shop.people", "o2": {"_id": 1.0}, "o": SECRET}, insert({"_id": 1}, "shop.x")
            ),
            entry(5, "n", "shop.people", o=SECRET),
        ],
        [
            entry(6, "n", "", o={"$sessionMigrateInfo": 1}, o2=whole),
            entry(7, "i", COPY, OTHERS, o=SECRET),
            entry(8, "i", "shop.x", OTHERS, o={"_id": 7}),
            transaction(
                9, {"op": "c", "ns": "admin.$cmd", "o": {"applyOps": [{**insert(SECRET), "ui": Binary(PEOPLE, 4)}]}}
            ),
            entry(10, "u", "shop.people", o2={"_id": 1}, o={"$v": 2, "diff": {"u": {"who": MARKER.decode()}}}),
        ],
        [
            entry(11, "d", "shop.people", o={"_id": bson.Int64(1)}),
            entry(12, "u", "shop.people", o2={"_id": 2}, o={"$v": 2, "diff": {"u": {"n": 1}}}),
        ],
    ]


#: Times of pre-images, and the documents.
IMAGES = {
    4: SECRET,
    10: SECRET,
    11: SECRET,
    12: {"_id": 2, "who": "Bertha"},
}


def make(root: Path, parts: list[list[bytes]]) -> Path:
    write_record(root / DESCRIPTION, Description("rs0", (VersionNote("6.0.27"),), {}).document())
    folder = oplog_folder(root, "rs0")
    folder.mkdir()
    start = after = time_of(0)
    previous = ""
    for part in parts:
        until = ClusterTime.from_timestamp(bson.decode(part[-1])["ts"])
        with SegmentWriter(folder, after) as writer, ImagesWriter(folder, after) as images:
            writer.add(b"".join(part))
            images.add([(key_of(n), bson.encode(IMAGES[n])) for n in sorted(IMAGES) if after < time_of(n) <= until])
            images.publish(folder / f"{after:016x}-{until:016x}.images.parquet")
            previous = writer.publish(until, images, previous).digest
        after = until
        write_record(folder / HEAD, Reach(start, until, previous).document())
    return folder


def key_of(number: int) -> PreImageKey:
    return PreImageKey(PEOPLE, time_of(number), 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    make(tmp_path / "archive", history())
    return tmp_path / "archive"


def entries_of(root: Path) -> list[bytes]:
    source = ArchiveSource(root)
    return [one for batch in source.read(source.start, source.newest()) for one in raw_bson.split(batch.raw)]


def erase(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status_ = main(["erase", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    return status_, json.loads(said.out)["stores"][0] if said.out else {"error": said.err}


def assert_erased(root: Path) -> None:
    assert traces(root, MARKER) == []
    before, after = [one for part in history() for one in part], entries_of(root)
    changed = {number for number, (old, new) in enumerate(zip(before, after, strict=True), 1) if old != new}
    assert changed == {1, 4, 5, 6, 7, 9, 10}
    for old, new in zip(before, after, strict=True):
        time = ClusterTime.from_timestamp(bson.decode(old)["ts"])
        assert EntryMark.of(time, new) == EntryMark.of(time, old)
        assert is_same_entry(new, old)
        assert erased_collections(new) == ({"shop.people"} if old != new else set())
    (report,) = verify(root)
    assert (report.faults, report.entries, report.erased, report.images) == ([], 12, 7, 1)
    keys = [key_of(number) for number in IMAGES]
    assert ArchiveSource(root).pre_images(keys) == [None, None, None, bson.encode(IMAGES[12])]


def test_nothing_of_a_document_is_left_but_its_deletes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in (root / "rs0").glob("*.parquet")}
    status_, found = erase(capsys, *WHO, "--archive", root, "--dry-run")
    assert (status_, found["found"], found["erased"]) == (1, {"entries": 7, "stored pre-images": 3}, 0)
    assert {path.name: path.read_bytes() for path in (root / "rs0").glob("*.parquet")} == before
    status_, found = erase(capsys, *WHO, "--archive", root)
    assert (status_, found["found"], found["erased"]) == (0, {"entries": 7, "stored pre-images": 3}, 10)
    assert "1 deletes" in found["kept"][0]
    assert_erased(root)
    [last] = [one for one in segments(root / "rs0") if one.until == time_of(12)]
    assert last.path.name not in before  # its pre-image of the delete has gone
    status_, found = erase(capsys, *WHO, "--archive", root)
    assert (status_, found["found"], found["erased"]) == (0, {}, 0)
    assert_erased(root)


def test_a_segment_with_nothing_of_the_documents_is_not_touched(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_ino for path in (root / "rs0").glob("*.parquet")}
    assert erase(capsys, "--document", "shop.x", "7", "--archive", root)[0] == 1  # it was there when the archive ended
    assert erase(capsys, "--document", "shop.y", "7", "--archive", root)[0] == 0
    assert {path.name: path.stat().st_ino for path in (root / "rs0").glob("*.parquet")} == before


def test_what_was_there_when_the_archive_ended_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status_, found = erase(capsys, "--document", "shop.people", "2", "--archive", root)
    assert (status_, found["erased"]) == (1, 0)
    assert "still there" in found["left"][0]
    assert [len(part) for part in history()] == [5, 5, 2]
    assert entries_of(root) == [one for part in history() for one in part]


@pytest.mark.parametrize(
    ("ends", "status_"),
    [
        ([entry(13, "c", "shop.$cmd", o={"drop": "people"})], 0),
        ([entry(13, "c", "shop.$cmd", o={"dropDatabase": 1})], 0),
        ([entry(13, "c", "shop.$cmd", o={"renameCollection": "shop.people", "to": "shop.old"})], 0),
        ([entry(13, "c", "shop.$cmd", o={"drop": "other"})], 1),
        ([entry(13, "d", "shop.people", o={"_id": 2}, fromMigrate=True)], 1),
        ([entry(13, "d", "shop.people", o={"_id": 2}), transaction(14, insert({"_id": 2}), prepare=True)], 0),
        ([entry(13, "d", "shop.people", o={"_id": 2}), transaction(14, insert({"_id": 2}))], 1),
    ],
)
def test_how_a_document_goes(
    tmp_path: Path, ends: list[bytes], status_: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, [*history(), ends])
    assert erase(capsys, "--document", "shop.people", "2", "--archive", tmp_path)[0] == status_


def test_a_collection_that_was_resharded_is_known_by_its_uuid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``_id`` 1 of another collection of the database is another document."""
    copies = [
        entry(1, "i", COPY, OTHERS, o={"_id": 1, "of": "people"}),
        entry(2, "i", COPY.replace("0001", "0101"), OTHERS, o={"_id": 1, "of": "nobody knows"}),
        entry(3, "i", "shop.x", bytes.fromhex("01010203040506070809" + "0a0b0c0d0e0f"), o={"_id": 9}),
        entry(4, "d", "shop.people", o={"_id": 1}),
    ]
    make(tmp_path, [copies])
    status_, found = erase(capsys, *WHO, "--archive", tmp_path)
    assert (status_, found["found"], found["erased"]) == (1, {"entries": 1, "stored pre-images": 1}, 2)
    assert "resharding" in found["left"][0]
    assert [one == copies[n] for n, one in enumerate(entries_of(tmp_path))] == [False, True, True, True]


def test_a_pre_image_under_another_name_of_the_collection_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a rename the UUID is the same, but by name the document is a different one."""
    parts = [
        [entry(3, "d", "shop.people", o={"_id": 1}), entry(4, "u", "shop.old", o2={"_id": 1}, o={"$v": 2, "diff": {}})]
    ]
    make(tmp_path, [*parts])
    status_, found = erase(capsys, *WHO, "--archive", tmp_path)
    assert (status_, found["found"]) == (0, {})
    assert ArchiveSource(tmp_path).pre_images([key_of(4)]) == [bson.encode(SECRET)]


def steps_of(root: Path) -> list[str]:
    seen: list[str] = []
    durable.observe_steps(seen.append)
    try:
        assert main(["erase", *WHO, "--archive", str(root)]) == 0
    finally:
        durable.observe_steps(None)
    return seen


def ended_at(number: int) -> Callable[[str], None]:
    left = iter(range(number))

    def observe(name: str) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return observe


@pytest.mark.parametrize("unnamed", [False, True])
def test_killed_at_any_step_it_is_whole_and_goes_on(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str], *, unnamed: bool
) -> None:
    """``unnamed``: a writer was killed before the head named the segment that it had published."""
    if unnamed:
        _, named, _ = segments(root / "rs0")
        write_record(root / "rs0" / HEAD, Reach(time_of(0), named.until, named.digest).document())
    count = len(steps_of(shutil.copytree(root, tmp_path / "counted")))
    assert count > 6
    before = [one for part in history() for one in part]
    for number in range(count):
        copy = shutil.copytree(root, tmp_path / f"killed-{number}")
        durable.observe_steps(ended_at(number))
        try:
            assert main(["erase", *WHO, "--archive", str(copy)]) == 130
        finally:
            durable.observe_steps(None)
        assert [is_same_entry(one, old) for one, old in zip(entries_of(copy), before, strict=True)] == [True] * 12
        assert verify(copy)[0].faults == []
        for again in (copy, shutil.copytree(copy, tmp_path / f"goes-on-{number}")):
            if again != copy:
                remove_before(again / "rs0")  # as a writer does that starts next
                assert verify(again)[0].faults == []
                assert segments(again / "rs0")[-1].until == time_of(12)
            assert main(["erase", *WHO, "--archive", str(again)]) == 0, number
            capsys.readouterr()
            assert_erased(again)
            assert len(list((again / "rs0").glob("*.parquet"))) == 3 + 1
        shutil.rmtree(copy)


def test_an_old_segment_that_comes_back_is_erased_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {path.name: path.read_bytes() for path in (root / "rs0").glob("*.parquet")}
    assert erase(capsys, *WHO, "--archive", root)[0] == 0
    for name, content in kept.items():
        if not (root / "rs0" / name).exists():
            (root / "rs0" / name).write_bytes(content)
    assert verify(root)[0].faults == []
    assert erase(capsys, *WHO, "--archive", root)[0] == 0
    assert_erased(root)


def test_a_segment_of_another_archive_does_not_take_the_place_of_one(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own digest matches its name, but it claims to replace another file than the one in the chain."""
    (tmp_path / "other").mkdir()
    different = history()
    different[0][1] = entry(2, "i", "shop.people", o={"_id": 2, "who": "Clara"})
    make(tmp_path / "other", different)
    for one in (root, tmp_path / "other"):
        assert erase(capsys, *WHO, "--archive", one)[0] == 0
    first, second = (segments(one / "rs0")[0].path for one in (root, tmp_path / "other"))
    first.unlink()
    shutil.copy(second, root / "rs0")
    assert "was not written after the segment before it" in verify(root)[0].faults[0]
    with pytest.raises(Exception, match="not written after"):
        entries_of(root)


def test_a_writer_that_runs_is_left_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with durable.locked(root / "rs0" / ".lock", wait=False):
        status_, found = erase(capsys, *WHO, "--archive", root)
    assert (status_, found["erased"]) == (1, 0)
    assert "nothing was erased" in found["left"][0]
    assert traces(root, MARKER)


def test_a_reader_that_has_listed_the_segments_finds_those_in_their_places(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ArchiveSource(root)
    assert source.erased_between(time_of(0), time_of(12)) == set()
    assert erase(capsys, *WHO, "--archive", root)[0] == 0
    read = [one for batch in source.read(source.start, source.newest()) for one in raw_bson.split(batch.raw)]
    assert len(read) == 12
    assert MARKER not in b"".join(read)
    assert ArchiveSource(root).erased_between(time_of(0), time_of(12)) == {"shop.people"}
    assert ArchiveSource(root).erased_between(time_of(10), time_of(12)) == set()


def test_files_that_are_damaged_or_unfinished_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "7 of them erased" not in main_output(capsys, root)
    (root / "rs0" / ".0.1.unfinished").touch()
    status_, found = erase(capsys, *WHO, "--archive", root, "--dry-run")
    assert "were not searched: 1" in found["left"][0]
    assert erase(capsys, *WHO, "--archive", root)[0] == 0  # a writer that was killed has left it
    assert "7 of them erased" in main_output(capsys, root)
    last = sorted((root / "rs0").glob("*.parquet"))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    status_, found = erase(capsys, *WHO, "--archive", root)
    assert (status_, "damaged" in found["left"][0]) == (1, True)


def main_output(capsys: pytest.CaptureFixture[str], root: Path) -> str:
    assert main(["archive", "status", str(root)]) == 0
    return capsys.readouterr().out


def test_a_user_s_field_of_that_name_says_nothing() -> None:
    for op, where in (("i", "shop.people"), ("n", "shop.people"), ("u", "shop.people")):
        raw = entry(1, op, where, o={"_id": 1, "tailraceErased": "0" * 32, "tailraceCollections": ["a.b"]})
        assert erased_collections(raw) == set()
        assert EntryMark.of(time_of(1), raw).digest != "0" * 32


def test_an_entry_that_is_erased_twice_keeps_its_first_digest() -> None:
    raw = transaction(1, insert({"_id": 1}), insert({"_id": 2}), count=2)
    mark = EntryMark.of(time_of(1), raw)
    once = without_operations(raw, ["shop.people"], lambda one: bson.decode(one)["o"].get("_id") == 1)
    twice = without_operations(once, ["shop.others"], lambda one: bson.decode(one)["o"].get("_id") == 2)
    assert EntryMark.of(time_of(1), once) == EntryMark.of(time_of(1), twice) == mark
    assert erased_collections(twice) == {"shop.people", "shop.others"}
    found = bson.decode(twice)
    assert [one["ns"] for one in found["o"]["applyOps"]] == ["config.tailrace_erased"] * 2
    assert found["o"]["count"] == 2
    assert bson.decode(erased_entry(entry(3, "i", "a.b", o={"_id": 1}), ["a.b"])).keys() == {
        "op", "ns", "o", "ts", "t", "v", "wall",
    }  # fmt: skip
