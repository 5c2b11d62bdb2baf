"""Bits flipped in what LMDB itself keeps: metas, headers, branches, places of records, lists of free pages.

LMDB follows these without checks, and the process dies. Earlier tests flipped bits only in records, which have
checksums. Each file is opened in a process of its own, and used as a stream uses it: the answers are the same, or there
is an error that says which file it is.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import lmdb
import pytest

from tailrace.base.lmdb_file import check_before_opening, damage_of, note_closed
from tailrace.errors import SinkError
from tailrace.lake.tables.state import TableState
from tailrace.read.images.bucket import ImageStateError
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageState
from tests.amounts import amount

UUID = bytes(range(16))
PAGE = os.sysconf("SC_PAGE_SIZE")
NAMES = [state_key(UUID, bson.encode({"_id": number})) for number in range(900)]
_EQUAL, _REFUSED, _OTHER = 0, 3, 4
_PATIENCE_S = 120


def made(folder: Path) -> Path:
    """A state of one bucket with a branch, large values, free pages and what is needed to undo; its file."""
    with ImageState.open(folder, buckets=1, map_bytes=64 << 20, undo_bytes=1 << 20) as state:
        for number in range(1, 5):
            with state.batch(number) as batch:
                batch.put((name, b"%d " % number * (9 + place % 37)) for place, name in enumerate(NAMES))
                batch.put((name, b"%d " % number * 4_000) for name in NAMES[:: 100 + number])
                batch.delete(NAMES[number::50])
    return folder / "generation-1" / "0000" / "data.mdb"


def used(folder: Path) -> list[Any]:
    """Open a state as a stream does: read, go back, and write."""
    with ImageState.open(folder) as state:
        answers: list[Any] = [state.position, state.get(NAMES)]
        with state.batch(5) as batch:
            known = batch.get(NAMES)
            batch.confirm_missing([name for name, one in zip(NAMES, known, strict=True) if one is None])
            batch.put((name, b"five" * 60) for name in NAMES[::3])
            batch.delete(NAMES[1::9])
        state.undo_until(3)
        answers += [state.position, sorted(state.documents(UUID))]
        with state.batch(4) as batch:
            batch.put((name, b"four" * (place % 700)) for place, name in enumerate(NAMES[::7]))
        return [*answers, state.get(NAMES)]


def outcome(use: Callable[[], object], expected: object, refusals: tuple[type[Exception], ...]) -> int:
    """What comes of ``use`` in a process of its own: as expected, refused, something else, or (negative) a signal. One
    that does not end is ended by SIGALRM."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_PATIENCE_S)
        status = _OTHER
        try:
            status = _EQUAL if use() == expected else _OTHER
        except refusals as error:
            status = _REFUSED if "data.mdb is damaged" in str(error) or "state is damaged" in str(error) else _OTHER
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def of_lmdb(content: bytes) -> Iterator[tuple[str, range]]:
    """The bytes of a file that LMDB keeps for itself, page by page."""
    yield from (("meta", range(at, at + 152)) for at in (0, PAGE))
    for start in range(2 * PAGE, len(content) - PAGE + 1, PAGE):
        number, flags = int.from_bytes(content[start : start + 8], "little"), content[start + 10]
        if number * PAGE != start or flags not in (1, 2, 4):
            continue
        lower = int.from_bytes(content[start + 12 : start + 14], "little")
        yield {1: "branch", 2: "leaf", 4: "large"}[flags], range(start, start + (16 if flags == 4 else lower))
        for at in range(start + 16, start + lower, 2) if flags != 4 else ():
            node = start + int.from_bytes(content[at : at + 2], "little")
            yield "node", range(node, node + 8)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(amount(1, 6)))
def test_no_flipped_bit_of_lmdb_s_own_ends_the_process_or_gives_another_image(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = made(tmp_path / "state")
    whole = data.read_bytes()
    kinds: dict[str, list[range]] = {}
    for kind, places in of_lmdb(whole):
        kinds.setdefault(kind, []).append(places)
    assert set(kinds) == {"meta", "branch", "leaf", "large", "node"}
    copy, refused = tmp_path / "copy", 0
    shutil.copytree(tmp_path / "state", copy)
    expected = used(copy)
    flipped = [(rng.choice(rng.choice(kinds[kind])), rng.randrange(8)) for kind in kinds for _ in range(amount(5, 8))]
    for place, bit in flipped:
        shutil.rmtree(copy)
        shutil.copytree(tmp_path / "state", copy)
        content = bytearray(whole)
        content[place] ^= 1 << bit
        (copy / data.relative_to(tmp_path / "state")).write_bytes(content)
        found = outcome(lambda: used(copy), expected, (ImageStateError,))
        assert found in (_EQUAL, _REFUSED), (place, bit, found)
        refused += found == _REFUSED
    assert refused > len(flipped) / 3  # the others are of pages that nobody uses any more


@pytest.mark.long
def test_the_state_of_tables_is_looked_at_too(tmp_path: Path) -> None:
    """For its writer, and for processes that only read it."""
    folder = tmp_path / "_tailrace" / "state"
    state = TableState(folder)
    state.close()
    whole = (folder / "data.mdb").read_bytes()
    assert TableState(folder, readonly=True).position() is None
    refused = 0
    for kind, places in of_lmdb(whole):
        for place in places[:: amount(4, 1) * (3 if kind == "meta" else 1)]:
            content = bytearray(whole)
            content[place] ^= 0x10
            (folder / "data.mdb").write_bytes(content)
            for readonly in (True, False):
                found = outcome(lambda: TableState(folder, readonly=readonly).position(), None, (SinkError,))  # noqa: B023
                assert found in (_EQUAL, _REFUSED), (place, readonly, found)
                refused += found == _REFUSED
    assert refused > amount(10, 40)


def test_random_files_that_lmdb_has_written_are_sound(tmp_path: Path) -> None:
    """Checked after each of many transactions of all kinds: nothing that LMDB writes is taken for damage."""
    rng = random.Random(5)
    with lmdb.open(str(tmp_path), map_size=256 << 20, max_dbs=4, sync=False) as environment:
        databases = [environment.open_db(name) for name in (b"documents", b"undo", b"meta")]
        for number in range(amount(40, 400)):
            transaction = environment.begin(write=True)
            for _ in range(rng.randrange(200)):
                key = rng.randbytes(rng.choice((4, 20, 60, 500))) if rng.random() < 0.7 else b"%d" % rng.randrange(60)
                size = 70_000 if rng.random() < 0.02 else rng.choice((0, 1, 10, 300, 1500, 2100, 5000))
                if rng.random() < 0.75:
                    transaction.put(key, bytes(size), db=rng.choice(databases))
                    continue
                with transaction.cursor(db=rng.choice(databases)) as cursor:
                    if cursor.set_range(key):
                        cursor.delete()
            if rng.random() < 0.1:
                transaction.drop(rng.choice(databases), delete=False)
            # Not as a block: LMDB's binding before 3.0 takes an abort inside of one for an error.
            if rng.random() < 0.1:
                transaction.abort()
            else:
                transaction.commit()
            assert damage_of(tmp_path / "data.mdb") is None, number


def test_a_file_that_was_closed_is_not_read_again_and_any_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def noted(path: Path) -> str | None:
        read.append(path)
        return damage_of(path)

    data = made(tmp_path)
    monkeypatch.setattr("tailrace.base.lmdb_file.damage_of", noted)
    with ImageState.open(tmp_path):
        pass
    assert read == []
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=lambda *_: {"copy"})  # keeps the time of the last change
    with ImageState.open(tmp_path / "copy"):
        pass
    assert len(read) == 1
    before = data.stat()
    data.write_bytes(data.read_bytes())
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    with ImageState.open(tmp_path):
        assert len(read) == 2
    child = os.fork()
    if not child:
        ImageState.open(tmp_path).batch(9).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    note_closed(data.parent)
    check_before_opening(data.parent)
    assert len(read) == 2
