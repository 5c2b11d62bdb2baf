"""Made-up change events for the lake's own tests: tokens in ascending order, some text to fill the files."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.identity import Opening, open_lake
from tailrace.lake.store.layout import cluster_time_of
from tailrace.lake.store.manifest import Commit, PlannedRange, StagedFile
from tailrace.lake.store.part_writer import PartWriter

#: 2026-11-21T00:00:00Z. Event number n happens n seconds later.
MIDNIGHT = 1_795_219_200
STREAM = {"settings": {"scope": "shop.orders"}, "columns": ["event", "token"], "documents": "json"}
NOTHING = PlannedRange(ClusterTime(0), ClusterTime(0))
COLUMNS = [
    {"name": name, "type": kind, "nullable": True, "metadata": {}}
    for name, kind in (("token", "string"), ("number", "long"), ("event", "binary"))
]


def token(number: int) -> str:
    """A token of event ``number``: the timestamp as the server writes it, then a possible rest."""
    return f"82{MIDNIGHT + number:08X}000000012B04"


def batch(numbers: Iterable[int], payload: int = 20) -> pa.RecordBatch:
    numbers = list(numbers)
    return pa.record_batch(
        {
            "token": pa.array([token(n) for n in numbers], pa.string()),
            "number": pa.array(numbers, pa.int64()),
            "event": pa.array([random.Random(n).randbytes(payload) for n in numbers], pa.binary()),
        }
    )


def stage(root: Path, numbers: Iterable[int], *, stem: str = "0-0", payload: int = 20) -> tuple[StagedFile, ...]:
    return PartWriter(root, stem).write_all([batch(numbers, payload)])


def planned_for(files: tuple[StagedFile, ...]) -> PlannedRange:
    """The range that Spark would have planned for exactly these events: it begins at the event before them."""
    first, last = cluster_time_of(files[0].first_token), cluster_time_of(files[-1].last_token)
    return PlannedRange(ClusterTime.of(first.seconds - 1, first.increment), last)


def put(
    root: Path, claim: str, number: int, files: tuple[StagedFile, ...], planned: PlannedRange | None = None
) -> Commit | None:
    """Commit a micro-batch. Without ``planned`` its range is that of its events, beginning where the lake's last one
    ended."""
    if planned is None:
        planned = as_spark_plans(root, number, planned_for(files)) if files else NOTHING
    return commit_batch(root, claim, number, planned, files)


def as_spark_plans(root: Path, number: int, own: PlannedRange) -> PlannedRange:
    """The range of micro-batch ``number``: ``own``, beginning where the lake's last one ended."""
    head = CommitLog(root).head()
    if head.newest is not None and (head.newest.batch, head.newest.planned.until) == (number, own.until):
        return head.newest.planned  # given again
    return own if head.reached is None else PlannedRange(min(own.after, head.reached), own.until)


def make(root: Path, checkpoint: Path) -> Opening:
    return open_lake(root, checkpoint, STREAM, COLUMNS)


def begin(checkpoint: Path) -> None:
    """Leave the files that Spark leaves when it has planned its first micro-batch."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / "0").touch()


def numbers_in(root: Path) -> list[int]:
    """What a reader without Tailrace finds: the files that ``deltalake`` reads in the log, in the order of their names,
    each from top to bottom."""
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    found: list[int] = []
    for uri in sorted(DeltaTable(str(root)).file_uris()):
        with pq.ParquetFile(uri.removeprefix("file://")) as parquet:
            found += parquet.read(columns=["number"]).column(0).to_pylist()
    return found
