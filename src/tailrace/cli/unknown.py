"""A remark if the collection to be watched does not exist: its stream is quiet until somebody creates it."""

from __future__ import annotations

from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.cli.output import tell
from tailrace.core.oplog.namespace import Scope
from tailrace.core.user_text import nearest
from tailrace.errors import TailraceError
from tailrace.read.source.connection import Connection
from tailrace.read.source.listing import database_names, list_collections


def tell_unknown(client: MongoClient[Any], scope: Scope) -> None:
    """Say so on standard error if there is no such collection or database now. Silent where the user may not list them,
    and where ``client`` is connected to a config server, which does not know."""
    if scope.database is None:
        return
    try:
        if client.admin.command("hello", read_preference=client.read_preference).get("configsvr"):
            return
        connection = Connection(client)
        found = [one.namespace for one in list_collections(connection, scope.database, {})]
        others = database_names(connection) if scope.collection is None and not found else []
    except (PyMongoError, TailraceError):
        return
    name = str(scope)
    if name in found or (scope.collection is None and found):
        return
    meant = nearest(name, found or others, cutoff=0.6)
    kind = "database" if scope.collection is None else "collection"
    tell(f"tailrace: no {kind} {name} exists at the moment" + (f". Did you mean {meant}?" if meant else ""))
