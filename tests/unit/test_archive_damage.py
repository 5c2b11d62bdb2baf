"""An archive in which something was altered, lost or moved gives what it held, or says what is wrong.

Earlier tests damaged an archive in only three places, all of them in a length or in the middle of a page. A flipped bit
in a page of uncompressed values was read as other events, and one in a footer could end the process.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.binary import Binary
from bson.timestamp import Timestamp

from tailrace.base.durable import write_json
from tailrace.cli.main import main
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, Witness
from tailrace.core.plan.request import PreImageKey
from tailrace.errors import OtherHistoryError, SourceError, UsageError
from tailrace.lake.tables.as_of import _check_archive
from tailrace.read.archive import columns, segment
from tailrace.read.archive.layout import DESCRIPTION, HEAD, Description, Membership, Reach, VersionNote, listed
from tailrace.read.archive.record import read_record, write_record
from tailrace.read.archive.segment import ImagesWriter, SegmentWriter
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.archive.verification import status, verify
from tailrace.read.archive.writer import OplogWriter
from tests.amounts import amount

UUID = bytes(range(16))
SET = "0123456789abcdef01234567"


def at(number: int) -> ClusterTime:
    return ClusterTime.of(1000 + number, 1)


def entries_of(first: int, last: int, namespace: str = "shop.c") -> list[bytes]:
    return [
        bson.encode(
            {
                "op": "iud"[number % 3],
                "ns": namespace,
                "ui": Binary(UUID, 4),
                "o": {"_id": number, "name": f"name of {number * 7919 % 1000}"},
                "ts": Timestamp(1000 + number, 1),
            }
        )
        for number in range(first, last + 1)
    ]


def image(number: int) -> bytes:
    return bson.encode({"_id": number, "before": True})


def write_segments(folder: Path, bounds: list[int], reach: Reach | None = None, namespace: str = "shop.c") -> None:
    """Segments with the entries after each number up to the next one."""
    folder.mkdir(parents=True, exist_ok=True)
    previous = ""
    for first, last in pairwise(bounds):
        with SegmentWriter(folder, at(first)) as writer, ImagesWriter(folder, at(first)) as images:
            writer.add(b"".join(entries_of(first + 1, last, namespace)))
            keys = [number for number in range(first + 1, last + 1) if number % 3]
            images.add([(PreImageKey(UUID, at(number), 0), image(number)) for number in keys])
            images.publish(folder / f"{at(first):016x}-{at(last):016x}.images.parquet")
            previous = writer.publish(at(last), images, previous).digest
    known = reach or Reach(at(0), at(0), replica_set=SET)
    written = Reach(at(bounds[0]), at(bounds[-1]), previous, known.replica_set, known.cluster)
    write_record(folder / HEAD, written.document())


def archive_of(root: Path, bounds: list[int], set_id: str = SET) -> Path:
    root.mkdir(exist_ok=True)
    identity = DeploymentIdentity({"rs0": set_id})
    write_record(root / DESCRIPTION, Description("rs0", (VersionNote("6.0.27"),), {}, identity=identity).document())
    write_segments(root / "rs0", bounds, Reach(at(0), at(0), replica_set=set_id))
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return archive_of(tmp_path / "archive", [0, 40, 60, 61, 120])


def content(root: Path, oplog: str | None = None) -> tuple[list[bytes], list[bytes | None]]:
    """All entries, each also looked up by its time, and all pre-images."""
    source = ArchiveSource(root, oplog)
    until = source.newest()
    got = [one for batch in source.read(source.start, until) for one in raw_bson.split(batch.raw)]
    times = [at(number) for number in range(1, 121, 13)]
    asked = source.entries(times)
    assert asked == [got[time.seconds - 1001] for time in times]
    images = source.pre_images([PreImageKey(UUID, at(number), 0) for number in range(1, 121)])
    return got, images


WHOLE = (entries_of(1, 120), [image(number) if number % 3 else None for number in range(1, 121)])


def refused(root: Path) -> bool:
    """Whether a reader is told about the damage; if not, it must read what was archived."""
    try:
        found = content(root)
    except (SourceError, UsageError):
        return True
    assert found == WHOLE
    return False


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_a_whole_archive_gives_what_it_holds(root: Path) -> None:
    assert not refused(root)
    assert [report.faults for report in verify(root)] == [[]]


def test_an_archive_with_any_bit_flipped_gives_the_same_or_says_so(root: Path) -> None:
    """In the files that hold entries and pre-images every bit counts."""
    bits = [(path, bit) for path in files(root) for bit in range(path.stat().st_size * 8)]
    chosen = random.Random(30).sample(bits, amount(150, len(bits)))
    taken = 0
    for path, bit in chosen:
        whole = path.read_bytes()
        altered = bytearray(whole)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        told = refused(root)
        assert told or path.suffix == ".json", (path, bit)
        taken += not told
        path.write_bytes(whole)
    assert taken < len(chosen) // 100


def test_a_file_cut_short_at_any_byte_is_told(root: Path) -> None:
    for path in files(root):
        whole = path.read_bytes()
        for size in random.Random(31).sample(range(len(whole)), amount(4, 200)):
            path.write_bytes(whole[:size])
            assert refused(root) or (path.suffix == ".json" and size == len(whole) - 1), (path, size)
        path.write_bytes(whole)
    segment = next(path for path in files(root) if path.suffix == ".parquet")
    segment.write_bytes(segment.read_bytes()[:-9])
    with pytest.raises(SourceError, match=rf"the archive's file .*{segment.name} is damaged or cannot be read"):
        content(root)


def test_a_file_that_is_lost_is_told(root: Path) -> None:
    """Lost pre-images were given as missing ones, and a lost head let the next writer delete every segment."""
    for path in files(root):
        aside = path.rename(path.with_suffix(".aside"))
        assert refused(root), path
        assert main(["archive", "verify", str(root)]) == 1
        assert main(["archive", "status", str(root)]) == 1, path
        aside.rename(path)


def test_what_is_lost_or_in_another_place_is_said_of_each_segment(root: Path, tmp_path: Path) -> None:
    """Another test checks only that each file is refused; this one checks the message about a segment."""
    other = tmp_path / "other"
    write_segments(other / "rs0", [0, 40, 60, 61, 120], namespace="shop.d")
    first, second, *_ = (segment.path for segment in listed(root / "rs0"))
    aside = second.rename(tmp_path / "aside")
    with pytest.raises(SourceError, match="has a hole: the entries after"):
        content(root)
    aside.rename(second)
    held = [first.read_bytes(), second.read_bytes()]
    first.write_bytes(held[1])
    second.write_bytes(held[0])
    with pytest.raises(SourceError, match="it is not what was written"):
        content(root)
    first.write_bytes(held[0])
    second.unlink()
    shutil.copy(next(one.path for one in listed(other / "rs0") if one.after == at(40)), second.parent)
    with pytest.raises(SourceError, match="it was not written after the segment before it"):
        content(root)


def test_a_writer_deletes_nothing_where_the_head_is_lost(root: Path) -> None:
    (root / "rs0" / HEAD).unlink()
    before = files(root)
    writer = OplogWriter(None, root / "rs0", images=False)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"head.json is missing, and there are segments"):
        writer._position()
    assert files(root) == before


def test_two_files_that_changed_places_are_told(root: Path) -> None:
    for one, other in combinations(files(root), 2):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        assert refused(root), (one, other)
        one.write_bytes(first)
        other.write_bytes(second)


def test_a_file_of_another_archive_in_the_place_of_one_is_told(root: Path, tmp_path: Path) -> None:
    """Another history of the same set, with the same times: its files are whole."""
    other = tmp_path / "other"
    write_segments(other / "rs0", [0, 40, 60, 61, 120], namespace="shop.d")
    write_record(other / DESCRIPTION, Description("rs0", (VersionNote("6.0.27"),), {}).document())
    assert [report.faults for report in verify(other)] == [[]]
    for mine, its in zip(listed(root / "rs0"), listed(other / "rs0"), strict=True):
        mine.path.rename(tmp_path / "aside")
        taken = shutil.copy(its.path, mine.path.parent)
        assert refused(root)
        assert main(["archive", "status", str(root)]) == 1
        Path(taken).unlink()
        (tmp_path / "aside").rename(mine.path)
    shutil.copy(other / "rs0" / HEAD, root / "rs0" / HEAD)
    assert refused(root)


def test_a_folder_of_another_archive_is_told(root: Path, tmp_path: Path) -> None:
    other = archive_of(tmp_path / "other", [0, 120], "ffffffffffffffffffffffff")
    shutil.rmtree(root / "rs0")
    shutil.copytree(other / "rs0", root / "rs0")
    with pytest.raises(SourceError, match="is a part of another archive: the id of the replica set rs0 was 0123"):
        content(root)
    assert "part of another archive" in status(root)[0].faults[0]


def test_a_shards_folder_in_the_place_of_another_is_told(tmp_path: Path) -> None:
    shards = {"a": Membership(ClusterTime(0)), "b": Membership(ClusterTime(0))}
    write_record(tmp_path / DESCRIPTION, Description(None, (VersionNote("6.0.27"),), shards).document())
    write_segments(tmp_path / "a", [0, 120])
    write_segments(tmp_path / "b", [0, 120], namespace="shop.d")
    assert content(tmp_path, "a") == WHOLE
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "c").rename(tmp_path / "b")
    with pytest.raises(SourceError, match="it is a segment of the oplog b"):
        content(tmp_path, "a")
    assert [len(report.faults) for report in status(tmp_path)] == [1, 1, 0]


def test_two_copies_of_an_archive_that_both_went_on_are_read_together(root: Path, tmp_path: Path) -> None:
    """Both hold the same oplog: a union of their files is no damage."""
    other = archive_of(tmp_path / "other", [0, 40, 60, 80, 120])
    for path in files(other / "rs0"):
        if path.name != HEAD and not (root / "rs0" / path.name).exists():
            shutil.copy(path, root / "rs0")
    assert not refused(root)


def test_an_older_copy_of_the_head_hides_nothing(root: Path, tmp_path: Path) -> None:
    """A writer that is killed between a segment and the head leaves just this."""
    older = archive_of(tmp_path / "older", [0, 40, 60])
    shutil.copy(older / "rs0" / HEAD, root / "rs0" / HEAD)
    assert not refused(root)


# -- what verify compares --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["operation", "namespace", "time"])
def test_verify_compares_what_stands_beside_the_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A writer's own mistake: the checksums are right, but a stream's filter would leave out entries."""

    def wrong(raw: bytes) -> pa.RecordBatch:
        batch = columns.record_batch(raw)
        values: list[Any] = batch.column(name).to_pylist()
        values[3] = values[3] if name == "time" else "n"
        values[3] = values[4] if name == "time" else values[3]
        place = batch.schema.get_field_index(name)
        return batch.set_column(place, batch.schema.field(name), pa.array(values, batch.schema.field(name).type))

    monkeypatch.setattr(segment, "record_batch", wrong)
    archive_of(tmp_path / "archive", [0, 40])
    (report,) = verify(tmp_path / "archive")
    assert report.faults == [
        f"{listed(tmp_path / 'archive' / 'rs0')[0].path}: row group 0: the column {name} does not fit the entries"
    ]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (PreImageKey(UUID, ClusterTime(at(1) + 1), 0), "belongs to no entry of the segment"),
        (PreImageKey(bytes(16), at(1), 0), "belongs to no entry of the segment"),
        (PreImageKey(UUID, at(3), 0), "belongs to no entry of the segment"),  # an insert
        (PreImageKey(UUID, at(1), 0), "is not a document"),
    ],
    ids=str,
)
def test_verify_compares_pre_images_with_the_entries(tmp_path: Path, key: PreImageKey, said: str) -> None:
    root = archive_of(tmp_path / "archive", [0])
    folder = root / "rs0"
    with SegmentWriter(folder, at(0)) as writer, ImagesWriter(folder, at(0)) as images:
        writer.add(b"".join(entries_of(1, 10)))
        images.add([(key, b"\x09\0\0\0\x10\0\0\0\0" if "document" in said else image(1))])
        images.publish(folder / f"{at(0):016x}-{at(10):016x}.images.parquet")
        written = writer.publish(at(10), images)
    write_record(folder / HEAD, Reach(at(0), at(10), written.digest, SET).document())
    (report,) = verify(root)
    assert len(report.faults) == 1
    assert said in report.faults[0]


_opened: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if (event == "open" and isinstance(arguments[2], int) and arguments[2] & 0o3) or event in (
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.chmod",
    ):
        _opened.append(str(arguments[0]))


@pytest.fixture
def written() -> Iterator[list[str]]:
    """What this process opens for writing."""
    if not _hooked:
        sys.addaudithook(_note)  # a deleted one stays for ever
        _hooked.append(True)
    _opened.clear()
    yield _opened
    _opened.clear()


_hooked: list[bool] = []


def test_verify_and_status_write_nothing(root: Path, written: list[str]) -> None:
    assert main(["archive", "verify", str(root)]) == 0
    assert main(["archive", "status", str(root)]) == 0
    assert content(root) == WHOLE
    assert [path for path in written if str(root) in path] == []


def test_the_small_files_are_read_as_written_and_refused_otherwise(tmp_path: Path) -> None:
    """Without its digest too: a changed bit may be one of the digest's name."""
    path = tmp_path / "a.json"
    document = {"after": {"clusterTime": "01"}, "newest": "имя"}
    write_record(path, document)
    assert read_record(path) == document
    text = path.read_text()
    for before, after in (("01", "02"), ("sha256", "sha257")):
        path.write_text(text.replace(before, after))
        with pytest.raises(SourceError, match="it was changed after it was written"):
            read_record(path)
    write_json(path, document)
    with pytest.raises(SourceError, match="it was changed after it was written"):
        read_record(path)
    assert read_record(tmp_path / "none.json") is None
    with pytest.raises(SourceError, match=r"cannot read .*: Is a directory$"):  # which no copy mends
        read_record(tmp_path)


def test_an_archive_without_any_entry_says_so(tmp_path: Path) -> None:
    root = archive_of(tmp_path / "archive", [0])
    assert main(["archive", "verify", str(root)]) == 0
    with pytest.raises(SourceError, match="holds no entry of rs0 yet"):
        ArchiveSource(root).newest()


def test_tables_are_not_led_on_by_another_deployments_archive(root: Path) -> None:
    sources = {"rs0": ArchiveSource(root)}
    _check_archive(root, sources, Witness(DeploymentIdentity({"rs0": SET})))
    with pytest.raises(OtherHistoryError, match=r"is not of the tables' deployment: the id of the replica set"):
        _check_archive(root, sources, Witness(DeploymentIdentity({"rs0": "f" * 24})))
