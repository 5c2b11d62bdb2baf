"""Lakes and tables as Iceberg tables: after each commit in a Delta log, its files are the next snapshot of an Iceberg
table.

No row is written twice: both formats name the same data files. What a snapshot has to hold is taken from the newest
version and compared with what the catalogue's table holds, so a commit that a crash has kept from the catalogue, or an
answer that was lost, is repaired by doing the same again. A snapshot states its version. A catalogue that was set back
is brought up to date; a table of another place, or one that somebody else has changed, is refused.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tailrace.base import durable
from tailrace.errors import SinkError
from tailrace.lake.iceberg.catalog import IcebergCatalog, may_pass
from tailrace.lake.iceberg.opened import io_of
from tailrace.lake.iceberg.original import TABLE, VERSION, Original
from tailrace.lake.iceberg.where import ElsewhereError, make_folder, writing
from tailrace.lake.store import places

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

    from tailrace.lake.iceberg.snapshot import HeldFiles

_MAPPING: Final = "schema.name-mapping.default"
#: How many snapshots a table has; the files of those before them stay for the grace.
_SNAPSHOTS: Final = 20
_FORMAT: Final = 2
#: The number of a partition's first field, as Iceberg's own programs begin.
_PARTITIONS: Final = 1000
_ANEW: Final = "Drop it from the catalogue (without purging): the next run adds it again"
_OTHER: Final = f"Use another catalogue here. Or, if it is no longer needed: {_ANEW[0].lower()}{_ANEW[1:]}"

_log = logging.getLogger("tailrace.iceberg")


class Mirror:
    """Shows lakes and tables in ``catalog``. One process at a time for each of them: the holder of its lock."""

    def __init__(self, catalog: IcebergCatalog) -> None:
        self._catalog = catalog
        #: What this process has committed last: the catalogue's table, and the files of its snapshot.
        self._held: dict[tuple[str, str], tuple[Table, HeldFiles]] = {}
        #: The manifests in each list of manifests that has been read; a list never changes.
        self._lists: dict[tuple[str, str], dict[str, set[str]]] = {}

    def close(self) -> None:
        """Close the catalogue."""
        self._catalog.close()

    def forget(self, original: Original) -> None:
        """Ask the catalogue next time, opened again, and compare each snapshot with what the original knows."""
        self._held.pop(original.identifier, None)
        self._catalog.close()

    def show(self, original: Original) -> None:
        """Let the newest version be the newest snapshot. Raises SinkError where the catalogue does not answer, or where
        its table is not the one that this process may write."""
        self._catalog.ask(lambda catalog: self._show(catalog, original))

    def _show(self, catalog: Catalog, original: Original) -> None:
        from pyiceberg.exceptions import CommitFailedException, RESTError  # noqa: PLC0415

        held = self._held.pop(original.identifier, None)  # whatever goes wrong: ask the catalogue next time
        others = held is None
        if held is None:
            found = self._loaded(catalog, original)
            held = None if found is None else (found, _files_of(found, original))
            _check_newer(found, original)
        commit = _Commit(original, held, doubts=others)
        if held is not None and commit.is_done:
            self._held[original.identifier] = held
            return
        try:
            made = commit.carry_out(catalog)
        except (ValueError, RESTError) as error:
            if others or may_pass(error):
                raise
            # Something that we do not assert has changed, as when a branch got a snapshot: ask the catalogue.
            raise CommitFailedException("the table is not as it was") from error
        durable.step("iceberg.shown")
        if commit.changes_rows:
            _log.debug("%s: version %d is a snapshot", original.name, original.version)
        self._held[original.identifier] = made
        self._note(original, *made)

    def _note(self, original: Original, found: Table, files: HeldFiles) -> None:
        """Remember the manifests of the newest snapshot."""
        if (newest := found.current_snapshot()) is not None:
            paths = {one.manifest_path for one, _ in files.manifests}
            self._lists.setdefault(original.identifier, {})[newest.manifest_list] = paths

    def _loaded(self, catalog: Catalog, original: Original) -> Table | None:
        """The catalogue's table; ``None`` if there is none. Raises SinkError if it is another one."""
        found = loaded(catalog, original.identifier)
        if found is not None:
            _check(found, original)
        return found

    def check(self, original: Original) -> None:
        """Raise SinkError where the catalogue does not answer, or where its table is not the one that this process may
        write."""
        self._catalog.ask(lambda catalog: self._loaded(catalog, original))

    def fault(self, original: Original) -> str | None:
        """What is wrong with the table that the catalogue has; ``None`` if its snapshot has the files of the version
        that it states, and these are there. It completes a sentence that begins with "the Iceberg table"."""
        found = self._catalog.ask(lambda catalog: loaded(catalog, original.identifier))
        return "is not in the catalogue" if found is None else _fault_of(found, original)

    # -- what is no longer kept -------------------------------------------------------------------------------------

    def release(self, original: Original, before_ms: int, *, patient: bool = False) -> None:
        """Remove the snapshots whose data files may go, since a later version has replaced them before ``before_ms``,
        and files of Iceberg that no snapshot needs. Raises SinkError if the newest snapshot is of an older version.
        ``patient``: a catalogue that does not answer is asked again. A writer is not: it asks for each table, and one
        that is away must not keep it for minutes."""

        def work(catalog: Catalog) -> None:
            self._held.pop(original.identifier, None)
            found = self._loaded(catalog, original)
            newest = None if found is None else found.current_snapshot()
            if found is None or newest is None or version_of(newest) != original.version:
                raise SinkError(
                    f"the Iceberg table of {original.name} does not have version {original.version} yet",
                    hint="Let the writer run once with this catalogue",
                )
            old = [
                one.snapshot_id
                for one in found.snapshots()
                if one is not newest and one.snapshot_id != newest.snapshot_id
                if _replaced_before(original, version_of(one), before_ms)
            ]
            if old:
                found = _committed(catalog, found, _assertions(found), _without(found, old))
            _sweep(found, original, before_ms, self._lists.setdefault(original.identifier, {}))

        self._catalog.ask(work, patient=patient)

    def sweep(self, original: Original, before_ms: int) -> None:
        """Remove files of Iceberg that no snapshot needs and that were written before that time."""

        def work(catalog: Catalog) -> None:
            if (found := self._loaded(catalog, original)) is not None:
                _sweep(found, original, before_ms, self._lists.setdefault(original.identifier, {}))

        self._catalog.ask(work, patient=False)


class _Commit:
    """The snapshot of a table's newest version, and what the catalogue has. ``doubts``: the snapshots before may be
    of versions that the table no longer has."""

    def __init__(self, original: Original, held: tuple[Table, HeldFiles] | None, *, doubts: bool = False) -> None:
        from tailrace.lake.iceberg.schema import numbered  # noqa: PLC0415  an extra
        from tailrace.lake.iceberg.snapshot import HeldFiles  # noqa: PLC0415

        self._original = original
        self._doubts = doubts
        self._before: Table | None = None if held is None else held[0]
        self._old = HeldFiles() if held is None else held[1]
        self._files = original.files()
        self._stated = original.stated()
        schema, last = None, 0
        if self._before is not None:
            schema, last = self._before.schema(), self._before.metadata.last_column_id
        found = numbered(original.fields, schema, last)
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
        self._properties = {**_own_properties(original), **_mapping(found)}

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
        from tailrace.lake.iceberg.snapshot import HeldFiles, NewSnapshot  # noqa: PLC0415

        to = _updates()
        folder = self._original.metadata
        with writing(folder):
            make_folder(folder)
        parent = None if self._before is None else self._before.current_snapshot()
        metadata = None if self._before is None else self._before.metadata
        io = io_of(self._original.root)
        new = NewSnapshot(
            self._schema,
            _spec(self._schema, self._original),
            None if parent is None else parent.snapshot_id,
            1 if metadata is None else getattr(metadata, "last_sequence_number", 0) + 1,
            folder,
            max(time.time_ns() // 1_000_000, 0 if metadata is None else metadata.last_updated_ms),
            self._stated,
        )
        with writing(folder):
            snapshot = new.write(self._files, self._old, io)
        durable.step("iceberg.written")
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
        return made, HeldFiles.of(snapshot, io, self._old)

    def _described(self) -> Iterator[Any]:
        """The updates of the table's schema and properties."""
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
            yield to.AddPartitionSpecUpdate(spec=_spec(self._schema, self._original))
            yield to.SetDefaultSpecUpdate(spec_id=-1)
            yield to.AddSortOrderUpdate(sort_order=UNSORTED_SORT_ORDER)
            yield to.SetDefaultSortOrderUpdate(sort_order_id=-1)
            yield to.SetLocationUpdate(location=self._original.location)
        yield to.SetPropertiesUpdate(updates=self._properties)  # each time: nothing can be asserted of them

    def _staged(self, catalog: Catalog, io: Any) -> Table:
        """A table that is to be made."""
        from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC  # noqa: PLC0415
        from pyiceberg.table import StagedTable  # noqa: PLC0415
        from pyiceberg.table.metadata import new_table_metadata  # noqa: PLC0415
        from pyiceberg.table.sorting import UNSORTED_SORT_ORDER  # noqa: PLC0415

        identifier = self._original.identifier
        catalog.create_namespace_if_not_exists(identifier[0])
        metadata = new_table_metadata(
            self._schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, self._original.location
        )
        return StagedTable(identifier, metadata, "", io, catalog)

    def _outdated(self) -> list[int]:
        """Our snapshots that go: all but the last ones, those that readers would misread now, since a column has
        another number than in their schema, and those of a table or a version that no longer exists: it was set
        back."""
        from tailrace.lake.iceberg.schema import columns_of  # noqa: PLC0415

        assert self._before is not None
        ours = [one for one in self._before.snapshots() if version_of(one) >= 0]
        ours.sort(key=lambda one: one.sequence_number or 0)
        columns = columns_of(self._schema)
        alike = {one.schema_id for one in self._before.metadata.schemas if columns_of(one) <= columns}
        stay = {
            one.snapshot_id
            for one in ours[-_SNAPSHOTS + 1 :]
            if one.schema_id in alike and version_of(one) < self._original.version
            if one.summary is not None and one.summary.get(TABLE) == self._original.id
            if not self._doubts or self._original.knows(one)
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
    except ElsewhereError as error:
        raise SinkError(
            f"the catalogue's table {'.'.join(identifier)} has other files: {error.message}",
            hint=_OTHER,
        ) from None
    except (OSError, ValueError, ValidationError) as error:
        if may_pass(error):
            raise
        raise SinkError(
            f"the metadata of the Iceberg table {'.'.join(identifier)} cannot be read: {type(error).__name__}",
            hint=_ANEW,
        ) from error


def _check_newer(found: Table | None, original: Original) -> None:
    """Raises SinkError if the catalogue has a later version than the one that this process would show, since another
    writer has made it meanwhile. One that is gone was set back. Two writers load, compare and let the catalogue compare
    again, so an older version never follows a newer one."""
    newest = None if found is None else found.current_snapshot()
    if newest is not None and version_of(newest) > original.version and original.was_replaced():
        raise SinkError(
            f"another writer has made a later version of {original.name}, which the catalogue has",
            hint="There is one writer at a time. If no other one runs, start this one again",
        )


def _check(found: Table, original: Original) -> None:
    """Raises SinkError if the catalogue's table is not the one of ``original``, or if others have changed it."""
    name = ".".join(original.identifier)
    if not original.marks.items() <= found.properties.items():
        raise SinkError(
            f"the catalogue has a table {name} that is not a table of Tailrace",
            hint="Rename it, or use another catalogue",
        )
    if found.location() != original.location:
        raise SinkError(
            f"the catalogue's table {name} has other files: {found.location()}",
            hint=_OTHER,
        )
    newest = found.current_snapshot()
    other = None
    if newest is not None and version_of(newest) < 0:
        other = f"snapshot {newest.snapshot_id}"
    elif found.metadata.format_version != _FORMAT:
        other = f"its format is {found.metadata.format_version}"
    elif found.spec().fields != _spec(found.schema(), original).fields:
        other = "its partitions are different"
    if other is not None:
        raise SinkError(f"another program has changed the Iceberg table {name} ({other})", hint=_ANEW)


def _spec(schema: Schema, original: Original) -> PartitionSpec:
    """How the files are divided: by the values of columns, which readers take from the manifests where the files do not
    have them. It is the same for the table's life."""
    from pyiceberg.partitioning import PartitionField, PartitionSpec  # noqa: PLC0415
    from pyiceberg.transforms import IdentityTransform  # noqa: PLC0415

    known = {one.name: one.field_id for one in schema.fields}
    return PartitionSpec(
        *(
            PartitionField(known[name], _PARTITIONS + number, IdentityTransform(), name)
            for number, name in enumerate(original.divided_by)
            if name in known  # others may have taken it away
        )
    )


def version_of(snapshot: Snapshot) -> int:
    """The version that a snapshot states; -1 if it is not ours."""
    text = None if snapshot.summary is None else snapshot.summary.get(VERSION)
    return int(text) if text is not None and text.isdecimal() else -1


def _files_of(found: Table, original: Original) -> HeldFiles:
    """The files of the newest snapshot; of one whose manifests are damaged, none: the next one has manifests of its
    own."""
    from tailrace.lake.iceberg.snapshot import HeldFiles  # noqa: PLC0415

    newest = found.current_snapshot()
    if newest is None:
        return HeldFiles()
    try:
        return HeldFiles.of(newest, found.io)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        _log.warning("%s: the newest Iceberg snapshot cannot be read (%s): it is replaced", original.name, error)
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


# -- the original ------------------------------------------------------------------------------------------------------


def _own_properties(original: Original) -> dict[str, str]:
    return {
        **original.marks,
        "gc.enabled": "false",  # the data files are not Iceberg's alone: no program may remove them for its sake
        "write.metadata.previous-versions-max": "1",
    }


def _mapping(schema: Schema) -> dict[str, str]:
    from tailrace.lake.iceberg.schema import name_mapping  # noqa: PLC0415

    return {_MAPPING: name_mapping(schema)}


def _replaced_before(original: Original, version: int, before_ms: int) -> bool:
    """Whether the version after ``version`` was made before that time, or nobody knows when."""
    at = original.made_at(version + 1) if version >= 0 else before_ms
    return at is None or at < before_ms


def _fault_of(found: Table, original: Original) -> str | None:
    """See ``IcebergMirror.fault``."""
    from tailrace.lake.iceberg.snapshot import HeldFiles  # noqa: PLC0415

    try:
        _check(found, original)
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
    if version > original.version:
        return f"is of version {version}, and the table's newest is {original.version}"
    held = files.sizes()
    if version == original.version:
        try:
            shown = _Commit(original, (found, files))
        except SinkError as error:
            return f"cannot be compared: {error.message}"
        if shown.changes_rows:
            return f"has other files than version {version} of the table"
        if not shown.is_done:
            return f"describes version {version} of the table in another way: its columns, time or properties differ"
    root = original.beginning
    names = original.names_at(version) if version < original.version else None
    if names is not None and names != {name.removeprefix(root) for name in held}:
        return f"has other files than version {version} of the table"
    there = places.sizes(original.root, [name.removeprefix(root) for name in held])
    lacking = [name for name, one in held.items() if there.get(name.removeprefix(root)) != one.size]
    return f"lacks its data file {lacking[0]}, or a part of it" if lacking else None


def _sweep(found: Table, original: Original, before_ms: int, lists: dict[str, set[str]]) -> None:
    """Remove files of metadata that nothing needs and that were written before ``before_ms``. ``lists``: the manifests
    of lists that were read before."""
    needed = {found.metadata_location, *(one.metadata_file for one in found.metadata.metadata_log)}
    kept = {}
    for snapshot in found.snapshots():
        name = snapshot.manifest_list
        try:
            kept[name] = lists.get(name) or {one.manifest_path for one in snapshot.manifests(found.io)}
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return  # nobody knows which ones it needs, and it may be readable again
        needed |= {name, *kept[name]}
    lists.clear()
    lists.update(kept)
    names = {name.rpartition("/")[2] for name in needed}
    folder = original.metadata
    before = before_ms / 1000 + places.clock_difference(original.root)
    for file in list(places.files_below(folder)):
        if "/" not in file.name and file.name not in names and file.modified < before:
            (folder / file.name).unlink(missing_ok=True)
