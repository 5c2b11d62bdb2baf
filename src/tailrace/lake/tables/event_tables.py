"""Tables that are written from the rows of a query: micro-batch after micro-batch, each in the state first, and then in
the tables (``writer.py`` says how, and what happens after a crash in between)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.errors import UsageError
from tailrace.lake.tables.collector import without_collecting
from tailrace.lake.tables.delta_table import tables_in
from tailrace.lake.tables.event_fold import EventFold
from tailrace.lake.tables.event_rows import EventRow
from tailrace.lake.tables.fed import ANEW, FedBatch, FedMark, new_rows, refuse_others
from tailrace.lake.tables.holding import lock, state_folder
from tailrace.lake.tables.iceberg_mirror import mirror_of
from tailrace.lake.tables.open_tables import OpenTables
from tailrace.lake.tables.publishing import Publication
from tailrace.lake.tables.schema import DocumentMisfitError
from tailrace.lake.tables.settings import TableSettings
from tailrace.lake.tables.standing import note_disturbed
from tailrace.lake.tables.state import TablesPosition, TableState


@dataclass(frozen=True, slots=True)
class _Nowhere:
    """A query does not always say which deployment its rows are of: the state notes it where it does."""

    deployment_id: str = ""


class EventTables:
    """The tables of ``settings``, fed by a query. It has the directory to itself until ``close``.

    ``begins_empty``  there was nothing in the collections when the stream began
    ``now``           a cluster time that is no earlier than any read made before the call; needed for rows of a copy
    """

    def __init__(
        self,
        settings: TableSettings,
        *,
        begins_empty: bool = False,
        now: Callable[[], ClusterTime] | None = None,
    ) -> None:
        check_settings(settings)
        self._settings = settings
        self._selection = settings.selection
        self._begins_empty = begins_empty
        self._now = now
        with ExitStack() as opened:
            self._lock = lock(settings.root)
            opened.callback(os.close, self._lock)
            self._state = TableState(state_folder(settings.root) / "state")
            opened.callback(self._state.close)
            refuse_others(settings.root, self._state)
            self._refuse_changed()
            self._tables = OpenTables(settings, self._state, _Nowhere())
            self._publication = Publication(settings, self._state, self._tables, mirror_of(settings.root, None))
            self._begin()
            opened.pop_all()

    def close(self) -> None:
        """Close everything."""
        self._state.close()
        os.close(self._lock)

    def _refuse_changed(self) -> None:
        before, now = self._state.selection(), self._selection.patterns
        if before is not None and before != now:
            raise UsageError(
                f"the tables were begun with the collections {', '.join(before)}, not {', '.join(now)}",
                hint=f"What others hold was not kept: give the same ones, or {ANEW}",
            )
        if self._state.position() is None and tables_in(self._settings.root):
            raise UsageError(
                f"there are tables in {self._settings.root}, and their state in {state_folder(self._settings.root)} is "
                "not there",
                hint=f"Restore it, or {ANEW}",
            )

    def _begin(self) -> None:
        """Compare the tables with the state, and finish what a crash has interrupted."""
        if self._state.position() is None:
            return
        self._tables.compare_all()
        self._tables.note_redeclared()
        try:
            self._publish()
        except DocumentMisfitError:
            return  # a micro-batch that comes may mend the document

    def apply(self, batch: FedBatch) -> bool:
        """Apply a micro-batch, and let the tables take it over. Returns whether it was new: one that is given again
        changes nothing. Raises SinkError where it does not follow what the tables have, and UsageError for a stream
        that cannot keep tables."""
        mark = FedMark.of(self._state)
        position = self._state.position()
        rows = new_rows(mark, batch, ZERO if position is None else position.time)
        if rows is None:
            self._publish()
            return False
        copies = any(row.is_copy for row in rows)
        self._check_begun(mark, batch, copies=copies)
        hold = self._copied_until() if copies else ZERO
        with without_collecting():
            self._fold(mark, batch, rows, hold)
        durable.step("tables.state")
        self._publish()
        return True

    def _check_begun(self, mark: FedMark | None, batch: FedBatch, *, copies: bool) -> None:
        if copies or self._begins_empty or (mark is not None and mark.token) or not batch.stream:
            return
        if not any(one.copied for one in self._state.collections()):
            raise UsageError(
                "the stream does not begin with a copy, so what the collections held before it is not known",
                hint="Read it with startingFrom=snapshot and a new checkpoint. If the collections were empty when it "
                "began, give tables_writer(..., begins_empty=True)",
            )

    def _copied_until(self) -> ClusterTime:
        if self._now is None:
            raise UsageError(
                "the rows have a copy, and only the deployment can say when it ended",
                hint="Give tables_writer(..., uri=...): that of the deployment that the events come from",
            )
        return self._now()

    def _fold(self, mark: FedMark | None, batch: FedBatch, rows: Sequence[EventRow], hold: ClusterTime) -> None:
        """Bring the state to the end of the batch, in one step."""
        known = {bytes.fromhex(one.uuid): one for one in self._state.collections()}
        position = self._state.position() or TablesPosition(0, ZERO, {})
        fold = EventFold(self._selection, known, hold=hold)
        times = [row.time for row in batch.rows]
        reached = max([position.time, batch.reached or ZERO, *times])
        with self._state.writing() as state:
            fold.read(rows, state.next_number)
            folded = fold.apply(state)
            for number, keys in folded.touched.items():
                state.wait(number, keys)
            note_disturbed(self._state.marks(), fold.disturbed, state)
            for uuid, collection in fold.collections.items():
                if known.get(uuid) != collection:
                    state.set_collection(collection)
            state.set_selection(self._selection.patterns)
            state.set_fed(FedMark.after(mark, batch).to_document())
            state.set_position(replace(position, batch=position.batch + 1, time=reached, hold=max(position.hold, hold)))

    def _publish(self) -> None:
        position = self._state.position()
        if position is not None and position.time:
            self._publication.publish()


def check_settings(settings: TableSettings) -> None:
    """Raises UsageError for settings with which a query cannot feed tables."""
    settings.check()
    refused = {
        "an object store": not isinstance(settings.root, Path),
        "Iceberg": settings.iceberg is not None,
        "masks (give them to format('tailrace'))": settings.masks is not None,
        "take_over": settings.take_over,
    }
    for name, given in refused.items():
        if given:
            raise UsageError(
                f"tables that a query feeds cannot be written with {name}", hint="`tailrace tables write` can"
            )
