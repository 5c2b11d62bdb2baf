"""Oplog entries that show which server version has written them (measured on 4.4.2, 5.0.4, 6.0.27 and 7.0.28).

Up to 6.0 an ``applyOps`` without a session is a command that somebody sent, logged with the command's other fields,
``$db`` among them; one that holds only the operations is a write that 7.0 or later put together, such as a batched
delete. ``multiOpType: 1`` is written from 8.0 on.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from tailrace.core.oplog.entry import OplogEntry

BATCHED_SINCE: Final = "7.0"
MULTI_OP_SINCE: Final = "8.0"


class VersionProof(NamedTuple):
    """``version`` and later ones write such an entry, and no earlier one. ``found`` says what it is, for people."""

    version: str
    found: str


def version_proof(entry: OplogEntry, fields: Collection[bytes]) -> VersionProof | None:
    """What an entry proves; ``None`` where any version may have written it. ``fields`` are the names in its ``o``."""
    if entry.operation != "c" or b"applyOps" not in fields:
        return None
    if entry.multi_op:
        return VersionProof(MULTI_OP_SINCE, f"the entry at {entry.cluster_time} is an applyOps with multiOpType: 1")
    if entry.lsid is None and len(fields) == 1:
        found = f"the entry at {entry.cluster_time} is an applyOps of no session and no command"
        return VersionProof(BATCHED_SINCE, found)
    return None
