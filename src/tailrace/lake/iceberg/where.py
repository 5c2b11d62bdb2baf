"""Where the files of an Iceberg table are: on a disk or in an object store, and what differs between the two."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError
from tailrace.lake.store.place import TablePlace

if TYPE_CHECKING:
    from pyiceberg.io import FileIO


class ElsewhereError(SinkError):
    """The files of a table that the catalogue has are in a place that this process does not read."""


def uri(place: TablePlace) -> str:
    """A place's location as Iceberg has it, of which no character is escaped: ``file://`` and the path, or the URI of
    the object store."""
    return f"file://{place.absolute()}" if isinstance(place, Path) else place.as_uri()


def io_of(root: TablePlace) -> FileIO:
    """What pyiceberg reads and writes files below ``root`` with. In a store that is our own client, with the keys, the
    repetitions and the errors that the Delta tables there have; pyiceberg's settings of a store are for readers."""
    if isinstance(root, ObjectPlace):
        from tailrace.lake.iceberg.object_files import ObjectFiles  # noqa: PLC0415  an extra

        return ObjectFiles(root)
    from pyiceberg.io.pyarrow import PyArrowFileIO  # noqa: PLC0415

    return PyArrowFileIO()


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
