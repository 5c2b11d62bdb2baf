"""The target's disk fills up while a sync copies and while it follows: it ends with an error, and goes on exactly once
there is room."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.sync import Sync
from tests.patience import PATIENCE_S
from tests.small_disk import SmallDisk, small_disk
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held

pytestmark = [pytest.mark.mongod, pytest.mark.used_servers]
ROOT = Path(__file__).parents[2]
PAD = "x" * 50_000


@contextmanager
def target_on(disk: SmallDisk) -> Iterator[ReplicaSet]:
    data = disk.path / "data"
    with ReplicaSet(data_dir=data) as running:
        yield running


def begun(source: str, target: str) -> subprocess.Popen[str]:
    """The command, as a user starts it. It waits for a server that is away for three seconds only."""
    options = ("--lease-seconds", "3", "--documents-per-second", "400")
    away = f"{target}{'&' if '?' in target else '/?'}serverSelectionTimeoutMS=3000"
    command = [sys.executable, "-m", "tailrace", "sync", source, away, *options]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ended(process: subprocess.Popen[str]) -> str:
    try:
        said = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
    assert process.returncode == 1, said
    assert "Traceback" not in said
    return said.splitlines()[-1]


def phase(target: str) -> str:
    with MongoClient[Any](target) as client:
        found = client[STATE_DB].syncs.find_one() or {}
        return f"{found.get('phase')} {client.shop.orders.estimated_document_count() > 0}"


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_target_without_room(start_replica_set: Callable[..., ReplicaSet], tmp_path: Path) -> None:
    source = start_replica_set()
    with (
        small_disk(tmp_path / "disk", "700m") as disk,
        target_on(disk) as target,
        MongoClient[Any](source.uri) as client,
    ):
        client.shop.orders.insert_many([{"_id": number, "pad": PAD} for number in range(1_500)])
        for wanted in ("copy True", "follow True"):
            process = begun(source.uri, target.uri)
            until(lambda wanted=wanted: phase(target.uri) == wanted)
            disk.leave(4 << 20)
            if wanted.startswith("follow"):
                client.shop.orders.update_many({}, {"$set": {"n": 1}, "$push": {"a": PAD}})
            said = ended(process)
            assert said.startswith("tailrace: the target cannot"), said
            disk.make_room()
            target.restart(0)
        with Sync(source.uri, target.uri, lease_s=3) as sync:
            sync.run(to_present=True)
        sides = [held(uri, but=[STATE_DB], selected=is_users) for uri in (source.uri, target.uri)]
        assert differences(*sides, known=normal("", "", ages=False)) == []
