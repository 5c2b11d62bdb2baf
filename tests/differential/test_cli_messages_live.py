"""What commands say where the deployment is there and the name is not, or something else answers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.base import durable
from tailrace.embedded import ReplicaSet
from tailrace.lake.tables.holding import lock
from tests import commands

NAME = "cli_messages"


@pytest.fixture
def orders(replica_set: ReplicaSet) -> Iterator[Any]:
    with MongoClient[Any](replica_set.uri) as client:
        client[NAME]["orders"].insert_one({"_id": 1})
        yield client[NAME]["orders"]
        client.drop_database(NAME)


def test_a_pattern_that_no_collection_matches_is_named(replica_set: ReplicaSet, orders: Any, tmp_path: Path) -> None:
    """The command only said that the tables equal their collections, and `verify` of no table said nothing."""
    both, none = str(tmp_path / "both"), str(tmp_path / "none")
    done = commands.run_text("tables", "write", "--once", replica_set.uri, both, f"{NAME}.orders", f"{NAME}.ordres")
    assert (done.returncode, done.stderr.count("The tables equal their collections")) == (0, 1)
    assert f"No collection matches {NAME}.ordres" in done.stderr
    done = commands.run_text("tables", "write", "--uri", replica_set.uri, none, f"{NAME}.ordres", "--once")
    assert done.returncode == 0
    assert f"No collection matches {NAME}.ordres: there is no table yet" in done.stderr
    assert "equal" not in done.stderr
    assert done.stderr.startswith(f"tailrace: writing tables of {NAME}.ordres into {none}\n"), "it was silent at first"
    done = commands.run_text("tables", "verify", replica_set.uri, none)
    assert (done.returncode, done.stdout) == (0, "There are no tables: no collection matches\n")


def test_a_collection_that_does_not_exist_is_told_beside_the_stream(replica_set: ReplicaSet, orders: Any) -> None:
    near = {f"{NAME}.ordres": f"{NAME}.orders", f"{NAME}_": NAME, "nobody_s": None}
    for name, suggested in near.items():
        meant = "." if suggested is None else f". Did you mean {suggested}?"
        done = commands.run_text("watch", replica_set.uri, name, "--until", "now")
        kind = "collection" if "." in name else "database"
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.strip().removesuffix(
            "."
        ) == f"tailrace: no {kind} {name} exists at the moment{meant}".removesuffix(".")
    now = orders.database.client.admin.command("ping")["operationTime"]
    for arguments in ([f"{NAME}.orders"], [f"{NAME}.gone", "--start-at-operation-time", f"{now.time},{now.inc}"]):
        done = commands.run_text("watch", replica_set.uri, *arguments, "--until", "now")
        assert (done.returncode, done.stderr) == (0, "")  # there may still be events of an earlier time


@pytest.mark.parametrize("given", [["--database", "shop/orders"], ["--database", "shop", "--collection", "or$ders"]])
def test_a_listener_of_an_impossible_name_ends_in_a_sentence(replica_set: ReplicaSet, given: list[str]) -> None:
    """PyMongo's InvalidName came through as a traceback."""
    done = commands.run_text("listen", "os:getcwd", "--uri", replica_set.uri, "--resource", NAME, *given)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert given[-1] in done.stderr or "must not contain '$'" in done.stderr


@contextmanager
def _answering(greeting: bytes) -> Iterator[int]:
    """A service other than mongod, which sends ``greeting`` to each client, or nothing if there is none."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            held = []
            while True:
                try:
                    client, _ = server.accept()
                    held.append(client)
                    if greeting:
                        client.sendall(greeting)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "a program other than MongoDB answers there"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", "a program other than MongoDB answers there"),
        (b"J\0\0\0\n8.0.36\0\x08\0\0\0abcdefgh\0\xff\xf7", "a program other than MongoDB answers there"),
        (b"", "no answer so far"),
    ],
)
def test_another_program_at_the_port_is_told(greeting: bytes, said: str, tmp_path: Path) -> None:
    """The driver's words were passed on ("Got response id 1414012997 but expected ..."), or "unknown"."""
    with _answering(greeting) as port:
        uri = f"mongodb://127.0.0.1:{port}/?serverSelectionTimeoutMS=600"
        for command in (
            ["watch", uri],
            ["doctor", uri],
            ["streams", uri],
            ["archive", uri, str(tmp_path / "archive"), "--once"],
            ["tables", "write", uri, str(tmp_path / "tables"), "shop.*", "--once"],
            ["gateway", "--upstream", uri, "--listen", "127.0.0.1:0"],
        ):
            done = commands.run_text(*command)
            assert done.returncode == 1, command
            assert f"cannot reach 127.0.0.1:{port}: {said}" in done.stdout + done.stderr, command


def test_a_second_run_of_a_pipeline_says_that_another_process_writes(
    replica_set: ReplicaSet, orders: Any, tmp_path: Path
) -> None:
    """The message asked whether an old copy of the checkpoint had been restored: two concurrent runs had not been
    tried."""
    lake, checkpoint, pipeline = tmp_path / "lake", tmp_path / "lake.checkpoint", tmp_path / "pipeline.yaml"
    pipeline.write_text(f"source: {{uri: '{replica_set.uri}', database: {NAME}}}\nlake: {{path: {lake}}}\n")
    checkpoint.mkdir()
    with durable.locked(checkpoint / "tailrace-run.lock") as mine:
        assert mine
        done = commands.run_text("run", str(pipeline))
    assert done.returncode == 1
    assert f"another process writes the lake {lake}, with the checkpoint {checkpoint}" in done.stderr
    tables = str(tmp_path / "tables")
    with tables_locked(tmp_path / "tables"):
        done = commands.run_text("tables", "write", replica_set.uri, tables, f"{NAME}.*", "--once")
    assert done.returncode == 1
    assert f"another process writes the tables in {tables}" in done.stderr


@contextmanager
def tables_locked(root: Path) -> Iterator[None]:
    held = lock(root)
    try:
        yield
    finally:
        os.close(held)
