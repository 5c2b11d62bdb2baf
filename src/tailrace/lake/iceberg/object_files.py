"""Iceberg's own files in an object store, as pyiceberg reads and writes them: metadata, lists of manifests, manifests.

Each of them is small, is written once under a name with a random part, and is whole or absent. So it is read in one
request and written in one (``If-None-Match``). A request whose answer is lost is repeated, and what is there then is
compared. A store that does not answer raises StoreAwayError, which pyiceberg passes on: it must not count as metadata
that is missing or damaged.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import TracebackType

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from tailrace.base import durable
from tailrace.base.object_place import ObjectPlace
from tailrace.lake.iceberg.where import ElsewhereError, uri


class ObjectFiles(FileIO):
    """The objects below ``root``. Locations of other places raise ElsewhereError."""

    def __init__(self, root: ObjectPlace) -> None:
        super().__init__()
        self._root = root

    def new_input(self, location: str) -> InputFile:
        """An object to read."""
        return ObjectInput(location, self._place(location))

    def new_output(self, location: str) -> OutputFile:
        """An object to write."""
        return ObjectOutput(location, self._place(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove an object."""
        self._place(location if isinstance(location, str) else location.location).unlink()

    def _place(self, location: str) -> ObjectPlace:
        beginning = f"{uri(self._root)}/"
        if not location.startswith(beginning):
            raise ElsewhereError(f"{location} is not below {self._root}")
        return self._root / location.removeprefix(beginning)


class ObjectInput(InputFile):
    """An object, read as a whole."""

    def __init__(self, location: str, place: ObjectPlace) -> None:
        super().__init__(location)
        self._place = place

    def __len__(self) -> int:
        return self._place.head()[0]

    def exists(self) -> bool:
        """Whether there is such an object."""
        return self._place.exists()

    def open(self, seekable: bool = True) -> InputStream:
        """What it holds. Raises FileNotFoundError, and StoreAwayError if the store does not answer."""
        return io.BytesIO(self._place.read_bytes())


class ObjectOutput(OutputFile):
    """An object that is written once, when its stream is closed."""

    def __init__(self, location: str, place: ObjectPlace) -> None:
        super().__init__(location)
        self._place = place
        self._size: int | None = None

    def __len__(self) -> int:
        return self._place.head()[0] if self._size is None else self._size

    def exists(self) -> bool:
        """Whether there is such an object."""
        return self._place.exists()

    def to_input_file(self) -> InputFile:
        """The same object to read."""
        return ObjectInput(self.location, self._place)

    def create(self, overwrite: bool = False) -> OutputStream:
        """A stream into it. The name is used once, so nothing is ever overwritten."""
        return _Written(self._put)

    def _put(self, content: bytes) -> None:
        self._place.create(content)
        self._size = len(content)
        durable.step("iceberg.put")


class _Written(io.BytesIO):
    """The content of an object on its way. One that was left by an error is not written."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        super().__init__()
        self._put = put

    def close(self) -> None:
        """Write the object. Raises FileExistsError if another one has its name."""
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._put(content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            super().close()

    def __del__(self) -> None:
        super().close()
