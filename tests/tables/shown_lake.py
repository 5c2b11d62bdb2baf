"""A lake in an object store whose commits a catalogue follows, and what each reader reads of both, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.lake.iceberg.lake_mirror import COMMIT, LakeMirror, identifier_of
from tailrace.lake.iceberg.mirror import version_of
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.manifest import StagedFile
from tailrace.lake.store.mirrored import ICEBERG
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.places import delta_table
from tests.tables.iceberg import sql_catalog, sql_settings
from tests.tables.object_server import ObjectServer
from tests.unit.lake_events import COLUMNS, STREAM, as_spark_plans, begin, planned_for, token

Rows = list[dict[str, Any]]
LAKE_COLUMNS = [*COLUMNS, {"name": "collection", "type": "string", "nullable": True, "metadata": {}}]
NAMES = ["orders", "a/b", "näme %20 = #", None]


class ShownLake:
    """A lake in a store, written with the state directory ``state``, that a catalogue follows. Event n is of second n
    after midnight, or of hour n."""

    def __init__(self, store: ObjectServer, prefix: str, folder: Path, *divided: str, state: str = "state") -> None:
        self.store, self.prefix, self.folder, self.state = store, prefix, folder, folder / state
        self.root = store.place(prefix, self.state)
        self.checkpoint = folder / f"{state}.checkpoint"
        self.divided, self.step = divided, 3600 if "hour" in divided else 1
        self.stream: dict[str, Any] = STREAM
        self.columns = LAKE_COLUMNS
        self.number = self.count = 0
        self.opened()
        self.mirror = self.mirror_at()

    def opened(self) -> None:
        """As a start opens it."""
        partitioning = Partitioning.of(self.divided) if self.divided else None
        self.claim = open_lake(self.root, self.checkpoint, self.stream, self.columns, partitioning=partitioning).claim
        begin(self.checkpoint)

    def elsewhere(self) -> ShownLake:
        """A stream on another machine, which takes the lake over."""
        other = ShownLake(self.store, self.prefix, self.folder, *self.divided, state="other")
        other.count = self.count
        return other

    def mirror_at(self, root: ObjectPlace | None = None) -> LakeMirror:
        """As another process opens it, without knowing what was shown before."""
        return LakeMirror(root or self.root, sql_settings(self.folder))

    def place_by(self, address: str, retry_s: float = 0.3) -> ObjectPlace:
        """The lake, by another way."""
        return self.store.place(self.prefix, self.state, address=address, retry_s=retry_s)

    def staged(self, numbers: range) -> tuple[StagedFile, ...]:
        batch = batch_of(numbers, self.step)
        if self.columns != LAKE_COLUMNS:
            batch = batch.append_column("late", pa.array(numbers, pa.int64()))
        partitioning = Partitioning.of(self.divided) if self.divided else Partitioning.of(())
        return PartWriter(self.root, f"s{numbers[0]}", partitioning=partitioning).write_all([batch])

    def add(self, events: int = 3, *, shown: bool = True, aside: int = 0) -> None:
        """``aside``: so many more events are put aside."""
        first_aside = self.count + events
        files = self.staged(range(self.count, first_aside)) if events else ()
        if aside:
            numbers = range(first_aside, first_aside + aside)
            events_aside = batch_of(numbers, self.step).column("event").to_pylist()
            misfits = [
                QuarantinedEvent.of_document(event, f"reason {number}", 10334)
                for number, event in zip(numbers, events_aside, strict=True)
            ]
            files = (*files, quarantine.stage(self.root, misfits))
        planned = as_spark_plans(self.root, self.number, planned_for(files))  # type: ignore[arg-type]
        assert commit_batch(self.root, self.claim, self.number, planned, files, checkpoint=self.checkpoint) is not None
        self.number += 1
        self.count += events + aside
        if shown:
            self.mirror.follow()

    # -- what others read ---------------------------------------------------------------------------------------------

    def found(self) -> Any:
        """What another program finds."""
        return sql_catalog(self.folder, **self.store.for_iceberg()).load_table(identifier_of(self.root))

    def versions(self) -> list[int]:
        """Compare each snapshot with the commit that it states, row for row. Returns the commits."""
        found, log, versions = self.found(), CommitLog(self.root), []
        for snapshot in found.snapshots():
            version = version_of(snapshot)
            assert snapshot.summary[COMMIT] == log.digest_of(version)
            expected = delta_table(self.root, version).to_pyarrow_table()
            given = found.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
            assert given.column_names == expected.column_names, version
            assert rows_of(given) == rows_of(expected), version
            assert int(snapshot.summary["total-records"]) == expected.num_rows
            versions.append(version)
        assert version_of(found.current_snapshot()) == max(versions)
        return versions

    def numbers(self) -> list[int]:
        """What the lake and each reader of Iceberg read of the newest commit, which must be the same."""
        import polars

        found, store = self.found(), self.store.for_iceberg()
        given = rows_of(found.scan().to_arrow())
        lazy = polars.scan_iceberg(found, reader_override="native", storage_options=store)
        assert given == rows_of(lazy.collect().to_arrow())
        with found.scan().to_duckdb("t") as connection:
            connection.execute("SET TimeZone = 'UTC'")
            assert given == rows_of(connection.sql("SELECT * FROM t").to_arrow_table())
        assert given == rows_of(delta_table(self.root).to_pyarrow_table())
        assert [(row["token"], row["event"]) for row in given] == events_of(self.root)
        return [row["number"] for row in given]

    @property
    def metadata(self) -> ObjectPlace:
        return self.root / ICEBERG / "metadata"

    def head(self) -> int:
        return CommitLog(self.root).head().number


def batch_of(numbers: Iterable[int], step: int = 1) -> pa.RecordBatch:
    """The rows of events, ``step`` seconds apart."""
    numbers = list(numbers)
    tokens = [token(number * step) for number in numbers]
    named = zip(numbers, tokens, strict=True)
    events = [bson.encode({"_id": {"_data": one}, "documentKey": {"_id": number}}) for number, one in named]
    return pa.record_batch(
        {
            "token": pa.array(tokens, pa.string()),
            "number": pa.array(numbers, pa.int64()),
            "event": pa.array(events, pa.binary()),
            "collection": pa.array([NAMES[n % len(NAMES)] for n in numbers], pa.string()),
        }
    )


def rows_of(table: Any) -> Rows:
    found: Rows = pa.table(table).to_pylist()
    return sorted(found, key=lambda row: (row["token"], str(row)))


def events_of(root: ObjectPlace) -> list[tuple[str, bytes]]:
    """What the lake's own log names, read object by object, as ``tailrace.lake.read`` does."""
    found: list[tuple[str, bytes]] = []
    for file in CommitLog(root).live_files():
        with pq.ParquetFile(pa.BufferReader((root / file.name).read_bytes())) as parquet:
            table = parquet.read(columns=["token", "event"])
        found += zip(table.column("token").to_pylist(), table.column("event").to_pylist(), strict=True)
    return sorted(found)


@contextmanager
def shown(store: ObjectServer, prefix: str, folder: Path) -> Iterator[ShownLake]:
    """A lake in a store and its catalogue; what watches its steps ends with it."""
    found = ShownLake(store, prefix, folder)
    yield found
    durable.observe_steps(None)
    found.mirror.close()
