"""The lock on a directory of tables, and what is done to one while no writer runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, UsageError
from tailrace.lake.store.place import TablePlace
from tailrace.lake.store.places import UPLOADS
from tailrace.lake.tables.state import TableMark, TableState
from tailrace.lake.tables.state_file import finish_rewriting

#: The folder of the state and the lock, in the directory of the tables.
STATE: Final = "_tailrace"


def state_folder(root: TablePlace) -> Path:
    """The local folder of the state and the lock of the tables in ``root``: in it, or for tables in an object store the
    one that was given with it."""
    if isinstance(root, ObjectPlace):
        return root.bucket.beside
    assert isinstance(root, Path)
    return root / STATE


@contextmanager
def held_tables(root: TablePlace) -> Iterator[list[str]]:
    """The tables in ``root``, by namespace, held so that no other process writes them meanwhile."""
    descriptor = lock(root)
    try:
        state = TableState(state_folder(root) / "state", readonly=True)
        try:
            found = sorted(state.marks())
        finally:
            state.close()
        yield found
    finally:
        os.close(descriptor)


def mark_for_rebuilding(root: TablePlace, namespace: str) -> None:
    """Let the next writer rewrite a table from the state. Raises UsageError if there is no such table."""
    with held_tables(root) as namespaces:
        if namespace not in namespaces:
            raise UsageError(f"{namespace} has no table in {root}")
        state = TableState(state_folder(root) / "state")
        try:
            position, mark = state.position(), state.marks()[namespace]
            with state.writing() as transaction:
                transaction.set_mark(TableMark(namespace, mark.collection, mark.batch, whole=True))
                if position is not None:
                    transaction.set_position(position.next_batch())
        finally:
            state.close()


def lock(root: TablePlace) -> int:
    """Lock the directory of the tables. Raises SinkError if another process holds it."""
    path = state_folder(root) / "lock"
    with durable.writing(path):
        durable.make_private(root if isinstance(root, Path) else path.parent)
        durable.make_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SinkError(f"another process writes the tables in {root}", hint="Tables have one writer") from None
    try:
        finish_rewriting(path.parent / "state")
    except BaseException:
        os.close(descriptor)
        raise
    for left in (path.parent / UPLOADS).glob("*.parquet"):  # of a process that was killed
        left.unlink(missing_ok=True)
    return descriptor
