"""The console over HTTP against a real deployment: what its panels say, and what it does not say."""

from __future__ import annotations

import base64
import json
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

import tailrace
from tailrace.base.threads import CheckedThread
from tailrace.cli.panels.activity import Activity
from tailrace.cli.panels.screen import screen
from tailrace.cli.panels.sources import Targets
from tailrace.cli.web.guard import HEADERS
from tailrace.cli.web.server import ConsoleOptions, serving_console
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.read.source.uri import hide
from tests.console.serving import ServedConsole, served
from tests.differential.beside import wait_until
from tests.gateway.gateways import running_gateway

pytestmark = pytest.mark.mongod
PASSWORD = "pa55-of-the-console"


@pytest.fixture(scope="module")
def console(replica_set: ReplicaSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedConsole]:
    missing = tmp_path_factory.mktemp("empty")
    with served(replica_set.uri, Targets(lakes=[missing], archives=[missing])) as found:
        yield found


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        yield client[f"console_{request.node.name[:40]}"]


def until_panel(console: ServedConsole, name: str) -> dict[str, Any]:
    with console.live() as messages:
        return next(value for kind, value in messages if kind == "panel" and value["name"] == name)


def test_every_answer_has_the_headers_and_only_reading_is_answered(console: ServedConsole) -> None:
    for path in ("/", "/console.js", "/charts.js", "/panels.js", "/console.css", "/icon.svg", "/api/state", "/nowhere"):
        status, headers, _ = console.ask(path)
        assert status == (404 if path == "/nowhere" else 200)
        assert HEADERS.items() <= headers.items(), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert console.ask("/api/state", method)[0] == 405
    assert console.ask("/api/state", "HEAD")[2] == ""
    assert console.ask("/api/state", Host="evil.example")[0] == 421
    assert console.ask("/api/live", Sec_Fetch_Site="cross-site")[0] == 403


def test_the_page_is_whole_without_a_network(console: ServedConsole) -> None:
    for path in ("/", "/console.js", "/charts.js", "/panels.js", "/console.css"):
        text = console.ask(path)[2]
        assert "https://" not in text
        assert [word for word in text.split() if "http://" in word and "www.w3.org/2000/svg" not in word] == []
        assert " style=" not in text, "an inline style, which the policy forbids"


def test_events_are_counted_by_namespace_and_kind_and_shown(console: ServedConsole, shop: Any) -> None:
    name = f"{shop.name}.orders"
    console.wait_until_it_follows()
    with console.live() as messages:
        kinds = [next(messages)[0]]
        assert kinds == ["panels"]
        for number in range(30):
            shop.orders.insert_one({"_id": number, "of": "a stranger"})
        shop.orders.update_one({"_id": 3}, {"$set": {"of": "nobody"}})
        shop.orders.delete_one({"_id": 4})
        wanted = {"insert": 30, "update": 1, "delete": 1}
        shown, counted = [], {}
        for kind, value in messages:
            if kind == "event" and value["namespace"] == name:
                shown.append(value)
            if kind == "panel" and value["name"] == "activity":
                counted = dict(value["data"]["namespaces"]).get(name, {})
                if {operation: counted.get(operation) for operation in wanted} == wanted:
                    break
    assert shown[0]["operation"] == "create" or shown[0]["rows"][0][:2] == ["added", "_id"]
    assert 0 < len(shown) < 32, "a few of each second"


def test_a_panel_that_fails_harms_no_other(console: ServedConsole) -> None:
    lakes = until_panel(console, "lakes")
    assert "is not a lake of Tailrace" in lakes["data"][0]["error"]
    streams = until_panel(console, "streams")
    assert (streams["error"], streams.get("data")) == ("that is a server, not a gateway", None)
    shards = until_panel(console, "shards")
    assert shards["data"]["shards"][0]["reach"] >= 0
    doctor = until_panel(console, "doctor")
    assert {one["check"]: one["status"] for one in doctor["data"]}["rights"] == "ok"
    assert set(console.state()) >= {"activity", "shards", "streams", "leases", "letters", "doctor", "lakes", "archives"}


def test_a_token_is_decoded_and_what_is_none_is_told(console: ServedConsole) -> None:
    good = json.loads(console.ask("/api/token?token=8265000000000000012B0429296E1404")[2])
    assert good["token"]["clusterTime"]["t"] == 0x65000000
    assert "error" in json.loads(console.ask("/api/token?token=zz")[2])
    assert "longer than" in json.loads(console.ask("/api/token?token=" + "8" * 20_001)[2])["error"]


def test_a_gateway_shows_its_streams(replica_set: ReplicaSet, shop: Any) -> None:
    with (
        running_gateway(replica_set.uri) as gateway,
        pymongo.MongoClient[dict[str, Any]](gateway.uri()) as client,
        client[shop.name].orders.watch(max_await_time_ms=100),
        served(gateway.uri()) as console,
    ):
        found = until_panel(console, "streams")["data"]
        assert [one["ns"] for one in found["streams"]] == [f"{shop.name}.orders"]
        assert found["gateway"]["connections"] >= 1


def test_the_address_is_in_use_and_that_is_told(replica_set: ReplicaSet, console: ServedConsole) -> None:
    options = ConsoleOptions(port=console.port)
    with pytest.raises(SinkError, match="cannot listen"), serving_console(hide(replica_set.uri), Targets(), options):
        pass


# -- users -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[ReplicaSet]:
    with ReplicaSet(1, root_password=PASSWORD) as running:
        with pymongo.MongoClient[dict[str, Any]](running.uri) as client:
            for name, roles in (("viewer", ["root"]), ("monitor", ["clusterMonitor"]), ("clerk", ["readAnyDatabase"])):
                client.admin.command("createUser", name, pwd=f"{name}-pwd", roles=roles)
        yield running


def basic(pair: str) -> str:
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def test_only_a_user_who_may_read_what_is_shown_is_let_in(guarded: ReplicaSet) -> None:
    with served(guarded.uri, login=True) as console:
        for path in ("/", "/console.js", "/api/state", "/api/live", "/api/token?token=82"):
            assert console.ask(path)[0] == 401, path
        assert console.ask(Authorization=basic("viewer:viewer-pwd"))[0] == 200
        status, _, text = console.ask(Authorization=basic("viewer:wrong"))
        assert (status, "viewer" in text.replace("viewer-pwd", "")) == (401, False)
        assert "may not read local.oplog.rs" in console.ask(Authorization=basic("clerk:clerk-pwd"))[2]
        if int(guarded.version.partition(".")[0]) >= 6:
            assert "may not read config.system.preimages" in console.ask(Authorization=basic("monitor:monitor-pwd"))[2]
    letters = Targets(letters="shop.letters")
    with served(guarded.uri, letters, login=True, images=False) as console:
        assert "may not read shop.letters" in console.ask(Authorization=basic("monitor:monitor-pwd"))[2]


def test_a_user_without_the_right_to_read_images_sees_what_the_oplog_says(guarded: ReplicaSet) -> None:
    address = guarded.uri.rpartition("@")[2]
    with (
        pymongo.MongoClient[dict[str, Any]](guarded.uri) as client,
        served(f"mongodb://monitor:monitor-pwd@{address}") as console,
    ):
        console.wait_until_it_follows()
        client.shop.create_collection("kept", changeStreamPreAndPostImages={"enabled": True})
        client.shop.kept.insert_one({"_id": 1, "a": 1})
        client.shop.kept.update_one({"_id": 1}, {"$set": {"a": 2}})
        with console.live() as messages:
            for kind, value in messages:
                events = [value] if kind == "event" else value if kind == "events" else []
                found = [
                    one["rows"] for one in events if (one["namespace"], one["operation"]) == ("shop.kept", "update")
                ]
                if found:
                    break
        assert found == [[["changed", "a", None, "2"]]]
        assert console.state()["activity"]["data"]["trouble"] is None


def test_a_console_beyond_this_machine_speaks_tls_and_asks_for_a_user(
    guarded: ReplicaSet, replica_set: ReplicaSet, certificates: Path
) -> None:
    certificate = str(certificates / "server.pem")
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with served(guarded.uri, host="0.0.0.0", certificate=certificate, names=["localhost"]) as console:
        url = f"https://localhost:{console.port}/"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, context=context)
        request = urllib.request.Request(url, headers={"Authorization": basic("viewer:viewer-pwd")})
        with urllib.request.urlopen(request, context=context) as answer:
            assert answer.status == 200
    options = ConsoleOptions(host="0.0.0.0", port=0, certificate=certificate)
    with (
        pytest.raises(UsageError, match="asks for a user of the deployment"),
        serving_console(hide(replica_set.uri), Targets(), options),
    ):
        pass


def test_no_password_is_ever_shown(guarded: ReplicaSet, tmp_path: Path) -> None:
    away = guarded.uri.replace(f"{guarded.uri.rpartition('@')[2].partition('/')[0]}", "127.0.0.1:9")
    assert PASSWORD in away
    targets = Targets(gateway=hide(away + "&serverSelectionTimeoutMS=200"), syncs=[hide(away)], tables=[tmp_path])
    with served(guarded.uri, targets) as console:
        with console.live() as messages:
            names = set()
            for kind, value in messages:
                assert PASSWORD not in json.dumps(value)
                if kind == "panel":
                    names.add(value["name"])
                if names >= {"activity", "shards", "streams", "leases", "letters", "doctor", "tables"}:
                    break
        assert PASSWORD not in console.ask("/api/state")[2]
        assert "127.0.0.1:9" in console.state()["streams"]["error"]


# -- tailrace top ------------------------------------------------------------------------------------------------------


def top(uri: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tailrace", "top", uri, "--interval", "0.5", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_top_once_as_json(replica_set: ReplicaSet) -> None:
    output, errors = (process := top(replica_set.uri, "--once", "--json")).communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    found = json.loads(output)
    assert found["shards"]["data"]["kind"] == "replica set"
    assert found["eventsPerSecond"] >= 0


def test_top_in_a_pipe_until_it_is_interrupted(replica_set: ReplicaSet) -> None:
    process = top(replica_set.uri)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("tailrace top · replica set")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors, "\x1b" in output) == (0, "", False)


def test_top_on_a_terminal_gives_it_back_as_it_was(replica_set: ReplicaSet) -> None:
    import os
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "top", replica_set.uri, "--interval", "0.2"],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = bytearray()

    def has_come(wanted: bytes) -> bool:
        seen.extend(os.read(ours, 65_536))
        return wanted in seen

    wait_until(lambda: has_come(b"OPLOG"), "a look is on the screen")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: has_come(b"\x1b[?25h\x1b[?1049l"), "the cursor and the screen are back")
    assert process.wait(300) == 0
    assert seen.index(b"\x1b[?1049h") < seen.index(b"\x1b[H")
    os.close(ours)


def test_top_says_that_a_deployment_is_not_there() -> None:
    process = top("mongodb://127.0.0.1:9/?serverSelectionTimeoutMS=200", "--once")
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, output) == (1, "")
    assert errors.startswith("tailrace: ")


def test_what_was_not_counted_is_told(shop: Any, replica_set: ReplicaSet) -> None:
    """An event above 16 MB ends a stream. What comes until the console follows again is in no count, and it says so."""
    shop.create_collection("large", changeStreamPreAndPostImages={"enabled": True})
    shop.large.insert_one({"_id": 1, "text": "x" * (9 << 20)})
    with tailrace.connect(replica_set.uri) as client:
        activity = Activity(client)
        thread = CheckedThread(activity.run, "activity")
        thread.start()
        try:
            wait_until(lambda: bool(shop.other.insert_one({})) and activity.total > 0, "it follows")
            assert activity.read()["skipped"] == 0
            shop.large.update_one({"_id": 1}, {"$set": {"n": 1}})
            wait_until(lambda: activity.read()["skipped"] == 1, "the gap is told")
            before = activity.total
            wait_until(lambda: bool(shop.other.insert_one({})) and activity.total > before, "it goes on")
        finally:
            activity.stop()
            thread.join()
    lines = list(screen({"activity": {"data": activity.read()}}, 0.0))
    assert "gaps in what is counted: 1; after each it went on at the present" in lines
