"""Scopes of a change stream, and which namespaces each of them sees (semantics 2.1).

The server builds regular expressions from the scope and so do we: Python's ``$`` has the same odd habit as PCRE's (it
also matches before a final newline), so even a collection called ``"c\\n"`` is seen by the streams that see it there.
PCRE finds nothing in text that is not UTF-8: what has such a name is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tailrace.errors import UsageError

ScopeKind = Literal["collection", "database", "cluster"]

#: Collections that a database or cluster stream does not show: names that begin with "$" or "system.".
_USER_COLLECTION: Final = rb"(?!(\$|system\.))"
#: The same with showSystemEvents: three kinds of system collections become visible (6.0).
_USER_OR_SYSTEM_COLLECTION: Final = rb"(?!(\$|system\.(?!(js$|buckets\.|views$))))"
_USER_OR_SYSTEM_OR_RESHARDING: Final = rb"(?!(\$|system\.(?!(js$|resharding\.|buckets\.|views$))))"
USER_DATABASE: Final = rb"(?!(admin|config|local)\.)[^.]+\."

#: The server's limits for names. A collection's name may be as long as the server stores it; asking for a longer one
#: is no error there either.
_DATABASE_BYTES_MAX: Final = 63
_NOT_IN_DATABASE_NAMES: Final = frozenset('/\\ "')

#: Bound of each table of remembered answers; a deployment with more namespaces only asks again.
_REMEMBERED_MAX: Final = 10_000


_ENDING_OPERATIONS: Final[dict[ScopeKind, frozenset[str]]] = {
    "collection": frozenset({"drop", "rename"}),
    "database": frozenset({"dropDatabase"}),
    "cluster": frozenset(),
}


@dataclass(frozen=True, slots=True)
class Scope:
    """What a change stream watches: one collection, one database, or the whole cluster."""

    kind: ScopeKind
    database: str | None = None
    collection: str | None = None

    @classmethod
    def cluster(cls) -> Scope:
        return cls("cluster")

    @classmethod
    def of_database(cls, database: str) -> Scope:
        return cls("database", database)

    @classmethod
    def of_collection(cls, database: str, collection: str) -> Scope:
        return cls("collection", database, collection)

    @property
    def ending_operations(self) -> frozenset[str]:
        """The types of the events that end a stream of this scope: an ``invalidate`` follows them."""
        return _ENDING_OPERATIONS[self.kind]

    @classmethod
    def parse(cls, text: str | None) -> Scope:
        """``"db.coll"``, ``"db"`` or nothing (cluster). Only the first dot separates: collections may hold dots."""
        if not text:
            return cls.cluster()
        database, dot, collection = text.partition(".")
        if not database or (dot and not collection):
            raise UsageError(
                f"'{text}' is not a namespace", hint="Give a database ('shop') or a collection ('shop.orders')"
            )
        if "/" in database:  # no database of a server can have that name
            raise UsageError(f"'{text}' is not a namespace", hint=f"Write it with a dot: '{text.replace('/', '.', 1)}'")
        return cls.of_collection(database, collection) if dot else cls.of_database(database)

    def check_names(self) -> None:
        """Raises UsageError 73 where the server takes no change stream for such a name (6.0.27, message by message).

        It accepts more than its drivers do: "$x", "a$b" and "c..d" are names that never have an event.
        """
        if self.kind == "cluster":
            return
        database, collection = self.database, self.collection
        for what, name in (("database", database), ("collection", collection)):
            if name is None and what == "collection" and self.kind == "database":
                continue
            if not isinstance(name, str):
                raise UsageError(f"the name of a {what} must be a string, not {type(name).__name__}")
            if not name.isprintable() and any("\ud800" <= character <= "\udfff" for character in name):
                raise UsageError(f"the name of the {what} is not valid UTF-8", code=73)
        complaint = _complaint(database or "", collection)
        if complaint is not None:
            raise UsageError(complaint, code=73)

    @property
    def command_namespace(self) -> str:
        """The namespace that the server shows for the stream's cursor (semantics 7)."""
        if self.kind == "collection":
            return f"{self.database}.{self.collection}"
        return f"{self.database if self.kind == 'database' else 'admin'}.$cmd.aggregate"

    def __str__(self) -> str:
        if self.kind == "cluster":
            return "(cluster)"
        return self.database or "" if self.kind == "database" else f"{self.database}.{self.collection}"


def _complaint(database: str, collection: str | None) -> str | None:
    """What the server has against these names, or ``None``."""
    if "\0" in database + (collection or ""):
        return "namespaces cannot have embedded null characters"
    if "." in database:
        return f"'.' is an invalid character in the database name: {database}"
    if collection is not None and collection.startswith("."):
        return f"Collection names cannot start with '.': {collection}"
    is_database = 0 < len(database.encode()) <= _DATABASE_BYTES_MAX and _NOT_IN_DATABASE_NAMES.isdisjoint(database)
    if collection is None:
        return None if is_database else f"Invalid input namespace, {database}.$cmd.aggregate"
    if is_database and collection and collection != "$cmd.aggregate":
        return None
    return f"Invalid namespace specified '{database}.{collection}'"


def _remembering(pattern: bytes) -> Callable[[bytes], bool]:
    """A test for ``pattern`` that remembers its answers: an oplog repeats few namespaces very often."""
    match = re.compile(pattern, re.DOTALL).match
    remembered: dict[bytes, bool] = {}

    def test(text: bytes) -> bool:
        answer = remembered.get(text)
        if answer is None:
            if len(remembered) >= _REMEMBERED_MAX:
                remembered.clear()
            answer = remembered[text] = match(text) is not None and _is_utf8(text)
        return answer

    return test


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def visible_collections(*, show_system_events: bool, resharding: bool = False) -> bytes:
    """The pattern of the collections' names that a database or cluster stream shows. ``resharding``: system events take
    in what resharding writes (7.0)."""
    if not show_system_events:
        return _USER_COLLECTION
    return _USER_OR_SYSTEM_OR_RESHARDING if resharding else _USER_OR_SYSTEM_COLLECTION


class NamespaceFilter:
    """The four tests of section 2.1, each from bytes to bool.

    ``namespace``   the ``ns`` of a CRUD entry, and the values of ``o.renameCollection`` and ``o.to``
    ``collection``  a bare collection name: ``o.drop``, ``o.create``, ...
    ``command``     the ``ns`` of a command entry
    ``views``       the ``ns`` of ``system.views``; never true for a collection stream
    """

    __slots__ = ("collection", "command", "namespace", "views")

    def __init__(self, scope: Scope, *, show_system_events: bool, resharding: bool = False) -> None:
        visible = visible_collections(show_system_events=show_system_events, resharding=resharding)
        prefix = USER_DATABASE if scope.kind == "cluster" else re.escape((scope.database or "").encode()) + rb"\."
        if scope.kind == "collection":
            name = re.escape((scope.collection or "").encode()) + rb"$"
            self.namespace = _remembering(rb"^" + prefix + name)
            self.collection = _remembering(rb"^" + name)
        else:
            self.namespace = _remembering(rb"^" + prefix + visible)
            self.collection = _remembering(rb"^" + visible)
        self.command = _remembering(rb"^" + prefix + rb"\$cmd$")
        # The server leaves the dot between "system" and "views" unescaped; it then never meets another character.
        self.views = _remembering(rb"^" + prefix + rb"system.views$") if scope.kind != "collection" else _never


def _never(_: bytes) -> bool:
    return False


def split_namespace(namespace: bytes) -> tuple[bytes, bytes]:
    """Database and collection: everything after the first dot belongs to the collection."""
    database, _, collection = namespace.partition(b".")
    return database, collection
