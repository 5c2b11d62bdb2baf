"""Batches of the oplog folded into the state of images: compiled code and plain code give the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import bson
import pytest
from bson import DatetimeMS, Decimal128, Int64, MinKey, ObjectId, Regex
from bson.binary import Binary
from bson.timestamp import Timestamp

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import SERVER_4_4, SERVER_5_0, SERVER_6_0
from tailrace.core.plan.request import OplogBatch
from tailrace.read.images.delta import ImageMismatchError
from tailrace.read.images.fold import ImageFolder
from tailrace.read.images.found import Images
from tailrace.read.images.key import state_key
from tailrace.read.images.state import ImageState

UUID = Binary(bytes(range(16)), 4)
SCOPE = Scope.of_collection("shop", "orders")
MIGRATED: dict[str, Any] = {"fromMigrate": True}


def entry(op: str, time: int, o: dict[str, Any], o2: dict[str, Any] | None = None, **more: Any) -> bytes:
    fields = {"op": op, "ns": "shop.orders", "ui": UUID, "o": o, "ts": Timestamp(100, time), "t": 1, "v": 2}
    return bson.encode(fields | ({} if o2 is None else {"o2": o2}) | more)


def batch(entries: list[bytes], time: int) -> OplogBatch:
    return OplogBatch(b"".join(entries), ClusterTime((100 << 32) | time))


def folder(directory: Path, *, kernel: bool, memory_bytes: int = 0) -> tuple[ImageState, ImageFolder]:
    state = ImageState.open(directory, buckets=2, map_bytes=64 << 20, memory_bytes=memory_bytes)
    return state, ImageFolder(state, SCOPE, SERVER_6_0, kernel=lambda size: kernel)


def fold(target: ImageFolder, batch: OplogBatch) -> Images:
    return target.fold(batch, lambda times: [None] * len(times))


#: Keys that are made in the common way, and keys that are not.
_RARE = (1.5, 2.0, Decimal128("3"), "x" * 300, "x" * 600, "", b"b", ObjectId(b"o" * 12), None, True, -1)
_RARE += (DatetimeMS(5), Regex("a"), Timestamp(1, 1), MinKey(), Int64(-(2**62)))


class _History:
    """Random entries that fit the documents before them; some documents are never known. With ``migrates`` some inserts
    and deletes are a migration's, which compiled code leaves to the plain way with all of their batch."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.time = 0
        self.there: set[bytes] = set()

    def entries(self, count: int, *, migrates: bool = False) -> list[bytes]:
        return [self._one(migrates=migrates) for _ in range(count)]

    def _one(self, *, migrates: bool) -> bytes:
        rng = self.rng
        self.time += 1
        key = rng.choice((rng.randrange(30), f"s{rng.randrange(9)}", Int64(rng.randrange(40)), rng.choice(_RARE)))
        name = state_key(bytes(UUID), bson.encode({"_id": key}))
        if name not in self.there:
            if rng.random() < 0.1:
                return entry("u", self.time, {"$v": 2, "diff": {"u": {"a": 1}}}, {"_id": key})
            self.there.add(name)
            marked = MIGRATED if migrates and rng.random() < 0.2 else {}
            made = {"_id": key, "a": 0, "o": {"x": 0, "y": [1, 2, 3]}, "n": 1}
            return entry("i", self.time, made, {"_id": key}, **marked)
        kind = rng.random()
        if kind < 0.05:
            self.there.discard(name)
            return entry("d", self.time, {"_id": key})
        if kind < 0.15:
            return entry("u", self.time, {"_id": key, "a": 5, "o": {"x": 1, "y": [1, 2, 3]}, "n": 7}, {"_id": key})
        if kind < 0.2:
            return entry("u", self.time, {"$v": 1, "$set": {"a": rng.random(), "o.x": 2}}, {"_id": key})
        if kind < 0.25:
            return entry("u", self.time, {"$v": 2, "diff": {"i": {"a": rng.random()}}}, {"_id": key})
        if kind < 0.3 and migrates:
            self.there.discard(name)
            return entry("d", self.time, {"_id": key}, fromMigrate=True)
        inside = {"u": {"x": rng.random()}, "sy": {"a": True, "u1": rng.randrange(9)}}
        return entry("u", self.time, {"$v": 2, "diff": {"u": {"n": self.time}, "so": inside}}, {"_id": key})


@pytest.mark.long
@pytest.mark.parametrize(("seed", "memory_bytes"), [(1, 0), (2, 0), (3, 50_000)])
def test_the_compiled_way_makes_what_the_plain_way_makes(tmp_path: Path, seed: int, memory_bytes: int) -> None:
    history = _History(seed)
    plain_state, plain = folder(tmp_path / "plain", kernel=False)
    fast_state, fast = folder(tmp_path / "fast", kernel=True, memory_bytes=memory_bytes)
    with plain_state, fast_state:
        batches = []
        for number in range(15):
            entries = history.entries(200, migrates=number % 3 == 2)
            batches.append(batch(entries, history.time))
        expected = [fold(plain, each) for each in batches]
        assert [fold(fast, each) for each in batches] == expected
        assert sum(map(len, expected)) > 1_500
        assert sorted(fast_state.documents()) == sorted(plain_state.documents())
        # A batch given again gives the same.
        assert [fold(fast, each) for each in batches[-3:]] == expected[-3:]


def test_workers_share_the_documents(tmp_path: Path) -> None:
    history = _History(5)
    state, whole = folder(tmp_path / "whole", kernel=False)
    parts = []
    for number in range(3):
        one = ImageState.open(tmp_path / str(number), map_bytes=64 << 20)
        kernel = number == 1
        parts.append((one, ImageFolder(one, SCOPE, SERVER_6_0, kernel=lambda size, k=kernel: k, share=(number, 3))))
    for number in range(5):
        each = batch(history.entries(100, migrates=number % 2 == 1), history.time)
        images = [fold(part, each) for _, part in parts]
        assert {key: image for found in images for key, image in found.items()} == fold(whole, each)
    assert sorted(pair for one, _ in parts for pair in one.documents()) == sorted(state.documents())
    for one in (state, *(one for one, _ in parts)):
        one.close()


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        entry("u", 9, {"$v": 2, "diff": {"u": {"nowhere": 1}}}, {"_id": 1}),
        entry("u", 9, {"$v": 2, "diff": {"d": {"nowhere": False}}}, {"_id": 1}),
        entry("u", 9, {"$v": 2, "diff": {"sa": {"u": {"x": 1}}}}, {"_id": 1}),
        entry("i", 9, {"_id": 1.0}, {"_id": 1.0}),
    ],
)
def test_an_entry_that_does_not_fit_changes_nothing(tmp_path: Path, wrong: bytes, kernel: bool) -> None:
    state, target = folder(tmp_path, kernel=kernel)
    with state:
        fold(target, batch([entry("i", 1, {"_id": 1, "a": 1}, {"_id": 1})], 1))
        before = list(state.documents())
        more = entry("i", 8, {"_id": 2}, {"_id": 2})
        with pytest.raises(ImageMismatchError, match=r"at oplog entry .*100.*9"):
            fold(target, batch([more, wrong], 9))
        assert (list(state.documents()), state.position) == (before, (100 << 32) | 1)


@pytest.mark.parametrize("command", [{"drop": "orders"}, {"renameCollection": "shop.new", "to": "shop.orders"}])
def test_the_documents_of_a_collection_that_is_gone_go_too(tmp_path: Path, command: dict[str, Any]) -> None:
    other = Binary(bytes(16), 4)
    if "to" in command:
        command = command | {"dropTarget": UUID}
    with ImageState.open(tmp_path, map_bytes=64 << 20, undo_bytes=100) as state:
        target = ImageFolder(state, SCOPE, SERVER_6_0)
        fold(target, batch([entry("i", 1, {"_id": 1}, {"_id": 1})], 1))
        gone = {"op": "c", "ns": "shop.$cmd", "o": command, "ui": other if "to" in command else UUID, "t": 1}
        assert fold(target, batch([bson.encode(gone | {"ts": Timestamp(100, 2)})], 2)) == {}
        assert len(state) == 1  # the batch can be given again
        for time in range(3, 20):
            fold(target, batch([entry("i", time, {"_id": time}, {"_id": time}, ui=other)], time))
        assert [key for key, _ in state.documents(bytes(UUID))] == []


@pytest.mark.parametrize("kernel", [False, True])
def test_a_shard_gets_a_dropped_collection_back_with_its_documents(tmp_path: Path, kernel: bool) -> None:
    """The documents stay in the state for a while after the drop, and come again under the same UUID."""
    drop = {"op": "c", "ns": "shop.$cmd", "o": {"drop": "orders"}, "ui": UUID, "t": 1, "ts": Timestamp(100, 2)}
    with ImageState.open(tmp_path, map_bytes=64 << 20) as state:
        target = ImageFolder(state, SCOPE, SERVER_6_0, kernel=lambda size: kernel, of_shard=True)
        fold(target, batch([entry("i", 1, {"_id": 1, "a": 1}, {"_id": 1})], 1))
        fold(target, batch([bson.encode(drop)], 2))
        came = [entry("i", time, {"_id": 1, "a": 2}, {"_id": 1}, **more) for time, more in ((3, MIGRATED), (5, {}))]
        for time, one in zip((3, 5), came, strict=True):
            fold(target, batch([one], time))
        images = fold(target, batch([entry("d", 6, {"_id": 1})], 6))
        assert [bson.decode(image) for image in images.values()] == [{"_id": 1, "a": 2}]


@pytest.mark.parametrize("kernel", [False, True])
def test_only_a_server_that_logs_each_loss_inserts_no_document_that_is_there(tmp_path: Path, kernel: bool) -> None:
    """4.4 logs nothing where a capped collection loses a document, and one may be inserted again: the stream ended."""
    for profile in (SERVER_4_4, SERVER_5_0, SERVER_6_0):
        with ImageState.open(tmp_path / str(profile.version), map_bytes=64 << 20) as state:
            target = ImageFolder(state, SCOPE, profile, kernel=lambda size: kernel)
            fold(target, batch([entry("i", 1, {"_id": 1, "a": 1}, {"_id": 1})], 1))
            again = batch([entry("i", 2, {"_id": 1, "a": 2}, {"_id": 1})], 2)
            if profile is not SERVER_4_4:
                with pytest.raises(ImageMismatchError, match="an insert of a document that exists already"):
                    fold(target, again)
                continue
            fold(target, again)
            assert [bson.decode(document) for _, document in state.documents()] == [{"_id": 1, "a": 2}]


def test_a_transaction_that_the_copy_has_already(tmp_path: Path) -> None:
    """A prepared transaction is visible from its commit timestamp on. Its entry is later, and so may be later than a
    copy in between."""
    operations = [
        {"op": "i", "ns": "shop.orders", "ui": UUID, "o": {"_id": 1}, "o2": {"_id": 1}},
        {"op": "u", "ns": "shop.orders", "ui": UUID, "o": {"$v": 2, "diff": {"d": {"a": False}}}, "o2": {"_id": 2}},
        {"op": "d", "ns": "shop.orders", "ui": UUID, "o": {"_id": 3}},
    ]
    common = {"op": "c", "ns": "admin.$cmd", "t": 1, "lsid": {"id": UUID}, "txnNumber": Int64(1)}
    none = {"ts": Timestamp(0, 0), "t": Int64(-1)}
    prepare = {"o": {"applyOps": operations, "prepare": True}, "ts": Timestamp(100, 1), "prevOpTime": none}
    link = {"ts": Timestamp(100, 1), "t": Int64(1)}
    done = {"commitTransaction": 1, "commitTimestamp": Timestamp(100, 2)}
    commit = bson.encode(common | {"o": done, "ts": Timestamp(100, 4), "prevOpTime": link})
    copied = {state_key(bytes(UUID), each): each for each in (bson.encode({"_id": 1}), bson.encode({"_id": 2, "b": 1}))}
    with ImageState.open(tmp_path, map_bytes=64 << 20) as state:
        with state.batch((100 << 32) | 3) as seeded:
            seeded.put(copied.items())
        target = ImageFolder(state, SCOPE, SERVER_6_0, of_shard=True)
        target.fold(batch([commit], 4), lambda times: [bson.encode(common | prepare)], again=True)
        assert dict(state.documents()) == copied
