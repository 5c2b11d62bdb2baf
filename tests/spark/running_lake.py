"""A lake that ``tailrace run`` keeps in a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.store.status import lake_status
from tests.spark.commands import PATIENCE_S, finished
from tests.spark.commands import tailrace as tailrace_process

_PIPELINE = """\
source: {uri: '${TEST_URI}', database: shop, collection: orders, startingFrom: oldest%s}
lake: {path: lake, columns: [event, token]}
spark: {cores: 2, config: {spark.sql.shuffle.partitions: 2}}
"""


class RunningLake:
    """A lake of ``shop.orders`` in ``folder``. ``source`` are further options of the stream, ``more`` further lines of
    the pipeline file."""

    def __init__(self, uri: str, folder: Path, *, source: Sequence[str] = (), more: str = "") -> None:
        self.path = folder / "lake"
        (folder / "pipeline.yaml").write_text(_PIPELINE % "".join(f", {one}" for one in source) + more)
        self._process = tailrace_process("run", str(folder / "pipeline.yaml"), "--progress", "none", TEST_URI=uri)

    def _reaches(self, time_: ClusterTime) -> bool:
        assert self._process.poll() is None, self._process.communicate()
        found = lake_status(self.path).last_time if (self.path / "_tailrace" / "lake.json").exists() else None
        return found is not None and found >= time_

    def wait_for(self, time_: ClusterTime) -> None:
        """Wait until the lake has an event of this cluster time or a later one."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._reaches(time_):
            assert time.monotonic() < deadline, "the lake stays behind"
            time.sleep(0.2)

    def end(self) -> None:
        """Stop it as a user does, and wait until it has ended."""
        self._process.send_signal(signal.SIGTERM)
        code, _, err = finished(self._process)
        assert code == 0, err
