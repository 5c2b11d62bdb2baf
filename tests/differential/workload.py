"""Random workloads: the same seed and count give the same operations, whatever the server answers.

An operation is a few commands that belong together (a transaction is one operation). Commands that the server refuses
are part of a workload: they must leave no event behind.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bson.binary import Binary, UuidRepresentation
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument

from tailrace.core import raw_bson as rb
from tests.differential import ddl, updates
from tests.differential import documents as docs
from tests.server_in_use import SERVER_VERSION

COLLECTIONS = ("c0", "c1", "c2", "c10", "c.d", "c+(x)", "tmp3", "имя")
#: Written between the prepare and the commit of another transaction, so never touched by prepared transactions.
BESIDE = "beside"
#: The collection of the one update whose description is near a limit.
LONG = "long"
#: Whoever runs a command replaces this value by the ``prepareTimestamp`` of the last prepare.
PREPARE_TIMESTAMP = "<prepareTimestamp>"
_MAX_TIME_MS = 10_000
Namespace = tuple[str, str]


@dataclass(frozen=True)
class Command:
    database: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """What one draw of the generator does. ``cleanup`` runs when one of the commands was refused."""

    number: int
    kind: str
    commands: tuple[Command, ...]
    cleanup: tuple[Command, ...] = ()


class Workload:
    """The operations of one seed on two databases named after it, for a server of that version. ``unique_names``: no
    document has two fields of one name."""

    def __init__(self, seed: int, version: str = SERVER_VERSION, *, unique_names: bool = False) -> None:
        self.seed = seed
        # A prepared transaction that wrote nothing: a stream that reads its commit ends the process of a mongod 4.4.2.
        self._prepares_nothing = not version.startswith("4.4")
        self.databases = (f"fuzz{seed}", f"fuzz{seed}x")
        self.settings = f"settings{seed}"
        # A pipeline's update of a document with two fields of one name ends the process of a mongod 5.0.4.
        draw = docs.UniqueNames if unique_names or version.startswith("5.") else random.Random
        self._rng = draw(f"tailrace workload {seed}")
        self._long = random.Random(f"tailrace long description {seed}")
        # Not from the seed: the server remembers a session's transaction numbers, and a replay must not meet them.
        self._session = Binary.from_uuid(uuid.uuid4(), uuid_representation=UuidRepresentation.STANDARD)
        self._transaction_number = 0
        self._identifiers: dict[Namespace, list[tuple[int, bytes]]] = {}
        self._kinds = self._table()

    def operations(self, count: int) -> Iterator[Operation]:
        """The first ``count`` operations."""
        makers = [maker for maker, _ in self._kinds.values()]
        names = list(self._kinds)
        weights = [weight for _, weight in self._kinds.values()]
        yield Operation(0, "setup", tuple(self._setup()))
        for number in range(1, count):
            if number == count // 2:
                yield Operation(number, "long description", tuple(self._long_description()))
                continue
            index = self._rng.choices(range(len(names)), weights)[0]
            commands, cleanup = makers[index]()
            yield Operation(number, names[index], tuple(commands), tuple(cleanup))

    def _table(self) -> dict[str, tuple[Callable[[], tuple[list[Command], list[Command]]], float]]:
        def plain(make: Callable[[], list[Command]]) -> Callable[[], tuple[list[Command], list[Command]]]:
            return lambda: (make(), [])

        return {
            "insert": (plain(self._insert), 18),
            "insert many": (plain(self._insert_many), 4),
            "update": (plain(self._update), 36),
            "update many": (plain(self._update_many), 3),
            "delete": (plain(self._delete), 6),
            "find and modify": (plain(self._find_and_modify), 4),
            "retryable write": (plain(self._retryable), 5),
            "transaction": (self._transaction, 7),
            "prepared transaction": (self._prepared, 3),
            "definition": (plain(self._definition), 9),
            "made again": (plain(self._made_again), 1.5),
            "drop database": (plain(self._drop_database), 0.15),
            "applyOps": (plain(self._apply_ops), 1),
            "system": (plain(self._system), 0.5),
            "no-op": (plain(self._no_op), 0.5),
        }

    def _setup(self) -> list[Command]:
        """Turn on images from the beginning for the collections that most operations go to."""
        images = {"changeStreamPreAndPostImages": {"enabled": True}}
        return [_command(database, {"create": name, **images}) for database in self.databases for name in ("c0", "c1")]

    # -- namespaces and keys

    def _namespace(self) -> Namespace:
        database = self.databases[0] if self._rng.random() < 0.8 else self.databases[1]
        return database, COLLECTIONS[0] if self._rng.random() < 0.3 else self._rng.choice(COLLECTIONS)

    def _document(self, namespace: Namespace) -> RawBSONDocument:
        raw = docs.new_document(self._rng)
        element = rb.find(raw, b"_id")
        if element is not None:
            known = self._identifiers.setdefault(namespace, [])
            known.append((element.type, rb.value(raw, element)))
            del known[:-40]
        return RawBSONDocument(raw)

    def _query(self, namespace: Namespace) -> RawBSONDocument:
        """By ``_id``, mostly one that was inserted into this namespace before."""
        known = self._identifiers.get(namespace)
        if known and self._rng.random() < 0.85:
            type_, value = self._rng.choice(known)
        else:
            type_, value = rb.INT32, rb.encode_int32(self._rng.randint(0, docs.SMALL_IDS))
        equal = rb.encode_document(rb.encode_element(type_, b"$eq", value))
        return RawBSONDocument(rb.encode_document(rb.encode_element(rb.OBJECT, b"_id", equal)))

    # -- plain writes

    def _insert(self) -> list[Command]:
        database, collection = namespace = self._namespace()
        return [_command(database, {"insert": collection, "documents": [self._document(namespace)]})]

    def _insert_many(self) -> list[Command]:
        database, collection = namespace = self._namespace()
        documents = [self._document(namespace) for _ in range(self._rng.randint(2, 6))]
        return [_command(database, {"insert": collection, "documents": documents, "ordered": False})]

    def _update(self) -> list[Command]:
        return [self._updates(1)]

    def _update_many(self) -> list[Command]:
        return [self._updates(self._rng.randint(2, 4))]

    def _updates(self, count: int) -> Command:
        database, collection = namespace = self._namespace()
        statements = [updates.statement(self._rng, self._query(namespace)) for _ in range(count)]
        return _command(database, {"update": collection, "updates": statements, "ordered": False})

    def _delete(self) -> list[Command]:
        database, collection = namespace = self._namespace()
        query: Any = self._query(namespace)
        limit = 1
        if self._rng.random() < 0.1:
            query, limit = {"n": {"$lt": self._rng.randint(0, 20)}}, 0
        return [_command(database, {"delete": collection, "deletes": [{"q": query, "limit": limit}]})]

    def _find_and_modify(self) -> list[Command]:
        namespace = self._namespace()
        return [_command(namespace[0], self._find_and_modify_fields(namespace))]

    def _find_and_modify_fields(self, namespace: Namespace) -> dict[str, Any]:
        query = self._query(namespace)
        command: dict[str, Any] = {"findAndModify": namespace[1], "query": query}
        if self._rng.random() < 0.3:
            return command | {"remove": True}
        statement = updates.statement(self._rng, query, one=True)
        command |= {"update": statement["u"], "new": self._rng.random() < 0.5}
        if "arrayFilters" in statement:
            command["arrayFilters"] = statement["arrayFilters"]
        return command

    def _retryable(self) -> list[Command]:
        """A write with a transaction number, now and then sent a second time: the server must not write it again."""
        self._transaction_number += 1
        session = {"lsid": {"id": self._session}, "txnNumber": Int64(self._transaction_number)}
        kind = self._rng.randrange(4)
        database, collection = namespace = self._namespace()
        command: dict[str, Any]
        if kind == 0:
            documents = [self._document(namespace) for _ in range(self._rng.randint(1, 3))]
            command = {"insert": collection, "documents": documents}
        elif kind == 1:
            statements = [updates.statement(self._rng, self._query(namespace), one=True) for _ in range(2)]
            command = {"update": collection, "updates": statements}
        elif kind == 2:
            command = {"delete": collection, "deletes": [{"q": self._query(namespace), "limit": 1}]}
        else:
            command = self._find_and_modify_fields(namespace)
        sent = _command(database, command | session)
        return [sent, sent] if self._rng.random() < 0.3 else [sent]

    # -- transactions

    def _writes(self, count: int, *, beside: bool = False) -> list[tuple[str, dict[str, Any]]]:
        """Writes for use inside a transaction: one document each, on the collections of both databases."""
        result = []
        for _ in range(count):
            database, collection = self._namespace()
            collection = BESIDE if beside else collection
            namespace = (database, collection)
            kind = self._rng.random()
            command: dict[str, Any]
            if kind < 0.5:
                documents = [self._document(namespace) for _ in range(self._rng.choice((1, 1, 1, 4)))]
                command = {"insert": collection, "documents": documents}
            elif kind < 0.85:
                statement = updates.statement(self._rng, self._query(namespace), one=True)
                command = {"update": collection, "updates": [statement]}
            else:
                command = {"delete": collection, "deletes": [{"q": self._query(namespace), "limit": 1}]}
            result.append((database, command))
        return result

    def _in_transaction(self, commands: list[tuple[str, dict[str, Any]]]) -> tuple[list[Command], dict[str, Any]]:
        self._transaction_number += 1
        fields = {"lsid": {"id": self._session}, "txnNumber": Int64(self._transaction_number), "autocommit": False}
        inside = []
        for index, (database, command) in enumerate(commands):
            start = {"startTransaction": True, "readConcern": {"level": "local"}} if index == 0 else {}
            inside.append(Command(database, command | fields | start))
        return inside, fields

    def _transaction(self) -> tuple[list[Command], list[Command]]:
        """Small ones end in one oplog entry, longer ones in a chain; some create collections; some are aborted."""
        rng = self._rng
        commands = self._writes(rng.choice((1, 1, 2, 3, 5, 9)))
        if rng.random() < 0.15:
            fresh = f"txn{rng.randint(0, 3)}"
            database = self.databases[0]
            commands.insert(rng.randint(0, 1), (database, {"create": fresh}))
            if rng.random() < 0.6:
                index = {"key": {"a": 1}, "name": "a_1"}
                commands.insert(2, (database, {"createIndexes": fresh, "indexes": [index]}))
            commands.append((database, {"insert": fresh, "documents": [self._document((database, fresh))]}))
        inside, fields = self._in_transaction(commands)
        end = "abortTransaction" if rng.random() < 0.15 else "commitTransaction"
        abort = Command("admin", {"abortTransaction": 1, **fields})
        return [*inside, Command("admin", {end: 1, **fields})], [abort]

    def _prepared(self) -> tuple[list[Command], list[Command]]:
        """Prepared, then other writes, then committed or aborted: the events carry the time of the commit."""
        rng = self._rng
        writes = self._writes(rng.choice((1, 2, 4, 8)))
        if not self._prepares_nothing:
            fresh = {"_id": rng.getrandbits(60), "by": "prepared"}
            writes.insert(0, (self.databases[0], {"insert": COLLECTIONS[0], "documents": [fresh]}))
        inside, fields = self._in_transaction(writes)
        majority = {"writeConcern": {"w": "majority"}}
        prepare = Command("admin", {"prepareTransaction": 1, **fields, **majority})
        between = [_command(database, command) for database, command in self._writes(rng.randint(0, 3), beside=True)]
        abort = Command("admin", {"abortTransaction": 1, **fields})
        if rng.random() < 0.2:
            return [*inside, prepare, *between, abort], [abort]
        commit = {"commitTransaction": 1, "commitTimestamp": PREPARE_TIMESTAMP, **fields, **majority}
        return [*inside, prepare, *between, Command("admin", commit)], [abort]

    # -- definitions and the rest

    def _definition(self) -> list[Command]:
        database, collection = self._namespace()
        other = self.databases[1] if database == self.databases[0] else self.databases[0]
        made = ddl.definition(self._rng, database, collection, self._namespace()[1], other)
        return [_command(on, command) for on, command in made]

    def _made_again(self) -> list[Command]:
        """A document is updated, and its collection then dropped, or renamed, and made again with the same ``_id``, or
        as a view: what a look-up finds after it depends on the server's version."""
        rng = self._rng
        database = self.databases[0]
        kind = rng.random()
        # No stream is opened on what may be a view.
        name, other = rng.sample(("again0", "again1") if kind > 0.7 else ("c2", "c10", "tmp3"), 2)
        id_ = rng.randint(0, docs.SMALL_IDS)
        by_id = {"_id": id_}
        upsert = {"q": by_id, "u": {"$set": {"n": rng.randint(0, 9)}}, "upsert": True}
        update = {"q": by_id, "u": {"$inc": {"n": 1}}}
        commands: list[tuple[str, dict[str, Any]]] = [
            (database, {"update": name, "updates": [upsert, update]}),
            rng.choice(
                (
                    (database, {"drop": name}),
                    (
                        "admin",
                        {"renameCollection": f"{database}.{name}", "to": f"{database}.{other}", "dropTarget": True},
                    ),
                    ("admin", {"renameCollection": f"{database}.{name}", "to": f"{self.databases[1]}.{other}"}),
                )
            ),
        ]
        if kind < 0.6:
            commands.append((database, {"insert": name, "documents": [{**by_id, "made": "again"}]}))
        elif kind < 0.7:
            commands.append((database, {"create": name, "collation": {"locale": "de", "strength": 2}}))
        elif kind > 0.9:
            commands.append((database, {"create": name, "viewOn": "c0", "pipeline": []}))
        return [_command(on, command) for on, command in commands]

    def _long_description(self) -> list[Command]:
        """Once a seed, since every stream reads it: some hundred fields set under a long path, so that the event comes
        near the largest one, from either side. On 4.4 the entry is a replacement.

        Descriptions past 64 MB, which end a stream (16490) unless a filter hides their entry, are not drawn: which
        filters hide it differs between the two sides. ``test_long_descriptions_live.py`` has their edge.
        """
        path = "p" * 60_000
        names = [f"f{number:06d}" for number in range(self._long.choice((200, 278, 279, 280, 300)))]
        kept = {"kept": "x" * 100_000}
        whole = {"$set": {path: {"$literal": {**kept, **dict.fromkeys(names, 2)}}}}
        database = self.databases[0]
        return [
            _command(database, {"insert": LONG, "documents": [{"_id": 1, path: kept}]}),
            _command(database, {"update": LONG, "updates": [{"q": {"_id": 1}, "u": [whole]}]}),
            _command(database, {"delete": LONG, "deletes": [{"q": {}, "limit": 0}]}),
        ]

    def _drop_database(self) -> list[Command]:
        return [_command(self._namespace()[0], {"dropDatabase": 1})]

    def _apply_ops(self) -> list[Command]:
        """The applyOps command: logged as one entry when atomic, otherwise as the entries of its operations."""
        namespace = ".".join(self._namespace())
        document = {"_id": self._rng.randint(0, docs.SMALL_IDS), "by": "applyOps"}
        operations: list[dict[str, Any]] = [{"op": "i", "ns": namespace, "o": document}]
        if self._rng.random() < 0.5:
            operations.append({"op": "d", "ns": namespace, "o": {"_id": self._rng.randint(0, docs.SMALL_IDS)}})
        command: dict[str, Any] = {"applyOps": operations}
        if self._rng.random() < 0.5:
            command["allowAtomic"] = False
        return [_command("admin", command)]

    def _system(self) -> list[Command]:
        """Writes that only some streams show or none does: to system.js, to a collection of config, to local."""
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            update = {"q": {"_id": "f"}, "u": {"$set": {"value": rng.randint(0, 99)}}, "upsert": True}
            return [_command(self._namespace()[0], {"update": "system.js", "updates": [update]})]
        if kind == 1:
            return [
                _command("config", {"insert": self.settings, "documents": [self._document(("config", self.settings))]})
            ]
        return [_command("local", {"insert": "c0", "documents": [{"_id": rng.getrandbits(60)}]})]

    def _no_op(self) -> list[Command]:
        return [Command("admin", {"appendOplogNote": 1, "data": {"note": self._rng.randint(0, 9)}})]


def _command(database: str, document: dict[str, Any]) -> Command:
    """A command that gives up in time: a workload must never hang on a lock."""
    return Command(database, {**document, "maxTimeMS": _MAX_TIME_MS})
