"""The shared window by itself: who gets what, what is dropped when there is no room, and that each stream gets its
entries once, in whatever order the reader, fast streams and slow streams use it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import bson
import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, OperationFailure

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.request import OplogBatch
from tailrace.read.source.batch import entry_time
from tailrace.read.tail.chains import Chains
from tailrace.read.tail.entry_index import index_entries
from tailrace.read.tail.interest import CLUSTER, key_of
from tailrace.read.tail.segment import Segment, TailPlace
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.read.tail.shared_window import SharedWindow
from tests.amounts import amount
from tests.golden.recording import load
from tests.property import random_transactions

START = ClusterTime.of(10, 0)
A_MEGABYTE = 1 << 20


def time_of(number: int) -> ClusterTime:
    return ClusterTime.of(10, number)


def entry(number: int, namespace: str = "shop.orders", size: int = 10) -> bytes:
    document = {"_id": number, "text": "x" * size}
    return bson.encode({"op": "i", "ns": namespace, "o": document, "ts": time_of(number).to_timestamp()})


def segment(entries: Sequence[bytes], after: ClusterTime, chains: Chains | None = None) -> Segment:
    raw = b"".join(entries)
    return Segment(raw, index_entries(raw, chains or Chains()), after, entry_time(entries[-1]))


def opened(bytes_max: int = A_MEGABYTE) -> SharedWindow:
    window = SharedWindow(bytes_max)
    window.open(START)
    return window


def place(scope: str | None, position: ClusterTime = START) -> TailPlace:
    return TailPlace(key_of(Scope.parse(scope)), position, None)


def taken(window: SharedWindow, of: TailPlace) -> tuple[list[bytes], ClusterTime]:
    batch = window.take(of, A_MEGABYTE).batch(of.key)
    return list(raw_bson.split(batch.raw)), batch.high_water


def test_each_stream_takes_what_it_waits_for_and_nobody_else_hears_of_it() -> None:
    window = opened()
    orders, shop, other, everything = place("shop.orders"), place("shop"), place("other.orders"), place(None)
    for one in (orders, shop, other, everything):
        assert window.join(one)
    entries = [entry(1), entry(2, "shop.items"), entry(3), entry(4, "config.x")]
    assert window.add(segment(entries, START)) == [orders, shop, everything]
    assert taken(window, orders) == ([entries[0], entries[2]], time_of(4))
    assert taken(window, shop) == (entries[:3], time_of(4))
    assert taken(window, everything) == (entries[:3], time_of(4))
    assert taken(window, other) == ([], time_of(4))


def test_a_stream_that_has_something_waiting_is_told_once() -> None:
    window, orders = opened(), place("shop.orders")
    window.join(orders)
    assert window.add(segment([entry(1)], START)) == [orders]
    assert window.add(segment([entry(2)], time_of(1))) == []
    assert taken(window, orders) == ([entry(1), entry(2)], time_of(2))
    assert window.add(segment([entry(3)], time_of(2))) == [orders]


def test_a_stream_joins_in_the_middle_of_a_segment_and_in_the_future() -> None:
    window = opened()
    window.add(segment([entry(1), entry(2), entry(3)], START))
    middle, future = place("shop.orders", time_of(2)), place("shop.orders", time_of(5))
    assert window.join(middle)
    assert window.join(future)
    assert taken(window, middle) == ([entry(3)], time_of(3))
    assert taken(window, future) == ([], time_of(5))
    window.add(segment([entry(4), entry(5), entry(6)], time_of(3)))
    assert taken(window, future) == ([entry(6)], time_of(6))
    assert taken(window, middle) == ([entry(4), entry(5), entry(6)], time_of(6))


def test_a_stream_from_before_the_window_does_not_join() -> None:
    window = opened()
    assert not window.join(place("shop.orders", ClusterTime(START - 1)))
    assert not SharedWindow(A_MEGABYTE).join(place("shop.orders")), "nobody reads"


def test_what_does_not_fit_goes_and_who_has_not_taken_it_falls_out() -> None:
    window = opened(30_000)
    slow, fast = place("shop.orders"), place("shop.orders")
    window.join(slow)
    window.join(fast)
    for number in range(1, 11):
        window.add(segment([entry(number, size=5_000)], time_of(number - 1)))
        assert window.bytes <= 30_000
        assert taken(window, fast)[1] == time_of(number)
    assert (slow.joined, slow.has_fallen, slow.pending, slow.position) == (False, True, [], START)
    assert fast.joined
    assert (window.falls, window.rejoins, window.joined) == (1, 0, 1)
    slow.position = time_of(2)
    assert not window.join(slow), "what it needs has gone"
    slow.position = time_of(9)
    assert window.join(slow)
    assert window.rejoins == 1
    assert taken(window, slow) == ([entry(10, size=5_000)], time_of(10))


def test_a_stream_for_which_nothing_came_stays_whatever_goes() -> None:
    window, quiet = opened(30_000), place("shop.items")
    window.join(quiet)
    for number in range(1, 30):
        window.add(segment([entry(number, size=5_000)], time_of(number - 1)))
    assert quiet.joined
    assert taken(window, quiet) == ([], time_of(29))


def test_a_segment_larger_than_the_window_stays_until_the_next_one_comes() -> None:
    window, orders = opened(1_000), place("shop.orders")
    window.join(orders)
    window.add(segment([entry(1, size=5_000)], START))
    assert taken(window, orders)[0] == [entry(1, size=5_000)]
    window.add(segment([entry(2, size=5_000)], time_of(1)))
    assert len(window.segments) == 1
    assert orders.joined


def test_answers_that_streams_share_are_counted() -> None:
    window = opened()
    places = [place("shop.orders") for _ in range(3)]
    for one in places:
        window.join(one)
    both = [entry(1, size=9_000), entry(2, "shop.items", 9_000)]
    window.add(segment(both, START))
    before = window.bytes
    for one in places:
        found = window.take(one, A_MEGABYTE)
        found.batch(one.key)
        window.count(found.segments)
    assert before + 9_000 < window.bytes < before + 10_000


def test_a_stream_that_waits_for_a_time_is_told_when_it_was_read() -> None:
    window, quiet = opened(), place("shop.items")
    window.join(quiet)
    window.await_time(quiet, time_of(2))
    assert window.add(segment([entry(1)], START)) == []
    assert window.add(segment([entry(2)], time_of(1))) == [quiet]
    assert window.add(segment([entry(3)], time_of(2))) == []
    assert not window.await_time(quiet, time_of(4))
    assert not window.owes(quiet)
    assert window.promise(time_of(4)) == [quiet]
    assert window.owes(quiet)
    assert taken(window, quiet) == ([], time_of(4))
    assert not window.owes(quiet)
    window.promise(time_of(6))
    assert window.await_time(quiet, time_of(5)), "it was read already, and the stream does not know"


def test_an_entry_is_found_by_its_time() -> None:
    window = opened()
    window.add(segment([entry(1), entry(3)], START))
    window.add(segment([entry(4)], time_of(3)))
    assert [window.entry(time_of(number)) for number in range(6)] == [None, entry(1), None, entry(3), entry(4), None]


def test_when_nobody_reads_any_more_everyone_falls_out() -> None:
    window, orders = opened(), place("shop.orders")
    window.join(orders)
    window.add(segment([entry(1)], START))
    assert window.close() == [orders]
    assert (orders.joined, orders.pending, window.bytes, window.joined) == (False, [], 0, 0)
    assert not window.join(orders)


# -- any order ---------------------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """A stream in the simulation: what it was given, and how eager it is."""

    place: TailPlace
    eagerness: float
    given: list[bytes] = field(default_factory=list)
    high_water: ClusterTime = START

    def take(self, window: SharedWindow, oplog: Sequence[bytes], rng: random.Random) -> None:
        if self.place.joined:
            given = window.take(self.place, rng.choice((1, 3_000, A_MEGABYTE))).batch(self.place.key)
            raw, high_water = given.raw, given.high_water
            entries = list(raw_bson.split(raw))
        else:
            following = [one for one in oplog if entry_time(one) > self.place.position]
            entries = following[: rng.randrange(1, 40)]
            high_water = entry_time(entries[-1]) if entries else self.place.position
            self.place.position = high_water
            window.join(self.place)
        assert all(entry_time(one) > self.high_water for one in entries), "given again, or after it was promised"
        assert high_water >= self.high_water
        self.given += entries
        self.high_water = high_water


def _random_oplog(rng: random.Random) -> list[bytes]:
    if rng.random() < 0.2:
        recording = load(rng.choice(("transactions_6.0.27", "ddl_6.0.27", "scopes_6.0.27", "namespaces_5.0.4")))
        return list(recording.oplog)
    return random_transactions.oplog(rng, 40, random_transactions.operation)


@pytest.mark.parametrize("seed", range(amount(12, 40)))
def test_fast_and_slow_streams_get_every_entry_of_theirs_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    oplog = _random_oplog(rng)
    begins = rng.randrange(len(oplog) // 2)
    window = SharedWindow(rng.choice((3_000, 20_000, 200_000)))
    window.open(entry_time(oplog[begins]))
    start = ClusterTime(entry_time(oplog[0]) - 1)
    scopes = ("shop.orders", "shop.items", "shop", "other.orders", "quiet.c", None)
    readers = [_Reader(place(rng.choice(scopes), start), rng.choice((0.02, 0.2, 0.9))) for _ in range(12)]
    for reader in readers:
        reader.high_water = start
    chains, read = Chains(), begins + 1
    while read < len(oplog) or any(reader.high_water < window.high_water for reader in readers):
        if read < len(oplog) and rng.random() < 0.3:
            some = oplog[read : read + rng.randrange(1, 12)]
            window.add(segment(some, window.high_water, chains))
            read += len(some)
            assert window.bytes <= window.bytes_max or len(window.segments) == 1
        for reader in readers:
            if rng.random() < reader.eagerness:
                # Its own read gives what is committed by then: what the shared reader has read, or more.
                reader.take(window, oplog[: max(read, rng.randrange(read, len(oplog) + 1))], rng)
    whole = index_entries(b"".join(oplog), Chains())
    for reader in readers:
        wanted = [oplog[number] for number in whole.select(reader.place.key)]
        assert [one for one in reader.given if one in set(wanted)] == wanted
    assert window.joined <= len(readers)


def test_the_simulation_has_streams_that_fall_and_come_back() -> None:
    """The simulation would show nothing if all streams were always in the window, or never."""
    rng, falls = random.Random(3), 0
    window, chains = opened(10_000), Chains()
    slow = _Reader(place(None), 0.1)
    oplog = [entry(number, size=300) for number in range(1, 400)]
    for number in range(0, len(oplog), 3):
        window.add(segment(oplog[number : number + 3], window.high_water, chains))
        if number % 60 == 0:
            for _ in range(12):
                slow.take(window, oplog[: number + 3], rng)
    falls = window.falls
    assert falls > 3
    assert window.rejoins >= falls - 1
    assert slow.place.key == CLUSTER


class _NotWalked(dict[bytes, dict[TailPlace, None]]):
    """Fails if anything iterates over all streams."""

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("every stream is looked at")

    __iter__ = keys = values = items = _refuse


def test_what_concerns_a_few_streams_costs_nothing_for_the_others() -> None:
    """The number of joined streams was counted again with every reply."""
    shared = SharedTail(MongoClient("mongodb://localhost", connect=False), streams_min=1)
    reader: Any = object()
    shared._reader = reader
    assert shared.begun(reader, START)
    places = [shared.enter(Scope.parse(f"shop.c{number}"), START) for number in range(100)]
    window = shared._window
    window._places = _NotWalked(window._places)
    for number in range(1, 11):
        new = entry(number, f"shop.c{number}")
        assert shared.received(reader, segment([new], time_of(number - 1)))
        batch = shared.wait(places[number], 0.0)
        assert batch is not None
        assert batch.raw == new
        assert shared.promised(reader, time_of(number))
        assert shared.poll(places[0]) == OplogBatch(b"", time_of(number))
    shared.leave(places[0])
    assert window.joined == 99


def test_what_the_reader_fails_with_is_told_once_and_after_what_came_before() -> None:
    """Streams that share a read waited as long as it failed, and raised nothing."""
    shared = SharedTail(MongoClient("mongodb://localhost", connect=False), streams_min=1)
    reader: Any = object()
    shared._reader = reader
    shared.begun(reader, START)
    one, other = (shared.enter(Scope.parse("shop.orders"), START) for _ in range(2))
    shared.received(reader, segment([entry(1)], START))
    first, second = AutoReconnect("the first"), AutoReconnect("the second")
    shared.failed(reader, first)
    assert shared.failure(one) is None, "what came before it is not taken yet"
    for _ in range(2):
        assert shared.wait(one, 0.0, hears=True) is not None
    assert shared.failure(one) is first
    assert shared.failure(one) is None
    shared.failed(reader, second)
    assert shared.failure(one) is second
    shared.failed(reader, first)
    shared.expect(one)
    assert shared.failure(one) is None, "it wants to know what comes of the next try"
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(shared.wait, one, 0.001, hears=True)  # however short: the next try decides
        shared.promised(reader, time_of(2))
        assert waited.result(60) == OplogBatch(b"", time_of(2))
    assert shared.poll(other) is not None
    assert shared.failure(other) is first, "it is over, and the stream was not asked meanwhile"
    assert shared.failure(other) is None
    late = shared.enter(Scope.parse("shop.items"), time_of(1))
    assert shared.failure(late) is None


def test_a_failure_that_is_over_is_told_before_what_came_after_it() -> None:
    """A stream that was not asked while the read failed never learned of it."""
    shared = SharedTail(MongoClient("mongodb://localhost", connect=False), streams_min=1)
    reader: Any = object()
    shared._reader = reader
    shared.begun(reader, START)
    one = shared.enter(Scope.parse("shop.orders"), START)
    first = AutoReconnect("the first")
    for error in (first, AutoReconnect("the second")):
        shared.failed(reader, error)
    shared.received(reader, segment([entry(1)], START))
    assert shared.failure(one) is first, "one that opens the read again would not have met the second"
    shared.expect(one)
    batch = shared.wait(one, 0.0, hears=True)
    assert batch is not None
    assert batch.raw == entry(1)
    shared.failed(reader, first)
    assert shared.failure(one) is first
    shared.failed(reader, first)
    shared.promised(reader, time_of(2))
    assert shared.failure(one) is None, "its next try is one that works"
    assert shared.wait(one, 1e9, hears=True) == OplogBatch(b"", time_of(2)), "a cursor's first reply comes at once"


def test_what_somebody_kills_concerns_those_who_wait_for_it() -> None:
    """A stream that had just been given its event was taken for one about to wait, and ended where PyMongo's is
    resumed: the live test waited for longer than its waits had taken. So was one that had waited in vain and found its
    event at the next call, without a wait, which needs a loaded machine."""
    shared = SharedTail(MongoClient("mongodb://localhost", connect=False), streams_min=1)
    reader: Any = object()
    shared._reader = reader
    shared.begun(reader, START)
    scope = Scope.parse("shop.orders")
    for code, before in ((237, 0), (11601, 237)):
        waits, between, served, idle = (shared.enter(scope, START) for _ in range(4))
        found = shared.enter(Scope.parse("shop.items"), START)
        killed = OperationFailure("operation was interrupted", code)
        for place in (waits, between, served, found):
            place.begin_wait()
            place._waited_from -= 60.0
        between.end_wait(brought=False)  # and comes back in a moment, which is shorter
        served.end_wait(brought=True)  # and is in its program's hands
        found.end_wait(brought=False)
        assert shared.received(reader, segment([entry(before + 1, "shop.items")], time_of(before)))
        batch = shared.poll(found)  # and is given its event by a call that does not wait
        assert batch is not None
        assert batch.raw
        shared.failed(reader, killed)
        shared.promised(reader, time_of(code))
        assert shared.failure(waits) is killed
        assert shared.failure(between) is killed
        assert shared.failure(served) is None
        assert shared.failure(found) is None
        assert shared.failure(idle) is None
