"""Whether an oplog still reaches back to where somebody wants to begin: one rule for everyone who asks.

A reader that has everything up to a time needs the entry after it. If the oldest entry is more than one tick later,
entries may be missing in between, unless nothing was ever written before it.
"""

from __future__ import annotations

from typing import Final

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import ChangeStreamHistoryLost

HISTORY_LOST: Final = "Resume of change stream was not possible, as the resume point may no longer be in the oplog."


def reaches_back(after: ClusterTime, oldest: ClusterTime, complete: bool) -> bool:
    """Whether nothing that is later than ``after`` can be missing from an oplog.

    ``oldest``    the cluster time of its first entry
    ``complete``  that entry is ``initiating set``: nothing was ever written before it (``OplogSource.oldest``)
    """
    return complete or oldest <= after + 1


def history_lost(hint: str) -> ChangeStreamHistoryLost:
    """Error 286 in the server's words; ``hint`` says how far the oplog reaches and what to do."""
    return ChangeStreamHistoryLost(HISTORY_LOST, hint=hint)
