"""The small JSON files of an archive: sealed with a digest of their own, which is compared when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tailrace.base.durable import parse_json, read_json, unsealed, write_sealed
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, SourceError
from tailrace.read.archive.place import ArchivePlace, asking

_HINT: Final = "Restore the file from a copy of the archive"


def write_record(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document of strings, numbers and objects. Raises SinkError as ``write_sealed`` does."""
    write_sealed(path, document)


def read_record(path: ArchivePlace) -> dict[str, Any] | None:
    """The document; ``None`` where there is no such file. Raises SourceError where it is not what was written."""
    try:
        written = _read(path)
        return None if written is None else unsealed(written, path)
    except SinkError as error:
        # What cannot be read at all, as by a user who may not, is not damaged.
        raise SourceError(error.message, hint=None if isinstance(error.__cause__, OSError) else _HINT) from None


def _read(path: ArchivePlace) -> dict[str, object] | None:
    if not isinstance(path, ObjectPlace):
        return read_json(path)
    try:
        with asking():
            content = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse_json(content, path)
