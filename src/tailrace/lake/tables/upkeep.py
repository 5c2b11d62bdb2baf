"""What a writer does for its tables besides writing them: small files are merged, and old ones removed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tailrace.errors import TailraceError
from tailrace.lake.tables import merging
from tailrace.lake.tables.data_files import TableDamageError
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.pace import Cost
from tailrace.lake.tables.settings import TableSettings

#: How often to look for old files of a table that rests.
_RESTING_S: Final = 3600.0
#: Others so many times in each grace, but not more often than this. On a disk that costs a thousandth of a second for
#: each commit of the grace, in an object store requests.
_ON_DISK, _IN_STORE = 10, 4
_LEAST_S: Final = 5.0

_log = logging.getLogger("tailrace.tables")


@dataclass(slots=True)
class _Seen:
    """When old files of a table were last searched for, the version that it had then, and since when at least."""

    at: float
    version: int
    since: float


class Upkeep:
    """The daily life of tables. ``batch``: the writer's last micro-batch. What fails is tried again later; it stops
    nobody. ``release`` is called before a table's old files go, with the time in milliseconds up to which they may."""

    def __init__(
        self,
        settings: TableSettings,
        batch: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        release: Callable[[CollectionTable, int], None] | None = None,
    ) -> None:
        self._settings = settings
        self._release = release
        self._clock = clock
        self._compacted = batch
        self._merged: dict[str, int] = {}
        self._expired: dict[str, _Seen] = {}
        self._next = clock()

    def compact(self, tables: Mapping[str, CollectionTable], batch: int) -> None:
        """Merge small files, every ``compact_every`` micro-batches; those of tables that are merged on read after each
        one."""
        if self._settings.merge_on_read:
            self._merge(tables, merging.tidy)
            return
        every = self._settings.compact_every
        if not every or batch // every == self._compacted // every:
            return
        self._compacted = batch
        size = self._settings.target_bytes
        self._merge(tables, lambda table, z_order: table.compact(target_bytes=size, z_order=z_order))

    def _merge(
        self, tables: Mapping[str, CollectionTable], merge: Callable[[CollectionTable, Sequence[str]], object]
    ) -> None:
        for namespace, table in tables.items():
            if self._merged.get(namespace) == table.version:
                continue
            try:
                merge(table, self._settings.rule(namespace).z_order)
            except TableDamageError as error:
                table.damage = error.message  # what is damaged is never merged: the table is rewritten
                _log.warning("%s: small files were not merged: %s", namespace, error)
            except TailraceError as error:
                _log.warning("%s: small files were not merged: %s", namespace, error)
            self._merged[namespace] = table.version

    def expire(self, tables: Mapping[str, CollectionTable]) -> None:
        """Remove what is no longer kept, now and then."""
        now = self._clock()
        if now < self._next:
            return
        grace = self._settings.grace_h * 3600
        times = _ON_DISK if isinstance(self._settings.root, Path) else _IN_STORE
        self._next = now + max(_LEAST_S, grace / times)
        for namespace, table in tables.items():
            seen = self._expired.get(namespace)
            rests = seen is not None and seen.version == table.version
            since = seen.since if seen is not None and rests else now
            # What the last change has replaced goes when the grace is over.
            if seen is not None and rests and seen.at - since > grace and now - seen.at < _RESTING_S:
                continue
            try:
                at_ms = time.time_ns() // 1_000_000
                if self._release is not None:
                    self._release(table, at_ms - int(grace * 1000))
                table.expire(self._settings.keeping, at_ms)
            except TailraceError as error:
                _log.warning("%s: old files were not removed: %s", namespace, error)
            self._expired[namespace] = _Seen(now, table.version, since)


def cost_of(tables: Mapping[str, CollectionTable]) -> Cost:
    """What the commits of these tables have written since this was asked last."""
    found = Cost()
    for table in tables.values():
        found.add(table.cost)
        table.cost = Cost()
    return found
