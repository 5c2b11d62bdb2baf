"""As of every time, wherever micro-batches end: in the middle of ``$out``, between an insert and its delete, before and
after a crash.

Earlier tests let a micro-batch end where nobody wrote, and asked about collections that existed at its end. So none had
seen that a version counted as exact beyond a micro-batch in which the table changed and changed back, nor that the
tables were called equal at times at which a collection existed that was dropped before it could be copied.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.window.oplogs import Oplogs
from tests.amounts import amount
from tests.differential.execute import note
from tests.differential.wire import Wire
from tests.tables.equality import in_collection, in_table
from tests.tables.test_as_of import change, rows_of

pytestmark = pytest.mark.mongod

DATABASE = "tables_cut"
NAMES = ("a", "b", "c", "made")
_TURNS = amount(16, 60)
_real_settled = Oplogs._settled


class Killed(BaseException):
    """The writer ends at a step."""


class Cuts:
    """Lets micro-batches end at any entry, and writers at any step."""

    def __init__(self, client: Any, chosen: random.Random) -> None:
        self._client, self._chosen = client, chosen
        self.cuts = False
        self.kills = False

    def settled(self, oplogs: Oplogs, after: ClusterTime, at_once: bool, at_least: ClusterTime) -> ClusterTime | None:
        found = _real_settled(oplogs, after, at_once, at_least)
        if found is None or not self.cuts or self._chosen.random() < 0.3:
            return found
        between = {"ts": {"$gt": after.to_timestamp(), "$gte": at_least.to_timestamp(), "$lte": found.to_timestamp()}}
        times = [one["ts"] for one in self._client.local["oplog.rs"].find(between, {"ts": 1})]
        return ClusterTime.from_timestamp(self._chosen.choice(times)) if times else found

    def step(self, name: str) -> None:
        if self.kills and self._chosen.random() < 0.1:
            raise Killed(name)


def _bound(cuts: Cuts) -> Callable[..., ClusterTime | None]:
    def settled(oplogs: Oplogs, *given: Any) -> ClusterTime | None:  # a function, since it becomes a method
        return cuts.settled(oplogs, *given)

    return settled


@pytest.fixture
def cuts(replica_set: ReplicaSet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[random.Random], Cuts]]:
    with MongoClient[Any](replica_set.uri) as client:

        def begin(chosen: random.Random) -> Cuts:
            found = Cuts(client, chosen)
            monkeypatch.setattr(Oplogs, "_settled", _bound(found))
            monkeypatch.setattr(durable, "step", found.step)
            return found

        client.drop_database(DATABASE)
        yield begin
        client.drop_database(DATABASE)


def turn(database: Any, chosen: random.Random) -> None:
    """One DDL or a few writes."""
    source, target = chosen.sample(NAMES[:3], 2)
    present = database.list_collection_names()
    match chosen.randrange(8):
        case 0 if source in present:
            database[source].rename(target, dropTarget=True)
        case 1 | 2 if source in present:
            target = chosen.choice(("made", "made", target, source))
            database[source].aggregate([{"$set": {"out": chosen.random()}}, {"$out": target}])
        case 3 if source in present:
            database[source].drop()
        case 4 if "made" in present:
            database["made"].drop()
        case 5:
            passing = {"_id": f"passing {chosen.random()}"}
            database[source].insert_one(passing)
            if chosen.random() < 0.7:
                database[target].find_one()
                database[source].delete_one(passing)
        case _:
            change(database[source], chosen)


def truth(database: Any) -> dict[str, dict[bytes, bytes]]:
    return {name: in_collection(database[name]) for name in NAMES}


@pytest.mark.parametrize("seed", [4, *(pytest.param(one, marks=pytest.mark.slow) for one in (5, *range(10, 30)))])
def test_as_of_is_exact_wherever_micro_batches_end(
    replica_set: ReplicaSet, tmp_path: Path, cuts: Callable[[random.Random], Cuts], seed: int
) -> None:
    uri, root, chosen = replica_set.uri, tmp_path / "t", random.Random(f"tailrace cuts {seed}")
    cut = cuts(chosen)
    settings = TableSettings(
        root,
        (TableRule(f"{DATABASE}.*"),),
        every_s=0.0,
        compact_every=chosen.choice((1, 3)),
        grace_h=chosen.choice((0.0, 1.0)),
        versions=chosen.choice((1, 7, 100_000)),
    )
    recorded: list[tuple[ClusterTime, dict[str, dict[bytes, bytes]]]] = []
    writer: TablesWriter | None = None
    with MongoClient[Any](uri) as client, Wire.to(uri) as wire:
        database = client[DATABASE]
        for name in NAMES:
            database[name].insert_many([{"_id": number, "of": name} for number in range(5)])
        with TablesWriter(uri, settings) as first:
            first.run_to_present(note(wire, "copied"))
        for _ in range(_TURNS):
            for _ in range(chosen.choice((1, 1, 2))):
                turn(database, chosen)
                recorded.append((note(wire, "recorded"), truth(database)))
            if chosen.random() < 0.4:
                cut.cuts, cut.kills = True, chosen.random() < 0.3
                writer = _step(writer, uri, settings, chosen)
                cut.cuts = cut.kills = False
        if writer is not None:
            writer.close()
        with TablesWriter(uri, settings) as last:
            last.run_to_present(note(wire, "end"))
        for name in NAMES:
            assert (in_table(root, f"{DATABASE}.{name}") or {}) == in_collection(database[name])
    exact = 0
    for time, held in recorded:
        for name in NAMES:
            try:
                found = as_of(root, f"{DATABASE}.{name}", time, uri=uri)
            except UsageError:  # not in the versions, nor in the oplog
                continue
            assert rows_of(found.rows) == held[name], (name, time)
            exact += 1
    assert exact > len(recorded)


def _step(writer: TablesWriter | None, uri: str, settings: TableSettings, chosen: random.Random) -> TablesWriter | None:
    """A micro-batch, sometimes of a new writer. Returns the writer, unless it was killed."""
    try:
        if writer is None:
            writer = TablesWriter(uri, settings)
            writer.begin()
        writer.step(at_once=True)
    except Killed:
        assert writer is not None
        writer.close()
        return None
    if chosen.random() < 0.2:
        writer.close()
        return None
    return writer


@pytest.mark.parametrize("what", ["document", "collection", "name"])
def test_what_came_and_went_within_a_micro_batch_was_there(
    replica_set: ReplicaSet, tmp_path: Path, cuts: object, what: str
) -> None:
    uri, root = replica_set.uri, tmp_path / "t"
    settings = TableSettings(root, (TableRule(f"{DATABASE}.*"),))
    with MongoClient[Any](uri) as client, Wire.to(uri) as wire:
        database = client[DATABASE]
        database["a"].insert_one({"_id": 1})
        database["made"].insert_one({"_id": 1})
        database["made"].drop()
        with TablesWriter(uri, settings) as writer:
            database["made"].insert_one({"_id": 1})
            writer.run_to_present(note(wire, "there"))
            if what != "document":
                database["made"].drop()
            writer.run_to_present(note(wire, "begun"))
            if what == "document":
                database["made"].insert_one({"_id": 2})
            elif what == "collection":
                database["a"].aggregate([{"$out": "made"}])
            else:
                database["a"].rename("made")
            between, held = note(wire, "between"), truth(database)
            if what == "document":
                database["made"].delete_one({"_id": 2})
            elif what == "collection":
                database["made"].drop()
            else:
                database["made"].rename("a")
            writer.run_to_present(note(wire, "gone"))
            database["b"].insert_one({"_id": 3})
            writer.run_to_present(note(wire, "end"))
        for name in ("a", "made"):
            found = as_of(root, f"{DATABASE}.{name}", between, uri=uri)
            assert rows_of(found.rows) == held[name], name


def test_tables_are_not_called_equal_while_one_that_was_gone_before_its_copy_was_there(
    replica_set: ReplicaSet, tmp_path: Path, cuts: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, root = replica_set.uri, tmp_path / "t"
    settings = TableSettings(root, (TableRule(f"{DATABASE}.*"),))
    with MongoClient[Any](uri) as client, Wire.to(uri) as wire:
        database = client[DATABASE]
        database["a"].insert_one({"_id": 1})
        database["made"].insert_one({"_id": 1})
        with TablesWriter(uri, settings) as writer:
            writer.run_to_present(note(wire, "copied"))
            database["made"].drop()
            writer.run_to_present(note(wire, "begun"))
            database["a"].aggregate([{"$out": "made"}])
            there = note(wire, "there")
            database["made"].drop()
            gone = note(wire, "gone")
            with monkeypatch.context() as patched:
                patched.setattr(Oplogs, "_settled", lambda *_: there)
                writer.step(at_once=True)
            told = writer.progress.time
            assert told is not None
            assert told < there
            writer.run_to_present(gone)
    found = as_of(root, f"{DATABASE}.made", there, uri=uri)
    assert len(rows_of(found.rows)) == 1
