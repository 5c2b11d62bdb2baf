"""What a table's metadata says about it besides its columns: Delta's own properties, and ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NAMESPACE: Final = "tailrace.namespace"
FEED: Final = "delta.enableChangeDataFeed"
DECLARED: Final = "tailrace.declared"
DEPLOYMENT: Final = "tailrace.deployment"
POLICY: Final = "tailrace.onMismatch"
DIVIDED, CUT = "tailrace.partitionBy", "tailrace.cut"
STATS: Final = "delta.dataSkippingStatsColumns"
#: Delta's own word for a table that is merged on read, and how long its checkpoints remember files that are gone. Each
#: is remembered with its deletion vector, and nobody needs that: what may be deleted is decided in ``versions.py``.
_MERGED_ON_READ: Final = {
    "delta.enableDeletionVectors": "true",
    "delta.deletedFileRetentionDuration": "interval 0 seconds",
}


@dataclass(frozen=True, slots=True)
class TableProperties:
    """The properties of the table of ``namespace``; the others as in ``CollectionTable``. ``bounds``: the columns that
    have bounds in the log; ``cut``: the fields that have no column."""

    namespace: str
    divide_by: Sequence[str]
    declared: str | None
    policy: str | None
    deployment: str
    cut: Sequence[str]
    bounds: Sequence[str]
    feed: bool
    merges: bool

    def configuration(self) -> dict[str, str]:
        """As Delta's metadata has them."""
        # deltalake treats a missing bound as NULL, and leaves the file out of every query that filters by the column.
        stats = {STATS: ",".join(self.bounds)} if self.bounds else {}
        return {
            NAMESPACE: self.namespace,
            **({DIVIDED: json.dumps(self.divide_by)} if self.divide_by else {}),
            **({} if self.declared is None else {DECLARED: self.declared}),
            **({} if self.policy is None else {POLICY: self.policy}),
            **({DEPLOYMENT: self.deployment} if self.deployment else {}),
            **({CUT: json.dumps(self.cut)} if self.cut else {}),
            "delta.enableExpiredLogCleanup": "false",
            **({FEED: "true"} if self.feed else {}),
            **(_MERGED_ON_READ if self.merges else {}),
            **(stats or {"delta.dataSkippingNumIndexedCols": "0"}),
        }
