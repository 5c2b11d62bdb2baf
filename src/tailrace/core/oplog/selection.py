"""Collections chosen by a list of names and patterns: ``shop.orders``, ``shop.*``, ``*.orders_20??``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tailrace.core.oplog.namespace import Scope
from tailrace.errors import UsageError

_WILDCARDS: Final = frozenset("*?")
#: Any character, line breaks included, for a query that takes no option for this.
_ANY: Final = r"[\s\S]"
#: The namespaces under which commands and definitions of views are logged.
_DEFINITIONS: Final = r"[^.]+\.(?:\$cmd|system\.views)"
_INTERNAL: Final = ("admin", "config", "local")

#: The server's own collections, also its temporary ones: for ``$out``, mapReduce, conversions, renames.
_SYSTEM: Final = re.compile(
    r"(admin|config|local)\.|"
    r"[^.]+\.(system\.|\$|tmp\.(agg_out|mr)\.|tmp[0-9A-Za-z]{5}\.(convertToCapped|renameCollection))"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen collections. In a pattern ``*`` stands for any run of characters, ``?`` for one; the first dot
    separates the database."""

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str], where: str = "collections") -> Selection:
        """Check patterns. Raises UsageError, whose message begins with ``where``, for a pattern that no collection's
        name can match, or if there are no patterns."""
        given = tuple(dict.fromkeys(patterns))
        for pattern in given:
            _check(pattern, where)
        if not given:
            raise UsageError(f"{where}: no collection is named", hint="Give shop.orders, or shop.* for all of shop")
        return cls(given)

    def has(self, namespace: str) -> bool:
        """Whether a collection is chosen. The server's own collections never are."""
        return _SYSTEM.match(namespace) is None and self.covers(namespace)

    def covers(self, namespace: str) -> bool:
        """Whether a pattern matches the name. For a collection whose events streams show, ``match`` says the same."""
        return any(_matches(pattern, namespace) for pattern in self.patterns)

    def may_cover(self, database: str) -> bool:
        """Whether a pattern names the database, so that some collection of it may be chosen."""
        return any(_regex(pattern.partition(".")[0]).fullmatch(database) for pattern in self.patterns)

    @property
    def databases(self) -> tuple[str, ...] | None:
        """The databases that the patterns name; ``None`` if a database is a pattern itself."""
        found = {pattern.partition(".")[0] for pattern in self.patterns}
        return None if any(map(_is_pattern, found)) else tuple(sorted(found))

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes that the chosen collections are found in."""
        if not any(map(_is_pattern, self.patterns)):
            return tuple(map(Scope.parse, self.patterns))
        names = self.databases
        return (Scope.cluster(),) if names is None else tuple(map(Scope.of_database, names))

    @property
    def match(self) -> dict[str, Any] | None:
        """The ``$match`` of the stream over the whole cluster that has the events of the chosen collections: those
        whose ``ns`` is one of them, renames whose ``to`` is one, and ``dropDatabase`` of a database that is chosen as a
        whole (``shop.*``). ``None`` if everything is chosen."""
        whole: dict[str, set[str]] = {}
        for pattern in self.patterns:
            database, _, collection = pattern.partition(".")
            whole.setdefault(database, set()).add(collection)
        if "*" in whole.get("*", ()):
            return None
        branches = []
        for field in ("ns", "to"):
            for database, collections in whole.items():
                branches += _branches(field, database, collections)
        return {"$or": branches}

    @property
    def expression(self) -> str:
        """A regular expression for the ``ns`` of every oplog entry that could give one of these collections' events,
        transactions aside: the names, and what commands and definitions of views are logged under."""
        names = (pattern.partition(".")[::2] for pattern in self.patterns)
        chosen = [f"{_expression(database, '[^.]')}\\.{_expression(name, _ANY)}" for database, name in names]
        return f"^(?!(admin|config|local)\\.)(?:{'|'.join([*chosen, _DEFINITIONS])})$"


def _check(pattern: str, where: str) -> None:
    database, dot, collection = pattern.partition(".") if isinstance(pattern, str) else ("", "", "")
    if not (database and dot and collection):
        raise UsageError(
            f"{where}: '{pattern}' names no collections",
            hint="Give a database and a collection: shop.orders, shop.*",
        )
    if database in _INTERNAL:
        raise UsageError(f"{where}: '{pattern}' is in the server's own database {database}", code=73)
    if collection.startswith(("system.", "$")):
        raise UsageError(f"{where}: '{pattern}' is a system collection", code=73)
    try:
        # A star may stand for nothing, so it is replaced by a character that is allowed everywhere.
        Scope.of_collection(database.replace("*", "_").replace("?", "_"), collection).check_names()
    except UsageError as error:
        raise UsageError(f"{where}: '{pattern}': {error.message}", code=error.code) from None


def _branches(field: str, database: str, collections: set[str]) -> list[dict[str, Any]]:
    """The conditions under which ``field``, a namespace, is one of the database's collections; names share one."""
    in_database = {} if database == "*" else {f"{field}.db": _test(database)}
    if "*" in collections:
        return [in_database]
    names = sorted(name for name in collections if not _is_pattern(name))
    tests: list[Any] = [{"$in": names}] if len(names) > 1 else list(names)
    tests += [_test(name) for name in sorted(collections) if _is_pattern(name)]
    return [{**in_database, f"{field}.coll": test} for test in tests]


def _test(text: str) -> Any:
    """The condition on a name: that it equals ``text``, or matches it."""
    if not _is_pattern(text):
        return text
    if _WILDCARDS.isdisjoint(text[:-1]) and text[-1] == "*":
        return {"$regex": f"^{re.escape(text[:-1])}"}
    # \z, because $ also matches before a line break at the end.
    return {"$regex": f"^{_expression(text)}\\z", "$options": "s"}


def _is_pattern(text: str) -> bool:
    return not _WILDCARDS.isdisjoint(text)


@lru_cache(4096)
def _matches(pattern: str, namespace: str) -> bool:
    given, _, rest = pattern.partition(".")
    database, _, collection = namespace.partition(".")
    return bool(_regex(given).fullmatch(database) and _regex(rest).fullmatch(collection))


@lru_cache(256)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(_expression(pattern), re.DOTALL)


def _expression(pattern: str, any_: str = ".") -> str:
    """The pattern as a regular expression. ``any_`` is the expression for any one character."""
    return "".join(f"{any_}*" if one == "*" else any_ if one == "?" else re.escape(one) for one in pattern)
