"""Replica sets that one test hands on to the next, empty.

A mongod takes 0.7 s of processor to start and to become a primary, and most tests that ask for a replica set of their
own want no more than that nobody else writes to it. Of earlier tests, only the oplog and the clock stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pymongo
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded import ReplicaSet, find_mongod

#: As many wait for the next test. A test has two as a rule, and a file two or three versions.
_WAITING_MAX: Final = 4
_OPLOG_BYTES_MAX: Final = 64 << 20
_OF_THE_SERVER: Final = ("admin", "config", "local")


class Lender:
    """The sets of one member that wait for a test. A set is taken back if it is as it was lent: the same process and
    term, the same parameters, and the same collections of its own. Otherwise it is closed."""

    def __init__(self) -> None:
        self._waiting: list[ReplicaSet] = []

    @contextmanager
    def lent(self, version: str | None = None) -> Iterator[ReplicaSet]:
        path = find_mongod(version).path
        running = next((one for one in self._waiting if one.binary.path == path), None)
        if running is None:
            running = ReplicaSet(1, version=version)
            running.__enter__()
        else:
            self._waiting.remove(running)
        try:
            before = _of_its_own(running)
            yield running
            if before is not None and _emptied(running) and _of_its_own(running) == before:
                self._waiting.append(running)
        finally:
            if running not in self._waiting:
                running.close()
            elif len(self._waiting) > _WAITING_MAX:
                self._waiting.pop(0).close()

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop().close()


def has_long_oplog(running: ReplicaSet, entries_max: int = 10_000) -> bool:
    """Whether a new deployment is better than handing this one on: a reader that begins at the oldest change, such as a
    listener without a position, reads everything that earlier tests have written. In a run of all tests that was a
    second of processor for each of hundreds of listeners, and a new server takes half a second."""
    with _client(running) as client:
        oplog = client.local.command("collStats", "oplog.rs")
    return bool(oplog["count"] > entries_max or oplog["size"] > _OPLOG_BYTES_MAX)


def _client(running: ReplicaSet) -> pymongo.MongoClient[dict[str, Any]]:
    return pymongo.MongoClient(running.members[0].uri, serverSelectionTimeoutMS=2_000, socketTimeoutMS=60_000)


def _emptied(running: ReplicaSet) -> bool:
    """Drop what tests made, unless they have stopped the server."""
    if not running.members[0].is_running:
        return False
    with suppress(PyMongoError), _client(running) as client:
        with suppress(OperationFailure):  # before 6.0 there is nothing of the kind
            client.admin.command("setUserWriteBlockMode", 1, **{"global": False})
        client.admin.command("killAllSessions", [])  # transactions, and cursors of clients that are not closed
        for name in client.list_database_names():
            if name not in _OF_THE_SERVER:
                client.drop_database(name)
        for name in client.admin.list_collection_names():
            if not name.startswith("system."):
                client.admin.drop_collection(name)
        client.admin.command("dropAllUsersFromDatabase")
        client.admin.command("dropAllRolesFromDatabase")
        return True
    return False


def _of_its_own(running: ReplicaSet) -> Any:
    """What emptying does not restore. ``None`` for a server that does not answer, which is not as it was."""
    with suppress(PyMongoError), _client(running) as client:
        term = client.admin.command("replSetGetStatus")["term"]
        parameters = client.admin.command({"getParameter": "*"})
        for time in ("ok", "$clusterTime", "operationTime"):
            parameters.pop(time, None)
        size = client.local.command("collStats", "oplog.rs")["maxSize"]
        names = {name for name in client.local.list_collection_names() if name != "system.healthlog"}
        return running.members[0].pid, term, parameters, size, names
    return None
