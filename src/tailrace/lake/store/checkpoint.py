"""Checkpoints of the lake's log: its state at one commit as a Parquet file, in Delta's form, so that nobody has to read
all commits. They are on the device before any older commit is removed (``published_checkpoint.py``).

``deltalake`` keeps the names of replaced files for ``delta.deletedFileRetentionDuration``, which is the longest time
that a lake may keep such files: 30 days, so 2.6 million names at a commit a second. Only the names of files that still
exist, for readers, are needed: these must not be taken for leftovers. The others are taken out.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoreAwayError
from tailrace.errors import SinkError
from tailrace.lake.store import delta
from tailrace.lake.store.delta_log import (
    begins_of,
    changes_of,
    entry_of,
    erasures_of,
    gaps_of,
    guarded,
    removal_of,
    versions_of,
)
from tailrace.lake.store.lake_root import LakeRoot, read_sealed, sha256_of, write_sealed
from tailrace.lake.store.layout import LakeLayout
from tailrace.lake.store.log_state import LogState
from tailrace.lake.store.published_checkpoint import publish_checkpoint

_DIGESTS = "checkpoints.json"
#: In ``_staging``: the log, where the next checkpoint is made.
_BESIDE = "log"
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
    """Write the checkpoint of commit ``number``, the newest; then take away commits older than the last ``keep``, and
    all checkpoints but the last two. The caller holds the lock.

    If there is no room for one, the log continues without it: a checkpoint is a shortcut for readers, and the next one
    is tried at its time.
    """
    from deltalake.exceptions import DeltaError  # noqa: PLC0415  half a second, and once in a hundred commits

    try:
        _publish(layout, number)
    except (OSError, DeltaError, SinkError):
        return
    durable.step("checkpoint")
    checkpoints = _numbers(layout)
    known = _digests(layout)
    known[number] = sha256_of(layout.checkpoint(number))
    kept_digests = {str(one): known[one] for one in checkpoints[-2:] if one in known}
    write_sealed(layout.state / _DIGESTS, {"checkpoints": kept_digests})
    old = [layout.commit(one) for one in delta.commits_in(layout.root) if one <= number - keep]
    for path in old + [layout.checkpoint(one) for one in checkpoints[:-2]]:
        path.unlink(missing_ok=True)


def _numbers(layout: LakeLayout) -> list[int]:
    return layout.readable(delta.checkpoints_in(layout.root))


def _publish(layout: LakeLayout, number: int) -> None:
    base = max((one for one in _numbers(layout) if one < number), default=None)

    def forget(made: Path, pointer: Path) -> None:
        _forget_removed(layout.root, made, pointer)

    publish_checkpoint(layout.root, number, layout.staging / _BESIDE, base=base, edit=forget)


def _forget_removed(root: LakeRoot, made: Path, pointer: Path) -> None:
    """Take the replaced files that are gone out of the checkpoint ``made`` of the lake at ``root``."""
    present: dict[LakeRoot, set[str]] = {}
    kept = [name is None or _is_present(root / name, present) for name in delta.paths_in(made, "remove")]
    if all(kept):
        return
    with pq.ParquetFile(made) as file:
        left = file.read().filter(pa.array(kept))
    made.unlink()
    pq.write_table(left, made)
    said = durable.read_json(pointer) or {}
    durable.write_json(pointer, {**said, "size": left.num_rows, "sizeInBytes": made.stat().st_size})


def _is_present(path: LakeRoot, present: dict[LakeRoot, set[str]]) -> bool:
    """Whether a file is there. ``present``: what was found in each directory so far."""
    folder = path.parent
    if folder not in present:
        present[folder] = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    return path.name in present[folder]


def read(layout: LakeLayout, number: int) -> LogState:
    """The log's state at the checkpoint of commit ``number``. FileNotFoundError where it has gone, SinkError where it
    is damaged."""
    path = layout.checkpoint(number)
    state = LogState(number)
    if _is_changed(layout, number):
        raise SinkError(
            f"{path} is damaged: it was changed after it was written",
            hint="Remove it, or start a stream, which removes it: the commits and the checkpoint before it hold the "
            "same",
        )
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
            state.versions, state.changes = versions_of(configuration, path), changes_of(configuration, path)
            state.begins = begins_of(configuration, path)
    return state


def problems(layout: LakeLayout) -> list[str]:
    """The checkpoints that are not what was written, in sentences."""
    changed = [layout.checkpoint(number) for number in _numbers(layout) if _is_changed(layout, number)]
    return [f"{path} is damaged: it was changed after it was written" for path in changed]


def _digests(layout: LakeLayout) -> dict[int, str]:
    """The SHA-256 of each checkpoint's file, by its number. Parquet has checksums of pages, and ``deltalake`` writes
    none."""
    path = layout.state / _DIGESTS
    value = read_sealed(path)
    known: Any = {} if value is None else value["checkpoints"]
    return guarded(lambda: {int(number): str(digest) for number, digest in known.items()}, path)


def _is_changed(layout: LakeLayout, number: int) -> bool:
    known = _digests(layout).get(number)
    return known is not None and sha256_of(layout.checkpoint(number)) != known


def drop_torn(layout: LakeLayout) -> None:
    """Take away checkpoints that a power cut has left unreadable, or that were changed since: all commits that they add
    up are still there then, because those go only when the checkpoint is on the device. The caller holds the lock."""
    shutil.rmtree(layout.staging / _BESIDE, ignore_errors=True)
    torn = []
    for number in _numbers(layout):
        path = layout.checkpoint(number)
        try:
            pq.read_metadata(_readable(path))
            if _is_changed(layout, number):
                torn.append(path)
        except (OSError, pa.ArrowException):
            torn.append(path)
    pointer = layout.log / delta.POINTER
    try:
        value = _read_json(pointer)
    except StoreAwayError:
        raise
    except SinkError:
        value = {}
    if value is not None:
        version = value.get("version")
        named = isinstance(version, int) and version >= 0 and layout.checkpoint(version)
        if not named or named in torn or not named.exists():
            pointer.unlink(missing_ok=True)
    for path in torn:
        path.unlink(missing_ok=True)


def _read_json(path: LakeRoot) -> dict[str, object] | None:
    if isinstance(path, Path):
        return durable.read_json(path)
    try:
        return durable.parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return None


def _readable(path: LakeRoot) -> Any:
    """A checkpoint for Parquet's reader; an object is read as a whole."""
    return pa.BufferReader(path.read_bytes()) if isinstance(path, ObjectPlace) else path


def _rows(path: LakeRoot) -> list[dict[str, Any]]:
    try:
        with pq.ParquetFile(_readable(path)) as file:
            return list(file.read(columns=_COLUMNS).to_pylist())
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise SinkError(f"{path} is damaged: {error}") from error
