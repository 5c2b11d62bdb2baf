"""Whether the target's user may do what a sync does there, by ``connectionStatus``: nothing is tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tailrace.errors import SourceError

#: What a sync does in each database that it fills, and in its own.
_IN_DATABASES: Final = (
    "find",
    "insert",
    "update",
    "remove",
    "createCollection",
    "createIndex",
    "collMod",
    "dropCollection",
    "dropIndex",
    "listCollections",
    "listIndexes",
    "bypassDocumentValidation",
)
_OF_STATE: Final = ("find", "insert", "update", "remove", "createCollection", "createIndex")
#: What ``applyOps`` with UUIDs takes.
_BY_UUID: Final = ("applyOps", "forceUUID", "useUUID")
#: What a verification takes, by the side whose user lacks it.
NOT_BY_UUID: Final = "the {}'s user may not name collections by their UUIDs, which a verification does"
GRANT_BY_UUID: Final = "Grant it the action useUUID on the cluster (clusterMonitor, backup and restore hold it)"
SOURCE: Final = "source"
TARGET: Final = "target"
_UNAUTHORIZED: Final = 13
_HINT: Final = "Grant the target's user the roles readWriteAnyDatabase, dbAdminAnyDatabase and restore"


@dataclass(frozen=True, slots=True)
class Rights:
    """What is missing. ``keeps_uuids``: whether collections can keep the source's UUIDs."""

    refusals: Sequence[str] = ()
    warnings: Sequence[str] = ()
    keeps_uuids: bool = True


def missing_rights(target: MongoClient[Any], state_db: str, databases: Sequence[str] | None) -> Rights:
    """What the user may not do in ``databases`` (``None``: any) and in that of the state. Raises PyMongoError."""
    status = target.admin.command({"connectionStatus": 1, "showPrivileges": True})["authInfo"]
    if not status.get("authenticatedUsers"):
        return Rights()  # without access control; where there is one, the first command says so
    privileges = status.get("authenticatedUserPrivileges", ())
    refusals = []
    for database in ("",) if databases is None else databases:
        lacking = [one for one in _IN_DATABASES if not _may(privileges, database, one)]
        if lacking:
            where = f"the database {database}" if database else "every database"
            refusals.append(f"the target's user may not {', '.join(lacking)} in {where} of the target. {_HINT}")
    lacking = [one for one in _OF_STATE if not _may(privileges, state_db, one)]
    if lacking:
        refusals.append(
            f"the target's user may not {', '.join(lacking)} in the sync's own database {state_db}. "
            f"Grant it readWrite on {state_db}"
        )
    keeps = all(_may_on_cluster(privileges, one) for one in _BY_UUID)
    warnings = (
        ()
        if keeps
        else (
            "the target's user may not use applyOps with UUIDs: collections get new UUIDs, and capped collections "
            "cannot be copied. The role restore, with the actions applyOps, forceUUID and useUUID, allows it",
        )
    )
    return Rights(refusals, warnings, keeps)


def unreadable(client: MongoClient[Any], namespaces: Iterable[str]) -> list[str]:
    """The collections whose documents a user may not read, by ``connectionStatus``. Raises PyMongoError."""
    status = client.admin.command({"connectionStatus": 1, "showPrivileges": True})["authInfo"]
    if not status.get("authenticatedUsers"):
        return []
    privileges = status.get("authenticatedUserPrivileges", ())
    readable = [one["resource"] for one in privileges if "find" in one["actions"]]
    return [one for one in namespaces if not any(_covers(resource, one) for resource in readable)]


def _covers(resource: Mapping[str, Any], namespace: str) -> bool:
    """Whether a privilege's resource holds a collection that is none of the server's own."""
    database, _, name = namespace.partition(".")
    if resource.get("anyResource"):
        return True
    return resource.get("db") in ("", database) and resource.get("collection") in ("", name)


def may_read_by_uuid(client: MongoClient[Any]) -> bool:
    """Whether a user may name collections by their UUIDs, as a verification does. Raises PyMongoError."""
    status = client.admin.command({"connectionStatus": 1, "showPrivileges": True})["authInfo"]
    return not status.get("authenticatedUsers") or _may_on_cluster(
        status.get("authenticatedUserPrivileges", ()), "useUUID"
    )


@contextmanager
def at_side(side: str, client: MongoClient[Any] | None = None) -> Iterator[None]:
    """Let the error of a user who lacks a right say on which side that is: both may be replica sets of one name.

    ``client``: of that side, where collections are named by their UUIDs. The server does not say whether that is what
    the user may not do.
    """
    try:
        yield
    except SourceError as error:
        if error.code != _UNAUTHORIZED:
            raise
        message, hint = error.message.replace("this user", f"the {side}'s user", 1), error.hint
        with suppress(PyMongoError):
            if client is not None and not may_read_by_uuid(client):
                message, hint = NOT_BY_UUID.format(side), GRANT_BY_UUID
        raise SourceError(message, code=error.code, hint=hint) from None


def _may(privileges: Iterable[Mapping[str, Any]], database: str, action: str) -> bool:
    """Whether an action is allowed on every collection of a database; ``""``: of every database."""
    for one in privileges:
        resource = one["resource"]
        whole = resource.get("anyResource") or (
            resource.get("collection") == "" and resource.get("db") in ("", database)
        )
        if whole and action in one["actions"]:
            return True
    return False


def _may_on_cluster(privileges: Iterable[Mapping[str, Any]], action: str) -> bool:
    return any(
        (one["resource"].get("cluster") or one["resource"].get("anyResource")) and action in one["actions"]
        for one in privileges
    )
