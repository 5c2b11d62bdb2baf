"""TargetDefinitions of every kind, carried out in order; and again, after a process died right after one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from tailrace.act.sync.definitions import TargetDefinitions
from tailrace.act.sync.folded_catalog import Definition
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncState
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tests.lending import Lender
from tests.sync.equality import held
from tests.sync.following import begun, following, now, unequal

pytestmark = pytest.mark.mongod
OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
VERSIONS = ["6.0.27", *OLDER, pytest.param("7.0.28", marks=[pytest.mark.slow, pytest.mark.wine])]
Client = MongoClient[Any]


def create(client: Client, name: str) -> None:
    d = client[name]
    d.create_collection("capped", capped=True, size=8192, max=5)
    d.capped.insert_many([{"_id": one} for one in range(9)])
    d.create_collection("collated", collation={"locale": "de", "strength": 1})
    d.collated.insert_one({"_id": "ä"})
    d.create_collection("checked", validator={"n": {"$gt": 0}}, validationLevel="moderate")
    d.command({"insert": "checked", "documents": [{"_id": 1, "n": -1}], "bypassDocumentValidation": True})
    with suppress(OperationFailure):
        d.create_collection("clustered", clusteredIndex={"key": {"_id": 1}, "unique": True}, expireAfterSeconds=10**6)
        d.create_collection("images", changeStreamPreAndPostImages={"enabled": True})


def in_transaction(client: Client, name: str) -> None:
    d = client[name]
    d.there.insert_one({"_id": 1})
    with client.start_session() as session, session.start_transaction():
        d.there.insert_one({"_id": 2}, session=session)
        d.create_collection("made", session=session)
        d.made.create_index("n", session=session)
        d.made.insert_one({"_id": 1, "n": 1}, session=session)
        d.there.update_one({"_id": 1}, {"$set": {"n": 1}}, session=session)


def drop_and_make_again(client: Client, name: str) -> None:
    d = client[name]
    for turn in range(3):
        d.a.insert_many([{"_id": one, "turn": turn} for one in range(turn + 1)])
        d.command({"createIndexes": "a", "indexes": [{"key": {"n": 1.0, "m": -1}, "name": "n_m"}]})
        if turn < 2:
            d.a.drop()
    d.b.insert_one({"_id": 1})
    client.drop_database(name)
    d.b.insert_one({"_id": 2})


def names_go_around(client: Client, name: str) -> None:
    d = client[name]
    for one in ("a", "b", "c"):
        d[one].insert_one({"_id": one})
        d[one].create_index("n")
    for before, after in (("a", "x"), ("b", "a"), ("x", "b")):
        d[before].rename(after)
        d[after].insert_one({"_id": f"{before} {after}"})
    d.c.rename("a", dropTarget=True)
    d.a.insert_one({"_id": "last"})
    client.admin.command({"renameCollection": f"{name}.a", "to": f"{name}_other.a"})
    client[f"{name}_other"].a.rename("z")
    client.drop_database(f"{name}_other")


def out(client: Client, name: str) -> None:
    d = client[name]
    d.a.insert_many([{"_id": one, "n": one} for one in range(5)])
    d.kept.create_index("n")
    for turn in range(2):
        d.a.aggregate([{"$set": {"turn": turn}}, {"$out": "kept"}])
        d.a.aggregate([{"$set": {"turn": turn}}, {"$merge": "merged"}])


def convert(client: Client, name: str) -> None:
    d = client[name]
    d.a.insert_many([{"_id": one, "n": one} for one in range(5)])
    d.a.create_index("n")
    d.command("convertToCapped", "a", size=8192)
    d.a.insert_many([{"_id": one, "n": one} for one in range(5, 9)])
    d.a.update_one({"_id": 7}, {"$set": {"n": 1}})


def indexes(client: Client, name: str) -> None:
    d = client[name]
    d.a.insert_many([{"_id": one, "n": one, "at": [one, one], "t": "text"} for one in range(20)])
    d.a.create_index("n", unique=True)
    d.a.create_index([("n", -1)], sparse=True, hidden=True, name="descending")
    d.a.create_index([("$**", 1)], wildcardProjection={"n": 0})
    d.a.create_index([("t", "text")], default_language="german")
    d.a.create_index([("at", "2d")], bits=20)
    d.a.create_index([("n", "hashed")])
    d.a.create_index("when", expireAfterSeconds=100)
    d.a.create_index([("n", 1), ("t", 1)], name="partial", partialFilterExpression={"n": {"$gt": 3}})
    d.a.create_index("t", name="collated", collation={"locale": "fr"})
    d.a.drop_index("descending")
    d.a.drop_index("collated")
    d.empty.create_index("n", unique=True)


def options(client: Client, name: str) -> None:
    d = client[name]
    d.a.insert_many([{"_id": one, "n": one} for one in range(5)])
    d.a.create_index("n")
    d.a.create_index("t", expireAfterSeconds=100)
    d.command({"collMod": "a", "validator": {"n": {"$exists": True}}, "validationAction": "warn"})
    d.command({"collMod": "a", "index": {"name": "t_1", "expireAfterSeconds": 200}})
    d.command({"collMod": "a", "index": {"name": "n_1", "hidden": True}})
    with suppress(OperationFailure):
        d.command({"collMod": "a", "index": {"name": "n_1", "prepareUnique": True}})
        d.command({"collMod": "a", "index": {"name": "n_1", "unique": True}})
        d.command({"collMod": "a", "changeStreamPreAndPostImages": {"enabled": True}})
    with suppress(OperationFailure):
        d.command({"collMod": "a", "recordPreImages": True})
    d.command({"collMod": "a", "index": {"name": "n_1", "hidden": False}})


def views(client: Client, name: str) -> None:
    d = client[name]
    d.a.insert_one({"_id": 1})
    d.create_collection("seen", viewOn="a", pipeline=[{"$match": {"n": 1}}])
    d.create_collection("german", viewOn="a", pipeline=[], collation={"locale": "de"})
    d.create_collection("seen again", viewOn="seen", pipeline=[])
    d.command({"collMod": "seen", "viewOn": "b", "pipeline": [{"$limit": 2}]})
    d.drop_collection("seen again")
    client.drop_database(name)
    d.seen.insert_one({"_id": "a collection now"})
    d.create_collection("new", viewOn="seen", pipeline=[])


def series(client: Client, name: str) -> None:
    d = client[name]
    d.a.insert_one({"_id": 1})
    with suppress(OperationFailure):
        d.create_collection("ticks", timeseries={"timeField": "t", "metaField": "m"})
        d.ticks.insert_many([{"t": datetime(2026, 1, 1, 0, one), "m": one % 2, "v": one} for one in range(9)])
        d.ticks.create_index([("m", 1), ("t", 1)])
        d.ticks.insert_one({"t": datetime(2026, 1, 1, 1), "m": 1, "v": 9})


SCRIPTS = [
    create,
    in_transaction,
    drop_and_make_again,
    names_go_around,
    out,
    convert,
    indexes,
    options,
    views,
    series,
]


class DiedError(Exception):
    """The process died."""


@pytest.fixture(scope="module", params=VERSIONS)
def pair(request: pytest.FixtureRequest, lender: Lender) -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
    with lender.lent(request.param) as source, lender.lent(request.param) as target:
        yield source, target


def settings_for(name: str) -> SyncSettings:
    return SyncSettings(selection=Selection((f"{name}.*", f"{name}_other.*")), name=name)


# A process that dies at both places covers each of them; the workloads of test_follower.py cover one that dies at
# neither.
@pytest.mark.parametrize(
    "died",
    [
        "before and after each",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("never", "after each", "before each")),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_definitions_are_carried_out_whenever_a_process_dies(
    script: Callable[[Client, str], None],
    died: str,
    pair: tuple[ReplicaSet, ReplicaSet],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No more than once: what was done before counts, and the rest is done."""
    source, target = pair
    name = f"{script.__name__}_{died.replace(' ', '_')}"
    settings = settings_for(name)
    begun(source.uri, target.uri, settings)
    seen: set[tuple[str, ClusterTime, bytes, bytes]] = set()
    carry_out = TargetDefinitions.carry_out

    def dying(self: TargetDefinitions, definition: Definition, *, consistent: bool) -> Any:
        for place in ("before", "after") if died != "never" else ():
            key = (place, definition.time, definition.name, definition.uuid)
            if place in died and key not in seen:
                seen.add(key)
                if place == "after":
                    carry_out(self, definition, consistent=consistent)
                raise DiedError
        return carry_out(self, definition, consistent=consistent)

    monkeypatch.setattr(TargetDefinitions, "carry_out", dying)
    with MongoClient[Any](source.uri) as client:
        client[name]["first"].insert_one({"_id": 1})
        bring_up(source, target, settings)
        script(client, name)
        bring_up(source, target, settings)
    selected = lambda one: settings.has(one.replace(".system.buckets.", "."))  # noqa: E731
    found = held(target.uri, selected=selected)
    assert {one for one in found if one.startswith(name)}, "the script left something behind"
    assert [one for one in unequal(source.uri, target.uri, settings) if one.startswith(name)] == []
    assert (died == "never") == (not seen)


def bring_up(source: ReplicaSet, target: ReplicaSet, settings: SyncSettings) -> None:
    while True:
        try:
            with following(source.uri, target.uri, settings) as follower:
                follower.run_until(now(source.uri))
                assert follower.is_consistent
                return
        except DiedError:
            continue


def test_what_waits_for_the_copy_is_built_at_its_end(pair: tuple[ReplicaSet, ReplicaSet]) -> None:
    """A unique index does not stop a copy that is newer in places, and nothing expires."""
    source, target = pair
    settings = settings_for("waiting")
    with MongoClient[Any](source.uri) as client, MongoClient[Any](target.uri) as there:
        begun(source.uri, target.uri, settings, hold=ClusterTime(int(now(source.uri)) + (600 << 32)))
        client.waiting.a.insert_many([{"_id": one, "n": one} for one in range(5)])
        client.waiting.a.create_index("n", unique=True)
        client.waiting.a.create_index("t", expireAfterSeconds=100)
        goal = now(source.uri)
        with following(source.uri, target.uri, settings) as follower:
            while follower.time < goal:
                window = follower._oplogs.window(follower.time, at_once=True, at_least=goal)
                assert window is not None
                follower._write(window)
            assert not follower.is_consistent
            assert set(there.waiting.a.index_information()) == {"_id_", "t_1"}
            assert there.waiting.a.index_information()["t_1"]["expireAfterSeconds"] == 2**31 - 1
            client.waiting.a.update_one({"_id": 1}, {"$set": {"n": 100}})
            follower._ownership.run(lambda session: None, sets={"hold": goal.to_timestamp()})
            follower._load()
            follower.run_until(now(source.uri))
            assert follower.is_consistent
        assert there.waiting.a.index_information()["n_1"]["unique"]
        assert [one["_id"]["name"] for one in SyncState(there, settings).indexes()] == ["t_1"]
    assert [one for one in unequal(source.uri, target.uri, settings) if one.startswith("waiting")] == []


def test_a_stranger_that_gets_a_synced_name_is_refused(pair: tuple[ReplicaSet, ReplicaSet]) -> None:
    source, target = pair
    settings = SyncSettings(selection=Selection(("strange.orders",)), name="strange")
    with MongoClient[Any](source.uri) as client:
        client.strange.drafts.insert_one({"_id": 1})
        begun(source.uri, target.uri, settings)
        client.strange.drafts.rename("orders")
        with (
            following(source.uri, target.uri, settings) as follower,
            pytest.raises(UsageError, match=r"strange\.drafts"),
        ):
            follower.run_until(now(source.uri))
