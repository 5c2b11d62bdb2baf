"""What the tables follow: collections that are selected for the first time are copied, others are given up."""

from __future__ import annotations

from dataclasses import replace

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.tables.copying import TablesCopy
from tailrace.lake.tables.delta_table import tables_in
from tailrace.lake.tables.open_tables import OpenTables, position_of
from tailrace.lake.tables.settings import TableSettings
from tailrace.lake.tables.state import StateTransaction, TabledCollection, TablesPosition, TableState, unknown
from tailrace.read.window.oplogs import Oplogs


class SelectedCollections:
    """The collections of ``selection``, and what ``state`` and ``tables`` have of them."""

    def __init__(
        self, settings: TableSettings, state: TableState, oplogs: Oplogs, copy: TablesCopy, tables: OpenTables
    ) -> None:
        self._root = settings.root
        self._selection = settings.selection
        self._state = state
        self._oplogs = oplogs
        self._copy = copy
        self._tables = tables

    def copy_all(self) -> None:
        """Copy every selected collection into the state. The position is set at the end; until then, a copy
        that a crash interrupted is continued."""
        # Where the state was lost the tables are still there: they start again too, and those of what has gone end.
        held = tables_in(self._root)
        for namespace in filter(self._selection.has, held):
            self._tables.check_deployment(self._tables.table(namespace))
        start = self._copy.begin()
        copied = self._copy.selected(self._selection)
        batch = 1 + max(held.values(), default=-1)
        hold = self._copy.now()
        with self._state.writing() as state:
            _set_copied(state, copied, hold)
            for namespace in filter(self._selection.has, held):
                state.set_mark(unknown(namespace))
            state.set_selection(self._selection.patterns)
            witness = self._oplogs.witness()
            state.set_position(TablesPosition(batch, start, self._oplogs.members, hold, witness=witness))
            state.end_copy()

    def copy_new(self) -> None:
        """Collections that were there before a pattern was: their past is not in the oplog."""
        patterns = self._selection.patterns
        if self._state.selection() == patterns:
            self._copy.give_up()
            return
        copied = self._copy.selected(self._selection)
        with self._state.writing() as state:
            if copied:
                hold = self._copy.now()
                _set_copied(state, copied, hold)
                state.set_position(replace(position_of(self._state), hold=hold, witness=self._oplogs.witness()))
            state.set_selection(patterns)

    def forget_unselected(self) -> None:
        """Stop following collections that have no rule any more. Their tables stay as they are."""
        gone = [one for one in self._state.collections() if not self._selection.has(one.namespace)]
        marks = [name for name in self._state.marks() if not self._selection.has(name)]
        if gone or marks:
            with self._state.writing() as state:
                for one in gone:
                    state.forget(one)
                for name in marks:
                    state.forget_mark(name)


def _set_copied(state: StateTransaction, collections: list[TabledCollection], until: ClusterTime) -> None:
    """The state has these collections now. Changes up to ``until`` may be in their documents already."""
    for collection in collections:
        state.set_collection(replace(collection, copied=int(until)))
        state.end_copying(collection.uuid)
