"""A wrong start of ``tailrace gateway``: one sentence, no traceback, and never a password."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.embedded import ReplicaSet
from tailrace.watch.gateway.process import raise_file_limit
from tests import commands
from tests.gateway.running import GatewayProcess

SECRET = "s3cret"
AWAY = f"mongodb://user:{SECRET}@127.0.0.1:1/?serverSelectionTimeoutMS=300"


def gateway(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    without = {name: value for name, value in os.environ.items() if name != "TAILRACE_URI"}
    return commands.run_text("gateway", *words, env=without | environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no connection URI was given"),
        (("--upstream", AWAY), "cannot reach 127.0.0.1:1"),
        (("--upstream", f"{AWAY}&bogus=1"), "cannot reach 127.0.0.1:1"),
        (("--upstream", f"{AWAY}&tls=perhaps"), "cannot reach 127.0.0.1:1"),
        (("--upstream", f"{AWAY}&tls=true&tlsCAFile=/nothing.pem"), "nothing.pem"),
        (("--upstream", f"mongodb://user:{SECRET}:x@127.0.0.1/"), "does not parse"),
        (("--upstream", f"http://user:{SECRET}@127.0.0.1/"), "does not begin with mongodb://"),
        (("--upstream", "@/nothing"), "cannot be read from the file"),
        (("--upstream", AWAY, "--listen", "here"), "--listen: 'here' is not an address"),
        (("--upstream", AWAY, "--advertise", "here"), "--advertise: 'here' is not an address"),
        (("--upstream", AWAY, "--metrics", "here"), "--metrics: 'here' is not an address"),
        (("--upstream", AWAY, "--window-mb", "0"), "--window-mb must be at least 1"),
        (("--upstream", AWAY, "--tls-ca-file", "x"), "--tls-ca-file needs --tls-certificate-key-file"),
        (("--upstream", AWAY, "--tls-certificate-key-file", "/nothing.pem"), "there is no file '/nothing.pem'"),
    ],
)
def test_a_wrong_start_is_told_in_a_sentence(words: tuple[str, ...], said: str) -> None:
    """An option that PyMongo does not know ended in a traceback: PyMongo itself only warns of it."""
    done = gateway(*words)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr + done.stdout
    told = [line for line in done.stderr.splitlines() if not line.startswith("tailrace: connection URI: ")]
    assert len(told) == 1, done.stderr


@pytest.mark.mongod
def test_a_port_that_is_taken_is_told(replica_set: ReplicaSet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = gateway("--upstream", replica_set.uri, "--listen", "127.0.0.1:0", "--metrics", address)
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.mongod
def test_a_password_reaches_no_log(replica_set: ReplicaSet, tmp_path: Path) -> None:
    refused = gateway("--upstream", replica_set.uri.replace("//", f"//user:{SECRET}@"), "--listen", "127.0.0.1:0")
    assert refused.returncode == 1
    assert SECRET not in refused.stderr
    with GatewayProcess(replica_set.uri, tmp_path / "log", "--log", "json") as running:
        wrong = f"mongodb://user:{SECRET}@{running.address}/?authSource=admin"
        with pymongo.MongoClient[Any](wrong) as client, pytest.raises(pymongo.errors.OperationFailure):
            client.shop.c.watch()
    assert SECRET not in (tmp_path / "log").read_text()


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard <= 256:
        pytest.skip("the system allows no more files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
