"""After random workloads, tables equal their collections at the cluster time that they state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.lake.store.place import TablePlace
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.wire import Wire
from tests.differential.workload import Workload
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION
from tests.tables.equality import assert_equal, collections

pytestmark = pytest.mark.mongod

#: No tables: names of the server's temporary collections.
HIDDEN = "tmp"


def settings(root: TablePlace, databases: tuple[str, ...], *, merges: bool = False) -> TableSettings:
    rules = tuple(TableRule(f"{name}.*") for name in databases)
    return TableSettings(root, rules, every_s=0.0, compact_every=3, merge_on_read=merges)


def equal_after(uri: str, root: TablePlace, seed: int, count: int, version: str, *, merges: bool = False) -> int:
    """Run a workload in pieces; after each, the tables are brought up to date and compared. Returns how often."""
    client: Any = MongoClient(uri)
    workload = Workload(seed, version)
    known: set[str] = set()
    compared = 0
    with client, Wire.to(uri) as wire:
        clear(wire, workload)
        start = note(wire, "workload begins")
        done = Executed(start, start)
        operations = list(workload.operations(count))
        for first in range(0, count, count // 5):
            for operation in operations[first : first + count // 5]:
                done.ends.append(run_operation(wire, operation, done))
            with TablesWriter(uri, settings(root, workload.databases, merges=merges)) as writer:
                time = writer.run_to_present(note(wire, "workload pauses"))
            found = collections(client, workload.databases)
            truth = {name: one for name, one in found.items() if not name.split(".", 1)[1].startswith(HIDDEN)}
            assert_equal(root, truth, known)
            known |= truth.keys()
            assert all(next(stated(place_of(root, name))).time <= time for name in truth)
            compared += 1
        clear(wire, workload)
    return compared


@pytest.mark.parametrize("seed", [9101])
def test_tables_equal_their_collections(replica_set: ReplicaSet, tmp_path: Path, seed: int) -> None:
    assert equal_after(replica_set.uri, tmp_path / "t", seed, 300, SERVER_VERSION) == 5


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_tables_of_older_servers(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, version: str) -> None:
    running = start_replica_set(version=version, enable_test_commands=True)
    assert equal_after(running.uri, tmp_path / "t", 9200, 200, version, merges=version == IN_BETWEEN) == 5
