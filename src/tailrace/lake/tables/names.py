"""Names of folders, keys and our own columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from tailrace.base.object_place import ObjectPlace
from tailrace.lake.store.place import P

#: Our own columns. A field of a document with such a name gets another column name.
KEY, BSON, JSON, CHANGED = "_key", "_bson", "_json", "_changed"
#: The columns that a change feed has besides the table's. Delta reserves their names.
CHANGE_TYPE: Final = "_change_type"
OF_FEED: Final = (CHANGE_TYPE, "_commit_version", "_commit_timestamp")
OURS: Final = (KEY, BSON, JSON, CHANGED, *OF_FEED)

#: What begins tables anew, at the end of a sentence.
BEGIN_ANEW: Final = "give another directory, or remove this one: then the next run copies the collections"

_FOLDER_MAX: Final = 200
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
#: LMDB takes keys of 511 bytes; the collection's number and its own need some of them.
_KEY_MAX: Final = 480
_HASHED: Final = 400
_ODD: Final = re.compile(r"[\s,;{}()=.`\x00-\x1f\"]")


def place_of(root: P, namespace: str) -> P:
    """Where the table of a collection is in ``root``."""
    return root / folder_of(namespace, "!" if isinstance(root, ObjectPlace) else "~")


def folder_of(namespace: str, escape: str = "~") -> str:
    """The name of a collection's folder: its namespace, with ``~`` and two hex digits for each byte that a file system,
    a URL or Spark might interpret. These include capital letters, since some file systems ignore case. ``%`` cannot be
    used: ``deltalake`` always treats it as an escape in a path (1.6.6). In an object store it does not find the newest
    checkpoint where there is a ``~``, so ``escape`` is ``!`` there, which S3 counts as safe."""
    text = "".join(
        chr(one) if chr(one) in _PLAIN else f"{escape}{one:02x}" for one in namespace.encode("utf-8", "replace")
    )
    if text[0] in "._":
        text = f"{escape}{ord(text[0]):02x}{text[1:]}"
    if len(text) <= _FOLDER_MAX:
        return text
    return f"{text[: _FOLDER_MAX - 33]}-{sha256(namespace.encode()).hexdigest()[:32]}"


def state_key(key: bytes) -> bytes:
    """The state's key for a sortable key: a long one is cut and gets a hash, so that it stays unique."""
    return key if len(key) <= _KEY_MAX else key[:_HASHED] + b"#" + sha256(key).digest()


def free_name(wanted: str, taken: Sequence[str], ours: Sequence[str] = OURS) -> str:
    """A column's name for a field: characters that Delta's readers refuse become ``_``; if another column has the name,
    or one that differs only in case, or it is one of ``ours``, a number is added."""
    name = _ODD.sub("_", wanted) or "_"
    used = {one.lower() for one in (*ours, *taken)}
    number, found = 2, name
    while found.lower() in used:
        found, number = f"{name}_{number}", number + 1
    return found
