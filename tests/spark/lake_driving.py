"""Drivers of a lake in processes of their own, to be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.core.oplog.cluster_time import ClusterTime

_ROOT = Path(__file__).parents[2]
PATIENCE_S = 300  # a loaded machine takes a minute to start Spark


def options_for(uri: str, database: str, after: ClusterTime, **more: str) -> dict[str, str]:
    start = after.tick()
    return {"uri": uri, "database": database, "startAtOperationTime": f"{start.seconds},{start.increment}", **more}


@contextmanager
def driver(
    options: dict[str, str], lake: Path, *arguments: str, uri: str | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``uri``: where the lake is in an object store; ``lake`` is then a path beside which the driver's log lies."""
    with (lake.parent / "driver.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.lake_driver", json.dumps(options), uri or str(lake), *arguments],
            cwd=_ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
