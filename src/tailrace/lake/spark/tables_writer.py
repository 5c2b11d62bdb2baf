"""Current-state tables from a query of the user's: ``writeStream.foreachBatch(tables_writer("tables", ...))``."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import UsageError
from tailrace.lake.spark.batch import query_of
from tailrace.lake.tables.event_rows import read_rows
from tailrace.lake.tables.event_tables import EventTables, check_settings
from tailrace.lake.tables.fed import FedBatch
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.read.snapshot.reader import places_of
from tailrace.read.source.connection import RETRY_SECONDS, open_client
from tailrace.read.source.topology import Cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_EVENT: Final = "event"
#: Those that this process has open, by directory: a query that is started again takes them over from the one before.
_open: Final[dict[Path, TablesSink]] = {}
_turn: Final = threading.RLock()


def tables_writer(
    tables: str | Path | TableSettings,
    *,
    collections: str | Iterable[str] = "*.*",
    uri: str | None = None,
    begins_empty: bool = False,
    query: str | None = None,
) -> Callable[[DataFrame, int], None]:
    """The function for ``writeStream.foreachBatch`` that keeps current-state tables from change events: a Delta table
    for each collection, which equals it after these events.

    Args:
        tables: the directory of the tables, or settings with rules, columns and upkeep
        collections: patterns such as ``shop.orders`` or ``shop.*``; only with a directory
        uri: the deployment that the events come from. Needed for a stream with ``startingFrom=snapshot``: it says when
            the copy ended
        begins_empty: the collections were empty when the stream began, so that it needs no copy
        query: as in ``foreach_batch``; required with Spark Connect

    The frame needs the column ``event`` with whole events: ``format("tailrace")`` with ``showExpandedEvents`` and
    ``showRawUpdateDescription``. A micro-batch that is given again is recognised. Raises UsageError for settings with
    which a query cannot feed tables. The query fails with UsageError for a stream that cannot keep tables, and with
    SinkError for a checkpoint that does not go on where the tables are.
    """
    if isinstance(tables, TableSettings):
        if collections != "*.*":
            raise UsageError("the settings have rules already", hint="Leave out collections")
        settings = tables
    else:
        patterns = [collections] if isinstance(collections, str) else list(collections)
        settings = TableSettings(Path(tables).absolute(), [TableRule(pattern) for pattern in patterns])
    check_settings(settings)
    return TablesSink(settings, uri, begins_empty=begins_empty, query=query)


class TablesSink:
    """See ``tables_writer``. Opens the tables with the first micro-batch."""

    def __init__(self, settings: TableSettings, uri: str | None, *, begins_empty: bool, query: str | None) -> None:
        self._settings = settings
        self._uri = uri
        self._begins_empty = begins_empty
        self._query = query
        self._tables: EventTables | None = None

    def __call__(self, frame: DataFrame, number: int) -> None:
        """Apply a micro-batch."""
        _check_columns(frame)
        query = query_of(frame) if self._query is None else self._query
        reached, source = _offset_of(frame, number)
        events = frame.select(_EVENT).toArrow().column(0).to_pylist()
        with _turn:
            batch = FedBatch(query, number, read_rows(events), reached, source)
            del events
            try:
                self._opened().apply(batch)
            except BaseException:
                self.close()  # the query ends, and its process may go on
                raise

    def _opened(self) -> EventTables:
        if self._tables is None:
            root = Path(str(self._settings.root)).absolute()
            before = _open.pop(root, None)
            if before is not None:
                before.close()
            now = None if self._uri is None else self._now
            self._tables = EventTables(self._settings, begins_empty=self._begins_empty, now=now)
            _open[root] = self
            atexit.register(self.close)
        return self._tables

    def _now(self) -> ClusterTime:
        assert self._uri is not None
        with open_client(self._uri) as client:
            cluster = Cluster.discover(client, self._uri, {})
            try:
                return places_of(cluster or client, RETRY_SECONDS).now()
            finally:
                if cluster is not None:
                    cluster.close()

    def close(self) -> None:
        """Close the tables. The next micro-batch opens them again."""
        with _turn:
            tables, self._tables = self._tables, None
            if tables is not None:
                atexit.unregister(self.close)
                tables.close()


def _check_columns(frame: DataFrame) -> None:
    from pyspark.sql.types import BinaryType  # noqa: PLC0415

    if _EVENT not in frame.columns:
        raise UsageError(
            f"tables_writer needs the column '{_EVENT}', and there are only {', '.join(frame.columns) or 'none'}",
            hint="Keep it among the source's columns and in every select",
        )
    kind = frame.schema[_EVENT].dataType
    if not isinstance(kind, BinaryType):
        raise UsageError(
            f"the column '{_EVENT}' holds change events as BSON (binary), not {kind.simpleString()}",
            hint="From Kafka it is the value of a message that has the event's own bytes",
        )


def _offset_of(frame: DataFrame, number: int) -> tuple[ClusterTime | None, str]:
    """What the query's checkpoint says of a micro-batch that ``format("tailrace")`` alone gives: the cluster time up to
    which all events were given, and the deployment. ``(None, "")`` where it cannot be read, or has other sources."""
    try:
        context: Any = frame.sparkSession
        found = context._jsparkSession.streams().get(query_of(frame)).streamingQuery().resolvedCheckpointRoot()
        root = Path(unquote(urlsplit(str(found)).path))
        lines = (root / "offsets" / str(number)).read_text().splitlines()
        [offset] = [json.loads(line) for line in lines[2:]]
        stream, time = offset["stream"], offset["clusterTime"]
        if "snapshot" in offset or not stream["settings"]:
            return None, ""
        source = json.dumps([stream.get("cluster", ""), stream.get("replicaSets", {})], sort_keys=True)
        return ClusterTime.of(int(time["t"]), int(time["i"])), source
    except Exception:  # noqa: BLE001  an answer is not needed: without it the events' own times count
        return None, ""
