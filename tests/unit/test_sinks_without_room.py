"""``AppliedBatches`` and the example for DuckDB on a disk with no room and with little: the error says so, no part of a
batch stays, and the batch is taken when there is room.

The tests with Spark raise errors of their own inside a handler, where the connection still works. So none had noticed
that a roll-back which fails as well hid what had happened, nor that DuckDB refuses a file which it could not begin.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tailrace.spark import AppliedBatches, MicroBatch
from tests.small_disk import PAGE, small_disk
from tests.spark.sinks import example

ROWS = 40


class Frame:
    """What a batch needs of a DataFrame, on an Arrow table: Spark itself has no part in a full disk under a sink."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.columns = table.column_names

    def __getitem__(self, name: str) -> Any:
        return pc.field(name)

    def where(self, condition: Any) -> Frame:
        return Frame(self._table.slice(0, 0) if isinstance(condition, str) else self._table.filter(condition))

    def agg(self, _: dict[str, str]) -> Any:
        return SimpleNamespace(first=lambda: (pc.max(self._table["token"]).as_py(),))

    def toArrow(self) -> pa.Table:  # noqa: N802  Spark's name, as the next
        return self._table

    def toLocalIterator(self, **_: bool) -> Iterator[dict[str, Any]]:  # noqa: N802
        return iter(self._table.to_pylist())


def batch(number: int) -> MicroBatch:
    """Forty rows of 2,000 bytes that cannot be made smaller."""
    rows = range(ROWS * number, ROWS * number + ROWS)
    columns = {
        "token": [f"82{1_700_000_000 + row:08X}000000012B" for row in rows],
        "operation_type": ["insert" for _ in rows],
        "collection": ["c" for _ in rows],
        "document_key": [f'{{"_id": {row}}}' for row in rows],
        "full_document": ["{}" for _ in rows],
        "event": [random.Random(row).randbytes(2000) for row in rows],
    }
    return MicroBatch("query", number, Frame(pa.table(columns)))  # type: ignore[arg-type]


def into_sqlite(given: MicroBatch, file: str) -> None:
    with closing(sqlite3.connect(file)) as connection, AppliedBatches(connection, "changes").transaction(given) as new:
        connection.execute("CREATE TABLE IF NOT EXISTS changes (token TEXT, event BLOB)")
        connection.executemany(
            "INSERT INTO changes VALUES (?, ?)", [(row["token"], row["event"]) for row in new.rows()]
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("connect", "write", "said"),
    [
        (duckdb.connect, example("to_duckdb").write, "No space left on device"),
        (sqlite3.connect, into_sqlite, "database or disk is full"),
    ],
)
def test_a_full_disk_under_a_sinks_file_is_told_and_leaves_no_part_of_a_batch(
    connect: Callable[[str], Any], write: Callable[[MicroBatch, str], None], said: str, tmp_path: Path
) -> None:
    def held() -> tuple[int, int]:
        with closing(connect(file)) as connection:
            one, other = connection.execute("SELECT count(*), count(DISTINCT token) FROM changes").fetchone()
            return int(one), int(other)

    with small_disk(tmp_path / "disk", "32m") as disk:
        for before, pages in [(0, 0), (0, 1), (0, 2), (0, 4), (0, 9), (1, 0), (1, 1), (1, 3), (1, 9)]:
            file = str(disk.path / f"{before} {pages}")
            for number in range(before):
                write(batch(number), file)
            disk.leave(pages * PAGE)
            with pytest.raises(Exception, match=said):
                write(batch(before), file)
            disk.make_room()
            for number in (before, before, before + 1):
                write(batch(number), file)
            assert held() == (ROWS * (before + 2), ROWS * (before + 2)), (before, pages)


def test_a_connection_that_is_gone_is_told_by_its_own_error() -> None:
    """As psycopg2 does it: the statement fails, and then the roll-back, with "connection already closed"."""

    class Gone:
        def cursor(self) -> Any:
            raise ConnectionError("the server is being stopped")

        def rollback(self) -> None:
            raise ValueError("connection already closed")

    with (
        pytest.raises(ConnectionError, match="is being stopped"),
        AppliedBatches(Gone(), "changes").transaction(batch(0)),
    ):
        pass
