"""The data files of a version with what is gone from each, from the log itself: deltalake does not tell the deletion
vectors of files.

A log is a checkpoint and the commits after it. A file whose deletion vector has changed is removed and added by one
commit. The log is taken as every reader takes it: ``log_chain.py`` says whether it is what was written, and a table is
rewritten by removing what readers find in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from tailrace.errors import SinkError
from tailrace.lake.store import delta, places
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables import delta_commit
from tailrace.lake.tables.data_files import REBUILD, TableDamageError
from tailrace.lake.tables.deletion_vector import NONE, RowNumbers, rows_of
from tailrace.lake.tables.delta_commit import TableFile

#: A table whose rows may be gone while their files are there. Readers that do not know the word refuse the table.
FEATURE: Final = "deletionVectors"


class LiveFiles:
    """The files of the table at ``root``, by their paths in the log. ``at`` goes from version to version."""

    def __init__(self, root: TablePlace) -> None:
        self._root = root
        self._version = -1
        self._files: dict[str, TableFile] = {}

    def at(self, version: int) -> list[TableFile]:
        """The files of a version. Raises SinkError if the log no longer says."""
        if version < self._version or self._version < 0 or not self._advance(version):
            self._load(version)
        return list(self._files.values())

    def _advance(self, version: int) -> bool:
        """Whether the commits from where this stands up to ``version`` are still there."""
        try:
            for number in range(self._version + 1, version + 1):
                content = delta.commit_path(self._root, number).read_bytes()
                apply(self._files, delta.actions_in(content))
                self._version = number
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError) as error:
            raise SinkError(f"version {number} of the table {self._root} cannot be read: {error}") from error
        return True

    def _load(self, version: int) -> None:
        self._files, self._version = {}, -1
        there = delta.checkpoints_in(self._root)
        base = max((number for number in there if number <= version), default=-1)
        try:
            for path in there.get(base, ()):
                apply(self._files, in_checkpoint(path))
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise SinkError(f"a checkpoint of the table {self._root} cannot be read: {error}") from error
        self._version = base
        if not self._advance(version):
            self._version = -1
            raise SinkError(f"the log of the table {self._root} lacks a version before {version}")


def files_at(root: TablePlace, version: int) -> list[TableFile]:
    """The files of one version, with what is gone from each."""
    return LiveFiles(root).at(version)


def apply(files: dict[str, TableFile], actions: Iterable[Mapping[str, Any]]) -> None:
    """Bring ``files`` from one version to the next. The actions of a commit have no order: a file that is removed and
    added has another vector."""
    found = list(actions)
    for action in found:
        if "remove" in action:
            files.pop(action["remove"]["path"], None)
    for action in found:
        if "add" in action:
            file = file_of(action["add"])
            files[file.path] = file


def file_of(add: Mapping[str, Any]) -> TableFile:
    """The file that an ``add`` names."""
    stats = add.get("stats") or ""
    return TableFile(add["path"], add["size"], delta_commit.rows_in(stats), add.get("deletionVector"), stats)


def in_checkpoint(path: TablePlace) -> Iterator[dict[str, Any]]:
    """The files that a checkpoint's file names, each as an ``add``."""
    with places.parquet_file(path) as file:
        for add in file.read(columns=["add"]).column("add").to_pylist():
            if add is not None and add["path"] is not None:
                yield {"add": add}


def gone_of(root: TablePlace, file: TableFile) -> RowNumbers:
    """The rows that are gone from a file. Raises TableDamageError where the log does not say it as we do."""
    if file.vector is None:
        return NONE
    try:
        return rows_of(file.vector)
    except (ValueError, KeyError, TypeError) as error:
        raise TableDamageError(
            f"the log of the table {root} cannot be read: {unquote(file.path)} has {error}", hint=REBUILD
        ) from error
