"""The small JSON files of an archive: sealed with a digest of their own, which is compared when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tailrace.base.durable import parse_json, read_json, unsealed, write_sealed
from tailrace.base.object_place import ObjectPlace
from tailrace.errors import SinkError, SourceError
from tailrace.read.archive.place import ArchivePlace, asking

#: What the files hold, of an archive and of an oplog in it. One without a digest has no others.
_KEYS: Final = (
    *("format", "version", "serverVersion", "serverVersions", "replicaSet", "sharded", "since", "identity"),
    *("after", "until", "newest", "replicaSetId", "clusterId"),
)
#: An earlier version's digest.
_DIGEST: Final = "digest"
_DIGITS: Final = 16
_HINT: Final = "Restore the file from a copy of the archive"


def write_record(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document of strings, numbers and objects. Raises SinkError as ``write_sealed`` does."""
    write_sealed(path, document)


def read_record(path: ArchivePlace) -> dict[str, Any] | None:
    """The document; ``None`` where there is no such file. One without a digest is an earlier version's, and is taken as
    it is. Raises SourceError where it is not what was written."""
    try:
        found = _read(path)
        if found is None:
            return None
        said = found.pop(_DIGEST, None)
        if said is None:
            return unsealed(found, _KEYS, path)
    except SinkError as error:
        # What cannot be read at all, as by a user who may not, is not damaged.
        raise SourceError(error.message, hint=None if isinstance(error.__cause__, OSError) else _HINT) from None
    if said != _earlier_digest(found):
        raise SourceError(f"{path} is damaged: it was changed after it was written", hint=_HINT)
    return found


def _read(path: ArchivePlace) -> dict[str, object] | None:
    if not isinstance(path, ObjectPlace):
        return read_json(path)
    try:
        with asking():
            content = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse_json(content, path)


def _earlier_digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
