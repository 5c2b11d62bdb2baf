"""Entries of a run that may matter to followers of collections, as columns."""

from __future__ import annotations

from typing import Final

import numpy as np

from tailrace.core.oplog.entry_kinds import KNOWN_OPERATIONS
from tailrace.read.window.apply import LETTERS
from tailrace.read.window.oplogs import EntryRun

COMMAND: Final = ord("c")
#: What an element ``_id`` has before its value: its type and its name.
ID_HEAD: Final = 5
_KNOWN: Final = [ord(letter) for letter in sorted(KNOWN_OPERATIONS)]


def entries_of_interest(run: EntryRun, indexes: range | list[int]) -> list[list[int]]:
    """The entries of a run that may matter, in order, as columns: row, operation, whether it is of a migration, a
    range, where the element ``_id`` is, where ``o`` is, time. The range is the whole of a command, and of others the
    namespace and the UUID. What is of an unknown kind stands as a command."""
    rows = run.rows
    picked = np.asarray(indexes)
    operation = rows.operation[picked]
    changes = np.isin(operation, list(LETTERS))
    changes &= (rows.uuid[picked] != 0) & (rows.id_type[picked] != 0)
    whole = (operation == COMMAND) | ~np.isin(operation, _KNOWN)
    wanted = changes | whole
    picked, whole = picked[wanted], whole[wanted]
    uuid, names = rows.uuid[picked], rows.namespace_start[picked]
    first = np.where(whole, rows.start[picked], np.minimum(names, uuid))
    last = np.where(whole, rows.start[picked + 1], np.maximum(rows.namespace_end[picked], uuid + 16))
    element = rows.id_start[picked] - ID_HEAD
    columns = (element, rows.id_end[picked], rows.change_start[picked], rows.change_end[picked], rows.time[picked])
    kinds = (picked, np.where(whole, COMMAND, rows.operation[picked]), rows.migrated[picked])
    return [one.tolist() for one in (*kinds, first, last, *columns)]


def uuid_of(run: EntryRun, row: int) -> bytes:
    """The UUID of an entry's collection."""
    return run.raw[run.rows.uuid[row] : run.rows.uuid[row] + 16]
