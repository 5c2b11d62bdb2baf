"""Where the files of an Iceberg table are: on a disk or in an object store, and what differs between the two."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tailrace.base import durable
from tailrace.errors import SinkError
from tailrace.lake.store.place import TablePlace


class ElsewhereError(SinkError):
    """The files of a table that the catalogue has are in a place that this process does not read."""


def uri(place: TablePlace) -> str:
    """A place's location as Iceberg has it, of which no character is escaped: ``file://`` and the path, or the URI of
    the object store."""
    return f"file://{place.absolute()}" if isinstance(place, Path) else place.as_uri()


def writing(folder: TablePlace) -> AbstractContextManager[object]:
    """Around writing there: a disk that is full has an error of its own, and so has a store, whatever it says."""
    return durable.writing(folder) if isinstance(folder, Path) else nullcontext()


def make_folder(folder: TablePlace) -> None:
    """Make a directory; a store has none."""
    if isinstance(folder, Path):
        durable.make_directory(folder)


def settle(file: TablePlace) -> None:
    """Bring a file that was written to the device. An object is there when the store has answered."""
    if isinstance(file, Path):
        durable.sync_file(file)


def settle_names(folder: TablePlace) -> None:
    """Bring the names in a directory to the device."""
    if isinstance(folder, Path):
        durable.sync_directory(folder)
