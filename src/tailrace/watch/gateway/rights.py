"""What a client may watch, according to the server on the client's own connection. No I/O.

The server's rule (6.0): a change stream needs the actions ``find`` and ``changeStream`` on what is watched: the
collection; the database; or, for the whole cluster, every ordinary collection. A privilege on more covers less, and
the two actions may come from two privileges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tailrace.core.oplog.namespace import Scope

_ACTIONS: Final = frozenset(("find", "changeStream"))

#: A privilege on every database does not cover these.
_NOT_NORMAL: Final = ("local", "config")

#: A user: name and database.
User = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is logged in on a connection.

    ``users``       those who have authenticated on it; empty if nobody has
    ``privileges``  resource and actions of each, as ``connectionStatus`` gives them
    ``may_all``     the server checks no rights
    """

    users: frozenset[User]
    privileges: tuple[tuple[Mapping[str, Any], frozenset[str]], ...] = ()
    may_all: bool = False

    @classmethod
    def of_status(cls, reply: Mapping[str, Any], *, may_all: bool = False) -> Identity:
        """From a reply to ``{connectionStatus: 1, showPrivileges: true}``."""
        info = reply.get("authInfo") or {}
        users = frozenset((str(user["user"]), str(user["db"])) for user in info.get("authenticatedUsers") or ())
        privileges = tuple(
            (dict(each["resource"]), frozenset(map(str, each["actions"])))
            for each in info.get("authenticatedUserPrivileges") or ()
        )
        return cls(users, privileges, may_all)

    def may_watch(self, scope: Scope) -> bool:
        """Whether the server would open a stream of this scope."""
        if self.may_all:
            return True
        granted: set[str] = set()
        for resource, actions in self.privileges:
            if _covers(resource, scope):
                granted |= actions & _ACTIONS
        return granted == _ACTIONS

    def may_kill_any_cursor(self, scope: Scope) -> bool:
        """Whether cursors of other users on what ``scope`` names may be killed: by a privilege on the cluster, or on
        the namespace of the cursor (a database's is a collection's too)."""
        return self.may_all or any(
            "killAnyCursor" in actions and (resource.get("cluster") is True or _covers(resource, scope))
            for resource, actions in self.privileges
        )

    @property
    def may_kill_operations(self) -> bool:
        """Whether operations of other users may be killed."""
        return self.may_all or any(
            "killop" in actions and bool(resource.get("cluster") or resource.get("anyResource"))
            for resource, actions in self.privileges
        )


def _covers(resource: Mapping[str, Any], scope: Scope) -> bool:
    if resource.get("anyResource") is True:
        return True
    database, collection = resource.get("db"), resource.get("collection")
    if not isinstance(database, str) or not isinstance(collection, str) or len(resource) != 2:
        return False  # of the cluster, or of a kind that is not known here
    if scope.kind == "cluster":
        return database == collection == ""
    if database != scope.database and (database or scope.database in _NOT_NORMAL):
        return False
    if scope.collection is None or scope.collection.startswith("system."):
        # Such a collection is covered by no more than its own name.
        return collection == (scope.collection or "") and (bool(collection) or scope.collection is None)
    return collection in ("", scope.collection)
