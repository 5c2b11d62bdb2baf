"""The feature compatibility version that a deployment is set to. The server goes by it while it reads, so it decides
what older entries give, too, and an open stream follows it.

It is asked for, and not read from the oplog: the oplog says when it was set, which may be years ago, and the query of a
stream of one collection does not pass that entry. Looking for it in each reply would cost a tenth of what the kernel
needs for one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.core.oplog.compatibility import SETTING
from tailrace.core.plan.profile import with_compatibility
from tailrace.read.source.connection import Connection
from tailrace.read.source.failure import is_transient

#: After how many seconds an open stream asks again: that long, at most, it may give events of the earlier setting.
ASK_AGAIN_S: Final = 5.0
_SETTING: Final = SETTING.decode()


def compatibility_of(client: MongoClient[Any]) -> str | None:
    """What the members are set to that ``client`` reads from, such as "5.0"; while it changes, the lower one. ``None``
    where the user may not ask: that takes the privilege ``getParameter`` on the cluster (clusterMonitor has it), or
    ``find`` on ``admin.system.version``. Raises PyMongoError."""
    for ask in (_parameter, _document):
        try:
            found = ask(client)
        except OperationFailure as error:
            if is_transient(error):
                raise
            continue
        version = (found or {}).get("version")
        if isinstance(version, str):
            return version
    return None


def _parameter(client: MongoClient[Any]) -> Mapping[str, Any] | None:
    asked = {"getParameter": 1, _SETTING: 1}
    reply: Mapping[str, Any] = client.admin.command(asked, read_preference=client.read_preference)[_SETTING]
    return reply


def _document(client: MongoClient[Any]) -> Mapping[str, Any] | None:
    admin = client.get_database("admin", read_preference=client.read_preference)
    return admin["system.version"].find_one({"_id": _SETTING})


def server_version(connection: Connection) -> str:
    """The version of the server, "6.0.27"; with its feature compatibility version where that is a lower one,
    "6.0.27-fcv5.0". A user who may not ask for that is given the version alone."""
    client = connection.client
    version = str(connection.retrying(client.server_info)["version"])
    return with_compatibility(version, connection.retrying(partial(compatibility_of, client)))


class Compatibility:
    """What one reader knows of it: asked again as often as is due. A user who may not ask is not asked for again."""

    def __init__(self, client: MongoClient[Any]) -> None:
        self._client = client
        self._said: str | None = None
        self._asked_s: float | None = None
        self._may_ask = True

    @property
    def is_due(self) -> bool:
        """Whether what is known is too old."""
        return self._may_ask and (self._asked_s is None or time.monotonic() - self._asked_s >= ASK_AGAIN_S)

    def known(self) -> str | None:
        """What is known, asked for where that is due. ``None``: the user may not ask. Raises PyMongoError."""
        if self.is_due:
            asked_s = time.monotonic()
            self._said = compatibility_of(self._client)
            self._asked_s, self._may_ask = asked_s, self._said is not None
        return self._said
