"""A source that is restored to an older state while it is copied: copied documents from lost writes would stay on the
target, and no entry would remove them. So the sync is refused.

Tests had restored a source only after its copy, when each position has its own witness; until then the witness was that
of the sync's beginning, which an older state has too.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.act.sync.copying import Copy
from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.witness import Witness
from tailrace.embedded import ReplicaSet
from tailrace.errors import OtherHistoryError
from tailrace.sync import Sync
from tests.patience import PATIENCE_S
from tests.sync.both import STATE_DB

pytestmark = pytest.mark.mongod


@pytest.fixture(scope="module")
def target() -> Iterator[ReplicaSet]:
    with ReplicaSet() as running:
        yield running


def copy_until(source: ReplicaSet, target: ReplicaSet, reached: Callable[[MongoClient[Any]], bool]) -> None:
    """Let a sync copy slowly, and stop it when the target has reached a given state."""
    with (
        MongoClient[Any](target.uri) as client,
        Sync(source.uri, target.uri, only=["shop.*"], documents_per_second=500, lease_s=4) as sync,
    ):
        thread = CheckedThread(sync.run, "copying")
        thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not reached(client):
            assert time.monotonic() < deadline
            assert thread.is_alive()
            time.sleep(0.05)
        sync.stop()
        thread.join()
        assert client[STATE_DB].syncs.find_one({})["phase"] == "copy"


def has(document: str) -> Callable[[MongoClient[Any]], bool]:
    return lambda client: client.shop.small.find_one({"_id": document}) is not None


def noted(client: MongoClient[Any]) -> Witness:
    return Witness.from_document(client[STATE_DB].syncs.find_one({})["witness"])


def fill(source: ReplicaSet) -> None:
    with MongoClient[Any](source.uri) as client:
        client.shop.large.insert_many([{"_id": number} for number in range(20_000)])
        client.shop.small.insert_one({"_id": "first"})


def go_on(source: ReplicaSet, target: ReplicaSet) -> None:
    with Sync(source.uri, target.uri, only=["shop.*"], lease_s=4) as sync:
        sync.run(to_present=True)


def clear(target: ReplicaSet) -> None:
    with MongoClient[Any](target.uri) as client:
        for name in ("shop", STATE_DB):
            client.drop_database(name)


def test_a_copy_notes_how_far_the_source_was_and_looks_for_it(replica_set: ReplicaSet, target: ReplicaSet) -> None:
    with MongoClient[Any](replica_set.uri) as source, MongoClient[Any](target.uri) as client:
        fill(replica_set)
        try:
            copy_until(replica_set, target, has("first"))
            before = noted(client)
            source.shop.small.insert_one({"_id": "later"})
            copy_until(replica_set, target, lambda _: noted(client) != before)
            written = source.local["oplog.rs"].find_one({"ns": "shop.small", "o._id": "later"}, sort=[("$natural", -1)])
            assert written is not None
            [mark] = noted(client).entries.values()
            assert mark.time.to_timestamp() >= written["ts"]
            other = {replica_set.name: mark._replace(digest="0" * len(mark.digest))}
            syncs = client[STATE_DB].syncs
            syncs.update_one({}, {"$set": {"witness": replace(noted(client), entries=other).to_document()}})
            with pytest.raises(OtherHistoryError):
                go_on(replica_set, target)
            assert syncs.find_one({})["phase"] == "copy"
        finally:
            source.drop_database("shop")
            clear(target)


@pytest.mark.slow
def test_what_was_copied_before_the_source_was_put_back_is_refused(
    target: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReplicaSet(1, data_dir=tmp_path / "source") as source:
        fill(source)
        with monkeypatch.context() as patch, Sync(source.uri, target.uri, only=["shop.*"], lease_s=4) as sync:
            patch.setattr(Copy, "_all", lambda *_: bool(sync.stop()))  # prepared, and nothing copied
            sync.run()
        source.stop(0)
        shutil.copytree(tmp_path / "source", tmp_path / "older")
        source.restart(0)
        with MongoClient[Any](source.uri) as client:
            client.shop.small.insert_one({"_id": "lost"})
        copy_until(source, target, has("lost"))
        source.stop(0)
        shutil.rmtree(tmp_path / "source")
        shutil.move(tmp_path / "older", tmp_path / "source")
        source.restart(0)
        with pytest.raises(OtherHistoryError):
            go_on(source, target)
    clear(target)
