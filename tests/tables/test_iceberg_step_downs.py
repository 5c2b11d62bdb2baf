"""A primary steps down while an Iceberg snapshot is made: Delta, Iceberg and the collections are equal afterwards.

Catalogues had been tried with kills and without step-downs, and step-downs without a catalogue.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.tables.writer import TablesWriter
from tests.spark.lake_driving import options_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import newest
from tests.tables.iceberg import sql_settings
from tests.tables.test_iceberg_followed import check, shown_tables
from tests.tables.test_writer import work
from tests.unit.lake_iceberg import mirror_of, newest_rows, versions_shown

pytestmark = [
    pytest.mark.mongod,
    pytest.mark.slow,  # an election at each step
    pytest.mark.filterwarnings("ignore:Iceberg scan planning"),
]


@contextmanager
def stepping_down(running: ReplicaSet, steps: tuple[str, ...], change: Callable[[], None]) -> Iterator[list[str]]:
    """Let the primary step down at each of these steps in turn, the first time beside what follows, with changes before
    and after. Gives the steps that were met."""
    met: list[str] = []
    threads: list[threading.Thread] = []

    def at(name: str) -> None:
        if len(met) == len(steps) or name != steps[len(met)]:
            return
        met.append(name)
        change()
        threads.append(threading.Thread(target=running.step_down))
        threads[-1].start()
        if len(met) > 1:
            threads[-1].join()
            change()

    durable.observe_steps(at)
    try:
        yield met
    finally:
        durable.observe_steps(None)
        for thread in threads:
            thread.join()


def test_tables(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    running, chosen, root = start_replica_set(3), random.Random(77), tmp_path / "t"
    steps = ("table.commit", "iceberg.written", "iceberg.shown", "iceberg.written", "table.commit")
    with MongoClient[Any](running.uri, w="majority") as client:
        collection, other = client["stepped"]["orders"], client["stepped"]["other"]
        for one in (collection, other):
            work(one, chosen, 60)
        settings = shown_tables(root, "stepped.*", iceberg=sql_settings(tmp_path))

        def change() -> None:
            for one in (collection, other):
                work(one, chosen, 15)

        with stepping_down(running, steps, change) as met, TablesWriter(running.uri, settings) as writer:
            while len(met) < len(steps):
                change()
                writer.run_to_present()
        with TablesWriter(running.uri, settings) as writer:
            writer.run_to_present()
        for one in (collection, other):
            check(root, one)


def test_a_lake(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    running, chosen, lake = start_replica_set(3), random.Random(78), tmp_path / "lake"
    uri = running.uri
    start = newest(uri)
    source = options_for(uri, "stepped", start, maxEventsPerTrigger="40")
    steps = ("commit.log", "iceberg.written", "iceberg.shown", "commit.head", "iceberg.written")
    with MongoClient[Any](uri, w="majority") as client:
        collection = client["stepped"]["orders"]

        def change() -> None:
            work(collection, chosen, 40)

        mirror, turn = mirror_of(lake), 0
        with stepping_down(running, steps, change) as met:
            while len(met) < len(steps):
                change()
                turn += 1
                fill(source, lake, newest(uri), checkpoint=tmp_path / f"checkpoint {turn}")
                mirror.follow()
        fill(source, lake, newest(uri), checkpoint=tmp_path / "last")
        mirror.follow()
        assert mirror.fault() is None
        assert versions_shown(lake)
        with client["stepped"].watch(
            start_at_operation_time=start.tick().to_timestamp(), max_await_time_ms=200
        ) as stream:
            expected = []
            while (one := stream.try_next()) is not None:
                expected.append(one["_id"]["_data"])
    assert [row["token"] for row in newest_rows(lake)] == expected
    assert len(expected) > 200
    assert verify(lake, full=True).sound
