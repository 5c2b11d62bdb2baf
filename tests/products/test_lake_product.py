"""What the oracle says about a lake that was harmed, without Spark."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import bson
import pyarrow as pa
import pytest

from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import SinkError
from tailrace.lake import LakeMirror, compact, files
from tailrace.lake.store.part_writer import PartWriter
from tests.products.lake import LakeProduct
from tests.products.lake_catalogue import catalogue_of
from tests.products.product import Job
from tests.products.truth import Truth
from tests.unit.lake_events import MIDNIGHT, batch, begin, make, put

_ROWS = range(20)


def _token(number: int) -> str:
    """One that can be decoded."""
    return f"82{MIDNIGHT + number:08X}000000012B0229296E04"


def _event(number: int) -> bytes:
    pad = random.Random(number).randbytes(number)  # no two files have one size
    return bson.encode({"_id": {"_data": _token(number)}, "operationType": "insert", "pad": pad})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A lake of two files, and the truth about it."""
    lake, checkpoint = tmp_path / "store" / "lake", tmp_path / "store" / "lake.checkpoint"
    claim = make(lake, checkpoint).claim
    begin(checkpoint)
    for number in range(2):
        numbers = _ROWS[number * 10 : number * 10 + 10]
        events = pa.array([_event(one) for one in numbers], pa.binary())
        tokens = pa.array(map(_token, numbers), pa.string())
        rows = batch(numbers).set_column(0, "token", tokens).set_column(2, "event", events)
        put(lake, claim, number, PartWriter(lake, str(number)).write_all([rows]))
    until = ClusterTime.of(MIDNIGHT + len(_ROWS), 1)
    Truth(tmp_path / "truth").record(until, {}, map(_event, _ROWS), [])
    played = {"played": 4}  # nothing is put aside
    return Job(
        "lake", "", str(tmp_path / "store"), int(ZERO), int(until), str(tmp_path / "truth"), "6.0.27", options=played
    )


def _told(job: Job) -> list[str]:
    return LakeProduct().differences(job, Truth(Path(job.truth)))


def test_a_sound_lake_is_equal(job: Job) -> None:
    assert _told(job) == []


def test_swapped_files_are_found_by_verify(job: Job) -> None:
    """They are whole files with correct checksums on each page, so a reader of single files reads them. The oracle
    reported that as wrong: earlier random swaps had only hit files that our own code read again."""
    first, last = files(job.root / "lake")
    held = Path(first).read_bytes(), Path(last).read_bytes()
    Path(last).write_bytes(held[0])
    Path(first).write_bytes(held[1])
    with pytest.raises(SinkError, match=r"lake verify: .* bytes, and the log says"):
        _told(job)


def test_a_lake_that_lacks_events_is_wrong(job: Job) -> None:
    """``verify`` cannot know this: the lake is sound."""
    truth = Truth(Path(job.truth))
    (pause,) = truth.pauses()
    truth.record(pause, {}, [_event(len(_ROWS))], [])
    (said,) = _told(job)
    assert "1 of 21 missing" in said


def test_a_catalogue_that_is_behind_its_lake_is_wrong(job: Job) -> None:
    shown = replace(job, options={"played": 12})  # one of those that have a catalogue
    catalogue = catalogue_of(shown, shown.root / "lake")
    assert catalogue is not None
    assert _told(shown) == ["the Iceberg table is not in the catalogue"]
    mirror = LakeMirror(shown.root / "lake", catalogue)
    mirror.follow()
    assert _told(shown) == []
    compact(shown.root / "lake", release=mirror.release)
    (said,) = _told(shown)
    assert "the newest Iceberg snapshot is not the lake's commit 3" in said
