"""``tailrace listen`` and ``tailrace leases`` as processes: signals, statistics, errors in a sentence.

Most of them are forked; one is started as users do it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.cli.main import main
from tailrace.consumer import MongoLeaseStore
from tailrace.embedded import ReplicaSet
from tests.forked import Forked

Process = subprocess.Popen[bytes] | Forked
pytestmark = pytest.mark.mongod
STATISTICS = r"statistics at (http://[\d.]+:\d+/metrics)"

HANDLERS = """
import time, os

def touch(name, change):
    with open(name, "a") as file:
        print(change.document_key["_id"], file=file)

def slowly(change):
    touch("begun", change)
    while not os.path.exists("go"):
        time.sleep(0.02)
    touch("done", change)

async def politely(change):
    touch("done", change)

def fails(change):
    raise ValueError("no")

def fails_at_two(change):
    if change.document_key["_id"] == 2:
        raise ValueError("poison")
    touch("done", change)

def counts(change):
    with change.transaction() as session:
        counters = session.client[os.environ["SHOP"]]["counters"]
        change.fence.bound_to(session).update_one(
            counters, {"_id": change.document_key["_id"]}, {"$inc": {"times": 1}}, upsert=True
        )
"""


class Commands:
    """Runs of the command line in one directory, against one database."""

    def __init__(self, directory: Path, replica_set: ReplicaSet, database: Any) -> None:
        self.directory = directory
        self.database = database
        self.store = MongoLeaseStore(database["leases"])
        self.environment = {**os.environ, "TAILRACE_URI": replica_set.uri, "SHOP": database.name}
        self.running: list[Process] = []
        #: What each process has said on standard error, by its id.
        self.said: dict[int, Path] = {}
        (directory / "handlers.py").write_text(HANDLERS)

    def listen(self, handler: str, *more: str, as_users_do: bool = False) -> Process:
        arguments = ["listen", f"handlers:{handler}", "--database", self.database.name, "--collection", "orders"]
        arguments += ["--resource", "orders", "--store", f"{self.database.name}.leases", *more]
        errors = self.directory / f"errors-{len(self.running)}"
        process: Process
        if as_users_do:
            with errors.open("w") as sink:
                command = [sys.executable, "-m", "tailrace", *arguments]
                process = subprocess.Popen(command, cwd=self.directory, env=self.environment, stderr=sink)
        else:
            process = Forked("tailrace", arguments, cwd=self.directory, env=self.environment, errors=errors)
        self.said[process.pid] = errors
        self.running.append(process)
        return process

    def until(self, holds: Callable[[], Any], process: Process | None = None) -> None:
        end = time.monotonic() + 300
        while not holds():
            if process is not None and process.poll() is not None:
                pytest.fail(f"the listener has ended: {self.said[process.pid].read_text()}")
            assert time.monotonic() < end, "it has not come so far"
            time.sleep(0.05)

    def told(self, process: Process, pattern: str, times: int = 1) -> list[str]:
        """Wait until the process, and those that it started, have said this so many times on standard error. (Their
        lines may be mixed up where Python does not buffer.)"""
        while True:
            ended = process.poll() is not None
            text = self.said[process.pid].read_text() if self.said[process.pid].exists() else ""
            found = re.findall(pattern, text)
            if len(found) >= times:
                return found
            if ended:
                pytest.fail(f"nothing was said of {pattern}: {text}")
            time.sleep(0.02)

    def lines(self, name: str) -> list[str]:
        file = self.directory / name
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def commands(replica_set: ReplicaSet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Commands]:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        database = client[f"cli_{abs(hash(request.node.nodeid)) % 10**9}"]
        commands = Commands(tmp_path, replica_set, database)
        yield commands
        for process in commands.running:
            process.kill()
            process.wait()
        client.drop_database(database.name)


def test_a_signal_finishes_the_change_in_hand_and_releases_the_lease(commands: Commands) -> None:
    commands.database.orders.insert_many([{"_id": 1}, {"_id": 2}])
    process = commands.listen("slowly", "--metrics", "127.0.0.1:0", as_users_do=True)
    commands.until(lambda: commands.lines("begun"), process)
    check_statistics(*commands.told(process, STATISTICS))
    process.send_signal(signal.SIGTERM)
    commands.told(process, "stopping")
    (commands.directory / "go").touch()
    assert process.wait(300) == 0
    assert commands.lines("done") == ["1"]
    record = commands.store.read("orders")
    assert record is not None
    assert record.owner is None
    second = commands.listen("politely")
    commands.until(lambda: commands.lines("done") == ["1", "2"], second)
    second.send_signal(signal.SIGINT)
    assert second.wait(300) == 0


def statistics(url: str) -> dict[str, float]:
    """The samples of ``orders`` by the ends of their names."""
    with urllib.request.urlopen(url) as reply:
        text = reply.read().decode()
    return {
        name: float(value)
        for name, value in re.findall(r'(?m)^tailrace_listener_(\w+)\{resource="orders"\} (\S+)$', text)
    }


def check_statistics(url: str) -> None:
    with urllib.request.urlopen(url) as reply:
        text = reply.read().decode()
    assert 'tailrace_listener_lease_version{resource="orders"} 1.0' in text
    assert 'tailrace_listener_changes_handled_total{resource="orders"} 0.0' in text
    assert "tailrace_listener_lag_seconds" in text


def health(url: str, name: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url.replace("/metrics", name)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_handler_that_hangs_is_told_and_one_that_stands_by_is_well(commands: Commands) -> None:
    """From outside, a listener that hangs looked like one that waits for its turn."""
    commands.database.orders.insert_one({"_id": 1})
    first = commands.listen("slowly", "--metrics", "127.0.0.1:0", "--hung-after", "0.5")
    (url,) = commands.told(first, STATISTICS)
    commands.until(lambda: health(url, "/livez")[0] == 503, first)
    assert re.match(
        r"the handler of 'orders' has been at work on one change for \d+ s, longer than 0.5 s", health(url, "/livez")[1]
    )
    assert health(url, "/readyz")[0] == 503
    second = commands.listen("politely", "--metrics", "127.0.0.1:0")
    (other,) = commands.told(second, STATISTICS)
    commands.until(lambda: health(other, "/readyz")[0] == 200, second)
    assert re.match("the listener on 'orders' stands by: it does not hold the lease", health(other, "/livez")[1])
    (commands.directory / "go").touch()
    commands.until(lambda: health(url, "/readyz")[0] == 200, first)
    assert "the listener on 'orders' holds its lease" in health(url, "/livez")[1]
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def test_a_view_that_is_kept_says_how_both_of_its_listeners_are(commands: Commands) -> None:
    name, errors = commands.database.name, commands.directory / "errors-view"
    arguments = ["view", "run", "--target", f"{name}.orders", "--source", f"{name}.customers", "--on", "customer"]
    arguments += ["--field", "buyer=name", "--leases", f"{name}.leases", "--metrics", "127.0.0.1:0"]
    process = Forked("tailrace", arguments, cwd=commands.directory, env=commands.environment, errors=errors)
    commands.said[process.pid] = errors
    commands.running.append(process)
    (url,) = commands.told(process, STATISTICS)
    commands.until(lambda: health(url, "/readyz")[0] == 200, process)
    commands.until(lambda: len(re.findall("holds its lease", health(url, "/livez")[1])) == 2, process)
    with urllib.request.urlopen(url) as reply:
        text = reply.read().decode()
    assert len(re.findall(r'(?m)^tailrace_listener_holds_lease\{resource="view .*"\} 1.0$', text)) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_systemd_is_told_and_its_watchdog_is_not_fed_while_a_handler_hangs(
    commands: Commands, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address := str(Path(directory, "notify")))
        manager.settimeout(300)
        said: list[str] = []

        def until(line: str) -> None:
            while line not in said:
                said.extend(manager.recv(4096).decode().split("\n"))

        commands.environment |= {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"}
        lanes = ("--partitions", "2", "--processes", "2") if processes == 2 else ()
        process = commands.listen("slowly", "--hung-after", "0.5", *lanes)
        until("READY=1")
        until("WATCHDOG=1")
        commands.database.orders.insert_one({"_id": 1})
        commands.until(lambda: commands.lines("begun"), process)
        wrong = r"STATUS=the handler of .* longer than 0.5 s|STATUS=process \d of 2 is not alive"
        while not any(re.match(wrong, line) for line in said):
            said.extend(manager.recv(4096).decode().split("\n"))
        said.clear()
        (commands.directory / "go").touch()
        until("WATCHDOG=1")
        assert said[0].startswith("STATUS="), "it was fed before all was well again"
        process.send_signal(signal.SIGTERM)
        until("STOPPING=1")
        assert process.wait(300) == 0


def test_poison_goes_to_the_dead_letters_and_the_listener_goes_on(commands: Commands) -> None:
    """This could not be asked for on the command line: a handler that failed once ended ``tailrace listen``."""
    commands.database.orders.insert_many([{"_id": 1}, {"_id": 2}, {"_id": 3}])
    process = commands.listen(
        "fails_at_two",
        *("--retries", "1", "--dead-letters", f"{commands.database.name}.deadLetters", "--metrics", "127.0.0.1:0"),
    )
    (url,) = commands.told(process, STATISTICS)
    commands.until(lambda: commands.lines("done") == ["1", "3"], process)
    commands.until(lambda: statistics(url)["commits_total"] >= 3, process)
    counted = statistics(url)
    assert counted["changes_handled_total"] == 2
    assert counted["changes_skipped_total"] == 1
    assert counted["handler_failures_total"] == 2
    assert counted["lease_version"] == commands.store.read("orders").version  # type: ignore[union-attr]
    assert counted["leases_lost_total"] == counted["gaps_total"] == 0
    assert 0 <= counted["lag_seconds"] < 3600
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    (letter,) = commands.database.deadLetters.find()
    assert (letter["tries"], letter["reason"], letter["documentKey"]) == (2, "poison", '{"_id": 2}')


@pytest.mark.parametrize("has_letters", [True, False])
def test_what_a_target_does_not_take_goes_to_the_dead_letters_of_a_view_or_ends_it(
    commands: Commands, has_letters: bool
) -> None:
    """One document that the server refused ended ``tailrace view run`` for good, which had no ``--dead-letters``."""
    name, errors = commands.database.name, commands.directory / "errors-view"
    commands.database.customers.insert_many([{"_id": 1, "name": "Ann"}, {"_id": 2, "name": "poison"}])
    commands.database.create_collection("orders", validator={"buyer": {"$ne": "poison"}})
    commands.database.orders.insert_many([{"_id": number, "customer": number % 2 + 1} for number in range(4)])
    arguments = ["view", "run", "--target", f"{name}.orders", "--source", f"{name}.customers", "--on", "customer"]
    arguments += ["--field", "buyer=name", "--leases", f"{name}.leases", "--retries", "1"]
    arguments += ["--dead-letters", f"{name}.deadLetters"] if has_letters else []
    process = Forked("tailrace", arguments, cwd=commands.directory, env=commands.environment, errors=errors)
    commands.said[process.pid] = errors
    commands.running.append(process)
    if not has_letters:
        assert process.wait(300) == 1
        assert "does not accept the fields of the view for the document with _id 1" in errors.read_text()
        return
    orders, letters = commands.database.orders, commands.database.deadLetters
    commands.until(lambda: orders.count_documents({"buyer": "Ann"}) == 2, process)
    commands.until(lambda: letters.count_documents({}) == 2, process)
    assert {letter["documentKey"] for letter in letters.find()} == {'{"_id": 1}', '{"_id": 3}'}
    orders.insert_one({"_id": 4, "customer": 1})
    commands.until(lambda: orders.count_documents({"buyer": "Ann"}) == 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0


def test_leases_are_listed_and_one_is_taken_away(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    uri, where = commands.environment["TAILRACE_URI"], f"{commands.database.name}.leases"
    assert main(["leases", uri, "--store", where]) == 0
    assert capsys.readouterr().out == f"no leases in {where}\n"
    lease = commands.store.acquire("orders", "me", 600)
    assert lease is not None
    commands.store.commit(lease, {"token": {"_data": "82655E32F1000000022B0229296E04"}}, 600)
    commands.database.leases.insert_one({"_id": "edited", "version": "x"})
    assert main(["leases", "list", "--uri", uri, "--store", where, "--format", "json"]) == 1
    edited, orders = json.loads(capsys.readouterr().out)
    assert (edited["resource"], edited["state"]) == ("edited", "unreadable")
    assert "version is not a whole number" in edited["trouble"]
    assert (orders["owner"], orders["version"], orders["state"]) == ("me", 1, "held")
    assert orders["position"] == "Timestamp(1700672241, 2)"
    assert orders["lag"] > 0
    assert orders["age"] >= 0
    assert main(["leases", "release", "orders", uri, "--store", where]) == 0
    assert capsys.readouterr().out == "released orders: it was held by me\n"
    assert main(["leases", uri, "--store", where]) == 1
    assert re.search(r"(?m)^orders +free +1 ", capsys.readouterr().out)


def test_the_lanes_of_two_processes_are_listed_and_one_is_taken_from_its_owner(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier tests of the list had only records that no listener had written."""
    orders, uri = commands.database.orders, commands.environment["TAILRACE_URI"]
    where = f"{commands.database.name}.leases"
    processes = [commands.listen("politely", "--partitions", "4", "--lease-seconds", "20") for _ in range(2)]

    def lanes() -> dict[str, Any]:
        capsys.readouterr()
        assert main(["leases", uri, "--store", where, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return {line["resource"]: line for line in found if re.fullmatch(r"orders/1\.\d", line["resource"])}

    def shared() -> bool:
        owners = [line["owner"] for line in lanes().values() if line["state"] == "held"]
        return sorted(map(owners.count, set(owners))) == [2, 2]

    commands.until(shared, processes[0])
    orders.insert_many([{"_id": number} for number in range(40)])
    commands.until(lambda: len(commands.lines("done")) >= 40, processes[0])
    commands.until(lambda: all(line["lag"] is not None for line in lanes().values()), processes[0])
    before = lanes()
    assert len(before) == 4
    for line in before.values():
        assert line["version"] >= 1
        assert line["age"] >= 0
        assert line["lag"] >= 0
        assert line["position"].startswith("Timestamp(")
        assert (line["gaps"], line["trouble"]) == (0, None)
    assert main(["leases", uri, "--store", where]) == 0
    table = capsys.readouterr().out
    assert re.search(r"(?m)^RESOURCE +STATE +VERSION +AGE +LAG +POSITION +OWNER$", table)
    assert all(re.search(rf"(?m)^{re.escape(name)} +held +\d+ +[\d.]+ s +\d+ s +2\d+-", table) for name in before)
    assert main(["leases", "release", "orders/1.2", uri, "--store", where]) == 0
    assert capsys.readouterr().out.startswith("released orders/1.2: it was held by ")
    commands.until(lambda: lanes()["orders/1.2"]["version"] > before["orders/1.2"]["version"], processes[0])
    orders.insert_many([{"_id": number} for number in range(40, 80)])
    commands.until(lambda: set(commands.lines("done")) == {str(number) for number in range(80)}, processes[0])
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    assert {line["state"] for line in lanes().values()} == {"free"}


def owners_of_lanes(commands: Commands) -> list[str]:
    found = (commands.store.read(f"orders/1.{lane}") for lane in range(4))
    return [lease.owner for lease in found if lease is not None and lease.owner is not None]


def listen_in_two_processes(commands: Commands, *more: str, handler: str = "politely") -> Process:
    """Four lanes, two of them in each process."""
    process = commands.listen(handler, "--partitions", "4", "--processes", "2", *more)

    def shared() -> bool:
        owners = owners_of_lanes(commands)
        return sorted(owners.count(owner) for owner in set(owners)) == [2, 2]

    commands.until(shared, process)
    return process


def process_of(owner: str) -> int:
    """An owner id is made of the host, the process and a random part."""
    return int(owner.split("-")[-2])


def test_one_command_shares_its_lanes_among_processes(commands: Commands) -> None:
    process = listen_in_two_processes(commands, "--metrics", "127.0.0.1:0")
    urls = commands.told(process, STATISTICS, 2)
    assert len({process_of(owner) for owner in owners_of_lanes(commands)} - {process.pid}) == 2
    commands.database.orders.insert_many([{"_id": number} for number in range(60)])
    commands.until(lambda: sum(statistics(url)["commits_total"] for url in urls) >= 60, process)
    assert sum(statistics(url)["changes_handled_total"] for url in urls) == 60
    assert all(statistics(url)["changes_handled_total"] > 0 for url in urls)
    assert sorted(commands.lines("done"), key=int) == [str(number) for number in range(60)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert owners_of_lanes(commands) == []


def test_when_one_process_is_killed_the_command_stops_the_others_and_says_so(commands: Commands) -> None:
    process = listen_in_two_processes(commands, "--lease-seconds", "2")
    killed = process_of(owners_of_lanes(commands)[0])
    os.kill(killed, signal.SIGKILL)
    assert process.wait(300) == 1
    commands.told(process, f"process {killed} was ended by SIGKILL; the others have been stopped")
    assert {process_of(owner) for owner in owners_of_lanes(commands)} <= {killed}
    commands.database.orders.insert_many([{"_id": number} for number in range(60)])
    second = listen_in_two_processes(commands, "--lease-seconds", "2")
    commands.until(lambda: len(commands.lines("done")) == 60, second)
    second.send_signal(signal.SIGINT)
    assert second.wait(300) == 0


def test_a_supervisor_may_signal_each_process_too(commands: Commands) -> None:
    """As systemd does by default. The second SIGTERM ended each process in the middle of a change; tests had signalled
    only the command."""
    process = listen_in_two_processes(commands, handler="slowly")
    commands.database.orders.insert_many([{"_id": number} for number in range(60)])
    commands.until(lambda: len(commands.lines("begun")) == 4, process)
    parts = {process_of(owner) for owner in owners_of_lanes(commands)}
    process.send_signal(signal.SIGTERM)
    commands.told(process, "stopping", len(parts))  # told by the command
    for part in parts:
        os.kill(part, signal.SIGTERM)
    (commands.directory / "go").touch()
    assert process.wait(300) == 0
    assert len(commands.lines("done")) >= 4
    assert sorted(commands.lines("done")) == sorted(commands.lines("begun"))
    assert owners_of_lanes(commands) == []


def test_processes_end_with_the_command_that_started_them(commands: Commands) -> None:
    process = listen_in_two_processes(commands)
    process.kill()
    process.wait()
    commands.until(lambda: owners_of_lanes(commands) == [])


def test_an_error_in_one_process_ends_the_command_with_it(commands: Commands) -> None:
    commands.database.orders.insert_many([{"_id": number} for number in range(20)])
    process = commands.listen("fails", "--partitions", "4", "--processes", "2")
    assert process.wait(300) == 1
    said = commands.said[process.pid].read_text()
    assert "raised ValueError in handlers.py, line 18," in said
    assert "Traceback" not in said
    assert owners_of_lanes(commands) == []


WRONG: dict[str, tuple[list[str], str]] = {
    "an unknown resource": (["leases", "release", "nothing"], "there is no lease on 'nothing'"),
    "no resource": (["leases", "release"], "which lease is to be released?"),
    "another word": (["leases", "freeze"], "'freeze' is not understood"),
    "no function": (["listen", "handlers", "--resource", "r"], "does not name a handler"),
    "no module": (["listen", "nowhere:handle", "--resource", "r"], "there is no module 'nowhere'"),
    "no such function": (["listen", "json:nothing", "--resource", "r"], "has no function 'nothing'"),
    "a collection alone": (["listen", "json:dumps", "--resource", "r", "--collection", "c"], "needs --database"),
    "a store that is no collection": (
        ["listen", "json:dumps", "--resource", "r", "--store", "x"],
        "is not a collection",
    ),
    "an address without a port": (["listen", "json:dumps", "--resource", "r", "--metrics", "x"], "is not an address"),
    "more processes than lanes": (
        ["listen", "json:dumps", "--resource", "r", "--partitions", "2", "--processes", "3"],
        "--processes must be between 1 and the number of partitions, 2, not 3",
    ),
    "no process": (["listen", "json:dumps", "--resource", "r", "--processes", "0"], "--processes must be between 1"),
    "no module for several processes": (
        ["listen", "nowhere:handle", "--resource", "r", "--partitions", "2", "--processes", "2"],
        "there is no module 'nowhere'",
    ),
    "no commits": (["listen", "json:dumps", "--resource", "r", "--commit-every", "0"], "commit_every must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_an_error_in_a_sentence(
    name: str, commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, words = WRONG[name]
    monkeypatch.setenv("TAILRACE_URI", commands.environment["TAILRACE_URI"])
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_handler_that_raises_ends_the_command_with_the_position_kept(commands: Commands) -> None:
    commands.database.orders.insert_one({"_id": 1})
    process = commands.listen("fails")
    assert process.wait(300) == 1
    said = commands.said[process.pid].read_text()
    assert "raised ValueError in handlers.py, line 18," in said
    assert ": no. The position stands before this change" in said
    assert "Traceback" not in said
    second = commands.listen("politely")
    commands.until(lambda: commands.lines("done") == ["1"], second)


def test_each_change_takes_effect_once_though_processes_are_killed(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    """A process that is killed in a transaction leaves it open: the next one waits until the server has ended it, here
    after two seconds, by default after 60."""
    replica_set = start_replica_set(1, parameters={"transactionLifetimeLimitSeconds": 2})
    with MongoClient[dict[str, Any]](replica_set.uri) as client, ExitStack() as stack:
        commands = Commands(tmp_path, replica_set, client["killed"])
        counters = commands.database["counters"]
        commands.database.create_collection("counters")
        commands.database.orders.insert_many([{"_id": number} for number in range(120)])
        for _ in range(3):
            before = counters.count_documents({})
            process = commands.listen("counts", "--lease-seconds", "1", "--commit-every", "7")
            stack.callback(process.kill)
            commands.until(lambda before=before: counters.count_documents({}) >= min(120, before + 20), process)
            process.kill()
            process.wait()
        last = commands.listen("counts", "--lease-seconds", "1")
        stack.callback(last.kill)
        commands.until(lambda: counters.count_documents({}) == 120, last)
        last.send_signal(signal.SIGTERM)
        assert last.wait(300) == 0
        assert counters.count_documents({"times": 1}) == 120
