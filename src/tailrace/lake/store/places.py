"""Where tables lie, in a directory or in an object store: what differs between the two is decided here."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace, StoredObject
from tailrace.base.store_probe import check_store
from tailrace.lake.store.place import TablePlace

#: The local folder for files that are on their way to an object store.
UPLOADS: Final = "uploads"
#: How ``deltalake`` tells what a store has said while it reads a checkpoint: that has no class of its own (1.6.6).
_STORES_ERROR: Final = re.compile(r"Generic (?:S3|MicrosoftAzure|GCS) error: ")


def delta_table(root: TablePlace, version: int | None = None) -> DeltaTable:
    """The Delta table at ``root``. Raises ``DeltaError`` if there is none or it cannot be read, StoreAwayError if the
    store does not answer."""
    with asking(root):
        return DeltaTable(root.absolute().as_uri(), version=version, storage_options=options_of(root))


def options_of(root: TablePlace) -> dict[str, str] | None:
    """What ``deltalake`` needs to reach ``root``."""
    return dict(root.bucket.options) if isinstance(root, ObjectPlace) else None


@contextmanager
def asking(root: TablePlace) -> Iterator[None]:
    """Around what a Delta table may read from its store. That the store does not answer is no property of the data:
    raises StoreAwayError then."""
    try:
        yield
    except (OSError, DeltaError) as error:
        away = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if isinstance(root, ObjectPlace) and (away or _STORES_ERROR.search(str(error))):
            raise root.trouble("read", error) from None
        raise


def publish(place: TablePlace, content: bytes, beside: TablePlace) -> None:
    """Write a file or object that must not be there yet; it is there to stay, and whole. Raises FileExistsError."""
    if isinstance(place, ObjectPlace):
        place.create(content)
    else:
        assert isinstance(place, Path)
        assert isinstance(beside, Path)
        durable.publish(place, content, beside)


def make_log(root: TablePlace, log: str) -> None:
    """Make the directory of a table's log; a store has no directories."""
    if isinstance(root, Path):
        with durable.writing(root):
            durable.make_directory(root / log)


def open_file(place: TablePlace) -> IO[bytes]:
    """A file or object to read. Raises FileNotFoundError."""
    if isinstance(place, ObjectPlace):
        return place.open()
    assert isinstance(place, Path)
    return place.open("rb")


@contextmanager
def parquet_file(place: TablePlace) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read; the checksums of its pages are compared. Raises FileNotFoundError."""
    with ExitStack() as stack:
        source = place if isinstance(place, Path) else stack.enter_context(open_file(place))
        yield stack.enter_context(pq.ParquetFile(source, page_checksum_verification=True))


def identity(place: TablePlace) -> tuple[object, ...] | None:
    """What tells a file's content from another one's without reading it; ``None`` if there is none."""
    if isinstance(place, ObjectPlace):
        with suppress(FileNotFoundError):
            return place.head()
        return None
    assert isinstance(place, Path)
    try:
        status = place.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def sizes(root: TablePlace, names: Collection[str]) -> dict[str, int]:
    """The sizes in bytes of those files of ``names`` that are there."""
    if isinstance(root, ObjectPlace):
        wanted = set(names)
        return {one.name: one.size for one in root.objects() if one.name in wanted} if names else {}
    found = {}
    for name in names:
        path: Any = root / name
        with suppress(FileNotFoundError):
            if path.is_file():
                found[name] = path.stat().st_size
    return found


def files_below(root: TablePlace) -> Iterator[StoredObject]:
    """All files below, hidden ones too."""
    if isinstance(root, ObjectPlace):
        yield from root.objects()
        return
    assert isinstance(root, Path)
    for where, _, names in os.walk(root):
        for name in names:
            path = Path(where) / name
            with suppress(FileNotFoundError):
                status = path.stat()
                yield StoredObject(path.relative_to(root).as_posix(), status.st_size, status.st_mtime)


def clock_difference(root: TablePlace) -> float:
    """How far the clock of ``files_below`` may be behind ours, in seconds, to be added to a time of ours. A store
    counts whole seconds."""
    if isinstance(root, ObjectPlace):
        if not root.bucket.clock:
            check_store(root)
        return min(0.0, root.bucket.clock[0]) - 1
    return 0.0
