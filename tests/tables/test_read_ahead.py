"""Micro-batches of several windows that are read ahead in a thread, and tables that take several micro-batches at
once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SourceError
from tailrace.lake.tables import writer
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.delta_table import CollectionTable
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.window import oplogs
from tailrace.read.window.oplogs import OplogMember
from tailrace.read.window.read_ahead import ReadAhead
from tests import commands
from tests.patience import PATIENCE_S
from tests.tables.equality import in_collection, in_table

NAMESPACE = "tables_read_ahead.things"
AHEAD = "tailrace-read-ahead"


@pytest.fixture
def collection(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[Any]:
    """Its tables are in ``tmp_path``, as they were before it was filled."""
    database, name = NAMESPACE.split(".")
    with MongoClient[Any](replica_set.uri) as client:
        client.drop_database(database)
        client[database][name].insert_one({"_id": -1})
        brought_up(replica_set.uri, tmp_path)
        yield client[database][name]
        client.drop_database(database)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is one reply of the server: 101 entries at first. Each micro-batch has two or three."""
    monkeypatch.setattr(oplogs, "WINDOW_BYTES", 1)
    monkeypatch.setattr(writer, "_BATCH_BYTES", 40_000)


def tables_of(uri: str, root: Path, **options: Any) -> TablesWriter:
    return TablesWriter(uri, TableSettings(root, (TableRule(NAMESPACE),), every_s=0.0, **options))


def brought_up(uri: str, root: Path) -> None:
    with tables_of(uri, root) as tables:
        tables.run_to_present()


def fill(collection: Any, first: int = 0) -> None:
    """Many entries, and a document with changes in many windows."""
    for number in range(first, first + 1000, 100):
        collection.insert_many([{"_id": one, "n": one} for one in range(number, number + 100)])
        collection.update_one({"_id": -1}, {"$push": {"l": number}})
        collection.update_many({"_id": {"$gte": first, "$lt": first + 30}}, {"$inc": {"n": 1}})
        collection.delete_one({"_id": number + 50})


def assert_equal(root: Path, collection: Any) -> None:
    assert in_table(root, NAMESPACE) == in_collection(collection)
    batches = [one.batch for one in stated(root / folder_of(NAMESPACE))]
    assert len(set(batches)) == len(batches), "a micro-batch was taken over twice"


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_many_windows_make_few_micro_batches_and_one_commit(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = OplogMember.read

    def noted(self: OplogMember, *given: Any) -> Any:
        read.append(threading.current_thread().name)
        return plain(self, *given)

    monkeypatch.setattr(OplogMember, "read", noted)
    fill(collection)
    before = len(list(stated(tmp_path / folder_of(NAMESPACE))))
    with tables_of(replica_set.uri, tmp_path) as tables:
        tables.run_to_present()
        batches = tables.progress.batches
    assert_equal(tmp_path, collection)
    assert read.count(AHEAD) > batches > 2
    assert len(list(stated(tmp_path / folder_of(NAMESPACE)))) == before + 1


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_tables_that_are_behind_for_long_are_written_meanwhile(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BEHIND_S", 0.0)
    fill(collection)
    before = len(list(stated(tmp_path / folder_of(NAMESPACE))))
    with tables_of(replica_set.uri, tmp_path) as tables:
        tables.run_to_present()
        batches = tables.progress.batches
    assert_equal(tmp_path, collection)
    assert len(list(stated(tmp_path / folder_of(NAMESPACE)))) == before + batches


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_what_the_writer_states_is_what_the_tables_have(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    fill(collection)
    with tables_of(replica_set.uri, tmp_path) as tables:
        at = tables.progress.time
        tables.begin()
        tables.step(at_once=True)
        assert tables.progress.batches == 1
        assert tables.progress.time == at, "the tables have not taken over this micro-batch yet"
        assert in_table(tmp_path, NAMESPACE) != in_collection(collection)


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_rows_do_not_wait_for_a_window_that_does_not_come(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that cannot tell its time at the moment: nothing is read ahead."""
    fill(collection)
    with tables_of(replica_set.uri, tmp_path) as tables:
        at = tables.progress.time
        tables.begin()
        tables.step()
        monkeypatch.setattr(oplogs.Oplogs, "window", lambda *_, **__: None)
        assert not tables.step()
        now = tables.progress.time
        assert now is not None
        assert at is not None
        assert now > at
        assert not tables.step()


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_a_time_inside_of_micro_batches_without_commits_can_be_asked_for(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    fill(collection)
    truth = in_collection(collection)
    with collection.database.client.start_session(causal_consistency=True) as session:
        collection.find_one(session=session)
        assert session.operation_time is not None
        at = ClusterTime.from_timestamp(session.operation_time)
    fill(collection, 1000)
    brought_up(replica_set.uri, tmp_path)
    found = as_of(tmp_path, NAMESPACE, at, uri=replica_set.uri)
    assert found.replayed
    assert (
        dict(zip(found.rows.column("_key").to_pylist(), found.rows.column("_bson").to_pylist(), strict=True)) == truth
    )


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_small_files_are_merged_although_few_micro_batches_are_taken_over(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: list[str] = []
    monkeypatch.setattr(CollectionTable, "compact", lambda self, **_: merged.append(self.namespace))
    fill(collection)
    with tables_of(replica_set.uri, tmp_path, compact_every=3) as tables:
        tables.run_to_present()
        assert tables.progress.batches >= 3
    assert merged == [NAMESPACE]


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_a_read_that_fails_ahead_says_so_and_loses_nothing(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OplogMember.read
    count = itertools.count()

    def failing(self: OplogMember, *given: Any) -> Any:
        if threading.current_thread().name == AHEAD and next(count) % 3 == 2:
            raise SourceError("the cable was pulled")
        return plain(self, *given)

    monkeypatch.setattr(OplogMember, "read", failing)
    fill(collection)
    failed = 0
    with tables_of(replica_set.uri, tmp_path) as tables:
        for _ in range(100):
            try:
                tables.run_to_present()
                break
            except SourceError as error:
                assert "the cable was pulled" in str(error)  # noqa: PT017  only some of the calls fail
                failed += 1
    assert_equal(tmp_path, collection)
    assert failed > 1


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_a_micro_batch_that_failed_is_read_again(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read ahead in this case does not belong to the position."""
    plain = writer.Fold.apply
    failing = iter((False, True))

    def apply(self: Any, state: Any) -> Any:
        if next(failing, False):
            raise SourceError("planted")
        return plain(self, state)

    monkeypatch.setattr(writer.Fold, "apply", apply)
    fill(collection)
    with tables_of(replica_set.uri, tmp_path) as tables:
        with pytest.raises(SourceError, match="planted"):
            tables.run_to_present()
        tables.run_to_present()
    assert_equal(tmp_path, collection)


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
def test_a_table_that_fails_while_the_next_window_is_read(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised and the writer closes, although the read hangs; the next writer goes on."""
    hangs, released = stuck_at(monkeypatch, 4)
    monkeypatch.setattr(writer, "_BEHIND_S", 0.0)
    fill(collection)

    def failing(step: str) -> None:
        if step == "table.commit" and hangs.is_set():
            raise OSError("the device is gone")

    durable.observe_steps(failing)
    try:
        ended = in_a_thread(lambda: brought_up(replica_set.uri, tmp_path))
        assert ended() == "the device is gone"
    finally:
        durable.observe_steps(None)
        released.set()
    monkeypatch.undo()
    brought_up(replica_set.uri, tmp_path)
    assert_equal(tmp_path, collection)


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("number", [2, 3])
def test_a_writer_that_is_stopped_while_a_read_hangs_closes(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It waits for the first window of a micro-batch, or for one inside of it."""
    hangs, released = stuck_at(monkeypatch, number)
    fill(collection)

    running: list[TablesWriter] = []

    def run() -> None:
        with tables_of(replica_set.uri, tmp_path) as tables:
            running.append(tables)
            tables.run()
            assert tables.progress.batches

    try:
        ended = in_a_thread(run)
        assert hangs.wait(PATIENCE_S)
        running[0].stop()
        assert ended() == ""
    finally:
        released.set()
    monkeypatch.undo()
    brought_up(replica_set.uri, tmp_path)
    assert_equal(tmp_path, collection)


@pytest.mark.mongod
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("behind_s", [0.0, 1000.0])
def test_a_crash_after_any_step_is_made_good(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_s: float
) -> None:
    """Each run dies at another step, among micro-batches whose rows the tables do not have yet."""
    monkeypatch.setattr(writer, "_BEHIND_S", behind_s)
    fill(collection)
    died: list[str] = []

    def die(step: str) -> None:
        if next(left, None) is None:
            died.append(step)
            raise KeyboardInterrupt

    for lives in range(1, 100):
        left = iter(range(lives % 4))
        durable.observe_steps(die)
        try:
            brought_up(replica_set.uri, tmp_path)
            break
        except KeyboardInterrupt:
            continue
        finally:
            durable.observe_steps(None)
    assert_equal(tmp_path, collection)
    assert {"tables.state", "table.commit"} <= set(died)


_CHILD = """
import sys
from pathlib import Path
from tailrace.lake.tables import writer
from tailrace.read.window import oplogs
from tailrace.lake.tables.settings import TableRule, TableSettings
oplogs.WINDOW_BYTES, writer._BATCH_BYTES, writer._BEHIND_S = 1, 40_000, 0.2
settings = TableSettings(Path(sys.argv[2]), (TableRule(sys.argv[3]),), every_s=0.0)
with writer.TablesWriter(sys.argv[1], settings) as tables:
    print("begun", flush=True)
    tables.run()
"""


@pytest.mark.slow  # killed: test_writer.py; far behind: the tests above
@pytest.mark.mongod
def test_killed_while_it_is_far_behind_nothing_is_lost_or_twice(
    replica_set: ReplicaSet, collection: Any, tmp_path: Path
) -> None:
    chosen = random.Random(6)
    for lives in range(4):
        fill(collection, 1000 * lives)
        fill(collection, 1000 * lives + 500_000)
        with commands.Piped(replica_set.uri, str(tmp_path), NAMESPACE, code=_CHILD) as child:
            assert child.stdout.readline() == b"begun\n"
            time.sleep(chosen.uniform(0.0, 0.8))
            child.kill()
    brought_up(replica_set.uri, tmp_path)
    assert_equal(tmp_path, collection)


def stuck_at(monkeypatch: pytest.MonkeyPatch, number: int) -> tuple[threading.Event, threading.Event]:
    """Let the read ahead with this number hang until the second event is set; the first one tells that it hangs."""
    plain = OplogMember.read
    count = itertools.count(1)
    hangs, released = threading.Event(), threading.Event()

    def stuck(self: OplogMember, *given: Any) -> Any:
        if threading.current_thread().name == AHEAD and next(count) == number:
            hangs.set()
            assert released.wait(2 * PATIENCE_S)
        return plain(self, *given)

    monkeypatch.setattr(OplogMember, "read", stuck)
    return hangs, released


def in_a_thread(call: Callable[[], None]) -> Callable[[], str]:
    """The text of the error that the call ends with, or nothing."""
    said: list[str] = []

    def run() -> None:
        try:
            call()
            said.append("")
        except Exception as error:  # noqa: BLE001  the caller looks at its text
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended() -> str:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it waits for the read"
        return said[0]

    return ended


def test_what_was_read_or_the_error_comes_to_the_caller() -> None:
    assert ReadAhead(lambda: 7, lambda: None).result() == 7
    failing: ReadAhead[float] = ReadAhead(lambda: 1 / 0, lambda: None)
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_a_read_that_was_given_up_is_interrupted() -> None:
    told = threading.Event()
    ahead = ReadAhead(lambda: told.wait(PATIENCE_S), told.set)
    ahead.give_up()
    assert ahead.result()
