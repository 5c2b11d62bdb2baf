"""The sources of a slice with exact images: each oplog passes through its state, which the task alone has open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tailrace.errors import UsageError
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.query.options import ReadOptions
from tailrace.read.source.live import LiveSource

#: Makes the source of a shard (``None``: of the replica set) from the one that reads its oplog.
Sources = Callable[[str | None, LiveSource], LiveSource]


@contextmanager
def sources_of(options: ReadOptions, slice_: OplogSlice) -> Iterator[Sources]:
    """What the slice's oplogs are read through: themselves, or with exact images their states. They are released at the
    end, whatever was read of them.

    Raises UsageError if the directory is not the driver's, ImageStateError if a state cannot be used.
    """
    if not options.exact:
        yield lambda shard, source: source
        return
    from tailrace.lake.spark.planning.exact import state_source  # noqa: PLC0415
    from tailrace.read.images.directory import refuse_network  # noqa: PLC0415  not without lmdb

    folder = Path(options.images or "")
    refuse_network(folder)
    _require_driver_s(folder, slice_)
    with ExitStack() as opened:

        def through_state(shard: str | None, source: LiveSource) -> LiveSource:
            state = state_source(options, slice_.server_version, shard, source)
            opened.callback(state.release)
            return state

        yield through_state


def _require_driver_s(folder: Path, slice_: OplogSlice) -> None:
    from tailrace.read.images.directory import Mark  # noqa: PLC0415

    mark = Mark.read(folder)
    if mark is None or mark.id != slice_.images:
        raise UsageError(
            f"the task finds {'no' if mark is None else 'other'} images in {folder}: it is not the directory that the "
            "driver created",
            hint="Driver and executors must see one directory under this path: run them on one machine, or share a "
            "file system that LMDB supports (not NFS)",
        )
