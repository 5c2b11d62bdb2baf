"""Random oplog entries as raw bytes: all operations, namespaces of every kind, diffs, modifiers, odd or no fields."""

from __future__ import annotations

import random
import struct

from tailrace.core import raw_bson as rb
from tests.property import random_values
from tests.property.random_values import Value

NAMESPACES = (
    "shop.orders", "shop.orders", "shop.orders", "shop.items", "shop.a.b", "shop.system.views", "shop.system.js",
    "shop.system.buckets.x", "shop.systemXviews", "shop.systems", "shop.$cmd", "shop.$weird", "shop.", "shop", "",
    "shop2.orders", "sho.orders", "admin.x", "config.x", "local.x", "adminx.x", "admi.x", "configs.x", ".x",
    "数据.集合", "shop.orders\n", "shop.name\n", "other.orders", "shop.a.system.b",
)  # fmt: skip
UUID = bytes(range(16))


def string(name: bytes, text: bytes) -> bytes:
    return rb.encode_element(rb.STRING, name, rb.encode_string(text))


def document(name: bytes, value: bytes) -> bytes:
    return rb.encode_element(rb.OBJECT, name, value)


def usual_id(rng: random.Random, depth: int = 0) -> Value:
    """A value of the types that nearly all ids have."""
    if rng.random() < 0.1 and depth < 3:
        return rb.OBJECT, nested_id(rng, depth + 1)
    return rng.choice(
        (
            (rb.OBJECT_ID, rng.randbytes(12)),
            random_values.int32(rng),
            random_values.int64(rng),
            random_values.double(rng),
            (rb.STRING, rb.encode_string(random_values.text(rng))),
            random_values.binary(rng),
            (rb.DATE, struct.pack("<q", random_values.integer(rng))),
            (rb.BOOL, bytes([rng.randrange(2)])),
            (rb.NULL, b""),
            (rb.TIMESTAMP, rng.randbytes(8)),
        )
    )


def nested_id(rng: random.Random, depth: int) -> bytes:
    parts = []
    for number in range(rng.randrange(4)):
        type_, data = usual_id(rng, depth)
        if rng.random() < 0.2 and depth < 3:
            type_, data = rb.ARRAY, nested_id(rng, depth + 1)
        parts.append(rb.encode_element(type_, b"n%d" % number, data))
    return rb.encode_document(*parts)


def key(rng: random.Random) -> bytes:
    """A document key: ``_id``, sometimes after the fields of a shard key."""
    identifier = rb.encode_element(*(_named(b"_id", usual_id(rng) if rng.random() < 0.8 else random_values.value(rng))))
    if rng.random() < 0.9:
        return rb.encode_document(identifier)
    return rb.encode_document(rb.encode_element(*_named(b"shard.key", usual_id(rng))), identifier)


def _named(name: bytes, value: Value) -> tuple[int, bytes, bytes]:
    return value[0], name, value[1]


def fields(rng: random.Random, *, names: tuple[bytes, ...] = ()) -> bytes:
    """A document of a few random fields, of which some have the names given."""
    parts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(names) if names and rng.random() < 0.3 else _field_name(rng)
        parts.append(rb.encode_element(*_named(name, random_values.value(rng, 2))))
    return rb.encode_document(*parts)


def _field_name(rng: random.Random) -> bytes:
    return rng.choice((b"a", b"b.c", b"0", b"12", b"longer name", "né".encode(), b"s", b"u", b"_id", b"$x"))


def document_diff(rng: random.Random, depth: int = 0) -> bytes:
    parts = []
    if rng.random() < 0.4:
        names = [_field_name(rng) for _ in range(rng.randint(1, 3))]
        parts.append(document(b"d", rb.encode_document(*(rb.encode_element(rb.BOOL, n, b"\0") for n in names))))
    if rng.random() < 0.5:
        parts.append(document(b"u", fields(rng)))
    if rng.random() < 0.4:
        parts.append(document(b"i", fields(rng)))
    if depth < 5:
        for _ in range(rng.choice((0, 1, 1, 2)) if depth else rng.choice((0, 0, 1, 3))):
            nested = document_diff(rng, depth + 1) if rng.random() < 0.6 else array_diff(rng, depth + 1)
            parts.append(document(b"s" + _field_name(rng), nested))
    if rng.random() < 0.03:
        rng.shuffle(parts)
    if rng.random() < 0.02:
        parts.append(rb.encode_element(rb.INT32, rng.choice((b"x", b"l", b"s", b"u")), rb.encode_int32(1)))
    return (
        rb.encode_document(*parts) if parts or rng.random() < 0.1 else rb.encode_document(document(b"u", fields(rng)))
    )


def array_diff(rng: random.Random, depth: int) -> bytes:
    parts = [rb.encode_element(rb.BOOL, b"a", b"\x01")]
    if rng.random() < 0.3:
        parts.append(rb.encode_element(rb.INT32, b"l", rb.encode_int32(rng.randrange(9))))
    index = 0
    for _ in range(rng.randrange(4)):
        index += rng.choice((1, 1, 5, 100))
        if rng.random() < 0.6 or depth > 4:
            parts.append(rb.encode_element(*_named(b"u%d" % index, random_values.value(rng, 2))))
        else:
            nested = document_diff(rng, depth + 1) if rng.random() < 0.7 else array_diff(rng, depth + 1)
            parts.append(document(b"s%d" % index, nested))
    if rng.random() < 0.03:
        parts.append(rb.encode_element(rb.INT32, rng.choice((b"u", b"u01", b"ux", b"l", b"q1")), rb.encode_int32(1)))
    return rb.encode_document(*parts)


def update(rng: random.Random) -> bytes:
    """The ``o`` of an update entry: a delta, the old modifiers, a replacement, or something odd."""
    kind = rng.randrange(20)
    version = rng.choice((2, 2, 2, 1, 3, -2)) if kind == 19 else 2
    if kind < 10 or kind == 19:
        parts = [rb.encode_element(rb.INT32, b"$v", rb.encode_int32(version)), document(b"diff", document_diff(rng))]
        if rng.random() < 0.05:
            parts.insert(rng.randrange(3), rb.encode_element(*_named(b"_id", random_values.int32(rng))))
        return rb.encode_document(*parts)
    if kind < 14:
        parts = [rb.encode_element(rb.INT32, b"$v", rb.encode_int32(1))] if rng.random() < 0.7 else []
        if rng.random() < 0.6:
            parts.append(document(b"$set", fields(rng)))
        if rng.random() < 0.6:
            parts.append(document(b"$unset", fields(rng)))
        return rb.encode_document(*parts)
    if kind < 18:
        identifier = rb.encode_element(*_named(b"_id", usual_id(rng)))
        body = rb.encode_document(identifier)[4:-1] + fields(rng, names=(b"$v", b"diff"))[4:-1]
        return rb.encode_document(body)
    return fields(rng, names=(b"$v", b"diff", b"$set", b"$unset", b"_id"))


def _command(rng: random.Random) -> bytes:
    name = rng.choice((b"orders", b"items", b"system.views"))
    return rng.choice(
        (
            rb.encode_document(string(b"create", name)),
            rb.encode_document(string(b"startIndexBuild", name)),
            rb.encode_document(rb.encode_element(rb.INT32, b"commitTransaction", rb.encode_int32(2))),
        )
    )


def definition(rng: random.Random) -> list[bytes]:
    """The ``o`` of a command that defines a collection, and for some its ``o2``; sometimes odd."""
    name = rng.choice(
        (b"orders", b"items", b"orders", b"items") * 4 + (b"system.views", b"system.x", b"$x", b"", b"a.b", b"o\n")
    )
    chance = rng.random()
    index = [
        rb.encode_element(rb.INT32, b"v", rb.encode_int32(2)),
        document(b"key", fields(rng)),
        string(b"name", name),
    ]
    if chance < 0.3:
        parts = [string(b"drop", name)]
    elif chance < 0.45:
        parts = [string(b"create", name), *([document(b"idIndex", rb.encode_document(*index))] * rng.randrange(2))]
    elif chance < 0.6:
        parts = [string(b"createIndexes", name), *index]
    elif chance < 0.65:
        array = rb.encode_document(document(b"0", rb.encode_document(*index)))
        build = rb.encode_element(rb.BINARY, b"indexBuildUUID", uuid_value())
        parts = [string(b"commitIndexBuild", name), build, rb.encode_element(rb.ARRAY, b"indexes", array)]
    elif chance < 0.85:
        other = rng.choice((b"shop.orders", b"shop.items", b"other.items", b"shop.a.b", b"shop", b"shop."))
        parts = [string(b"renameCollection", b"shop." + name), string(b"to", other)]
        parts.insert(1, rb.encode_element(rb.BOOL, b"stayTemp", b"\0"))
        parts.append(rb.encode_element(rb.BINARY, b"dropTarget", uuid_value()))
    elif chance < 0.95:
        parts = [string(rng.choice((b"dropIndexes", b"collMod")), name), string(b"index", b"total_1")]
    else:
        odd = (
            b"dropDatabase",
            b"createIndexez",
            b"renameCollectiox",
            b"commitIndexBuilx",
            b"creat",
            b"drop",
            b"collMot",
        )
        parts = [rb.encode_element(*_named(rng.choice(odd), random_values.value(rng)))]
    if rng.random() < 0.2:
        parts += [fields(rng, names=(b"to", b"indexes", b"drop", b"stayTemp", b"create"))[4:-1]]
    if rng.random() < 0.05:
        rng.shuffle(parts)
    second = [document(b"o2", rb.encode_document(*index))] if rng.random() < 0.5 else []
    return [document(b"o", rb.encode_document(*parts)), *second]


def definition_entry(rng: random.Random, time: int) -> bytes:
    """An entry of such a command, with the cluster time given, sometimes damaged in meaning."""
    namespace = rng.choice((b"shop.$cmd",) * 8 + (b"other.$cmd", b"admin.$cmd", b"shop.orders", b"shop"))
    parts = [string(b"op", b"c"), string(b"ns", namespace), rb.encode_element(rb.BINARY, b"ui", uuid_value())]
    parts += definition(rng)
    parts.append(rb.encode_element(rb.TIMESTAMP, b"ts", time.to_bytes(8, "little")))
    parts.append(rb.encode_element(rb.DATE, b"wall", rb.encode_int64(random_values.integer(rng))))
    return rb.encode_document(*_bent(rng, parts))


def entry(rng: random.Random, time: int) -> bytes:
    """One entry with the cluster time given (packed), fields in one of the servers' orders, sometimes damaged in
    meaning: a field missing, twice, or of another type."""
    operation = rng.choice((b"i", b"i", b"u", b"u", b"u", b"d", b"d", rng.choice((b"n", b"c", b"x", b"ii", b""))))
    namespace = rng.choice(NAMESPACES).encode() if rng.random() < 0.4 else b"shop.orders"
    parts = []
    if rng.random() < 0.5:
        parts.append(document(b"lsid", rb.encode_document(rb.encode_element(rb.BINARY, b"id", uuid_value()))))
        parts.append(rb.encode_element(rb.INT64, b"txnNumber", rb.encode_int64(rng.randrange(99))))
    parts += [string(b"op", operation), string(b"ns", namespace)]
    parts.append(rb.encode_element(rb.BINARY, b"ui", uuid_value()))
    parts += body(rng, operation)
    if rng.random() < 0.1:
        parts.append(rb.encode_element(rb.BOOL, b"fromMigrate", bytes([rng.choice((0, 1, 1, 2))])))
    parts.append(rb.encode_element(rb.TIMESTAMP, b"ts", time.to_bytes(8, "little")))
    parts.append(rb.encode_element(rb.DATE, b"wall", rb.encode_int64(random_values.integer(rng))))
    if rng.random() < 0.5:
        null = rb.encode_element(rb.TIMESTAMP, b"ts", bytes(8)) + rb.encode_element(rb.INT64, b"t", b"\xff" * 8)
        parts.append(document(b"prevOpTime", rb.encode_document(null)))
    return rb.encode_document(*_bent(rng, parts))


def uuid_value() -> bytes:
    return struct.pack("<iB", 16, 4) + UUID


def body(rng: random.Random, operation: bytes) -> list[bytes]:
    if operation == b"i":
        identifier = key(rng)
        inserted = rb.encode_document(identifier[4:-1] + random_values.document(rng)[4:-1])
        return [document(b"o", inserted)] + ([document(b"o2", identifier)] if rng.random() < 0.7 else [])
    if operation == b"u":
        return [document(b"o", update(rng)), document(b"o2", key(rng))]
    if operation == b"d":
        return [document(b"o", key(rng))]
    if operation == b"c":
        return [document(b"o", _command(rng))]
    return [document(b"o", rb.encode_document(string(b"msg", b"periodic noop")))]


def _bent(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    """The parts; one time in a hundred with one of them missing, repeated, of another type or in another place."""
    chance = rng.random()
    place = rng.randrange(len(parts))
    if chance < 0.01:
        return parts[:place] + parts[place + 1 :]
    if chance < 0.02:
        return [*parts, parts[place]]
    if chance < 0.03:
        name = parts[place][1 : parts[place].index(0, 1)]
        return [*parts[:place], rb.encode_element(rb.INT32, name, rb.encode_int32(1)), *parts[place + 1 :]]
    if chance < 0.05:
        return [*parts[:place], rb.encode_element(*_named(_field_name(rng), random_values.value(rng))), *parts[place:]]
    return parts
