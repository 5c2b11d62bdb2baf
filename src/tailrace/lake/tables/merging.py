"""A table's files merged after a micro-batch, or written anew without the rows that are gone from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.compaction import Layout, compacted
from tailrace.lake.tables.data_files import TableDamageError
from tailrace.lake.tables.deletion_vector import RowNumbers
from tailrace.lake.tables.delta_commit import NewFile, TableFile
from tailrace.lake.tables.live_files import gone_of
from tailrace.lake.tables.merge_on_read import part_rows, to_merge


class Mergeable(Protocol):
    """A table whose files can be merged (``CollectionTable``)."""

    root: TablePlace

    def refresh(self, state: str = "", known: int = -1) -> None: ...

    def files(self) -> Iterator[TableFile]: ...

    def layout(self, z_order: Sequence[str] = (), gone: Mapping[str, RowNumbers] | None = None) -> Layout: ...

    def replace(self, added: Sequence[NewFile], removed: Sequence[TableFile]) -> None: ...


def tidy(table: Mergeable, z_order: Sequence[str] = ()) -> Mapping[str, int]:
    """For a table that is merged on read, after each micro-batch: merge the files that readers should not have to read
    as they are. Returns how many files were removed and added."""
    table.refresh()
    files = list(table.files())
    groups = to_merge(files, divided=bool(table.layout().divide_by))
    if not groups:
        return {"numFilesRemoved": 0, "numFilesAdded": 0}
    return merge(table, z_order, groups=groups, part_rows=part_rows(files))


def purge(table: Mergeable, names: Collection[str]) -> None:
    """Write files anew without their rows that are gone: from then on only older versions have these."""
    if names:
        merge(table, (), groups=[[name] for name in names])


def purge_all(table: Mergeable) -> None:
    """The same for all files, before a commit removes them whose change feed is made of them: deltalake's reader of
    feeds takes all rows of a file that has gone (1.6.6). Where a file is damaged there is no such feed either way."""
    with suppress(TableDamageError):
        purge(table, [file.name for file in table.files() if file.gone])


def merge(table: Mergeable, z_order: Sequence[str], **options: Any) -> Mapping[str, int]:
    """Let merged files take the place of others. ``options``: which, as ``compacted`` has them."""
    known = {file.name: file for file in table.files()}
    gone = {name: gone_of(table.root, file) for name, file in known.items() if file.vector is not None}
    sizes = [(name, file.size) for name, file in known.items()]
    added, names = compacted(table.layout(z_order, gone), sizes, **options)
    removed = [known[name] for name in names]
    if removed:
        table.replace(added, removed)
    return {"numFilesRemoved": len(removed), "numFilesAdded": len(added)}
