"""What a lake's files are divided by: always by day, and also by hour or collection if the user asks for it.

Values only: every process that plans or writes loads this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tailrace.core.user_text import nearest
from tailrace.errors import UsageError

DAY: Final = "day"
HOUR: Final = "hour"
COLLECTION: Final = "collection"
_KNOWN: Final = (DAY, HOUR, COLLECTION)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The table's partition columns. ``day`` is always one of them, since old data is dropped by day.

    ``hour``        the UTC hour of the cluster time, 0 to 23, in addition to the day
    ``collection``  the value of the column ``collection``
    """

    hour: bool = False
    collection: bool = False

    @classmethod
    def of(cls, names: Sequence[str]) -> Partitioning:
        """Of the names of columns, in any order. Raises UsageError for one that a lake cannot be divided by."""
        for name in names:
            if name not in _KNOWN:
                meant = nearest(str(name), _KNOWN)
                raise UsageError(
                    f"a lake cannot be partitioned by {str(name)[:60]!r}",
                    hint=f"Did you mean '{meant}'?" if meant else f"It can be partitioned by {', '.join(_KNOWN)}",
                )
        return cls(HOUR in names, COLLECTION in names)

    @property
    def names(self) -> tuple[str, ...]:
        """The partition columns, in the order of the directories."""
        return (DAY, *((HOUR,) if self.hour else ()), *((COLLECTION,) if self.collection else ()))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises UsageError where a lake of these columns cannot be divided so."""
        if self.collection and COLLECTION not in columns:
            raise UsageError(
                "the lake is to be partitioned by collection, but its columns have no 'collection'",
                hint="Add it to the columns, or partition by day or hour",
            )

    def fields(self) -> list[dict[str, Any]]:
        """The fields of the table's schema that no data file holds, in Spark's JSON form."""
        kinds = {DAY: "date", HOUR: "integer"}
        return [
            {"name": name, "type": kinds[name], "nullable": True, "metadata": {}}
            for name in self.names
            if name in kinds
        ]


BY_DAY: Final = Partitioning()
