"""Views of values that Python has no value for: strings and names that are not UTF-8, symbols, undefined, NaNs.

A view ended at a string that is not UTF-8, and symbols became strings on the way. Earlier tests had only values that
Python has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.consumer import MongoLeaseStore
from tailrace.consumer.views import View, ViewKeeper
from tailrace.core import raw_bson as rb
from tailrace.embedded import ReplicaSet
from tests.consumer.shops import until

pytestmark = pytest.mark.mongod

BAD = rb.encode_string(b"M\xfcller")
NAN = struct.pack("<Q", 0x7FF800000000BEEF)
#: By name: a type and the bytes of a value.
VALUES = {
    "a string that is not UTF-8": (rb.STRING, BAD),
    "a symbol": (rb.SYMBOL, rb.encode_string("s")),
    "a NaN with a payload": (rb.DOUBLE, NAN),
    "a name that is not UTF-8": (rb.OBJECT, rb.encode_document(rb.encode_element(rb.STRING, b"n\xff", BAD))),
    "one name twice": (rb.OBJECT, rb.encode_document(*[rb.encode_element(rb.INT32, b"n", b"\1\0\0\0")] * 2)),
    "an array": (rb.ARRAY, rb.encode_document(rb.encode_element(rb.STRING, b"0", BAD))),
    "a regular expression": (rb.REGEX, b"\xfe\0i\0"),
    "code": (rb.CODE, BAD),
}
#: Values that can name a source.
KEYS = {name: value for name, value in VALUES.items() if value[0] not in (rb.ARRAY, rb.REGEX)}


class Shop:
    """Orders that carry what their customer is called; each customer has another of ``VALUES``."""

    def __init__(self, client: Any, name: str) -> None:
        self.client = client
        raw: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument)
        self.database = client.get_database(name)
        self.orders = self.database.get_collection("orders", codec_options=raw)
        self.customers = self.database.get_collection("customers", codec_options=raw)
        fields = {"customer.name": "name", "customer.in": "account.owner"}
        self.view = View(self.orders, self.customers, "customer_id", fields)

    def fill(self) -> None:
        for key in KEYS.values():
            for collection, field in ((self.customers, b"_id"), (self.orders, b"customer_id")):
                collection.insert_one(RawBSONDocument(rb.encode_document(rb.encode_element(key[0], field, key[1]))))
        for number, (type_, data) in enumerate(VALUES.values()):
            value = rb.encode_element(type_, b"name", data)
            owner = rb.encode_element(type_, b"owner", data)
            identity = rb.encode_element(rb.INT32, b"_id", rb.encode_int32(number))
            nested = rb.encode_element(rb.OBJECT, b"account", rb.encode_document(owner))
            self.customers.insert_one(RawBSONDocument(rb.encode_document(identity, value, nested)))
            named = rb.encode_element(rb.INT64, b"customer_id", rb.encode_int64(number))
            self.orders.insert_one(RawBSONDocument(rb.encode_document(identity, named)))

    def carried(self) -> list[Any]:
        """What the orders carry, as bytes."""
        found = []
        for number in range(len(VALUES)):
            order = self.orders.find_one({"_id": number})
            customer = rb.find(order.raw, b"customer")
            if customer is not None:
                found.append(rb.value(order.raw, customer))
        return found


WANTED = [
    rb.encode_document(rb.encode_element(type_, b"in", data), rb.encode_element(type_, b"name", data))
    for type_, data in VALUES.values()
]


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Shop]:
    name = f"raw_{abs(hash(request.node.nodeid)) % 10**9}"
    with tailrace.connect(replica_set.uri) as client:
        yield Shop(client, name)
        client.drop_database(name)


def sorted_fields(document: bytes) -> bytes:
    return rb.encode_document(*sorted(document[one.start : one.end] for one in rb.elements(document)))


def is_kept(shop: Shop) -> bool:
    return [sorted_fields(one) for one in shop.carried()] == [sorted_fields(one) for one in WANTED]


@pytest.mark.parametrize("first", ["before", "after"])
def test_a_keeper_carries_every_value_byte_for_byte(shop: Shop, first: str) -> None:
    """Documents that exist when the view starts, and later ones; both as source and as target."""
    if first == "before":
        shop.fill()
    keeper = ViewKeeper(shop.client, shop.view, store=MongoLeaseStore(shop.database.leases))
    with keeper:
        if first == "after":
            shop.fill()
        until(lambda: is_kept(shop) or keeper.join(0))
        for number in range(len(VALUES)):
            shop.customers.update_one({"_id": number}, {"$set": {"name": "plain"}})
        until(lambda: all(b"plain" in one for one in shop.carried()) or keeper.join(0))
        assert len(shop.carried()) == len(VALUES)
        until(lambda: not list(keeper.upkeep.verify(grace_s=0)) or keeper.join(0))


def test_a_rebuild_and_a_verification_read_the_bytes(shop: Shop) -> None:
    shop.fill()
    upkeep = ViewKeeper(shop.client, shop.view, store=MongoLeaseStore(shop.database.leases)).upkeep
    shown = {repr(one.wanted) for one in upkeep.verify(grace_s=0)}
    assert "'M\\\\xfcller'" in shown, shown
    assert upkeep.rebuild() == len(VALUES)
    assert is_kept(shop)
    assert list(upkeep.verify(grace_s=0)) == []
    shop.orders.update_one({"_id": 1}, {"$set": {"customer.name": "s"}})  # a string in place of a symbol
    assert [one.path for one in upkeep.verify(grace_s=0)] == ["customer.name"]
