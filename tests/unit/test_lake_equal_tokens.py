"""If two shards log a drop at the same cluster time, the server gives two events with the same token. A lake of a
cluster holds both, wherever they are cut apart; more events than shards, or a second one on a replica set, are refused.

No test of the lake had two shards that log something at the same time, and no test of the merge wrote a lake."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import bson
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.errors import SinkError
from tailrace.lake import verify
from tailrace.lake.store import part_writer, quarantine, verification
from tailrace.lake.store.compaction import compact
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.identity import Opening, open_lake
from tailrace.lake.store.manifest import StagedFile
from tailrace.lake.store.part_writer import EQUAL_TOKENS, FileLimits, PartWriter
from tailrace.lake.store.partitioning import Partitioning
from tests.unit.lake_events import COLUMNS, STREAM, numbers_in, planned_for, put, token

SHARDS = 3
#: (number of the token, number of the row): two shards give 4 and 6, and three give 9, the last one.
ROWS = [(1, 0), (2, 1), (4, 2), (4, 3), (5, 4), (6, 5), (6, 6), (7, 7), (9, 8), (9, 9), (9, 10)]


COLUMNS_TOO: list[dict[str, object]] = [
    *COLUMNS,
    {"name": "collection", "type": "string", "nullable": True, "metadata": {}},
]


def make(root: Path, checkpoint: Path, *by: str) -> Opening:
    return open_lake(root, checkpoint, STREAM, COLUMNS_TOO, partitioning=Partitioning.of(by) if by else None)


def event(place: int, number: int) -> bytes:
    ns = {"db": "shop", "coll": "orders"}
    return bson.encode({"_id": {"_data": token(place)}, "operationType": "drop", "ns": ns, "number": number})


def batch(rows: Iterable[tuple[int, int]]) -> pa.RecordBatch:
    rows = list(rows)
    return pa.record_batch(
        {
            "token": pa.array([token(place) for place, _ in rows], pa.string()),
            "number": pa.array([number for _, number in rows], pa.int64()),
            "collection": pa.array(["orders" for _ in rows], pa.string()),
            "event": pa.array([event(*row) for row in rows], pa.binary()),
        }
    )


def staged(
    root: Path,
    rows: list[tuple[int, int]] = ROWS,
    *,
    each: int = 100,
    one_token: int = SHARDS,
    limits: FileLimits | None = None,
    by: Iterable[str] = ("day",),
) -> tuple[StagedFile, ...]:
    """Files of ``rows``, which come in record batches of ``each``."""
    writer = PartWriter(
        root, f"0-{each}", one_token=one_token, limits=limits or FileLimits(), partitioning=Partitioning.of(by)
    )
    return writer.write_all([batch(rows[first : first + each]) for first in range(0, len(rows), each)])


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("file_bytes", [1, 1 << 20])
@pytest.mark.parametrize("by", [("day",), ("day", "collection")], ids=str)
def test_both_events_are_there_wherever_batches_row_groups_and_files_end(
    each: int, file_bytes: int, by: tuple[str, ...], tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    claim = make(root, tmp_path / "checkpoint", *by).claim
    files = staged(root, each=each, limits=FileLimits(row_group_rows=1, file_bytes=file_bytes), by=by)
    # A file may end after each batch, but not between two events of one token: in threes, each batch ends there.
    assert len(files) == ({1: 7, 2: 4, 3: 1, 4: 3, 5: 2, 100: 1}[each] if file_bytes == 1 else 1)
    assert all(one.last_token < other.first_token for one, other in pairwise(files))
    commit = put(root, claim, 0, files)
    assert commit is not None
    assert put(root, claim, 0, staged(root, each=each + 1, by=by), commit.planned) is None, (
        "the micro-batch given again"
    )
    assert numbers_in(root) == list(range(len(ROWS)))
    report = verify(root, full=True)
    assert (report.problems, report.rows, report.leftovers) == ([], len(ROWS), 0)
    # A fresh checkpoint goes on after the last token: after all events that have it.
    assert make(root, tmp_path / "fresh").after == token(9)
    assert put(root, make(root, tmp_path / "fresh").claim, 0, staged(root, [(10, 11), (10, 12)], by=by)) is not None
    assert numbers_in(root) == list(range(13))


def test_a_file_is_not_closed_for_others_while_the_next_event_may_have_its_last_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a lake that is partitioned by collection, few files are open at once."""
    monkeypatch.setattr(part_writer, "_OPEN_MAX", 1)
    names = ["a", "b", "c", "a", "a", "b"]
    places = [1, 2, 3, 4, 4, 5]
    columns = {"token": [token(place) for place in places], "collection": names}
    rows = pa.record_batch({name: pa.array(values, pa.string()) for name, values in columns.items()})
    limits = FileLimits(row_group_rows=1)
    make(tmp_path / "lake", tmp_path / "checkpoint", "day", "collection")
    writer = PartWriter(
        tmp_path / "lake", "0-0", one_token=2, limits=limits, partitioning=Partitioning.of(["day", "collection"])
    )
    files = writer.write_all([rows.slice(0, 4), rows.slice(4)])
    found = [(one.collection, one.first_token, one.last_token, one.rows) for one in files]
    assert ("a", token(1), token(4), 3) in found
    assert sorted(one[0] or "" for one in found) == ["a", "b", "b", "c"]


@pytest.mark.parametrize("each", [1, 2, 100])
@pytest.mark.parametrize(
    ("rows", "one_token"),
    [
        ([(1, 0), (2, 1), (2, 2)], 1),  # of a replica set
        ([(1, 0), (2, 1), (2, 2), (2, 3)], 2),  # once more than there are shards
        ([(1, 0), (2, 1), (2, 2), (1, 3)], 2),
        ([(1, 0), (2, 1), (1, 2), (2, 3)], 3),
    ],
)
def test_an_event_more_than_there_are_shards_and_one_that_comes_later_are_refused(
    rows: list[tuple[int, int]], one_token: int, each: int, tmp_path: Path
) -> None:
    make(tmp_path, tmp_path / "checkpoint")
    with pytest.raises(SinkError, match="out of order, or one is there twice"):
        staged(tmp_path, rows, each=each, one_token=one_token)
    assert not list(tmp_path.glob("day=*/*"))


def test_events_of_one_token_in_two_slices_are_refused(tmp_path: Path) -> None:
    """Slices are cut between cluster times, so this is one event that two slices give."""
    claim = make(tmp_path / "lake", tmp_path / "checkpoint").claim
    root = tmp_path / "lake"
    files = (*staged(root, [(1, 0), (4, 1)]), *staged(root, [(4, 2), (5, 3)], each=7))
    with pytest.raises(SinkError, match="out of order"):
        put(root, claim, 0, files, planned_for(files))
    assert numbers_in(root) == []


def test_compaction_and_erasure_keep_both(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = make(root, tmp_path / "checkpoint").claim
    for number, part in enumerate((ROWS[:4], ROWS[4:7], ROWS[7:])):
        put(root, claim, number, staged(root, part))
    assert compact(root).files_after == 1
    assert (numbers_in(root), verify(root, full=True).problems) == (list(range(11)), [])
    erase(root, {"number": {"$in": [3, 9, 10]}})  # one of two, and two of three
    assert (numbers_in(root), verify(root, full=True).problems) == ([0, 1, 2, 4, 5, 6, 7, 8], [])
    erase(root, {"number": 7})
    assert (numbers_in(root), verify(root, full=True).problems) == ([0, 1, 2, 4, 5, 6, 8], [])
    (file,) = [root / name for name in DeltaTable(str(root)).to_pyarrow_dataset().files]
    assert pq.read_metadata(file).metadata[EQUAL_TOKENS] == b"1"


def test_verify_reads_them_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_READ_ROWS", 1)
    root = tmp_path / "lake"
    put(root, make(root, tmp_path / "checkpoint").claim, 0, staged(root))
    assert verify(root).problems == []


def test_every_reader_gives_both(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    claim = make(root, tmp_path / "checkpoint").claim
    put(root, claim, 0, staged(root, limits=FileLimits(row_group_rows=2)))
    table, above = DeltaTable(str(root)), token(5)
    assert table.to_pyarrow_dataset().to_table().num_rows == 11
    numbers = pl.scan_delta(str(root)).filter(pl.col("token") >= above).collect()["number"].to_list()
    assert sorted(numbers) == list(range(4, 11))
    lake = table.to_pyarrow_dataset()
    counted = duckdb.sql(f"SELECT count(*) FROM lake WHERE token = '{token(9)}'").fetchall()
    assert counted == [(3,)], lake


def test_an_event_that_is_there_once_more_than_the_footer_says_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number in the footer detects what a strict order used to detect: an event that was written twice."""
    root = tmp_path / "lake"
    claim = make(root, tmp_path / "checkpoint").claim
    put(root, claim, 0, staged(root, ROWS[:7]))
    with monkeypatch.context() as patch:
        patch.setattr(part_writer, "count_equal", lambda tokens, before: 1)  # as if a row were doubled after it
        files = staged(root, [*ROWS[7:8], *ROWS[8:], (10, 11)])
    put(root, claim, 1, files)
    assert verify(root).problems == [f"{files[0].name}: 2 of its tokens are repeated, but its footer says 1"]
    with pytest.raises(SinkError, match="do not hold the rows that the log says"):
        compact(root)


def test_the_quarantine_takes_as_many_events_of_a_token_as_there_are_shards(tmp_path: Path) -> None:
    make(tmp_path / "lake", tmp_path / "checkpoint")
    events = [QuarantinedEvent.of_document(event(place, number), str(number)) for place, number in reversed(ROWS)]
    for shards, count in ((1, 7), (2, 10), (3, 11)):
        file = quarantine.stage(tmp_path / "lake", events, one_token=shards)
        path = quarantine.waiting(quarantine.LakeLayout(tmp_path / "lake"), file.name)
        tokens = pq.read_table(path).column("token").to_pylist()
        assert (file.rows, len(tokens), tokens) == (count, count, sorted(tokens))
