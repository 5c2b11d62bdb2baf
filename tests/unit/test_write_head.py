"""What is found in an entry in one go is what a walk over its elements finds, whatever the bytes are.

The property tests' random entries are unlike those of servers, so none of them had taken this path."""

from __future__ import annotations

import datetime
import random
import struct
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core import raw_bson
from tailrace.core.oplog.entry import _read_fields
from tailrace.core.oplog.write_head import fields_of_write, namespace_of_write, time_of_write
from tailrace.errors import OplogFormatError
from tests.property import random_entries

_SESSION = {"lsid": {"id": Binary(bytes(16), 4), "uid": bytes(32)}, "txnNumber": Int64(7)}


def entry(operation: str, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "op": operation,
        "ns": "shop.orders",
        "ui": Binary(bytes(range(16)), 4),
        "o": {"_id": 1, "text": "x" * 20},
        "o2": {"_id": 1},
        "stmtId": 0,
        "ts": Timestamp(8, 3),
        "t": Int64(1),
        "v": Int64(2),
        "wall": datetime.datetime(2026, 1, 1),
    }
    fields.update(changes)
    return bson.encode({name: value for name, value in fields.items() if value is not None})


def walked(raw: bytes, name: bytes, type_: int, start: int) -> bytes | None:
    found = raw_bson.find(raw, name, start)
    return None if found is None or found.type != type_ else raw[found.value_start : found.end]


@pytest.mark.parametrize("session", [{}, _SESSION], ids=["plain", "retryable"])
@pytest.mark.parametrize("operation", ["i", "u", "d"])
def test_a_servers_write_is_known(operation: str, session: dict[str, Any]) -> None:
    for changes in ({}, {"o2": None}, {"stmtId": None}, {"o": {"$v": 2, "diff": {}}}):
        raw = bson.encode({**session, **bson.decode(entry(operation, **changes))})
        for start, buffer in ((0, raw), (7, bytes(7) + raw + raw)):
            assert namespace_of_write(buffer, start) == b"shop.orders"
            assert time_of_write(buffer, start) == struct.pack("<II", 3, 8)


@pytest.mark.parametrize("operation", ["c", "n", "xx", ""])
def test_what_is_no_write_is_left_to_the_walk(operation: str) -> None:
    assert namespace_of_write(entry(operation)) is None
    assert time_of_write(entry(operation)) is None


def test_damaged_and_random_entries_give_what_the_walk_gives_or_nothing() -> None:
    rng = random.Random(12)
    known = 0
    whole = [bson.encode({**session, **bson.decode(entry("i"))}) for session in ({}, _SESSION)]
    for number in range(6000):
        raw = bytearray(rng.choice(whole) if number % 3 else random_entries.entry(rng, number + 1))
        for _ in range(rng.randrange(3) if number % 3 else 0):
            raw[rng.randrange(min(len(raw), 250))] = rng.randrange(256)
        if rng.random() < 0.1:
            del raw[rng.randrange(len(raw)) :]
        buffer = bytes(raw)
        for found, name, type_ in (
            (namespace_of_write(buffer), b"ns", raw_bson.STRING),
            (time_of_write(buffer), b"ts", raw_bson.TIMESTAMP),
        ):
            if found is None:
                continue
            known += 1
            try:
                value = walked(buffer, name, type_, 0)
            except OplogFormatError:
                pytest.fail(f"{buffer!r}: the walk finds it corrupt")
            assert value == (raw_bson.encode_string(found) if name == b"ns" else found), buffer
    assert known > 1000


def _in_order(names: str, **changes: Any) -> bytes:
    fields = {**_SESSION, **bson.decode(entry("u", prevOpTime={"ts": Timestamp(0, 0), "t": Int64(-1)}, **changes))}
    return bson.encode({name: fields[name] for name in names.split()})


#: The fields in the order in which servers write them: an update and a delete of 6.0, a write of no session, and those
#: of 5.0 and 4.4.
_ORDERS = (
    "lsid txnNumber op ns ui o o2 stmtId ts t v wall prevOpTime",
    "lsid txnNumber op ns ui o stmtId ts t v wall prevOpTime",
    "op ns ui o o2 ts t v wall",
    "lsid txnNumber op ns ui o o2 ts t v wall stmtId prevOpTime",
    "lsid txnNumber op ns ui o ts t wall v stmtId prevOpTime",
)


@pytest.mark.parametrize("names", _ORDERS)
def test_all_fields_of_a_servers_write_are_found_at_one_go(names: str) -> None:
    raw = _in_order(names)
    assert fields_of_write(raw) == _read_fields(raw)


def test_all_fields_of_damaged_and_random_entries_are_those_of_the_walk_or_left_to_it() -> None:
    rng = random.Random(13)
    whole = [_in_order(names) for names in _ORDERS]
    known = 0
    for number in range(6000):
        raw = bytearray(rng.choice(whole) if number % 3 else random_entries.entry(rng, number + 1))
        for _ in range(rng.randrange(3) if number % 3 else 0):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.1:
            del raw[rng.randrange(len(raw)) :]
        if rng.random() < 0.1:
            raw += bytes(rng.randrange(3))
        buffer = bytes(raw)
        found = fields_of_write(buffer)
        if found is not None:
            known += 1
            assert found == _read_fields(buffer), buffer
    assert known > 1000
