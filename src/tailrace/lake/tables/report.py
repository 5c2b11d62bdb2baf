"""The state of the tables in a directory: what ``tailrace tables status`` prints. Nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import UsageError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.delta_commit import newest, time_text
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.description import described
from tailrace.lake.tables.holding import state_folder
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.standing import harm_of
from tailrace.lake.tables.state import UNKNOWN, TableMark, TableState
from tailrace.lake.tables.versions import disk_use


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table. ``changed`` is when it was changed last, ``trouble`` what is to be done to it; ``columns`` say where
    fields went whose columns have other names."""

    namespace: str
    version: int
    rows: int
    files: int
    changed: str | None
    trouble: str | None
    bytes: int
    bytes_on_disk: int
    files_on_disk: int
    log_files: int
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TablesReport:
    """All tables equal their collections at ``time``; ``None`` while a copy has not caught up. ``is_empty``: there are
    no tables, since no collection matches."""

    time: ClusterTime | None
    tables: tuple[TableStatus, ...]
    is_empty: bool = False


def report(root: TablePlace, namespaces: Sequence[str] = (), *, columns: bool = False) -> TablesReport:
    """The tables in ``root``, or those of ``namespaces``, whose ``columns`` are then all described. Raises UsageError
    where there is no such table, or no table of Tailrace at all."""
    if not state_folder(root).is_dir():
        raise UsageError(f"{root} holds no tables of Tailrace")
    state = TableState(state_folder(root) / "state", readonly=True)
    try:
        (position, marks, _), resyncing = state.snapshot(), state.resyncing()
    finally:
        state.close()
    if position is not None and not marks:
        return TablesReport(None, (), is_empty=True)
    for namespace in namespaces:
        if namespace not in marks:
            raise UsageError(f"{namespace} has no table in {root}")
    found = []
    for namespace in sorted(namespaces or marks):
        table = CollectionTable(place_of(root, namespace), namespace)
        trouble = _trouble(table, marks[namespace], is_copied=namespace in resyncing)
        lines = tuple(described(table, whole=bool(namespaces))) if columns else ()
        found.append(_report(table, trouble, lines))
    time = None if position is None or not position.stated else position.stated
    return TablesReport(time, tuple(found))


def _report(table: CollectionTable, trouble: str | None, columns: tuple[str, ...]) -> TableStatus:
    last, disk = newest(table.root), disk_use(table.root)
    return TableStatus(
        namespace=table.namespace,
        version=table.version,
        rows=table.rows(),
        files=sum(1 for _ in table.files()),
        changed=None if last is None else time_text(last.time),
        trouble=trouble,
        bytes=table.live_bytes,
        bytes_on_disk=disk.bytes,
        files_on_disk=disk.files,
        log_files=disk.log,
        columns=columns,
    )


def _trouble(table: CollectionTable, mark: TableMark, *, is_copied: bool) -> str | None:
    if is_copied:
        return "is being copied again"
    if mark.collection == UNKNOWN or harm_of(table.root, mark) is not None:
        return "does not match the state; the next run rewrites it"
    return None
