"""The embedded MongoDB, with real mongods."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pymongo
import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from tailrace.embedded import EmbeddedError, Mongod, ReplicaSet
from tailrace.errors import UsageError

pytestmark = pytest.mark.mongod
Start = Callable[..., ReplicaSet]

PARENT = """
import sys, threading, time
from tailrace.embedded import ReplicaSet
replica_set = ReplicaSet(data_dir=sys.argv[1] or None)
starter = threading.Thread(target=replica_set.start)  # the thread ends long before the process
starter.start()
starter.join()
print(replica_set.members[0].pid, replica_set.data_dir, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and is not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.05)


def start_parent(data_dir: str) -> tuple[subprocess.Popen[str], int, Path]:
    """A process with a replica set: itself, its mongod's process id, and the data directory."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, data_dir], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, _, directory = parent.stdout.readline().strip().partition(" ")
    return parent, int(pid), Path(directory)


def test_the_shared_replica_set_is_6_0_27_and_accepts_majority_writes(replica_set: ReplicaSet) -> None:
    with pymongo.MongoClient(replica_set.uri, w="majority") as client:
        client.embedded.written.insert_one({"_id": 1})
        assert client.server_info()["version"] == replica_set.version == "6.0.27"
        assert client.embedded.written.count_documents({}) == 1
        client.admin.command("configureFailPoint", "failCommand", mode="off")


def test_it_listens_on_the_loopback_address_alone(replica_set: ReplicaSet) -> None:
    port = replica_set.members[0].port
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    addresses = {row[1] for row in listening if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    assert addresses == {f"0100007F:{port:04X}"}


def test_data_survive_a_kill_and_a_restart(start_replica_set: Start) -> None:
    replica_set = start_replica_set()
    with pymongo.MongoClient(replica_set.uri, serverSelectionTimeoutMS=500) as client:
        client.shop.orders.insert_one({"_id": 1})
        pid = replica_set.members[0].pid
        assert replica_set.kill() == 0
        assert pid is not None
        assert not is_alive(pid)
        with pytest.raises(AutoReconnect):
            client.shop.orders.find_one()
    replica_set.restart(0)
    with pymongo.MongoClient(replica_set.uri) as client:
        assert client.shop.orders.find_one() == {"_id": 1}
        client.shop.orders.insert_one({"_id": 2})


def test_three_members_elect_another_primary_at_a_step_down_and_at_a_kill(start_replica_set: Start) -> None:
    replica_set = start_replica_set(3)
    with pymongo.MongoClient(replica_set.uri, w="majority") as client:
        client.shop.orders.insert_one({"_id": 1})
        first = replica_set.primary
        second = replica_set.step_down()
        assert second != first
        client.shop.orders.insert_one({"_id": 2})
        assert replica_set.kill() == second
        assert replica_set.primary != second
        client.shop.orders.insert_one({"_id": 3})
        replica_set.restart(second)
        with pymongo.MongoClient(replica_set.members[second].uri, readPreference="secondaryPreferred") as one:
            wait_until(lambda: one.shop.orders.count_documents({}) == 3)


def test_a_lone_member_is_primary_again_after_a_step_down(start_replica_set: Start) -> None:
    replica_set = start_replica_set()
    with pymongo.MongoClient(replica_set.uri) as client:
        before = client.admin.command("replSetGetStatus")["term"]
        assert replica_set.step_down() == 0
        assert client.admin.command("replSetGetStatus")["term"] > before
        client.shop.orders.insert_one({"_id": 1})


def test_a_given_directory_keeps_its_data_for_the_next_replica_set(start_replica_set: Start, tmp_path: Path) -> None:
    with ReplicaSet(data_dir=tmp_path) as replica_set, pymongo.MongoClient(replica_set.uri) as client:
        client.shop.orders.insert_one({"_id": 1})
        uri = replica_set.uri
    again = start_replica_set(data_dir=tmp_path)
    assert again.uri == uri
    with pymongo.MongoClient(again.uri) as client:
        assert client.shop.orders.find_one() == {"_id": 1}
    with pytest.raises(EmbeddedError, match=r"Port \d+ of the replica set in .* is in use"):
        ReplicaSet(data_dir=tmp_path)
    with pytest.raises(UsageError, match="holds a replica set of 1 members, not 3"):
        ReplicaSet(3, data_dir=tmp_path)


def test_nothing_is_left_when_the_block_is_left() -> None:
    with ReplicaSet() as replica_set:
        pid = replica_set.members[0].pid
        assert pid is not None
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not replica_set.data_dir.exists()
    replica_set.close()


def test_mongod_outlives_the_thread_that_started_it_but_not_the_killed_process() -> None:
    parent, pid, directory = start_parent("")
    assert is_alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not directory.exists())


def test_a_killed_process_leaves_a_given_directory_behind_with_its_data(
    start_replica_set: Start, tmp_path: Path
) -> None:
    parent, pid, directory = start_parent(str(tmp_path))
    port = (tmp_path / "ports").read_text().strip()
    with pymongo.MongoClient(f"mongodb://127.0.0.1:{port}/?directConnection=true", w="majority") as client:
        client.shop.orders.insert_one({"_id": 1})
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not is_alive(pid))
    assert directory == tmp_path
    with pymongo.MongoClient(start_replica_set(data_dir=tmp_path).uri) as client:
        assert client.shop.orders.find_one() == {"_id": 1}


def test_a_kept_port_that_is_given_up_a_little_late_is_waited_for(start_replica_set: Start, tmp_path: Path) -> None:
    """A killed mongod counts as dead before its last thread releases the port. (No test had held the port open on
    purpose: in most runs mongod is faster than the next start.)"""
    with ReplicaSet(data_dir=tmp_path) as replica_set:
        uri = replica_set.uri
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", int((tmp_path / "ports").read_text())))
    holder.listen()
    threading.Timer(0.5, holder.close).start()
    assert start_replica_set(data_dir=tmp_path).uri == uri


def test_mongod_ends_when_its_guard_is_killed() -> None:
    with Mongod() as mongod:
        assert mongod.pid is not None
        pid = mongod.pid
        guard = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert guard != os.getpid()
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))


def test_two_replica_sets_start_at_once_side_by_side(start_replica_set: Start) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: start_replica_set(), range(2))
    with pymongo.MongoClient(one.uri) as first, pymongo.MongoClient(other.uri) as second:
        first.shop.orders.insert_one({"_id": 1})
        assert second.shop.orders.count_documents({}) == 0


def test_a_start_that_was_cut_short_goes_on_with_the_same_ports(start_replica_set: Start, tmp_path: Path) -> None:
    with ReplicaSet(data_dir=tmp_path) as replica_set:
        uri = replica_set.uri
    (tmp_path / "initiated").unlink()
    assert start_replica_set(data_dir=tmp_path).uri == uri


def test_with_a_password_only_its_owner_may_read(start_replica_set: Start, tmp_path: Path) -> None:
    password = "p@ss/word"
    with ReplicaSet(3, root_password=password, data_dir=tmp_path) as replica_set:
        with pymongo.MongoClient(replica_set.uri, w="majority") as client:
            client.shop.orders.insert_one({"_id": 1})
        with pymongo.MongoClient(replica_set.members[0].uri) as stranger, pytest.raises(OperationFailure) as caught:
            stranger.local.command("collStats", "oplog.rs")
        assert caught.value.code == 13
        replica_set.step_down()
    again = start_replica_set(3, root_password=password, data_dir=tmp_path)
    with pymongo.MongoClient(again.uri) as client:
        assert client.shop.orders.find_one() == {"_id": 1}


def test_parameters_reach_the_server(start_replica_set: Start) -> None:
    replica_set = start_replica_set(parameters={"periodicNoopIntervalSecs": 3}, oplog_size_mb=990)
    with pymongo.MongoClient(replica_set.uri) as client:
        assert client.admin.command("getParameter", 1, periodicNoopIntervalSecs=1)["periodicNoopIntervalSecs"] == 3
        assert client.local.command("collStats", "oplog.rs")["maxSize"] == 990 * 1024 * 1024


def test_mongod_s_own_reason_is_told_when_it_does_not_start() -> None:
    with pytest.raises(EmbeddedError, match=r"did not start: .*Unknown --setParameter 'nonsense'") as caught:
        ReplicaSet(parameters={"nonsense": 1}).__enter__()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_member_that_does_not_exist_is_refused(replica_set: ReplicaSet) -> None:
    with pytest.raises(UsageError, match="There is no member 1: they are 0 to 0"):
        replica_set.kill(1)
    with pytest.raises(UsageError, match="1 to 7 members, not 8"):
        ReplicaSet(8)


@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_an_older_version_can_be_chosen(start_replica_set: Start, version: str) -> None:
    replica_set = start_replica_set(version=version)
    with pymongo.MongoClient(replica_set.uri, w="majority") as client:
        client.shop.orders.insert_one({"_id": 1})
        assert client.server_info()["version"] == version
    replica_set.stop(0)
    replica_set.restart(0)
    assert replica_set.primary == 0
