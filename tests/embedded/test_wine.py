"""7.0: a mongod for Windows under Wine. What needs no Wine is tried everywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pymongo
import pytest

from tailrace.embedded import EmbeddedError, ReplicaSet, ShardedCluster, find_mongod, wine
from tests.embedded.test_replica_set import is_alive, wait_until

VERSION = "7.0.28"
Start = Callable[..., ReplicaSet]

PARENT = """
import sys, time
from tailrace.embedded import ReplicaSet
replica_set = ReplicaSet(version=sys.argv[1])
replica_set.start()
print(replica_set.members[0].pid, replica_set.data_dir, flush=True)
time.sleep(600)
"""


def test_paths_are_named_as_wine_names_them_and_nothing_else_is_changed() -> None:
    given = (
        "--dbpath /data/db --nounixsocket --port 1 --keyFile=/a/key --setParameter x=/not/a/path --tlsMode requireTLS"
    )
    expected = r"--dbpath Z:\data\db --port 1 --keyFile=Z:\a\key --setParameter x=/not/a/path --tlsMode requireTLS"
    assert wine.windows_arguments(given.split()) == expected.split()
    assert wine.windows_arguments(["--tlsCAFile", "/a file.pem", "--auth"]) == [
        "--tlsCAFile",
        r"Z:\a file.pem",
        "--auth",
    ]
    assert wine.windows_arguments(["--logpath", "--dbpath", "/d"]) == ["--logpath", wine.windows_path("--dbpath"), "/d"]


def test_what_would_lead_wine_elsewhere_is_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "WINEARCH", "WINESERVER", "WINELOADER", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "somebody's")
    monkeypatch.setenv("WINEPREFIX", "/somebody's/.wine")
    environment = wine.environment_for(tmp_path)
    assert environment["WINEPREFIX"] == str(tmp_path)
    assert "somebody's" not in " ".join(environment.values())


def test_without_wine_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mongod.exe"
    program.touch()
    monkeypatch.setattr(wine, "_LOADERS", ("wine64",))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not wine.is_installed()
    with pytest.raises(EmbeddedError) as caught:
        find_mongod(mongod=program)
    assert str(caught.value) == (
        "It is a program for Windows, and this machine has no wine64 to run it. Install it: "
        "apt-get update && apt-get install --yes --no-install-recommends wine64 libz-mingw-w64"
    )


def test_many_that_need_the_windows_directory_at_once_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes 15 s on two processors; with the cache alone, each of many processes would make its own."""
    loader = tmp_path / "wine64"
    loader.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo wine-8.0 && exit\n'
        f"echo made >> {tmp_path}/log\n"
        'mkdir -p "$WINEPREFIX/drive_c/windows/system32" && touch "$WINEPREFIX/system.reg"\n'
    )
    loader.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    program = f"from tailrace.embedded import wine;wine._LOADERS = ({str(loader)!r},); print(wine.find_wine().prefix)"

    def find(_: int) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(find, range(4)))
    assert len({prefix for prefix, _ in found}) == 1
    assert (tmp_path / "log").read_text() == "made\n"
    assert all("Microsoft's msvcp140.dll is missing: a mongod 7.0 may hang" in said for _, said in found)


def test_microsofts_library_takes_the_place_of_wines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Wine's own library, servers hung or ended at write conflicts; for months this was put down to Wine."""
    wheel = tmp_path / "wheel" / "deep"
    wheel.mkdir(parents=True)
    (wheel / "msvcp140.dll").write_bytes(b"Microsoft's")
    system = tmp_path / "prefix" / "drive_c/windows/system32"
    system.mkdir(parents=True)
    (system / "msvcp140.dll").write_bytes(b"Wine's")
    asked: list[object] = []
    monkeypatch.setattr(wine, "fetch", lambda runtime: asked.append(runtime) or wheel.parent)
    for _ in range(2):
        wine._put_library(tmp_path / "prefix")
    assert (system / "msvcp140.dll").read_bytes() == b"Microsoft's"
    assert len(asked) == 1
    assert "msvcp140=n,b" in wine.environment_for(tmp_path)["WINEDLLOVERRIDES"]


@pytest.mark.wine
def test_7_0_writes_stops_in_order_and_comes_back_on_the_same_data(start_replica_set: Start) -> None:
    replica_set = start_replica_set(version=VERSION, parameters={"periodicNoopIntervalSecs": 3}, oplog_size_mb=990)
    with pymongo.MongoClient(replica_set.uri, w="majority") as client:
        assert client.server_info()["version"] == replica_set.version == VERSION
        client.shop.orders.insert_one({"_id": 1})
        assert client.admin.command("getParameter", 1, periodicNoopIntervalSecs=1)["periodicNoopIntervalSecs"] == 3
        assert client.local.command("collStats", "oplog.rs")["maxSize"] == 990 * 1024 * 1024
        write_to_new_collections_at_once(replica_set.uri)
        replica_set.stop(0)
        log = replica_set.members[0].log_path.read_text()
        assert "mongod shutdown complete" in log
        replica_set.restart(0)
        client.shop.orders.insert_one({"_id": 2})
        replica_set.restart(replica_set.kill())
        assert client.shop.orders.count_documents({}) == 2
        log = replica_set.members[0].log_path.read_text()
        assert log.count("Detected unclean shutdown") == 1, "after the kill, not after the stop"


def write_to_new_collections_at_once(uri: str) -> None:
    """Every thread upserts into each collection before it exists: with Wine's own C++ library the server hangs."""

    def upsert(thread: int) -> None:
        with pymongo.MongoClient(uri, timeoutMS=60_000) as client:
            for number in range(30):
                client.conflicts[f"c{number}"].update_one({"_id": 1}, {"$inc": {"n": 1}}, upsert=True)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(upsert, range(6)))
    with pymongo.MongoClient(uri) as client:
        assert [client.conflicts[f"c{number}"].find_one()["n"] for number in range(30)] == [6] * 30


@pytest.mark.slow
@pytest.mark.wine
def test_7_0_ends_with_its_process() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, VERSION], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, _, directory = parent.stdout.readline().strip().partition(" ")
    assert is_alive(int(pid))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(int(pid)))
    wait_until(lambda: not Path(directory).exists())


@pytest.mark.slow
@pytest.mark.wine
@pytest.mark.parametrize("version", ["7.0.28", "7.0.25"])
def test_two_clusters_and_a_replica_set_with_a_password_run_side_by_side(
    version: str, start_sharded_cluster: Callable[..., ShardedCluster], start_replica_set: Start
) -> None:
    with ThreadPoolExecutor(3) as pool:
        clusters = [
            pool.submit(start_sharded_cluster, 2, version=version, enable_test_commands=True),
            pool.submit(start_sharded_cluster, 2, version=version, root_password="p@ss/word"),
        ]
        guarded = pool.submit(start_replica_set, 3, version=version, root_password="p@ss/word").result()
        one, other = (cluster.result() for cluster in clusters)
    one.router.create_database("shop", "shard0")
    one.router.shard_collection("shop.orders", {"_id": 1})
    for uri in (one.uri, other.uri, guarded.uri):
        with pymongo.MongoClient(uri, w="majority") as client:
            assert client.server_info()["version"] == version
    with pymongo.MongoClient(guarded.uri, w="majority") as client:
        client.shop.orders.insert_one({"_id": 1})
        guarded.step_down()
        assert client.shop.orders.count_documents({}) == 1


@pytest.mark.slow
@pytest.mark.wine
def test_collections_are_resharded_over_three_shards(start_sharded_cluster: Callable[..., ShardedCluster]) -> None:
    """Most of these ended the process of a shard, and no test had resharded on 7.0."""
    router = start_sharded_cluster(3, version=VERSION).router
    router.create_database("shop", "shard0")
    for number in range(3):
        namespace = f"shop.orders{number}"
        router.shard_collection(namespace, {"sku": "hashed"}, initial_chunks=6)
        router.insert_many(namespace, [{"_id": one, "sku": one} for one in range(20)])
        router.reshard(namespace, {"_id": 1})
        assert router.table(namespace).key == {"_id": 1}
        assert sorted(one["_id"] for one in router.find(namespace)) == list(range(20))
