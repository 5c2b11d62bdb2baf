"""One MongoDB kept equal to another: copy, catch-up, definitions in order, verification, cut-over and the way back.

``Sync(source, target)`` has ``plan``, ``run``, ``status``, ``verify``, ``pause``, ``resume``, ``cutover`` and
``reverse``; ``tailrace sync`` does the same on the command line. Heavy imports happen when a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.faces import lazily

if TYPE_CHECKING:
    from tailrace.act.sync.channel import Sync
    from tailrace.act.sync.cutover import CutOver
    from tailrace.act.sync.progress import SyncProgress

__all__ = ["CutOver", "Sync", "SyncProgress"]

__getattr__ = lazily(
    __name__,
    {
        "CutOver": "tailrace.act.sync.cutover",
        "Sync": "tailrace.act.sync.channel",
        "SyncProgress": "tailrace.act.sync.progress",
    },
)
