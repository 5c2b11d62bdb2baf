"""Checkpoints of the lake's log: its state at one commit as a Parquet file, in Delta's form, so that nobody has to read
all commits. ``deltalake`` writes them; it does not sync them, so this does, before any older commit goes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace import durable
from tailrace.errors import SinkError
from tailrace.lake.delta_log import entry_of, erasures_of, gaps_of, removal_of
from tailrace.lake.layout import LakeLayout
from tailrace.lake.log_state import LogState

_NUMBERED = re.compile(r"([0-9]{20})\.(?:json|checkpoint\.parquet)")
_COLUMNS = [
    "add.path",
    "add.size",
    "add.stats",
    "add.tags",
    "add.partitionValues",
    "remove.path",
    "remove.size",
    "remove.deletionTimestamp",
    "remove.partitionValues",
    "metaData.configuration",
]


def make(layout: LakeLayout, number: int, *, keep: int) -> None:
    """Write the checkpoint of commit ``number``, the newest; then take away commits older than the last ``keep`` and
    checkpoints but the last two. The caller holds the lock.

    If there is no room for one, the log continues without it: a checkpoint is a shortcut for readers, and the next one
    is tried at its time.
    """
    from deltalake import DeltaTable  # noqa: PLC0415  half a second, and once in a hundred commits
    from deltalake.exceptions import DeltaError  # noqa: PLC0415

    try:
        DeltaTable(layout.root.absolute().as_uri()).create_checkpoint()
    except (OSError, DeltaError):
        return
    durable.sync_file(_path(layout, number))
    durable.sync_file(layout.log / "_last_checkpoint")
    durable.sync_directory(layout.log)
    durable.step("checkpoint")
    checkpoints = sorted(int(path.name[:20]) for path in layout.log.glob("*.checkpoint.parquet"))
    for path in layout.log.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match is None:
            continue
        kept = int(match[1]) in checkpoints[-2:] if path.suffix == ".parquet" else int(match[1]) > number - keep
        if not kept:
            path.unlink(missing_ok=True)


def read(layout: LakeLayout, number: int) -> LogState:
    """The log's state at the checkpoint of commit ``number``. FileNotFoundError where it has gone, SinkError where it
    is damaged."""
    path = _path(layout, number)
    state = LogState(number)
    for row in _rows(path):
        if (add := row.get("add")) is not None and add["path"] is not None:
            maps = {name: dict(add[name] or ()) for name in ("tags", "partitionValues")}
            entry = entry_of({**add, **maps}, path)
            state.files[entry.name] = entry
        elif (remove := row.get("remove")) is not None and remove["path"] is not None:
            removal = removal_of({**remove, "partitionValues": dict(remove.get("partitionValues") or ())}, path)
            state.removed[removal.name] = removal
        elif (metadata := row.get("metaData")) is not None and metadata["configuration"] is not None:
            configuration = dict(metadata["configuration"])
            state.gaps, state.erasures = gaps_of(configuration, path), erasures_of(configuration, path)
    return state


def drop_torn(layout: LakeLayout) -> None:
    """Take away checkpoints that a power cut has left unreadable: all commits that they add up are still there then,
    because those go only when the checkpoint is on the device. The caller holds the lock."""
    torn = []
    for path in layout.log.glob("*.checkpoint.parquet"):
        try:
            pq.read_metadata(path)
        except (OSError, pa.ArrowException):
            torn.append(path)
    pointer = layout.log / "_last_checkpoint"
    try:
        value = durable.read_json(pointer)
    except SinkError:
        value = {}
    if value is not None:
        version = value.get("version")
        named = isinstance(version, int) and version >= 0 and _path(layout, version)
        if not named or named in torn or not named.exists():
            pointer.unlink(missing_ok=True)
    for path in torn:
        path.unlink(missing_ok=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            return list(file.read(columns=_COLUMNS).to_pylist())
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise SinkError(f"{path} is damaged: {error}") from error


def _path(layout: LakeLayout, number: int) -> Path:
    return layout.log / f"{number:020d}.checkpoint.parquet"
