"""The Iceberg catalogue that shows a lake, for commands that change or check it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tailrace.errors import UsageError

if TYPE_CHECKING:
    from tailrace.lake.iceberg.lake_mirror import LakeMirror
    from tailrace.lake.iceberg.settings import IcebergSettings
    from tailrace.lake.store.lake_root import LakeRoot
    from tailrace.lake.store.retention import Release


def named_catalogue(given: str | None) -> IcebergSettings | None:
    """The catalogue of ``--iceberg``."""
    from tailrace.lake.iceberg.settings import IcebergSettings as Named  # noqa: PLC0415  so that --help is quick

    return None if given is None else Named.of(given, "--iceberg")


@contextmanager
def shown_in(root: LakeRoot, iceberg: IcebergSettings | None) -> Iterator[LakeMirror | None]:
    """The lake's mirror in a catalogue that was named, which is asked before the body runs and brought up after it."""
    if iceberg is None:
        yield None
        return
    from tailrace.lake.iceberg.lake_mirror import LakeMirror as Mirror  # noqa: PLC0415
    from tailrace.lake.store.identity import read_identity  # noqa: PLC0415

    if read_identity(root) is None:
        raise UsageError(f"{root} is not a lake of Tailrace")
    mirror = Mirror(root, iceberg)
    try:
        mirror.check()
        yield mirror
        mirror.follow()
    finally:
        mirror.close()


def released(mirror: LakeMirror | None) -> Release | None:
    """What lets the snapshots of a mirror go."""
    return None if mirror is None else mirror.release
