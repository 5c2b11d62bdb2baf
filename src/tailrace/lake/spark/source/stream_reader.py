"""The streaming reader: offsets on the driver's side, slices to the workers.

Spark calls the methods below in one long-lived process next to the driver, all but ``read``, which runs in the workers
on an unpickled copy. What ``latestOffset`` learns is therefore passed on in offsets and slices only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import StreamInvalidated
from tailrace.lake.spark.planning.deployment import Deployment
from tailrace.lake.spark.planning.input_partition import OplogSlice, SnapshotSlice
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.planning.planner import Limits
from tailrace.lake.spark.planning.snapshot import snapshot_slices
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.lake.spark.planning.backlog import Backlog

_log = logging.getLogger("tailrace.spark")
#: How long ``latestOffset`` waits for something new, and how often it looks meanwhile (0.2 ms of work each).
_WAIT_S: Final = 0.5
_LOOK_S: Final = 0.01
#: While nothing in the scope happens the position follows the oplog at this pace (cluster time, seconds), so that it
#: does not fall off its end; in between, others' writes make no empty micro-batches.
_IDLE_ADVANCE_S: Final = 10
#: How often a query that does not lag asks for the oplog's length, and how often one in danger is warned of.
_BACKLOG_S: Final = 5.0
_WARN_S: Final = 60.0


class TailraceStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A change stream as a Spark stream."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._deployment: Deployment | None = None
        self._initial: dict[str, Any] | None = None
        self._pinned = False
        self._target: ClusterTime | None = None
        self._told_of_end = False
        self._compared = False
        self._reached: ClusterTime | None = None
        #: What was reported last, and when.
        self._backlog: tuple[float, Backlog] | None = None
        self._warned = -_WARN_S

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_options"])  # type: ignore[misc]

    @property
    def deployment(self) -> Deployment:
        if self._deployment is None:
            self._deployment = open_deployment(self._options)
        return self._deployment

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        # Spark asks twice for the first micro-batch; "now" must not move in between.
        if self._initial is None:
            self._initial = self.deployment.start("now").to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_events is not None:
            return ReadMaxRows(self._options.max_events)
        return ReadMaxBytes(self._options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self.deployment.newest()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        if self._initial is None and self._deployment is None:
            return None
        report = self.deployment.at(self.deployment.newest()).to_json()
        if self._reached is None:
            return report
        now = time.monotonic()
        if self._backlog is None or now - self._backlog[0] >= _BACKLOG_S or self._backlog[1].seconds:
            self._backlog = now, self.deployment.backlog(self._reached)
            self._warn(self._backlog[1])
        return {**report, **self._backlog[1].to_json()}

    def _warn(self, backlog: Backlog) -> None:
        if backlog.in_danger and time.monotonic() - self._warned >= _WARN_S:
            self._warned = time.monotonic()
            _log.warning("%s", backlog.warning())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next micro-batch, or ``start`` itself where there is nothing to read."""
        end = self._end(start, limit)
        self._reached = Offset.from_json(end).cluster_time
        return end

    def _end(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if not self._pinned:
            # Spark never stores an initial offset. An empty first micro-batch does: its end is where the stream starts,
            # and a crash before the first event is then no gap. A start that the user named is the same next time.
            self._pinned = True
            if start == self._initial and not self._options.has_fixed_start:
                return start
        position = self.deployment.offset(start)
        if not self._compared:  # before waiting: a deployment that was restored may have nothing new
            self._compare(position)
        if position.snapshot is not None:
            self.deployment.require_history(position)
            planned = self.deployment.snapshots.next(position.snapshot, _limits(self._options, limit))
            if planned is not None:
                return self.deployment.copying(position, planned).to_json()
            position = replace(position, snapshot=None)
            start = position.to_json()  # nothing is left to copy, and the stream begins
        if position.invalidated:
            self._tell_of_end(position)
            time.sleep(0 if self._target is not None else _WAIT_S)
            return start
        newest = self._wait(position)
        if newest <= position.cluster_time:
            return start
        self.deployment.settle(newest)
        self._compare(position)
        self.deployment.require_history(position)
        return self.deployment.end(position, newest, _limits(self._options, limit)).to_json()

    def _compare(self, position: Offset) -> None:
        """Raises OtherHistoryError where the deployment no longer has what was read of it."""
        self.deployment.require_same_history(position)
        self._compared = True

    def _tell_of_end(self, position: Offset) -> None:
        """What the stream watched is gone, and the sink has the ``invalidate`` event: a line in the log, once, and an
        error where the user wants one. (A Python source has no other way to end its query.)"""
        message = (
            f"the stream has ended at {position.cluster_time}: its collection or database was dropped or renamed "
            "(invalidate)"
        )
        hint = "Continue with a new checkpoint and startAfter the token of its last event"
        if self._options.fails_on_invalidate:
            raise StreamInvalidated(message, hint=hint)
        if not self._told_of_end:
            self._told_of_end = True
            _log.warning("%s. The query stays idle; with failOnInvalidate it fails. %s", message, hint)

    def _wait(self, position: Offset) -> ClusterTime:
        """The newest time that is worth a micro-batch; the position's own where waiting brought none."""
        if self._target is not None:
            return self._target
        deadline = time.monotonic() + _WAIT_S
        while True:
            look = self.deployment.look(position.cluster_time)
            if look.has_news or look.time.seconds - position.cluster_time.seconds >= _IDLE_ADVANCE_S:
                return look.time
            if time.monotonic() >= deadline:
                return position.cluster_time
            time.sleep(_LOOK_S)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        deployment = self.deployment
        until = deployment.offset(end)
        if until.snapshot is not None:
            if start == end:
                return []
            return snapshot_slices(until.snapshot, self._options.partitions)
        return deployment.slices(deployment.offset(start), until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tailrace.lake.spark.reading.slice_reader import read_slice  # noqa: PLC0415 - the stages and Arrow: in the workers only

        assert isinstance(partition, OplogSlice | SnapshotSlice)
        return read_slice(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the position lives in Spark's checkpoint. (Spark calls this late, and not for the last.)"""

    def stop(self) -> None:
        if self._deployment is not None:
            self._deployment.close()


def _limits(options: ReadOptions, limit: ReadLimit) -> Limits | None:
    return None if isinstance(limit, ReadAllAvailable) else Limits(options.max_events, options.max_bytes)
