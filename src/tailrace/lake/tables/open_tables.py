"""The tables in a directory, each opened when it is asked for, and whether they are those that the state knows."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from tailrace.core.oplog.cluster_time import ZERO
from tailrace.errors import OtherHistoryError, UsageError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit
from tailrace.lake.tables.delta_table import CollectionTable, tables_in
from tailrace.lake.tables.names import BEGIN_ANEW, place_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.standing import Seen, TableFault, check_owner, fault_of, seen
from tailrace.lake.tables.state import TableMark, TablesPosition, TableState, unknown
from tailrace.read.window.oplogs import OTHER_HISTORY

_log = logging.getLogger("tailrace.tables")


class TablesSource(Protocol):
    """Where the changes come from. ``deployment_id``: ``""`` where nobody says it."""

    @property
    def deployment_id(self) -> str: ...


class OpenTables:
    """The tables of ``settings``, which rows of ``state`` come to."""

    def __init__(self, settings: TableSettings, state: TableState, source: TablesSource) -> None:
        self._settings = settings
        self._selection = settings.selection
        self._state = state
        self._source = source
        self.opened: dict[str, CollectionTable] = {}
        #: How many were found that had to be rewritten.
        self.written_anew = 0
        #: The files of the tables' last commits when they were compared last.
        self._seen: dict[str, Seen | None] = {}

    def rule(self, namespace: str) -> TableRule:
        """The rule of a collection's table."""
        return self._settings.rule(namespace)

    def table(self, namespace: str) -> CollectionTable:
        """The table of a collection, be there one or not."""
        table = self.opened.get(namespace)
        if table is None:
            rule = self.rule(namespace)
            table = CollectionTable(
                self.folder(namespace),
                namespace,
                partition_by=rule.partition_by,
                bounds=rule.z_order,
                declared=rule.schema.declaration,
                policy=rule.schema.policy,
                deployment=self._source.deployment_id,
                feed=self._settings.feed_h > 0,
                merges=self._settings.merge_on_read,
            )
            self.opened[namespace] = table
        return table

    def folder(self, namespace: str) -> TablePlace:
        """Where the table of a collection is."""
        return place_of(self._settings.root, namespace)

    def saw(self, mark: TableMark) -> None:
        """Note the file of the commit that ``mark`` describes: it is ours."""
        self._seen[mark.namespace] = seen(self.folder(mark.namespace), mark)

    # -- whether they are the tables that the state knows -----------------------------------------------------------

    def check_deployment(self, table: CollectionTable) -> None:
        """Raises OtherHistoryError if the table says that it is of another deployment."""
        ours = self._source.deployment_id
        if table.deployment and ours and table.deployment != ours:
            raise OtherHistoryError(
                f"the table {table.root} is of another deployment: its id was {table.deployment} and is {ours}",
                hint=OTHER_HISTORY + BEGIN_ANEW,
            )

    def compare_all(self) -> None:
        """Compare every table with its mark. Those that were set back are rewritten, and so are those that nobody
        knows. Raises SinkError where it is not for us to decide."""
        self.opened.clear()
        position, marks, faults = position_of(self._state), self._state.marks(), list[TableFault]()
        for namespace, mark in marks.items():
            table = self.table(namespace)
            fault = fault_of(table, mark, position, self._state.name)
            if fault is not None:
                faults.append(fault)
            self._seen[namespace] = seen(table.root, mark)
        for namespace in tables_in(self._settings.root):
            if namespace not in marks and self._selection.has(namespace):
                table = self.table(namespace)
                check_owner(table, unknown(namespace))
                self.check_deployment(table)
                last = delta_commit.newest(table.root)
                if last is not None and (last.state, last.batch) == (self._state.name, position.batch):
                    continue  # its first commit, before a crash
                faults.append(TableFault(unknown(namespace), "is not known to the state"))
        self._anew(faults)

    def compare_seen(self) -> TablesPosition:
        """Compare the tables whose newest commit has another file than before: somebody has put back a folder, or has
        removed a file. Returns the position, which is later if a table has to be rewritten."""
        faults = []
        for namespace, mark in self._state.marks().items():
            now = seen(self.folder(namespace), mark)
            harmed = namespace in self.opened and self.opened[namespace].harm is not None
            if mark.version >= 0 and (harmed or self._seen.get(namespace) != now):
                self.opened.pop(namespace, None)
                fault = fault_of(self.table(namespace), mark, position_of(self._state), self._state.name)
                if fault is not None:
                    faults.append(fault)
                self._seen[namespace] = now
        return self._anew(faults)

    def note_damaged(self) -> bool:
        """Let tables be rewritten of which a merge has met a damaged file. Returns whether there are any."""
        marks, faults = self._state.marks(), list[TableFault]()
        for namespace, table in self.opened.items():
            if table.damage is not None and namespace in marks:
                faults.append(TableFault(marks[namespace], f"is damaged: {table.damage}"))
                table.damage = None
        self._anew(faults)
        return bool(faults)

    def _anew(self, faults: list[TableFault]) -> TablesPosition:
        """Let tables be rewritten from the state. One that has come to a later time than the state waits for it."""
        position = position_of(self._state)
        if not faults:
            return position
        batch, hold = position.batch, position.hold
        self.written_anew += len(faults)
        for fault in faults:
            namespace = fault.mark.namespace
            _log.warning("the table of %s %s: it is rewritten", namespace, fault.reason)
            table = self.table(namespace)
            batch, hold = max(batch, table.batch), max(hold, table.stated or ZERO)
        position = replace(position, batch=batch + 1, hold=hold)
        with self._state.writing() as state:
            for fault in faults:
                state.set_mark(unknown(fault.mark.namespace))
            state.set_position(position)
        return position

    def note_redeclared(self) -> None:
        """Tables whose declared columns, partitions or policies differ from those before are rewritten, unless they
        hold what they have to hold all the same."""
        marks = [
            mark
            for mark in self._state.marks().values()
            if mark.collection is not None and self._selection.has(mark.namespace)
            if self.table(mark.namespace).redeclared and not mark.whole
        ]
        if marks:
            with self._state.writing() as state:
                for mark in marks:
                    state.set_mark(replace(mark, whole=True))
                state.set_position(position_of(self._state).next_batch())


def position_of(state: TableState) -> TablesPosition:
    """Where the state stands. Raises UsageError if nothing was copied yet."""
    position = state.position()
    if position is None:
        raise UsageError("nothing was copied yet", hint="Call begin() first")
    return position
