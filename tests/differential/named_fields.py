"""Users' documents whose fields are named like what an oplog entry, a command, an event, a token or our own columns
hold, with values of every type, at every level: nothing may confuse the two.

The same documents each time, as raw BSON, including the types that drivers can no longer write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core import raw_bson as rb
from tests.differential.wire import Wire

OF_ENTRIES: Final = (
    *("ts", "t", "h", "v", "op", "ns", "ui", "o", "o2", "wall", "lsid", "txnNumber", "stmtId", "prevOpTime"),
    *(
        "fromMigrate",
        "multiOpType",
        "needsRetryImage",
        "preImageOpTime",
        "diff",
        "msg",
        "type",
        "i",
        "u",
        "d",
        "s",
        "l",
    ),
)
OF_COMMANDS: Final = (
    *("applyOps", "count", "partialTxn", "prepare", "commitTransaction", "commitTimestamp", "abortTransaction"),
    *("drop", "create", "renameCollection", "to", "stayTemp", "dropTarget", "dropDatabase", "collMod", "createIndexes"),
    *("dropIndexes", "commitIndexBuild", "indexes", "shardCollection", "reshardCollection", "viewOn"),
)
OF_EVENTS: Final = (
    *("operationType", "fullDocument", "fullDocumentBeforeChange", "documentKey", "updateDescription"),
    *("rawUpdateDescription", "updatedFields", "removedFields", "truncatedArrays", "disambiguatedPaths"),
    *("clusterTime", "wallTime", "collectionUUID", "operationDescription", "nsType", "splitEvent", "reshardingUUID"),
    *("db", "coll", "id", "uid", "_data", "_typeBits", "_id", "preImage", "nsUUID", "applyOpsIndex"),
)
OF_COLUMNS: Final = (
    *("event", "token", "operation_type", "cluster_time", "wall_time", "database", "collection", "document_key"),
    *("full_document", "full_document_before_change", "update_description", "transaction_id", "day", "part", "n"),
    *("first", "last", "entries", "events", "bytes", "query", "cursor", "shards", "position", "_batch"),
)
PLAIN_NAMES: Final = (*OF_ENTRIES, *OF_COMMANDS, *OF_EVENTS, *OF_COLUMNS)
#: Servers before 5.0 store no such names at the top of a document.
DOLLAR_NAMES: Final = ("$v", "$set", "$unset", "$ref", "$id", "$clusterTime", "$sortKey")

_LIKE_A_TRANSACTION: Final = bson.encode(
    {"applyOps": [{"op": "d", "ns": "named.c", "o": {"_id": 1}}], "count": Int64(9), "prepare": True, "drop": "c"}
)
_LIKE_A_TOKEN: Final = bson.encode({"_data": "82" + "00" * 20 + "04", "_typeBits": b"\x40"})
#: Values that mean something under one of the names, and one of each type.
VALUES: Final[tuple[tuple[int, bytes], ...]] = (
    (rb.STRING, rb.encode_string("three")),
    (rb.INT32, struct.pack("<i", -(10**9))),
    (rb.BOOL, b"\x01"),
    (rb.BOOL, b"\x00"),
    (rb.INT64, struct.pack("<q", 2**63 - 1)),
    (rb.INT64, struct.pack("<q", -(2**63))),
    (rb.INT32, struct.pack("<i", 1)),
    (rb.DOUBLE, struct.pack("<d", float("nan"))),
    (rb.DOUBLE, struct.pack("<d", float("inf"))),
    (rb.DOUBLE, struct.pack("<d", 1e300)),
    (rb.DECIMAL128, struct.pack("<QQ", 1, (12000) << 49)),
    (rb.OBJECT, _LIKE_A_TRANSACTION),
    (rb.OBJECT, _LIKE_A_TOKEN),
    (rb.OBJECT, rb.EMPTY_DOCUMENT),
    (rb.ARRAY, rb.EMPTY_DOCUMENT),
    (rb.ARRAY, rb.encode_document(rb.encode_element(rb.OBJECT, b"0", _LIKE_A_TRANSACTION))),
    (rb.STRING, rb.encode_string("named.$cmd")),
    (rb.STRING, rb.encode_string("i")),
    (rb.STRING, rb.encode_string("insert")),
    (rb.NULL, b""),
    (rb.UNDEFINED, b""),
    (rb.OBJECT_ID, bytes(range(12))),
    (rb.DATE, struct.pack("<q", -(2**62))),
    (rb.TIMESTAMP, b"\xff" * 8),
    (rb.BINARY, struct.pack("<iB", 16, 4) + bytes(range(16))),
    (rb.REGEX, b"^a\x00i\x00"),
    (rb.DB_POINTER, rb.encode_string("named.c") + bytes(12)),
    (rb.CODE, rb.encode_string("f()")),
    (rb.SYMBOL, rb.encode_string("update")),
    (rb.CODE_WITH_SCOPE, struct.pack("<i", 4 + 8 + 5) + rb.encode_string("f()") + rb.EMPTY_DOCUMENT),
    (rb.MIN_KEY, b""),
    (rb.MAX_KEY, b""),
)
_NOT_IN_KEYS: Final = (rb.ARRAY, rb.REGEX, rb.UNDEFINED)


def names(server: str) -> tuple[str, ...]:
    """The names that this server stores at the top of a document, ``_id`` aside."""
    plain = tuple(name for name in PLAIN_NAMES if name != "_id")
    return plain if server < "5" else (*plain, *DOLLAR_NAMES)


def all_of(server: str, turn: int) -> list[bytes]:
    """An element of each name. Over the turns every name gets every value once."""
    return [
        rb.encode_element(type_, name.encode(), value)
        for index, name in enumerate(names(server))
        for type_, value in (VALUES[(index + turn) % len(VALUES)],)
    ]


def _with_id(number: object, *body: bytes) -> RawBSONDocument:
    return RawBSONDocument(rb.encode_document(bson.encode({"_id": number})[4:-1], *body))


def single_fields(server: str) -> Iterator[RawBSONDocument]:
    """Documents with only one such field: each name with every fourth value, shifted by one for the next name."""
    for turn, name in enumerate(names(server)):
        for index, (type_, value) in enumerate(VALUES[turn % 4 :: 4]):
            yield _with_id(f"{name} {index}", rb.encode_element(type_, name.encode(), value))


def many_fields(server: str) -> Iterator[RawBSONDocument]:
    """Documents with all names at once: at the top, in a document, in an array, in the ``_id``."""
    for turn in range(len(VALUES)):
        whole = all_of(server, turn)
        yield _with_id(f"top {turn}", *whole)
        # Names with a dollar sign are stored below the top since 5.0, and in an _id never.
        inner = rb.encode_document(*whole)
        array = rb.encode_document(*(rb.encode_element(rb.OBJECT, b"%d" % index, inner) for index in range(2)))
        name = names(server)[turn].encode()
        yield _with_id(f"nested {turn}", rb.encode_element(rb.OBJECT, name, inner))
        yield _with_id(f"array {turn}", rb.encode_element(rb.ARRAY, name, array))
        key = rb.encode_document(
            *(rb.encode_element(rb.INT32, name.encode(), rb.encode_int32(turn)) for name in PLAIN_NAMES)
        )
        yield RawBSONDocument(rb.encode_document(rb.encode_element(rb.OBJECT, b"_id", key), *whole))


def keys() -> Iterator[RawBSONDocument]:
    """Documents whose ``_id`` is a document with one such name, of every type that it may have there."""
    for index, name in enumerate(PLAIN_NAMES):
        type_, value = VALUES[index % len(VALUES)]
        if type_ in _NOT_IN_KEYS:
            type_, value = VALUES[0]
        key = rb.encode_document(rb.encode_element(type_, name.encode(), value))
        yield RawBSONDocument(rb.encode_document(rb.encode_element(rb.OBJECT, b"_id", key)))


def lookalikes(server: str) -> Iterator[RawBSONDocument]:
    """Whole documents that look like an entry, a command, an event and a token."""
    time = Timestamp(1, 1)
    entry = {"op": "c", "ns": "admin.$cmd", "ts": time, "t": Int64(1), "v": Int64(2), "wall": 5, "lsid": {"id": 1}}
    command = {"applyOps": [{"op": "i", "ns": "named.c", "o": {"_id": 1}}], "count": Int64(7)}
    event = {"operationType": "invalidate", "clusterTime": time, "ns": {"db": "named", "coll": "c"}}
    whole: list[dict[str, Any]] = [
        {**entry, "o": command, "txnNumber": Int64(1), "prevOpTime": {"ts": time, "t": Int64(1)}},
        {**entry, "op": "n", "o": {"msg": "initiating set"}, "o2": {"shardCollection": "named.c"}},
        {**entry, "op": "u", "o": {"diff": {"u": {"a": 1}}}, "o2": {"_id": 1}, "fromMigrate": True},
        {**command, "partialTxn": True},
        {**command, "prepare": True},
        {"commitTransaction": 1, "commitTimestamp": time},
        {"drop": "c", "dropDatabase": 1, "create": "c", "renameCollection": "named.c", "to": "named.d"},
        {**event, "documentKey": {"_id": 1}, "fullDocument": event, "updateDescription": {"updatedFields": {"a": 1}}},
        {"_data": "8200", "_typeBits": b"\x82", "splitEvent": {"fragment": 1, "of": 2}},
        {"diff": {"u": {"a": 1}, "sa": {"d": {"b": False}}}, "v": 2},
        {"count": "three"},
        {"count": -(10**9)},
    ]
    if server >= "5":
        whole += [{"$v": 2, "diff": {"u": {"a": 1}}}, {"$set": {"a": 1}, "$unset": {"b": 1}}]
    for index, document in enumerate(whole):
        yield _with_id(f"like {index}", bson.encode(document)[4:-1])


def write(wire: Wire, database: str, server: str, collections: Sequence[str] = ("c", "applyOps")) -> int:
    """Insert, update, replace and delete such documents, in and out of transactions; gives the number of events."""
    events = 0
    documents = [*many_fields(server), *keys(), *lookalikes(server)]
    for collection in collections:
        events += insert(wire, database, collection, documents)
        events += _update(wire, database, collection, server)
        replaced = [document for document in lookalikes(server) if not any(name[0] == "$" for name in document)]
        events += _run(
            wire,
            database,
            {
                "update": collection,
                "updates": [
                    {"q": {"_id": f"top {index}"}, "u": _without_id(document)}
                    for index, document in enumerate(replaced)
                ],
            },
        )
        gone = [document["_id"] for document in keys()][::2]
        events += _run(
            wire,
            database,
            {"delete": collection, "deletes": [{"q": {"_id": {"$eq": key}}, "limit": 1} for key in gone]},
        )
    events += insert(wire, database, collections[0], list(single_fields(server)))
    return events + _transact(wire, database, collections[0], server)


def insert(wire: Wire, database: str, collection: str, documents: Sequence[RawBSONDocument]) -> int:
    """Insert the documents, a few hundred at a time."""
    written = 0
    for start in range(0, len(documents), 200):
        written += _run(wire, database, {"insert": collection, "documents": list(documents[start : start + 200])})
    return written


def _without_id(document: RawBSONDocument) -> RawBSONDocument:
    raw = bytes(document.raw)
    return RawBSONDocument(rb.encode_document(*(raw[e.start : e.end] for e in rb.elements(raw) if e.name != b"_id")))


def _update(wire: Wire, database: str, collection: str, server: str) -> int:
    """Each plain name is set, set inside another, and removed; logged as differences where the server can."""
    updates: list[dict[str, Any]] = []
    for index, name in enumerate(name for name in PLAIN_NAMES if name != "_id"):
        turn = index % len(VALUES)
        type_, value = VALUES[(index * 7 + 3) % len(VALUES)]
        literal = RawBSONDocument(rb.encode_document(rb.encode_element(type_, name.encode(), value)))
        updates.append({"q": {"_id": f"top {turn}"}, "u": {"$set": literal}})
        outer = names(server)[turn]
        if not outer.startswith("$"):
            dotted = rb.encode_document(rb.encode_element(type_, f"{outer}.{name}".encode(), value))
            updates.append({"q": {"_id": f"nested {turn}"}, "u": {"$set": RawBSONDocument(dotted)}})
            updates.append({"q": {"_id": f"array {turn}"}, "u": {"$unset": {f"{outer}.1.{name}": ""}}})
        if index % 3 == 0:
            updates.append({"q": {"_id": f"top {turn}"}, "u": {"$unset": {name: ""}}})
            plain = {"o": {"op": index, "applyOps": [index]}, "u": {"u": index}, "i": [{"i": index}], "pad": "p" * 300}
            updates.append({"q": {"_id": "diffs"}, "u": [{"$set": plain}], "upsert": True})
    return _run(wire, database, {"update": collection, "updates": updates})


def _transact(wire: Wire, database: str, collection: str, server: str) -> int:
    """One transaction of inserts, updates and a delete of such documents."""
    session = wire.run("admin", {"startSession": 1})["id"]
    shared = {"lsid": session, "txnNumber": Int64(1), "autocommit": False}
    documents = [
        RawBSONDocument(rb.encode_document(bson.encode({"_id": f"txn {index}"})[4:-1], bytes(one.raw)[4:-1]))
        for index, one in enumerate(map(_without_id, lookalikes(server)))
    ]
    inserts = {"insert": collection, "documents": documents, "startTransaction": True}
    done = _run(wire, database, inserts, **shared)
    sets = [{"q": {"_id": f"txn {index}"}, "u": {"$set": {"count": "four", "o.prepare": True}}} for index in (3, 4, 5)]
    done += _run(wire, database, {"update": collection, "updates": sets}, **shared)
    done += _run(wire, database, {"delete": collection, "deletes": [{"q": {"_id": "txn 6"}, "limit": 1}]}, **shared)
    wire.run("admin", {"commitTransaction": 1, "writeConcern": {"w": "majority"}, **shared})
    return done


def _run(wire: Wire, database: str, command: dict[str, Any], **more: Any) -> int:
    """How many documents a command changed, all of them as asked."""
    reply = wire.run(database, {**command, **more})
    assert "writeErrors" not in reply, bson.decode(reply["writeErrors"][0].raw)
    return int(reply["nModified"]) + len(reply.get("upserted", ())) if "nModified" in reply else int(reply["n"])
