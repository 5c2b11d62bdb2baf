"""What one sync is to do: which collections, under which names, how fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tailrace.core.oplog.selection import Selection
from tailrace.errors import UsageError
from tailrace.read.source.listing import is_utf8

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
    ``lease_s``    an owner that is silent for this long may be replaced
    ``shard_keys`` by which keys collections of the source are sharded on a target that is a cluster; an empty one: not
                   at all
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
    shard_keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
                    f"'{before}={after}' does not give a new name",
                    hint="Give a collection on both sides (shop.orders=store.orders), or a database on both",
                )
        if len(set(self.renames.values())) < len(self.renames):
            raise UsageError("two of the new names are the same")
        for namespace, key in self.shard_keys.items():
            if "." not in namespace or not all(kind in (1, "hashed") for kind in key.values()):
                raise UsageError(
                    f"'{namespace}' cannot be sharded by {dict(key)}",
                    hint='A shard key names fields with 1 or "hashed": shop.orders={"region": 1, "_id": 1}',
                )
        object.__setattr__(self, "renames", MappingProxyType(dict(self.renames)))

    def has(self, namespace: str) -> bool:
        """Whether a collection or a view of the source is synced. The state of a sync never is: a way back comes from
        where that of the sync before is. Nor is one whose name is not UTF-8: no driver can name it."""
        if namespace.partition(".")[0] == self.state_db or not is_utf8(namespace):
            return False
        return self.selection.has(namespace) and not (self.excluded is not None and self.excluded.covers(namespace))

    def target_of(self, namespace: str) -> str:
        """What a namespace of the source is called on the target."""
        whole = self.renames.get(namespace)
        if whole is not None:
            return whole
        database, dot, collection = namespace.partition(".")
        return f"{self.renames.get(database, database)}{dot}{collection}"
