"""One snapshot of an Iceberg table: which data files it has, in manifests that hold no value of a document.

The files are those of a version of the Delta table. Iceberg's manifests could hold bounds of their columns; they are
left out, so that a document that is erased from the files is in no file of Iceberg's either.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final, NamedTuple

from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.typedef import Record

from tailrace.lake.iceberg.where import settle, settle_names, uri
from tailrace.lake.store.place import TablePlace

#: A manifest with fewer files is written again together with the next one.
_FULL: Final = 1000
_FORMAT: Final = 2
_EPOCH: Final = date(1970, 1, 1)


class SizedFile(NamedTuple):
    """A data file's size in bytes, its rows, and the values that its partition has; days are numbers, as Iceberg
    counts them."""

    size: int
    rows: int
    partition: tuple[int | str | None, ...] = ()


@dataclass
class HeldFiles:
    """The files of a snapshot, by location: their entries, and the manifests that these are in."""

    entries: dict[str, ManifestEntry] = field(default_factory=dict)
    manifests: list[tuple[ManifestFile, list[str]]] = field(default_factory=list)

    @classmethod
    def of(cls, snapshot: Snapshot, io: FileIO, known: HeldFiles | None = None) -> HeldFiles:
        """What a snapshot has. Raises OSError or ValueError where its files are missing or damaged. ``known``: what the
        one before it has; manifests that both have are not read again."""
        found = cls()
        before = {} if known is None else {one.manifest_path: names for one, names in known.manifests}
        for manifest in snapshot.manifests(io):
            names = before.get(manifest.manifest_path)
            if known is None or names is None:
                entries = {one.data_file.file_path: one for one in manifest.fetch_manifest_entry(io)}
                names = list(entries)
            else:
                entries = {name: known.entries[name] for name in names}
            found.entries |= entries
            found.manifests.append((manifest, names))
        return found

    def sizes(self) -> dict[str, SizedFile]:
        """Size and rows of each file."""
        return {
            name: SizedFile(
                entry.data_file.file_size_in_bytes,
                entry.data_file.record_count,
                tuple(_plain(entry.data_file.partition[at]) for at in range(len(entry.data_file.partition))),
            )
            for name, entry in self.entries.items()
        }


@dataclass(frozen=True)
class NewSnapshot:
    """What is to be written: ``parent`` is the snapshot before, ``number`` its place in the table's history, ``folder``
    where its files are to be, and ``stated`` what it says about itself."""

    schema: Schema
    spec: PartitionSpec
    parent: int | None
    number: int
    folder: TablePlace
    at_ms: int
    stated: Mapping[str, str]

    def write(self, files: Mapping[str, SizedFile], held: HeldFiles, io: FileIO) -> Snapshot:
        """Write the manifests of a snapshot that has exactly ``files``, where the one before has ``held``."""
        identifier = uuid.uuid4().int >> 65
        before = held.sizes()
        added = {name: one for name, one in files.items() if before.get(name) != one}
        gone = {name: one for name, one in before.items() if files.get(name) != one}
        kept = [one for one in held.manifests if len(one[1]) >= _FULL and not gone.keys() & set(one[1])]
        apart = {name for _, names in kept for name in names}
        left = {name for name in held.entries if name not in apart and name not in gone}
        manifests = [one for one, _ in kept]
        if left or added or gone:
            path = self.folder / f"{uuid.uuid4()}-m0.avro"
            with write_manifest(
                _FORMAT, self.spec, self.schema, io.new_output(uri(path)), identifier, "deflate"
            ) as writer:
                for name, one in files.items():  # in their order, which readers of one manifest keep
                    if name in left:
                        writer.existing(held.entries[name])
                    elif name in added:
                        writer.add(_entry(name, one))
                for name in gone:
                    writer.delete(held.entries[name])
            manifests.append(writer.to_manifest_file())
            settle(path)
        path = self.folder / f"snap-{identifier}-0-{uuid.uuid4()}.avro"
        with write_manifest_list(
            _FORMAT, io.new_output(uri(path)), identifier, self.parent, self.number, "deflate"
        ) as lists:
            if manifests:
                lists.add_manifests(manifests)
        settle(path)
        settle_names(self.folder)
        made: Any = Snapshot  # whose parameters type checkers know by their aliases alone
        found: Snapshot = made(
            snapshot_id=identifier,
            parent_snapshot_id=self.parent,
            sequence_number=self.number,
            timestamp_ms=self.at_ms,
            manifest_list=uri(path),
            summary=self._summary(files.values(), list(added.values()), list(gone.values())),
            schema_id=self.schema.schema_id,
        )
        return found

    def _summary(self, files: Iterable[SizedFile], added: Sequence[SizedFile], gone: Sequence[SizedFile]) -> Summary:
        found: dict[str, str] = {}
        for what, removed, some in (("total", "total", files), ("added", "added", added), ("deleted", "removed", gone)):
            ones = list(some)
            found[f"{what}-data-files"] = str(len(ones))
            found[f"{what}-records"] = str(sum(one.rows for one in ones))
            found[f"{removed}-files-size"] = str(sum(one.size for one in ones))
        found |= dict.fromkeys(("total-delete-files", "total-position-deletes", "total-equality-deletes"), "0")
        operation = Operation.APPEND if added and not gone else Operation.DELETE if gone and not added else None
        return Summary(operation or Operation.OVERWRITE, **found, **self.stated)


def _entry(location: str, one: SizedFile) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED,
        data_file=DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=location,
            file_format=FileFormat.PARQUET,
            partition=Record(*one.partition),
            record_count=one.rows,
            file_size_in_bytes=one.size,
            column_sizes={},
            value_counts={},
            null_value_counts={},
            nan_value_counts={},
            lower_bounds={},
            upper_bounds={},
            key_metadata=None,
            split_offsets=None,
            equality_ids=None,
            sort_order_id=None,
            spec_id=0,
        ),
    )


def _plain(value: Any) -> Any:
    """A partition's value: a day as its number."""
    return (value - _EPOCH).days if isinstance(value, date) else value
