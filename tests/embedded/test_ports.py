"""No port for two servers, whichever process asks.

Two test processes that started servers at the same moment were given the same port. The second server ended, so its
process reached the first server, and waited five minutes for a replica set that nobody initiated. No test had seen
this, since each starts its servers within one process, where the chance is one in 20,000.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pymongo
import pytest

from tailrace.embedded import ReplicaSet, mongod, ports

CLAIM = """
import sys
from tailrace.embedded import ports
print(ports._claim(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def claimer(port: int) -> subprocess.Popen[str]:
    """Another process that claims the port, and keeps it as long as it runs. Its first line says whether it got it."""
    command = [sys.executable, "-c", CLAIM, str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def claims(port: int) -> bool:
    with claimer(port) as process:
        out, _ = process.communicate()
    return out.strip() == "True"


def test_a_port_is_given_to_no_other_process_until_it_is_given_up() -> None:
    port = ports.free_port()
    assert not claims(port)
    ports.give_up_port(port)
    assert claims(port)
    ports.give_up_port(port)  # not ours any more: nothing happens


def test_a_process_that_is_killed_gives_up_its_ports() -> None:
    port = ports.free_port()
    ports.give_up_port(port)
    with claimer(port) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert not ports._claim(port)
        other.kill()
    assert ports._claim(port)
    ports.give_up_port(port)


def test_a_child_that_ends_does_not_give_up_the_ports_of_its_parent() -> None:
    port = ports.free_port()
    child = os.fork()
    if child == 0:
        ports.free_port()
        os._exit(0)
    os.waitpid(child, 0)
    assert not claims(port)
    ports.give_up_port(port)


@pytest.mark.mongod
def test_a_server_that_got_the_same_port_is_not_taken_for_ours(
    replica_set: ReplicaSet, start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = [replica_set.members[0].port or 0]
    monkeypatch.setattr(mongod, "free_port", lambda: given.pop() if given else ports.free_port())
    started = start_replica_set()
    assert not given
    assert started.members[0].port != replica_set.members[0].port
    with pymongo.MongoClient(started.uri) as client:
        assert client.admin.command("replSetGetStatus")["members"][0]["name"] == started.members[0].host


@pytest.mark.mongod
def test_what_ended_a_member_is_told_when_its_replica_set_does_not_become_ready(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    started = start_replica_set()
    started.kill()
    with pytest.raises(mongod.EmbeddedError, match=r"within 0\.1 s; member 0 is not running \(see .*mongod\.log\)$"):
        started.wait_until_ready(timeout_s=0.1)
