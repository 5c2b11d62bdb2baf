"""Random ``$match`` queries on change events. Most paths and values come from given events, so that they hit."""

from __future__ import annotations

import random

from tailrace.core.expression.match.traverse import values_at
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.value import Value
from tests.differential import expression_values as values

#: Paths that the rewrite rules apply to, and some that they must leave alone.
PATHS = (
    "operationType", "operationType", "operationType", "ns", "ns.db", "ns.coll", "ns.coll", "ns.coll", "ns.x",
    "documentKey", "documentKey._id", "documentKey._id", "documentKey.x", "fullDocument", "fullDocument.a",
    "fullDocument._id", "to", "to.db", "to.coll", "updateDescription", "updateDescription.updatedFields",
    "updateDescription.updatedFields.a", "updateDescription.updatedFields.a.b", "updateDescription.removedFields",
    "updateDescription.truncatedArrays.field", "rawUpdateDescription.diff", "clusterTime", "wallTime", "lsid",
    "lsid.id", "txnNumber", "fullDocumentBeforeChange", "fullDocumentBeforeChange.a", "_id", "_id._data",
    "collectionUUID", "operationDescription", "nope", "operationType.x", "clusterTime.x", "",
)  # fmt: skip
OPERATION_TYPES = (
    "insert", "update", "replace", "delete", "drop", "rename", "dropDatabase", "invalidate", "create", "modify",
    "createIndexes", "dropIndexes", "zzz",
)  # fmt: skip
_COMPARISONS = (b"$gt", b"$gte", b"$lt", b"$lte")
_EXPRESSIONS = (b"$eq", b"$eq", b"$ne", b"$gt", b"$lte")


class EventPredicates:
    """``events`` are raw events of the stream that the queries are for. Queries are documents' BSON."""

    def __init__(self, rng: random.Random, events: list[bytes]) -> None:
        self._rng = rng
        self._events = events
        self._nested = False

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self._rng.random() < share

    def query(self, depth: int = 2) -> bytes:
        fields: list[tuple[bytes, Value]] = []
        for _ in range(self._rng.choice((1, 1, 1, 2))):
            roll = self._rng.random()
            if depth > 0 and roll < 0.3:
                nested, self._nested = self._nested, True
                clauses = [(v.OBJECT, self.query(depth - 1)) for _ in range(self._rng.choice((1, 2, 2, 3)))]
                self._nested = nested
                fields.append((self._rng.choice((b"$and", b"$or", b"$or", b"$nor")), v.array_of(clauses)))
            elif roll < 0.36:
                fields.append((b"$expr", self._expression()))
            else:
                path = self._path()
                # What the server makes of these two beside others depends on how much of the query it can rewrite.
                while self._nested and path.partition(b".")[0] in (b"lsid", b"txnNumber"):
                    path = self._path()
                fields.append((path, self._predicate(path, depth)))
        return v.object_of(list(dict(fields).items()))[1]

    def _path(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.6 or not self._events:
            return rng.choice(PATHS).encode()
        names: list[bytes] = []
        document: bytes | None = rng.choice(self._events)
        while document is not None and (fields := v.fields_of(document)):
            name, kind, data = rng.choice(fields)
            if b"." in name or name[:1] == b"$":
                break
            names.append(name)
            document = data if kind == v.OBJECT and rng.random() < 0.7 else None
        return b".".join(names) or b"operationType"

    def _value(self, path: bytes) -> Value:
        rng = self._rng
        if path == b"operationType" and rng.random() < 0.9:
            return v.string(rng.choice(OPERATION_TYPES))
        for _ in range(4):
            if not self._events:
                break
            found = rng.choice(values_at(rng.choice(self._events), tuple(path.split(b".")), 0, True) or [None])
            if found is not None and found[0] not in (v.UNDEFINED, v.REGEX):
                return found
        return rng.choice((v.NULL, values.any_value(rng), v.string("c0")))

    def _predicate(self, path: bytes, depth: int) -> Value:
        rng = self._rng
        roll = rng.random()
        if roll < 0.3:
            return v.object_of([(b"$eq", self._value(path))])
        if roll < 0.5:
            wanted = v.array_of([self._value(path) for _ in range(rng.randint(0, 3))])
            return v.object_of([(rng.choice((b"$in", b"$in", b"$nin")), wanted)])
        if roll < 0.6:
            return v.object_of([(b"$ne", self._value(path))])
        if roll < 0.7:
            return v.object_of([(rng.choice(_COMPARISONS), self._value(path))])
        if roll < 0.8:
            return v.object_of([(b"$exists", v.boolean(rng.random() < 0.5))])
        if roll < 0.87:
            value = self._value(path)
            text = v.bytes_of(value)[: rng.randint(0, 3)] if value[0] == v.STRING else b"c"
            start = b"^" if rng.random() < 0.5 else b""
            return v.object_of([(b"$regex", v.string_of(start + _plain(text)))])
        if roll < 0.92:
            return v.object_of([(b"$type", v.string(rng.choice(("string", "object", "int", "null", "array", "date"))))])
        if roll < 0.94:
            return v.object_of([(b"$size", v.int32(rng.randint(0, 3)))])
        if depth <= 0 or roll < 0.96:
            return v.object_of([(b"$elemMatch", v.object_of([(b"$exists", v.TRUE)]))])
        return v.object_of([(b"$not", self._predicate(path, depth - 1))])

    def _expression(self) -> Value:
        """A comparison, which cannot fail, perhaps among others."""
        path = self._rng.choice(
            ("operationType", "ns.coll", "documentKey._id", "fullDocument.a", "clusterTime", "nope")
        )
        literal = v.object_of([(b"$literal", self._value(path.encode()))])
        one = v.object_of([(self._rng.choice(_EXPRESSIONS), v.array_of([v.string(f"${path}"), literal]))])
        if self._rng.random() < 0.3:
            return v.object_of([(self._rng.choice((b"$or", b"$and")), v.array_of([one, self._expression()]))])
        return one


def _plain(text: bytes) -> bytes:
    """The part of a text that may stand unescaped in a pattern."""
    return bytes(byte for byte in text if chr(byte).isascii() and chr(byte).isalnum())
