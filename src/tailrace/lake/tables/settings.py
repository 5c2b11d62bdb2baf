"""How tables are written: which collections, which columns, and what is done on schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tailrace.core.oplog.selection import Selection
from tailrace.errors import UsageError
from tailrace.lake.iceberg.settings import IcebergSettings, check_place
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.nested import is_nested
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.versions import Keeping
from tailrace.read.source.mask_file import Masks

#: The types whose values can divide a table: each of them has bounds in Delta's log.
_DIVIDING: Final = ("string", "int", "long", "boolean", "date", "objectid")


@dataclass(frozen=True)
class TableRule:
    """The columns and files of the tables that match ``pattern`` (see ``Selection``).

    Attributes:
        partition_by: typed, declared columns by which the files are divided
        z_order: typed columns by which compaction orders the rows
    """

    pattern: str
    schema: TableSchema = field(default_factory=TableSchema)
    partition_by: tuple[str, ...] = ()
    z_order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.partition_by or self.z_order:
            names = {column.name: column.type for column in self.schema.columns}
            for name in (*self.partition_by, *self.z_order):
                if name not in names:
                    raise UsageError(
                        f"'{name}' is not a declared column of {self.pattern}", hint="Declare it under columns"
                    )
            for name in self.z_order:
                if is_nested(names[name]):
                    raise UsageError(f"rows of {self.pattern} cannot be arranged by '{name}': it is {names[name]:.60}")
            for name in self.partition_by:
                if names[name] not in _DIVIDING:
                    raise UsageError(
                        f"'{name}' cannot divide {self.pattern}: its type is {names[name]}",
                        hint=f"Partition by {', '.join(_DIVIDING)}",
                    )


@dataclass(frozen=True)
class TableSettings:
    """Tables in ``root``, a directory of their own or an ``object_place``, for the collections of ``rules``; the
    first matching rule applies.

    Attributes:
        every_s: seconds between micro-batches, while there is something to do
        compact_every: after this many micro-batches the small files of tables are merged (0: never)
        grace_h: replaced files are kept for this many hours, for queries that have begun
        retention_h: ``as of`` reaches back this many hours
        versions: how many older versions of a table are kept for ``as of``
        feed_h: the tables have a change feed that reaches back this many hours (0: none)
        masks: what is masked in every document before it is kept
        take_over: write tables in an object store that another state has written
        iceberg: the catalogue in which the tables are Iceberg tables too (``None``: in none)
        merge_on_read: a micro-batch marks the rows that it changes as gone (Delta's deletion vectors), and files are
            merged later. Far fewer bytes are written, commits are up to 5 seconds apart where many rows are gone, and
            only readers that know deletion vectors read the tables
    """

    root: TablePlace
    rules: Sequence[TableRule]
    every_s: float = 1.0
    compact_every: int = 64
    target_bytes: int = 128 << 20
    grace_h: float = 1 / 6
    retention_h: float = 7 * 24
    versions: int = 7
    documents_per_second: float | None = None
    feed_h: float = 0.0
    take_over: bool = False
    masks: Masks | None = None
    iceberg: IcebergSettings | None = None
    merge_on_read: bool = False

    @property
    def keeping(self) -> Keeping:
        """What is kept of a table besides its newest version."""
        return Keeping(self.grace_h, self.retention_h, self.versions, self.feed_h)

    @property
    def selection(self) -> Selection:
        """The collections that have tables."""
        return Selection.of((rule.pattern for rule in self.rules), "tables.collections")

    def check(self) -> None:
        """Raises UsageError if no collection can have a name that a pattern selects, and if the tables cannot be
        Iceberg tables: because of the place that they are in, or because they are merged on read."""
        if self.iceberg is not None:
            if self.merge_on_read:
                raise UsageError(
                    "tables that are merged on read cannot be Iceberg tables too: their files hold rows that are gone, "
                    "and Iceberg does not read Delta's deletion vectors",
                    hint="Leave out one of the two, or write two directories of tables",
                )
            check_place(self.root)
        Selection.of((rule.pattern for rule in self.rules), "tables.collections")

    def rule(self, namespace: str) -> TableRule:
        """The rule of a selected collection."""
        for rule in self.rules:
            if Selection((rule.pattern,)).has(namespace):
                return rule
        raise UsageError(f"{namespace} has no table")
