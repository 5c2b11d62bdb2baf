"""A stand-in for a mongos, for which there is no wheel: for what a sync writes to a cluster, including transactions and
definitions.

PyMongo connects to ``uri`` as to a mongos. Statements are sent by the rules of a mongos. An insert, or a statement that
names the whole shard key, goes to the shard that owns the document; a replacement that does not name it goes to the
owner of the new document; others by ``_id`` go to all shards; an upsert has to name the key. A transaction has such
statements on several shards and one commit, in two phases. The shards are real: they know whether the routing table is
current. Documents pass as their bytes.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any, Final

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.core import raw_bson
from tailrace.embedded import ShardedCluster
from tailrace.embedded.sharding.catalog import Table
from tailrace.embedded.sharding.connections import CONFIG, STALE, Command
from tailrace.embedded.sharding.transaction import Transaction
from tailrace.errors import UsageError
from tailrace.watch.gateway.frame import HEADER_SIZE, OP_MSG, OpMsg, OpQuery, op_msg, op_reply, parse_header
from tests.sharded.mongos import Mongos, _exactly, _nested

_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_OF_A_TRANSACTION: Final = ("lsid", "txnNumber", "autocommit", "startTransaction", "readConcern", "writeConcern")
_OF_THE_CLIENT: Final = ("$db", "$clusterTime", "$readPreference", "apiVersion", "recoveryToken")
_STATEMENTS: Final = {"insert": "documents", "update": "updates", "delete": "deletes"}
_SHARD_KEY_NOT_FOUND: Final = 61
_NAMESPACE_NOT_FOUND: Final = 26
_NO_COMMAND: Final = 59
_EMPTY: Final = {"ok": 1}
Reply = Mapping[str, Any]
Fields = dict[str, Any]


class _Statements(Mongos):
    """Statements to shards, in transactions and outside."""

    def __init__(self, cluster: ShardedCluster) -> None:
        super().__init__(cluster)
        self._router = cluster.router
        self._transactions: dict[bytes, tuple[int, Transaction]] = {}
        self._lock = threading.Lock()
        self._made = 0

    def _run(self, member: str, database: str, command: Mapping[str, Any]) -> RawBSONDocument:
        """Like ``Connections.run``, with documents as bytes, and with errors of statements left in the reply."""
        connections = self._router.connections
        message = Command(command)
        if connections.clock.document is not None:
            message["$clusterTime"] = connections.clock.document
        try:
            reply: RawBSONDocument = connections.client(member)[database].command(message, codec_options=_RAW)
        except OperationFailure as error:
            _learn(connections.clock, error.details or {})
            raise
        _learn(connections.clock, reply)
        return reply

    def _need(self, database: str) -> None:
        """A database is made with its first collection; the primary shards take turns."""
        with self._lock, suppress(UsageError):
            self._router.catalog.database(database)
            return
        with self._lock:
            shards = list(self._cluster.shards)
            self._router.create_database(database, shards[self._made % len(shards)])
            self._made += 1

    # -- statements ---------------------------------------------------------------------------------------------------

    def _statement(self, name: str, database: str, command: Fields) -> Reply:
        transaction = self._transaction(command)
        if transaction is None:
            command.pop("autocommit", None)
        if database == CONFIG:
            return self._run(CONFIG, database, command)
        namespace = f"{database}.{command[name]}"
        if name in ("insert", "update"):
            self._need(database)
        if name not in _STATEMENTS:
            return self._read(namespace, name, command, transaction)
        return self._write(namespace, name, command, transaction)

    def _read(self, namespace: str, name: str, command: Fields, transaction: Transaction | None) -> Reply:
        query = command.get("filter", command.get("query", {}))
        try:
            table = self._router.catalog.table(namespace)
        except UsageError:
            return {"cursor": {"id": bson.Int64(0), "ns": namespace, "firstBatch": []}, "ok": 1}
        equal = _equalities(query)
        whole = table.key and all(path in equal for path in table.key)
        shards = [table.owner(_nested(equal))] if whole else table.owners
        replies = [self._one(namespace, shard, command, transaction) for shard in shards]
        return replies[0] if name != "find" else _together(namespace, replies)

    def _write(self, namespace: str, name: str, command: Fields, transaction: Transaction | None) -> Reply:
        field = _STATEMENTS[name]
        total: Fields = {"n": 0, "ok": 1}
        place = 0
        table = self._router.catalog.table(namespace)
        targets = [self._targets(table, name, one) for one in command[field]]
        for shards, run in groupby(range(len(targets)), key=lambda number: targets[number]):
            some = [command[field][number] for number in run]
            for shard in shards:
                reply = self._one(namespace, shard, {**command, field: some}, transaction)
                total["n"] += reply["n"]
                for sum_ in ("nModified",):
                    if sum_ in reply:
                        total[sum_] = total.get(sum_, 0) + reply[sum_]
                if "upserted" in reply:
                    total.setdefault("upserted", []).extend({**one, "index": place} for one in reply["upserted"])
                if reply.get("writeErrors"):
                    errors = [{**one, "index": place + one["index"]} for one in reply["writeErrors"]]
                    return {**total, "writeErrors": errors}
            place += len(some)
        return total

    def _targets(self, table: Table, name: str, statement: RawBSONDocument) -> tuple[str, ...]:
        if not table.key:
            return (table.owner({}),)
        if name == "insert":
            return (table.owner(statement),)
        equal = _equalities(statement["q"])
        if all(path in equal for path in table.key):
            return (table.owner(_nested({path: equal[path] for path in table.key})),)
        if statement.get("upsert"):
            raise OperationFailure("Failed to target upsert by query :: no exact shard key", _SHARD_KEY_NOT_FOUND)
        new = statement.get("u")
        if isinstance(new, RawBSONDocument) and not any(one.startswith("$") for one in new):
            return (table.owner(new),)
        return tuple(table.owners)

    def _one(self, namespace: str, shard: str, command: Fields, transaction: Transaction | None) -> RawBSONDocument:
        """A statement on one shard. If the routing table is outdated, a transaction is over; otherwise the statement is
        repeated with a new table, if it still leads to this shard."""
        database = namespace.partition(".")[0]
        refusals = 0
        while True:
            table = self._router.catalog.table(namespace)
            fields = {**command, **_whole(command), **self._router.versions(table, shard)}
            try:
                if transaction is None:
                    reply = self._run(shard, database, fields)
                else:
                    reply = self._run(shard, database, {**fields, **transaction.fields(shard)})
                stale = next((one for one in reply.get("writeErrors", ()) if one["code"] in STALE), None)
                if stale is not None:
                    raise OperationFailure(stale["errmsg"], stale["code"])
            except OperationFailure as error:
                if error.code not in STALE:
                    raise
                time.sleep(0.02)
                self._router.catalog.reload(namespace)
                refusals += 1
                if refusals > 3 or (transaction is not None and not transaction.may_repeat(refusals)):
                    labels = {"errorLabels": ["TransientTransactionError"]} if transaction is not None else {}
                    raise OperationFailure(str(error), error.code, {"errmsg": str(error), **labels}) from None
                continue
            if transaction is not None:
                transaction.joined(shard)
            return reply

    # -- transactions -------------------------------------------------------------------------------------------------

    def _transaction(self, command: Fields) -> Transaction | None:
        """The transaction of a statement, whose fields are removed from the command."""
        if command.get("autocommit") is not False:
            return None
        session, number = bytes(command["lsid"]["id"]), int(command["txnNumber"])
        started = bool(command.get("startTransaction"))
        lsid = {"id": command["lsid"]["id"]}
        for field in _OF_A_TRANSACTION:
            command.pop(field, None)
        with self._lock:
            if started:
                self._transactions[session] = number, Transaction(self._router, lsid, number)
            known, transaction = self._transactions.get(session, (-1, None))
        if transaction is None or known != number:
            raise OperationFailure("no such transaction", 251, {"errorLabels": ["TransientTransactionError"]})
        return transaction

    def _end(self, name: str, command: Fields) -> Reply:
        transaction = self._transaction(command)
        assert transaction is not None
        if name == "commitTransaction":
            transaction.commit()
        else:
            transaction.abort()
        return _EMPTY


class WritingMongos(_Statements):
    """``with WritingMongos(cluster) as mongos``: a sync writes to ``mongos.uri``."""

    def __enter__(self) -> WritingMongos:
        threading.Thread(target=self._accept, name="mongos", daemon=True).start()
        return self

    # -- messages -----------------------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            while True:
                start = _exactly(connection, HEADER_SIZE)
                header = parse_header(start)
                message = start + _exactly(connection, header.length - HEADER_SIZE)
                if header.op_code != OP_MSG:
                    reply = bson.encode(self._hello())
                    OpQuery.parse(message)
                    connection.sendall(op_reply(reply, request_id=1, response_to=header.request_id))
                    continue
                parsed = OpMsg.parse(message)
                command: Fields = dict(RawBSONDocument(parsed.document, _RAW))
                for field, documents in parsed.sequences:
                    command[field.decode()] = [RawBSONDocument(one, _RAW) for one in raw_bson.split(documents)]
                reply = bson.encode(self._answered(command))
                if not parsed.more_to_come:
                    connection.sendall(op_msg(reply, request_id=1, response_to=header.request_id))

    def _answered(self, command: Fields) -> Reply:
        clock = self._router.connections.clock
        try:
            if "$clusterTime" in command:
                clock.learn({"$clusterTime": bson.decode(command["$clusterTime"].raw)})
            reply = self._do(next(iter(command)), command["$db"], command)
        except OperationFailure as error:
            reply = _failed(error)
        except PyMongoError as error:
            reply = {
                "ok": 0,
                "errmsg": f"the mongos has lost a shard: {error}",
                "code": 6,
                "codeName": "HostUnreachable",
            }
        except UsageError as error:
            reply = {"ok": 0, "errmsg": error.message, "code": _NAMESPACE_NOT_FOUND}
        if clock.document is None:
            return reply
        times = {"operationTime": clock.now, "$clusterTime": clock.document}
        return {**{name: value for name, value in reply.items() if name not in times}, **times}

    # -- commands -----------------------------------------------------------------------------------------------------

    def _do(self, name: str, database: str, command: Fields) -> Reply:
        for field in _OF_THE_CLIENT:
            command.pop(field, None)
        if name in ("hello", "ismaster", "isMaster"):
            return self._hello()
        if name in ("commitTransaction", "abortTransaction"):
            return self._end(name, command)
        if name in _STATEMENTS or name in ("find", "findAndModify"):
            return self._statement(name, database, command)
        for field in ("lsid", "txnNumber"):
            command.pop(field, None)
        doing: dict[str, Callable[[str, Fields], Reply]] = {
            "listDatabases": self._list_databases,
            "listCollections": self._on_primary,
            "listIndexes": self._on_one_owner,
            "aggregate": self._on_owners,
            "collStats": self._on_one_owner,
            "create": self._create,
            "createIndexes": self._on_owners,
            "dropIndexes": self._on_owners,
            "drop": self._drop,
            "dropDatabase": self._drop_database,
            "collMod": self._coll_mod,
            "renameCollection": self._rename,
            "shardCollection": self._shard,
            "killSessions": self._kill_sessions,
        }
        if name in doing:
            return doing[name](database, command)
        if name in ("ping", "endSessions", "killCursors"):
            return self._router.connections.run(CONFIG, "admin", {"ping": 1}) if name == "ping" else _EMPTY
        if name in ("connectionStatus", "buildInfo", "buildinfo"):
            return self._run(CONFIG, "admin", command)
        if name == "getShardMap":
            return self._run(next(iter(self._cluster.shards)), database, command)
        raise OperationFailure(f"no such command: '{name}'", _NO_COMMAND)

    def _list_databases(self, _: str, command: Fields) -> Reply:
        found = self._router.connections.find(CONFIG, "config.databases", {})
        return {"databases": [{"name": one["_id"]} for one in found], "ok": 1}

    def _on_primary(self, database: str, command: Fields) -> Reply:
        try:
            found = self._router.catalog.database(database)
        except UsageError:
            return {
                "cursor": {"id": bson.Int64(0), "ns": f"{database}.$cmd.listCollections", "firstBatch": []},
                "ok": 1,
            }
        fields = {"databaseVersion": found["version"]}
        return self._run(found["primary"], database, {**command, **_whole(command), **fields})

    def _on_one_owner(self, database: str, command: Fields) -> Reply:
        return self._of_table(database, command, lambda table: self._sent(table, table.owners[0], command))

    def _on_owners(self, database: str, command: Fields) -> Reply:
        def send(table: Table) -> Reply:
            replies = [self._sent(table, shard, command) for shard in table.owners]
            return replies[0] if "cursor" not in replies[0] else _together(table.namespace, replies)

        return self._of_table(database, command, send)

    def _of_table(self, database: str, command: Fields, send: Callable[[Table], Reply]) -> Reply:
        namespace = f"{database}.{command[next(iter(command))]}"
        return self._router._while_stale(namespace, lambda: send(self._router.catalog.table(namespace)))

    def _sent(self, table: Table, shard: str, command: Mapping[str, Any]) -> RawBSONDocument:
        database = table.namespace.partition(".")[0]
        fields = self._router.versions(table, shard)
        return self._run(shard, database, {**command, **_whole(command), **fields})

    def _create(self, database: str, command: Fields) -> Reply:
        self._need(database)
        return self._on_primary(database, command)

    def _drop(self, database: str, command: Fields) -> Reply:
        if command["drop"] not in self._names(database):
            raise OperationFailure("ns not found", _NAMESPACE_NOT_FOUND)
        self._router.drop_collection(f"{database}.{command['drop']}")
        return _EMPTY

    def _names(self, database: str) -> set[str]:
        found = self._on_primary(database, {"listCollections": 1, "nameOnly": True})
        return {one["name"] for one in found["cursor"]["firstBatch"]}

    def _drop_database(self, database: str, _: Fields) -> Reply:
        with suppress(UsageError):
            self._router.drop_database(database)
        return _EMPTY

    def _coll_mod(self, database: str, command: Fields) -> Reply:
        changes = {name: value for name, value in command.items() if name not in ("collMod", "writeConcern")}
        self._router.coll_mod(f"{database}.{command['collMod']}", **changes)
        return _EMPTY

    def _rename(self, _: str, command: Fields) -> Reply:
        database, _, name = command["renameCollection"].partition(".")
        if name not in self._names(database):
            raise OperationFailure("source namespace does not exist", _NAMESPACE_NOT_FOUND)
        self._router.rename(command["renameCollection"], command["to"])
        return _EMPTY

    def _kill_sessions(self, _: str, command: Fields) -> Reply:
        """Like a mongos, end their transactions on every shard, so that what they hold is free at once."""
        for one in command["killSessions"]:
            with self._lock:
                self._transactions.pop(bytes(one["id"]), None)
        for shard in self._cluster.shards:
            self._run(shard, "admin", {"killSessions": command["killSessions"]})
        return _EMPTY

    def _shard(self, _: str, command: Fields) -> Reply:
        self._router.shard_collection(command["shardCollection"], bson.decode(command["key"].raw))
        return _EMPTY


def _equalities(query: Mapping[str, Any]) -> Fields:
    """The values to which a query compares fields for equality."""
    found: Fields = {}
    for path, value in query.items():
        operators = isinstance(value, Mapping) and any(name.startswith("$") for name in value)
        if not operators:
            found[path] = value
        elif "$eq" in value:
            found[path] = value["$eq"]
    return found


def _whole(command: Mapping[str, Any]) -> Fields:
    """Gives all of a cursor's documents in one batch."""
    if "find" in command:
        return {"batchSize": 100_000, "singleBatch": True}
    if next(iter(command)) in ("aggregate", "listCollections", "listIndexes"):
        return {"cursor": {"batchSize": 100_000}}
    return {}


def _together(namespace: str, replies: Iterable[Reply]) -> Reply:
    found = [one for reply in replies for one in reply["cursor"]["firstBatch"]]
    return {"cursor": {"id": bson.Int64(0), "ns": namespace, "firstBatch": found}, "ok": 1}


def _learn(clock: Any, reply: Mapping[str, Any]) -> None:
    told = reply.get("$clusterTime")
    if told is not None:
        raw = told.raw if isinstance(told, RawBSONDocument) else bson.encode(told)
        clock.learn({"$clusterTime": bson.decode(raw)})


def _failed(error: OperationFailure) -> Reply:
    details = dict(error.details or {})
    labels = list(details.get("errorLabels", ()))
    said = str(details.get("errmsg", error))
    return {"ok": 0, "errmsg": said, "code": error.code or 8, **({"errorLabels": labels} if labels else {})}
