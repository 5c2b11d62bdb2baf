"""Tables from the rows of a query: what is applied, recognised and refused, with events made by hand.

The quick guard of tests/tables/test_event_tables.py and tests/spark/test_tables_writer.py, which need a server.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.binary import Binary

from tailrace.base import durable
from tailrace.cli.main import main
from tailrace.core.event.resume_token import encode_event_token
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import OtherHistoryError, SinkError, TailraceError, UsageError
from tailrace.lake.spark.tables_writer import tables_writer
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.delta_commit import stated
from tailrace.lake.tables.event_rows import read_rows
from tailrace.lake.tables.event_tables import EventTables
from tailrace.lake.tables.fed import FedBatch, refuse_fed
from tailrace.lake.tables.names import place_of
from tailrace.lake.tables.resync import request_resync
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.state import TableState
from tailrace.read.snapshot.event import snapshot_event
from tests.tables.equality import in_table

ORDERS, OTHERS = b"o" * 16, b"p" * 16


def at(time: int) -> ClusterTime:
    return ClusterTime.of(1_700_000_000, time)


def event(operation: str, time: int, uuid: bytes = ORDERS, name: str = "orders", **fields: Any) -> bytes:
    identifier = bson.encode({"operationType": operation, "documentKey": fields.get("documentKey", {})})
    token = encode_event_token(
        at(time), version=2, txn_op_index=0, from_invalidate=False, uuid=uuid, identifier=identifier
    )
    head = {"_id": bson.decode(token), "operationType": operation, "clusterTime": at(time).to_timestamp()}
    uuids = {"collectionUUID": Binary(uuid, 4)}
    return bson.encode({**head, **uuids, "ns": {"db": "shop", "coll": name}, **fields})


def insert(key: Any, time: int, *, uuid: bytes = ORDERS, name: str = "orders", **fields: Any) -> bytes:
    return event("insert", time, uuid, name, documentKey={"_id": key}, fullDocument={"_id": key, **fields})


def update(key: Any, time: int, **fields: Any) -> bytes:
    raw = {"$v": 2, "diff": {"u": fields}}
    return event("update", time, documentKey={"_id": key}, rawUpdateDescription=raw)


def delete(key: Any, time: int, **more: Any) -> bytes:
    return event("delete", time, documentKey={"_id": key, **more})


def copied(*keys: int, chunk: int = 0) -> list[bytes]:
    return [
        snapshot_event(bson.encode({"_id": key, "n": 0}), "shop.orders", ORDERS, at(1), None, position=chunk)
        for key in keys
    ]


class Query:
    """A query and its checkpoint: gives its micro-batches one after the other."""

    def __init__(self, root: Path, name: str = "q", **options: Any) -> None:
        self.root = root / "tables"
        self.name = name
        self.number = 0
        self.options = {"begins_empty": True, **options}

    @contextmanager
    def opened(self) -> Iterator[EventTables]:
        settings = TableSettings(self.root, (TableRule("shop.*"),))
        with closing(EventTables(settings, **self.options)) as tables:
            yield tables

    def give(self, *events: bytes, number: int | None = None, reached: int | None = None, source: str = "") -> bool:
        batch = FedBatch(
            self.name,
            self.number if number is None else number,
            read_rows(events),
            None if reached is None else at(reached),
            source,
        )
        with self.opened() as tables:
            found = tables.apply(batch)
        self.number = batch.number + 1
        return found

    def held(self, name: str = "orders") -> dict[Any, Any] | None:
        found = in_table(self.root, f"shop.{name}")
        return None if found is None else {one["_id"]: one for one in map(bson.decode, found.values())}


def test_changes_in_any_order_of_rows(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.give(update(1, 3, n=2), insert(2, 4), insert(1, 2, n=1), delete(2, 5), insert(3, 6))
    assert query.held() == {1: {"_id": 1, "n": 2}, 3: {"_id": 3}}
    query.give(update(1, 8, n=3), delete(3, 7), event("replace", 9, documentKey={"_id": 1}, fullDocument={"_id": 1}))
    assert query.held() == {1: {"_id": 1}}
    assert next(stated(place_of(query.root, "shop.orders"))).time == at(9)


def test_a_micro_batch_that_is_given_again_changes_nothing(tmp_path: Path) -> None:
    query = Query(tmp_path)
    assert query.give(insert(1, 2, n=[1]))
    push = event(
        "update", 3, documentKey={"_id": 1}, rawUpdateDescription={"$v": 2, "diff": {"sn": {"a": True, "u1": 2}}}
    )
    assert query.give(push)
    versions = len(list(stated(place_of(query.root, "shop.orders"))))
    assert not query.give(push, number=1)
    assert query.held() == {1: {"_id": 1, "n": [1, 2]}}
    assert len(list(stated(place_of(query.root, "shop.orders")))) == versions


@pytest.mark.parametrize(("step", "count"), [("tables.state", 1), ("tables.done", 2)])  # each start publishes, too
def test_a_crash_at_a_step_is_finished_by_the_next_start(
    tmp_path: Path, step: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(tmp_path)
    query.give(insert(1, 2, n=0))

    passed: list[str] = []

    def die(name: str) -> None:
        passed.append(name)
        if passed.count(step) == count:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(durable, "step", die)
        with pytest.raises(KeyboardInterrupt):
            query.give(update(1, 3, n=1), number=1)
    assert not query.give(update(1, 3, n=1), number=1)
    assert query.held() == {1: {"_id": 1, "n": 1}}


def test_a_copy_and_what_changed_meanwhile(tmp_path: Path) -> None:
    """No table shows a copy before the stream has passed its end. A micro-batch of a copy is applied again."""
    query = Query(tmp_path, begins_empty=False, now=lambda: at(9))
    query.give(*copied(1, 2))
    query.give(*copied(1, 2, 3), number=0)
    query.give(*copied(4, chunk=1))
    query.give(delete(2, 3), delete(5, 4), insert(3, 5, n=0), update(1, 6, n=0), reached=8)
    assert query.held() is None
    query.give(reached=9)
    assert query.held() == {key: {"_id": key, "n": 0} for key in (1, 3, 4)}
    with pytest.raises(TailraceError, match="lacks events"):
        query.give(delete(5, 11))
    with pytest.raises(SinkError, match="a document of a copy after events"):
        query.give(*copied(6, chunk=2))


def test_collections_come_and_go(tmp_path: Path) -> None:
    query = Query(tmp_path)
    query.give(
        event("create", 1),
        insert(1, 2),
        event("create", 3, OTHERS, "tmp.agg_out.1"),
        insert(7, 4, uuid=OTHERS, name="tmp.agg_out.1"),
    )
    assert query.held() == {1: {"_id": 1}}
    query.give(event("rename", 5, OTHERS, "tmp.agg_out.1", to={"db": "shop", "coll": "orders"}))
    assert query.held() == {7: {"_id": 7}}
    query.give(event("drop", 6, OTHERS), event("dropDatabase", 7, name=""), reached=8)
    assert query.held() == {}
    assert query.held("tmp.agg_out.1") is None


def test_a_document_whose_shard_key_changed_is_kept_whichever_shard_commits_first(tmp_path: Path) -> None:
    query = Query(tmp_path)
    moved = event("insert", 3, documentKey={"r": 2, "_id": 1}, fullDocument={"_id": 1, "r": 2})
    query.give(event("insert", 2, documentKey={"r": 1, "_id": 1}, fullDocument={"_id": 1, "r": 1}))
    query.give(moved, delete(1, 4, r=1))
    assert query.held() == {1: {"_id": 1, "r": 2}}


Broken = Callable[[Query], object]
REFUSED: dict[str, tuple[type[TailraceError], str, Broken]] = {
    "a checkpoint that is older": (SinkError, "checkpoint is an older copy", lambda q: q.give(insert(3, 9), number=1)),
    "tables that were set back": (SinkError, "tables are an older copy", lambda q: q.give(insert(3, 9), number=4)),
    "other events under the number": (SinkError, "with other events", lambda q: q.give(insert(3, 9), number=2)),
    "an earlier event": (SinkError, "is earlier than what", lambda q: q.give(insert(3, 3), insert(4, 9))),
    "half a transaction": (SinkError, "half a transaction", lambda q: q.give(update(2, 4, n=1))),
    "an event twice": (SinkError, "there twice", lambda q: q.give(insert(3, 9), insert(3, 9))),
    "an insert that was there": (TailraceError, "is there already", lambda q: q.give(insert(1, 9))),
    "a delete without its insert": (TailraceError, "is not there", lambda q: q.give(delete(3, 9))),
    "an update without its insert": (TailraceError, "does not fit", lambda q: q.give(update(3, 9, n=1))),
    "another collection of the name": (SinkError, "another collection", lambda q: q.give(insert(3, 9, uuid=OTHERS))),
    "a name without a rename": (SinkError, "no rename", lambda q: q.give(insert(3, 9, name="moved"))),
    "a database without drops": (SinkError, "no drop of", lambda q: q.give(_dropped())),
    "a rename from elsewhere": (SinkError, "has not shown its doc", lambda q: q.give(_renamed("hidden"))),
    "a capped collection": (SinkError, "has not shown its", lambda q: q.give(_renamed("tmpab12C.convertToCapped.x"))),
    "resharding": (SinkError, "nobody knows what", lambda q: q.give(event("reshardCollection", 9))),
    "no UUID": (UsageError, "has no collectionUUID", lambda q: q.give(_without(insert(3, 9), "collectionUUID"))),
    "no delta": (UsageError, "has no rawUpdate", lambda q: q.give(event("update", 9, documentKey={"_id": 1}))),
    "NULL": (SinkError, "is NULL", lambda q: q.give(None)),  # type: ignore[arg-type]
    "text": (SinkError, "not a change event as BSON", lambda q: q.give(b"{}")),
    "cut": (SinkError, "not a change event as BSON", lambda q: q.give(insert(3, 9)[:-3])),
    "another time": (SinkError, "not that of its resume token", lambda q: q.give(_without(insert(3, 9), "", t=8))),
    "another deployment": (OtherHistoryError, "another deployment", lambda q: q.give(insert(3, 9), source="b")),
}


def _dropped() -> bytes:
    whole = bson.decode(event("dropDatabase", 9))
    return bson.encode({**whole, "ns": {"db": "shop"}})


def _renamed(name: str) -> bytes:
    return event("rename", 9, OTHERS, name, to={"db": "shop", "coll": "new"})


def _without(raw: bytes, name: str, t: int | None = None) -> bytes:
    found = {key: value for key, value in bson.decode(raw).items() if key != name}
    return bson.encode(found if t is None else {**found, "clusterTime": at(t).to_timestamp()})


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables that three micro-batches were written to."""
    query = Query(tmp_path_factory.mktemp("begun"))
    query.give(insert(1, 2, n=0), source="a")
    query.give(insert(2, 3))
    query.give(update(1, 4, n=1))
    return query.root.parent


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_leaves_the_tables_as_they_were(begun: Path, tmp_path: Path, name: str) -> None:
    kind, message, broken = REFUSED[name]
    shutil.copytree(begun, tmp_path / "copy")
    query = Query(tmp_path / "copy")
    query.number = 3
    with pytest.raises(kind, match=message):
        broken(query)
    assert query.held() == {1: {"_id": 1, "n": 1}, 2: {"_id": 2}}
    query.give(insert(5, 20), number=3)
    assert query.held() == {1: {"_id": 1, "n": 1}, 2: {"_id": 2}, 5: {"_id": 5}}


def test_a_new_checkpoint_begins_with_the_last_event_that_the_tables_have(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    new = Query(tmp_path / "copy", "new")
    with pytest.raises(SinkError, match="has to begin with the last event") as refused:
        new.give(insert(3, 9))
    assert "startAtOperationTime=1700000000,4" in str(refused.value.hint)
    new.give(update(1, 4, n=1), update(1, 6, n=2))
    assert new.held() == {1: {"_id": 1, "n": 2}, 2: {"_id": 2}}
    new.give(insert(3, 9))
    with pytest.raises(SinkError, match="written by query new"):
        Query(tmp_path / "copy").give(insert(4, 10), number=3)


def test_how_tables_begin(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not begin with a copy"):
        Query(tmp_path, begins_empty=False).give(insert(1, 2))
    with pytest.raises(UsageError, match="only the deployment can say when it ended"):
        Query(tmp_path, begins_empty=False).give(*copied(1))
    with pytest.raises(SinkError, match="the tables are new"):
        Query(tmp_path).give(insert(1, 2), number=7)


def test_other_writers_and_commands_leave_these_tables_alone(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    query = Query(tmp_path / "copy")
    with query.opened(), pytest.raises(SinkError, match="another process writes"), query.opened():
        pass
    with pytest.raises(UsageError, match="written from the rows of a query"):
        as_of(query.root, "shop.orders", at(3))
    with pytest.raises(UsageError, match="written by a Spark query"):
        request_resync(query.root, "shop.orders")
    with closing(TableState(query.root / "_tailrace" / "state")) as state:
        check = partial(refuse_fed, query.root, state)
        with pytest.raises(UsageError, match="written by a Spark query"):
            check()
    with pytest.raises(UsageError, match="begun with the collections"):
        EventTables(TableSettings(query.root, (TableRule("shop.o*"),)))
    shutil.rmtree(query.root / "_tailrace")
    with pytest.raises(UsageError, match="their state"):
        query.give(insert(1, 2), number=0)


def test_a_table_that_was_set_back_is_written_from_the_state(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    query = Query(tmp_path / "copy")
    query.number = 3
    log = place_of(query.root, "shop.orders") / "_delta_log"
    max(log.glob("*.json")).unlink()
    query.give(reached=9)
    assert query.held() == {1: {"_id": 1, "n": 1}, 2: {"_id": 2}}


def test_the_commands_for_tables_that_rest(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(begun, tmp_path / "copy")
    query = Query(tmp_path / "copy")
    query.number = 3
    for command in ("status", "compact", "expire"):
        assert main(["tables", command, str(query.root)]) == 0, command
    assert "shop.orders" in capsys.readouterr().out
    assert main(["tables", "rebuild", str(query.root), "shop.orders"]) == 0
    query.give(insert(3, 9))
    assert query.held() == {1: {"_id": 1, "n": 1}, 2: {"_id": 2}, 3: {"_id": 3}}


def test_the_page_has_every_argument_and_says_which_settings_are_refused() -> None:
    """Nothing had compared the page's table with the function."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "tables.md").read_text()
    part = page[page.index("## From a stream of your own in Spark") : page.index("**What the rows must have.**")]
    rows = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| `")]
    assert rows == [f"`{name}`" for name in signature(tables_writer).parameters]
    [settings] = [line for line in part.splitlines() if line.startswith("| `tables` |")]
    assert "in an object store, Iceberg and masks are refused" in settings
