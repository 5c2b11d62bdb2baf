"""What a collection held at a cluster time, or at a wall-clock time. The answer is exact, or an error.

A version of the table equals the collection at the time that its commit states, and at every time from there up to the
start of the next micro-batch that changed it. Between the start and the end of a micro-batch no version is exact. For a
time in between, the oplog's entries up to it, from an archive or the deployment, are applied to the version before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.archive.layout import existing
from tailrace.archive.source import ArchiveSource
from tailrace.errors import SinkError, UsageError
from tailrace.oplog.cluster_time import ZERO, ClusterTime
from tailrace.oplog.selection import Selection
from tailrace.source.connection import open_client
from tailrace.source.topology import Cluster
from tailrace.tables import delta_commit
from tailrace.tables.delta_commit import Stated, columns_of, stated
from tailrace.tables.fold import Fold, StateMismatchError
from tailrace.tables.names import BSON, CHANGED, KEY, folder_of
from tailrace.tables.oplogs import WINDOW_BYTES, OplogMember, Oplogs, read_window
from tailrace.tables.rows import chunks, make_rows
from tailrace.tables.schema import TableSchema
from tailrace.tables.state import StoredDocument, TabledCollection, TableState
from tailrace.tables.writer import STATE

_NUMBER: Final = 1
_LAST_INCREMENT: Final = 2**32 - 1


@dataclass(frozen=True)
class AsOf:
    """What a collection held.

    ``time``      the cluster time that was asked for
    ``version``   the table's version that it was made from
    ``replayed``  how many changes from archive or oplog were applied to that version; 0: the version itself is exact
    ``rows``      the table's columns
    """

    time: ClusterTime
    version: int
    replayed: int
    rows: pa.Table


def cluster_time_at(moment: datetime | ClusterTime) -> ClusterTime:
    """The last cluster time in the second of ``moment``, since cluster time counts whole seconds of the servers'
    clocks. Raises UsageError for a time without a zone."""
    if isinstance(moment, ClusterTime):
        return moment
    if moment.tzinfo is None:
        raise UsageError("the time has no time zone", hint="Add one: 2026-11-21T14:00:00Z")
    return ClusterTime.of(int(moment.timestamp()), _LAST_INCREMENT)


def as_of(
    root: Path,
    namespace: str,
    moment: datetime | ClusterTime,
    *,
    archive: Path | None = None,
    uri: Any = None,
) -> AsOf:
    """The rows of the collection's table at ``moment``.

    ``archive``, ``uri``  where the oplog's entries are read that lead from the nearest version to the moment, if it
                          lies inside a micro-batch: an archive's directory, or the deployment as far as its oplog
                          reaches

    Raises UsageError if the moment lies outside the times that the table covers, or inside a micro-batch with neither
    given; ChangeStreamHistoryLost (286) if the entries no longer exist.
    """
    time = cluster_time_at(moment)
    folder = root / folder_of(namespace)
    if not (folder / "_delta_log").is_dir():
        raise UsageError(f"{namespace} has no table in {root}")
    found, following = _around(folder, time)
    reached = _reached(root, namespace)
    if found is None:
        raise UsageError(
            f"the table of {namespace} knows nothing of {delta_commit.time_text(time)}: {_first(folder)}",
            hint="Ask for a later time; tables.retention says how long old versions are kept",
        )
    last = max(found.time, reached or ZERO)
    if following is None and time > last:
        raise UsageError(
            f"the table of {namespace} has come to {delta_commit.time_text(last)} only, but "
            f"{delta_commit.time_text(time)} was asked for",
            hint=None if reached is not None else "Nobody follows the collection: tables has no rule for it",
        )
    table = _load(folder, found)
    if following is None or time <= following.after:
        return AsOf(time, found.version, 0, _rows(table, found))
    members, close = _members(archive, uri, namespace, time, following)
    try:
        return _replayed(table, namespace, (found, following), time, members)
    finally:
        close()


def _around(folder: Path, time: ClusterTime) -> tuple[Stated | None, Stated | None]:
    """The newest of our versions at or before ``time``, and the first one after it."""
    following = None
    for one in stated(folder):
        if one.time <= time:
            return one, following
        following = one
    return None, following


def _first(folder: Path) -> str:
    oldest = None
    for one in stated(folder):
        oldest = one
    return "it has no versions" if oldest is None else f"its oldest version is of {delta_commit.time_text(oldest.time)}"


def _reached(root: Path, namespace: str) -> ClusterTime | None:
    """The time up to which the table is followed; ``None`` if it is not."""
    state = TableState(root / STATE / "state", readonly=True)
    try:
        position = state.position()
        if position is None or namespace not in state.marks():
            return None
        return position.stated
    finally:
        state.close()


def _load(folder: Path, wanted: Stated) -> DeltaTable:
    try:
        return DeltaTable(folder.absolute().as_uri(), version=wanted.version)
    except (DeltaError, OSError, ValueError) as error:
        raise SinkError(f"version {wanted.version} of {folder} cannot be read: {error}") from error


def _rows(table: DeltaTable, wanted: Stated) -> pa.Table:
    """All rows of a version. Its commit may be there longer than its files."""
    try:
        return table.to_pyarrow_table()
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise SinkError(
            f"version {wanted.version} of the table cannot be read, which stands at "
            f"{delta_commit.time_text(wanted.time)}: {error}",
            hint="Files that were replaced are kept for tables.retention, or what `tailrace tables expire` leaves",
        ) from error


def _members(
    archive: Path | None, uri: Any, namespace: str, time: ClusterTime, following: Stated
) -> tuple[Sequence[OplogMember], Any]:
    if archive is not None:
        description = existing(archive)
        names = [description.name] if description.name else list(description.shards)
        sources = [(name, ArchiveSource(archive, name)) for name in names if name]
        members = [OplogMember(name, source, description.server_version) for name, source in sources]
        return members, lambda: None
    if uri is None:
        raise UsageError(
            f"{delta_commit.time_text(time)} lies inside a micro-batch of {namespace}: between "
            f"{delta_commit.time_text(following.after)} and {delta_commit.time_text(following.time)}",
            hint="Give an archive, or the URI of the deployment, with the oplog entries since the version before",
        )
    client = open_client(uri)
    cluster = Cluster.discover(client, uri, {})
    return Oplogs(client, cluster, {}).live, client.close


class _Overlay:
    """The documents of a version of a table, and what was changed since."""

    def __init__(self, known: Mapping[bytes, bytes]) -> None:
        self._known = known
        self.changed: dict[int, dict[bytes, StoredDocument | None]] = {}

    def get(self, number: int, key: bytes) -> bytes | None:
        changed = self.changed.get(number, {})
        if key in changed:
            found = changed[key]
            return None if found is None else found.document
        return self._known.get(key) if number == _NUMBER else None

    def put(self, number: int, key: bytes, time: ClusterTime, document: bytes) -> None:
        self.changed.setdefault(number, {})[key] = StoredDocument(key, time, document)

    def delete(self, number: int, key: bytes) -> None:
        self.changed.setdefault(number, {})[key] = None

    def forget(self, collection: TabledCollection) -> None:
        """Nothing to do: the caller leaves out the rows of other collections."""


def _replayed(
    table: DeltaTable, namespace: str, around: tuple[Stated, Stated], time: ClusterTime, members: Sequence[OplogMember]
) -> AsOf:
    """The version before ``time``, with the changes of the following micro-batch up to ``time``."""
    found, following = around
    uuid = bytes.fromhex(found.collection) if found.collection else None
    collections = {} if uuid is None else {uuid: TabledCollection(uuid.hex(), _NUMBER, namespace)}
    fold = Fold(Selection((namespace,)), collections)
    numbers = iter(range(_NUMBER + 1, 1 << 30))
    after = following.after
    while after < time:
        window = read_window(members, after, time, WINDOW_BYTES)
        if window.until <= after:
            break
        fold.read(window, lambda: next(numbers))
        after = window.until
    if fold.unknown:
        raise UsageError(
            f"another collection was renamed to {namespace} just before {delta_commit.time_text(time)}: what it held "
            "is not in the oplog",
            hint=f"Ask for {delta_commit.time_text(following.time)} or later",
        )
    base = _rows(table, found)
    keys = pa.array(sorted(fold.keys()), pa.binary())
    touched = pc.is_in(base.column(KEY), value_set=keys)
    known = base.filter(touched)
    overlay = _Overlay(dict(zip(known.column(KEY).to_pylist(), known.column(BSON).to_pylist(), strict=True)))
    try:
        folded = fold.apply(overlay)
    except StateMismatchError as error:
        raise SinkError(
            f"version {found.version} of the table does not hold what was changed before "
            f"{delta_commit.time_text(time)}: {error.message}",
            hint="A document that was in quarantine is not in the versions of its table. Ask for "
            f"{delta_commit.time_text(found.time)}, or {delta_commit.time_text(following.time)} or later",
        ) from error
    number = next((one.number for one in fold.collections.values() if one.namespace == namespace), None)
    kept = base.filter(pc.invert(touched)) if number == _NUMBER else base.slice(0, 0)
    changed = [one for one in overlay.changed.get(number, {}).values() if one is not None] if number is not None else []
    schema = TableSchema(tuple(columns_of(_fields(table))), inferred=True, policy="widen")
    return AsOf(time, found.version, folded.changes, _together(kept, changed, schema))


def _together(kept: pa.Table, changed: Sequence[StoredDocument], schema: TableSchema) -> pa.Table:
    """Rows of a version and documents that were changed since; a column becomes wider where one of them asks for it."""
    rows = [kept]
    for piece in chunks(changed):
        made = make_rows(schema, piece)
        if made.retyped:
            return _anew(kept, changed, made.schema)
        rows.append(pa.Table.from_batches([made.batch]))
    return pa.concat_tables(rows, promote_options="permissive")


def _anew(kept: pa.Table, changed: Sequence[StoredDocument], schema: TableSchema) -> pa.Table:
    documents = [*_stored(kept), *changed]
    while True:
        rows = []
        for piece in chunks(documents):
            made = make_rows(schema, piece)
            schema = made.schema
            rows.append(pa.Table.from_batches([made.batch]))
        if all(one.schema.equals(rows[-1].schema) for one in rows):
            return pa.concat_tables(rows)


def _stored(rows: pa.Table) -> Iterator[StoredDocument]:
    for key, time, document in zip(*(rows.column(name).to_pylist() for name in (KEY, CHANGED, BSON)), strict=True):
        yield StoredDocument(key, ZERO if time is None else ClusterTime.of(time["t"], time["i"]), document)


def _fields(table: DeltaTable) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = json.loads(table.schema().to_json())["fields"]
    return fields
