"""A small router in place of a mongos, of which there is no wheel: versioned reads and writes on a sharded cluster."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, TypeVar

from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo.errors import OperationFailure, WriteError

from tailrace.embedded.sharding.catalog import Table
from tailrace.embedded.sharding.connections import CONFIG, MAJORITY, STALE, Connections
from tailrace.embedded.sharding.definitions import Definitions
from tailrace.embedded.sharding.dialect import Dialect
from tailrace.embedded.sharding.transaction import Transaction, Written, run_until_committed
from tailrace.errors import UsageError

_STEP_S = 0.02
_T = TypeVar("_T")


def _new_session() -> dict[str, Any]:
    return {"id": Binary(uuid.uuid4().bytes, 4)}


class _Session(threading.local):
    """A thread's own session, with which its writes are retryable."""

    def __init__(self) -> None:
        self.id = _new_session()
        self.number = 0

    def next(self) -> int:
        self.number += 1
        return self.number


class Router(Definitions):
    """Reads and writes, routed by the shard key to the shard that owns it, with the version of the routing table as a
    mongos sends it: a shard that has given the range away, or is about to, refuses, and the write goes to the new
    owner. Writes are retryable: one that was cut off by a member's death is done once. They are acknowledged by a
    majority. Every command carries the largest cluster time that any member reported.

    Safe for threads. A filter must name the whole shard key. Errors of the server are PyMongo's OperationFailure and
    WriteError; if no primary returns within ``patience_s`` seconds, PyMongo's AutoReconnect is raised.
    """

    def __init__(self, connections: Connections, dialect: Dialect, *, patience_s: float = 300.0) -> None:
        super().__init__(connections, dialect)
        self.patience_s = patience_s
        self._session = _Session()

    # --- reads and writes ---

    def insert_one(
        self, namespace: str, document: Mapping[str, Any], *, transaction: Transaction | None = None
    ) -> Written:
        """Insert one document."""
        return self._write(namespace, document, "insert", {"documents": [document]}, transaction)

    def insert_many(self, namespace: str, documents: Iterable[Mapping[str, Any]]) -> int:
        """Insert documents in order, in one command for each run of them that goes to one shard. Returns how many."""
        waiting = list(documents)
        number = self._session.next()
        done = 0
        while done < len(waiting):
            table = self.catalog.table(namespace)
            shard, run = next(groupby(waiting[done:], key=table.owner))
            batch = list(run)
            fields = {"documents": batch, "stmtIds": list(range(done, done + len(batch)))}
            try:
                self._send(table, shard, "insert", fields, number=number)
                done += len(batch)
            except WriteError as error:
                if error.code not in STALE:
                    raise
                done += (error.details or {})["index"]
                self._read_anew(namespace)
            except OperationFailure as error:
                if error.code not in STALE:
                    raise
                self._read_anew(namespace)
        return done

    def update_one(
        self,
        namespace: str,
        query: Mapping[str, Any],
        update: Any,
        *,
        upsert: bool = False,
        transaction: Transaction | None = None,
    ) -> Written:
        """Update one document: operators or a pipeline."""
        statement = {"q": query, "u": update, "upsert": upsert}
        return self._write(namespace, query, "update", {"updates": [statement]}, transaction)

    def replace_one(
        self,
        namespace: str,
        query: Mapping[str, Any],
        document: Mapping[str, Any],
        *,
        upsert: bool = False,
        transaction: Transaction | None = None,
    ) -> Written:
        """Replace one document."""
        return self.update_one(namespace, query, document, upsert=upsert, transaction=transaction)

    def delete_one(
        self, namespace: str, query: Mapping[str, Any], *, transaction: Transaction | None = None
    ) -> Written:
        """Delete one document."""
        return self._write(namespace, query, "delete", {"deletes": [{"q": query, "limit": 1}]}, transaction)

    def find_one(
        self, namespace: str, query: Mapping[str, Any], *, transaction: Transaction | None = None
    ) -> dict[str, Any] | None:
        """The document, read on the shard that owns it, or ``None``."""
        fields = {"filter": query, "limit": 1, "singleBatch": True}
        reply = self._write(namespace, query, "find", fields, transaction).reply
        return next(iter(reply["cursor"]["firstBatch"]), None)

    def find(self, namespace: str, query: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Documents of the whole collection, from every shard that owns a part of it, in no order; majority-committed,
        up to 100,000 a shard."""

        def read() -> list[dict[str, Any]]:
            table = self.catalog.table(namespace)
            found = []
            for shard in table.owners:
                found += self.connections.find(shard, namespace, query or {}, **self.versions(table, shard))
            return found

        return self._while_stale(namespace, read)

    def transaction(self) -> Transaction:
        """A new transaction, in a session of its own."""
        return Transaction(self, _new_session(), 1)

    def run_transaction(self, body: Callable[[Transaction], None]) -> Transaction:
        """Run ``body`` in a transaction, again and again while the server calls its failure transient."""
        return run_until_committed(self.transaction, body)

    # --- what tests want to see ---

    def table(self, namespace: str) -> Table:
        """The routing table, read again."""
        return self.catalog.reload(namespace)

    def owner(self, namespace: str, document: Mapping[str, Any]) -> str:
        """The shard that owns a document now."""
        return self.table(namespace).owner(document)

    def fence(self) -> Timestamp:
        """Write a no-op to the oplog of every shard and of the config server, beyond one common cluster time, and
        return that time: everything before it is in the oplogs, on a majority. (Nothing else here does that: idle
        shards are idle.)"""
        shards = [found["_id"] for found in self.connections.find(CONFIG, "config.shards", {})]
        for member in (CONFIG, *shards):
            self.connections.run_again(member, "admin", {"ping": 1})
        now = self.connections.clock.now
        for member in (CONFIG, *shards):
            note = {"appendOplogNote": 1, "data": {"msg": "fence"}, "writeConcern": MAJORITY}
            self.connections.run_again(member, "admin", note)
        return now

    # --- inside ---

    def _write(
        self,
        namespace: str,
        target: Mapping[str, Any],
        name: str,
        fields: dict[str, Any],
        transaction: Transaction | None,
    ) -> Written:
        number = self._session.next() if transaction is None and name != "find" else None

        def send() -> Written:
            table = self.catalog.table(namespace)
            lacking = [path for path in table.key if path not in target and path.partition(".")[0] not in target]
            if lacking and name != "insert":
                raise UsageError(f"The filter lacks {', '.join(lacking)} of the shard key of {namespace}")
            return self._send(table, table.owner(target), name, fields, number=number, transaction=transaction)

        return self._while_stale(namespace, send, transaction)

    def _send(
        self,
        table: Table,
        shard: str,
        name: str,
        fields: dict[str, Any],
        *,
        number: int | None,
        transaction: Transaction | None = None,
    ) -> Written:
        database, _, collection = table.namespace.partition(".")
        command = {name: collection, **fields, **self.versions(table, shard)}
        if transaction is not None:
            reply = self.connections.run(shard, database, {**command, **transaction.fields(shard)})
            transaction.joined(shard)
            return Written(shard, reply)
        if number is not None:
            command |= {"lsid": self._session.id, "txnNumber": Int64(number), "writeConcern": MAJORITY}
        return Written(shard, self.connections.run_again(shard, database, command, timeout_s=self.patience_s))

    def _while_stale(self, namespace: str, action: Callable[[], _T], transaction: Transaction | None = None) -> _T:
        deadline = time.monotonic() + self.patience_s
        refusals = 0
        while True:
            try:
                return action()
            except OperationFailure as error:
                if error.code not in STALE or time.monotonic() > deadline:
                    raise
                self._read_anew(namespace)
                refusals += 1
                if transaction is not None and not transaction.may_repeat(refusals):
                    raise

    def _read_anew(self, namespace: str) -> None:
        """Read the table again, after a moment in which the shard can refresh its own or finish giving the range
        away."""
        time.sleep(_STEP_S)
        self.catalog.reload(namespace)
