"""Delta's change feed of a table: for each commit the rows that it changed, before and after.

A commit's feed is the difference of two versions. A document that changed several times between them is one update
here, from the row of the version before to that of the commit, and one that came and went does not appear. The feed is
written for each commit that changes rows, even where readers could take it from the data files: compaction replaces
these, and the feed is kept for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.data_files import Writers
from tailrace.lake.tables.delta_commit import NewFile
from tailrace.lake.tables.names import CHANGE_TYPE, KEY, OF_FEED
from tailrace.lake.tables.schema import Column

INSERT: Final = "insert"
DELETE: Final = "delete"
BEFORE: Final = "update_preimage"
AFTER: Final = "update_postimage"


class ChangeFeed:
    """The feed of one commit. First come the rows that it takes away, then those that it brings: one of each key."""

    def __init__(self, root: TablePlace) -> None:
        self._writers = Writers(root, folder=delta.FEED_FOLDER)
        self._before: list[pa.Table] = []
        self._keys_before = pa.array([], pa.binary())
        self._keys_after: list[pa.Array] = []

    def before(self, rows: pa.Table) -> None:
        """Rows of the version before whose keys the commit changes. They are in memory until the feed is written."""
        self._before.append(rows)
        self._keys_before = pa.concat_arrays([self._keys_before, _keys(rows)])

    def after(self, rows: pa.Table) -> None:
        """Rows that the commit brings."""
        keys = _keys(rows)
        self._keys_after.append(keys)
        self._write(rows, pc.is_in(keys, value_set=self._keys_before), AFTER, INSERT)

    def finish(self) -> list[NewFile]:
        """The files of the feed, on the device."""
        keys = pa.concat_arrays([pa.array([], pa.binary()), *self._keys_after])
        for rows in self._before:
            self._write(rows, pc.is_in(_keys(rows), value_set=keys), BEFORE, DELETE)
        return self._writers.finish()

    def abandon(self) -> None:
        """Delete what was written."""
        self._writers.abandon()

    def _write(self, rows: pa.Table, is_update: pa.Array, updated: str, otherwise: str) -> None:
        self._writers.write(rows.append_column(CHANGE_TYPE, pc.if_else(is_update, updated, otherwise)))


class NoFeed(ChangeFeed):
    """That of a table without one."""

    def before(self, rows: pa.Table) -> None:
        """Nothing is kept."""

    def after(self, rows: pa.Table) -> None:
        """Nothing is written."""


@contextmanager
def new_feed(root: TablePlace, *, wanted: bool) -> Iterator[ChangeFeed]:
    """The feed of a commit to the table at ``root``, if it has one. Its files are removed again if the commit is not
    made."""
    feed = ChangeFeed(root) if wanted else NoFeed(root)
    try:
        yield feed
    except BaseException:
        feed.abandon()
        raise


def begins_feed(root: TablePlace, table: DeltaTable | None, columns: Iterable[Column]) -> bool:
    """Whether the protocol of the table at ``root`` has to allow a change feed from now on. Raises SinkError where a
    column has a name that Delta reserves for it."""
    reserved = next((one.name for one in columns if one.name in OF_FEED), None)
    if reserved is not None:
        raise SinkError(
            f"the table {root} cannot have a change feed: Delta reserves the name of its column {reserved}",
            hint=f"Remove {root}: the next run writes the table from its state, with another name for the column",
        )
    return table is None or table.protocol().min_writer_version < delta.FEED_WRITER_VERSION


def _keys(rows: pa.Table) -> pa.Array:
    return pa.concat_arrays([pa.array([], pa.binary()), *rows.column(KEY).chunks])
