"""Where an archive lies: in a directory, or below a prefix of an object store. What readers need from either is here.

``read/archive/keeping.py`` has what writers need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from tailrace.base.object_place import (
    URIS,
    ObjectPlace,
    StoreAwayError,
    StoredObject,
    check_tried,
    is_object_uri,
    object_place,
)
from tailrace.errors import SourceError, UsageError

#: A directory or file, or a prefix or object.
ArchivePlace: TypeAlias = Path | ObjectPlace

#: As in ``lake/store/local_path.py``: ``pathlib`` makes one slash of two.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_HINT: Final = "Nothing is wrong with what was archived. Start again when the store answers and the rights are there"


class ArchiveAwayError(SourceError):
    """The object store of an archive did not answer, or refused to: that says nothing of the archive."""


def archive_place(where: str | ArchivePlace, beside: Path | None = None) -> ArchivePlace:
    """The place of an archive: a directory, or one in an object store (``object_place``).

    Args:
        beside: the local folder that belongs to an archive in an object store; only a writer needs it

    Raises UsageError for the URI of anything else, and as ``object_place`` does.
    """
    if isinstance(where, ObjectPlace):
        return where
    if is_object_uri(str(where)):
        return object_place(str(where), beside=beside or Path())
    check_tried(str(where))
    scheme = _SCHEME.match(str(where))
    if scheme is not None:  # Python takes it for the name of a folder
        raise UsageError(
            f"an archive cannot be at a URI that begins with '{scheme[1]}:'",
            hint=f"Give a directory, {URIS}",
        )
    return Path(where)


@contextmanager
def asking() -> Iterator[None]:
    """Around what is read from a place. Raises ArchiveAwayError where a store does not answer."""
    try:
        yield
    except StoreAwayError as error:
        raise ArchiveAwayError(error.message, hint=_HINT) from None


def files_in(folder: ArchivePlace, after: str = "") -> list[StoredObject]:
    """The files right in a folder; of a store with their sizes in bytes, and only those whose names sort after
    ``after``. Of a directory the size is -1. Raises SourceError."""
    if isinstance(folder, ObjectPlace):
        with asking():
            return [one for one in folder.objects(after) if "/" not in one.name]
    try:
        return [StoredObject(path.name, -1, 0.0) for path in folder.iterdir()]
    except OSError as error:
        raise SourceError(f"cannot read {folder}: {error.strerror}") from None


def size_of(place: ArchivePlace) -> int:
    """The size of a file or object in bytes. Raises FileNotFoundError, OSError, ArchiveAwayError."""
    if isinstance(place, ObjectPlace):
        with asking():
            return place.head()[0]
    return place.stat().st_size


def is_there(place: ArchivePlace) -> bool:
    """Whether there is such a file or object. Raises ArchiveAwayError."""
    with asking():
        return place.exists()


def has_files(folder: ArchivePlace) -> bool:
    """Whether there is such a directory, or anything below such a prefix. Raises ArchiveAwayError."""
    with asking():
        return folder.is_dir()
