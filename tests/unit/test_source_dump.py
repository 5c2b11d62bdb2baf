"""Dumps: sound entries are given, and damage is reported with its position, whatever byte it is."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.errors import ChangeStreamHistoryLost, OplogFormatError, SourceError, TailraceError
from tailrace.read.source.dump import DumpSource


def entry(seconds: int, increment: int = 1, **fields: Any) -> bytes:
    return bson.encode(
        {
            "op": "i",
            "ns": "shop.orders",
            "o": {"_id": seconds, "nested": {"list": [1, "two", {"three": 3.0}], "flag": True}},
            "ts": Timestamp(seconds, increment),
            "v": 2,
        }
        | fields
    )


def write(path: Path, entries: list[bytes]) -> Path:
    path.write_bytes(b"".join(entries))
    return path


def drain(batches: Iterator[OplogBatch]) -> tuple[list[bytes], TailraceError | None]:
    """The entries given, and the error that ended it."""
    got: list[bytes] = []
    try:
        for batch in batches:
            got += raw_bson.split(batch.raw)
    except TailraceError as error:
        return got, error
    return got, None


ENTRIES = [entry(100 + number) for number in range(6)]


@pytest.mark.parametrize("form", ["plain", "gzip", "gzip in two members", "directory", "directory of local"])
def test_every_form_of_a_dump_gives_the_same_entries(form: str, tmp_path: Path) -> None:
    data = b"".join(ENTRIES)
    path = tmp_path / "oplog.bson"
    if form == "plain":
        path.write_bytes(data)
    elif form == "gzip":
        path = tmp_path / "oplog.bson.gz"
        path.write_bytes(gzip.compress(data))
    elif form == "gzip in two members":
        path.write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]))
    elif form == "directory":
        path.write_bytes(data)
        path = tmp_path
    else:
        (tmp_path / "local").mkdir()
        (tmp_path / "local" / "oplog.rs.bson.gz").write_bytes(gzip.compress(data))
        path = tmp_path
    source = DumpSource(path)
    assert drain(source.tail(ClusterTime.of(100, 0))) == (ENTRIES, None)
    assert drain(source.read(ClusterTime.of(100, 0), ClusterTime.of(105, 1))) == (ENTRIES, None)
    assert source.oldest() == (ClusterTime.of(100, 1), False)
    assert source.newest() == ClusterTime.of(105, 1)
    assert source.name == str(path)


def test_a_range_leaves_out_its_start_and_ends_with_its_bound(tmp_path: Path) -> None:
    source = DumpSource(write(tmp_path / "oplog.bson", ENTRIES))
    batches = list(source.read(ClusterTime.of(101, 1), ClusterTime.of(103, 5), batch_bytes_max=1))
    assert [batch.raw for batch in batches] == [ENTRIES[2], ENTRIES[3], b""]
    assert [batch.high_water.seconds for batch in batches] == [102, 103, 103]
    assert batches[-1].high_water == ClusterTime.of(103, 5)
    assert list(source.read(ClusterTime.of(200, 0), ClusterTime.of(201, 0))) == [
        OplogBatch(b"", ClusterTime.of(201, 0))
    ]


def test_history_before_the_dump_is_lost_unless_the_dump_begins_with_the_replica_set(tmp_path: Path) -> None:
    part = DumpSource(write(tmp_path / "part.bson", ENTRIES))
    with pytest.raises(ChangeStreamHistoryLost, match="begins at"):
        next(part.tail(ClusterTime.of(99, 0)))
    begin = entry(50, op="n", ns="", o={"msg": "initiating set"})
    whole = DumpSource(write(tmp_path / "whole.bson", [begin, *ENTRIES]))
    assert whole.oldest() == (ClusterTime.of(50, 1), True)
    assert drain(whole.tail(ZERO)) == ([begin, *ENTRIES], None)


@pytest.mark.long
def test_any_damaged_byte_is_told_after_everything_before_it(tmp_path: Path) -> None:
    data = b"".join(ENTRIES[:4])
    size = len(ENTRIES[0])
    path = tmp_path / "oplog.bson"
    noticed = 0
    for position, damage in ((place, kind) for place in range(len(data)) for kind in (0x00, 0xFF, 0x01, 0x80)):
        hurt = bytearray(data)
        hurt[position] = damage if hurt[position] != damage else 0x55
        path.write_bytes(hurt)
        number = position // size
        source = DumpSource(path)
        try:
            got, error = drain(source.tail(ClusterTime.of(100, 0)))
        except TailraceError as raised:
            got, error = [], raised
        whole = [entry for entry in got if entry in ENTRIES]
        if error is None:
            # A changed value that is still a value: it is passed on as it is.
            assert len(got) in (3, 4), position
            assert b"".join(got) in (bytes(hurt), bytes(hurt[size:])), position
            continue
        noticed += 1
        if number == 0 and not isinstance(error, OplogFormatError):
            assert isinstance(error, (SourceError, ChangeStreamHistoryLost)), position
            continue
        assert isinstance(error, OplogFormatError), (position, error)
        assert whole[:number] == ENTRIES[:number], position
        # out of order shows at the damaged entry, or at the next one
        assert error.position in (f"byte {number * size}", f"byte {(number + 1) * size}"), (position, error)
    assert noticed > len(data)


def test_a_file_cut_anywhere_gives_its_whole_entries_and_then_the_position(tmp_path: Path) -> None:
    data = b"".join(ENTRIES[:3])
    size = len(ENTRIES[0])
    for length in range(1, len(data) + 1):
        path = tmp_path / "oplog.bson"
        path.write_bytes(data[:length])
        source = DumpSource(path)
        if length < size:
            with pytest.raises(OplogFormatError, match="At byte 0"):
                source.oldest()
            continue
        got, error = drain(source.tail(ClusterTime.of(100, 0)))
        assert got == ENTRIES[: length // size]
        assert source.newest() == ClusterTime.of(99 + length // size, 1)
        if length % size == 0:
            assert error is None
        else:
            assert isinstance(error, OplogFormatError)
            assert error.position == f"byte {length // size * size}"


def test_a_gzip_file_cut_or_damaged_anywhere_gives_what_can_be_unpacked(tmp_path: Path) -> None:
    data = b"".join(entry(100 + number, pad=random.Random(number).randbytes(30)) for number in range(20))
    packed = gzip.compress(data, mtime=0)
    originals = list(raw_bson.split(data))
    path = tmp_path / "oplog.bson.gz"
    for position in range(20, len(packed), 7):
        for hurt in (packed[:position], packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :]):
            path.write_bytes(hurt)
            try:
                got, error = drain(DumpSource(path).tail(ClusterTime.of(100, 0)))
            except TailraceError as raised:
                got, error = [], raised
            assert error is not None, position
            # A damaged deflate stream may unpack to other bytes before it is noticed, but what precedes is ours.
            same = next((index for index, entry in enumerate(got) if entry != originals[index]), len(got))
            assert same >= _entries_before(packed, position, originals), position


def _entries_before(packed: bytes, position: int, originals: list[bytes]) -> int:
    unpacked = len(zlib.decompressobj(31).decompress(packed[:position]))
    count = 0
    for original in originals:
        unpacked -= len(original)
        if unpacked < 0:
            break
        count += 1
    return count


def test_entries_out_of_order_are_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "oplog.bson", [ENTRIES[0], ENTRIES[2], ENTRIES[1]])
    got, error = drain(DumpSource(path).tail(ClusterTime.of(100, 0)))
    assert got == [ENTRIES[0], ENTRIES[2]]
    assert isinstance(error, OplogFormatError)
    assert "out of order" in str(error)
    assert error.position == f"byte {2 * len(ENTRIES[0])}"
    twice = write(tmp_path / "twice.bson", [ENTRIES[0], ENTRIES[0]])
    assert isinstance(drain(DumpSource(twice).tail(ClusterTime.of(100, 0)))[1], OplogFormatError)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no oplog entries"),
        (b"{'op': 'i', 'ns': 'shop.orders'}\n" * 10, "not a BSON file"),
        (b"PAR1" + bytes(100), "not a BSON file"),
        (b"\x6d\xe2\x99\x81" + bytes(100), "mongodump archive"),
        (bson.encode({"_id": 1, "name": "a collection's document"}), "no oplog entries"),
        (b"\x1f\x8b\x08garbage", "gzip data are damaged"),
    ],
)
def test_a_file_that_is_no_oplog_dump_is_named_as_what_it_is(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "oplog.bson"
    path.write_bytes(content)
    with pytest.raises(TailraceError, match=says) as caught:
        DumpSource(path).oldest()
    assert str(path) in str(caught.value)


def test_a_path_that_cannot_be_read_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        DumpSource(tmp_path / "absent.bson")
    with pytest.raises(SourceError, match="holds no oplog dump"):
        DumpSource(tmp_path)
    gone = write(tmp_path / "oplog.bson", ENTRIES)
    source = DumpSource(gone)
    gone.unlink()
    with pytest.raises(SourceError, match="No such file"):
        source.oldest()


def test_single_entries_are_found_again_by_their_times(tmp_path: Path) -> None:
    entries = [entry(100 + number, pad="x" * 5000) for number in range(1000)]
    source = DumpSource(write(tmp_path / "oplog.bson", entries))
    times = [ClusterTime.of(100 + number, 1) for number in (700, 3, 999, 700)]
    expected = [entries[700], entries[3], entries[999], entries[700]]
    assert source.entries(times) == expected
    assert drain(source.tail(ClusterTime.of(1050, 1)))[0] == entries[951:]
    assert source.entries([*times, ClusterTime.of(500, 2)]) == [*expected, None]


def test_pre_images_come_from_the_dump_beside_the_oplog(tmp_path: Path) -> None:
    source = DumpSource(write(tmp_path / "oplog.bson", ENTRIES))
    uuid = bytes(range(16))
    keys = [PreImageKey(uuid, ClusterTime.of(100 + number, 1), 0) for number in range(5)]
    assert source.pre_images(keys) == [None] * 5
    (tmp_path / "config").mkdir()
    images = [
        bson.encode(
            {
                "_id": {
                    "nsUUID": bson.Binary(uuid, 4),
                    "ts": Timestamp(100 + number, 1),
                    "applyOpsIndex": bson.Int64(0),
                },
                "operationTime": bson.datetime_ms.DatetimeMS(0),
                "preImage": {"_id": number},
            }
        )
        for number in range(4)
    ]
    write(tmp_path / "config" / "system.preimages.bson", images)
    found = DumpSource(tmp_path).pre_images([keys[3], keys[0], keys[4], keys[3]])
    assert [image and bson.decode(image) for image in found] == [{"_id": 3}, {"_id": 0}, None, {"_id": 3}]


def test_a_dump_knows_no_current_documents(tmp_path: Path) -> None:
    source = DumpSource(write(tmp_path / "oplog.bson", ENTRIES))
    lookup = DocumentLookup("shop", "orders", bson.encode({"_id": 1}), ClusterTime.of(100, 1), None)
    assert source.documents([lookup, lookup]) == [None, None]


def test_the_structure_check_agrees_with_the_codec_on_damaged_documents() -> None:
    """Whatever the codec refuses because of lengths, the check refuses too."""
    whole = bson.encode({"a": [1, {"b": "text", "c": b"bytes"}], "d": {"e": {}}, "f": bson.Regex("x", "i"), "g": 1.5})
    raw_bson.check_structure(whole)
    disagreed = []
    for position in range(len(whole)):
        for value in (0, 1, 2, 3, 5, 0x7E, 0xFF):
            hurt = whole[:position] + bytes([value]) + whole[position + 1 :]
            try:
                raw_bson.check_structure(hurt)
            except OplogFormatError:
                continue
            try:
                bson.decode(hurt)
            except bson.errors.InvalidBSON as error:
                disagreed.append((position, value, str(error)))
    # A boolean that is neither 0 nor 1, text that is not UTF-8, and binary data of subtype 2 without its inner length
    # are values, however odd: no length of the document is wrong.
    subtype = whole.index(b"\x05\x00\x00\x00\x00bytes") + 4
    disagreed = [each for each in disagreed if each[:2] != (subtype, 2)]
    assert [each for each in disagreed if "utf-8" not in each[2] and "boolean" not in each[2].lower()] == []
