"""Tables that are fed with a stream's events equal their collections and the tables of our own writer, byte for
byte."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.event_rows import read_rows
from tailrace.lake.tables.event_tables import EventTables
from tailrace.lake.tables.fed import FedBatch
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tests.differential import native
from tests.differential.execute import Executed, clear, note, run_operation
from tests.differential.wire import Wire
from tests.differential.workload import Operation, Workload
from tests.server_in_use import SERVER_VERSION
from tests.tables.equality import assert_equal, collections, in_table

pytestmark = [pytest.mark.mongod, pytest.mark.skipif(SERVER_VERSION < "6", reason="these events came with 6.0")]

#: The options that a stream for tables needs.
STAGE = {"showExpandedEvents": True, "showRawUpdateDescription": True}
HIDDEN = "tmp"


def events_of(wire: Wire, after: ClusterTime, until: ClusterTime) -> list[bytes]:
    """The server's own events of the whole cluster."""
    stage = {**STAGE, "startAtOperationTime": after.tick().to_timestamp()}
    stream = native.read(wire, *native.aggregate(("admin", None), stage), until)
    assert stream.error is None, stream.error
    return [one for one in stream.events if read_rows([one])[0].time <= until]


def settings(root: Path, databases: tuple[str, ...]) -> TableSettings:
    return TableSettings(root, tuple(TableRule(f"{name}.*") for name in databases), every_s=0.0, compact_every=3)


@pytest.mark.slow  # each rule by itself, with events made by hand: tests/unit/test_fed_tables.py
@pytest.mark.parametrize("seed", [9301, 9302])
def test_tables_of_events_equal_their_collections_and_our_own_tables(
    replica_set: ReplicaSet, tmp_path: Path, seed: int
) -> None:
    """A random workload with transactions, drops, renames and ``$out``, in micro-batches whose rows are shuffled. The
    last one is given twice, and the process is replaced between micro-batches."""
    chosen = random.Random(seed)
    workload = Workload(seed, SERVER_VERSION)
    ours, own = tmp_path / "ours", tmp_path / "own"
    known: set[str] = set()
    client: Any = MongoClient(replica_set.uri)
    with client, Wire.to(replica_set.uri) as wire:
        clear(wire, workload)
        begun = at = note(wire, "workload begins")
        done = Executed(at, at)
        operations = [one for one in workload.operations(250) if _is_shown(one)]
        with TablesWriter(replica_set.uri, settings(own, workload.databases)) as writer:
            writer.run_to_present()
        number = 0
        for first in range(0, len(operations), 50):
            for operation in operations[first : first + 50]:
                done.ends.append(run_operation(wire, operation, done))
            until = note(wire, "workload pauses")
            events = events_of(wire, at, until)
            at = until
            with _opened(ours, workload.databases) as tables:
                for rows, reached in pieces(events, chosen, until):
                    assert tables.apply(FedBatch("q", number, read_rows(rows), reached))
                    assert not tables.apply(FedBatch("q", number, read_rows(rows), reached))
                    number += 1
            with TablesWriter(replica_set.uri, settings(own, workload.databases)) as writer:
                writer.run_to_present(until)
            found = collections(client, workload.databases)
            truth = {name: one for name, one in found.items() if not name.split(".", 1)[1].startswith(HIDDEN)}
            assert_equal(ours, truth, known)
            for name in known | truth.keys():
                assert in_table(ours, name) == in_table(own, name), name
            known |= truth.keys()
        assert number > 4
        assert events_of(wire, begun, until)
        clear(wire, workload)


def _is_shown(operation: Operation) -> bool:
    """Whether a stream shows everything that an operation does. Two commands write documents that no stream shows."""
    return not any(name in one.document for one in operation.commands for name in ("applyOps", "convertToCapped"))


def _opened(root: Path, databases: tuple[str, ...]) -> Any:
    return closing(EventTables(settings(root, databases), begins_empty=True))


def pieces(events: list[bytes], chosen: random.Random, until: ClusterTime) -> list[tuple[list[bytes], ClusterTime]]:
    """The events in micro-batches that end between two cluster times, each of them shuffled."""
    rows = read_rows(events)
    found: list[tuple[list[bytes], ClusterTime]] = [([], until)]
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.time != row.time and chosen.random() < 0.05:
            found[-1] = (found[-1][0], before.time)
            found.append(([], until))
        found[-1][0].append(row.raw)
    for piece, _ in found:
        chosen.shuffle(piece)
    return found
