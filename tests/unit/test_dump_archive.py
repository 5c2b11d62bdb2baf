"""``tailrace replay`` of what ``mongodump --oplog --archive`` writes. Such archives were refused, so their owners had
to find out how to make another dump; no test had one. Here they are written according to the published format."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.int64 import Int64

from tailrace.cli.main import main
from tailrace.errors import OplogFormatError, SourceError, TailraceError
from tailrace.read.source.dump_archive import _Crc64, is_archive, unpack
from tests.unit.test_dump_version import BATCHED, INSERT, MULTI, entry

END = b"\xff\xff\xff\xff"
MAGIC = (0x8199E26D).to_bytes(4, "little")
_POLYNOMIAL = 0xC96C5795D7870F42


def crc64(data: bytes) -> int:
    """ECMA-182, bit by bit."""
    value = (1 << 64) - 1
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ (1 << 64) - 1


def test_the_checksum_is_the_published_one() -> None:
    assert crc64(b"123456789") == 0x995DC9BBDF1939FA


@pytest.mark.long
@pytest.mark.parametrize("size", [0, 1, 3, 4, 65_535, 65_536, 65_537, 200_001])
def test_the_quick_checksum_is_the_plain_one(size: int) -> None:
    data = bytes(number * 7 & 255 for number in range(size))
    for wrong in (0, 1, 1 << 63):
        quick = _Crc64()
        for start in range(0, size, 30_000):
            quick.add(data[start : start + 30_000])
        signed = (crc64(data) ^ wrong) - ((crc64(data) ^ wrong) >> 63 << 64)
        assert quick.equals(signed) is (wrong == 0)


def header(db: str, collection: str, *, eof: bool = False, crc: int = 0) -> bytes:
    signed = Int64(crc - (crc >> 63 << 64))
    return bson.encode({"db": db, "collection": collection, "EOF": eof, "CRC": signed})


def prelude(version: str = "7.0.28", *collections: tuple[str, str], **more: Any) -> bytes:
    about = {
        "concurrent_collections": 4,
        "version": "0.1",
        "server_version": version,
        "tool_version": "100.12.0",
        **more,
    }
    metadata = [
        bson.encode({"db": db, "collection": name, "metadata": "{}", "size": 5, "type": "collection"})
        for db, name in collections
    ]
    return MAGIC + bson.encode(about) + b"".join(metadata) + END


def written(*segments: tuple[str, str, list[dict[str, Any]]], version: str = "7.0.28", **more: Any) -> bytes:
    """An archive with these segments in this order, and the end of each collection after its last one."""
    names = list(dict.fromkeys((db, name) for db, name, _ in segments))
    last = {(db, name): place for place, (db, name, _) in enumerate(segments)}
    whole: dict[tuple[str, str], bytes] = {}
    parts = [prelude(version, *names, **more)]
    for place, (db, name, documents) in enumerate(segments):
        raw = b"".join(map(bson.encode, documents))
        whole[db, name] = whole.get((db, name), b"") + raw
        parts.append(header(db, name) + raw + END)
        if last[db, name] == place:
            parts.append(header(db, name, eof=True, crc=crc64(whole[db, name])) + END)
    return b"".join(parts)


SHOP = ("d", "c", [{"_id": number, "pad": "x" * 90} for number in range(20)])
ODD = ("d", "odd", [{"_id": 1, "EOF": True, "db": "", "collection": "oplog", "CRC": 5}])
WHOLE = written(SHOP, ("", "oplog", [INSERT]), ODD, SHOP, ("", "oplog", [BATCHED]))


def place(folder: Path, data: bytes, *, packed: bool = False) -> Path:
    path = folder / "dump.archive"
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_an_archive_is_replayed_as_its_header_says(
    tmp_path: Path, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place(tmp_path, WHOLE, packed=packed)
    assert is_archive(path)
    assert main(["replay", str(path), "--format", "json"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["operationType"] for line in said.out.splitlines()] == ["insert", "delete", "delete"]
    assert said.err == f"tailrace: the events are those of MongoDB 7.0.28: the header of {path} says so\n"
    assert list(tmp_path.iterdir()) == [path], "what was unpacked is gone"


def test_an_archive_comes_on_standard_input_and_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(WHOLE)))
    assert main(["replay", "-", "d.c", "--format", "json"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert "the header of standard input says so" in said.err
    assert main(["replay", str(place(tmp_path, WHOLE)), "--explain"]) == 0
    assert "MongoDB 7.0.28" in capsys.readouterr().err


def test_the_oplog_of_a_dumped_local_and_pre_images_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deleted = entry(1, op="d", ns="d.c", ui=INSERT["ui"], o={"_id": 1})
    key = {"nsUUID": INSERT["ui"], "ts": deleted["ts"], "applyOpsIndex": Int64(0)}
    image = {"_id": key, "operationTime": deleted["wall"], "preImage": {"_id": 1, "a": 5}}
    data = written(("local", "oplog.rs", [INSERT, deleted]), ("config", "system.preimages", [image]), version="6.0.27")
    command = ["replay", str(place(tmp_path, data)), "--format", "json", "--full-document-before-change", "required"]
    assert main(command) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["fullDocumentBeforeChange"] == {"_id": 1, "a": 5}


@pytest.mark.parametrize(("proof", "said"), [(BATCHED, "6.0.27"), (MULTI, "7.0.28")])
def test_where_the_header_and_an_entry_contradict_nothing_is_replayed(
    tmp_path: Path, proof: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place(tmp_path, written(("", "oplog", [INSERT, proof]), version=said))
    assert main(["replay", str(path), "--format", "json"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"the header of {path} says that the dump is of MongoDB {said}, but" in told.err


CRC = WHOLE.rindex(b"CRC") + 4
LATER_END = WHOLE + header("", "oplog") + bson.encode(INSERT) + END
DAMAGED = [
    (WHOLE[:-1], "it is cut off"),
    (WHOLE[: WHOLE.rindex(b"EOF") - 30], "cut off|ends before its oplog does"),
    (WHOLE[:60], "it is cut off"),
    (WHOLE[:4], "it is cut off"),
    (WHOLE[:CRC] + bytes(8) + WHOLE[CRC + 8 :], "the documents of oplog do not match their checksum"),
    (WHOLE.replace(b"d.c\0", b"d.e\0", 1), "the documents of oplog do not match their checksum"),
    (prelude() + header("", "oplog") + bson.encode(INSERT) + END, "it ends before its oplog does"),
    (prelude() + END, "the beginning of a block is missing"),
    (prelude() + b"\x04\0\0\0", "a document cannot have 4 bytes"),
    (prelude() + header("", "oplog") + b"\x06\0\0\0\x02\0" + END, "damaged: corrupt BSON"),
    (prelude() + b"\x06\0\0\0\x02\0" + END, "the beginning of a block is not a document"),
    (MAGIC + b"\x06\0\0\0\x02\0" + END, "the header is not a document"),
    (MAGIC + END, "the header is missing"),
    (LATER_END, "a collection goes on after its end"),
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("data", "says"), DAMAGED, ids=range(len(DAMAGED)))
def test_of_a_damaged_archive_nothing_is_replayed(
    tmp_path: Path, data: bytes, says: str, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place(tmp_path, data, packed=packed)
    with pytest.raises(OplogFormatError, match=says) as told:
        unpack(path, tmp_path)
    assert str(path) in told.value.message
    assert str(told.value.hint).startswith("At byte ")
    assert main(["replay", str(path), "--format", "json"]) == 1
    assert capsys.readouterr().out == ""


def test_wherever_an_archive_is_cut_it_is_refused(tmp_path: Path) -> None:
    for size in range(4, len(WHOLE), 7):
        path = place(tmp_path, WHOLE[:size])
        with pytest.raises(TailraceError):
            unpack(path, tmp_path)
    path.write_bytes(gzip.compress(WHOLE)[:-9])
    with pytest.raises(OplogFormatError, match="the gzip data are damaged"):
        unpack(path, tmp_path)


def test_what_cannot_be_replayed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceError, match="holds no oplog") as told:
        unpack(place(tmp_path, written(SHOP)), tmp_path)
    assert "--oplog --archive" in str(told.value.hint)
    with pytest.raises(SourceError, match=r"an archive of the format '0\.2'"):
        unpack(place(tmp_path, written(("", "oplog", [INSERT])).replace(b"0.1\0", b"0.2\0")), tmp_path)
    path = place(tmp_path, written(("", "oplog", [INSERT]), version="new"))
    assert main(["replay", str(path)]) == 1
    assert f"the header of {path} does not say a server version that is known" in capsys.readouterr().err
    assert main(["replay", str(path), "--server-version", "7.0", "--format", "json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    path = place(tmp_path, written(("", "oplog", [{"_id": 1}])))
    assert main(["replay", str(path)]) == 1
    assert f"{path} holds BSON documents, but no oplog entries" in capsys.readouterr().err
