"""What a collection held at a cluster time, or at a wall-clock time. The answer is exact, or an error.

A version of the table equals the collection at the time that its commit states, and at every time from there up to the
start of the next micro-batch that changed it. Between the start and the end of a micro-batch no version is exact. For a
time in between, the oplog's entries up to it, from an archive or the deployment, are applied to the version before. If
another collection got the name in between, its documents are those of the table that it had before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.base.object_place import reason
from tailrace.core.oplog.cluster_time import ZERO, ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.core.oplog.witness import EntryMark, Witness
from tailrace.errors import OtherHistoryError, SinkError, UsageError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import versions
from tailrace.lake.tables.delta_commit import Stated, columns_of
from tailrace.lake.tables.fold import Fold, FoldOfOne, StateMismatchError
from tailrace.lake.tables.holding import state_folder
from tailrace.lake.tables.masking import check_masks
from tailrace.lake.tables.names import BEGIN_ANEW, BSON, CHANGED, KEY, place_of
from tailrace.lake.tables.rows import rows_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.standing import check_log, harm_of
from tailrace.lake.tables.state import UNKNOWN, StoredDocument, TabledCollection, TableMark, TableState
from tailrace.lake.tables.version_rows import all_rows
from tailrace.read.archive.layout import existing
from tailrace.read.archive.place import ArchivePlace, archive_place
from tailrace.read.archive.source import ArchiveSource
from tailrace.read.source.connection import open_client
from tailrace.read.source.mask_file import Masks
from tailrace.read.source.topology import Cluster
from tailrace.read.window.oplogs import WINDOW_BYTES, OplogMember, Oplogs, read_window

_NUMBER: Final = 1
_LAST_INCREMENT: Final = 2**32 - 1


@dataclass(frozen=True)
class AsOf:
    """What a collection held.

    Attributes:
        time: the cluster time that was asked for
        version: the table's version that it was made from
        replayed: how many changes from archive or oplog were applied to that version; 0: the version itself is exact
        rows: the table's columns
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
    root: TablePlace,
    namespace: str,
    moment: datetime | ClusterTime,
    *,
    archive: str | ArchivePlace | None = None,
    uri: Any = None,
    masks: Masks | None = None,
) -> AsOf:
    """The rows of the collection's table at ``moment``.

    Args:
        archive: for a moment inside a micro-batch: the directory of an archive, or its URI in an object store, from
            which the oplog's entries between the nearest version and the moment are read
        uri: a deployment from which they are read instead, as far as its oplog reaches
        masks: the masks that the tables are written with, for the entries that are read

    Raises UsageError if the moment lies outside the times that the table covers, or inside a micro-batch with neither
    given; ChangeStreamHistoryLost (286) if the entries no longer exist.
    """
    time = cluster_time_at(moment)
    folder = place_of(root, namespace)
    if not delta.is_table(folder):
        raise UsageError(f"{namespace} has no table in {root}")
    known = _known(root, namespace)
    reached = known.reached
    if known.mark is not None and (harm := harm_of(folder, known.mark)) is not None:
        raise SinkError(
            f"the table of {namespace} does not match its state: it {harm}",
            hint="`tailrace tables write` rewrites it",
        )
    found, following = versions.around(folder, time)
    if found is None:
        raise UsageError(
            f"the table of {namespace} does not reach back to {time}: {_first(folder)}",
            hint="Ask for a later time; tables.retention says how long old versions are kept",
        )
    last = max(found.time, reached or ZERO)
    if following is None and time > last:
        raise UsageError(
            f"the table of {namespace} reaches only to {last}, but {time} was asked for",
            hint=None if reached is not None else "The collection is not followed: no rule of the tables selects it",
        )
    check_log(folder, found if following is None else following, known.mark)
    table = _load(folder, found)
    if following is None or time <= following.after:
        return AsOf(time, found.version, 0, _rows(folder, table, found))
    check_masks(root, known.masks, masks)
    members, close = _members(archive, uri, namespace, time, around=(found, following), witness=known.witness)
    around = (found, following)
    try:
        return _Replay(root, namespace, table, around=around, time=time, members=members, masks=masks).answer()
    finally:
        close()


def _first(folder: TablePlace) -> str:
    oldest = versions.oldest_whole(folder)
    return "it has no versions" if oldest is None else f"its oldest version is of {oldest.time}"


class _Known(NamedTuple):
    """What the state says about a table: up to which time it is followed (``None`` if it is not), its mark, whose
    oplogs led there, and by which masks."""

    reached: ClusterTime | None
    mark: TableMark | None
    witness: Witness | None
    masks: Mapping[str, str]


def _known(root: TablePlace, namespace: str) -> _Known:
    state = TableState(state_folder(root) / "state", readonly=True)
    try:
        if state.fed() is not None:
            raise UsageError(
                f"the tables in {root} are written from the rows of a query, which may have left some out: what a "
                "collection held between two versions is not known",
                hint="Read a version: DeltaTable(path, version=...), whose history() shows tailrace.clusterTime",
            )
        position, mark, masks = state.position(), state.marks().get(namespace), state.masks()
    finally:
        state.close()
    if position is None or mark is None or mark.collection == UNKNOWN:
        return _Known(None, None, None if position is None else position.witness, masks)
    return _Known(position.stated, mark, position.witness, masks)


def _load(folder: TablePlace, wanted: Stated) -> DeltaTable:
    try:
        return places.delta_table(folder, wanted.version)
    except (DeltaError, OSError, ValueError) as error:
        raise SinkError(f"version {wanted.version} of {folder} cannot be read: {reason(error)}") from error


def _rows(folder: TablePlace, table: DeltaTable, wanted: Stated) -> pa.Table:
    """All rows of a version. Its commit may be there longer than its files."""
    try:
        return all_rows(folder, table)
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise SinkError(
            f"version {wanted.version} of the table, which is that of {wanted.time}, cannot be read: {reason(error)}",
            hint="Replaced files are kept for tables.retention, or until `tailrace tables expire` removes them",
        ) from error


def _members(
    archive: str | ArchivePlace | None,
    uri: Any,
    namespace: str,
    time: ClusterTime,
    *,
    around: tuple[Stated, Stated],
    witness: Witness | None,
) -> tuple[Sequence[OplogMember], Any]:
    following = around[1]
    if archive is not None:
        archive = archive_place(archive)
        description = existing(archive)
        names = [description.name] if description.name else list(description.shards)
        sources = {name: ArchiveSource(archive, name) for name in names if name}
        for one in (witness, *(each.witness for each in around)):
            if one is not None:
                _check_archive(archive, sources, one)
        if any(namespace in source.erased_between(following.after, time) for source in sources.values()):
            raise UsageError(
                f"documents of {namespace} were erased from the archive {archive} between {following.after} and "
                f"{time}: what the collection held then is no longer known",
                hint=f"Ask for {following.after} or earlier, or for {following.time} or later",
            )
        members = [OplogMember(name, source, description.server_version) for name, source in sources.items()]
        return members, lambda: None
    if uri is None:
        raise UsageError(
            f"{time} lies inside a micro-batch of {namespace}: between {following.after} and {following.time}",
            hint="Give an archive, or the URI of the deployment, with the oplog entries since the version before",
        )
    client = open_client(uri)
    cluster = Cluster.discover(client, uri, {})
    what = f"the versions of the table of {namespace}"
    try:
        oplogs = Oplogs(client, cluster, {}, witness=witness, what=what, anew=BEGIN_ANEW)
        oplogs.add_removed(following.after)
        return oplogs.live, client.close
    except BaseException:
        client.close()
        raise


def _check_archive(archive: ArchivePlace, sources: Mapping[str, ArchiveSource], witness: Witness) -> None:
    """Raises OtherHistoryError if the archive is of another deployment, or of another history, than the table. An entry
    that the archive does not reach cannot be compared."""
    for name, mark in witness.entries.items():
        source = sources.get(name)
        if source is None or not source.start < mark.time <= source.newest():
            continue
        [entry] = source.entries([mark.time])
        if entry is None or EntryMark.of(mark.time, entry) != mark:
            raise OtherHistoryError(
                f"the archive {archive} has a different history from the tables: at {mark.time} its oplog {name} has "
                + ("no entry" if entry is None else "another entry"),
                hint="Give the archive of the deployment that the tables were read from",
            )
    known = witness.identity.replica_sets
    if len(known) == 1 and not witness.identity.cluster and not known.keys() & sources.keys():
        raise OtherHistoryError(
            f"the archive {archive} is of {', '.join(sources)}, but the tables were read from {', '.join(known)}",
            hint="Give the archive of the deployment that the tables were read from",
        )
    archived = existing(archive).identity
    difference = None if archived is None else witness.identity.difference(archived)
    if difference is not None:
        raise OtherHistoryError(
            f"the archive {archive} is not of the tables' deployment: {difference}",
            hint="Give the archive of the deployment that the tables were read from",
        )


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

    def confirm_missing(self, number: int, key: bytes) -> None:
        """Nothing to do: what is missing here is missing in the version."""

    def forget(self, collection: TabledCollection) -> None:
        """Nothing to do: the caller leaves out the rows of other collections."""

    def documents(self, number: int | None) -> list[StoredDocument]:
        """What was changed of a collection, and not deleted."""
        changed = {} if number is None else self.changed.get(number, {})
        return [one for one in changed.values() if one is not None]


class _Replay:
    """The version before ``time``, with the changes of the following micro-batch up to ``time``."""

    def __init__(
        self,
        root: TablePlace,
        namespace: str,
        table: DeltaTable,
        *,
        around: tuple[Stated, Stated],
        time: ClusterTime,
        members: Sequence[OplogMember],
        masks: Masks | None,
    ) -> None:
        self._root = root
        self._folder = place_of(root, namespace)
        self._masks = masks
        self._namespace = namespace
        self._table = table
        self._found, self._following = around
        self._time = time
        self._members = members
        self._schema = TableSchema(tuple(columns_of(_fields(table))), inferred=True, policy="widen")

    def answer(self) -> AsOf:
        """What the collection held."""
        found = self._found
        uuid = bytes.fromhex(found.collection) if found.collection else None
        collections = {} if uuid is None else {uuid: TabledCollection(uuid.hex(), _NUMBER, self._namespace)}
        fold = Fold(Selection((self._namespace,)), collections, masks=self._masks)
        self._read(fold, self._following.after)
        if fold.unknown:
            return self._renamed(next(reversed(fold.unknown)))
        base = _rows(self._folder, self._table, found)
        touched, overlay, changes = self._applied(fold, base, found)
        number = next(
            (one.number for one in fold.collections.values() if one.namespace == self._namespace and not one.pending),
            None,
        )
        kept = base.filter(pc.invert(touched)) if number == _NUMBER else base.slice(0, 0)
        changed = overlay.documents(number)
        return AsOf(self._time, found.version, changes, _together(kept, changed, self._schema))

    def _read(self, fold: Fold, after: ClusterTime) -> None:
        numbers = iter(range(_NUMBER + 1, 1 << 30))
        while after < self._time:
            window = read_window(self._members, after, self._time, WINDOW_BYTES)
            if window.until <= after:
                break
            fold.read(window, lambda: next(numbers))
            after = window.until

    def _applied(self, fold: Fold, base: pa.Table, found: Stated) -> tuple[Any, _Overlay, int]:
        """Which rows of ``base`` were touched, the documents that were changed, and how many changes there were."""
        named = pc.is_in(base.column(KEY), value_set=pa.array(sorted(fold.keys()), pa.binary()))
        known = base.filter(named)
        overlay = _Overlay(dict(zip(known.column(KEY).to_pylist(), known.column(BSON).to_pylist(), strict=True)))
        try:
            folded = fold.apply(overlay)
        except StateMismatchError as error:
            raise SinkError(
                f"version {found.version} of the table does not hold what was changed before "
                f"{self._time}: {error.message}",
                hint="A document that was in quarantine is not in the versions of its table. Ask for "
                f"{found.time}, or {self._following.time} or later",
            ) from error
        # Not every change is of the document with that key: see DELETE_OF.
        changed = sorted(overlay.changed.get(_NUMBER, ()))
        touched = pc.is_in(base.column(KEY), value_set=pa.array(changed, pa.binary()))
        return touched, overlay, folded.changes

    def _renamed(self, uuid: bytes) -> AsOf:
        """The answer if the collection got its name after the version before: from the table that it had then, or from
        the oplog alone, if that shows how the collection was created."""
        for folder in sorted(filter(delta.is_table, self._root.iterdir()), key=lambda one: one.name):
            found, following = versions.around(folder, self._time)
            # Its rows were masked as its name of then wants it.
            if found is None or found.collection != uuid.hex() or self._masks is not None:
                continue
            fold = FoldOfOne(uuid, {uuid: TabledCollection(uuid.hex(), _NUMBER, self._namespace)})
            self._read(fold, max(found.time, (following or self._following).after))
            base = _rows(folder, _load(folder, found), found)
            touched, overlay, changes = self._applied(fold, base, found)
            return self._of(found, changes, [*_stored(base.filter(pc.invert(touched))), *overlay.documents(_NUMBER)])
        fold = FoldOfOne(uuid, {}, masks=self._masks)
        self._read(fold, self._following.after)
        if uuid not in fold.collections:
            raise UsageError(
                f"another collection was renamed to {self._namespace} just before "
                f"{self._time}: what it held is not in the oplog",
                hint=f"Ask for {self._following.time} or later",
            )
        _, overlay, changes = self._applied(
            fold, _rows(self._folder, self._table, self._found).slice(0, 0), self._found
        )
        return self._of(self._found, changes, overlay.documents(fold.collections[uuid].number))

    def _of(self, found: Stated, changes: int, documents: Sequence[StoredDocument]) -> AsOf:
        none = _rows(self._folder, self._table, self._found).slice(0, 0)
        return AsOf(self._time, found.version, changes, _together(none, documents, self._schema))


def _together(kept: pa.Table, changed: Sequence[StoredDocument], schema: TableSchema) -> pa.Table:
    """Rows of a version and documents that were changed since; a column becomes wider where one of them asks for it."""
    rows = [kept]
    for made in rows_of(schema, changed):
        if made.retyped:
            return _anew(kept, changed, made.schema)
        rows.append(pa.Table.from_batches([made.batch]))
    return pa.concat_tables(rows, promote_options="permissive")


def _anew(kept: pa.Table, changed: Sequence[StoredDocument], schema: TableSchema) -> pa.Table:
    documents = [*_stored(kept), *changed]
    while True:
        rows = []
        for made in rows_of(schema, documents):
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
