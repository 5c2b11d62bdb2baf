"""Windows as steps of a sync: definitions come between segments, those of a given time before its changes; what is
refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import bson
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.timestamp import Timestamp

from tailrace.act.sync.fold import NOT_THERE, THERE, UNKNOWN, ChangeSegment, SyncFold
from tailrace.act.sync.folded_catalog import Definition
from tailrace.act.sync.settings import SyncSettings
from tailrace.act.sync.state import SyncedCollection
from tailrace.core.kernel.change_rows import change_rows
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.selection import Selection
from tailrace.errors import SourceError, UnknownEntryError, UsageError
from tailrace.read.source.base import OplogSource
from tailrace.read.window.apply import DELETE, INSERT, UPDATE
from tailrace.read.window.oplogs import EntryRun, OplogMember, OplogWindow
from tests.unit.test_stores_refuse import ELSEWHERE, REFUSED

UUID, NEW = Binary(bytes(range(16)), 4), Binary(b"n" * 16, 4)
END = ClusterTime.of(99, 1)
KNOWN = {bytes(UUID): SyncedCollection(bytes(UUID), "shop.orders", "shop.orders", bytes(UUID))}
SESSION: dict[str, Any] = {"lsid": {"id": NEW, "uid": bytes(32)}, "txnNumber": Int64(1)}


def entry(
    seconds: int, op: str, o: dict[str, Any], *, ui: Binary = UUID, ns: str = "shop.orders", **more: Any
) -> bytes:
    fields = {"op": op, "ns": ns, "ui": ui, "o": o, **more}
    return bson.encode({**fields, "ts": Timestamp(seconds, 1), "t": Int64(1), "v": Int64(2)})


def command(seconds: int, o: dict[str, Any], ui: Binary = UUID) -> bytes:
    return entry(seconds, "c", o, ui=ui, ns="shop.$cmd")


def steps(
    *members: bytes, most: int = 1000, gone: set[bytes] | None = None, known: Any = None
) -> tuple[list[Any], SyncFold]:
    """The steps of a window of one oplog for each of ``members``. ``gone``: of a cluster, as of ``SyncFold``."""
    runs = []
    for number, raw in enumerate(members):
        rows = change_rows(raw)
        assert rows is not None
        member = OplogMember(f"shard{number}", cast(OplogSource, SimpleNamespace(entries=None)), "6.0.27")
        runs.append(EntryRun(member, raw, rows))
    fold = SyncFold(SyncSettings(selection=Selection(("shop.*",))), KNOWN if known is None else known, most, gone=gone)
    return list(fold.steps(OplogWindow(ClusterTime.of(1, 0), END, tuple(runs), END))), fold


def shown(found: list[Any]) -> list[Any]:
    """Definitions by name; segments by their end, with the operation on each ``_id``."""
    return [
        one.name.decode()
        if isinstance(one, Definition)
        else (one.until, [(bson.decode(_document(doc.identifier))["_id"], doc.before) for doc in one.documents])
        for one in found
    ]


def _document(element: bytes) -> bytes:
    return (len(element) + 5).to_bytes(4, "little") + element + b"\0"


def before(seconds: int) -> ClusterTime:
    return ClusterTime(ClusterTime.of(seconds, 1) - 1)


@pytest.mark.parametrize(("raw", "kind"), REFUSED, ids=[kind for _, kind in REFUSED])
def test_an_entry_of_an_unknown_kind_is_refused(raw: bytes, kind: str) -> None:
    with pytest.raises(UnknownEntryError, match=f"'{kind}'") as refused:
        steps(raw)
    assert "leave the collection out of the sync" in str(refused.value.hint)


def test_one_that_is_not_about_the_sync_is_passed_over() -> None:
    settings = SyncSettings(selection=Selection(("shop.orders",)))
    for raw in ELSEWHERE:
        rows = change_rows(raw)
        assert rows is not None
        member = OplogMember("rs0", cast(OplogSource, SimpleNamespace(entries=None)), "7.0.28")
        fold = SyncFold(settings, KNOWN, 10)
        found = list(fold.steps(OplogWindow(ClusterTime.of(1, 0), END, (EntryRun(member, raw, rows),), END)))
        assert all(isinstance(one, ChangeSegment) and not one.changes for one in found)


def test_a_definition_stands_between_what_was_before_it_and_what_comes_after() -> None:
    found, fold = steps(
        entry(2, "i", {"_id": 1})
        + command(3, {"renameCollection": "shop.orders", "to": "shop.sold", "stayTemp": False})
        + entry(4, "u", {"$v": 2, "diff": {"u": {"n": 1}}}, ns="shop.sold", o2={"_id": 1})
    )
    assert shown(found) == [
        (before(3), [(1, NOT_THERE)]),
        "renameCollection",
        (END, [(1, THERE)]),
    ]
    assert fold.collections[bytes(UUID)].target == "shop.sold"


def test_while_a_segment_is_taken_names_are_those_of_then() -> None:
    raw = entry(2, "i", {"_id": 1}) + command(3, {"renameCollection": "shop.orders", "to": "shop.sold"})
    rows = change_rows(raw)
    assert rows is not None
    member = OplogMember("rs0", cast(OplogSource, SimpleNamespace(entries=None)), "6.0.27")
    fold = SyncFold(SyncSettings(), KNOWN, 10)
    names = []
    for one in fold.steps(OplogWindow(ClusterTime.of(1, 0), END, (EntryRun(member, raw, rows),), END)):
        if isinstance(one, ChangeSegment):
            names.append(fold.collections[bytes(UUID)].target)
    assert names == ["shop.orders", "shop.sold"]


def test_each_definition_has_a_position_before_it() -> None:
    """Two in a row may give another result when repeated."""
    modify = {"collMod": "orders", "index": {"name": "n_1", "hidden": True}}
    found, _ = steps(command(2, modify) + command(3, modify))
    assert shown(found) == ["collMod", (before(3), []), "collMod", (END, [])]


def test_what_a_transaction_creates_is_there_before_its_changes() -> None:
    operations = [
        {"op": "i", "ns": "shop.orders", "ui": UUID, "o": {"_id": 1}, "o2": {"_id": 1}},
        {"op": "c", "ns": "shop.$cmd", "ui": NEW, "o": {"create": "new"}},
        {"op": "i", "ns": "shop.new", "ui": NEW, "o": {"_id": 2}, "o2": {"_id": 2}},
    ]
    raw = bson.encode(
        {
            "op": "c",
            "ns": "admin.$cmd",
            "o": {"applyOps": operations},
            "ts": Timestamp(5, 1),
            "t": Int64(1),
            "v": Int64(2),
            "prevOpTime": {"ts": Timestamp(0, 0), "t": Int64(-1)},
            **SESSION,
        }
    )
    found, _ = steps(entry(4, "i", {"_id": 0}) + raw)
    assert shown(found) == [
        (before(5), [(0, NOT_THERE)]),
        "create",
        (END, [(1, NOT_THERE), (2, NOT_THERE)]),
    ]


def test_a_definition_of_one_shard_comes_before_changes_of_that_time_on_another() -> None:
    """A position just before that time must not include any of them."""
    found, _ = steps(
        entry(3, "i", {"_id": 1}) + entry(4, "i", {"_id": 2}),
        command(4, {"createIndexes": "orders", "v": 2, "key": {"n": 1}, "name": "n_1"}),
    )
    assert shown(found) == [(before(4), [(1, NOT_THERE)]), "createIndexes", (END, [(2, NOT_THERE)])]


def test_a_segment_ends_after_so_many_changes_and_never_inside_one_time() -> None:
    found, _ = steps(b"".join(entry(2 + one, "i", {"_id": one}) for one in range(5)), most=2)
    assert [one.until for one in found] == [before(4), before(6), END]
    assert [one.changes for one in found] == [2, 2, 1]


def test_numbers_of_two_types_are_one_document() -> None:
    found, _ = steps(
        entry(2, "d", {"_id": 1})
        + entry(3, "i", {"_id": 1.0})
        + entry(4, "d", {"_id": 1.0})
        + entry(5, "i", {"_id": 1})
    )
    [segment] = found
    [document] = segment.documents
    assert bson.decode(_document(document.identifier)) == {"_id": 1}
    assert document.identifier[0] == 0x10
    assert document.before == THERE
    assert [one[0] for one in document.changes][-1] == INSERT


def test_only_what_builds_on_one_another_is_kept() -> None:
    found, _ = steps(
        entry(2, "u", {"$v": 2, "diff": {"u": {"n": 1}}}, o2={"_id": 1})
        + entry(3, "d", {"_id": 1})
        + entry(4, "i", {"_id": 1})
        + entry(5, "u", {"$v": 2, "diff": {"u": {"n": 1}}}, o2={"_id": 1})
        + entry(6, "d", {"_id": 2})
    )
    [segment] = found
    kept = [(one.before, [change[0] for change in one.changes]) for one in segment.documents]
    assert kept == [(THERE, [INSERT, UPDATE]), (THERE, [DELETE])]


def test_a_document_inserted_twice_is_on_two_shards() -> None:
    with pytest.raises(SourceError, match="two documents with the _id 1 on two shards"):
        steps(entry(2, "i", {"_id": 1}), entry(3, "i", {"_id": 1}))


def test_what_applyops_of_a_user_inserts_need_not_have_been_missing() -> None:
    raw = bson.encode(
        {
            "op": "c",
            "ns": "admin.$cmd",
            "o": {"applyOps": [{"op": "i", "ns": "shop.orders", "ui": UUID, "o": {"_id": 1}}]},
            "ts": Timestamp(5, 1),
            "t": Int64(1),
            "v": Int64(2),
        }
    )
    found, _ = steps(raw)
    assert shown(found) == [(END, [(1, UNKNOWN)])]


def test_a_change_of_a_collection_that_nothing_has_told_of_is_refused() -> None:
    """Up to the end of the copy such changes were ignored, and the collection that they belong to was then missing."""
    with pytest.raises(SourceError, match=r"shop\.others was changed at 1970-01-01 00:00:02 UTC \(2,1\)") as refused:
        steps(entry(2, "i", {"_id": 1}, ui=NEW, ns="shop.others"))
    assert "a selection that holds both names" in str(refused.value.hint)


@pytest.mark.parametrize("name", ["system.resharding.x", "tmp.agg_out.x", "tmpA1b2C.renameCollection"])
def test_what_was_in_the_making_before_the_sync_is_refused_once_it_has_its_name(name: str) -> None:
    """The collection that it replaces was dropped on the target, and nothing took its place. In tests, resharding had
    begun after the sync, and writes that told of the loss had always come after the end of the copy."""
    with pytest.raises(UsageError, match=r"was renamed to shop\.orders") as refused:
        steps(command(3, {"renameCollection": f"shop.{name}", "to": "shop.orders", "dropTarget": UUID}, NEW))
    assert "no collection is being made into another one" in str(refused.value.hint)


RESHARDING = "system.resharding.5cc5a1a7-7d0f-4c35-9d4c-0e2b7e8f3a10"


@pytest.mark.parametrize(
    ("gone", "name", "pending"),
    [(None, RESHARDING, 0), (set[bytes](), f"{RESHARDING}.x", 0), (set[bytes](), RESHARDING, 1)],
)
def test_only_what_a_resharding_makes_waits_for_its_name(gone: set[bytes] | None, name: str, pending: int) -> None:
    """Of one made by hand, a collection with a name of the sync's own stayed on the target. A replica set has no
    resharding."""
    found, fold = steps(
        command(3, {"create": name}, NEW) + entry(4, "i", {"_id": 1}, ui=NEW, ns=f"shop.{name}"), gone=gone
    )
    assert len([one for one in found if isinstance(one, Definition)]) == pending
    assert len([one for one in fold.collections.values() if one.target.startswith("shop.tailrace.pending.")]) == pending


def test_a_collection_that_comes_back_from_outside_is_refused() -> None:
    """Both in one window: it was gone from the target, without a message."""
    away = command(3, {"renameCollection": "shop.orders", "to": "away.orders"})
    back = entry(4, "c", {"renameCollection": "away.orders", "to": "shop.orders"}, ns="away.$cmd")
    for gone in (None, set[bytes]()):
        with pytest.raises(UsageError, match=r"away\.orders, which is not synced, was renamed to shop\.orders"):
            steps(away + back, gone=gone)


def test_what_one_shard_has_dropped_may_change_on_another_in_a_later_window() -> None:
    """The drop was forgotten at the end of the window, and the change was refused."""
    gone = set[bytes]()
    steps(command(3, {"drop": "orders"}), gone=gone)
    assert gone == {bytes(UUID)}
    left = {uuid: one for uuid, one in KNOWN.items() if uuid not in gone}
    for late in (entry(2, "d", {"_id": 1}, fromMigrate=True), entry(2, "i", {"_id": 1})):
        found, _ = steps(late, known=left, gone=gone)
        assert shown(found) == [(END, [])]


def test_a_collection_made_again_with_its_uuid() -> None:
    """A restoration does that. Within one window its creation was ignored, since the UUID had been dropped."""
    found, fold = steps(command(3, {"drop": "orders"}) + command(4, {"create": "orders"}) + entry(5, "i", {"_id": 1}))
    assert [one for one in shown(found) if isinstance(one, str)] == ["drop", "create"]
    assert shown(found)[-1] == (END, [(1, NOT_THERE)])
    assert fold.collections[bytes(UUID)].namespace == "shop.orders"


def test_names_that_no_driver_can_read_are_left_out_as_the_copy_leaves_them_out() -> None:
    raw = entry(2, "i", {"_id": 1}, ui=NEW, ns="shop.odd_")
    raw += command(3, {"create": "odd_"}, NEW) + command(4, {"renameCollection": "shop.odd_", "to": "shop.ode_"}, NEW)
    found, fold = steps(raw.replace(b"od", b"\xffd"))
    assert [type(one) for one in found] == [ChangeSegment]
    assert fold.collections == KNOWN


def test_a_database_that_moves_has_two_collections_of_one_name_for_a_while() -> None:
    found, fold = steps(
        entry(9, "i", {"_id": "late"}) + command(10, {"drop": "orders"}),
        command(3, {"create": "orders"}, NEW)
        + entry(4, "i", {"_id": 1}, ui=NEW, fromMigrate=True)
        + entry(11, "i", {"_id": 2}, ui=NEW),
    )
    names = [one.name.decode() for one in found if isinstance(one, Definition)]
    assert names == ["create", "drop", "arrive"]
    made = next(one for one in found if isinstance(one, Definition))
    assert made.after is not None
    assert made.after.target == f"shop.tailrace.pending.{bytes(NEW).hex()}"
    assert {one.target for one in fold.collections.values()} == {"shop.orders"}
