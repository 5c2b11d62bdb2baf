"""``tailrace demo`` as a user starts it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tailrace.demo.comparison import lake_events
from tailrace.lake import verify
from tests.spark.commands import PATIENCE_S, tailrace


@pytest.mark.spark
@pytest.mark.mongod
def test_the_demo_crashes_goes_on_and_finds_no_difference(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    process = tailrace("demo", "--seconds", "8", "--rate", "150", "--directory", str(directory))
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, out + err
    assert "Killed the Spark process (SIGKILL)" in out
    assert "went on from the checkpoint with micro-batch" in out
    assert "differences: 0 in " in out
    assert "differences: 0 between the tables and their collections" in out
    assert "shop.orders held 20 documents, as the server had then" in out
    assert "upgrade       from MongoDB 5.0.4 to 6.0.27 under " in out
    assert "differences: 0 between the old deployment and the new one, in " in out
    assert f"lake = deltalake.DeltaTable('{directory}/lake').to_pyarrow_dataset()" in out
    assert verify(directory / "lake").problems == []
    query = out[out.index("SELECT") :].partition(";")[0]
    import deltalake
    import duckdb

    lake = deltalake.DeltaTable(str(directory / "lake")).to_pyarrow_dataset()
    assert lake is not None  # DuckDB finds it by its name
    # Python's client of DuckDB wants pytz for moments, so they stay in there.
    counted = duckdb.sql(f"SELECT collection, events FROM ({query})").fetchall()
    assert {row[0] for row in counted} == {"customers", "days", "orders", "stock"}
    assert sum(row[1] for row in counted) == len(list(lake_events(directory / "lake")))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.mongod
def test_the_demo_that_keeps_running_ends_well_when_it_is_interrupted(tmp_path: Path) -> None:
    """No test ran it in this way. The shop got a second signal after its interpreter had removed its handlers, and the
    demo called that a failure."""
    directory = tmp_path / "demo"
    process = tailrace(
        "demo", "--keep-running", "--no-crash", "--no-upgrade", "--rate", "150", "--directory", str(directory)
    )
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not list((directory / "lake").glob("day=*/*.parquet")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)  # some of the shop's day
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, out + err
    assert "Killed" not in out
    assert "differences: 0 in " in out
