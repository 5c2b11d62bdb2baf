"""When the shared read of an oplog leaves out what no stream waits for, when it stops doing so, and that it leaves out
nothing else."""

from __future__ import annotations

import random
from typing import Any

import bson

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import OplogFormatError
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.entry_index import index_entries
from tailrace.read.tail.interest import CLUSTER, EVERYONE
from tailrace.read.tail.reader_filter import ReaderFilter
from tailrace.read.tail.segment import Segment, TailPlace
from tailrace.read.tail.shared_window import SharedWindow
from tests.property import random_entries

KEYS = {b"shop.orders", b"shop.items"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fed(one: ReaderFilter, *, used: int, unused: int, keys: set[bytes] | None = None) -> ReaderFilter:
    for number in range(used + unused):
        one.saw(is_used=number < used, keys=KEYS if keys is None else keys)
    return one


def test_a_read_of_which_most_is_used_has_no_filter() -> None:
    one = fed(ReaderFilter(), used=180, unused=20)
    assert not one.is_due
    assert one.open(KEYS) is None


def test_a_read_of_which_much_is_about_nobody_gets_one() -> None:
    one = fed(ReaderFilter(), used=100, unused=100)
    assert one.is_due
    assert one.open(KEYS) is not None
    assert not one.is_due
    assert not one.lacks(b"shop.orders")
    assert one.lacks(b"shop.others")


def test_few_replies_say_nothing() -> None:
    assert not fed(ReaderFilter(), used=0, unused=150).is_due


def test_databases_and_many_collections_cannot_be_named() -> None:
    for keys in (KEYS | {b"shop"}, KEYS | {CLUSTER}, {b"shop.c%d" % number for number in range(65)}, set[bytes]()):
        assert not fed(ReaderFilter(), used=0, unused=200, keys=keys).is_due
    late = fed(ReaderFilter(), used=0, unused=200)  # such a one came since
    assert late.open(KEYS | {b"shop"}) is None
    assert not late.is_due


def test_who_waits_for_something_else_gets_everything_and_each_time_it_lasts_longer() -> None:
    clock = Clock()
    one = ReaderFilter(clock)
    pauses = []
    for _ in range(3):
        begun = clock.now
        while not fed(one, used=0, unused=200).is_due:
            clock.now += 0.25
        pauses.append(clock.now - begun)
        one.open(KEYS)
        one.drop()
        assert one.is_due
        assert one.open(KEYS | {b"shop.others"}) is None
        assert not one.is_due
    assert pauses == [0.0, 1.0, 2.0]


def passes(query: dict[str, Any], raw: bytes) -> bool:
    """Whether the server's answer to the query would have the entry."""
    entry = parse_entry(raw)
    names, operations = query["$or"]
    is_named = entry.namespace in {name.encode() for name in names["ns"]["$in"]}
    return is_named or entry.operation not in operations["op"]["$nin"]


def test_no_entry_about_a_key_is_left_out() -> None:
    rng = random.Random(7)
    keys = {b"shop.orders", b"shop.a.b", b"shop.orders\n", "数据.集合".encode()}
    one = fed(ReaderFilter(), used=0, unused=200, keys=keys)
    query = one.open(keys)
    assert query is not None
    decoded = bson.decode(query)
    kept = left_out = 0
    for number in range(4000):
        raw = random_entries.entry(rng, number + 1)
        try:
            passed = passes(decoded, raw)
        except OplogFormatError:
            continue
        about = index_entries(raw, Chains()).about
        if about is EVERYONE or about & keys:
            assert passed or about is EVERYONE, raw
            kept += 1
        left_out += not passed
    assert kept > 100
    assert left_out > 100


def place(name: str, position: int) -> TailPlace:
    return TailPlace(str(Scope.of_collection("shop", name)).encode(), ClusterTime.of(position, 0), None)


def test_a_window_of_some_keys_takes_nobody_who_would_miss_something() -> None:
    window = SharedWindow(1 << 20)
    window.open(ClusterTime.of(10, 0))
    assert window.join(old := place("orders", 10))
    window.narrow(frozenset(KEYS), ClusterTime.of(20, 0))
    window.promise(ClusterTime.of(25, 0))
    assert not window.join(place("others", 30)), "its entries do not come"
    assert not window.join(place("items", 15)), "what it waits for may have come before it was read"
    assert window.join(place("items", 20))
    window.narrow(None, ClusterTime.of(40, 0))
    assert not window.join(place("others", 30)), "what came up to 40 is not whole"
    assert window.join(place("others", 40))
    raw = bson.encode({"op": "i", "ns": "shop.orders", "o": {}, "ts": ClusterTime.of(41, 0).to_timestamp()})
    after, high_water = ClusterTime.of(40, 0), ClusterTime.of(41, 0)
    assert window.add(Segment(raw, index_entries(raw, Chains()), after, high_water)) == [old]
