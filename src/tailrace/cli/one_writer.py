"""Ensures that a lake has one writer at a time, among the commands that write it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import UsageError

if TYPE_CHECKING:
    from tailrace.lake.store.lake_root import LakeRoot

#: In Spark's checkpoint: held for as long as a run lasts.
_LOCK: Final = "tailrace-run.lock"


@contextmanager
def only_writer(lake: LakeRoot, checkpoint: Path | None) -> Iterator[None]:
    """Keep other runs of the pipeline out: two that go on from one checkpoint plan the same micro-batches, and each
    would take the other's for its own of an older copy. Raises UsageError where there is one."""
    from tailrace.lake.store.layout import LakeLayout  # noqa: PLC0415
    from tailrace.lake.store.local_path import local_path  # noqa: PLC0415

    root = lake if isinstance(lake, ObjectPlace) else local_path(lake, "the lake")
    where = LakeLayout(root).default_checkpoint if checkpoint is None else local_path(checkpoint, "the checkpoint")
    with durable.writing(where):
        durable.make_private(where)
    with durable.locked(where / _LOCK, wait=False) as mine:
        if not mine:
            raise UsageError(
                f"another process writes the lake {root}, with the checkpoint {where}",
                hint="A lake has one writer: stop that one first (Ctrl-C, SIGTERM)",
            )
        yield
