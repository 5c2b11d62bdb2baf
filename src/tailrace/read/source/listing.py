"""Which databases and collections there are: all of them that a driver can read, or a refusal.

A server shows a user with few rights the databases that this user may see, and does not say that there are others. A
copy of them would be a part that looks like the whole, while the stream after the copy shows changes of the rest. So a
list that may be cut is not taken (measured on 6.0.27, 5.0.4 and 4.4.2).

A server accepts names that are not UTF-8. They are text here nevertheless: each byte that is not UTF-8 is a surrogate,
as Python has it (``surrogateescape``). No driver can send such a name, so its collection cannot be read. The server's
own streams show nothing of it, so a copy of many collections leaves it out and says so (``readable``); a request that
names it is refused (``check_name``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.printable import in_a_line
from tailrace.errors import SourceError
from tailrace.read.source.connection import Connection

#: The server's own databases, of which streams over a deployment show nothing.
INTERNAL_DATABASES: Final = frozenset({"admin", "config", "local"})

#: Options of a collection may hold values that Python cannot: they stay bytes.
_CODEC: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_UNAUTHORIZED: Final = 13
_EVERYWHERE: Final = {"db": "", "collection": ""}
#: How many names that are left out are reported in one line.
_NAMED_MAX: Final = 10

_T = TypeVar("_T")
_log = logging.getLogger("tailrace.source")


class UnreadableNameError(SourceError):
    """A collection or database cannot be read, since no driver can send its name."""


@dataclass(frozen=True, slots=True)
class ListedCollection:
    """A collection, a view or a time-series collection, by ``kind``; ``uuid`` (16 bytes) is empty for views.
    ``capped``: the server removes its oldest documents where it comes to its size."""

    namespace: str
    kind: str
    uuid: bytes
    capped: bool = False


def database_names(connection: Connection) -> list[str]:
    """The names of all databases but the server's own. Raises SourceError 13 where there may be others that the user
    is not shown."""
    try:
        reply = _asked(connection, authorizedDatabases=False)
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        if not _may_find_everywhere(connection):
            raise SourceError(
                "this user may not list all databases, so a copy of all of them could be incomplete",
                code=_UNAUTHORIZED,
                hint="Grant it the action listDatabases on the cluster (the roles readAnyDatabase, clusterMonitor and "
                "backup hold it), or name the databases or collections to copy",
            ) from None
        reply = _asked(connection)
    return sorted({str(one["name"]) for one in reply["databases"]} - INTERNAL_DATABASES)


def _asked(connection: Connection, **options: Any) -> Mapping[str, Any]:
    command = {"listDatabases": 1, "nameOnly": True, **options}
    return connection.retrying(lambda: connection.client.admin.command(command, codec_options=_CODEC))


def _may_find_everywhere(connection: Connection) -> bool:
    """Whether the user may read every database, so that each is shown to it."""
    ask = partial(connection.client.admin.command, {"connectionStatus": 1, "showPrivileges": True})
    privileges = connection.retrying(ask)["authInfo"].get("authenticatedUserPrivileges", ())
    return any(one["resource"] == _EVERYWHERE and "find" in one["actions"] for one in privileges)


def list_collections(connection: Connection, database: str, query: Mapping[str, Any]) -> list[ListedCollection]:
    """What ``listCollections`` shows of a database where ``query`` matches. Raises SourceError 13, naming the least
    right, where the user may not list."""
    check_name(database)

    def read() -> list[ListedCollection]:
        command = {"listCollections": 1, "filter": dict(query)}
        with connection.raw_cursor(database, command) as cursor:
            return [_listed(database, one) for one in cursor]

    try:
        return connection.retrying(read)
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        raise SourceError(
            f"this user may not list the collections of {database}, and a copy has to know which collection it copies",
            code=_UNAUTHORIZED,
            hint=f"Grant it the role read on {database}, or the action listCollections alone, which shows no document: "
            f"{{resource: {{db: '{database}', collection: ''}}, actions: ['listCollections']}}",
        ) from None


def _listed(database: str, found: Mapping[str, Any]) -> ListedCollection:
    name, kind, uuid = found["name"], found.get("type", "collection"), found["info"].get("uuid", b"")
    capped = bool(found.get("options", {}).get("capped", False))
    return ListedCollection(f"{database}.{name}", str(kind), bytes(uuid), capped)


def is_utf8(name: str) -> bool:
    """Whether a name, as it is here, was UTF-8 on the server."""
    return name.isprintable() or not any("\ud800" <= character <= "\udfff" for character in name)


def shown_name(name: str) -> str:
    """A name for people: a byte that is not UTF-8 is shown as ``\\xff``."""
    return in_a_line(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def check_name(name: str) -> None:
    """Raise UnreadableNameError where a database or collection that is to be read has a name that is not UTF-8."""
    if is_utf8(name):
        return
    what = "collection" if "." in name else "database"
    raise UnreadableNameError(
        f"the name of the {what} '{shown_name(name)}' is not UTF-8, so no driver can read it",
        hint=f"Rename it or drop it, or name databases and collections to copy so that this {what} is left out",
    )


def readable(found: Iterable[_T], name_of: Callable[[_T], str], *, tells: bool = True) -> list[_T]:
    """Those of ``found`` that a driver can read, by their names. A warning names the others, unless it was given
    before (``tells``)."""
    given = list(found)
    kept = [one for one in given if is_utf8(name_of(one))]
    if tells and len(kept) < len(given):
        odd = [name_of(one) for one in given if not is_utf8(name_of(one))]
        more = f" and {len(odd) - _NAMED_MAX:,} more" if len(odd) > _NAMED_MAX else ""
        names = ", ".join(f"'{shown_name(name)}'" for name in odd[:_NAMED_MAX])
        _log.warning("%s%s: left out of the copy, since no driver can read a name that is not UTF-8", names, more)
    return kept
