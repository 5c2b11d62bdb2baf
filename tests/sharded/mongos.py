"""A stand-in for a mongos, for which there is no wheel: the wire protocol in front of a router.

On 6.0 the router is ``NativeRouter``: mongod 6.0 with the commands of a mongos, whose own rules decide where a command
goes. 4.4 and 5.0 have nothing like that; there the embedded cluster's router sends what a mongos would, by the rules
below (``_Routed``): a write of one document needs the whole shard key or an exact ``_id``, an upsert the whole shard
key, everything else goes to every shard that owns a part.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Protocol, Self

import bson
import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo.errors import OperationFailure, PyMongoError

from tailrace.embedded import ShardedCluster
from tailrace.embedded.sharding.connections import CONFIG
from tailrace.watch.gateway.frame import HEADER_SIZE, OP_MSG, OpMsg, OpQuery, op_msg, op_reply, parse_header
from tests.server_in_use import major
from tests.sharded.native_router import NativeRouter

_CODEC: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    tz_aware=True, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
_WIRE: Final = {"4.4": 9, "5.0": 13, "6.0": 17, "7.0": 21}
_OF_THE_CLIENT: Final = ("$db", "$clusterTime", "$readPreference", "lsid", "txnNumber", "apiVersion")
_EMPTY: Final = {"ok": 1}
_INVALID_OPTIONS: Final = 72
_SHARD_KEY_NOT_FOUND: Final = 61


class _Backend(Protocol):
    def run(self, database: str, name: str, command: dict[str, Any]) -> Mapping[str, Any]: ...


class Mongos:
    """``with Mongos(cluster) as mongos``: drivers connect to ``mongos.uri``."""

    def __init__(self, cluster: ShardedCluster) -> None:
        self._cluster = cluster
        self._stack = ExitStack()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: set[socket.socket] = set()
        self._backend: _Backend = _Routed(cluster)
        self._native: NativeRouter | None = None
        self._pace_s = 0.0

    @property
    def uri(self) -> str:
        return f"mongodb://127.0.0.1:{self._listener.getsockname()[1]}/"

    @contextmanager
    def paced(self, pace_ms: int) -> Iterator[Callable[[], bool]]:
        """Inside the block, change streams may be read through it, on 6.0, in the one way that the router mostly
        survives. Afterwards the returned object says whether it has, and starts it again if not."""
        native = self._native
        assert native is not None, "change streams of 6.0 alone"

        def survives() -> bool:
            member = native._replica_set.members[0]
            try:
                with pymongo.MongoClient[Any](member.uri, serverSelectionTimeoutMS=5000) as client:
                    client.admin.command("ping")
            except PyMongoError:
                native._replica_set.kill(0)
                native._replica_set.restart(0)
                return False
            return True

        try:
            with native._held_back(pace_ms) as self._pace_s:
                yield survives
        finally:
            self._pace_s = 0.0

    def __enter__(self) -> Self:
        if major(self._cluster.version) >= 6:
            router = self._native = self._stack.enter_context(NativeRouter(self._cluster))
            client = self._stack.enter_context(pymongo.MongoClient[Any](router._replica_set.uri))
            self._backend = _Native(client, self._cluster)
        threading.Thread(target=self._accept, name="mongos", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        self._stack.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            while True:
                start = _exactly(connection, HEADER_SIZE)
                header = parse_header(start)
                message = start + _exactly(connection, header.length - HEADER_SIZE)
                if header.op_code == OP_MSG:
                    parsed = OpMsg.parse(message)
                    command = bson.decode(parsed.document, _CODEC)
                    for field, documents in parsed.sequences:
                        command[field.decode()] = bson.decode_all(documents, _CODEC)
                    reply = bson.encode(self._answer(command))
                    if not parsed.more_to_come:
                        connection.sendall(op_msg(reply, request_id=1, response_to=header.request_id))
                else:
                    command = bson.decode(OpQuery.parse(message).document, _CODEC)
                    reply = bson.encode(self._answer(command))
                    connection.sendall(op_reply(reply, request_id=1, response_to=header.request_id))

    def _answer(self, command: dict[str, Any]) -> Mapping[str, Any]:
        name = next(iter(command))
        database = command.get("$db", "admin")
        try:
            if name in ("hello", "ismaster", "isMaster"):
                return self._hello()
            if name in ("ping", "endSessions", "killCursors"):
                return _EMPTY
            if "$clusterTime" in command:
                self._cluster.router.connections.clock.learn(command)
            for field in _OF_THE_CLIENT:
                command.pop(field, None)
            if database == "config":
                return self._cluster.router.connections.run(CONFIG, database, _without_cluster_time(command))
            if name == "getShardMap":
                return self._cluster.router.connections.run(next(iter(self._cluster.shards)), database, command)
            if name == "getMore" and self._pace_s:
                time.sleep(self._pace_s)
                command["maxTimeMS"] = 50
            return self._backend.run(database, name, command)
        except OperationFailure as error:
            details = dict(error.details or {})
            return {"ok": 0, "errmsg": str(error), "code": error.code, **details.get("reply", details)}
        except PyMongoError as error:
            return {
                "ok": 0,
                "errmsg": f"the router has lost a shard: {error}",
                "code": 6,
                "codeName": "HostUnreachable",
            }

    def _hello(self) -> dict[str, Any]:
        sizes = {"maxBsonObjectSize": 16 << 20, "maxMessageSizeBytes": 48_000_000, "maxWriteBatchSize": 100_000}
        version = {"minWireVersion": 0, "maxWireVersion": _WIRE[self._cluster.version[:3]]}
        roles = {"ismaster": True, "isWritablePrimary": True, "helloOk": True, "msg": "isdbgrid", "readOnly": False}
        return {
            **roles,
            **sizes,
            **version,
            "localTime": datetime.now(UTC),
            "logicalSessionTimeoutMinutes": 30,
            "ok": 1,
        }


class _Native:
    """The commands of a mongos inside mongod 6.0."""

    def __init__(self, client: pymongo.MongoClient[Any], cluster: ShardedCluster) -> None:
        self._client = client
        self._clock = cluster.router.connections.clock

    def run(self, database: str, name: str, command: dict[str, Any]) -> Mapping[str, Any]:
        if name in ("find", "getMore", "insert", "update", "delete", "aggregate"):
            command = {f"cluster{name[0].upper()}{name[1:]}": command.pop(name), **command}
        with self._client.start_session(causal_consistency=False) as session:
            if self._clock.document is not None:
                session.advance_cluster_time(self._clock.document)
            reply: Mapping[str, Any] = self._client[database].command(command, codec_options=_CODEC, session=session)
        self._clock.learn(reply)
        return reply


class _Routed:
    """The embedded cluster's router, following the rules of a mongos."""

    def __init__(self, cluster: ShardedCluster) -> None:
        self._router = cluster.router

    def run(self, database: str, name: str, command: dict[str, Any]) -> Mapping[str, Any]:
        namespace = f"{database}.{command[name]}"
        return self._router._while_stale(namespace, lambda: self._run(database, name, namespace, command))

    def _run(self, database: str, name: str, namespace: str, command: dict[str, Any]) -> Mapping[str, Any]:
        table = self._router.catalog.table(namespace)
        if name in ("find", "listIndexes"):
            replies = [self._send(table, shard, command | _one_batch(command)) for shard in table.owners]
            if name == "listIndexes":
                replies = replies[:1]
            found = [document for reply in replies for document in reply["cursor"]["firstBatch"]]
            limit = command.get("limit") or len(found)
            return {**_latest(replies), "cursor": {"id": 0, "ns": namespace, "firstBatch": found[:limit]}}
        replies = []
        field = {"insert": "documents", "update": "updates", "delete": "deletes"}[name]
        for index, statement in enumerate(command[field]):
            for shard in self._shards_for(table, name, statement):
                reply = self._send(table, shard, {**command, field: [statement]})
                replies.append(_renumbered(reply, index))
                if reply["n"] and not (statement.get("multi") or statement.get("limit") == 0):
                    break
        total = {"n": sum(reply["n"] for reply in replies)}
        if name == "update":
            total["nModified"] = sum(reply["nModified"] for reply in replies)
            upserted = [one for reply in replies for one in reply.get("upserted", ())]
            total |= {"upserted": upserted} if upserted else {}
        return {**_latest(replies), **total}

    def _shards_for(self, table: Any, name: str, statement: Mapping[str, Any]) -> list[str]:
        if name == "insert":
            return [table.owner(statement)]
        equal = _equalities(statement["q"])
        if all(path in equal for path in table.key):
            return [table.owner(_nested({path: equal[path] for path in table.key}))]
        if statement.get("upsert"):
            raise OperationFailure(
                "Failed to target upsert by query :: could not extract exact shard key", _SHARD_KEY_NOT_FOUND
            )
        owners: list[str] = table.owners
        if len(owners) > 1 and not (statement.get("multi") or statement.get("limit") == 0 or "_id" in equal):
            said = f"A {{multi:false}} {name} on a sharded collection must contain an exact match on _id or target one"
            raise OperationFailure(said, _INVALID_OPTIONS)
        return owners

    def _send(self, table: Any, shard: str, command: dict[str, Any]) -> dict[str, Any]:
        database = table.namespace.partition(".")[0]
        return self._router.connections.run_again(shard, database, {**command, **self._router.versions(table, shard)})


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _without_cluster_time(command: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in command.items() if name != "readConcern"}


def _one_batch(command: Mapping[str, Any]) -> dict[str, Any]:
    assert "sort" not in command, "no sort here"
    return {"batchSize": 100_000, "singleBatch": True} if "find" in command else {}


def _latest(replies: list[dict[str, Any]]) -> dict[str, Any]:
    times = [reply["operationTime"] for reply in replies if "operationTime" in reply]
    clocks = [reply["$clusterTime"] for reply in replies if "$clusterTime" in reply]
    found: dict[str, Any] = {"ok": 1}
    if times and clocks:
        found |= {"operationTime": max(times), "$clusterTime": max(clocks, key=lambda one: one["clusterTime"])}
    return found


def _renumbered(reply: dict[str, Any], index: int) -> dict[str, Any]:
    return {**reply, "upserted": [{**one, "index": index} for one in reply.get("upserted", ())]}


def _equalities(query: Mapping[str, Any]) -> dict[str, Any]:
    """The values to which a query compares fields for equality."""
    found: dict[str, Any] = {}
    for path, value in query.items():
        if path == "$and":
            for part in value:
                found |= _equalities(part)
        elif not path.startswith("$"):
            operators = isinstance(value, dict) and any(name.startswith("$") for name in value)
            if not operators:
                found[path] = value
            elif "$eq" in value:
                found[path] = value["$eq"]
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for path, value in values.items():
        inner = document
        *parents, last = path.split(".")
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return document
