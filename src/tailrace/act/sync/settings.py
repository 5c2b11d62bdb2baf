"""What one sync is to do: which collections, under which names, how fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tailrace.core.oplog.selection import Selection
from tailrace.errors import UsageError

STATE_DB: Final = "tailrace_sync"
LEASE_S: Final = 30.0
LANES_MAX: Final = 64
EVERYTHING: Final = Selection(("*.*",))


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """One sync. Raises UsageError for values that cannot be.

    ``selection``  the collections that are synced, by their names on the source, but those that ``excluded`` covers
    ``renames``    what a collection (``shop.orders``) or a database (``shop``) is called on the target
    ``name``       tells syncs to one target apart
    ``state_db``   the database on the target that keeps the state
    ``lanes``      transactions in parallel; with more than one, the source's transactions are not kept whole
    ``documents_per_second``  the copy's limit; ``None``: none
    ``archive``    a directory that keeps oplog entries for longer than the oplog does
    ``lease_s``    an owner that is silent for so long may be replaced
    """

    selection: Selection = EVERYTHING
    excluded: Selection | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    name: str = "sync"
    state_db: str = STATE_DB
    lanes: int = 1
    documents_per_second: float | None = None
    archive: Path | None = None
    lease_s: float = LEASE_S

    def __post_init__(self) -> None:
        if not self.name or not self.state_db or "." in self.state_db:
            raise UsageError("a sync and its database need names, and a database's name has no dot")
        if not 1 <= self.lanes <= LANES_MAX:
            raise UsageError(f"a sync has 1 to {LANES_MAX} lanes, not {self.lanes}")
        if self.lease_s < 1:
            raise UsageError(f"a lease lasts at least one second, not {self.lease_s}")
        if self.documents_per_second is not None and self.documents_per_second <= 0:
            raise UsageError("the limit of documents a second must be above 0")
        for before, after in self.renames.items():
            if not before or not after or ("." in before) != ("." in after):
                raise UsageError(
                    f"'{before}={after}' is no new name",
                    hint="Give a collection on both sides (shop.orders=store.orders), or a database on both",
                )
        if len(set(self.renames.values())) < len(self.renames):
            raise UsageError("two of the new names are the same")
        object.__setattr__(self, "renames", MappingProxyType(dict(self.renames)))

    def has(self, namespace: str) -> bool:
        """Whether a collection or a view of the source is synced. The state of a sync never is: a way back comes from
        where that of the sync before is."""
        if namespace.partition(".")[0] == self.state_db:
            return False
        return self.selection.has(namespace) and not (self.excluded is not None and self.excluded.covers(namespace))

    def target_of(self, namespace: str) -> str:
        """What a namespace of the source is called on the target."""
        whole = self.renames.get(namespace)
        if whole is not None:
            return whole
        database, dot, collection = namespace.partition(".")
        return f"{self.renames.get(database, database)}{dot}{collection}"
