"""Sinks that are away for a while, or have no room: each says so, keeps nothing incomplete, and goes on afterwards.

The tests of ``foreach_batch`` raised their own errors inside a handler, while the connection still worked. So none had
noticed that a failing rollback hid the original error, nor that DuckDB refuses a file that it could not initialise.
Kafka is in ``test_to_kafka``.
"""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from tailrace.embedded import ReplicaSet
from tailrace.spark import AppliedBatches, MicroBatch
from tests.amounts import WHOLE
from tests.small_disk import PAGE, small_disk
from tests.spark.sinks import example, postgresql_server, search_index
from tests.spark.test_foreach_batch import (
    assert_in_index,
    assert_in_postgresql,
    changes_of,
    run,
    tokens_of,
)

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

#: The messages of DuckDB and SQLite.
NO_ROOM = "No space left on device|disk is full"


@pytest.fixture(scope="module")
def changed(replica_set: ReplicaSet) -> dict[str, Any]:
    return changes_of(replica_set, "sinksaway")


def fails(spark: SparkSession, changed: dict[str, Any], tmp_path: Path, write: Callable[[MicroBatch], object]) -> str:
    """The message with which the query ends."""
    with pytest.raises(Exception, match="STREAM_FAILED") as caught:
        run(spark, changed["options"], tmp_path / "checkpoint", write)
    return str(caught.value)


def goes_on(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path, write: Callable[[MicroBatch], object]
) -> None:
    run(spark, changed["options"], tmp_path / "checkpoint", write)


# -- no room ---------------------------------------------------------------------------------------------------------


def into_sqlite(batch: MicroBatch, file: str) -> None:
    with closing(sqlite3.connect(file)) as connection, AppliedBatches(connection, "changes").transaction(batch) as new:
        connection.execute("CREATE TABLE IF NOT EXISTS changes (token TEXT, event BLOB)")
        connection.executemany("INSERT INTO changes VALUES (?, ?)", [(row.token, row.event) for row in new.rows()])


@pytest.fixture
def frames(spark: SparkSession) -> list[DataFrame]:
    """Three batches of forty rows, each of 2,000 bytes that cannot be made smaller."""
    columns = "token string, operation_type string, collection string, document_key string, full_document string"

    def row(number: int) -> Row:
        token, event = f"82{1_700_000_000 + number:08X}000000012B", random.Random(number).randbytes(2000)
        return Row(token, "insert", "c", f'{{"_id": {number}}}', "{}", event)

    batches = [[row(40 * batch + number) for number in range(40)] for batch in range(3)]
    return [spark.createDataFrame(rows, f"{columns}, event binary").coalesce(1) for rows in batches]


#: How many batches are written before the disk is full, and the pages that are left then.
ROOMS = ((0, 0), (0, 1), (0, 6), (1, 0), (1, 2), (1, 12))


@pytest.mark.slow  # without Spark: tests/unit/test_sinks_without_room.py
@pytest.mark.parametrize(
    ("connect", "write"), [(duckdb.connect, example("to_duckdb").write), (sqlite3.connect, into_sqlite)]
)
def test_a_full_disk_under_the_sinks_file_leaves_no_part_of_a_batch(
    frames: list[DataFrame],
    connect: Callable[[str], Any],
    write: Callable[[MicroBatch, str], None],
    tmp_path: Path,
) -> None:
    def held() -> int:
        with closing(connect(file)) as connection:
            return int(connection.execute("SELECT count(*), count(DISTINCT token) FROM changes").fetchone()[0])

    batches = [MicroBatch("query", number, frame) for number, frame in enumerate(frames)]
    with small_disk(tmp_path / "disk", "32m") as disk:
        for before, pages in ROOMS if WHOLE else ROOMS[1::3]:
            file = str(disk.path / f"{before} {pages}")
            for batch in batches[:before]:
                write(batch, file)
            disk.leave(pages * PAGE)
            with pytest.raises(Exception, match=NO_ROOM):
                write(batches[before], file)
            disk.make_room()
            if before:
                assert held() == 40 * before, (before, pages)
            for batch in (batches[before], batches[before], batches[before + 1]):
                write(batch, file)
            assert held() == 40 * (before + 2), (before, pages)


def test_a_query_into_duckdb_goes_on_when_there_is_room(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        file = str(disk.path / "changes.duckdb")
        write = partial(example("to_duckdb").write, file=file)

        def fills_up(batch: MicroBatch) -> None:
            if batch.number:
                disk.leave(PAGE)
            write(batch)

        assert "No space left on device" in fails(spark, changed, tmp_path, fills_up)
        disk.make_room()
        goes_on(spark, changed, tmp_path, write)
        assert in_duckdb(file) == tokens_of(changed["events"])


def in_duckdb(file: str) -> list[str]:
    with duckdb.connect(file) as connection:
        return [token for (token,) in connection.execute("SELECT token FROM changes ORDER BY rowid").fetchall()]


# -- away ------------------------------------------------------------------------------------------------------------

_HOLD = "import duckdb, sys; held = duckdb.connect(sys.argv[1]); print(flush=True); sys.stdin.read()"


def test_a_duckdb_file_that_another_process_holds(spark: SparkSession, changed: dict[str, Any], tmp_path: Path) -> None:
    file = str(tmp_path / "changes.duckdb")
    write = partial(example("to_duckdb").write, file=file)
    command = [sys.executable, "-c", _HOLD, file]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        said = fails(spark, changed, tmp_path, write)
        other.communicate()
    assert "Could not set lock on file" in said
    assert f"PID {other.pid}" in said
    goes_on(spark, changed, tmp_path, write)
    assert in_duckdb(file) == tokens_of(changed["events"])


def test_postgresql_that_is_stopped_within_a_transaction_and_between_batches(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg2")
    with postgresql_server() as server:
        write = partial(example("to_postgresql").write, dsn=server.dsn)
        record = AppliedBatches._record

        def recorded(self: Any, found: Any, new: Any) -> None:
            record(self, found, new)
            if new.batch == 1:
                server.stop()

        with monkeypatch.context() as patch:
            patch.setattr(AppliedBatches, "_record", recorded)
            said = fails(spark, changed, tmp_path, write)
        assert re.search("terminating connection due to administrator command|server closed the connection", said)
        assert "already closed" not in said, "what the roll-back says is of no use"
        said = fails(spark, changed, tmp_path, write)
        assert f"port {server.port} failed: Connection refused" in said
        server.start()
        goes_on(spark, changed, tmp_path, write)
        assert_in_postgresql(server.dsn, changed)


def test_an_index_that_is_down_refuses_or_has_no_room(
    spark: SparkSession, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_elasticsearch = example("to_elasticsearch")
    # Not time.sleep itself, or everything in this process that waits would spin for minutes.
    monkeypatch.setattr(to_elasticsearch, "time", SimpleNamespace(sleep=lambda _: None))
    with search_index() as gone:
        url = gone.url
    assert "Connection refused" in fails(spark, changed, tmp_path, partial(to_elasticsearch.write, url=url, index="o"))
    with search_index() as index:
        write = partial(to_elasticsearch.write, url=index.url, index="orders")
        index.outage = 503
        assert "HTTP Error 503: Service Unavailable" in fails(spark, changed, tmp_path, write)
        index.outage, index.refusal = 0, 400
        said = fails(spark, changed, tmp_path, write)
        assert f"ValueError: orders refused {index.refused} documents; the first: {{'_id': " in said
        assert index.refused > 0
        index.refusal, index.busy = 0, 10**9
        assert "TimeoutError: orders had no room for " in fails(spark, changed, tmp_path, write)
        assert index.documents == {}
        index.busy = 0

        def breaks(batch: MicroBatch) -> None:
            index.outage = 503 if batch.number == 1 else 0
            write(batch)

        assert "HTTP Error 503" in fails(spark, changed, tmp_path, breaks)
        index.outage = 0
        goes_on(spark, changed, tmp_path, write)
        assert_in_index(index, changed)
