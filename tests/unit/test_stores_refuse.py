"""Stores of data refuse an entry of an unknown kind if it may have changed what they hold.

They ignored it: a container write of 8.x to a collection with a table, or a ``truncateRange``, would have been lost,
and the table would have said that it equals its collection. No test had fed a store an entry that no known server
writes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.core.kernel.change_rows import change_rows
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.oplog.selection import Selection
from tailrace.core.plan.profile import profile_for
from tailrace.core.plan.request import OplogBatch
from tailrace.errors import UnknownEntryError
from tailrace.lake.tables.fold import Fold, FoldOfOne
from tailrace.lake.tables.state import TabledCollection
from tailrace.read.images.fold import ImageFolder
from tailrace.read.images.state import ImageState
from tailrace.read.source.base import OplogSource
from tailrace.read.window.oplogs import EntryRun, OplogMember, OplogWindow

UUID = Binary(bytes(range(16)), 4)
OTHER = Binary(bytes(16), 4)
END = ClusterTime.of(99, 1)
SESSION: dict[str, Any] = {"lsid": {"id": OTHER, "uid": bytes(32)}, "txnNumber": Int64(1)}


def entry(op: str, ns: str, o: dict[str, Any], ui: Binary | None = UUID, **more: Any) -> bytes:
    fields = {"op": op, "ns": ns, "o": o, "ts": Timestamp(12, 1), "t": Int64(1), "v": Int64(2), **more}
    return bson.encode(fields if ui is None else {**fields, "ui": ui})


def transaction(*operations: bytes) -> bytes:
    inner = [
        {name: one[name] for name in ("op", "ns", "ui", "o") if name in one} for one in map(bson.decode, operations)
    ]
    return entry("c", "admin.$cmd", {"applyOps": inner}, None, **SESSION)


INSERT = entry("i", "shop.orders", {"_id": 1}, o2={"_id": 1})
CONTAINER = entry("ci", "shop.orders", {"k": Int64(1), "v": b"x"}, container="collection-1")
RANGE = entry("c", "shop.$cmd", {"truncateRange": "shop.orders", "minRecordId": 1}, None)
NAMED = entry("c", "shop.$cmd", {"mergeCollections": "orders", "with": "others"}, None)
WHOLE = entry("c", "shop.$cmd", {"mergeDatabases": 1}, None)
EMPTIED = entry("c", "shop.$cmd", {"emptycapped": "orders"})
REFUSED = [
    (CONTAINER, "ci"),
    (entry("id", "shop.orders", {"_id": 1}), "id"),
    (RANGE, "command truncateRange"),
    (NAMED, "command mergeCollections"),
    (WHOLE, "command mergeDatabases"),
    (EMPTIED, "command emptycapped"),
    (transaction(INSERT, CONTAINER), "ci"),
    (transaction(INSERT, WHOLE), "command mergeDatabases"),
    (transaction(WHOLE), "command mergeDatabases"),
]
ELSEWHERE = [
    entry("ci", "shop.others", {"k": Int64(1)}, OTHER),
    entry("c", "shop.$cmd", {"truncateRange": "shop.others", "minRecordId": 1}, None),
    entry("c", "other.$cmd", {"mergeDatabases": 1}, None),
    entry("c", "shop.$cmd", {"emptycapped": "others"}, OTHER),
    entry("c", "shop.$cmd", {"dbCheck": "shop.orders", "type": "batch"}),
    entry("c", "shop.$cmd", {"startIndexBuild": "orders", "indexes": []}),
    entry("c", "shop.$cmd", {"abortIndexBuild": "orders", "indexes": []}),
    entry("n", "shop.orders", {"msg": 1}, None, o2={"moveRange": "shop.orders"}),
]
_NAMES = [kind for _, kind in REFUSED]


def _folded(raw: bytes, fold: Fold) -> int:
    """How many changes ``fold`` gets from entries."""
    member = OplogMember("rs0", cast(OplogSource, SimpleNamespace(entries=None)), "7.0.28")
    rows = change_rows(raw)
    assert rows is not None
    window = OplogWindow(ClusterTime.of(1, 0), END, (EntryRun(member, raw, rows),), END)
    fold.read(window, lambda: 7)
    return sum(len(changes) for changes in fold.grouped().values())


def _tables() -> Fold:
    known = {bytes(UUID): TabledCollection(bytes(UUID).hex(), 1, "shop.orders")}
    return Fold(Selection(("shop.orders",)), known)


def _one_collection() -> Fold:
    known = {bytes(UUID): TabledCollection(bytes(UUID).hex(), 1, "shop.orders")}
    return FoldOfOne(bytes(UUID), known)


@pytest.mark.parametrize("made", [_tables, _one_collection], ids=["tables", "one collection"])
@pytest.mark.parametrize(("raw", "kind"), REFUSED, ids=_NAMES)
def test_tables_refuse_it_by_kind_and_place(raw: bytes, kind: str, made: Any) -> None:
    with pytest.raises(
        UnknownEntryError, match=rf"oplog entry 1970-01-01 00:00:12 UTC \(12,1\).* is of the kind '{kind}'"
    ) as refused:
        _folded(INSERT + raw, made())
    assert str(refused.value.hint).startswith("Update Tailrace. Or leave the collection out")


@pytest.mark.parametrize("made", [_tables, _one_collection], ids=["tables", "one collection"])
def test_tables_follow_on_where_it_is_not_about_them(made: Any) -> None:
    assert _folded(INSERT + b"".join(ELSEWHERE), made()) == 1


def test_a_collection_that_another_one_follows_is_its_affair() -> None:
    known = {bytes(UUID): TabledCollection(bytes(UUID).hex(), 1, "shop.orders")}
    assert _folded(CONTAINER, Fold(Selection(("shop.*",)), known, ignored=[bytes(UUID)])) == 0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("raw", "kind"), REFUSED, ids=_NAMES)
def test_exact_images_refuse_it_and_stay_where_they_are(tmp_path: Path, raw: bytes, kind: str, compiled: bool) -> None:
    with closing(ImageState.open(tmp_path / "state", buckets=2, map_bytes=64 << 20)) as state:
        scope = Scope.of_collection("shop", "orders")
        folder = ImageFolder(state, scope, profile_for("7.0.28"), kernel=lambda size: compiled)
        position = state.position
        with pytest.raises(UnknownEntryError, match=f"'{kind}'.*may have changed documents") as refused:
            folder.fold(OplogBatch(INSERT + raw, END), lambda times: [])
        assert "remove the images' directory" in str(refused.value.hint)
        assert state.position == position
        assert folder.fold(OplogBatch(INSERT + b"".join(ELSEWHERE), END), lambda times: []) == {}
        assert len(list(state.documents())) == 1
