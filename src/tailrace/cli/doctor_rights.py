"""What a user may do beyond reading the oplog, for ``tailrace doctor``. Each right is tried; nothing is written.

Reading the oplog is enough for most streams. Look-ups, copies, Spark's checkpoints and archives need more, and would
otherwise fail later, in the middle of something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bson.codec_options import CodecOptions
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.cli.finding import Finding
from tailrace.errors import SourceError
from tailrace.read.source.connection import Connection
from tailrace.read.source.failure import source_error
from tailrace.read.source.listing import INTERNAL_DATABASES, database_names
from tailrace.read.source.mongod import MongodSource

_UNAUTHORIZED: Final = 13
_NAMED_MAX: Final = 5
#: A byte of a name that is not UTF-8 becomes a surrogate.
ANY_NAME: Final[CodecOptions[dict[str, Any]]] = CodecOptions(unicode_decode_error_handler="surrogateescape")
#: How many databases are tried.
_TRIED_MAX: Final = 100
#: Nothing is there: what counts is whether the question is allowed.
_ASKED: Final = "tailrace.doctor"
_TO_COPY: Final = (
    'fullDocument "updateLookup", snapshots, tables and exact images need the role read on each database that they '
    "show; streams without them do not"
)


def look_ups(source: MongodSource) -> Finding:
    """Which databases the user may read. Raises PyMongoError or SourceError."""
    check, client = "look-ups and copies", source.client
    try:
        names, sees_all = database_names(Connection(client)), True
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        names, sees_all = _shown(client), False
    names = [name for name in names if name.isprintable()]  # no driver can ask for one that is not UTF-8
    tried = [(name, _may_find(client, name, _ASKED)) for name in names[:_TRIED_MAX]]
    may = [name for name, allowed in tried if allowed]
    may_not = [name for name, allowed in tried if not allowed]
    others = "" if sees_all else "; it is not shown the others, so copies of the whole deployment are refused"
    if not may_not:
        if sees_all and len(names) > _TRIED_MAX:
            return Finding(check, "ok", f"this user may read each of the {_TRIED_MAX} databases tried, of {len(names)}")
        if sees_all:
            return Finding(check, "ok", "this user may read every database")
        if may:
            return Finding(check, "ok", f"this user may read {_few(may)}{others}")
        return Finding(check, "warn", "this user may read no database", _TO_COPY)
    found = f"this user may not read {_few(may_not)}"
    if may:
        return Finding(check, "ok", f"this user may read {_few(may)}. {found[0].upper()}{found[1:]}", _TO_COPY)
    return Finding(check, "warn", found, _TO_COPY)


def replica_set_id(source: MongodSource) -> Finding:
    """Whether the user may read what tells replica sets of one name apart. Raises PyMongoError."""
    check = "replica set id"
    try:
        source.client.local["system.replset"].find_one({}, {"_id": 1})
    except OperationFailure as error:
        if error.code != _UNAUTHORIZED:
            raise
        failure = source_error(error, source.client)
        return Finding(check, "warn", f"{failure.message}: Spark, lakes and archives need it", failure.hint or "")
    return Finding(check, "ok", "this user may read it, as Spark, lakes and archives need")


def _shown(client: MongoClient[Any]) -> list[str]:
    """The databases that the server shows this user."""
    reply = client.admin.command("listDatabases", nameOnly=True, codec_options=ANY_NAME)
    return sorted({str(one["name"]) for one in reply["databases"]} - INTERNAL_DATABASES)


def _may_find(client: MongoClient[Any], database: str, collection: str) -> bool:
    try:
        client[database][collection].find_one({}, {"_id": 1})
    except OperationFailure as error:
        if error.code != _UNAUTHORIZED:
            raise
        return False
    return True


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_MAX])
    return shown + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
