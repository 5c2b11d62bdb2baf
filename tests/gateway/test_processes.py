"""A gateway of several processes: one read of the oplog, cursors that are found from every connection, and streams that
do not notice the end of a process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from bson.int64 import Int64
from pymongo.errors import OperationFailure

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway.cursor_ids import ProcessIds, new_ids
from tests import commands
from tests.gateway.connected import Connected
from tests.gateway.running import GatewayProcess, eventually

Client = pymongo.MongoClient[dict[str, Any]]

COMPUTES = {"$match": {"$expr": {"$eq": ["$operationType", "insert"]}}}


def test_an_id_tells_the_processes_alone_which_of_them_made_it() -> None:
    key = os.urandom(16)
    processes = [ProcessIds(number, 3, key) for number in range(3)]
    for made_by in processes:
        ids = [number for number, _ in zip(made_by.new(), range(500), strict=False)]
        assert len(set(ids)) == 500
        assert all(0 < number < 1 << 63 for number in ids)
        assert {each.maker(number) for each in processes for number in ids} == {made_by.number}
        other = ProcessIds(0, 3, os.urandom(16))
        assert sum(other.maker(number) is not None for number in ids) < 5
    theirs = [number for number, _ in zip(new_ids(), range(2_000), strict=False)]
    assert sum(processes[0].maker(number) is not None for number in theirs) < 5


@pytest.fixture
def gateway(replica_set: ReplicaSet, tmp_path: Path) -> Iterator[GatewayProcess]:
    arguments = ("--processes", "2", "--metrics", "127.0.0.1:0", "--log", "text")
    with GatewayProcess(replica_set.uri, tmp_path / "log", *arguments) as running:
        yield running


@pytest.fixture
def two(gateway: GatewayProcess) -> Iterator[list[Connected]]:
    """Connections at different processes."""
    both = [Connected(gateway.address) for _ in range(2)]
    yield both
    for each in both:
        each.close()


@pytest.fixture
def notes(replica_set: ReplicaSet) -> Iterator[Any]:
    with Client(replica_set.uri, w="majority") as direct:
        yield direct.processes.notes
        direct.drop_database("processes")


def pids(two: list[Connected]) -> list[int]:
    found: list[int] = two[0].command({"tailraceStreams": 1}, "admin")["gateway"]["pids"]
    return found


@pytest.mark.mongod
@pytest.mark.parametrize("stages", [[], [COMPUTES]])
def test_a_get_more_finds_its_cursor_from_every_connection(
    two: list[Connected], notes: Any, stages: list[dict[str, Any]]
) -> None:
    cursors = [each.opened(*stages) for each in two]
    assert len(set(pids(two))) == 2
    for number in range(3):
        notes.insert_one({"_id": number})
        for cursor in cursors:
            for connection in two if number else reversed(two):
                reply = connection.more(cursor, batchSize=1, maxTimeMS=200)
                assert reply["ok"], reply
                if reply["cursor"]["nextBatch"]:
                    break
            assert [event["documentKey"] for event in reply["cursor"]["nextBatch"]] == [{"_id": number}]
    for cursor in cursors:
        assert two[0].more(cursor, maxTimeMS=100)["cursor"]["nextBatch"] == []


@pytest.mark.mongod
def test_both_processes_serve_and_the_oplog_is_read_once(
    two: list[Connected], notes: Any, replica_set: ReplicaSet
) -> None:
    cursors = [each.opened() for each in two]
    listed = two[1].command({"tailraceStreams": 1}, "admin")
    assert {one["cursor"] for one in listed["streams"]} == set(cursors)
    assert listed["gateway"]["connections"] == 2

    def own_connection_of_each(connection: Connected, cursor: Int64) -> list[Any]:
        reply = connection.more(cursor, maxTimeMS=500)
        return [event["documentKey"]["_id"] for event in reply["cursor"]["nextBatch"]]

    notes.insert_many([{"_id": number} for number in range(5)])
    for connection, cursor in zip(two, cursors, strict=True):
        got: list[Any] = []
        eventually(
            lambda c=connection, i=cursor, g=got: g.extend(own_connection_of_each(c, i)) or len(g) == 5, "events"
        )
        assert got == list(range(5))

    def readers() -> int:
        with Client(replica_set.uri) as direct:
            wanted = {"ns": "local.oplog.rs", "appName": "tailrace-gateway"}
            found = direct.admin.aggregate([{"$currentOp": {"idleCursors": True}}, {"$match": wanted}])
            return len(list(found))

    eventually(lambda: readers() == 1, "how many reads of the oplog there are")


@pytest.mark.mongod
def test_cursors_and_sessions_are_ended_from_every_connection(
    two: list[Connected], gateway: GatewayProcess, notes: Any
) -> None:
    cursors = [each.opened() for each in two]
    waiting: list[dict[str, Any]] = []
    third = Connected(gateway.address)
    thread = threading.Thread(target=lambda: waiting.append(third.more(cursors[1], maxTimeMS=60_000)))
    thread.start()
    listed = lambda: two[0].command({"tailraceStreams": 1}, "admin")["streams"]  # noqa: E731
    eventually(lambda: [one["cursor"] for one in listed() if one["waiting"]] == [cursors[1]], "nobody waits")
    reply = two[0].command({"killCursors": "notes", "cursors": [*cursors, Int64(1)]})
    assert (set(reply["cursorsKilled"]), reply["cursorsNotFound"]) == (set(cursors), [1])
    thread.join(300)
    third.close()
    assert waiting[0]["code"] == 237
    for connection in two:
        for cursor in cursors:
            assert connection.more(cursor)["code"] == 43
    session = {"id": bson.Binary(os.urandom(16), 4)}
    pipeline: list[Any] = [{"$changeStream": {}}]
    for each in two:
        assert each.command({"aggregate": "notes", "pipeline": pipeline, "cursor": {}, "lsid": session})["ok"]
    assert len(listed()) == 2
    assert two[1].command({"killSessions": [session]})["ok"]
    assert listed() == []


@pytest.mark.mongod
def test_limits_hold_for_all_processes_together(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    gateway = start_gateway(replica_set.uri, "--processes", "2", "--cursors-max", "3", "--connections-max", "4")
    connections = [Connected(gateway.address) for _ in range(4)]
    opened = [connections[number].opened() for number in range(3)]
    reply = connections[3].command({"aggregate": "notes", "pipeline": [{"$changeStream": {}}], "cursor": {}})
    assert reply["code"] == 146
    assert "3 change streams open" in reply["errmsg"]
    with pytest.raises((OSError, AssertionError, EOFError)):
        Connected(gateway.address).command({"ping": 1}, "admin")
    assert connections[3].command({"killCursors": "notes", "cursors": opened[:1]})["ok"]
    connections[3].opened()
    for each in connections:
        each.close()
    eventually(lambda: _answers(gateway), "room is not made")


def _answers(gateway: GatewayProcess) -> bool:
    try:
        connection = Connected(gateway.address)
        try:
            return bool(connection.command({"ping": 1}, "admin")["ok"])
        finally:
            connection.close()
    except (OSError, AssertionError, EOFError):
        return False


@pytest.mark.mongod
def test_a_user_s_stages_are_computed_in_one_process(two: list[Connected], notes: Any) -> None:
    cursors = [each.opened(COMPUTES) for each in two for _ in range(2)]
    listed = two[0].command({"tailraceStreams": 1}, "admin")
    assert {one["cursor"] for one in listed["streams"]} == set(cursors)
    assert len({one["process"] for one in listed["streams"]}) == 1
    assert len(listed["gateway"]["processes"]) == 1


@pytest.mark.mongod
def test_a_process_that_is_killed_takes_no_event_with_it(gateway: GatewayProcess, notes: Any) -> None:
    with Client(gateway.uri, maxPoolSize=20) as client:
        streams = [client.processes.notes.watch(max_await_time_ms=200) for _ in range(6)]
        got: list[list[int]] = [[] for _ in streams]

        def take(until: int) -> None:
            for stream, mine in zip(streams, got, strict=True):
                while len(mine) < until:
                    event = stream.try_next()
                    if event is not None:
                        mine.append(event["documentKey"]["_id"])

        notes.insert_many([{"_id": number} for number in range(3)])
        take(3)
        before = [int(pid) for pid in client.admin.command("tailraceStreams")["gateway"]["pids"]]
        for count, pid in enumerate(before, 2):
            # A process reports its counts twice a second, and what it has reported is kept when it ends.
            told = 18 * (count - 1)
            eventually(lambda told=told: gateway.statistics()["events_total"] >= told, "events are not counted")
            os.kill(pid, signal.SIGKILL)
            notes.insert_many([{"_id": number} for number in range(3 * count - 3, 3 * count)])
            take(3 * count)
            eventually(
                lambda gone=pid: len(running(client)) == 2 and gone not in running(client), "it is not started again"
            )
        assert got == [list(range(9))] * 6
        assert not set(before) & set(running(client))
        for stream in streams:
            stream.close()
    eventually(lambda: gateway.statistics()["events_total"] >= 54, "events are not counted")
    statistics = gateway.statistics()
    assert (statistics["processes"], statistics["processes_ended_total"]) == (2, 2)
    log = gateway.log.read_text()
    assert all(
        f"(pid {pid}) has ended with signal SIGKILL: its streams resume, and it is started again" in log
        for pid in before
    )
    assert gateway.stop() == 0


def running(client: Client) -> list[int]:
    try:
        reply = client.admin.command("tailraceStreams")
    except (pymongo.errors.PyMongoError, OperationFailure):
        return []
    return [int(pid) for pid in reply["gateway"].get("pids", ())]


@pytest.mark.mongod
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_with_the_parent_all_processes_end(gateway: GatewayProcess, two: list[Connected], number: int) -> None:
    cursor = two[1].opened()
    replies: list[Any] = []

    def wait() -> None:
        try:
            replies.append(two[0].more(cursor, maxTimeMS=60_000))
        except (OSError, AssertionError, EOFError) as error:
            replies.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    processes = pids(two[1:])
    status = gateway.stop(number)
    thread.join(300)
    for pid in processes:
        eventually(lambda p=pid: not Path(f"/proc/{p}").exists(), "a process is left")
    if number == signal.SIGTERM:
        assert status == 0
        assert replies[0]["code"] == 91
        assert "ResumableChangeStreamError" in replies[0]["errorLabels"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--processes", "0"], "--processes must be at least 1"),
        (["--processes", "2", "--test-commands"], "--test-commands needs --processes 1"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(arguments: list[str], text: str) -> None:
    done = commands.run("gateway", "--upstream", "mongodb://127.0.0.1:1/", *arguments)
    assert done.returncode == 1
    assert text in done.stderr.decode()


def test_what_is_wrong_at_the_start_is_told_as_by_one_process() -> None:
    # A busy machine may not have tried to connect within a second; after three, more is reported.
    uri = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=2000"
    one, two = (
        commands.run("gateway", "--upstream", uri, "--listen", "127.0.0.1:0", "--processes", count)
        for count in ("1", "2")
    )
    assert one.returncode == two.returncode == 1
    assert two.stderr == one.stderr
