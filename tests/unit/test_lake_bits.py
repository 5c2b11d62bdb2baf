"""A bit that is flipped in any file of a lake is refused or found: what is read is never silently something else.

Once only the data files had hashes. A flipped bit in ``head.json`` moved the place where a fresh checkpoint goes on,
one in a checkpoint of the log changed the lake's contents, and one in the quarantine changed an event. No test had
flipped bits in files other than those of events.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pytest

from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.errors import SinkError, TailraceError
from tailrace.lake.store import commit_log, quarantine
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.verification import verify
from tests.amounts import amount
from tests.unit.lake_events import COLUMNS, STREAM, as_spark_plans, batch, begin, make, numbers_in, planned_for, token

FLIPS = amount(12, 300)
#: By what a file's name ends with or contains.
KINDS = [
    "day=",
    "_quarantine/",
    "3.json",
    "4.checkpoint.parquet",
    "head.json",
    "_tailrace/lake.json",
    "tailrace-lake.json",
]


def event(number: int) -> bytes:
    return bson.encode({"_id": {"_data": token(number)}, "clusterTime": bson.Timestamp(1, 1), "n": number})


def rows(numbers: range) -> pa.RecordBatch:
    events = pa.array([event(number) for number in numbers], pa.binary())
    return batch(numbers).set_column(2, "event", events)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a lake of four micro-batches, an event in quarantine each, and its checkpoint."""
    place = tmp_path_factory.mktemp("bits")
    root, checkpoint = place / "lake", place / "lake.checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_log, "CHECKPOINT_EVERY", 4)
        claim = make(root, checkpoint).claim
        begin(checkpoint)
        for number in range(6):
            first = number * 10
            files = PartWriter(root, str(number)).write_all([rows(range(first, first + 9))])
            aside = quarantine.stage(root, [QuarantinedEvent.of_document(event(first + 9), f"reason {first}", 2)])
            planned = as_spark_plans(root, number, planned_for(files))
            commit_batch(root, claim, number, planned, (*files, aside), checkpoint=checkpoint)
    assert verify(root, full=True).problems == []
    return place


def aside_in(root: Path) -> list[dict[str, Any]]:
    paths = sorted((root / "_quarantine").glob("*.parquet"))
    return [row for path in paths for row in quarantine.read_checked(path).to_pylist()]


def seen(root: Path, checkpoint: Path) -> tuple[Any, ...]:
    """What a reader, an eraser and a new checkpoint learn about the lake."""
    opening = open_lake(root, checkpoint, STREAM, COLUMNS)
    fresh = open_lake(root, checkpoint.with_name("fresh"), STREAM, COLUMNS)
    return numbers_in(root), aside_in(root), opening.after, fresh.after, fresh.start


def flipped(content: bytes, kind: str) -> Iterator[tuple[int, bytes]]:
    """The content with one bit flipped, at random places, and which bit it is."""
    rng = random.Random(kind)
    for _ in range(FLIPS):
        at = rng.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        yield at, bytes(changed)


def outcome(place: Path) -> object:
    """What a lake shows if nobody noticed the damage; ``None`` if it was noticed."""
    try:
        if verify(place / "lake", full=True).problems:
            return None
        return seen(place / "lake", place / "lake.checkpoint")
    except TailraceError as error:
        return "two lines" if "\n" in str(error) else None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_refused_or_found(sound: Path, tmp_path: Path, kind: str) -> None:
    victim = next(path for path in sorted(sound.rglob("*")) if kind in str(path) and path.is_file())
    place = tmp_path / "place"
    shutil.copytree(sound, place)
    expected = outcome(place)
    assert expected is not None
    unnoticed = []
    for at, content in flipped(victim.read_bytes(), kind):
        shutil.rmtree(place)
        shutil.copytree(sound, place)
        (place / victim.relative_to(sound)).write_bytes(content)
        if outcome(place) not in (None, expected):
            unnoticed.append(at)
    assert unnoticed == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("lake/_tailrace/head.json", token(59), token(58)),
        ("lake/_tailrace/lake.json", '"created": "2', '"created": "3'),
        ("lake.checkpoint/tailrace-lake.json", '"number": 6', '"number": 2'),
    ],
)
def test_a_changed_digit_of_a_small_file_is_refused(sound: Path, tmp_path: Path, name: str, old: str, new: str) -> None:
    """It is still valid JSON with values of the right types: only the file's own digest reveals it."""
    place = tmp_path / "place"
    shutil.copytree(sound, place)
    text = (place / name).read_text()
    assert old in text
    (place / name).write_text(text.replace(old, new))
    with pytest.raises(SinkError, match="was changed after it was written"):
        open_lake(place / "lake", place / "lake.checkpoint", STREAM, COLUMNS)


@pytest.mark.parametrize("work", [compact, lambda root: erase(root, {"n": 0})], ids=["compact", "erase"])
def test_no_new_file_is_made_of_a_damaged_one(sound: Path, tmp_path: Path, work: Callable[[Path], object]) -> None:
    """The footer was not checked: the flipped bit would have become part of the new hash."""
    root = tmp_path / "lake"
    shutil.copytree(sound / "lake", root)
    victim = min(root.glob("day=*/*.parquet"))
    for _, content in flipped(victim.read_bytes(), "day="):
        victim.write_bytes(content)
        before = {path: path.read_bytes() for path in root.rglob("*.parquet")}
        with pytest.raises(SinkError, match=victim.name):
            work(root)
        assert {path: path.read_bytes() for path in root.rglob("*.parquet")} == before


@pytest.mark.parametrize("work", [compact, lambda root: erase(root, {"n": 19})], ids=["compact", "erase"])
def test_no_event_in_quarantine_changes_where_a_damaged_file_is_read(
    sound: Path, tmp_path: Path, work: Callable[[Path], object]
) -> None:
    """Checksums of its pages were written but not checked. (A bit in a part that nobody reads may go unnoticed.)"""
    root = tmp_path / "lake"
    shutil.copytree(sound / "lake", root)
    victim = min(root.glob("_quarantine/*.parquet"))
    expected = aside_in(root)
    work(root)
    after = aside_in(root)
    for _, content in flipped((sound / "lake" / victim.relative_to(root)).read_bytes(), "_quarantine/"):
        shutil.rmtree(root)
        shutil.copytree(sound / "lake", root)
        victim.write_bytes(content)
        said = ""
        try:
            work(root)
        except SinkError as error:
            said = str(error)
            victim.write_bytes((sound / "lake" / victim.relative_to(root)).read_bytes())
        assert aside_in(root) == (expected if victim.name in said else after)
