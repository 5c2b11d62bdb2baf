"""A target follows its source: equal at each stop, after kills anywhere, after elections, with lanes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.act.sync.deltas import DeltaEncoder
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.act.sync.writer import ChangesWriter, TargetMismatchError
from tailrace.core import raw_bson
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tests.amounts import amount
from tests.server_in_use import IN_BETWEEN
from tests.sync.following import begun, following, in_any_order, now, unequal
from tests.sync.programs import program
from tests.sync.workload import Kinds, writing

pytestmark = [pytest.mark.mongod, pytest.mark.used_servers]
Start = Callable[..., ReplicaSet]
OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
VERSIONS = ["6.0.27", *OLDER, pytest.param("7.0.28", marks=[pytest.mark.slow, pytest.mark.wine])]


def equal(source: ReplicaSet, target: ReplicaSet, settings: SyncSettings, **options: Any) -> None:
    assert unequal(source.uri, target.uri, settings, **options) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_after_writes_of_every_kind_it_is_equal_at_each_stop(version: str, start_replica_set: Start) -> None:
    source, target = start_replica_set(version=version), start_replica_set(version=version)
    settings = SyncSettings(name="every kind")
    begun(source.uri, target.uri, settings)
    kinds = Kinds(series=False, capped=True)
    with (
        writing(source.uri, 7, version, kinds=kinds) as writes,
        following(source.uri, target.uri, settings) as follower,
    ):
        for _ in range(3):
            writes.run(60)
            follower.run_until(now(source.uri))
            assert follower.is_consistent
            equal(source, target, settings)
        writes.clear()
        follower.run_until(now(source.uri))
        equal(source, target, settings)


@pytest.mark.slow
@pytest.mark.wine
@pytest.mark.parametrize(
    ("older", "newer"),
    [("4.4.2", "6.0.27"), pytest.param("5.0.4", "6.0.27", marks=pytest.mark.slow), ("6.0.27", "7.0.28")],
)
def test_a_newer_target_holds_the_same_documents(older: str, newer: str, start_replica_set: Start) -> None:
    source, target = start_replica_set(version=older), start_replica_set(version=newer)
    settings = SyncSettings(name="upgrade")
    begun(source.uri, target.uri, settings)
    kinds = Kinds(series=False, capped=False, columns=False)
    with writing(source.uri, 3, older, kinds=kinds) as writes, following(source.uri, target.uri, settings) as follower:
        writes.run(150)
        follower.run_until(now(source.uri))
    equal(source, target, settings, known=in_any_order)


def killed(source: ReplicaSet, target: ReplicaSet, times: int, seed: int, lanes: int = 1) -> None:
    """Kill a follower at random moments, while others write."""
    name = "killed"
    settings = SyncSettings(name=name, lanes=lanes, lease_s=2)
    begun(source.uri, target.uri, settings)
    moments = random.Random(seed)
    kinds = Kinds(series=False, capped=False)
    with writing(source.uri, seed, "6.0.27", kinds=kinds) as writes:
        with writes.running(pause_s=0.2):
            for _ in range(times):
                process = program("follow", source.uri, target.uri, name, lanes, 2)
                time.sleep(2 + moments.random() * 3)
                assert process.poll() is None, "it ended by itself"
                process.kill()
                process.wait()
        # A busy machine may hold a process up for longer than a lease of two seconds.
        with following(source.uri, target.uri, replace(settings, lease_s=30)) as follower:
            follower.run_until(now(source.uri))
    equal(source, target, settings)


def test_killed_at_random_moments_it_goes_on_and_is_equal(start_replica_set: Start) -> None:
    killed(start_replica_set(), start_replica_set(), 3, 11)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
def test_killed_very_often_it_goes_on_and_is_equal(lanes: int, start_replica_set: Start) -> None:
    killed(start_replica_set(), start_replica_set(), 40, 12, lanes)


def test_while_the_targets_primary_steps_down_again_and_again(
    start_replica_set: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a transaction, which is then gone. An earlier version left it to chance what an election hit,
    and the source's writers went on as long as that took: ten times as long on a busy machine."""
    source, target = start_replica_set(), start_replica_set(members=3)
    settings = SyncSettings(name="elections", lease_s=60)
    begun(source.uri, target.uri, settings)
    whole, due = ChangesWriter.write, list[int]()

    def write(writer: ChangesWriter, session: Any, documents: Any, *rest: Any, **options: Any) -> None:
        whole(writer, session, documents, *rest, **options)
        if due:
            due.pop()
            target.step_down()

    monkeypatch.setattr(ChangesWriter, "write", write)
    kinds = Kinds(series=False, capped=False, large=False)
    with (
        writing(source.uri, 5, "6.0.27", kinds=kinds) as writes,
        following(source.uri, target.uri, settings) as follower,
    ):
        for number in range(amount(1, 3)):
            due.append(number)
            writes.run(40)
            follower.run_until(now(source.uri))
            assert not due
    equal(source, target, settings)


def test_what_is_being_filled_outlives_an_election(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    """A server drops temporary collections when it becomes primary. The target did so with one that the source was
    still filling, and later writes to it began without the earlier ones. In the campaigns no election had hit a long
    ``$out``."""
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client:
        operation = {"op": "c", "ns": "shop.$cmd", "o": {"create": "tmp.agg_out.1f", "temp": True}}
        client.admin.command({"applyOps": [operation]})
        client.shop["tmp.agg_out.1f"].insert_one({"_id": 1})
        with following(source.uri, target.uri, settings) as follower:
            follower.run_until(now(source.uri))
        target.restart(0)
        client.shop["tmp.agg_out.1f"].insert_one({"_id": 2})
        client.shop["tmp.agg_out.1f"].rename("orders")
        with following(source.uri, target.uri, settings) as follower:
            follower.run_until(now(source.uri))
    equal(source, target, settings)


def small_cache(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A target whose transactions may hold three documents. Gives the sizes of those that were too large."""
    whole, refused = ChangesWriter.write, list[int]()

    def write(writer: ChangesWriter, session: Any, documents: Any, *rest: Any, **options: Any) -> None:
        whole(writer, session, documents, *rest, **options)
        if len(documents) > 3:
            refused.append(len(documents))
            raise OperationFailure("transaction is too large and will not fit in the storage engine cache", 388)

    monkeypatch.setattr(ChangesWriter, "write", write)
    return refused


def test_what_does_not_fit_the_cache_of_the_target_is_written_in_parts(
    replica_set: ReplicaSet, start_replica_set: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a small cache ended the transaction of a whole segment, and so the sync. Tests had segments that
    fit; it happened in the campaign on a busy machine, where nothing was written out in time."""
    source, target, refused = replica_set, start_replica_set(), small_cache(monkeypatch)
    settings = SyncSettings(name="halves", selection=Selection.of(["halves.*"]))
    with MongoClient[Any](source.uri) as client:
        begun(source.uri, target.uri, settings)
        client.halves.c.insert_many([{"_id": number, "n": 0} for number in range(20)])
        with following(source.uri, target.uri, settings) as follower:
            client.halves.c.update_many({}, {"$inc": {"n": 1}})
            client.halves.c.delete_one({"_id": 3})
            client.halves.c.insert_one({"_id": 30})
            follower.run_until(now(source.uri))
            assert follower.is_consistent
            written = list(client.halves.c.find().sort("_id"))
        client.drop_database("halves")
    assert refused
    with MongoClient[Any](target.uri) as client:
        assert list(client.halves.c.find().sort("_id")) == written


@pytest.mark.parametrize("is_unique", [False, True])
def test_what_does_not_fit_the_cache_is_written_in_parts_by_each_lane(
    replica_set: ReplicaSet, start_replica_set: Start, monkeypatch: pytest.MonkeyPatch, is_unique: bool
) -> None:
    """This ended the sync, since only a single lane could divide a segment into parts. With unique values that go from
    lane to lane no order of parts is right, and it still ends."""
    source, target = replica_set, start_replica_set()
    settings = SyncSettings(name="lanes", lanes=2, selection=Selection.of(["laned.*"]))
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        try:
            begun(source.uri, target.uri, settings)
            if is_unique:
                client.laned.c.create_index("u", unique=True)
            client.laned.c.insert_many([{"_id": number, "u": number} for number in range(20)])
            with following(source.uri, target.uri, settings) as follower:
                follower.run_until(now(source.uri))
                before, refused = follower.time, small_cache(monkeypatch)
                client.laned.c.update_many({}, {"$inc": {"n": 1}})
                client.laned.c.delete_one({"_id": 3})
                if is_unique:
                    client.laned.c.update_one({"_id": 0}, {"$set": {"u": -1}})
                    for number in (*range(1, 3), *range(4, 20)):
                        client.laned.c.update_one({"_id": number}, {"$set": {"u": number - 1 - (number == 4)}})
                    client.laned.c.update_one({"_id": 0}, {"$set": {"u": 19}})
                    with pytest.raises(SinkError, match="too large"):
                        follower.run_until(now(source.uri))
                    assert follower.time == before
                else:
                    follower.run_until(now(source.uri))
                    assert follower.is_consistent
                    assert list(there.laned.c.find().sort("_id")) == list(client.laned.c.find().sort("_id"))
                assert max(refused) < 20 or is_unique
                assert refused
        finally:
            client.drop_database("laned")


@pytest.mark.parametrize(("partner", "fits"), [(1, True), (19, False)])
def test_unique_values_change_places_in_a_segment_that_does_not_fit(
    replica_set: ReplicaSet, start_replica_set: Start, monkeypatch: pytest.MonkeyPatch, partner: int, fits: bool
) -> None:
    """A refusal by a unique index came out as the writer's internal error, and the sync ended as if with a bug. Within
    a part the documents are written anew; between two parts it is refused, and the position stays. No test had an index
    there."""
    source, target = replica_set, start_replica_set()
    settings = SyncSettings(name="places", selection=Selection.of(["places.*"]))
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        try:
            begun(source.uri, target.uri, settings)
            client.places.c.create_index("u", unique=True)
            client.places.c.insert_many([{"_id": number, "u": number} for number in range(20)])
            with following(source.uri, target.uri, settings) as follower:
                follower.run_until(now(source.uri))
                before = follower.time
                refused = small_cache(monkeypatch)
                # Parts are made in the order of the first changes.
                client.places.c.update_many({}, {"$inc": {"n": 1}})
                client.places.c.update_one({"_id": 0}, {"$set": {"u": -1}})
                client.places.c.update_one({"_id": partner}, {"$set": {"u": 0}})
                client.places.c.update_one({"_id": 0}, {"$set": {"u": partner}})
                if fits:
                    follower.run_until(now(source.uri))
                    assert list(there.places.c.find().sort("_id")) == list(client.places.c.find().sort("_id"))
                else:
                    with pytest.raises(SinkError, match="too large") as told:
                        follower.run_until(now(source.uri))
                    assert told.value.code == 388
                    assert follower.time == before
            assert refused
        finally:
            client.drop_database("places")


def test_lanes_give_the_same_as_one(start_replica_set: Start) -> None:
    source, target = start_replica_set(), start_replica_set()
    settings = SyncSettings(name="lanes", lanes=3)
    begun(source.uri, target.uri, settings)
    kinds = Kinds(series=False)
    with (
        writing(source.uri, 9, "6.0.27", kinds=kinds) as writes,
        following(source.uri, target.uri, settings) as follower,
    ):
        for _ in range(2):
            writes.run(80)
            follower.run_until(now(source.uri))
            assert follower.is_consistent
            equal(source, target, settings)


@pytest.fixture
def pair(start_replica_set: Start) -> tuple[ReplicaSet, ReplicaSet, SyncSettings]:
    source, target = start_replica_set(), start_replica_set()
    settings = SyncSettings()
    begun(source.uri, target.uri, settings)
    return source, target, settings


def test_bytes_that_a_plain_write_would_change_stay(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    source, target, settings = pair
    big = Binary(b"x" * ((16 << 20) - 100))
    raw = (
        bson.encode({"_id": 9, "a": 1, "b": "text"}).replace(b"text", b"\xff\xfe\xfd!").replace(b"\x02b\0", b"\x02a\0")
    )
    with MongoClient[Any](source.uri) as client, following(source.uri, target.uri, settings) as follower:
        shop = client.shop.orders
        shop.insert_one({"_id": 1, "n": 1})
        shop.insert_one({"_id": "$set", "n": 1})
        shop.insert_one({"_id": None})
        shop.insert_one({"_id": {"a": 1, "b": [1, 2]}})
        shop.insert_one({"_id": 7, "big": big})
        shop.insert_one({"_id": {"r": DBRef("c", 1)}, "r": DBRef("c", 1)})
        odd = {"x": {"$a": 1}}  # from an update alone
        shop.update_one({"_id": {"$eq": odd}}, {"$set": {"n": 1}}, upsert=True)
        client.shop.command({"insert": "orders", "documents": [RawBSONDocument(raw)]})
        client.shop.command({"insert": "a..b", "documents": [{"_id": 1}]})
        client.shop.command({"create": "a..c", "capped": True, "size": 4096})
        follower.run_until(now(source.uri))
        equal(source, target, settings)
        shop.delete_one({"_id": 1})
        shop.insert_one({"_id": Int64(1), "n": 2})
        shop.update_one(
            {"_id": "$set"}, [{"$replaceWith": {"$literal": {"_id": "$set", "$x": 1, "t": Timestamp(0, 0)}}}]
        )
        shop.update_one({"_id": None}, {"$set": {"t": Timestamp(0, 0), "u": 1}})
        shop.update_one({"_id": {"a": 1, "b": [1, 2]}}, {"$set": {"c": 1}})
        shop.update_one({"_id": 7}, {"$set": {"n": 1}})
        shop.delete_one({"_id": 9})
        shop.update_one({"_id": {"$eq": odd}}, {"$inc": {"n": 1}})
        shop.replace_one({"_id": {"$eq": {"x": {"$b": 1}}}}, {"n": 1}, upsert=True)
        client.shop.command({"update": "a..b", "updates": [{"q": {"_id": 1}, "u": {"$set": {"n": 2}}}]})
        client.shop.command({"insert": "a..c", "documents": [{"_id": 7}]})
        client.shop.command({"update": "a..c", "updates": [{"q": {"_id": 7}, "u": {"$set": {"n": 2}}}]})
        with client.start_session() as session, session.start_transaction():
            for number in (2.0, 2, Int64(2)):
                shop.insert_one({"_id": number, "first": True}, session=session)
                shop.delete_one({"_id": 2}, session=session)
            shop.insert_one({"_id": 2.0, "last": True}, session=session)
            shop.update_one({"_id": 2}, {"$set": {"again": 1}}, session=session)
        follower.run_until(now(source.uri))
        equal(source, target, settings)


def test_unique_values_that_no_driver_can_read(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    """The server's error has the value in it, which ended the sync with a traceback: found by ``make kills``."""
    source, target, settings = pair
    late = [DatetimeMS(10**16 + number) for number in range(3)]
    with MongoClient[Any](source.uri) as client, following(source.uri, target.uri, settings) as follower:
        client.shop.orders.create_index("d", unique=True)
        client.shop.orders.insert_many([{"_id": number, "d": late[number]} for number in range(2)])
        follower.run_until(now(source.uri))
        for key, value in ((0, 2), (1, 0), (0, 1)):
            client.shop.orders.update_one({"_id": key}, {"$set": {"d": late[value]}})
        follower.run_until(now(source.uri))
        equal(source, target, settings)


def test_an_id_that_a_collation_takes_for_a_later_one(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    """The copy has "a", which the source got after "A" was gone: the index of ``_id`` refused "A", and the sync ended.
    No workload had changed the case of a letter in an ``_id``."""
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        shop = client.shop
        orders = shop.create_collection("orders", collation={"locale": "en", "strength": 2})
        with following(source.uri, target.uri, settings) as follower:
            follower.run_until(now(source.uri))
        there.shop.orders.insert_many([{"_id": "a", "n": 2}, {"_id": "b"}])  # as a copy would
        orders.insert_many([{"_id": "A"}, {"_id": "b"}])
        shop.create_collection("between")
        orders.delete_one({"_id": "A"})
        orders.insert_one({"_id": "a", "n": 1})
        orders.update_one({"_id": "a"}, {"$inc": {"n": 1}})
        hold = now(source.uri)
        there[settings.state_db].syncs.update_one({}, {"$set": {"hold": hold.to_timestamp()}})
        with following(source.uri, target.uri, settings) as follower:
            follower.run_until(hold)
    equal(source, target, settings)


def test_values_of_a_unique_index_go_around(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, following(source.uri, target.uri, settings) as follower:
        seats = client.shop.seats
        seats.create_index("number", unique=True)
        seats.insert_many([{"_id": one, "number": one} for one in range(20)])
        follower.run_until(now(source.uri))
        with client.start_session() as session, session.start_transaction():
            seats.update_many({}, {"$inc": {"number": 100}}, session=session)
            for one in range(20):
                seats.update_one({"_id": one}, {"$set": {"number": (one + 1) % 20}}, session=session)
        seats.delete_one({"_id": 3})
        seats.insert_one({"_id": 33, "number": 4})
        follower.run_until(now(source.uri))
        equal(source, target, settings)


def test_deltas_that_the_target_refuses_are_written_as_whole_documents(
    pair: tuple[ReplicaSet, ReplicaSet, SyncSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, settings = pair
    refused = bson.encode({"$rename": {"n": "_id"}})
    updates = DeltaEncoder.updates
    asked = 0

    def wrong(self: DeltaEncoder, changes: Any) -> list[bytes] | None:
        nonlocal asked
        asked += 1
        made = updates(self, changes)
        return made if made is None else [raw_bson.encode_element(raw_bson.OBJECT, b"u", refused)]

    monkeypatch.setattr(DeltaEncoder, "updates", wrong)
    with MongoClient[Any](source.uri) as client, following(source.uri, target.uri, settings) as follower:
        client.shop.orders.insert_many([{"_id": one, "n": 1} for one in range(5)])
        client.shop.others.insert_one({"_id": 1, "n": 1})
        follower.run_until(now(source.uri))
        client.shop.orders.update_many({}, {"$inc": {"n": 1}})
        client.shop.others.update_one({}, {"$inc": {"n": 1}})
        follower.run_until(now(source.uri))
        assert asked
        equal(source, target, settings)


def test_small_changes_of_large_documents_are_few_in_a_transaction(
    pair: tuple[ReplicaSet, ReplicaSet, SyncSettings],
) -> None:
    """The target's cache has to hold what a transaction writes: whole documents, however small the changes are."""
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        state = SyncState(there, settings)
        with following(source.uri, target.uri, settings) as follower:
            client.shop.large.insert_many([{"_id": one, "pad": b"x" * (6 << 20), "n": 0} for one in range(6)])
            client.shop.small.insert_many([{"_id": one, "n": 0} for one in range(6)])
            follower.run_until(now(source.uri))
        batches = []
        for name in ("small", "large"):
            for one in range(6):
                client.shop[name].update_one({"_id": one}, {"$inc": {"n": 1}})
            before = state.read()
            with following(source.uri, target.uri, settings) as follower:
                follower.run_until(now(source.uri))
            after = state.read()
            assert before is not None
            assert after is not None
            batches.append(after.batch - before.batch)
            assert there.shop[name].count_documents({"n": 1}) == 6
        assert batches == [1, 2]


def test_a_target_that_somebody_else_wrote_to_is_not_written_on(
    pair: tuple[ReplicaSet, ReplicaSet, SyncSettings],
) -> None:
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        client.shop.orders.insert_one({"_id": 1})
        with following(source.uri, target.uri, settings) as follower:
            before = follower.run_until(now(source.uri))
            there.shop.orders.delete_one({"_id": 1})
            client.shop.orders.replace_one({"_id": 1}, {"n": 2})
            with pytest.raises(TargetMismatchError, match=r"shop\.orders"):
                follower.run_until(now(source.uri))
        found = SyncState(there, settings).read()
        assert found is not None
        assert found.time >= before
        assert there.shop.orders.count_documents({}) == 0


def test_what_is_renamed_and_what_is_left_out(start_replica_set: Start) -> None:
    source, target = start_replica_set(), start_replica_set()
    settings = SyncSettings(
        selection=Selection(("shop.*", "blog.posts")),
        excluded=Selection(("shop.private*",)),
        renames={"shop": "store", "blog.posts": "blog.articles"},
    )
    begun(source.uri, target.uri, settings)
    with MongoClient[Any](source.uri) as client, following(source.uri, target.uri, settings) as follower:
        client.shop.orders.insert_one({"_id": 1})
        client.shop.private_notes.insert_one({"_id": 1})
        client.blog.posts.insert_one({"_id": 1})
        client.blog.drafts.insert_one({"_id": 1})
        client.shop.create_collection("open", viewOn="orders", pipeline=[{"$match": {"open": True}}])
        client.shop.orders.rename("sold")
        client.shop.sold.create_index("n")
        client.shop.gone.insert_one({"_id": 1})
        client.shop.gone.rename("private_gone")
        follower.run_until(now(source.uri))
        equal(source, target, settings)
        with MongoClient[Any](target.uri) as there:
            assert sorted(there.store.list_collection_names()) == ["open", "sold", "system.views"]
            assert there.blog.list_collection_names() == ["articles"]


def test_each_position_is_known_with_the_targets_time(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        with following(source.uri, target.uri, settings) as follower:
            for number in range(5):
                client.shop.orders.insert_one({"_id": number})
                follower.run_until(now(source.uri))
        found = SyncState(there, settings).read()
        assert found is not None
        assert found.commits[-1].time == found.time
        assert len(found.commits) >= 5
        last = [one.at for one in found.commits][-1]
        command = {"find": "orders", "readConcern": {"level": "snapshot", "atClusterTime": last.to_timestamp()}}
        assert len(there.shop.command(command)["cursor"]["firstBatch"]) == 5


def test_a_position_before_what_lanes_have_written_is_none_to_compare_at(
    pair: tuple[ReplicaSet, ReplicaSet, SyncSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes are cut off in the middle of a segment, and the next owner makes shorter segments."""
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        client.shop.orders.insert_one({"_id": 0})
        with following(source.uri, target.uri, settings) as follower:
            before = follower.run_until(now(source.uri))
        for number in range(1, 6):
            client.shop.orders.insert_one({"_id": number})
        goal = now(source.uri)
        there.tailrace_sync.syncs.update_one({}, {"$set": {"hold": goal.to_timestamp()}})
        for name in ("_FIRST", "_MOST"):
            monkeypatch.setattr(f"tailrace.act.sync.follower.{name}", 1)
        with following(source.uri, target.uri, settings) as follower:
            follower.run_until(goal)
        found = SyncState(there, settings).read()
    assert found is not None
    assert found.batch > 5
    assert [one.time for one in found.commits if before < one.time < goal] == []
    assert found.commits[-1].time >= goal


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN])
def test_a_document_of_a_capped_collection_with_the_name_of_an_updates_version(
    start_replica_set: Start, version: str
) -> None:
    """5.0.4 takes ``$v`` for its own: found by ``make kills``. It is refused there, with a hint."""
    source, target, settings = *(start_replica_set(version=version) for _ in range(2)), SyncSettings()
    begun(source.uri, target.uri, settings)
    with MongoClient[Any](source.uri) as client, following(source.uri, target.uri, settings) as follower:
        client.shop.create_collection("ring", capped=True, size=100_000)
        client.shop.command({"insert": "ring", "documents": [{"_id": 1, "$v": {"a": 1}, "n": 1}]})
        client.shop.ring.update_one({"_id": 1}, {"$inc": {"n": 10}})
        if version.startswith("5."):
            with pytest.raises(SinkError, match="leave its collection out"):
                follower.run_until(now(source.uri))
            return
        follower.run_until(now(source.uri))
        equal(source, target, settings)


def test_a_document_that_no_client_may_write_is_refused(pair: tuple[ReplicaSet, ReplicaSet, SyncSettings]) -> None:
    """``applyOps`` writes an ``_id`` that an insert must not have."""
    source, target, settings = pair
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        client.shop.orders.insert_one({"_id": 1})
        odd = {"op": "i", "ns": "shop.orders", "o": {"_id": {"b": 1, "$a": 1}}}
        client.admin.command({"applyOps": [odd]})
        with following(source.uri, target.uri, settings) as follower, pytest.raises(SinkError, match="from a client"):
            follower.run_until(now(source.uri))
        assert there.shop.orders.count_documents({}) <= 1
