"""What PyMongo's users do with a stream besides iterating over it: several threads, close() from outside, time limits,
forgetting it. The outcome is that of PyMongo's own stream beside it, apart from the differences that
docs/reference/differences.md names.

Earlier tests used each stream in one thread, without limits, and closed it in the thread that read it.
"""

from __future__ import annotations

import functools
import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bson
import pymongo
import pytest
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout, PyMongoError

import tailrace
from tailrace.embedded import Mongod, ReplicaSet, ShardedCluster
from tailrace.errors import ServerError, SourceError, TailraceError
from tests import commands
from tests.differential.auth import PASSWORD, ROOT, add_user, mongod_with_users, uri_of
from tests.differential.tcp_proxy import TcpProxy
from tests.patience import patiently
from tests.sharded.workload import spread

pytestmark = pytest.mark.mongod

_PATIENCE_S = 300.0
#: How a stream is opened: the client, and whether its errors are PyMongo's own.
Connect = Callable[..., Any]


def pymongo_of(uri: str) -> Connect:
    return lambda **options: MongoClient[Any](uri, **options)


def ours(uri: str, engine: Any) -> Connect:
    return lambda **options: tailrace.connect(uri, engine=engine, **options)


#: PyMongo's client, our two engines, streams that share a tail, and ours on a sharded cluster; on older servers too.
_OLDER = [
    pytest.param(f"{flavour} {version}", marks=pytest.mark.slow)
    for version in ("5.0.4", "4.4.2")
    for flavour in ("pymongo", "server", "oplog", "shared")
]


@pytest.fixture(params=["pymongo", "server", "oplog", "shared", "sharded", *_OLDER])
def deployment(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """The flavour of the streams, and the replica set or cluster."""
    flavour, _, version = request.param.partition(" ")
    if version:
        return flavour, request.getfixturevalue("older")(version)
    return flavour, request.getfixturevalue("sharded_cluster" if flavour == "sharded" else "replica_set")


@pytest.fixture(scope="module")
def older() -> Iterator[Callable[[str], ReplicaSet]]:
    """Replica sets of older versions, each started when it is first asked for."""
    with ExitStack() as stack:
        yield functools.cache(lambda version: stack.enter_context(ReplicaSet(1, version=version)))


@pytest.fixture
def connect(deployment: tuple[str, Any]) -> Connect:
    """Clients of one flavour."""
    flavour, running = deployment
    if flavour == "pymongo":
        return pymongo_of(running.uri)
    return (
        sharing(running.uri) if flavour == "shared" else ours(running.uri, "server" if flavour == "server" else "oplog")
    )


def sharing(uri: str) -> Connect:
    """A client with two streams that are read all the time, so that a third one joins them."""

    @contextmanager
    def connected(**options: Any) -> Iterator[Any]:
        over = threading.Event()

        def read(stream: Any) -> None:
            while not over.is_set():
                outcome(stream.try_next)

        with tailrace.connect(uri, **options) as client, ExitStack() as stack:
            streams = [stack.enter_context(client.others[name].watch(max_await_time_ms=50)) for name in "ab"]
            threads = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in streams]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + _PATIENCE_S
            while client.tail_statistics.joined < len(streams):
                assert time.monotonic() < deadline, "the streams do not read together"
                time.sleep(0.02)
            yield client
            over.set()
            for thread in threads:
                thread.join(_PATIENCE_S)

    return connected


@pytest.fixture(scope="module")
def namespace(sharded_cluster: ShardedCluster) -> str:
    return spread(sharded_cluster, "habits", "c")


@pytest.fixture
def writes(request: pytest.FixtureRequest, deployment: tuple[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Inserts a document into the collection ``habits.c`` that the streams watch."""
    flavour, running = deployment
    if flavour == "sharded":
        name: str = request.getfixturevalue("namespace")
        number = itertools.count()
        yield lambda document: running.router.insert_one(
            name, {"_id": bson.ObjectId(), "region": "ab"[next(number) % 2], **document}
        )
        return
    with MongoClient[Any](running.uri) as client:
        yield lambda document: client.habits.c.insert_one(dict(document))


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the exception that it raises."""
    try:
        return call()
    except (Exception, StopIteration) as error:  # noqa: BLE001
        return error


def code_of(error: Any) -> int | None:
    return error.code if isinstance(error, (TailraceError, pymongo.errors.OperationFailure)) else None


class _Reader(threading.Thread):
    """A thread that calls ``stream.next()`` once; ``result`` is what came of it."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._begun = threading.Event()
        self.result: Any = None
        self.start()

    def run(self) -> None:
        self._begun.set()
        self.result = outcome(self._stream.next)

    def wait_until_it_waits(self) -> None:
        """Return when the stream's thread has slept throughout ten turns of this one. The operating system is asked:
        ``sys._current_frames`` can hang for good where other threads begin or end meanwhile."""
        assert self._begun.wait(_PATIENCE_S)
        deadline, runs, stood = time.monotonic() + _PATIENCE_S, "", 0
        while stood < 10:
            assert time.monotonic() < deadline, "it never waits"
            time.sleep(0.02)
            status = Path(f"/proc/self/task/{self.native_id}/status").read_text()
            now = status[status.index("voluntary_ctxt_switches") :]
            # On a busy machine a thread that is ready may not have run: it is not asleep.
            runs, stood = now, stood + 1 if now == runs and "State:\tS" in status else 0

    def ended(self) -> bool:
        self.join(_PATIENCE_S)
        return not self.is_alive()


def test_two_threads_in_one_stream_are_both_told(connect: Connect) -> None:
    """ "ValueError: generator already executing" in one, and a stream that ended without a word in the other."""
    with connect() as client, client.habits.c.watch(max_await_time_ms=2000) as stream:
        first = _Reader(stream)
        first.wait_until_it_waits()
        second = _Reader(stream)
        assert second.ended()
        assert first.ended()
        assert code_of(second.result) == 143, second.result
        assert code_of(first.result) == 237, first.result
        assert not stream.alive


def test_threads_that_take_turns_share_a_stream(connect: Connect, writes: Callable[[dict[str, Any]], Any]) -> None:
    with connect() as client, client.habits.c.watch() as stream:
        for number in range(6):
            writes({"n": number})
            reader = _Reader(stream)
            assert reader.ended()
            assert reader.result["fullDocument"]["n"] == number
        assert stream.alive


def test_close_from_another_thread_ends_a_waiting_next(connect: Connect, deployment: tuple[str, Any]) -> None:
    with connect() as client, client.habits.c.watch(max_await_time_ms=1000) as stream:
        reader = _Reader(stream)
        reader.wait_until_it_waits()
        assert outcome(stream.close) is None
        assert reader.ended()
        if deployment[0] == "pymongo":
            assert code_of(reader.result) == 237  # ours end like a stream that was closed before the call
        else:
            assert isinstance(reader.result, StopIteration)
        assert not stream.alive
        assert isinstance(outcome(stream.next), StopIteration)
        assert stream.try_next() is None
        stream.close()


@pytest.mark.parametrize("call", ["next", "try_next"])
def test_a_time_limit_ends_the_wait_and_not_the_stream(
    connect: Connect, writes: Callable[[dict[str, Any]], Any], call: str
) -> None:
    """The time limit passed, and the read was retried for ever."""
    with connect() as client, client.habits.c.watch(max_await_time_ms=5000) as stream:
        writes({"n": "before"})
        assert stream.next()["fullDocument"]["n"] == "before"
        for number in range(2):
            with pymongo.timeout(0.5):
                waited = outcome(getattr(stream, call))
            assert isinstance(waited, NetworkTimeout), waited
            assert waited.timeout
            assert stream.alive
            writes({"n": number})
            assert stream.next()["fullDocument"]["n"] == number


def test_the_clients_own_limit_bounds_each_call(connect: Connect, writes: Callable[[dict[str, Any]], Any]) -> None:
    with ExitStack() as stack:
        # On a busy machine a call may take longer than the limit: then it is made again, as after any such time-out.
        client = patiently(lambda: stack.enter_context(connect(timeoutMS=800)))
        stream = stack.enter_context(patiently(lambda: client.habits.c.watch(max_await_time_ms=5000)))
        for number in range(2):
            assert isinstance(outcome(stream.next), NetworkTimeout)
            writes({"n": number})
            assert patiently(stream.next)["fullDocument"]["n"] == number
        assert stream.alive
    with connect(timeoutMS=20_000) as client, client.habits.c.watch(max_await_time_ms=50) as stream:
        assert stream.try_next() is None


@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_a_limit_that_is_over_in_a_look_up_loses_no_event(replica_set: ReplicaSet, engine: Any) -> None:
    """The event that waits for its document comes with the next call: the stream goes on with the same request."""
    host = replica_set.uri.partition("://")[2].partition("/")[0]
    with (
        TcpProxy(host) as proxy,
        MongoClient[Any](replica_set.uri) as direct,
        tailrace.connect(f"mongodb://{proxy.host}/?directConnection=true", engine=engine) as client,
    ):
        direct.habits.looked.drop()
        with client.habits.looked.watch(full_document="updateLookup", max_await_time_ms=100) as stream:
            direct.habits.looked.insert_one({"_id": 1, "n": 0})
            assert stream.next()["operationType"] == "insert"
            for number in range(1, 6):
                direct.habits.looked.update_one({"_id": 1}, {"$set": {"n": number}})
                proxy.refuse()
                with pymongo.timeout(0.3):
                    assert isinstance(outcome(stream.next), PyMongoError)
                proxy.refuse(False)
                assert stream.alive
                assert stream.next()["fullDocument"] == {"_id": 1, "n": number}


_FORGOTTEN = """
import sys, threading, time, tailrace
client = tailrace.connect(sys.argv[1], engine=sys.argv[3])
stream = client.habits.c.watch(max_await_time_ms=300)
stream.try_next()
how = sys.argv[2]
if how == "cycle":
    class Holder: pass
    holder = Holder(); holder.stream, holder.itself = stream, holder
    del stream
elif how == "waiting":
    threading.Thread(target=list, args=(stream,), daemon=True).start()
    time.sleep(0.1)
elif how == "client closed":
    client.close()
elif how == "in a module":
    sys.modules["elsewhere"] = stream
elif how == "raises":
    raise SystemExit(0)
"""


@pytest.mark.parametrize("how", ["left", "cycle", "waiting", "client closed", "in a module", "raises"])
@pytest.mark.parametrize("kind", ["server", "oplog", "sharded"])
def test_a_forgotten_stream_leaves_no_trace_on_the_terminal(
    kind: str, how: str, request: pytest.FixtureRequest
) -> None:
    """Earlier tests had closed all of their streams."""
    running = request.getfixturevalue("sharded_cluster" if kind == "sharded" else "replica_set")
    engine = "server" if kind == "server" else "oplog"
    done = commands.run_text(running.uri, how, engine, code=_FORGOTTEN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    with mongod_with_users(tmp_path_factory.mktemp("guarded")) as mongod:
        add_user(mongod, "nobody", PASSWORD, [])
        add_user(mongod, "reader", PASSWORD, [{"role": "read", "db": "local"}])
        yield mongod


@pytest.mark.parametrize(
    ("user", "options", "says"),
    [
        ("nobody", {}, "the oplog"),
        ("nobody", {"full_document": "updateLookup"}, "the oplog"),
        ("reader", {"full_document": "updateLookup"}, "the database shop"),
        ("reader", {"full_document": "whenAvailable"}, "pre-images"),
        ("reader", {"full_document_before_change": "required"}, "pre-images"),
    ],
)
def test_who_may_not_read_is_told_by_watch_itself(
    guarded: Mongod, user: str, options: dict[str, Any], says: str
) -> None:
    """A stream that begins now read nothing before its first event: the program went on as if everything were in
    order."""
    with tailrace.connect(uri_of(guarded, user, PASSWORD)) as client:
        with pytest.raises(SourceError, match=says) as raised:
            client.shop.orders.watch(**options)
        assert raised.value.code == 13
    with tailrace.connect(uri_of(guarded, user, PASSWORD), engine="server") as client:
        with pytest.raises(ServerError) as refused:
            client.shop.orders.watch(**options)
        assert refused.value.code == 13
    with tailrace.connect(uri_of(guarded, ROOT, PASSWORD)) as client, client.shop.orders.watch(**options) as stream:
        assert stream.alive


@pytest.mark.parametrize("arguments", [["--until", "now"], ["--until", "1"], []])
def test_the_command_says_so_too_and_does_not_end_well(guarded: Mongod, arguments: list[str]) -> None:
    """With ``--until now`` it came to its end before its first read: exit status 0, and nothing printed."""
    done = commands.run_text("watch", uri_of(guarded, "nobody", PASSWORD), "shop", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "may not read the oplog" in done.stderr
    assert len(done.stderr.splitlines()) == 1


class _Terminal:
    """``tailrace watch`` on a pseudo-terminal; ``read_until`` gives what it has written."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._near, far = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tailrace", "watch", *arguments],
            stdin=far,
            stdout=far,
            stderr=far,
            env={**os.environ, **environment},
        )
        os.close(far)
        self.text = ""

    def read_until(self, words: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self._near], [], [], 1.0)[0]:
                try:
                    self.text += os.read(self._near, 4096).decode()
                except OSError:
                    assert words in self.text, self.text
        assert "Traceback" not in self.text

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.read_until("stopped. To go on")
        status = self.process.wait(_PATIENCE_S)
        os.close(self._near)
        return status


def test_a_quiet_terminal_says_what_it_watches_and_the_interrupt_how_to_go_on(replica_set: ReplicaSet) -> None:
    """The terminal stayed empty, and the place in the stream was lost with Ctrl-C."""
    terminal = _Terminal("quiet.c", TAILRACE_URI=replica_set.uri, COLUMNS="10", LANG="C")
    terminal.read_until("watching quiet.c; nothing has happened yet")
    with MongoClient[Any](replica_set.uri) as client:
        client.quiet.c.insert_one({"_id": "the first"})
        terminal.read_until("the first")
        time.sleep(0.5)  # an event that is not wholly written comes again
        assert terminal.interrupt() == 130
        token = terminal.text.rpartition("--resume-after ")[2].split()[0]
        client.quiet.c.insert_one({"_id": "the second"})
    done = commands.run_text("watch", "--until", "1", "--resume-after", token, replica_set.uri, "quiet.c")
    assert done.returncode == 0
    assert "the second" in done.stdout
    assert "the first" not in done.stdout


@pytest.mark.parametrize("moment_s", [0.0, 0.1, 0.3, 0.6, 1.2])
def test_an_interrupt_at_any_moment_is_quiet(replica_set: ReplicaSet, moment_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "watch", replica_set.uri, "quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(moment_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    # However slow the machine: an interrupt before our first line is Python's own, later ones are ours. Python's own
    # start has a function of that name, in site.py.
    if re.search(r'tailrace/cli/main\.py", line \d+, in main\n', err) or "Traceback" not in err:
        assert "Traceback" not in err
        assert process.returncode in (130, -signal.SIGINT)
    assert out == ""


def test_a_reader_that_has_seen_enough_ends_the_command(replica_set: ReplicaSet) -> None:
    with MongoClient[Any](replica_set.uri) as client:
        start = client.admin.command("ping")["operationTime"]
        client.quiet.many.insert_many([{"n": number, "text": "x" * 500} for number in range(2000)])
    for form in ("json", "pretty", "bson"):
        script = (
            f'"{sys.executable}" -m tailrace watch "{replica_set.uri}" quiet.many --format {form} '
            f"--start-at-operation-time {start.time},{start.inc} | head -c 2000 >/dev/null; echo ${{PIPESTATUS[0]}}"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, check=False)
        assert (done.stdout, done.stderr) == ("0\n", "")


def test_tls_to_a_server_without_it_is_told_as_that(replica_set: ReplicaSet) -> None:
    uri = f"{replica_set.uri}&tls=true&serverSelectionTimeoutMS=2000"
    done = commands.run_text("watch", uri)
    assert done.returncode == 1
    assert "TLS" in done.stderr
    assert "tls=true" in done.stderr
    assert len(done.stderr.splitlines()) == 1
