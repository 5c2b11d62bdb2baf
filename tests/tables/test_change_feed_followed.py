"""The change feed of tables that follow a server: under workloads, crashes and SIGKILL, and with a quarantine."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.schema import TableSchema
from tailrace.lake.tables.settings import TableRule, TableSettings
from tests import commands
from tests.amounts import amount
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.wire import Wire
from tests.differential.workload import Workload
from tests.server_in_use import SERVER_VERSION
from tests.tables.change_feeds import check_feed, feed_of
from tests.tables.test_writer import brought_up, collection, work

__all__ = ["collection"]
pytestmark = pytest.mark.mongod

_CHILD = """
import sys
from pathlib import Path
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
uri, root, pattern = sys.argv[1:]
settings = TableSettings(Path(root), (TableRule(pattern),), every_s=0.0, compact_every=2, feed_h=24.0)
with TablesWriter(uri, settings) as writer:
    print("begun", flush=True)
    writer.run()
"""


def fed_tables(root: Path, *patterns: str, **options: Any) -> TableSettings:
    rules = tuple(TableRule(pattern, **options) for pattern in patterns)
    return TableSettings(root, rules, every_s=0.0, compact_every=3, feed_h=24.0)


@pytest.mark.parametrize("step", ["tables.state", "table.commit", "tables.done"])
def test_a_crash_between_any_two_steps(replica_set: ReplicaSet, collection: Any, tmp_path: Path, step: str) -> None:
    chosen = random.Random(36)
    settings = fed_tables(tmp_path / "t", collection.full_name)
    work(collection, chosen, 50)
    brought_up(replica_set.uri, settings)

    def die(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    for _ in range(2):
        work(collection, chosen, 20)
        durable.observe_steps(die)
        try:
            with pytest.raises(KeyboardInterrupt):
                brought_up(replica_set.uri, settings)
        finally:
            durable.observe_steps(None)
    brought_up(replica_set.uri, settings)
    assert check_feed(settings.root / folder_of(collection.full_name)) >= 2


@pytest.mark.slow  # a crash between any two steps: the test above
def test_killed_at_any_moment(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    chosen = random.Random(37)
    root = tmp_path / "t"
    work(collection, chosen, 50)
    for _ in range(2):
        child = commands.Piped(replica_set.uri, str(root), collection.full_name, code=_CHILD)
        assert child.stdout.readline() == b"begun\n"
        until = time.monotonic() + chosen.uniform(0.2, 1.0)
        while time.monotonic() < until:
            work(collection, chosen, 5)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    brought_up(replica_set.uri, fed_tables(root, collection.full_name))
    assert check_feed(root / folder_of(collection.full_name)) >= 2


def test_documents_in_quarantine_are_not_in_the_table(replica_set: ReplicaSet, collection: Any, tmp_path: Path) -> None:
    schema = TableSchema.declared({"n": "int"})
    settings = fed_tables(tmp_path / "t", collection.full_name, schema=schema)
    folder = settings.root / folder_of(collection.full_name)
    collection.insert_many([{"_id": 1, "n": 1}, {"_id": 2, "n": 2}])
    for value in (1, "one", "two", 3):
        collection.update_one({"_id": 1}, {"$set": {"n": value}})
        brought_up(replica_set.uri, settings)
    feeds = [feed_of(folder, version) for version in range(check_feed(folder))]
    found = [dict(Counter(one["_change_type"] for one in feed)) for feed in feeds if feed]
    assert found == [{"insert": 2}, {"delete": 1}, {"insert": 1}]


@pytest.mark.parametrize("seed", [3601])
def test_workloads(replica_set: ReplicaSet, tmp_path: Path, seed: int) -> None:
    compared = fed_workload(replica_set.uri, tmp_path / "t", seed, amount(100, 200), SERVER_VERSION)
    assert compared > 5


def fed_workload(uri: str, root: Path, seed: int, count: int, version: str) -> int:
    """Run a workload in pieces. Returns how many versions of tables were compared."""
    client: Any = MongoClient(uri)
    workload = Workload(seed, version)
    with client, Wire.to(uri) as wire:
        clear(wire, workload)
        start = note(wire, "workload begins")
        done = Executed(start, start)
        operations = list(workload.operations(count))
        for first in range(0, count, count // 5):
            for operation in operations[first : first + count // 5]:
                done.ends.append(run_operation(wire, operation, done))
            brought_up(uri, fed_tables(root, *(f"{name}.*" for name in workload.databases)))
        clear(wire, workload)
    compared = 0
    for folder in sorted(path.parent for path in root.glob("[!_]*/_delta_log")):
        compared += check_feed(folder)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_workloads_of_older_servers(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str) -> None:
    running = start_replica_set(version=version, enable_test_commands=True)
    assert fed_workload(running.uri, tmp_path / "t", 3602, 150, version) > 5
