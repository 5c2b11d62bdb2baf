"""Tables as Iceberg tables: each version of a collection's Delta table is a snapshot in a catalogue.

A snapshot states the cluster time and the token that its version states (``tailrace.lake.iceberg`` does the rest).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError
from tailrace.lake.iceberg.catalog import IcebergCatalog
from tailrace.lake.iceberg.mirror import Mirror, version_of
from tailrace.lake.iceberg.original import TABLE, VERSION, Original
from tailrace.lake.iceberg.settings import IcebergSettings, check_place
from tailrace.lake.store import delta, places
from tailrace.lake.store.mirrored import ICEBERG, is_mirrored
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit, versions
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import folder_of

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot

    from tailrace.lake.iceberg.snapshot import SizedFile

_NAMESPACE: Final = "tailrace.namespace"

_log = logging.getLogger("tailrace.tables")


def identifier_of(namespace: str) -> tuple[str, str]:
    """The name of a collection's table in a catalogue: its database, and its own name, each escaped as in a folder's
    name; a dot within a name is escaped too."""
    database, _, name = namespace.partition(".")
    return _escaped(database), _escaped(name)


def _escaped(name: str) -> str:
    return folder_of(name).replace(".", "~2e") or "~"


class IcebergMirror:
    """Shows tables in ``catalog``; without one it does nothing. One process at a time: the holder of the lock of the
    tables."""

    def __init__(self, root: TablePlace, catalog: IcebergCatalog | None) -> None:
        if catalog is not None:
            check_place(root)
        self._mirror = None if catalog is None else Mirror(catalog)
        #: Which version of which object was shown last: a table that was set back is opened again, and comes to a
        #: version again.
        self._shown: dict[str, tuple[CollectionTable, int]] = {}
        self._left: set[str] = set()

    def close(self) -> None:
        """Close the catalogue."""
        if self._mirror is not None:
            self._mirror.close()

    def follow(self, tables: Iterable[CollectionTable]) -> None:
        """Let each table that has a new version get a snapshot of it. Raises SinkError where the catalogue does not
        answer, or where its table is not the one that this process may write."""
        for table in tables:
            if self._mirror is None:
                self._tell_left(table)
            elif table.exists and self._shown.get(table.namespace) != (table, table.version):
                self._mirror.show(CollectionOriginal(table))
                self._shown[table.namespace] = table, table.version

    def _tell_left(self, table: CollectionTable) -> None:
        """Say once that a table's snapshots are removed, and that their files go."""
        if table.namespace not in self._left and is_mirrored(table.root):
            _log.warning(
                "%s: its Iceberg snapshots get no new versions and lose their files: no catalogue is given. If that is "
                "meant, drop the table there (without purging), and remove %s",
                table.namespace,
                table.root / ICEBERG,
            )
        self._left.add(table.namespace)

    def fault(self, table: CollectionTable) -> str | None:
        """What is wrong with the table that the catalogue has; ``None`` if its snapshot has the files of the version
        that it states, and these are there. It completes a sentence that begins with "the Iceberg table"."""
        return None if self._mirror is None else self._mirror.fault(CollectionOriginal(table))

    def release(self, table: CollectionTable, before_ms: int, *, patient: bool = False) -> None:
        """Remove the snapshots whose data files may go, as ``Mirror.release``."""
        if self._mirror is not None:
            self._mirror.release(CollectionOriginal(table), before_ms, patient=patient)


def mirror_of(
    root: TablePlace, settings: IcebergSettings | None, stopped: threading.Event | None = None
) -> IcebergMirror:
    """The mirror of the tables in ``root``. ``stopped`` ends waiting for a catalogue that does not answer."""
    if settings is None:
        return IcebergMirror(root, None)
    return IcebergMirror(root, IcebergCatalog(settings, root=root, wait=None if stopped is None else stopped.wait))


class CollectionOriginal(Original):
    """A collection's table at its newest version."""

    def __init__(self, table: CollectionTable) -> None:
        self._table = table
        self.identifier = identifier_of(table.namespace)
        self.name, self.root = table.namespace, table.root
        self.id, self.version, self.fields = table.id, table.version, table.fields

    @property
    def marks(self) -> dict[str, str]:
        return {_NAMESPACE: self.name}

    def files(self) -> dict[str, SizedFile]:
        from tailrace.lake.iceberg.snapshot import SizedFile  # noqa: PLC0415  an extra

        found = {}
        for file in self._table.files():
            if file.gone:
                raise SinkError(f"the table {self.root} is merged on read: it cannot be an Iceberg table too")
            rows = file.rows
            if rows is None:
                with places.parquet_file(self.root / file.name) as opened:
                    rows = opened.metadata.num_rows
            found[self.beginning + file.name] = SizedFile(file.size, rows)
        return found

    def stated(self) -> dict[str, str]:
        """Raises SinkError if another program has changed rows since the newest version that states a time."""
        newest = delta_commit.newest(self.root)
        if newest is None:
            raise SinkError(f"the table {self.root} states no cluster time")
        for number in range(newest.version + 1, self.version + 1):
            with suppress(FileNotFoundError):  # it is older than the log
                if delta_commit.changes_data(delta_commit.actions_of(self.root, number)):
                    raise delta_commit.changed_by_others(self.root, number)
        return {
            VERSION: str(self.version),
            TABLE: self.id,
            delta_commit.TIME: delta_commit.time_text(newest.time),
            delta_commit.TOKEN: delta_commit.token_of(ClusterTime(newest.time + 1)),
        }

    def knows(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot states the time that its version states, as far as the log knows: a table that was set
        back comes to a version again."""
        version = version_of(snapshot)
        try:
            stated = delta_commit.statement(delta_commit.actions_of(self.root, version), version)
        except FileNotFoundError:
            return True
        except delta_commit.DamagedCommitError:
            return False
        time = None if snapshot.summary is None else snapshot.summary.get(delta_commit.TIME)
        return stated is None or time == delta_commit.time_text(stated.time)

    def was_replaced(self) -> bool:
        return max(delta.commits_in(self.root), default=-1) > self.version

    def made_at(self, version: int) -> int | None:
        return versions.made_at(self.root, version)

    def names_at(self, version: int) -> set[str] | None:
        return versions.names_at(self.root, version)
