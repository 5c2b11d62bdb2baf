"""What a checkpoint keeps of its lake: which lake and claim, and the newest commit that it has made there.

``tailrace-lake.json`` lies in Spark's checkpoint directory::

    {"format": 2, "lake": "<id>", "claim": "<id>", "after": "82...", "newest": {"number": 17, "digest": "<SHA-256>"}}

A lake and its checkpoint are two records of one truth, and each may be set back without the other, from a backup or by
hand. A checkpoint that is older is known by the lake's log. A lake that is older is known by ``newest``: the checkpoint
has seen a commit that the lake does not have, or has in another form. Opening the lake, and each commit, compare the
two before anything is written; otherwise the stream would go on after events that only the lost commits held.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tailrace.base import durable
from tailrace.errors import SinkError
from tailrace.lake.store.commit_log import CommitLog, Head
from tailrace.lake.store.delta_log import FORMAT, check_format, guarded

CHECKPOINT_FILE: Final = "tailrace-lake.json"
#: What to do with a lake that was set back.
WAY_OUT: Final = (
    "Put the newer lake back, or give a fresh checkpoint directory: the stream goes on after this lake's last event if "
    "the oplog (or an archive) still holds what comes next"
)


def read_held(checkpoint: Path) -> dict[str, Any] | None:
    """What the checkpoint keeps; ``None`` where it was not made for a lake. SinkError where the file is damaged."""
    path = checkpoint / CHECKPOINT_FILE
    held = durable.read_sealed(path)
    if held is not None:
        check_format({"format": held.get("format", FORMAT)}, path)
        guarded(lambda: _newest(held), path)
    return held


def write_held(checkpoint: Path, held: Mapping[str, object], head: Head) -> None:
    """Keep ``held``, and with it the lake's newest commit. Raises LakeFullError."""
    newest = {"number": head.number, "digest": head.digest}
    durable.write_sealed(checkpoint / CHECKPOINT_FILE, {**held, "format": FORMAT, "newest": newest})


def require_seen(log: CommitLog, head: Head, checkpoint: Path, held: Mapping[str, Any]) -> None:
    """Raise SinkError where the lake does not have the commit that the checkpoint has seen there. The caller holds the
    lock. (A commit that the log has forgotten since cannot be compared: the log is longer then.)"""
    newest = _newest(held)
    if newest is None:
        return
    number, digest = newest
    root = log.layout.root
    if head.number < number:
        raise SinkError(
            f"the lake {root} is older than its checkpoint {checkpoint}: it ends with commit {head.number}, and the "
            f"checkpoint has seen commit {number}. Perhaps an old copy of the lake was put in its place",
            hint=WAY_OUT,
        )
    found = head.digest if head.number == number else log.digest_of(number)
    if found is not None and found != digest:
        raise SinkError(
            f"the lake {root} is not the one that the checkpoint {checkpoint} has written: its commit {number} is "
            "a different one. Perhaps an old copy of the lake was put in its place, and changed since",
            hint=WAY_OUT,
        )


def _newest(held: Mapping[str, Any]) -> tuple[int, str] | None:
    newest = held.get("newest")
    if newest is None:
        return None
    number, digest = newest["number"], newest["digest"]
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(digest, str):
        raise TypeError("newest")
    return number, digest
