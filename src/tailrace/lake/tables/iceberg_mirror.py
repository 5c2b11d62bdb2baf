"""Tables as Iceberg tables: after each commit of a Delta table, its files are the next snapshot of an Iceberg table.

No row is written twice: both formats name the same data files. What a snapshot has to hold is taken from the Delta
table's newest version and compared with what the catalogue's table holds, so a commit that a crash has kept from the
catalogue, or an answer that was lost, is repaired by doing the same again. A snapshot states its version of the Delta
table, and the cluster time and token that this version states. A catalogue that was set back is brought up to date; a
table of another place, or one that somebody else has changed, is refused.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.store import places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit, versions
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.iceberg_catalog import IcebergCatalog, may_pass
from tailrace.lake.tables.iceberg_settings import IcebergSettings, check_place
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.versions import ICEBERG

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

    from tailrace.lake.tables.iceberg_snapshot import HeldFiles, SizedFile

VERSION, TABLE = "tailrace.version", "tailrace.table"
_NAMESPACE: Final = "tailrace.namespace"
_MAPPING: Final = "schema.name-mapping.default"
#: A table has so many snapshots; the files of those before them stay for the grace.
_SNAPSHOTS: Final = 20
_FORMAT: Final = 2
_ANEW: Final = "Drop it from the catalogue (without purging): the next run adds it again"

_log = logging.getLogger("tailrace.tables")


def identifier_of(namespace: str) -> tuple[str, str]:
    """The name of a collection's table in a catalogue: its database, and its own name, each escaped as in a folder's
    name; a dot within a name is escaped too."""
    database, _, name = namespace.partition(".")
    return _escaped(database), _escaped(name)


def _escaped(name: str) -> str:
    return folder_of(name).replace(".", "~2e") or "~"


class IcebergMirror:
    """Shows tables in ``catalog``; without one it does nothing. One process at a time: whoever holds the lock of the
    tables."""

    def __init__(self, root: TablePlace, catalog: IcebergCatalog | None) -> None:
        if catalog is not None:
            check_place(root)
        self._catalog = catalog
        #: What this process has committed last: the catalogue's table, and the files of its snapshot.
        self._held: dict[str, tuple[Table, HeldFiles]] = {}
        #: And which version of which object: a table that was set back is opened again, and comes to a version again.
        self._shown: dict[str, tuple[CollectionTable, int]] = {}
        self._left: set[str] = set()

    def close(self) -> None:
        """Close the catalogue."""
        if self._catalog is not None:
            self._catalog.close()

    def follow(self, tables: Iterable[CollectionTable]) -> None:
        """Let each table that has a new version get a snapshot of it. Raises SinkError where the catalogue does not
        answer, or where its table is not the one that this process may write."""
        for table in tables:
            if self._catalog is None:
                self._tell_left(table)
            elif table.exists and self._shown.get(table.namespace) != (table, table.version):
                self._catalog.ask(lambda catalog, table=table: self._show(catalog, table))  # type: ignore[misc]
                self._shown[table.namespace] = table, table.version

    def _tell_left(self, table: CollectionTable) -> None:
        """Say once that a table's snapshots are left behind, and that their files go."""
        if table.namespace not in self._left and is_mirrored(table.root):
            _log.warning(
                "%s: its Iceberg snapshots get no new versions and lose their files: no catalogue is given. If that is "
                "meant, drop the table there (without purging), and remove %s",
                table.namespace,
                table.root / ICEBERG,
            )
        self._left.add(table.namespace)

    def _show(self, catalog: Catalog, table: CollectionTable) -> None:
        from pyiceberg.exceptions import CommitFailedException, RESTError  # noqa: PLC0415

        held = self._held.pop(table.namespace, None)  # whatever goes wrong: ask the catalogue next time
        others = held is None
        if held is None:
            found = self._loaded(catalog, table)
            held = None if found is None else (found, _files_of(found, table))
        commit = _Commit(table, held, doubts=others)
        if held is not None and commit.is_done:
            self._held[table.namespace] = held
            return
        try:
            made = commit.carry_out(catalog)
        except (ValueError, RESTError) as error:
            if others or may_pass(error):
                raise
            # Something that we do not assert has changed, as when a branch got a snapshot: ask the catalogue.
            raise CommitFailedException("the table is not as it was") from error
        durable.step("table.iceberg")
        if commit.changes_rows:
            _log.debug("%s: version %d is a snapshot", table.namespace, table.version)
        self._held[table.namespace] = made

    def _loaded(self, catalog: Catalog, table: CollectionTable) -> Table | None:
        """The catalogue's table; ``None`` if there is none. Raises SinkError if it is another one."""
        found = loaded(catalog, identifier_of(table.namespace))
        if found is not None:
            _check(found, table)
        return found

    def fault(self, table: CollectionTable) -> str | None:
        """What is wrong with the table that the catalogue has; ``None`` if its snapshot has the files of the version
        that it states, and these are there. It goes on after "the Iceberg table"."""
        if self._catalog is None:
            return None
        found = self._catalog.ask(lambda catalog: loaded(catalog, identifier_of(table.namespace)))
        return "is not in the catalogue" if found is None else _fault_of(found, table)

    # -- what is no longer kept -------------------------------------------------------------------------------------

    def release(self, table: CollectionTable, before_ms: int, *, patient: bool = False) -> None:
        """Remove the snapshots whose data files may go, since a later version has replaced them before ``before_ms``,
        and files of Iceberg that no snapshot needs. Raises SinkError if the newest snapshot is of an older version.
        ``patient``: a catalogue that does not answer is asked again. A writer is not: it asks for each table, and one
        that is away must not keep it for so many minutes."""

        def work(catalog: Catalog) -> None:
            self._held.pop(table.namespace, None)
            found = self._loaded(catalog, table)
            newest = None if found is None else found.current_snapshot()
            if found is None or newest is None or version_of(newest) != table.version:
                raise SinkError(
                    f"the Iceberg table of {table.namespace} does not have version {table.version} yet",
                    hint="Let the writer run once with this catalogue",
                )
            old = [
                one.snapshot_id
                for one in found.snapshots()
                if one is not newest and one.snapshot_id != newest.snapshot_id
                if _replaced_before(table, version_of(one), before_ms)
            ]
            if old:
                found = _committed(catalog, found, _assertions(found), _without(found, old))
            _sweep(found, before_ms)

        if self._catalog is not None:
            self._catalog.ask(work, patient=patient)


def mirror_of(
    root: TablePlace, settings: IcebergSettings | None, stopped: threading.Event | None = None
) -> IcebergMirror:
    """The mirror of the tables in ``root``. ``stopped`` ends waiting for a catalogue that does not answer."""
    if settings is None:
        return IcebergMirror(root, None)
    return IcebergMirror(root, IcebergCatalog(settings, wait=None if stopped is None else stopped.wait))


def is_mirrored(root: TablePlace) -> bool:
    """Whether the Delta table at ``root`` has been given to a catalogue."""
    return (root / ICEBERG).is_dir()


class _Commit:
    """The snapshot of a table's newest version, beside what the catalogue has. ``doubts``: the snapshots before may be
    of versions that the table no longer has."""

    def __init__(self, table: CollectionTable, held: tuple[Table, HeldFiles] | None, *, doubts: bool = False) -> None:
        from tailrace.lake.tables.iceberg_schema import numbered  # noqa: PLC0415  an extra
        from tailrace.lake.tables.iceberg_snapshot import HeldFiles  # noqa: PLC0415

        self._table = table
        self._doubts = doubts
        self._before: Table | None = None if held is None else held[0]
        self._old = HeldFiles() if held is None else held[1]
        self._files = files_of(table)
        self._stated = _stated(table)
        schema, last = None, 0
        if self._before is not None:
            schema, last = self._before.schema(), self._before.metadata.last_column_id
        found = numbered(table.fields, schema, last)
        self._is_new_schema = found is not schema
        self._is_added = self._is_new_schema
        if self._before is not None and self._is_new_schema:
            others = self._before.metadata.schemas
            same = next((one for one in others if one.fields == found.fields), None)
            number = max(one.schema_id for one in others) + 1
            # Catalogues refuse to add a schema again, as when a column has come and gone.
            self._is_added = same is None
            found = same or found.model_copy(update={"schema_id": number})
        self._schema: Schema = found
        self._properties = {**_own_properties(table), **_mapping(found)}

    @property
    def changes_rows(self) -> bool:
        """Whether the snapshot has other files than the one before."""
        return self._old.sizes() != self._files

    @property
    def is_done(self) -> bool:
        """Whether the catalogue has this very snapshot."""
        now = None if self._before is None else self._before.current_snapshot()
        return (
            self._before is not None
            and now is not None
            and now.summary is not None
            and self._stated.items() <= now.summary.additional_properties.items()
            and not self._is_new_schema
            and now.schema_id == self._schema.schema_id
            and self._properties.items() <= self._before.properties.items()
            and not self.changes_rows
        )

    def carry_out(self, catalog: Catalog) -> tuple[Table, HeldFiles]:
        """Write the snapshot and let the catalogue have it. Returns its table then, and the snapshot's files."""
        from pyiceberg.io.pyarrow import PyArrowFileIO  # noqa: PLC0415

        from tailrace.lake.tables.iceberg_snapshot import HeldFiles, NewSnapshot  # noqa: PLC0415

        to = _updates()
        folder = metadata_folder(self._table)
        with durable.writing(folder):
            durable.make_directory(folder)
        parent = None if self._before is None else self._before.current_snapshot()
        metadata = None if self._before is None else self._before.metadata
        io = PyArrowFileIO()
        new = NewSnapshot(
            self._schema,
            None if parent is None else parent.snapshot_id,
            1 if metadata is None else getattr(metadata, "last_sequence_number", 0) + 1,
            folder,
            max(time.time_ns() // 1_000_000, 0 if metadata is None else metadata.last_updated_ms),
            self._stated,
        )
        with durable.writing(folder):
            snapshot = new.write(self._files, self._old, io)
        durable.step("table.iceberg_written")
        updates: list[Any] = [
            *self._described(),
            to.AddSnapshotUpdate(snapshot=snapshot),
            to.SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot.snapshot_id),
        ]
        if self._before is None:
            made = _committed(catalog, self._staged(catalog, io), None, updates)
        else:
            updates += _without(self._before, self._outdated(), keeps=self._schema.schema_id)
            made = _committed(catalog, self._before, _assertions(self._before), updates)
        return made, HeldFiles.of(snapshot, io)

    def _described(self) -> Iterator[Any]:
        """The updates of the table's schema and properties."""
        from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC  # noqa: PLC0415
        from pyiceberg.table.sorting import UNSORTED_SORT_ORDER  # noqa: PLC0415

        to = _updates()
        if self._before is None:
            yield to.AssignUUIDUpdate(uuid=uuid.uuid4())
            yield to.UpgradeFormatVersionUpdate(format_version=_FORMAT)
        if self._is_added:
            yield to.AddSchemaUpdate(schema_=self._schema)
        if self._is_new_schema:
            yield to.SetCurrentSchemaUpdate(schema_id=-1 if self._is_added else self._schema.schema_id)
        if self._before is None:
            yield to.AddPartitionSpecUpdate(spec=UNPARTITIONED_PARTITION_SPEC)
            yield to.SetDefaultSpecUpdate(spec_id=-1)
            yield to.AddSortOrderUpdate(sort_order=UNSORTED_SORT_ORDER)
            yield to.SetDefaultSortOrderUpdate(sort_order_id=-1)
            yield to.SetLocationUpdate(location=location_of(self._table))
        yield to.SetPropertiesUpdate(updates=self._properties)  # each time: nothing can be asserted of them

    def _staged(self, catalog: Catalog, io: Any) -> Table:
        """A table that is to be made."""
        from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC  # noqa: PLC0415
        from pyiceberg.table import StagedTable  # noqa: PLC0415
        from pyiceberg.table.metadata import new_table_metadata  # noqa: PLC0415
        from pyiceberg.table.sorting import UNSORTED_SORT_ORDER  # noqa: PLC0415

        identifier = identifier_of(self._table.namespace)
        catalog.create_namespace_if_not_exists(identifier[0])
        metadata = new_table_metadata(
            self._schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, location_of(self._table)
        )
        return StagedTable(identifier, metadata, "", io, catalog)

    def _outdated(self) -> list[int]:
        """Our snapshots that go: all but the last ones, those that readers would misread now, since a column has
        another number than in their schema, and those of a table or a version that is no more: it was set back."""
        from tailrace.lake.tables.iceberg_schema import columns_of  # noqa: PLC0415

        assert self._before is not None
        ours = [one for one in self._before.snapshots() if version_of(one) >= 0]
        ours.sort(key=lambda one: one.sequence_number or 0)
        columns = columns_of(self._schema)
        alike = {one.schema_id for one in self._before.metadata.schemas if columns_of(one) <= columns}
        stay = {
            one.snapshot_id
            for one in ours[-_SNAPSHOTS + 1 :]
            if one.schema_id in alike and version_of(one) < self._table.version
            if one.summary is not None and one.summary.get(TABLE) == self._table.id
            if not self._doubts or _is_of_version(one, self._table)
        }
        return [one.snapshot_id for one in ours if one.snapshot_id not in stay]


# -- the catalogue's table ---------------------------------------------------------------------------------------------


def loaded(catalog: Catalog, identifier: tuple[str, str]) -> Table | None:
    """The catalogue's table of that name; ``None`` if there is none. Raises SinkError if it cannot be read."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, ValidationError  # noqa: PLC0415

    try:
        return catalog.load_table(identifier)
    except (NoSuchTableError, NoSuchNamespaceError):
        return None
    except (OSError, ValueError, ValidationError) as error:
        if may_pass(error):
            raise
        raise SinkError(
            f"the metadata of the Iceberg table {'.'.join(identifier)} cannot be read: {type(error).__name__}",
            hint=_ANEW,
        ) from error


def _check(found: Table, table: CollectionTable) -> None:
    """Raises SinkError if the catalogue's table is not the one of ``table``, or if others have changed it."""
    name = ".".join(identifier_of(table.namespace))
    if found.properties.get(_NAMESPACE) != table.namespace:
        raise SinkError(
            f"the catalogue has a table {name} that is not a table of Tailrace",
            hint="Rename it, or use another catalogue",
        )
    if found.location() != location_of(table):
        raise SinkError(
            f"the catalogue's table {name} has other files: {found.location()}",
            hint="Use another catalogue for these tables. Or, if it is no longer needed: "
            f"{_ANEW[0].lower()}{_ANEW[1:]}",
        )
    newest = found.current_snapshot()
    other = None
    if newest is not None and version_of(newest) < 0:
        other = f"snapshot {newest.snapshot_id}"
    elif found.metadata.format_version != _FORMAT:
        other = f"its format is {found.metadata.format_version}"
    elif not found.spec().is_unpartitioned():
        other = "it is partitioned"
    if other is not None:
        raise SinkError(f"another program has changed the Iceberg table {name} ({other})", hint=_ANEW)


def version_of(snapshot: Snapshot) -> int:
    """The version of the Delta table that a snapshot states; -1 if it is not ours."""
    text = None if snapshot.summary is None else snapshot.summary.get(VERSION)
    return int(text) if text is not None and text.isdecimal() else -1


def _is_of_version(snapshot: Snapshot, table: CollectionTable) -> bool:
    """Whether a snapshot states the time that its version states, as far as the log knows: a table that was set back
    comes to a version again."""
    version = version_of(snapshot)
    try:
        stated = delta_commit.statement(delta_commit.actions_of(table.root, version), version)
    except FileNotFoundError:
        return True
    except delta_commit.DamagedCommitError:
        return False
    time_ = None if snapshot.summary is None else snapshot.summary.get(delta_commit.TIME)
    return stated is None or time_ == delta_commit.time_text(stated.time)


def _files_of(found: Table, table: CollectionTable) -> HeldFiles:
    """The files of the newest snapshot; of one whose manifests are damaged, none: the next one has manifests of its
    own."""
    from tailrace.lake.tables.iceberg_snapshot import HeldFiles  # noqa: PLC0415

    newest = found.current_snapshot()
    if newest is None:
        return HeldFiles()
    try:
        return HeldFiles.of(newest, found.io)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        _log.warning("%s: the newest Iceberg snapshot cannot be read (%s): it is replaced", table.namespace, error)
        return HeldFiles()


def _updates() -> Any:
    """pyiceberg's updates and requirements, whose parameters type checkers know by their aliases alone."""
    from pyiceberg.table import update  # noqa: PLC0415

    return update


def _assertions(found: Table) -> tuple[Any, ...]:
    """What has to be as in ``found`` for a commit: it may be a while since the catalogue was asked."""
    to = _updates()
    newest = found.current_snapshot()
    return (
        to.AssertTableUUID(uuid=found.metadata.table_uuid),
        to.AssertRefSnapshotId(ref="main", snapshot_id=None if newest is None else newest.snapshot_id),
        to.AssertCurrentSchemaId(current_schema_id=found.metadata.current_schema_id),
        to.AssertLastAssignedFieldId(last_assigned_field_id=found.metadata.last_column_id),
        to.AssertDefaultSpecId(default_spec_id=found.metadata.default_spec_id),
    )


def _committed(catalog: Catalog, found: Table, requirements: tuple[Any, ...] | None, updates: list[Any]) -> Table:
    """Let the catalogue commit. ``requirements``: ``None`` for a table that is made. Returns the table then."""
    from pyiceberg.table import Table as Made  # noqa: PLC0415

    wanted = (_updates().AssertCreate(),) if requirements is None else requirements
    response = catalog.commit_table(found, wanted, tuple(updates))
    place = response.metadata_location
    if place.startswith("file://") and (path := Path(place.removeprefix("file://"))).is_file():
        durable.sync_file(path)
    return Made(found.name(), response.metadata, place, found.io, catalog)


def _without(found: Table, snapshots: list[int], keeps: int | None = None) -> list[Any]:
    """The updates that remove these snapshots, and schemas that no other has. ``keeps``: the schema of a new one."""
    to = _updates()
    metadata = found.metadata
    used = {one.schema_id for one in metadata.snapshots if one.snapshot_id not in snapshots}
    used |= {metadata.current_schema_id if keeps is None else keeps}
    unused = [one.schema_id for one in metadata.schemas if one.schema_id not in used]
    removed: list[Any] = [to.RemoveSnapshotsUpdate(snapshot_ids=snapshots)] if snapshots else []
    return [*removed, *([to.RemoveSchemasUpdate(schema_ids=unused)] if unused else [])]


# -- the Delta table ---------------------------------------------------------------------------------------------------


def location_of(table: CollectionTable) -> str:
    """Where the Iceberg table is."""
    return f"file://{Path(str(table.root)).absolute() / ICEBERG}"


def metadata_folder(table: CollectionTable) -> Path:
    """Where its metadata and manifests are."""
    return Path(str(table.root)).absolute() / ICEBERG / "metadata"


def files_of(table: CollectionTable) -> dict[str, SizedFile]:
    """The data files of the Delta table's newest version, by location."""
    from tailrace.lake.tables.iceberg_snapshot import SizedFile, uri  # noqa: PLC0415

    root, found = Path(str(table.root)).absolute(), {}
    for file in table.files():
        if file.gone:
            raise SinkError(f"the table {table.root} is merged on read: it cannot be an Iceberg table too")
        rows = file.rows
        if rows is None:
            with places.parquet_file(table.root / file.name) as opened:
                rows = opened.metadata.num_rows
        found[uri(root / file.name)] = SizedFile(file.size, rows)
    return found


def _stated(table: CollectionTable) -> dict[str, str]:
    """What a snapshot of the newest version says of itself. Raises SinkError if another program has changed rows since
    the newest version that states a time."""
    newest = delta_commit.newest(table.root)
    if newest is None:
        raise SinkError(f"the table {table.root} states no cluster time")
    for number in range(newest.version + 1, table.version + 1):
        with suppress(FileNotFoundError):  # it is older than the log
            if delta_commit.changes_data(delta_commit.actions_of(table.root, number)):
                raise delta_commit.changed_by_others(table.root, number)
    return {
        VERSION: str(table.version),
        TABLE: table.id,
        delta_commit.TIME: delta_commit.time_text(newest.time),
        delta_commit.TOKEN: delta_commit.token_of(ClusterTime(newest.time + 1)),
    }


def _own_properties(table: CollectionTable) -> dict[str, str]:
    return {
        _NAMESPACE: table.namespace,
        "gc.enabled": "false",  # the data files are not Iceberg's alone: no program may remove them for its sake
        "write.metadata.previous-versions-max": "1",
    }


def _mapping(schema: Schema) -> dict[str, str]:
    from tailrace.lake.tables.iceberg_schema import name_mapping  # noqa: PLC0415

    return {_MAPPING: name_mapping(schema)}


def _replaced_before(table: CollectionTable, version: int, before_ms: int) -> bool:
    """Whether the version after ``version`` was made before that time, or nobody knows when."""
    at = versions.made_at(table.root, version + 1) if version >= 0 else before_ms
    return at is None or at < before_ms


def _fault_of(found: Table, table: CollectionTable) -> str | None:
    """See ``IcebergMirror.fault``."""
    from tailrace.lake.tables.iceberg_snapshot import HeldFiles  # noqa: PLC0415

    try:
        _check(found, table)
    except SinkError as error:
        return f"cannot be used: {error.message}"
    newest = found.current_snapshot()
    if newest is None:
        return "has no snapshot"
    version = version_of(newest)
    try:
        files = HeldFiles.of(newest, found.io)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        return f"cannot be read: {type(error).__name__}"
    if version > table.version:
        return f"is of version {version}, and the table's newest is {table.version}"
    held = files.sizes()
    if version == table.version:
        try:
            shown = _Commit(table, (found, files))
        except SinkError as error:
            return f"cannot be compared: {error.message}"
        if shown.changes_rows:
            return f"has other files than version {version} of the table"
        if not shown.is_done:
            return f"describes version {version} of the table in another way: its columns, time or properties differ"
    root = f"file://{Path(str(table.root)).absolute()}/"
    names = versions.names_at(table.root, version) if version < table.version else None
    if names is not None and names != {name.removeprefix(root) for name in held}:
        return f"has other files than version {version} of the table"
    there = places.sizes(table.root, [name.removeprefix(root) for name in held])
    lacking = [name for name, one in held.items() if there.get(name.removeprefix(root)) != one.size]
    return f"lacks its data file {lacking[0]}, or a part of it" if lacking else None


def _sweep(found: Table, before_ms: int) -> None:
    """Remove files of metadata that nothing needs and that were written before ``before_ms``."""
    needed = {found.metadata_location, *(one.metadata_file for one in found.metadata.metadata_log)}
    for snapshot in found.snapshots():
        needed.add(snapshot.manifest_list)
        try:
            needed |= {one.manifest_path for one in snapshot.manifests(found.io)}
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return  # nobody knows which ones it needs, and it may be readable again
    names = {name.rpartition("/")[2] for name in needed}
    folder = Path(found.location().removeprefix("file://")) / "metadata"
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            if path.name not in names and path.stat().st_mtime * 1000 < before_ms:
                path.unlink()
