"""Sinks of ``foreach_batch`` in a driver that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import duckdb
import pytest

from tailrace.embedded import ReplicaSet
from tests.spark.lake_driving import PATIENCE_S
from tests.spark.sinks import ROOT, postgresql
from tests.spark.test_foreach_batch import assert_in_postgresql, changes_of, tokens_of

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


@pytest.mark.parametrize("moments", [["note 4"], pytest.param(["note 4", "end 1"], marks=pytest.mark.slow)])
def test_a_driver_that_is_killed_before_and_after_a_commit_leaves_every_event_once(
    replica_set: ReplicaSet, tmp_path: Path, moments: list[str]
) -> None:
    """Killed when the note of PostgreSQL is written but not committed and DuckDB already has the batch; and between the
    handler's end and Spark's own note, when both have it. An error in the handler, as in test_foreach_batch.py, lets
    the clients roll back; a kill does not."""
    changed = changes_of(replica_set, f"killed{len(moments)}")
    with ExitStack() as stack:
        dsn = stack.enter_context(postgresql())
        file = str(tmp_path / "file.duckdb")
        for die_at in (*moments, "never 0"):
            with (tmp_path / "log").open("ab") as log:
                arguments = [json.dumps(changed["options"]), str(tmp_path / "checkpoint"), file, dsn, die_at]
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.spark.sink_driver", *arguments],
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                status = process.wait(PATIENCE_S)
            expected = 0 if die_at == "never 0" else -signal.SIGKILL
            assert status == expected, (tmp_path / "log").read_text()[-3000:]
        with duckdb.connect(file) as connection:
            found = connection.execute("SELECT token FROM changes ORDER BY rowid").fetchall()
        assert [token for (token,) in found] == tokens_of(changed["events"])
        assert_in_postgresql(dsn, changed)
