"""A checkpoint of a Delta log, made next to the log and published whole: for lakes and for tables in directories.

``deltalake`` writes checkpoints and syncs nothing. If one is written directly into its place, a power cut may leave its
name on the device, but not its bytes: readers then fail at a table whose commits are all there, and a log that had
already dropped those commits would be lost. So it is made from a copy of the log (hard links), synced, and renamed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.lake.store import delta


def publish_checkpoint(
    root: Path | ObjectPlace,
    number: int,
    beside: Path,
    *,
    base: int | None,
    edit: Callable[[Path, Path], None] = lambda made, pointer: None,
) -> None:
    """Make the checkpoint of version ``number`` of the table at ``root``; ``_last_checkpoint`` names it afterwards.

    ``beside``  a directory on the same file system, for the copy; it is removed before and after
    ``base``    a checkpoint to begin with; ``None``: the log is read from its first commit
    ``edit``    may change the checkpoint and the pointer before they are published

    The caller holds the table's lock. Raises FileNotFoundError if a commit after ``base`` is missing, OSError,
    LakeFullError, DeltaError.
    """
    from deltalake import DeltaTable  # noqa: PLC0415  half a second, and once in a hundred commits

    shutil.rmtree(beside, ignore_errors=True)
    try:
        log = beside / delta.LOG
        log.mkdir(parents=True)
        begin = [] if base is None else delta.checkpoints_in(root)[base]
        first = 0 if base is None else base + 1
        for path in [*begin, *(delta.commit_path(root, one) for one in range(first, number + 1))]:
            _link(path, log / path.name)
        DeltaTable(beside.absolute().as_uri()).create_checkpoint()
        made, pointer = delta.checkpoint_path(beside, number), log / delta.POINTER
        edit(made, pointer)
        # Readers look for a file's end by the size that the directory said: they never see another one in its place.
        if isinstance(root, ObjectPlace):
            (root / delta.LOG / made.name).create(made.read_bytes())
            (root / delta.LOG / pointer.name).upload(pointer)
            return
        for path in (made, pointer):
            durable.sync_file(path)
            durable.publish_file(path, root / delta.LOG / path.name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _link(path: Path | ObjectPlace, name: Path) -> None:
    if isinstance(path, ObjectPlace):
        name.write_bytes(path.read_bytes())
        return
    try:
        name.hardlink_to(path)
    except FileNotFoundError:
        raise
    except OSError:  # there are file systems without links
        shutil.copyfile(path, name)
