"""``tailrace erase``: documents named by collection and ``_id``, and the outcome for each store that needs no
server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson.binary import Binary

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core.event.named_document import NamedDocument, NamedDocuments
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.verification import verify
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageState
from tests.traces import traces
from tests.unit.test_lake_erasure import EVERYTHING, NAMES, SECRET, event, fill, seen, token

UUID, OTHER = bytes(range(16)), bytes(range(1, 17))
FIRST = 86_350


def erase(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = main(["erase", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out)["stores"][0] if said.out else {"error": said.err}


def of(number: int) -> tuple[str, str, str]:
    return "--document", f"shop.{NAMES[number % 3]}", str(number)


def named(namespace: str, value: Any) -> NamedDocument:
    return NamedDocument(namespace, bson.encode({"_id": value}))


# -- which documents --------------------------------------------------------------------------------------------------


def test_documents_are_known_by_the_servers_order_of_values() -> None:
    found = NamedDocuments([named("shop.a", 1), named("shop.a", None), named("shop.b", {"x": 1}), named("a.b.c", "t")])
    assert found.namespaces == ("shop.a", "shop.b", "a.b.c")

    def has(namespace: str, document: dict[str, Any]) -> bool:
        database, _, collection = namespace.partition(".")
        raw = bson.encode({"ns": {"db": database, "coll": collection}, "documentKey": document})
        assert found.has(namespace, bson.encode(document)) == found.has_event(raw)
        return found.has_event(raw)

    assert has("shop.a", {"_id": 1.0})
    assert has("shop.a", {"region": "x", "_id": bson.Int64(1)})
    assert has("shop.a", {"_id": None})
    assert has("shop.b", {"_id": {"x": 1.0}})
    assert has("a.b.c", {"_id": "t"})
    assert not has("shop.a", {"_id": "1"})
    assert not has("shop.a", {"region": "x"})
    assert not has("shop.b", {"_id": 1})
    assert not has("a.b", {"_id": "t"})
    for event_ in ({}, {"ns": {"db": "shop"}, "documentKey": {"_id": 1}}, {"ns": "shop.a", "documentKey": 1}):
        assert not found.has_event(bson.encode(event_))


def test_wrong_arguments_are_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = tmp_path / "lake"
    lines = tmp_path / "documents"
    for arguments, said in (
        (("--lake", some), "what to erase"),
        (of(1), "needs a store"),
        (("--document", "shop.a", "{", "--lake", some), "not Extended JSON"),
        (("--document", "shop", "1", "--lake", some), "'shop' is not a collection"),
        ((*of(1), "--lake", some, "--letters", "a.b"), "--letters belongs to"),
        ((*of(1), "--lake", some, "--uuid", "x"), "--uuid belongs to"),
        ((*of(1), "--images", some, "--uuid", "x"), "is not a UUID"),
        (("--documents", tmp_path / "none", "--lake", some), "none"),
        (("--documents", lines, "--lake", some), "line 3 of"),
    ):
        lines.write_text('{"ns": "shop.a", "_id": 1}\n\n{"ns": "shop.a"}\n', encoding="utf-8")
        status, found = erase(capsys, *arguments)
        assert (status, said in found["error"]) == (2, True), found
    lines.write_text('{"ns": "shop.a", "_id": {"$oid": "65536f2a0000000000000001"}}\n', encoding="utf-8")
    status, found = erase(capsys, "--documents", lines, "--lake", some, "--tables", some, "--images", some)
    assert (status, found["left"]) == (1, [f"{some} is not a lake of Tailrace"])
    for uri in ("s3://bucket/tables", "az://container/tables"):
        assert "needs the state of its writer" in erase(capsys, *of(1), "--tables", uri)[1]["left"][0]
    assert not some.exists()


# -- a lake -----------------------------------------------------------------------------------------------------------


def test_a_lake_forgets_documents_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "lake"
    fill(root)
    # Every tenth document is Anna's.
    hers = [part for number in range(FIRST, FIRST + 100, 10) for part in of(number)]
    assert traces(root, SECRET)
    status, found = erase(capsys, *hers, "--lake", root, "--dry-run")
    assert (status, found["found"], found["erased"]) == (1, {"events": 10}, 0)
    assert seen(root) == EVERYTHING
    status, found = erase(capsys, *hers, "--lake", root)
    assert (status, found["found"], found["erased"], found["left"]) == (0, {"events": 10}, 10, [])
    assert "resume tokens" in found["kept"][0]
    assert traces(root, SECRET) == []
    assert seen(root) == [number for number in EVERYTHING if number % 10]
    assert verify(root, full=True).problems == []
    status, found = erase(capsys, *hers, "--lake", root)
    assert (status, found["found"], found["kept"]) == (0, {}, [])
    # Another collection's document with the same _id is another document.
    assert erase(capsys, "--document", "shop.others", FIRST + 1, "--lake", root)[1]["found"] == {}
    assert erase(capsys, "--document", f"shop.{NAMES[(FIRST + 1) % 3]}", f"{FIRST + 1}.0", "--lake", root)[0] == 0
    assert FIRST + 1 not in seen(root)


def test_what_a_lake_cannot_tell_is_left_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "lake"
    fill(root)
    number = min(seen(root))
    whole = root / CommitLog(root).state().in_order[0].name
    loose = whole.with_name(f"{whole.stem[:-1]}x.parquet")
    shutil.copy(whole, loose)  # as a task that was killed leaves it
    status, found = erase(capsys, *of(number), "--lake", root)
    assert (status, found["erased"]) == (1, 1)
    assert "files that no commit names" in found["left"][0]
    loose.unlink()
    assert erase(capsys, *of(number), "--lake", root)[0] == 0
    # The stream's pipeline has removed the fields that tell which document an event is about.
    bare = {"_id": {"_data": token(1)}, "operationType": "update", "ns": {"db": "shop", "coll": NAMES[1]}}
    for one, is_unclear in ((bare, True), ({**bare, "ns": {"db": "shop", "coll": "x"}}, False), ({"a": 1}, True)):
        put_aside(root, bson.encode(one))
        status, found = erase(capsys, *of(1), "--lake", root)
        assert (status, bool(found["left"])) == (int(is_unclear), is_unclear)
    put_aside(root, event(number))
    status, found = erase(capsys, *of(number), "--lake", root)
    assert (status, found["found"]) == (0, {"events in quarantine": 1})


def put_aside(root: Path, raw: bytes) -> None:
    """Let the quarantine hold one event."""
    folder = root / "_quarantine"
    folder.mkdir(exist_ok=True)
    row = {"namespace": "shop.a", "reason": "x", "token": token(1), "event": raw}
    quarantine.write_rows(pa.Table.from_pylist([row], quarantine.schema()), folder / f"{0:016X}-{'0' * 32}.parquet")


# -- images -----------------------------------------------------------------------------------------------------------

MARKER = b"anna-4711@example.com"


def image(value: Any, *, anna: bool = True) -> bytes:
    return bson.encode({"_id": value, "who": "x" * 3_000 + MARKER.decode() if anna else "somebody"})


def key(value: Any, uuid: bytes = UUID) -> bytes:
    return state_key(uuid, bson.encode({"_id": value}))


def images(root: Path, scope: str = "shop.people", *, current: bool = False) -> Path:
    """A state in which document 1 has come, changed and gone, and documents 2 and 3 are there."""
    with ImageState.open(root, buckets=2) as state:
        for number, changes in enumerate(
            [
                {key(1): image(1), key(2): image(2, anna=False)},
                {key(1): image(1.0), key(3): image(3, anna=False), key(1, OTHER): image(1, anna=False)},
                {key(1): image(1) if current else None, key(2): image(2.0, anna=False), key(1, OTHER): None},
                {key(3): image(3.0, anna=False)},
            ]
        ):
            with state.batch(100 + number) as batch:
                batch.put(changes.items())
    durable.write_sealed(root / "stream.json", {"of": "rs0", "scope": scope})
    return root


WHO = ("--document", "shop.people", "1")


def test_images_forget_what_they_keep_of_the_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = images(tmp_path / "images", "shop")
    mine = ("--uuid", str(Binary(UUID, 4).as_uuid()))
    assert traces(root, MARKER)
    status, found = erase(capsys, *WHO, "--images", root)
    assert (status, found["erased"]) == (1, 0)
    assert "know collections by UUID" in found["left"][0]
    status, found = erase(capsys, *WHO, "--images", root, *mine, "--dry-run")
    assert (status, found["found"], found["erased"]) == (1, {"images of earlier states": 2}, 0)
    assert traces(root, MARKER)
    status, found = erase(capsys, *WHO, "--images", root, *mine)
    assert (status, found["found"], found["erased"], found["left"]) == (0, {"images of earlier states": 2}, 2, [])
    assert traces(root, MARKER) == []
    with ImageState.open(root) as state:
        assert (state.position, state.buckets, len(state)) == (103, 2, 2)
        assert state.get([key(2), key(3)]) == [image(2.0, anna=False), image(3.0, anna=False)]
        state.undo_until(101)  # others are as they were then; hers is not there
        assert state.get([key(1), key(2), key(1, OTHER)]) == [None, image(2, anna=False), image(1, anna=False)]
        with state.batch(102) as batch:
            batch.put([(key(4), image(4, anna=False))])
    assert erase(capsys, *WHO, "--images", root, *mine)[1]["found"] == {}


def test_images_that_are_current_open_or_damaged_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = images(tmp_path / "images", current=True)
    status, found = erase(capsys, *WHO, "--images", root)
    assert (status, found["erased"]) == (1, 0)
    assert "an image of a document to erase is current" in found["left"][0]
    other = images(tmp_path / "other")
    with ImageState.open(other):
        assert "another process writes" in erase(capsys, *WHO, "--images", other)[1]["left"][0]
    (other / "stream.json").unlink()
    assert "does not say whose images" in erase(capsys, *WHO, "--images", other)[1]["left"][0]
    (tmp_path / "empty").mkdir()
    assert "holds no exact images" in erase(capsys, *WHO, "--images", tmp_path / "empty")[1]["left"][0]
    for victim in images(tmp_path / "third").rglob("data.mdb"):
        victim.write_bytes(victim.read_bytes().replace(b"somebody", b"somebodx"))
    status, found = erase(capsys, *WHO, "--images", tmp_path / "third")
    assert (status, "damaged" in found["left"][0]) == (1, True)


@pytest.mark.parametrize("step", ["images.rewritten", "images.replaced"])
def test_images_after_a_kill_are_the_old_or_the_new_ones(
    tmp_path: Path, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = images(tmp_path / "images")

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        assert main(["erase", *WHO, "--images", str(root)]) == 130
    finally:
        durable.observe_steps(None)
    status, found = erase(capsys, *WHO, "--images", root)
    assert (status, found["left"], traces(root, MARKER)) == (0, [], [])
    assert len(list(root.glob("generation-*"))) == 1
    with ImageState.open(root) as state:
        assert state.get([key(2), key(3)]) == [image(2.0, anna=False), image(3.0, anna=False)]
