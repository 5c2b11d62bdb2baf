"""``--console`` of services: the page in the process that it shows, with what the service says of itself."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet
from tests.console.serving import ServedConsole, panel
from tests.differential.beside import wait_until

pytestmark = pytest.mark.mongod
DATABASE = "console_beside"


@contextmanager
def service(folder: Path, *arguments: str) -> Iterator[ServedConsole]:
    """A command with ``--console`` at a free port, ended as Ctrl-C ends it."""
    (folder / "handlers.py").write_text("def handle(change):\n    pass\n")
    log = folder / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tailrace", *arguments, "--console", "0"], cwd=folder, stdout=sink, stderr=sink
        )
    try:

        def url() -> Any:
            assert process.poll() is None, log.read_text()
            return re.search(r"the console is at (http://127\.0\.0\.1:\d+/)", log.read_text())

        wait_until(lambda: url() is not None, "the console is there")
        yield ServedConsole(url()[1])
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def commands(uri: str, port: int) -> dict[str, Sequence[str]]:
    return {
        "tailrace_gateway_streams": ("gateway", "--upstream", uri, "--listen", f"127.0.0.1:{port}"),
        "tailrace_tables_tables": ("tables", "write", uri, "made", f"{DATABASE}.*"),
        "tailrace_listener_holds_lease": (
            "listen", "handlers:handle", "--uri", uri, "--database", DATABASE, "--resource", "beside",
            "--store", f"{DATABASE}.leases",
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "metric", ["tailrace_gateway_streams", "tailrace_tables_tables", "tailrace_listener_holds_lease"]
)
def test_a_service_shows_itself(replica_set: ReplicaSet, tmp_path: Path, metric: str) -> None:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client, socket.socket() as free:
        client[DATABASE].orders.insert_one({})
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with service(tmp_path, *commands(replica_set.uri, port)[metric]) as console:
        assert panel(console, "service", metric)["data"]
        if metric == "tailrace_gateway_streams":
            with (
                pymongo.MongoClient[dict[str, Any]](f"mongodb://127.0.0.1:{port}/?directConnection=true") as client,
                client[DATABASE].orders.watch(max_await_time_ms=100),
            ):
                wait_until(lambda: panel(console, "streams").get("data", {}).get("count") == 1, "its stream is shown")
        elif metric == "tailrace_tables_tables":
            assert [(one["place"], one.get("error")) for one in panel(console, "tables")["data"]] == [("made", None)]
            # A copy that is stopped before its end is an exit status of 1.
            assert panel(console, "service", "tailrace_tables_stated_seconds")["data"]
        else:
            wait_until(
                lambda: [one["resource"] for one in panel(console, "leases")["data"]["leases"]] == ["beside"],
                "its lease is shown",
            )


def test_it_serves_this_machine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ("gateway", "--upstream", "mongodb://127.0.0.1:9/"),
        ("tables", "write", "mongodb://127.0.0.1:9/", str(tmp_path), "a.*"),
        ("listen", "handlers:handle", "--uri", "mongodb://127.0.0.1:9/", "--resource", "a"),
    ):
        assert main([*command, "--console", "0.0.0.0:8099"]) == 1
        assert "serves only this machine" in capsys.readouterr().err
    assert main(["tables", "status", str(tmp_path), "--console", "8099"]) == 2
