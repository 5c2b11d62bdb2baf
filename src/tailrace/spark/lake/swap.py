"""Replace some files of a day by their merged successor in one step that no reader can see half of.

The new day directory is built of hard links beside the lake (no byte is copied) and swapped with the old one by
``renameat2(RENAME_EXCHANGE)``. A reader that lists a day sees all the old files or all the new ones. A reader that
listed before and opens after finds a replaced file gone and says so: an error, never a missing or doubled row, since no
name is ever used for other rows (``layout.merged_name``). What it had open stays readable until it closes it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from tailrace.errors import SinkError
from tailrace.spark.lake import durable
from tailrace.spark.lake.layout import LakeLayout
from tailrace.spark.lake.manifest import Commit


def put_in_place(layout: LakeLayout, commit: Commit) -> None:
    """Do what the compaction ``commit`` says; repeatable at any point that a crash may have left it at."""
    day = layout.root / Path(commit.files[0].name).parent
    if commit.offline:
        _replace_one_by_one(layout, commit)
    elif any((layout.root / name).exists() for name in commit.removed):
        _swap_day(layout, commit, day)
    durable.sync_directory(layout.root)
    for swap in (layout.swap_beside, layout.swap_inside):
        shutil.rmtree(swap, ignore_errors=True)
    durable.step("compaction.removed")
    for file in commit.files:
        if not (layout.root / file.name).exists():
            raise SinkError(f"{layout.root / file.name} is missing: compaction {commit.number} cannot be finished")
        (layout.staging / file.staged).unlink(missing_ok=True)


def check_can_swap(layout: LakeLayout) -> None:
    """Try a hard link and a swap where compaction will make them. SwapUnsupportedError says what else to do."""
    area = _swap_area(layout)
    one, other = area / f"try-{uuid.uuid4().hex}", layout.staging / f"try-{uuid.uuid4().hex}"
    try:
        for directory in (one, other):
            directory.mkdir()
        (one / "file").touch()
        os.link(one / "file", other / "file")
        durable.swap_directories(one, other)
    except OSError as error:
        raise durable.SwapUnsupportedError(
            f"the file system of {layout.root} has no hard links: {error.strerror}",
            hint="Compact it with offline=True (--offline) while nobody reads it",
        ) from error
    finally:
        for directory in (one, other):
            shutil.rmtree(directory, ignore_errors=True)


def _swap_area(layout: LakeLayout) -> Path:
    """A directory for new day directories, on the lake's own file system: beside the lake if that can be."""
    layout.staging.mkdir(exist_ok=True)
    try:
        layout.swap_beside.mkdir(exist_ok=True)
        if layout.swap_beside.stat().st_dev == layout.root.stat().st_dev:
            return layout.swap_beside
        layout.swap_beside.rmdir()
    except OSError:
        pass
    layout.swap_inside.mkdir(exist_ok=True)
    return layout.swap_inside


def _swap_day(layout: LakeLayout, commit: Commit, day: Path) -> None:
    new = _swap_area(layout) / day.name
    shutil.rmtree(new, ignore_errors=True)
    removed = {Path(name).name for name in commit.removed}
    with durable.writing(new):
        new.mkdir()
        for file in day.iterdir():
            if file.name not in removed:
                os.link(file, new / file.name)
        for entry in commit.files:
            os.link(layout.staging / entry.staged, new / Path(entry.name).name)
        durable.sync_directory(new)
        durable.step("compaction.built")
        durable.swap_directories(day, new)
    durable.sync_directory(new.parent)
    durable.step("compaction.swapped")


def _replace_one_by_one(layout: LakeLayout, commit: Commit) -> None:
    """For file systems without a swap, and only while nobody reads: rows are missing between the two loops."""
    for name in commit.removed:
        (layout.root / name).unlink(missing_ok=True)
        durable.step("compaction.unlinked")
    for entry in commit.files:
        place, staged = layout.root / entry.name, layout.staging / entry.staged
        if not place.exists():
            with durable.writing(place):
                staged.replace(place)
        durable.sync_directory(place.parent)
