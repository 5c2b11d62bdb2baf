"""Random transactions as oplog entries: in one entry, in chains, prepared, of retryable writes; some are odd."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tailrace.core import raw_bson as rb
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.property import random_entries
from tests.property.random_entries import document, string

NULL_TIME = rb.encode_document(
    rb.encode_element(rb.TIMESTAMP, b"ts", bytes(8)), rb.encode_element(rb.INT64, b"t", b"\xff" * 8)
)
_TRUE = b"\x01"
#: A function that makes an operation.
Make: TypeAlias = Callable[[random.Random], bytes]


def boolean(name: bytes, *, truth: bool = True) -> bytes:
    return rb.encode_element(rb.BOOL, name, _TRUE if truth else b"\0")


def odd_operation(rng: random.Random) -> bytes:
    """One operation of an ``applyOps``; one in thirty is of a kind that the kernel makes no events of."""
    return rng.choice((_command, _command, _no_op, _bent))(rng) if rng.random() < 0.03 else operation(rng)


def operation(rng: random.Random) -> bytes:
    """One write as in an ``applyOps``, of a few collections."""
    name = rng.choice((b"i", b"i", b"u", b"d"))
    namespace = b"shop.orders" if rng.random() < 0.7 else rng.choice((b"shop.items", b"other.orders", b"admin.x"))
    parts = [string(b"op", name), string(b"ns", namespace)]
    parts.append(rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()))
    parts += random_entries.body(rng, name)
    if rng.random() < 0.05:
        parts.append(boolean(b"fromMigrate", truth=rng.random() < 0.8))
    return rb.encode_document(*parts)


def _command(rng: random.Random) -> bytes:
    names = ((b"create", b"orders"), (b"createIndexes", b"orders"), (b"drop", b"orders"), (b"create", b"items"))
    o = rb.encode_document(string(*rng.choice(names)))
    uuid = rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value())
    namespace = rng.choice((b"shop.$cmd", b"shop.$cmd", b"other.$cmd", b"admin.$cmd"))
    return rb.encode_document(string(b"op", b"c"), string(b"ns", namespace), uuid, document(b"o", o))


def _no_op(rng: random.Random) -> bytes:
    return rb.encode_document(string(b"op", b"n"), string(b"ns", b"shop.orders"), document(b"o", rb.EMPTY_DOCUMENT))


def _bent(rng: random.Random) -> bytes:
    """An operation that may lack a field or have one of another type, of a random kind and namespace."""
    return random_entries.entry(rng, ClusterTime.of(1, 1))


def apply_ops(operations: Sequence[bytes], *more: bytes) -> bytes:
    array = rb.encode_document(*(document(b"%d" % place, one) for place, one in enumerate(operations)))
    return rb.encode_document(rb.encode_element(rb.ARRAY, b"applyOps", array), *more)


def op_time(time: ClusterTime) -> bytes:
    return rb.encode_document(
        rb.encode_element(rb.TIMESTAMP, b"ts", time.to_bytes_le()),
        rb.encode_element(rb.INT64, b"t", rb.encode_int64(1)),
    )


def command_entry(
    o: bytes, time: ClusterTime, *more: bytes, previous: ClusterTime | None = None, session: bool = True
) -> bytes:
    """A command entry of a session, ``previous`` the entry before it in its transaction."""
    identifier = rb.encode_element(rb.BINARY, b"id", random_entries.uuid_value())
    header = [document(b"lsid", rb.encode_document(identifier))] if session else []
    header += [rb.encode_element(rb.INT64, b"txnNumber", rb.encode_int64(7))] if session else []
    linked = [document(b"prevOpTime", NULL_TIME if previous is None else op_time(previous))] if session else []
    return rb.encode_document(
        *header,
        string(b"op", b"c"),
        string(b"ns", b"admin.$cmd"),
        document(b"o", o),
        rb.encode_element(rb.TIMESTAMP, b"ts", time.to_bytes_le()),
        rb.encode_element(rb.DATE, b"wall", rb.encode_int64(1_700_000_000_000)),
        *linked,
        *more,
    )


def transaction(rng: random.Random, times: Sequence[ClusterTime], make: Make, major: int) -> list[bytes]:
    """The entries of one transaction at some of ``times`` (at least four), in order, as servers up to the version
    ``major`` write them."""
    kind = rng.choice(("single", "single", "chain", "chain", "prepared", "retryable", "no session", "aborted"))

    def some(count: int) -> list[bytes]:
        return [make(rng) for _ in range(rng.randrange(count))]

    if kind == "single":
        return [command_entry(apply_ops(some(150 if rng.random() < 0.05 else 9)), times[0])]
    if kind == "no session":
        command = () if major >= 7 else (string(b"$db", b"admin"),)
        return [command_entry(apply_ops(some(5), *command), times[0], session=False)]
    if kind == "retryable":
        multi = (rb.encode_element(rb.INT32, b"multiOpType", rb.encode_int32(1)),) if major >= 8 else ()
        first = command_entry(apply_ops(some(5)), times[0], *multi)
        return [first, command_entry(apply_ops(some(5)), times[1], *multi, previous=times[0])]
    length = rng.randrange(1, 4)
    entries = []
    previous: ClusterTime | None = None
    for place in range(length):
        is_last = place == length - 1
        mark = boolean(b"prepare") if kind == "prepared" and is_last else boolean(b"partialTxn")
        if kind == "chain" and is_last:
            mark = rb.encode_element(rb.INT64, b"count", rb.encode_int64(99))
        entries.append(command_entry(apply_ops(some(6), mark), times[place], previous=previous))
        previous = times[place]
    if kind == "prepared":
        commit = rb.encode_document(rb.encode_element(rb.INT32, b"commitTransaction", rb.encode_int32(1)))
        entries.append(command_entry(commit, times[length], previous=previous))
    if kind == "aborted":
        abort = rb.encode_document(rb.encode_element(rb.INT32, b"abortTransaction", rb.encode_int32(1)))
        entries.append(command_entry(abort, times[length], previous=previous))
    return entries


def oplog(rng: random.Random, transactions: int, make: Make, *, major: int = 6) -> list[bytes]:
    """Entries of several transactions, mixed with each other and with plain writes, in the order of their times, as
    servers up to the version ``major`` write them."""
    count = 8 * transactions
    times = [ClusterTime.of(2, number + 1) for number in range(count)]
    free = set(times)
    found: list[tuple[ClusterTime, bytes]] = []
    for _ in range(transactions):
        chosen = sorted(rng.sample(sorted(free), 4))
        entries = transaction(rng, chosen, make, major)
        found += zip(chosen, entries, strict=False)
        free -= set(chosen[: len(entries)])
    plain = [time for time in sorted(free) if rng.random() < 0.7]
    found += ((time, write(rng, time)) for time in plain)
    return [entry for _, entry in sorted(found)]


def write(rng: random.Random, time: ClusterTime) -> bytes:
    """A plain write whose fields are named like those of transactions."""
    names = (b"applyOps", b"lsid", b"prevOpTime", b"partialTxn", b"commitTransaction", b"txnNumber")
    body = random_entries.fields(rng, names=names)
    inserted = rb.encode_document(random_entries.key(rng)[4:-1] + body[4:-1])
    return rb.encode_document(
        string(b"op", b"i"),
        string(b"ns", rng.choice((b"shop.orders", b"shop.items"))),
        rb.encode_element(rb.BINARY, b"ui", random_entries.uuid_value()),
        document(b"o", inserted),
        rb.encode_element(rb.TIMESTAMP, b"ts", time.to_bytes_le()),
        rb.encode_element(rb.DATE, b"wall", rb.encode_int64(5)),
    )
