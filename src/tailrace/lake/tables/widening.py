"""Columns that become wider while the rows of a table are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from tailrace.lake.tables.rows import Misfitting, rows_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.state import StoredDocument


class RetypedError(Exception):
    """A value did not fit its column, and by the policy the column becomes wider."""

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        self.schema = schema


class Widening:
    """A schema that grows while the rows of a table are made. ``quarantine`` is given the documents that do not fit
    before the table is committed: so a crash in between loses none of them. ``others``: the table has other rows, which
    keep their columns' types."""

    def __init__(
        self, schema: TableSchema, quarantine: Callable[[Sequence[Misfitting]], None], *, others: bool = False
    ) -> None:
        self.schema = schema
        self._quarantine = quarantine
        self._others = others

    @property
    def columns(self) -> Any:
        return self.schema.columns

    @property
    def cut(self) -> Any:
        return self.schema.cut

    def batches(self, documents: Iterator[StoredDocument]) -> Iterator[pa.RecordBatch]:
        wrote = self._others
        misfits: list[Misfitting] = []
        for found in rows_of(self.schema, documents):
            if found.retyped and wrote:
                raise RetypedError(found.schema)
            self.schema = found.schema
            misfits += found.misfits
            wrote = True
            yield found.batch
        self._quarantine(misfits)
