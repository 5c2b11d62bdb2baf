"""The first copy of tables is interrupted at any moment, and goes on where it was."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.lake.tables import copying
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests import commands
from tests.sharded.workload import spread
from tests.tables.equality import assert_equal, collections, in_table
from tests.tables.test_sharded_equality import truth

pytestmark = pytest.mark.mongod

DATABASE = "tables_first_copy"
SIZES = {"a": 3000, "b": 1200, "c": 900, "d": 700}


@pytest.fixture
def client(replica_set: ReplicaSet) -> Iterator[MongoClient[Any]]:
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database(DATABASE)
        for name, size in SIZES.items():
            client[DATABASE][name].insert_many([{"_id": number, "n": 0} for number in range(size)])
        yield client
        client.drop_database(DATABASE)


@pytest.fixture(autouse=True)
def note_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_NOTED_BYTES", 1)


def tables(root: Path, *patterns: str) -> TableSettings:
    rules = tuple(TableRule(pattern) for pattern in patterns or (f"{DATABASE}.*",))
    return TableSettings(root, rules, every_s=0.0)


@contextmanager
def dying_after(chunks: int) -> Iterator[None]:
    left = chunks

    def die(name: str) -> None:
        nonlocal left
        left -= name == "tables.copied"
        if not left:
            raise KeyboardInterrupt

    durable.observe_steps(die)
    try:
        yield
    finally:
        durable.observe_steps(None)


def run(uri: str, settings: TableSettings, dies_after: int | None = None) -> int:
    """Bring the tables up to date, or die. Returns how many documents were copied."""
    with TablesWriter(uri, settings) as writer:
        if dies_after is None:
            writer.run_to_present()
        else:
            with dying_after(dies_after), pytest.raises(KeyboardInterrupt):
                writer.run_to_present()
        return writer.progress.copied


def change(client: MongoClient[Any], chosen: random.Random) -> None:
    """Changes of copied documents, of others, and of the collections themselves."""
    for name in client[DATABASE].list_collection_names():
        collection = client[DATABASE][name]
        collection.update_many({"_id": {"$gte": chosen.randrange(3000)}}, {"$inc": {"n": 1}, "$push": {"list": 1}})
        collection.delete_many({"_id": {"$in": chosen.sample(range(3000), 200)}})
        collection.insert_many([{"_id": chosen.random()} for _ in range(20)])


def test_a_first_copy_that_dies_goes_on(replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path) -> None:
    """The copy used to begin again; the copies that earlier tests killed fit into one transaction."""
    settings, chosen = tables(tmp_path / "t"), random.Random(11)
    copied = run(replica_set.uri, settings, 2)
    change(client, chosen)
    copied += run(replica_set.uri, settings, 2)
    change(client, chosen)
    last = run(replica_set.uri, settings)
    assert_equal(tmp_path / "t", collections(client, (DATABASE,)), set())
    assert 0 < last < sum(SIZES.values()) - 1000
    # Nothing twice, except documents that were inserted meanwhile.
    assert copied + last <= sum(SIZES.values()) + 2 * 20 * len(SIZES)


def test_collections_that_come_and_go_while_a_copy_is_interrupted(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    settings, db, known = tables(tmp_path / "t"), client[DATABASE], set[str]()
    for turn in range(4):
        run(replica_set.uri, settings, 2)
        names = sorted(db.list_collection_names())
        db[names[0]].drop()  # whole or in part in the state
        db[names[1]].rename(f"e{turn}")
        db[names[0]].insert_many([{"_id": number, "again": turn} for number in range(150)])
        known |= {f"{DATABASE}.{name}" for name in names}
    run(replica_set.uri, settings)
    assert_equal(tmp_path / "t", collections(client, (DATABASE,)), known)


def test_a_collection_that_is_selected_later_and_given_up_is_copied_anew(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    """The rest of an interrupted copy would lack the changes that are read while its pattern is gone."""
    db = client[DATABASE]
    one, both = (tables(tmp_path / "t", *(f"{DATABASE}.{name}" for name in names)) for names in ("d", "ad"))
    run(replica_set.uri, one)
    run(replica_set.uri, both, 2)
    db.a.update_many({}, {"$inc": {"n": 1}})
    db.a.delete_many({"_id": {"$lt": 50}})
    run(replica_set.uri, one)
    run(replica_set.uri, both, 2)
    db.a.update_many({}, {"$inc": {"n": 1}})
    run(replica_set.uri, both)
    truths = {name: held for name, held in collections(client, (DATABASE,)).items() if name[-1] in "ad"}
    assert_equal(tmp_path / "t", truths, set())


def test_an_oplog_that_does_not_reach_back_lets_the_copy_begin_again(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tables(tmp_path / "t")
    run(replica_set.uri, settings, 3)
    monkeypatch.setattr(copying, "reaches_back", lambda *_: False)
    assert run(replica_set.uri, settings) == sum(SIZES.values())
    assert_equal(tmp_path / "t", collections(client, (DATABASE,)), set())


def test_a_copy_of_a_cluster_that_dies_goes_on(sharded_cluster: ShardedCluster, tmp_path: Path) -> None:
    namespace = spread(sharded_cluster, DATABASE, "spread")
    try:
        for number in range(400):
            sharded_cluster.router.insert_one(namespace, {"region": "agnt"[number % 4], "_id": number, "n": 0})
        settings = tables(tmp_path / "t")
        assert run(sharded_cluster.uri, settings, 1) < 400
        for number in range(0, 400, 7):
            key = {"region": "agnt"[number % 4], "_id": number}
            sharded_cluster.router.update_one(namespace, key, {"$inc": {"n": 1}})
            sharded_cluster.router.delete_one(namespace, {"region": "agnt"[(number + 1) % 4], "_id": number + 1})
        assert run(sharded_cluster.uri, settings) < 400
        assert in_table(tmp_path / "t", namespace) == truth(sharded_cluster, namespace)
    finally:
        sharded_cluster.router.drop_database(DATABASE)


@pytest.mark.slow
def test_a_first_copy_goes_on_over_step_downs(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    """Tables had been tested with a step-down only when a whole deployment was killed, and after the copy."""
    running, chosen, copied = start_replica_set(3), random.Random(5), 0
    threads: list[threading.Thread] = []

    def step_down(name: str) -> None:
        """Between two chunks, and beside the third and its neighbours."""
        nonlocal copied
        copied += name == "tables.copied"
        if name == "tables.copied" and copied in (1, 3):
            change(client, chosen)
            threads.append(threading.Thread(target=running.step_down))
            threads[-1].start()
            if copied == 1:
                threads[-1].join()

    with MongoClient[Any](running.uri, w="majority") as client:
        for name, size in SIZES.items():
            client[DATABASE][name].insert_many([{"_id": number, "n": 0} for number in range(size)])
        settings = tables(tmp_path / "t")
        durable.observe_steps(step_down)
        try:
            total = run(running.uri, settings)
        finally:
            durable.observe_steps(None)
            for thread in threads:
                thread.join()
        assert len(threads) == 2
        assert total <= sum(SIZES.values()) + 2 * 20 * len(SIZES), "nothing is copied twice"
        change(client, chosen)
        run(running.uri, settings)
        assert_equal(tmp_path / "t", collections(client, (DATABASE,)), set())


_CHILD = """
import sys
from pathlib import Path
from tailrace.lake.tables import copying
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
copying._NOTED_BYTES = 1
rules = (TableRule(sys.argv[3]),)
with TablesWriter(sys.argv[1], TableSettings(Path(sys.argv[2]), rules, documents_per_second=2000)) as writer:
    keep = writer._copy._keep
    def kept(*arguments):
        keep(*arguments)
        print(writer.progress.copied, flush=True)
    writer._copy._keep = kept
    writer.run_to_present()
"""


def test_a_process_that_is_killed_while_it_copies_goes_on(
    replica_set: ReplicaSet, client: MongoClient[Any], tmp_path: Path
) -> None:
    arguments = (replica_set.uri, str(tmp_path / "t"), f"{DATABASE}.*")
    copied = 0
    for chunks in (1, 2):
        with commands.Piped(*arguments, code=_CHILD) as child:
            for _ in range(chunks):
                line = child.stdout.readline()
            copied += int(line)
            child.send_signal(signal.SIGKILL)
        client[DATABASE].a.update_many({}, {"$inc": {"n": 1}})
    assert run(replica_set.uri, tables(tmp_path / "t")) <= sum(SIZES.values()) - copied
    assert_equal(tmp_path / "t", collections(client, (DATABASE,)), set())
