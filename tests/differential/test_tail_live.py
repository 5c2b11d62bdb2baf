"""Many streams of one client, which read the oplog together, beside the server's own: the same bytes, the same tokens,
whether a stream is fast or slow, and whatever happens to the server meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout, OperationFailure

import tailrace
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError
from tailrace.read.tail.shared_tail import SharedTail
from tailrace.read.tail.tailed_source import TailedSource
from tests.amounts import amount
from tests.differential.execute import execute
from tests.differential.fuzz import PARAMETERS
from tests.differential.wire import Wire
from tests.differential.workload import COLLECTIONS, Workload
from tests.server_in_use import SERVER_VERSION, major

pytestmark = pytest.mark.mongod

_PATIENCE_S = 300.0
_RAW = CodecOptions[Any](document_class=RawBSONDocument)
Outcome = tuple[list[bytes], "int | None"]
Way = tuple[tuple[str, ...], dict[str, Any]]


class Later:
    """A time that readers get once it is known."""

    def __init__(self) -> None:
        self.time = ClusterTime((1 << 63) - 1)

    def __le__(self, other: ClusterTime) -> bool:
        return self.time <= other

    def __lt__(self, other: ClusterTime) -> bool:
        return self.time < other


def ways(databases: tuple[str, str], *, expanded: bool) -> list[Way]:
    """Fifty streams: what each watches, and how."""
    scopes: list[tuple[str, ...]] = [(), *((name,) for name in databases)]
    scopes += [(name, collection) for name in databases for collection in (*COLLECTIONS, "beside", "none", "no.such")]
    found: list[Way] = [(scope, {}) for scope in scopes]
    found += [(scope, {"show_expanded_events": True}) for scope in scopes if expanded]
    match = {"$match": {"operationType": {"$in": ["delete", "drop", "rename"]}}}
    project = {"$project": {"operationType": 1, "ns": 1}}
    for pipeline in ([match], [project], [match, project]):
        found += [(scope, {"pipeline": pipeline}) for scope in scopes]
    return found[: len(scopes)] + random.Random(50).sample(found[len(scopes) :], 50 - len(scopes))


def read(target: Any, until: ClusterTime | Later, options: dict[str, Any], pause: Callable[[], object]) -> Outcome:
    """A stream's events up to ``until``, and the code of the error that ended it. After an invalidate another stream
    goes on."""
    events: list[bytes] = []
    deadline = time.monotonic() + _PATIENCE_S
    start = dict(options)
    try:
        while True:
            with target.watch(max_await_time_ms=100, **start) as stream:
                while stream.alive:
                    assert time.monotonic() < deadline, "the stream does not come to its end"
                    pause()
                    event = stream.try_next()
                    if event is not None:
                        if ResumeToken.parse(bytes(event["_id"].raw)).cluster_time > until:
                            return events, None
                        events.append(bytes(event.raw))
                    elif ResumeToken.parse(bytes(stream.resume_token.raw)).cluster_time >= until:
                        return events, None
                if not events or b"invalidate" not in events[-1]:
                    return events, None
                start = {name: value for name, value in start.items() if not name.startswith("start")}
                start["start_after"] = stream.resume_token
    except (TailraceError, OperationFailure) as error:
        return events, error.code


def target_of(client: Any, scope: tuple[str, ...]) -> Any:
    target = client
    for name in scope[:-1]:
        target = target[name]
    if not scope:
        return client
    return (
        target.get_collection(scope[-1], codec_options=_RAW)
        if len(scope) == 2
        else target.get_database(scope[-1], codec_options=_RAW)
    )


def raw_clients(uri: str, **options: Any) -> tuple[tailrace.watch.client.client.Client, MongoClient[Any]]:
    own = tailrace.connect(uri, document_class=RawBSONDocument, **options)
    return own, MongoClient(uri, document_class=RawBSONDocument)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("version", "seed"),
    [(SERVER_VERSION, 201), pytest.param("5.0.4", 202, marks=pytest.mark.slow), pytest.param("4.4.2", 203)],
)
def test_fifty_streams_of_one_client_give_what_the_servers_own_give(
    start_replica_set: Callable[..., ReplicaSet], version: str, seed: int
) -> None:
    """Transactions in chains and prepared ones, DDL, renames and dropped databases among the writes; every fifth stream
    is slow, and the window small."""
    deployment = start_replica_set(version=version, parameters=PARAMETERS, enable_test_commands=True)
    own, native = raw_clients(deployment.uri, tail_window_bytes=150_000)
    workload = Workload(seed, version)
    wanted = ways(workload.databases, expanded=major(version) >= 6)
    until: Any = Later()
    with contextlib.closing(own), native, Wire.to(deployment.uri) as wire, ThreadPoolExecutor(len(wanted)) as pool:
        start = native.admin.command("ping")["operationTime"]
        begin = {"start_at_operation_time": Timestamp(start.time, start.inc + 1)}
        hold = threading.Event()
        pauses = [(lambda: None) if number % 5 else (lambda: hold.wait(0.2) and None) for number in range(len(wanted))]
        outcomes = [
            pool.submit(read, target_of(own, scope), until, {**begin, **options}, pause)
            for (scope, options), pause in zip(wanted, pauses, strict=True)
        ]
        try:
            wait_until(lambda: own.tail_statistics.joined == len(wanted), "the streams read together")
            executed = execute(wire, workload, 150)
        finally:
            until.time = native.admin.command("appendOplogNote", 1, data={"mark": 1}, writeConcern={"w": "majority"})[
                "operationTime"
            ]
            until.time = ClusterTime.from_timestamp(until.time)
            hold.set()
        own_outcomes = [outcome.result() for outcome in outcomes]
        statistics = own.tail_statistics
        native_outcomes = [
            read(target_of(native, scope), executed.end, {**begin, **options}, lambda: None)
            for scope, options in wanted
        ]
    for way, ours, theirs in zip(wanted, own_outcomes, native_outcomes, strict=True):
        assert ours == theirs, way
    assert sum(len(events) for events, _ in own_outcomes) > 300
    assert statistics.fallbacks > 0
    assert statistics.rejoins > 0


def test_the_oplog_is_read_once_from_the_second_stream_on_and_no_longer_than_there_are_streams(
    replica_set: ReplicaSet,
) -> None:
    own, native = raw_clients(replica_set.uri)
    with contextlib.closing(own), native:
        database = own["tail_once"]
        streams = [database.c0.watch(max_await_time_ms=50)]
        assert streams[0].try_next() is None
        assert streams[0].try_next() is None
        assert (own.tail_statistics.streams, own.tail_statistics.joined, _readers()) == (1, 0, 0)
        streams += [database[f"c{number}"].watch(max_await_time_ms=50) for number in range(1, 20)]

        def all_read() -> bool:
            assert [stream.try_next() for stream in streams] == [None] * 20
            return own.tail_statistics.joined == 20

        wait_until(all_read, "twenty streams read together")
        assert _readers() == 1
        before = own.tail_statistics
        for number in range(40):
            native["tail_once"][f"c{number % 20}"].insert_one({"_id": number})
        for number, stream in enumerate(streams):
            found = [stream.next()["documentKey"]["_id"] for _ in range(2)]
            assert found == [number, number + 20]
        after = own.tail_statistics
        assert 40 <= after.entries - before.entries < 80
        assert after.window_entries >= 40
        for stream in streams[1:]:
            stream.close()
        wait_until(lambda: streams[0].try_next() is None and _readers() == 0, "the one that is left reads for itself")
        native["tail_once"]["c0"].insert_one({"_id": 100})
        assert streams[0].next()["documentKey"]["_id"] == 100
        assert (own.tail_statistics.streams, own.tail_statistics.joined) == (1, 0)
        streams[0].close()
        assert own.tail_statistics.streams == 0


def _readers() -> int:
    return sum(thread.name == "tailrace-tail" for thread in threading.enumerate())


@contextlib.contextmanager
def two_joined(replica_set: ReplicaSet, database: str) -> Iterator[tuple[Any, Any, Any]]:
    """Two streams of one client that read together, and PyMongo's client."""
    own, native = raw_clients(replica_set.uri)
    with contextlib.closing(own), native:
        first, second = (own[database][name].watch(max_await_time_ms=100) for name in ("a", "b"))

        def both_read() -> bool:
            assert first.try_next() is None
            assert second.try_next() is None
            return own.tail_statistics.joined == 2

        wait_until(both_read, "both read together")
        yield first, second, native


def test_a_time_limit_bounds_a_wait_for_the_window_and_loses_nothing(replica_set: ReplicaSet) -> None:
    with two_joined(replica_set, "tail_limit") as (first, second, native):
        with pymongo.timeout(0.2), pytest.raises(NetworkTimeout):
            first.next()
        native["tail_limit"]["a"].insert_one({"_id": 1})
        native["tail_limit"]["b"].insert_one({"_id": 2})
        assert first.next()["documentKey"]["_id"] == 1
        assert second.next()["documentKey"]["_id"] == 2


def test_a_quiet_streams_token_follows_what_others_write(replica_set: ReplicaSet) -> None:
    with two_joined(replica_set, "tail_quiet") as (first, _, native):
        native["tail_quiet"]["c"].insert_one({})
        noted = native.admin.command("appendOplogNote", 1, data={"mark": 1}, writeConcern={"w": "majority"})
        reached = ClusterTime.from_timestamp(noted["operationTime"])

        def has_come() -> bool:
            assert first.try_next() is None
            return ResumeToken.parse(bytes(first.resume_token.raw)).cluster_time >= reached

        wait_until(has_come, "the token follows")


def test_streams_go_on_together_over_a_step_down(start_replica_set: Callable[..., ReplicaSet]) -> None:
    deployment = start_replica_set(3)
    own, native = raw_clients(deployment.uri, tail_window_bytes=40_000)
    with contextlib.closing(own), native, ThreadPoolExecutor(12) as pool:
        start = native.admin.command("ping")["operationTime"]
        begin = {"start_at_operation_time": Timestamp(start.time, start.inc + 1)}
        until: Any = Later()
        slow: Callable[[], object] = lambda: time.sleep(0.02)  # noqa: E731
        outcomes = [
            pool.submit(read, target_of(own, ("step", f"c{number}")), until, begin, slow if number % 3 else int)
            for number in range(12)
        ]
        wait_until(lambda: own.tail_statistics.joined == 12, "the streams read together")
        written = amount(240, 600)
        for number in range(written):
            if number == written // 3:
                deployment.step_down()
            native["step"][f"c{number % 12}"].insert_one({"_id": number, "text": "x" * 1000})
        noted = native.admin.command("appendOplogNote", 1, data={"mark": 1}, writeConcern={"w": "majority"})
        until.time = ClusterTime.from_timestamp(noted["operationTime"])
        for number, outcome in enumerate(outcomes):
            events, code = outcome.result()
            assert code is None
            assert [RawBSONDocument(event)["documentKey"]["_id"] for event in events] == list(
                range(number, written, 12)
            )


def test_many_streams_in_one_thread_are_told_when_something_has_come(replica_set: ReplicaSet) -> None:
    """As an event loop does it: a callback, no thread for each stream, and no polling."""

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        with MongoClient[Any](replica_set.uri) as client:
            shared = SharedTail(client, streams_min=1)
            sources = [TailedSource(client, shared, Scope.of_collection("tail_loop", f"c{n}")) for n in range(100)]
            begin = sources[0].operation_time()
            ready: asyncio.Queue[int] = asyncio.Queue()
            tails = [source.tail(begin, await_ms=20) for source in sources]
            for number, (source, batches) in enumerate(zip(sources, tails, strict=True)):
                source.on_ready(partial(loop.call_soon_threadsafe, ready.put_nowait, number))
                while not source.is_joined:
                    await loop.run_in_executor(None, next, batches)
            for number in (5, 99, 5):
                await loop.run_in_executor(None, client["tail_loop"][f"c{number}"].insert_one, {})
            found: list[int] = []
            while len(found) < 3:
                number = await asyncio.wait_for(ready.get(), _PATIENCE_S)
                batch = sources[number].poll()
                assert batch is not None
                inserts = [raw for raw in raw_bson.split(batch.raw) if parse_entry(raw).operation == "i"]
                found += [number] * len(inserts)
            for batches in tails:
                batches.close()
            shared.close()
            return sorted(found)

    assert asyncio.run(run()) == [5, 5, 99]


_FORKS = """
import os, sys, time, tailrace
client = tailrace.connect(sys.argv[1])
streams = [client["tail_fork"][name].watch(max_await_time_ms=50) for name in "ab"]
while client.tail_statistics.joined < 2:
    assert [stream.try_next() for stream in streams] == [None, None]
child = os.fork()
if child == 0:
    client["tail_fork"]["b"].insert_one({"_id": "child"})
    assert streams[1].next()["documentKey"] == {"_id": "child"}
    while client.tail_statistics.joined < 2:
        streams[0].try_next(), streams[1].try_next()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert streams[1].next()["documentKey"] == {"_id": "child"}
print("same")  # and the program ends with streams that are open
"""


def test_a_child_process_reads_for_itself_and_the_programs_end_is_quiet(replica_set: ReplicaSet) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS, replica_set.uri],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("same\n", "", 0)
