"""Exact images that begin now without snapshot reads, which do not exist for capped collections, and before 5.0 not at
all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SourceError
from tailrace.read.images import seed
from tailrace.read.source.listing import ListedCollection
from tests.amounts import amount
from tests.differential import documents as docs
from tests.differential.image_writes import write

NAME = "capped_images"
_KEPT = 40
_EXACT: dict[str, Any] = {"full_document": "exact", "full_document_before_change": "exact"}


class _Log:
    """A capped collection that is written to: documents keep their size, and new ones push the oldest out."""

    def __init__(self, client: MongoClient[Any], name: str) -> None:
        self._ids = itertools.count()
        self.log = client[NAME].create_collection(name, capped=True, size=1 << 20, max=_KEPT)
        self.others = client[NAME]["others"]
        for _ in range(_KEPT + 5):
            self.insert()
        self.others.insert_many([{"_id": number, "n": 0} for number in range(9)])

    def insert(self) -> None:
        self.log.insert_one({"_id": next(self._ids), "n": 0, "fields": {"first": 1, "other": 2}})

    def change(self, turn: int) -> None:
        """Some documents are pushed out; fields of others change, and go and come back at another place. Half of them
        were read before. (Servers before 6.0 refuse changes of a document's size.)"""
        for _ in range(3):
            self.insert()
        for document in list(self.log.find({}, {"_id": 1}))[turn % 3 :: 3]:
            key = {"_id": document["_id"]}
            self.log.update_one(key, {"$rename": {"n": "m", "fields.first": "fields.third"}})
            self.log.update_one(key, {"$inc": {"m": 1, "fields.other": 1}})
            self.log.update_one(key, {"$rename": {"m": "n", "fields.third": "fields.first"}})
        self.others.update_one({"_id": turn % 9}, {"$inc": {"n": 1}})

    def stored(self) -> dict[int, bytes]:
        return {one["_id"]: one.raw for one in self.log.find()}


def _write_meanwhile(write: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Call ``write`` before a collection is copied without a snapshot, and after each piece of it. Returns the turns
    so far."""
    turns: list[int] = []
    documents = seed._documents

    def meanwhile(given: seed.SeededFrom, collection: ListedCollection, time: ClusterTime) -> Iterator[list[bytes]]:
        pieces = documents(given, collection, time)
        while True:
            if given.moves(collection):
                write(len(turns))
                turns.append(len(turns))
            try:
                piece = next(pieces)
            except StopIteration:
                return
            yield piece

    monkeypatch.setattr(seed, "_DOCUMENTS", 10)
    monkeypatch.setattr(seed, "_documents", meanwhile)
    return turns


def _check_capped(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, logs_losses: bool = True) -> None:
    with MongoClient[Any](uri, document_class=RawBSONDocument) as client:
        written = _Log(client, "log")
        turns = _write_meanwhile(written.change, monkeypatch)
        options: dict[str, Any] = {"document_class": RawBSONDocument, "images": folder}
        with tailrace.connect(uri, **options) as ours, ours[NAME].watch(**_EXACT) as stream:
            assert len(turns) > 4
            before = written.stored()
            written.log.update_many({}, {"$inc": {"n": 1}})
            after = written.stored()
            for _ in range(_KEPT):
                written.insert()
            written.others.delete_many({})
            deletes = updates = 0
            while deletes < 9 + (_KEPT if logs_losses else 0):
                event = next(stream)
                if (kind := event["operationType"]) == "insert":
                    continue
                key, image = event["documentKey"]["_id"], event["fullDocumentBeforeChange"].raw
                if kind == "update":
                    updates += 1
                    assert (image, event["fullDocument"].raw) == (before[key], after[key])
                    continue
                deletes += 1
                assert event["ns"]["coll"] == "others" or image == after[key]
            assert updates == _KEPT
        client.drop_database(NAME)


def test_a_capped_collection_is_copied_exactly_while_it_is_written_to(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's error 246 ended the call. No seed had a capped collection in scope at that time; the fuzzers'
    workloads only make some later."""
    _check_capped(replica_set.uri, tmp_path, monkeypatch)


def _check_any(uri: str, folder: Path, monkeypatch: pytest.MonkeyPatch, random_seed: int) -> None:
    """Random updates, replacements, deletes and transactions while a collection is copied without a snapshot."""
    with MongoClient[Any](uri, document_class=RawBSONDocument) as client:
        orders, rng = client[NAME]["orders"], docs.UniqueNames(random_seed)
        write(orders, rng, 2)
        turns = _write_meanwhile(lambda turn: write(orders, rng, 2, fresh=turn % 3 == 2), monkeypatch)
        options: dict[str, Any] = {"document_class": RawBSONDocument, "images": folder}
        with tailrace.connect(uri, **options) as ours, ours[NAME].watch(**_EXACT) as stream:
            assert len(turns) > 3
            stored = sorted(one.raw for one in orders.find())
            orders.delete_many({})
            assert sorted(next(stream)["fullDocumentBeforeChange"].raw for _ in stored) == stored
        client.drop_database(NAME)


@pytest.mark.parametrize("random_seed", range(amount(2, 12)))
def test_any_change_may_come_while_a_collection_is_copied_without_a_snapshot(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_seed: int
) -> None:
    monkeypatch.setattr(seed.SeededFrom, "moves", lambda self, collection: True)
    _check_any(replica_set.uri, tmp_path, monkeypatch, random_seed)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.0.4", "4.4.2"])
def test_older_servers(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """4.4 has no snapshot reads at all, and its capped collections lose documents without an entry: one may be inserted
    again that the state still has."""
    uri = start_replica_set(version=version).uri
    with monkeypatch.context() as patched:
        _check_capped(uri, tmp_path / "capped", patched, logs_losses=version >= "5")
    for random_seed in range(8):
        with monkeypatch.context() as patched:
            patched.setattr(seed.SeededFrom, "moves", lambda self, collection: True)
            _check_any(uri, tmp_path / str(random_seed), patched, random_seed)
    with (
        MongoClient[Any](uri) as client,
        tailrace.connect(uri, images=tmp_path / "again") as ours,
    ):
        log = client[NAME].create_collection("log", capped=True, size=4096, max=2)
        log.insert_many([{"_id": number, "turn": 0} for number in (2, 3)])
        with ours[NAME]["log"].watch(**_EXACT) as stream:
            for turn in range(1, 4):
                for number in range(4):  # each is pushed out before it comes again
                    log.insert_one({"_id": number, "turn": turn})
            log.update_one({"_id": 3}, {"$set": {"turn": 9}})
            update = next(event for event in stream if event["operationType"] == "update")
        assert update["fullDocumentBeforeChange"] == {"_id": 3, "turn": 3}


def test_a_capped_collection_that_goes_away_while_it_is_copied_is_refused(
    replica_set: ReplicaSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MongoClient[Any](replica_set.uri) as client:
        log = client[NAME].create_collection("log", capped=True, size=1 << 16)
        log.insert_many([{"_id": number} for number in range(5)])

        def drop(turn: int) -> None:
            if turn == 1:
                log.rename("other")

        _write_meanwhile(drop, monkeypatch)
        with (
            tailrace.connect(replica_set.uri, images=tmp_path) as ours,
            pytest.raises(SourceError, match=f"{NAME}.log was dropped, renamed or converted while it was copied"),
        ):
            ours[NAME].watch(**_EXACT)
        client.drop_database(NAME)
