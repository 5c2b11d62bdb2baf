"""Which collections have tables, and the names of folders, keys and our own columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final

from tailrace.errors import UsageError
from tailrace.event import keystring
from tailrace.oplog.namespace import Scope

#: Our own columns. A field of a document with such a name gets another column name.
KEY, BSON, JSON, CHANGED = "_key", "_bson", "_json", "_changed"
OURS: Final = (KEY, BSON, JSON, CHANGED)

#: What is the server's own, also the names that it uses in passing: for ``$out``, mapReduce, conversions, renames.
_SYSTEM: Final = re.compile(
    r"(admin|config|local)\.|"
    r"[^.]+\.(system\.|\$|tmp\.(agg_out|mr)\.|tmp[0-9A-Za-z]{5}\.(convertToCapped|renameCollection))"
)
_FOLDER_MAX: Final = 200
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
#: LMDB takes keys of 511 bytes; the collection's number and its own need some of them.
_KEY_MAX: Final = 480
_HASHED: Final = 400


@dataclass(frozen=True, slots=True)
class Selection:
    """The collections that have tables, by pattern: ``shop.orders``, ``shop.*``, ``*.orders_20??``. ``*`` stands for
    any run of characters, ``?`` for one; the first dot separates the database."""

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Selection:
        """Check patterns. Raises UsageError if a pattern is not a namespace, or if there are no patterns."""
        given = tuple(patterns)
        for pattern in given:
            database, dot, collection = pattern.partition(".") if isinstance(pattern, str) else ("", "", "")
            if not (database and dot and collection):
                raise UsageError(
                    f"'{pattern}' names no collections for tables",
                    hint="Give a database and a collection: shop.orders, shop.*",
                )
        if not given:
            raise UsageError("no collections are named for tables", hint="Give shop.orders, or shop.* for all of shop")
        return cls(given)

    def has(self, namespace: str) -> bool:
        """Whether a collection has a table."""
        return _SYSTEM.match(namespace) is None and any(_matches(pattern, namespace) for pattern in self.patterns)

    @property
    def databases(self) -> tuple[str, ...] | None:
        """The databases that the patterns name; ``None`` if a database is a pattern itself."""
        found = {pattern.partition(".")[0] for pattern in self.patterns}
        return None if any(set("*?") & set(name) for name in found) else tuple(sorted(found))

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes that have to be copied at the start."""
        exact = [Scope.parse(pattern) for pattern in self.patterns if not set("*?") & set(pattern)]
        if len(exact) == len(self.patterns):
            return tuple(exact)
        names = self.databases
        return (Scope.cluster(),) if names is None else tuple(Scope.of_database(name) for name in names)


@lru_cache(4096)
def _matches(pattern: str, namespace: str) -> bool:
    given, _, rest = pattern.partition(".")
    database, _, collection = namespace.partition(".")
    return bool(_regex(given).fullmatch(database) and _regex(rest).fullmatch(collection))


@lru_cache(256)
def _regex(pattern: str) -> re.Pattern[str]:
    parts = (".*" if one == "*" else "." if one == "?" else re.escape(one) for one in pattern)
    return re.compile("".join(parts), re.DOTALL)


def folder_of(namespace: str) -> str:
    """The name of a collection's folder: its namespace, with ``~`` and two hex digits for each byte that a file system,
    a URL or Spark might interpret. These include capital letters, since some file systems ignore case. ``%`` cannot be
    used: ``deltalake`` always treats it as an escape in a path (1.6.6)."""
    text = "".join(chr(one) if chr(one) in _PLAIN else f"~{one:02x}" for one in namespace.encode("utf-8", "replace"))
    if text[0] in "._":
        text = f"~{ord(text[0]):02x}{text[1:]}"
    if len(text) <= _FOLDER_MAX:
        return text
    return f"{text[: _FOLDER_MAX - 33]}-{sha256(namespace.encode()).hexdigest()[:32]}"


def sortable_key(type_: int, value: bytes) -> bytes:
    """A value of ``_id`` as bytes that sort as the server sorts it: the server's own form of index keys. Equal numbers
    of different types have the same bytes."""
    return keystring.encode(type_, value)[0]


def state_key(key: bytes) -> bytes:
    """The state's key for a sortable key: a long one is cut and gets a hash, so that it stays unique."""
    return key if len(key) <= _KEY_MAX else key[:_HASHED] + b"#" + sha256(key).digest()
