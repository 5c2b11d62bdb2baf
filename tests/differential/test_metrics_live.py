"""What ``tailrace archive`` and ``tailrace tables write`` serve to Prometheus: the numbers of the work that they do."""

from __future__ import annotations

import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.read.archive.verification import verify
from tests import commands

pytestmark = pytest.mark.mongod


@contextmanager
def served(*arguments: str) -> Iterator[Callable[[str], float | None]]:
    """Run the command until SIGTERM, at which it must end well; gives a function that reads a number by its name from
    what it serves."""
    with tempfile.TemporaryFile() as err:
        running = commands.Command(*arguments, "--metrics", "127.0.0.1:0", stderr=err)

        def said() -> str:
            return os.pread(err.fileno(), 1 << 20, 0).decode()

        def number(name: str) -> float | None:
            assert running.poll() is None, said()
            found = re.search(r"statistics at (http://\S+)", said())
            if found is None:
                return None
            with urllib.request.urlopen(found[1], timeout=commands.PATIENCE_S) as reply:
                line = re.search(rf"^{re.escape(name)} (\S+)$", reply.read().decode(), re.MULTILINE)
            return None if line is None else float(line[1])

        try:
            yield number
            running.terminate()
            assert running.wait(commands.PATIENCE_S) == 0, said()
        finally:
            running.kill()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + commands.PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_archive_serves_what_it_has_written(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """No test had asked the command for them."""
    kept = tmp_path / "kept"
    begun = int(time.time())
    options = ("--from", "now", "--segment-seconds", "0.2")
    with served("archive", replica_set.uri, str(kept), *options) as number, MongoClient[Any](replica_set.uri) as client:
        until(lambda: number('tailrace_archive_until_seconds{oplog="rs0"}') is not None)
        client.metrics_live.c.insert_many([{"_id": one} for one in range(50)])
        until(lambda: (number('tailrace_archive_entries_total{oplog="rs0"}') or 0) >= 50)
        assert (number('tailrace_archive_segments_total{oplog="rs0"}') or 0) >= 1
        assert (number('tailrace_archive_bytes_total{oplog="rs0"}') or 0) >= 50 * 100
        assert (number('tailrace_archive_until_seconds{oplog="rs0"}') or 0) >= begun - 1
        assert (number('tailrace_archive_lag_seconds{oplog="rs0"}') or 0) < commands.PATIENCE_S
        client.drop_database("metrics_live")
    (found,) = verify(kept)
    assert found.faults == []


def test_tables_serve_what_they_have_written(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """The collector had a test, and the command had none."""
    tables = tmp_path / "tables"
    with MongoClient[Any](replica_set.uri) as client:
        client.metrics_live_too.c.insert_many([{"_id": one} for one in range(20)])
        with served("tables", "write", replica_set.uri, str(tables), "metrics_live_too.*") as number:
            until(lambda: number("tailrace_tables_documents_copied_total") == 20)
            client.metrics_live_too.c.update_many({}, {"$set": {"n": 1}})
            until(lambda: (number("tailrace_tables_changes_total") or 0) >= 20)
            until(lambda: number("tailrace_tables_tables") == 1)  # once they are published
        client.drop_database("metrics_live_too")
    assert DeltaTable(str(tables / "metrics_live_too.c")).to_pyarrow_table().num_rows == 20
