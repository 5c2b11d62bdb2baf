"""``tables_writer`` in a driver that is killed: no event is lost or applied twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tests.spark.lake_driving import PATIENCE_S
from tests.spark.sinks import ROOT
from tests.spark.streams import newest
from tests.spark.test_tables_writer import WHOLE, change
from tests.tables.equality import in_collection, in_table

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

#: When the drivers die, one after the other. The first dies in the copy, and the second completes it.
MOMENTS = ("tables.state 2", "never 0", "tables.state 1", "end 1", "tables.done 2", "never 1")


@pytest.mark.slow  # each of these moments by itself, without Spark: tests/unit/test_fed_tables.py
def test_a_driver_that_is_killed_at_any_moment_leaves_equal_tables(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """Killed in the copy (with its documents in the state), and after it: when the state is written and no table is,
    when everything is written, and between the function's end and Spark's own note."""
    database, chosen, uri = "fedkilled", random.Random(2), replica_set.uri
    options = {"uri": uri, "database": database, "startingFrom": "snapshot", "maxEventsPerTrigger": "40", **WHOLE}
    arguments = [json.dumps(options), str(tmp_path / "checkpoint"), str(tmp_path / "tables"), f"{database}.*"]
    with MongoClient[Any](uri) as client:
        client.drop_database(database)
        client[database].orders.insert_many([{"_id": n, "n": n} for n in range(100)])
        for moment in MOMENTS:
            with (tmp_path / "log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.spark.tables_driver", *arguments, moment],
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                status = process.wait(PATIENCE_S)
            expected = 0 if moment.startswith("never") else -signal.SIGKILL
            assert status == expected, (moment, (tmp_path / "log").read_text()[-3000:])
            if moment is not MOMENTS[-1]:
                change(client, database, chosen)
                newest(uri)
        for name in ("orders", "copied", "after"):
            assert in_table(tmp_path / "tables", f"{database}.{name}") == in_collection(client[database][name]), name
        client.drop_database(database)
