"""Everything that writes to a lake, on a disk with no room, with room for one page, for two, and so on until there is
enough. Each time the error says so, what was committed stays, and the work goes on when there is room.

Only one test had filled a disk, under a lake's stream; the maintenance of a lake had never been tested on a full one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pytest

from tailrace.base import durable
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.store import quarantine
from tailrace.lake.store.committer import abort_batch, commit_batch
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.manifest import PlannedRange, StagedFile
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.retention import expire
from tailrace.lake.store.verification import verify
from tests.small_disk import PAGE, SmallDisk, small_disk
from tests.unit.lake_events import MIDNIGHT, STREAM, begin, numbers_in, token
from tests.unit.test_lake_erasure import LAKE_COLUMNS, NAMES
from tests.unit.test_lake_quarantine import held

#: The sweep ends where an operation has found room; it may need this much.
PAGES_MAX = 200


def event(number: int) -> bytes:
    document = {"_id": number, "tenth": number % 10 == 0, "pad": random.Random(number).randbytes(300)}
    about = {"_id": {"_data": token(number)}, "operationType": "insert"}
    return bson.encode({**about, "ns": {"db": "shop", "coll": NAMES[number % 3]}, "fullDocument": document})


def stage(root: Path, names: Sequence[str], rows: Sequence[int], aside: Sequence[int]) -> tuple[StagedFile, ...]:
    """Files as a task of Spark writes them."""
    batch = pa.record_batch(
        {
            "token": pa.array([token(n) for n in rows], pa.string()),
            "number": pa.array(list(rows), pa.int64()),
            "event": pa.array([event(n) for n in rows], pa.binary()),
            "collection": pa.array([NAMES[n % 3] for n in rows], pa.string()),
        }
    )
    files = PartWriter(root, f"s{rows[0]}", partitioning=Partitioning.of(names)).write_all([batch])
    found = [QuarantinedEvent.of_document(event(n), f"reason {n}", 2) for n in aside]
    return (*files, quarantine.stage(root, found)) if found else files


def put(root: Path, claim: str, number: int, names: Sequence[str], aside: Sequence[int] = ()) -> None:
    """Micro-batch ``number``, as Spark carries it out: one that fails is aborted. If the abort fails too, Spark does
    not say why the micro-batch failed. (An earlier version of this test accepted either error, and the two had the same
    text.)"""
    first = number * 20
    rows = [n for n in range(first, first + 20) if n not in aside]
    files: tuple[StagedFile, ...] = ()
    planned = PlannedRange(ClusterTime.of(MIDNIGHT + first, 0), ClusterTime.of(MIDNIGHT + first + 20, 0))
    try:
        files = stage(root, names, rows, aside)
        commit_batch(root, claim, number, planned, files)
    except BaseException:
        try:
            abort_batch(root, files)
        except BaseException as error:
            raise AssertionError("the micro-batch cannot be aborted") from error
        raise


@dataclass(frozen=True)
class Operation:
    """``run`` is given the lake and its claim; then the lake holds ``rows`` and ``aside`` instead of what ``fill``
    wrote."""

    run: Callable[[Path, str], Any]
    rows: tuple[int, ...]
    aside: tuple[int, ...]
    names: tuple[str, ...] = ()


ASIDE = (5, 30, 47)
ROWS = tuple(n for n in range(60) if n not in ASIDE)
TENTH = {"fullDocument.tenth": True}
LEFT = tuple(n for n in ROWS if n % 10)
MORE = (*ROWS, *range(60, 80))


def replaced(root: Path, claim: str) -> None:
    """Merge, and remove what was replaced."""
    compact(root)
    expire(root, timedelta(0))


HOURLY = ("hour", "collection")
NEW_ASIDE = (66, 70)
OPERATIONS = {
    "micro-batch": Operation(lambda root, claim: put(root, claim, 3, ()), MORE, ASIDE),
    "divided": Operation(lambda root, claim: put(root, claim, 3, HOURLY), MORE, ASIDE, HOURLY),
    "quarantine": Operation(
        lambda root, claim: put(root, claim, 3, (), NEW_ASIDE),
        tuple(n for n in MORE if n not in NEW_ASIDE),
        (*ASIDE, *NEW_ASIDE),
    ),
    "compact and expire": Operation(replaced, ROWS, ASIDE),
    "compact divided": Operation(replaced, ROWS, ASIDE, ("collection",)),
    "erase": Operation(lambda root, claim: erase(root, TENTH, vacuum=True), LEFT, (5, 47)),
    "old days": Operation(lambda root, claim: drop_days(root, date(2026, 11, 22), vacuum=True), (), ()),
    "open": Operation(lambda root, claim: open_lake(root, root.with_name("fresh"), STREAM, LAKE_COLUMNS), ROWS, ASIDE),
}


def fill(root: Path, names: Sequence[str]) -> str:
    """Three micro-batches of twenty events, one or two of each put aside."""
    checkpoint = root.with_name("checkpoint")
    claim = open_lake(root, checkpoint, STREAM, LAKE_COLUMNS, partitioning=Partitioning.of(names)).claim
    begin(checkpoint)
    for number in range(3):
        put(root, claim, number, names, [n for n in ASIDE if n // 20 == number])
    return claim


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    with small_disk(tmp_path_factory.mktemp("full") / "disk", "4m") as made:
        yield made


def holds(root: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(sorted(numbers_in(root))), tuple(held(root))


def copied(disk: SmallDisk, folder: Path) -> Path:
    """The lake and its checkpoint in ``folder``, anew on the disk."""
    disk.make_room()
    for name in ("lake", "checkpoint", "fresh", "last"):
        shutil.rmtree(disk.path / name, ignore_errors=True)
    for name in ("lake", "checkpoint"):
        shutil.copytree(folder / name, disk.path / name)
    return disk.path / "lake"


def refused(run: Callable[[], object]) -> str | None:
    """The message that there is no room; ``None`` if there is enough."""
    try:
        run()
    except durable.LakeFullError as error:
        return str(error)
    return None


@pytest.mark.long
@pytest.mark.parametrize(
    "sweep",
    [
        pytest.param((4, False), id="each 4th page"),
        pytest.param((1, False), id="each page", marks=pytest.mark.slow),
        pytest.param((1, True), id="each page, with the log's checkpoint", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_full_disk_is_told_and_harms_nothing_whatever_room_is_left(
    name: str, sweep: tuple[int, bool], disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stride, often = sweep
    if often:  # a checkpoint without room is no error: the next one is made at its time
        monkeypatch.setattr("tailrace.lake.store.commit_log.CHECKPOINT_EVERY", 1)
    operation = OPERATIONS[name]
    claim = fill(tmp_path / "lake", operation.names)
    before, after = (ROWS, ASIDE), (operation.rows, operation.aside)
    assert holds(tmp_path / "lake") == before
    failures = enough = 0
    for pages in range(0, PAGES_MAX, stride):
        root = copied(disk, tmp_path)
        disk.leave(pages * PAGE)
        told = refused(lambda: operation.run(root, claim))  # noqa: B023  it is run at once
        if told is not None:
            failures += 1
            assert "no room left" in told, pages
            assert holds(root)[0] in (before[0], after[0]), pages
            disk.make_room()
            operation.run(root, claim)
        disk.make_room()
        assert holds(root) == after, pages
        open_lake(root, disk.path / "last", STREAM, LAKE_COLUMNS)
        report = verify(root, full=True)
        assert (report.problems, report.leftovers, list(LakeLayout(root).staging.iterdir())) == ([], 0, []), pages
        assert holds(root) == after, pages
        enough += told is None
        if enough > (12 if often else 0):
            break
    assert failures > 0
    assert enough > 0
