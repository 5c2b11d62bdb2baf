"""Tables take over the rows that wait for them in the state: the second part of a micro-batch, whoever feeds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.lake.tables.delta_commit import Batch
from tailrace.lake.tables.iceberg_mirror import IcebergMirror
from tailrace.lake.tables.open_tables import OpenTables, position_of
from tailrace.lake.tables.pace import Pacing
from tailrace.lake.tables.quarantine import FOLDER as QUARANTINE_FOLDER
from tailrace.lake.tables.quarantine import Quarantine
from tailrace.lake.tables.settings import TableSettings
from tailrace.lake.tables.standing import note
from tailrace.lake.tables.state import UNKNOWN, TableMark, TableState, taken_over
from tailrace.lake.tables.take_over import TakeOver
from tailrace.lake.tables.upkeep import Upkeep, cost_of


class Publication:
    """Brings ``tables`` up to ``state``. ``check`` raises where they are no longer ours to write."""

    def __init__(
        self,
        settings: TableSettings,
        state: TableState,
        tables: OpenTables,
        iceberg: IcebergMirror,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._selection = settings.selection
        self._state = state
        self._tables = tables
        self._iceberg = iceberg
        self._check = check
        self._take_over = TakeOver(tables, state, Quarantine(settings.root / QUARANTINE_FOLDER))
        self._pacing = Pacing(time.monotonic, merges=settings.merge_on_read)
        position = state.position()
        batch = 0 if position is None else position.batch
        self._upkeep = Upkeep(settings, batch, time.monotonic, release=iceberg.release)
        #: Whether rows wait for the tables, and when these took over some last.
        self.waiting = False
        self.at = time.monotonic()

    def wait(self) -> float:
        """The seconds until the tables may take over rows again."""
        return self._pacing.wait()

    def expire(self) -> None:
        """Remove what is no longer kept, now and then."""
        self._upkeep.expire(self._tables.opened)

    def publish(self, after: ClusterTime | None = None, *, without: Collection[str] = ()) -> None:
        """Let each table take over its pending rows, but those of ``without``. Does nothing while a copy has not caught
        up."""
        position = position_of(self._state)
        if position.time < position.hold:
            return
        self._check()
        position = self._tables.compare_seen()
        if position.time < position.hold:
            return
        marks = self._state.marks()
        current = {one.namespace: one for one in self._state.collections() if not one.pending}
        followed = {*marks, *filter(self._selection.has, current)}
        done: list[TableMark] = []
        for namespace in sorted(followed - set(without)):
            mark = marks.get(namespace, TableMark(namespace, None, -1, whole=True))
            collection = current.get(namespace)
            since = position.stated if after is None else min(after, position.stated) if position.stated else after
            if mark.collection == UNKNOWN or namespace not in marks:
                # Nobody has followed the table since its last version, which says nothing of the time after its own.
                since = self._tables.table(namespace).stated or since
            uuid = None if collection is None else collection.uuid
            batch = Batch(position.batch, since or ZERO, position.time, uuid, self._state.name, position.witness)
            if self._take_over.bring_up(mark, collection, batch):
                number = None if collection is None else collection.number
                table = self._tables.table(namespace)
                if mark.collection == UNKNOWN:
                    table.make_checkpoint()  # the log before it may be damaged
                taken = taken_over(TableMark(namespace, number, mark.batch, mark.whole), position.batch)
                done.append(note(taken, table))
        with self._state.writing() as state:
            for mark in done:
                state.set_mark(mark)
            state.forget_waiting()
            state.set_position(position.now_stated())
        durable.step("tables.done")
        for mark in done:
            self._tables.saw(mark)
        self.at, self.waiting = time.monotonic(), False
        self._keep_up(position.batch)

    def _keep_up(self, batch: int) -> None:
        """Merge small files, remove old ones, and follow with the catalogue."""
        self._upkeep.compact(self._tables.opened, batch)
        self.waiting = self._tables.note_damaged()
        self._iceberg.follow(self._tables.opened.values())
        self._upkeep.expire(self._tables.opened)
        tables = self._tables.opened
        self._pacing.committed(cost_of(tables), sum(table.live_bytes for table in tables.values()))
