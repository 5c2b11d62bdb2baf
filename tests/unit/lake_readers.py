"""Reads of a lake that grows and is compacted meanwhile: each must see, once, everything that was committed before
it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.lake.store.commit_log import CommitLog
from tests.unit.lake_events import MIDNIGHT
from tests.unit.lake_writer import FIRST

#: Count, distinct count, least and greatest event number.
Seen = tuple[int, int, int, int]
_ROOT = Path(__file__).parents[2]


@contextmanager
def growing(root: Path, pause: float) -> Iterator[None]:
    """A writer that works on the lake at ``root``. It must still be running in the end."""
    command = [sys.executable, "-m", "tests.unit.lake_writer", str(root), str(pause)]
    writer = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while committed(root) < 200:
            assert writer.poll() is None, writer.communicate()[1].decode()
            time.sleep(0.05)
        yield
        assert writer.poll() is None, writer.communicate()[1].decode()
        writer.communicate(b"\n", timeout=300)
        assert writer.returncode == 0
    finally:
        writer.kill()
        writer.wait()


def committed(root: Path) -> int:
    """How many events the lake says it holds."""
    if not (root / "_tailrace" / "head.json").exists():
        return 0
    newest = CommitLog(root).head().newest
    return 0 if newest is None else newest.last_cluster_time.seconds - MIDNIGHT - FIRST + 1


def read_often(root: Path, read: Callable[[], Seen], times: int) -> tuple[int, int]:
    """Read ``times`` times, and on until some commits were made meanwhile. Returns how often rows were
    missing or doubled, and how many commits were made meanwhile. An error of a reader is raised."""
    before, wrong, done = CommitLog(root).head().number, 0, 0
    while done < times or CommitLog(root).head().number < before + 3:
        done += 1
        least = committed(root)
        rows, distinct, first, last = read()
        wrong += not (rows == distinct == last - first + 1 and first == FIRST and rows >= least)
    return wrong, CommitLog(root).head().number - before


def by_duckdb(root: Path) -> Seen:
    import duckdb
    from deltalake import DeltaTable

    lake = DeltaTable(str(root)).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("lake", lake)
        query = "SELECT count(*), count(DISTINCT number), min(number), max(number) FROM lake"
        return connection.execute(query).fetchone()  # type: ignore[return-value]


def by_polars(root: Path) -> Seen:
    import polars

    number = polars.col("number")
    chosen = [
        polars.len().alias("rows"),
        number.n_unique().alias("n"),
        number.min().alias("a"),
        number.max().alias("z"),
    ]
    return polars.scan_delta(str(root)).select(chosen).collect().row(0)  # type: ignore[return-value]


def by_pandas(root: Path) -> Seen:
    from deltalake import DeltaTable

    numbers = DeltaTable(str(root)).to_pandas(columns=["number"])["number"]
    return len(numbers), numbers.nunique(), int(numbers.min()), int(numbers.max())


def by_pyarrow(root: Path) -> Seen:
    import pyarrow.compute as pc
    from deltalake import DeltaTable

    numbers = DeltaTable(str(root)).to_pyarrow_dataset().to_table(columns=["number"]).column(0)
    return len(numbers), pc.count_distinct(numbers).as_py(), pc.min(numbers).as_py(), pc.max(numbers).as_py()


def by_files(root: Path) -> Seen:
    """DuckDB over the list of files that ``tailrace.lake.spark.store.files`` gives."""
    import duckdb

    from tailrace.lake import files

    with duckdb.connect() as connection:
        query = "SELECT count(*), count(DISTINCT number), min(number), max(number) FROM read_parquet(?)"
        return connection.execute(query, [files(root)]).fetchone()  # type: ignore[return-value]


READERS = {
    "duckdb": by_duckdb,
    "polars": by_polars,
    "pandas": by_pandas,
    "pyarrow": by_pyarrow,
    "files": by_files,
}
