"""Which version a dump is replayed as. No test had a dump of 7.0: it was taken for one of 6.0, and a batched delete
gave no event, with exit status 0."""

from __future__ import annotations

import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.cli.main import main
from tailrace.errors import SourceError, UsageError
from tailrace.read.source.dump_version import version_of
from tests.golden import recording

UUID = Binary(bytes(16), 4)
DELETES = [{"op": "d", "ns": "d.c", "ui": UUID, "o": {"_id": number}} for number in (1, 2)]


def entry(number: int, **fields: Any) -> dict[str, Any]:
    times = {"ts": Timestamp(10 + number, 1), "t": Int64(1), "v": Int64(2)}
    return {**fields, **times, "wall": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}


INSERT = entry(0, op="i", ns="d.c", ui=UUID, o={"_id": 1}, o2={"_id": 1})
BATCHED = entry(1, op="c", ns="admin.$cmd", o={"applyOps": DELETES})
COMMAND = entry(1, op="c", ns="admin.$cmd", o={"applyOps": DELETES, "$db": "admin"})
TRANSACTION = entry(1, op="c", ns="admin.$cmd", lsid={"id": UUID}, txnNumber=Int64(1), o={"applyOps": DELETES})
MULTI = entry(2, op="c", ns="admin.$cmd", lsid={"id": UUID}, txnNumber=Int64(1), o={"applyOps": DELETES}, multiOpType=1)
#: An insert of a document that looks like the proof is none.
QUOTED = entry(3, op="i", ns="d.c", ui=UUID, o={"_id": 3, "applyOps": [], "multiOpType": 1}, o2={"_id": 3})


def dump(folder: Path, *entries: dict[str, Any], said: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "oplog.bson").write_bytes(b"".join(map(bson.encode, entries)))
    if said is not None:
        (folder / "prelude.json").write_text(json.dumps({"ServerVersion": said, "ToolVersion": "100.12.0"}))
    return folder


def found(folder: Path) -> tuple[str, str]:
    return version_of(folder / "oplog.bson", folder)


@pytest.mark.parametrize(
    ("entries", "said", "version", "why"),
    [
        ([INSERT, COMMAND, TRANSACTION, QUOTED], None, "6.0", "the dump does not say its server's version"),
        (
            [INSERT, BATCHED],
            None,
            "7.0",
            "the entry at .*11.* is an applyOps of no session and no command, as only 7.0",
        ),
        ([INSERT, MULTI], None, "8.0", r"is an applyOps with multiOpType: 1, as only 8\.0 and later write it"),
        ([INSERT, BATCHED, MULTI], None, "8.0", "multiOpType"),
        ([INSERT], "5.0.4", "5.0.4", r"prelude\.json says so"),
        ([INSERT, COMMAND], "4.4.2", "4.4.2", r"prelude\.json says so"),
        ([INSERT, BATCHED], "7.0.28", "7.0.28", r"prelude\.json says so"),
        ([INSERT, BATCHED], "8.0.12", "8.0.12", r"prelude\.json says so"),
        ([INSERT, MULTI], "8.0.12", "8.0.12", r"prelude\.json says so"),
    ],
)
def test_the_version_and_why(
    tmp_path: Path, entries: list[dict[str, Any]], said: str | None, version: str, why: str
) -> None:
    got = found(dump(tmp_path / "dump", *entries, said=said))
    assert got[0] == version
    with pytest.raises(UsageError, match=why):
        raise UsageError(got[1])


@pytest.mark.parametrize(
    ("said", "proof", "since"),
    [("6.0.27", BATCHED, "7.0"), ("6.0.27", MULTI, "8.0"), ("7.0.28", MULTI, "8.0"), ("7.0.25", MULTI, "8.0")],
)
def test_where_the_prelude_and_an_entry_contradict_nothing_is_replayed(
    tmp_path: Path, said: str, proof: dict[str, Any], since: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prelude of 7.0 was believed without checking the entries: events were printed, and then an error."""
    folder = dump(tmp_path / "dump", INSERT, proof, said=said)
    with pytest.raises(UsageError, match=f"says that the dump is of MongoDB {said}, but .* as only {since} and later"):
        found(folder)
    assert main(["replay", str(folder), "--format", "json"]) == 1
    assert capsys.readouterr().out == ""
    assert main(["replay", str(folder), "--format", "json", "--server-version", "8.0"]) == 0
    told = capsys.readouterr()
    assert (len(told.out.splitlines()), told.err) == (3, "")


def test_replay_gives_the_deletes_of_a_batch_and_says_which_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(dump(tmp_path / "dump", INSERT, BATCHED)), "--format", "json"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["operationType"] for line in said.out.splitlines()] == ["insert", "delete", "delete"]
    assert said.err.startswith("tailrace: the events are those of MongoDB 7.0: the entry at ")
    assert len(said.err.splitlines()) == 1


def test_the_prelude_is_found_packed_and_above_a_dumped_local(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", INSERT)
    (folder / "prelude.json.gz").write_bytes(gzip.compress(b'{"ServerVersion": "5.0.4"}'))
    (folder / "local").mkdir()
    (folder / "oplog.bson").rename(folder / "local" / "oplog.rs.bson")
    assert version_of(folder / "local" / "oplog.rs.bson").version == "5.0.4"
    assert version_of(folder / "local" / "oplog.rs.bson", folder).version == "5.0.4"


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"7.0"', "{}", '{"ServerVersion": "new"}', "\x00\xff"])
def test_a_prelude_that_says_nothing_is_not_passed_over(tmp_path: Path, content: str) -> None:
    folder = dump(tmp_path / "dump", INSERT)
    (folder / "prelude.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(SourceError, match=r"prelude\.json does not say a server version that is known.*--server-vers"):
        found(folder)


def test_damage_does_not_hide_what_came_before_it(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", INSERT, BATCHED)
    with (folder / "oplog.bson").open("ab") as file:
        file.write(b"\x20\x00\x00\x00damage")
    assert found(folder)[0] == "7.0"


@pytest.mark.parametrize("name", [name for name in recording.names() if not name.startswith(("crafted", "broken"))])
def test_no_entry_that_a_server_wrote_is_taken_for_one_of_another_version(tmp_path: Path, name: str) -> None:
    source = recording.load(name)
    path = tmp_path / "oplog.bson"
    path.write_bytes(b"".join(source.oplog))
    version = version_of(path).version
    assert version in ("6.0", "7.0" if source.server.startswith("7.") else "6.0")


SETTING = "featureCompatibilityVersion"


def setting(number: int, **document: str) -> dict[str, Any]:
    return entry(number, op="u", ns="admin.system.version", o={"_id": SETTING, **document}, o2={"_id": SETTING})


@pytest.mark.parametrize("zipped", [False, True])
def test_a_dump_is_replayed_by_the_feature_compatibility_version_that_it_holds(tmp_path: Path, zipped: bool) -> None:
    """The setting was ignored: a dump of 6.0 set to 5.0 gave the events of 6.0."""
    folder = dump(tmp_path / "dump", INSERT, said="6.0.27")
    assert found(folder)[0] == "6.0.27"
    (folder / "admin").mkdir()
    held = b"".join(map(bson.encode, ({"_id": "authSchema", "version": "4.4"}, {"_id": SETTING, "version": "5.0"})))
    if zipped:
        (folder / "admin" / "system.version.bson.gz").write_bytes(gzip.compress(held))
    else:
        (folder / "admin" / "system.version.bson").write_bytes(held)
    assert found(folder) == ("6.0.27-fcv5.0", f"{folder / 'prelude.json'} says so")
    # What its oplog says is later than what was dumped before.
    dump(folder, INSERT, setting(1, version="5.0", targetVersion="6.0"), setting(2, version="6.0"))
    assert found(folder)[0] == "6.0.27"
    dump(folder, INSERT, setting(1, version="6.0", targetVersion="7.0"), said="7.0.28")
    assert found(folder)[0] == "7.0.28-fcv6.0"


def test_a_damaged_copy_of_the_feature_compatibility_version_is_left_to_those_who_restore_it(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", INSERT, said="6.0.27")
    (folder / "admin").mkdir()
    for held in (b"", b"x", bson.encode({"_id": SETTING, "version": "5.0"})[:-3], bson.encode({"_id": SETTING})):
        (folder / "admin" / "system.version.bson").write_bytes(held)
        assert found(folder)[0] == "6.0.27"
