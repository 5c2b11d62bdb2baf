"""How far a writer of tables has come."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.core.oplog.cluster_time import ClusterTime


@dataclass(frozen=True, slots=True)
class TablesProgress:
    """What a writer has done since it began.

    Attributes:
        time: all tables equal their collections at this cluster time; ``None`` while there is no such time
        tables: how many there are
        anew: how many were rewritten because they differed from what the state knew
    """

    batches: int
    changes: int
    copied: int
    time: ClusterTime | None
    tables: int = 0
    anew: int = 0
