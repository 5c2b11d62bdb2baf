"""Commands to the members of a sharded cluster, all with one cluster clock."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote_plus

import pymongo
from bson.timestamp import Timestamp
from pymongo.errors import AutoReconnect, OperationFailure, PyMongoError, WriteError

from tailrace.embedded.replica_set import ReplicaSet

#: The config server's name among the members; no shard can have it (the server reserves it).
CONFIG: Final = "config"
MAJORITY: Final[Mapping[str, object]] = {"w": "majority", "wtimeout": 60_000}
#: A primary that is going or gone, as a reply says it (the codes that drivers retry on).
_GONE = frozenset({6, 7, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436})
#: The sender's routing table is out of date, or a range's ownership is changing hands at this moment.
_SHARD_NOT_FOUND: Final = 70
STALE: Final = frozenset({63, 150, 249, 13388, _SHARD_NOT_FOUND})
_STEP_S = 0.03
#: How long a client that is closed may look for the primary of a former shard.
_FAREWELL_S = 1.0
_T = TypeVar("_T")


class Clock:
    """The largest cluster time that any member reported, as the whole (signed) document: what a mongos passes on.

    A member's own clock moves only when it writes or when a command brings a larger time.
    """

    def __init__(self) -> None:
        self._document: Mapping[str, Any] | None = None
        self._lock = threading.Lock()

    @property
    def document(self) -> Mapping[str, Any] | None:
        """``$clusterTime`` for the next command; ``None`` before the first reply."""
        return self._document

    @property
    def now(self) -> Timestamp:
        """The largest cluster time seen."""
        return Timestamp(0, 0) if self._document is None else self._document["clusterTime"]

    def learn(self, reply: Mapping[str, Any]) -> None:
        """Adopt the time that a reply carries, if it is later."""
        told = reply.get("$clusterTime")
        if told is None:
            return
        with self._lock:
            if self._document is None or told["clusterTime"] > self._document["clusterTime"]:
                self._document = told


class Command(OrderedDict[str, Any]):
    """A command whose fields stay as they were set first: PyMongo adds its own session and cluster time to what it
    sends, and a router has to use one session on many shards. (An OrderedDict, since PyMongo makes a copy of other
    mappings, and what it writes into the copy would count.)"""

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            super().__setitem__(name, value)


class Connections:
    """One client for each replica set, and the clock that they share. Safe for threads."""

    def __init__(self, replica_sets: Callable[[], Mapping[str, ReplicaSet]], *, key: str | None = None) -> None:
        """``replica_sets`` gives the shards and ``config`` by name, at any time. ``key`` is the content of the key file
        where the servers ask for authentication: commands among members need the members' own user."""
        self.clock = Clock()
        self._replica_sets = replica_sets
        self._key = key
        self._clients: dict[str, pymongo.MongoClient[dict[str, Any]]] = {}
        self._forgotten: list[pymongo.MongoClient[dict[str, Any]]] = []
        self._lock = threading.Lock()

    def client(self, member: str) -> pymongo.MongoClient[dict[str, Any]]:
        """The client for a shard or for ``config``; it finds the primary on its own."""
        with self._lock:
            if member not in self._clients:
                replica_set = self._replica_sets().get(member)
                if replica_set is None:
                    raise OperationFailure(f"Shard {member} not found", _SHARD_NOT_FOUND)
                hosts = ",".join(one.host for one in replica_set.members)
                user = "" if self._key is None else f"__system:{quote_plus(self._key)}@"
                source = "" if self._key is None else "&authSource=local"
                self._clients[member] = pymongo.MongoClient(
                    f"mongodb://{user}{hosts}/?replicaSet={replica_set.name}{source}",
                    serverSelectionTimeoutMS=30_000,
                    retryReads=False,  # what may be sent again is decided here: to PyMongo every command is a read
                    appname="tailrace.embedded.router",
                )
            return self._clients[member]

    def run(self, member: str, database: str, command: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command to the primary of a shard or of ``config``.

        Raises PyMongo's OperationFailure with the server's reply, WriteError for the first of its ``writeErrors``,
        AutoReconnect where the primary is gone.
        """
        message = Command(command)
        if self.clock.document is not None:
            message["$clusterTime"] = self.clock.document
        try:
            reply: dict[str, Any] = self.client(member)[database].command(message)
        except OperationFailure as error:
            self.clock.learn(error.details or {})
            raise
        self.clock.learn(reply)
        for failed in reply.get("writeErrors", ()):
            raise WriteError(failed.get("errmsg", ""), failed.get("code"), {**failed, "reply": reply})
        if "writeConcernError" in reply:
            failed = reply["writeConcernError"]
            raise OperationFailure(failed.get("errmsg", ""), failed.get("code"), reply)
        return reply

    def run_again(self, member: str, database: str, command: Mapping[str, Any], *, timeout_s: float = 300.0) -> Any:
        """``run``, repeated while the primary is gone. Only for what may be done twice."""
        return again(lambda: self.run(member, database, command), timeout_s=timeout_s)

    def find(self, member: str, namespace: str, query: Mapping[str, Any], **fields: Any) -> list[dict[str, Any]]:
        """Majority-committed documents of a collection on one member, up to 100,000 in one batch."""
        database, _, collection = namespace.partition(".")
        command = {"find": collection, "filter": query, "batchSize": 100_000, "singleBatch": True, **fields}
        command.setdefault("readConcern", {"level": "majority"})
        found: list[dict[str, Any]] = self.run_again(member, database, command)["cursor"]["firstBatch"]
        return found

    def forget(self, member: str) -> None:
        """Stop using the client of a former member: another member may come under its name. Commands under way on it
        are left alone."""
        with self._lock:
            client = self._clients.pop(member, None)
            if client is not None:
                self._forgotten.append(client)

    def close(self) -> None:
        """Close every client."""
        with self._lock:
            while self._clients:
                self._clients.popitem()[1].close()
            while self._forgotten:
                # A former shard may be shut down, and PyMongo would look for its primary for 30 s to end its sessions.
                with pymongo.timeout(_FAREWELL_S):
                    self._forgotten.pop().close()


def is_gone(error: PyMongoError) -> bool:
    """Whether the primary is going or gone, so that the same command may succeed a little later."""
    if isinstance(error, OperationFailure):
        return error.code in _GONE
    return isinstance(error, AutoReconnect)


def again(action: Callable[[], _T], *, timeout_s: float) -> _T:
    """Repeat ``action`` while the primary that it needs is gone, for ``timeout_s`` seconds at most."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return action()
        except PyMongoError as error:
            if not is_gone(error) or time.monotonic() > deadline:
                raise
        time.sleep(_STEP_S)
