"""Collections chosen by a list of names and patterns: ``shop.orders``, ``shop.*``, ``*.orders_20??``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tailrace.errors import UsageError
from tailrace.oplog.namespace import Scope

_WILDCARDS: Final = frozenset("*?")
#: A sign of any kind, where a query takes no option that says so; what commands and views are logged under.
_ANY: Final = r"[\s\S]"
_DEFINITIONS: Final = r"[^.]+\.(?:\$cmd|system\.views)"
_INTERNAL: Final = ("admin", "config", "local")

#: What is the server's own, also the names that it uses in passing: for ``$out``, mapReduce, conversions, renames.
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
        """Check patterns. Raises UsageError, which begins with ``where``, for one that no collection can have as its
        name, or if there are none."""
        given = tuple(dict.fromkeys(patterns))
        for pattern in given:
            _check(pattern, where)
        if not given:
            raise UsageError(f"{where}: no collection is named", hint="Give shop.orders, or shop.* for all of shop")
        return cls(given)

    def has(self, namespace: str) -> bool:
        """Whether a collection is chosen. One of the server's own never is."""
        return _SYSTEM.match(namespace) is None and self.covers(namespace)

    def covers(self, namespace: str) -> bool:
        """Whether a pattern has the name's form; ``match`` says the same of a collection that streams show."""
        return any(_matches(pattern, namespace) for pattern in self.patterns)

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
        # A star may stand for nothing, so it counts for a sign that is allowed everywhere.
        Scope.of_collection(database.replace("*", "_").replace("?", "_"), collection).check_names()
    except UsageError as error:
        raise UsageError(f"{where}: '{pattern}': {error.message}", code=error.code) from None


def _branches(field: str, database: str, collections: set[str]) -> list[dict[str, Any]]:
    """What ``field``, a namespace, must be to have one of the database's collections; tests for equality together."""
    in_database = {} if database == "*" else {f"{field}.db": _test(database)}
    if "*" in collections:
        return [in_database]
    names = sorted(name for name in collections if not _is_pattern(name))
    tests: list[Any] = [{"$in": names}] if len(names) > 1 else list(names)
    tests += [_test(name) for name in sorted(collections) if _is_pattern(name)]
    return [{**in_database, f"{field}.coll": test} for test in tests]


def _test(text: str) -> Any:
    """The condition on a name: equal to it, or of its form."""
    if not _is_pattern(text):
        return text
    if _WILDCARDS.isdisjoint(text[:-1]) and text[-1] == "*":
        return {"$regex": f"^{re.escape(text[:-1])}"}
    # \z, since $ would take a name with a line break after it for the name.
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


def _expression(pattern: str, sign: str = ".") -> str:
    """The pattern as a regular expression, with ``sign`` for one sign."""
    return "".join(f"{sign}*" if one == "*" else sign if one == "?" else re.escape(one) for one in pattern)
