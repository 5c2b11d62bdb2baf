"""When files leave the lake's directory: replaced ones after the time that readers need, leftovers of interrupted
processes at once.

A reader that has opened the lake at one version names its files, and they stay until the retention has passed. No
directory is ever emptied, renamed or swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.delta_log import check_format
from tailrace.lake.store.lake_root import LakeRoot, present, read_sealed, rooted
from tailrace.lake.store.layout import LakeLayout, is_lake_file, is_merged
from tailrace.lake.store.mirrored import ICEBERG, is_mirrored
from tailrace.lake.store.quarantine_index import uncounted
from tailrace.lake.store.session import require_session

#: Lets the snapshots go that have files which were replaced at this moment or earlier.
Release = Callable[[datetime], None]


class NotReleasedError(SinkError):
    """Snapshots elsewhere still have the files that are to be removed."""


def expire(path: LakeRoot | str, retention: timedelta, *, release: Release | None = None) -> int:
    """Remove the files of the lake at ``path`` that were replaced longer than ``retention`` ago. Returns how many went.
    ``release`` is called before: the snapshots that have these files elsewhere go first (``LakeMirror.release``).

    A stream and readers do not have to stop. Raises UsageError where ``path`` is no lake or ``retention`` is more than
    30 days, or where the lake has Iceberg snapshots and no ``release``; SinkError where a compaction is running, or
    ``lake.json`` is damaged or was written by another release.
    """
    root = rooted(path)
    place = LakeLayout(root).identity
    known = read_sealed(place)
    if known is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    check_format(known, place)
    check_released(root, release)
    log = CommitLog(root)
    require_session(log.layout)
    policy = CompactionPolicy(retention=retention)
    with durable.locked(log.layout.compaction_lock, wait=False) as mine:
        if not mine:
            raise SinkError(f"a compaction of {root} is running", hint="It removes these files itself at its end")
        return remove_replaced(log, policy.retention, release)


def check_released(root: LakeRoot, release: Release | None) -> None:
    """Raise UsageError where files are to be removed that Iceberg snapshots have, and nobody lets go of these snapshots
    first."""
    if release is None and is_mirrored(root):
        raise UsageError(
            f"the lake {root} has Iceberg snapshots, which would lose their files",
            hint=f"Name their catalogue with --iceberg. If they are no longer wanted, remove {root / ICEBERG}",
        )


def remove_replaced(log: CommitLog, retention: timedelta, release: Release | None = None) -> int:
    """Remove the files that were replaced longer than ``retention`` ago. ``release`` is called with that moment before.
    Returns how many went."""
    state, until = log.state(), datetime.now(UTC) - retention
    old = [
        one.name
        for one in state.removed.values()
        if one.at <= until and one.name not in state.files and not log.layout.is_behind_link(one.name)
    ]
    there = present(log.layout.root, old)
    going = [log.layout.root / name for name in old if name in there]
    if going and release is not None:
        try:
            release(until)
        except SinkError as error:
            raise NotReleasedError(error.message, hint=error.hint) from error
    for path in going:
        path.unlink(missing_ok=True)
        durable.step("compaction.removed")
    return len(going)


def remove_leftovers(log: CommitLog) -> int:
    """Remove what interrupted tasks and compactions have left: unfinished files, and finished ones that no commit
    names. The caller holds the lock of a lake that no stream is writing. Returns how many files went."""
    state = log.state()
    removed = 0
    with durable.locked(log.layout.compaction_lock, wait=False) as no_compaction:
        for path in log.layout.staging.iterdir() if log.layout.staging.is_dir() else ():
            if path.is_file() and (no_compaction or not path.name.startswith("merge-")):
                path.unlink(missing_ok=True)
                removed += 1
        for path in log.layout.local.glob(durable.UNFINISHED):
            path.unlink(missing_ok=True)
            removed += 1
        for name in list(log.layout.files_present()):
            if not is_lake_file(name) or name in state.files or name in state.removed:
                continue
            if no_compaction or not is_merged(name):
                (log.layout.root / name).unlink(missing_ok=True)
                removed += 1
        if no_compaction and isinstance(log.layout.root, ObjectPlace):
            for place in uncounted(log.layout, None):  # the caller has let the index name what counts
                place.unlink()
                removed += 1
    return removed
