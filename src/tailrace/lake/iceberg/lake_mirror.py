"""A lake as an Iceberg table: each commit of its log is a snapshot in a catalogue.

The lake's own commit comes first, and the snapshot is made of what the log says then, under a lock of its own. So the
catalogue never shows a commit that the lake does not have, and one that a crash has kept from it comes with the next.
That lock holds on one machine. Between machines, which may write a lake in a store, the catalogue compares: an older
commit is never shown after a newer one.
A snapshot states the hash of the commit that it shows: a lake that was set back, or another lake in its place, is
recognised by it, and the snapshots of commits that no longer exist are removed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.lake.iceberg.catalog import IcebergCatalog
from tailrace.lake.iceberg.lake_log import FollowedLog, SeenLake
from tailrace.lake.iceberg.mirror import Mirror, version_of
from tailrace.lake.iceberg.original import TABLE, TIME, TOKEN, VERSION, Original
from tailrace.lake.iceberg.settings import IcebergSettings, check_place
from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.delta_log import table_schema
from tailrace.lake.store.identity import partitioning_of, read_identity
from tailrace.lake.store.lake_root import LakeRoot
from tailrace.lake.store.mirrored import ICEBERG, is_mirrored

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot

    from tailrace.lake.iceberg.snapshot import SizedFile

#: The commit that a snapshot shows, by its hash.
COMMIT: Final = "tailrace.commit"
_LAKE: Final = "tailrace.lake"
#: The table's name; its namespace is named as the lake's directory, or as the last part of its URI.
_NAME: Final = "events"
_ODD: Final = re.compile(r"[^A-Za-z0-9_-]")
_LOCK: Final = "iceberg.lock"
#: After how many versions files of Iceberg that no snapshot needs are removed; readers that have just asked still need
#: them.
_SWEEP_EVERY: Final = 64
_SWEEP_MS: Final = 600_000
_EPOCH: Final = date(1970, 1, 1)

_log = logging.getLogger("tailrace.lake")


def identifier_of(root: LakeRoot) -> tuple[str, str]:
    """The name of a lake's table in a catalogue."""
    return _ODD.sub("_", root.absolute().name) or "_", _NAME


def left_behind(root: LakeRoot) -> str | None:
    """What to say where a lake that a catalogue has is written without it."""
    if not is_mirrored(root):
        return None
    return (
        f"{root}: its Iceberg snapshots get no new events and lose their files: no catalogue is given. If that is "
        f"meant, drop the table {'.'.join(identifier_of(root))} there (without purging), and remove {root / ICEBERG}"
    )


class LakeMirror:
    """Shows the lake at ``root`` in a catalogue. Raises UsageError where Iceberg's readers could not find its files, or
    where pyiceberg is missing."""

    def __init__(self, root: LakeRoot, catalog: IcebergSettings) -> None:
        self._root = root
        check_place(root, "a lake")
        self._mirror = Mirror(IcebergCatalog(catalog, root=root))
        self._log = CommitLog(root)
        self._followed = FollowedLog(self._log)
        self._shown: tuple[int, str] | None = None

    def close(self) -> None:
        """Close the catalogue."""
        self._mirror.close()

    def check(self) -> None:
        """Raise SinkError if the catalogue has a table of that name that this lake may not write, or does not answer.
        The lake need not exist yet. Nothing is written, and the log is not read."""
        self._mirror.check(LakeOriginal(self._log, read_identity(self._root)))

    def follow(self) -> None:
        """Let the newest commit be the newest snapshot. Raises SinkError where the catalogue does not answer, its table
        is not the one that this lake may write, or the lake is damaged. Not to be called while the lake is locked."""
        head = self._log.head()
        if head.number < 0 or (self._shown == (head.number, head.digest) and not self._has_later(head)):
            return
        with self._locked():
            original = self._show(head)
            if original.version % _SWEEP_EVERY == 0:
                self._mirror.sweep(original, time.time_ns() // 1_000_000 - _SWEEP_MS)

    def _has_later(self, head: Head) -> bool:
        """Whether a process died before it could write its commit into ``head``. In a store this would cost a request
        each time: there the commit is shown once the next one has moved the head on."""
        return isinstance(self._root, Path) and self._log.layout.commit(head.number + 1).exists()

    def fault(self) -> str | None:
        """What is wrong with the table that the catalogue has; ``None`` if its snapshot has the files of the commit
        that it states, and these are there. It completes a sentence that begins with "the Iceberg table"."""
        known = read_identity(self._root)
        seen = None if known is None else FollowedLog(self._log).seen(self._log.head())
        return self._mirror.fault(LakeOriginal(self._log, known, seen))

    def release(self, before: datetime) -> None:
        """Remove the snapshots whose data files may go, since a later commit has replaced them at ``before`` or
        earlier. The newest commit is shown first, so that the newest snapshot keeps its files. Raises as ``follow``."""
        with self._locked():
            self._mirror.release(self._show(self._log.head()), _millis(before) + 1)

    def _show(self, head: Head) -> LakeOriginal:
        """Show the newest commit; ``head`` was read a moment ago. The caller holds the lock."""
        seen = self._followed.seen(head)
        original = LakeOriginal(self._log, seen.known, seen)
        if seen.is_another:  # what this process has shown may be of commits that no longer exist
            self._mirror.forget(original)
        self._mirror.show(original)
        self._shown = original.version, original.digest
        return original

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with durable.locked(self._log.layout.local / _LOCK):
            yield


class LakeOriginal(Original):
    """A lake with this ``lake.json`` (``None``: it has not been made) at its newest commit (``None``: at none)."""

    def __init__(self, log: CommitLog, known: Mapping[str, Any] | None, seen: SeenLake | None = None) -> None:
        self._log, self._seen = log, seen
        self.root = log.layout.root
        self.identifier, self.name = identifier_of(self.root), str(self.root)
        self.id, self.version, self.digest, self.fields = "", -1, "", ()
        if known is not None:
            partitioning = partitioning_of(known)
            self.id, self.divided_by = str(known["id"]), partitioning.names
            self.fields = table_schema(known["columns"], partitioning)["fields"]
        if seen is not None:
            self.version, self.digest = seen.number, seen.digest

    @property
    def marks(self) -> dict[str, str]:
        return {_LAKE: _NAME}

    def files(self) -> dict[str, SizedFile]:
        from tailrace.lake.iceberg.snapshot import SizedFile  # noqa: PLC0415  an extra

        found = {}
        for file in () if self._seen is None else self._seen.in_order:
            values = file.partition
            partition = tuple(_value(name, values.get(name)) for name in self.divided_by)
            found[self.beginning + file.name] = SizedFile(file.size, file.rows, partition)
        return found

    def stated(self) -> dict[str, str]:
        found = {VERSION: str(self.version), TABLE: self.id, COMMIT: self.digest}
        newest = None if self._seen is None else self._seen.newest
        if newest is not None:
            until = newest.planned.until
            found |= {TIME: f"{until.seconds},{until.increment}", TOKEN: newest.last_token}
        return found

    def knows(self, snapshot: Snapshot) -> bool:
        """Nothing is known about a commit that the log has dropped: it is older than any that readers need."""
        summary = snapshot.summary
        return summary is not None and self._log.digest_of(version_of(snapshot)) == summary.get(COMMIT)

    def was_replaced(self) -> bool:
        """In a directory a lock excludes that."""
        if not isinstance(self.root, ObjectPlace):
            return False
        return self._log.head().number > self.version or self._log.layout.commit(self.version + 1).exists()

    def made_at(self, version: int) -> int | None:
        commit = self._log.commit(version)
        return None if commit is None else _millis(commit.committed_at)

    def names_at(self, version: int) -> set[str] | None:
        return set(self._log.state(version).files) if self._log.digest_of(version) is not None else None


def _value(name: str, value: str | None) -> int | str | None:
    """A partition's value as Iceberg has it."""
    if name == "day" and value is not None:
        return (date.fromisoformat(value) - _EPOCH).days
    return int(value) if name == "hour" and value is not None else value


def _millis(moment: datetime) -> int:
    return int(moment.astimezone(UTC).timestamp() * 1000)
