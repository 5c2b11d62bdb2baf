"""A table takes over what a micro-batch has changed: the rows alone, or all of them."""

from __future__ import annotations

import logging

from tailrace.lake.tables.data_files import TableDamageError
from tailrace.lake.tables.delta_commit import Batch
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.open_tables import OpenTables
from tailrace.lake.tables.quarantine import Quarantine
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.standing import has_taken_over
from tailrace.lake.tables.state import TabledCollection, TableMark, TableState
from tailrace.lake.tables.widening import RetypedError, Widening

_log = logging.getLogger("tailrace.tables")


class TakeOver:
    """Writes rows of ``state`` to ``tables``; documents that do not fit a column go to ``quarantine``."""

    def __init__(self, tables: OpenTables, state: TableState, quarantine: Quarantine) -> None:
        self._tables = tables
        self._state = state
        self._quarantine = quarantine

    def bring_up(self, mark: TableMark, collection: TabledCollection | None, batch: Batch) -> bool:
        """Bring one table up to ``batch``. Returns whether there was anything to do."""
        if collection is None:
            if mark.collection is None and not mark.whole:
                return False
            table = self._tables.table(mark.namespace)
            if not has_taken_over(table, batch):
                table.look()
                table.write_whole(batch, table.schema(self._tables.rule(mark.namespace).schema), (), "drop")
            return True
        table = self._tables.table(mark.namespace)
        if mark.whole or mark.collection != collection.number or not table.exists:
            if not has_taken_over(table, batch):
                table.look()
                self._write_whole(table, collection, batch)
            return True
        keys = self._state.waiting_keys(collection.number)
        if not keys:
            return False
        if not has_taken_over(table, batch):
            table.refresh(batch.state, mark.version)
            self._change(table, collection, batch, keys)
        return True

    def _change(self, table: CollectionTable, collection: TabledCollection, batch: Batch, keys: list[bytes]) -> None:
        schema = table.schema(self._tables.rule(collection.namespace).schema)
        rows = Widening(schema, lambda misfits: self._quarantine.add(collection, batch, misfits), others=True)
        try:
            table.change(batch, rows, keys, rows.batches(self._state.waiting(collection.number)))
        except RetypedError as error:
            _log.info("%s: a column becomes wider; all rows are rewritten", collection.namespace)
            self._write_whole(table, collection, batch, error.schema)
        except TableDamageError as error:
            _log.warning("%s: %s. It is rewritten", collection.namespace, error.message)
            self._write_whole(table, collection, batch)

    def _write_whole(
        self, table: CollectionTable, collection: TabledCollection, batch: Batch, schema: TableSchema | None = None
    ) -> None:
        """Rewrite the table from the state, and again if a column had to become wider on the way."""
        given = schema or table.schema(self._tables.rule(collection.namespace).schema)
        while True:
            rows = Widening(given, lambda misfits: self._quarantine.add(collection, batch, misfits))
            try:
                table.write_whole(batch, rows, rows.batches(self._state.documents(collection.number)), "whole")
            except RetypedError as error:
                given = error.schema
                continue
            return
