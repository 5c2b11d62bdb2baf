"""Bits flipped in the records of the tables' state: what is read is what was written, or there is an error.

The records had no checksums. A bit of a document became a wrong row at its next update, a digit of the position skipped
entries, and a bit of a name ended the process with a TypeError. Tests had only flipped bits in LMDB's own structures.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tailrace.base.lmdb_file import note_closed, sealed, unsealed
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.witness import DeploymentIdentity, EntryMark, Witness
from tailrace.errors import SinkError
from tailrace.lake.tables.state import (
    CopyBegun,
    CopyingCollection,
    TabledCollection,
    TableMark,
    TablesPosition,
    TableState,
)
from tailrace.lake.tables.state_file import clear_errors
from tests.amounts import amount
from tests.unit.test_lmdb_damage import _EQUAL, _REFUSED, PAGE, outcome

KEYS = [b"\x2b%c" % number for number in range(120)] + [b"\x3c" + bytes([number]) * 490 for number in range(4)]
GONE = KEYS[3::7]
COLLECTIONS = [TabledCollection(bytes([number]).hex() * 16, number, f"shop.c{number}") for number in (1, 2, 3)]
TIME = ClusterTime.of(1_700_000_000, 1)
_LEAF, _LARGE, _IN_OVERFLOW = 2, 4, 1


def made(folder: Path) -> Path:
    """A state with documents of three collections, rows that wait, and metadata of each kind; its file."""
    state = TableState(folder)
    witness = Witness(DeploymentIdentity({"rs0": "0" * 24}), {"rs0": EntryMark(TIME, "ab" * 16)})
    with state.writing() as writing:
        for collection in COLLECTIONS:
            writing.set_collection(collection)
            writing.set_mark(TableMark(collection.namespace, collection.number, 4, whole=False, version=7, digest="d"))
            for place, key in enumerate(KEYS):
                size = 9_000 if place % 50 == 49 else 40 + place
                writing.put(collection.number, key, TIME, b"%d " % collection.number + key[:9] * (size // 9))
        writing.set_copy_begun(CopyBegun(TIME, {"rs0": "localhost:1"}, witness))
        writing.set_copying(CopyingCollection("ee" * 16, writing.next_number(), "00"))
        writing.set_resyncing("shop.c3")
        writing.set_selection(["shop.*"])
        writing.set_position(TablesPosition(4, TIME, {"rs0": "localhost:1"}, ZERO, TIME, witness))
    with state.writing() as writing:
        for collection in COLLECTIONS:
            for key in GONE:
                writing.delete(collection.number, key)
            writing.wait(collection.number, KEYS[::2])
    state.close()
    return folder / "data.mdb"


def used(folder: Path) -> list[Any]:
    """Read everything that a writer reads, and make a change."""
    state = TableState(folder)
    try:
        answers: list[Any] = [
            state.position(),
            state.name,
            state.selection(),
            state.collections(),
            state.marks(),
            state.copy_begun(),
            state.copying(),
            state.resyncing(),
        ]
        numbers = [one.number for one in COLLECTIONS]
        answers += [state.waiting_keys(number) for number in numbers]
        answers += [list(state.waiting(number)) for number in numbers]
        with state.writing() as writing:
            for number in numbers:
                for key in KEYS:
                    answers.append(writing.get(number, key))
                    if answers[-1] is None:
                        writing.confirm_missing(number, key)
            writing.put(2, KEYS[5], ClusterTime(TIME + 1), b"changed")
            answers.append(writing.next_number())
        return answers + [list(state.documents(number)) for number in numbers]
    finally:
        state.close()


def of_records(content: bytes) -> Iterator[range]:
    """The bytes of keys and values, checksums included, page by page; older pages, which nobody reads, too."""
    for start in range(2 * PAGE, len(content) - PAGE + 1, PAGE):
        number, flags = int.from_bytes(content[start : start + 8], "little"), content[start + 10]
        if number * PAGE != start:
            continue
        if flags == _LARGE:
            yield range(start + 16, start + PAGE)
        lower = int.from_bytes(content[start + 12 : start + 14], "little")
        for at in range(start + 16, start + lower, 2) if flags == _LEAF else ():
            node = start + int.from_bytes(content[at : at + 2], "little")
            low, high, kind, key = (int.from_bytes(content[node + at : node + at + 2], "little") for at in (0, 2, 4, 6))
            if kind in (0, _IN_OVERFLOW):
                yield range(node + 8, node + 8 + key + (low | high << 16) * (kind == 0))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(amount(2, 20)))
@pytest.mark.parametrize("noticed", [True, False], ids=["the file was changed", "the disk has changed it"])
def test_no_flipped_bit_of_a_record_gives_another_answer(tmp_path: Path, seed: int, noticed: bool) -> None:
    """Also if the file looks as it was closed, so that its structure is not checked: then nothing else compares the
    order of changed keys."""
    rng = random.Random(seed)
    data = made(tmp_path / "state")
    whole = data.read_bytes()
    copy = tmp_path / "copy" / "state"
    shutil.copytree(tmp_path / "state", copy)
    expected, refused = used(copy), 0
    places = [place for place in of_records(whole) if len(place)]
    flips = [(rng.choice(rng.choice(places)), rng.randrange(8)) for _ in range(amount(40, 100))]
    for place, bit in flips:
        shutil.rmtree(copy)
        shutil.copytree(tmp_path / "state", copy)
        content = bytearray(whole)
        content[place] ^= 1 << bit
        (copy / "data.mdb").write_bytes(content)
        if not noticed:
            note_closed(copy)
        found = outcome(lambda: used(copy), expected, (SinkError,))
        assert found in (_EQUAL, _REFUSED), (place, bit, found)
        refused += found == _REFUSED
    assert refused > len(flips) / 5  # the others are of pages that nobody reads any more


def test_a_damaged_document_is_refused_with_its_collection_and_two_ways_out(tmp_path: Path) -> None:
    data = made(tmp_path)
    document = b"2 \x2b\x12"
    assert document in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(document, b"2 \x2b\x13"))
    state = TableState(tmp_path)
    with pytest.raises(SinkError) as caught, state.writing() as writing:
        writing.get(2, KEYS[0x12])
    state.close()
    assert caught.value.message == f"{tmp_path} is damaged: a document of shop.c2 in it is not what was written"
    assert "`tailrace tables resync` lets the next run copy shop.c2 again" in str(caught.value)
    assert f"Remove {tmp_path}: the next run copies the collections again" in str(caught.value)


def test_a_database_that_is_lost_is_not_made_anew(tmp_path: Path) -> None:
    """As if a bit of its name in LMDB's list were flipped: a new one was made, and the tables became empty."""
    made(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=9) as environment, environment.begin(write=True) as transaction:
        transaction.drop(environment.open_db(b"sealed-documents", transaction))
    with pytest.raises(SinkError, match="its databases are not those that were written"):
        TableState(tmp_path)


def test_metadata_that_this_version_does_not_know_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    for replaced, said in (
        ((b'"time"', b'"tine"'), f"is damaged: .*Remove {tmp_path}"),
        ((b'"format": 3', b'"format": 4'), r"was written by another version of Tailrace \(format 4\)"),
    ):
        with lmdb.open(str(tmp_path), max_dbs=9) as environment, environment.begin(write=True) as transaction:
            meta = environment.open_db(b"sealed-meta", transaction)
            position = unsealed(b"position", transaction.get(b"position", db=meta))
            assert replaced[0] in position
            transaction.put(b"position", sealed(b"position", position.replace(*replaced)), db=meta)
        with pytest.raises(SinkError, match=f"{tmp_path} {said}"):
            position_of(tmp_path)


def position_of(directory: Path) -> object:
    state = TableState(directory, readonly=True)
    try:
        return state.position()
    finally:
        state.close()


@pytest.mark.parametrize("record", [b"position", b"state"])
def test_nobody_works_with_the_state_of_another_release(record: bytes, tmp_path: Path) -> None:
    """``compact``, ``expire`` and ``resync`` changed tables by such a state, and wrote to it: the format was checked
    only with the position, which they do not read. The test read it."""
    made(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=9) as environment, environment.begin(write=True) as transaction:
        meta = environment.open_db(b"sealed-meta", transaction)
        known = json.loads(unsealed(record, transaction.get(record, db=meta)))
        transaction.put(record, sealed(record, json.dumps({**known, "format": 4}).encode()), db=meta)
    for readonly in (True, False):
        with pytest.raises(SinkError, match=r"another version of Tailrace \(format 4\)\. Use the release"):
            TableState(tmp_path, readonly=readonly)


def test_a_user_who_may_not_write_is_told_who_may_read(tmp_path: Path) -> None:
    """The message consisted of LMDB's words, with the path in it twice."""
    with (
        pytest.raises(SinkError, match=r"^this user may not write in .*as the user who writes"),
        clear_errors(tmp_path),
    ):
        raise lmdb.Error(f"{tmp_path}: Permission denied")
