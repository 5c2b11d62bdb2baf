"""A lake that was changed holds, row by row and in the same order, what a lake would hold that had begun like this."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pymongo
import pytest
from bson import Decimal128, MinKey

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, UsageError
from tailrace.lake import files, verify
from tailrace.lake.spark.store.change import _ChangeWork, change_lake
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.erasure import drop_days, erase
from tailrace.lake.store.layout import cluster_time_of
from tailrace.lake.store.manifest import WrittenVersion
from tailrace.lake.store.status import lake_status
from tests.server_in_use import SERVER_VERSION, major
from tests.spark.lake_driving import options_for
from tests.spark.sparkless_lake import fill
from tests.spark.streams import newest

pytestmark = [pytest.mark.mongod]

_DATABASE = "lakechanged"


@dataclass(frozen=True)
class History:
    """Three cluster times, with writes between them."""

    uri: str
    start: ClusterTime
    middle: ClusterTime
    until: ClusterTime

    def source(self, **more: str) -> dict[str, str]:
        options = options_for(self.uri, _DATABASE, self.start, maxEventsPerTrigger="25", **more)
        if "collections" in more:
            del options["database"]
        return options


def work(uri: str, first: int) -> ClusterTime:
    """Events of two collections; the last ones are of one transaction, and so have the same cluster time."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        orders, other = client[_DATABASE]["orders"], client[_DATABASE]["other"]
        for number in range(first, first + 30):
            orders.insert_one({"_id": number, "n": number, "text": "x" * 20})
            other.insert_one({"_id": float(number)})
        orders.update_many({"n": {"$lt": first + 10}}, {"$inc": {"n": 100}})
        other.delete_many({"_id": {"$lt": first + 5}})
        with client.start_session() as session, session.start_transaction():
            other.insert_one({"_id": f"before {first}"}, session=session)
            orders.insert_one({"_id": f"t{first}"}, session=session)
            other.insert_one({"_id": f"after {first}"}, session=session)
    return newest(uri)


@pytest.fixture(scope="module")
def history(replica_set: ReplicaSet) -> History:
    start = newest(replica_set.uri)
    middle = work(replica_set.uri, 0)
    return History(replica_set.uri, start, middle, work(replica_set.uri, 1000))


def rows(lake: Path) -> list[dict[str, Any]]:
    """Every row of a lake, in the order of the stream."""

    def found() -> Iterator[dict[str, Any]]:
        for file in files(lake):
            with pq.ParquetFile(file) as parquet:
                yield from parquet.read().to_pylist()

    return sorted(found(), key=lambda row: str(row["token"]))


def _match(*kinds: str) -> str:
    return json.dumps([{"$match": {"operationType": {"$in": list(kinds)}}}])


_CHANGES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "wider filter": ({"pipeline": _match("insert")}, {"pipeline": _match("insert", "delete")}),
    "no filter": ({"pipeline": _match("delete")}, {}),
    "collection": ({"collections": f"{_DATABASE}.orders"}, {"collections": f"{_DATABASE}.o*"}),
    "scope": ({"collection": "orders"}, {}),
    "columns": ({"columns": "event,token"}, {"columns": "event,token,wall_time,full_document,document_key,collection"}),
    "documents": ({}, {"documents": "bson"}),
    "fewer columns": ({"columns": "token,full_document,cluster_time"}, {"columns": "cluster_time,token"}),
    "both": (
        {"collection": "orders", "columns": "event,token"},
        {"documents": "variant", "columns": "token,full_document"},
    ),
    "without event": ({"collection": "other", "columns": "token,document_key"}, {"columns": "token,document_key"}),
}


def _equal(lake: Path, other: Path) -> None:
    report = verify(lake, full=True)
    assert report.problems == []
    assert report.leftovers == 0
    assert rows(lake) == rows(other)
    found = [pq.read_metadata(file).metadata for file in files(lake)]
    expected = [pq.read_metadata(file).metadata for file in files(other)]
    spark = b"org.apache.spark.sql.parquet.row.metadata"
    assert {one[spark] for one in found} == {one[spark] for one in expected}


@pytest.mark.parametrize(
    ("change", "partition_by"),
    [
        *((change, ("day",)) for change in _CHANGES),
        ("scope", ("day", "collection")),
        ("documents", ("day", "collection")),
    ],
)
def test_a_changed_lake_is_the_one_that_would_have_been_written(
    history: History, tmp_path: Path, change: str, partition_by: tuple[str, ...]
) -> None:
    lake, fresh, (before, after) = tmp_path / "lake", tmp_path / "fresh", _CHANGES[change]
    old, new = history.source(**before), history.source(**after)
    fill(old, lake, history.middle, partition_by=partition_by)
    report = change_lake(new, lake)
    assert report.differences
    fill(new, fresh, history.middle, partition_by=partition_by)
    _equal(lake, fresh)
    with pytest.raises(UsageError, match="belongs to another stream"):
        fill(old, lake, history.until)
    fill(new, lake, history.until, partition_by=partition_by)
    fill(new, fresh, history.until, checkpoint=tmp_path / "another", partition_by=partition_by)
    _equal(lake, fresh)


def test_keys_that_only_type_bits_can_tell_do_not_stand_in_the_way(replica_set: ReplicaSet, tmp_path: Path) -> None:
    """The lake's column holds a token's text alone. The change read whole tokens to find their version, and refused a
    lake that has a file whose first document has a decimal for its key: tests had integers and texts."""
    start, database = newest(replica_set.uri), f"{_DATABASE}_keys"
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        for key in (Decimal128("1.10"), Decimal128("1E6144"), 2**62, {"a": Decimal128("-Infinity")}, MinKey()):
            client[database]["orders"].insert_one({"_id": key})
        client[database]["other"].insert_one({"_id": 1.5})
    lake, fresh, until = tmp_path / "lake", tmp_path / "fresh", newest(replica_set.uri)
    source = options_for(replica_set.uri, database, start, maxEventsPerTrigger="1")
    fill({**source, "collection": "orders"}, lake, until)
    assert change_lake(source, lake).rows == 1
    fill(source, fresh, until)
    _equal(lake, fresh)


@pytest.mark.parametrize("has_more", [False, True])
def test_a_lake_that_begins_after_a_token_gets_nothing_from_before_it(
    history: History, tmp_path: Path, has_more: bool
) -> None:
    """The token is that of a transaction's first operation, and all of a transaction has one cluster time. That
    operation was added, although the stream begins after it."""
    with (
        pymongo.MongoClient[Any](history.uri) as client,
        client[_DATABASE].watch(
            [{"$match": {"documentKey._id": "before 0"}}], start_at_operation_time=history.start.to_timestamp()
        ) as stream,
    ):
        first = stream.next()["_id"]
    seen = ["before 0", "after 0"] if has_more else ["before 0"]
    filters = {"$or": [{"operationType": "delete"}, {"documentKey._id": {"$in": seen}}]}
    old, new = (
        {**history.source(pipeline=json.dumps(stages)), "startAfter": json.dumps(first)}
        for stages in ([{"$match": filters}], [])
    )
    for source in (old, new):
        del source["startAtOperationTime"]
    lake, fresh = tmp_path / "lake", tmp_path / "fresh"
    fill(old, lake, history.until)
    if has_more:
        with pytest.raises(UsageError, match="begins after a token, with events of the same cluster time"):
            change_lake(new, lake)
        return
    began = cluster_time_of(first["_data"])
    assert change_lake(new, lake).since == began, "which is what the log says too"
    fill(new, fresh, history.until)
    assert rows(lake) == [row for row in rows(fresh) if cluster_time_of(row["token"]) > began]


@pytest.fixture
def small(history: History, tmp_path: Path) -> Path:
    """A lake of the inserts of one collection."""
    fill(history.source(collection="orders", pipeline=_match("insert")), tmp_path / "lake", history.middle)
    return tmp_path / "lake"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"collection": "other"}, "is not among those of the new stream"),
        ({"pipeline": _match("insert", "delete"), "collection": "other"}, "is not among those of the new stream"),
        (
            {"pipeline": json.dumps([{"$project": {"updateDescription": 0}}, {"$set": {"more": 1}}])},
            "is another one there",
        ),
        ({"fullDocument": "updateLookup"}, "fullDocument=updateLookup cannot be backfilled"),
        ({"fullDocumentBeforeChange": "whenAvailable"}, "=whenAvailable cannot be backfilled"),
        ({"pipeline": json.dumps([{"$match": {"$expr": {"$gt": ["$$NOW", 0]}}}])}, r"has \$\$NOW, which gives another"),
    ],
)
def test_what_would_not_be_exact_is_refused_and_the_lake_stays(
    history: History, small: Path, options: Mapping[str, str], said: str
) -> None:
    held = rows(small), sorted(small.rglob("*.parquet")), lake_status(small)
    with pytest.raises(UsageError, match=said):
        change_lake(history.source(**options), small)
    assert (rows(small), sorted(small.rglob("*.parquet")), lake_status(small)) == held
    old = history.source(collection="orders", pipeline=_match("insert"))
    fill(old, small, history.until, checkpoint=small.with_name("another"))  # it still belongs to that stream


def test_a_lake_of_which_events_were_erased_can_only_be_changed_from_now_on(history: History, small: Path) -> None:
    erase(small, {"documentKey._id": 3})
    with pytest.raises(UsageError, match="they would come back"):
        change_lake(history.source(collection="orders"), small)
    held = rows(small)
    report = change_lake(history.source(collection="orders"), small, from_now=True)
    assert (report.since, report.rows, rows(small)) == (history.middle, 0, held)
    (change,) = lake_status(small).changes
    assert str(change).endswith(f"it holds for events after cluster time {history.middle}")
    fill(history.source(collection="orders"), small, history.until)
    fresh = small.with_name("fresh")
    fill(history.source(collection="orders"), fresh, history.until)
    later = [row for row in rows(fresh) if int(row["token"][2:18], 16) > int(history.middle)]
    assert rows(small)[len(held) :] == later
    assert verify(small, full=True).problems == []


def test_dropped_days_do_not_come_back(history: History, small: Path) -> None:
    """Everything here is of one day, which is dropped. The events written after that can be widened."""
    drop_days(small, datetime.now(UTC).date())  # nothing is that old
    source = history.source(collection="orders")
    assert change_lake(source, small, dry_run=True).since == ClusterTime(int(history.start.tick()) - 1)
    drop_days(small, (datetime.now(UTC) + timedelta(days=2)).date())
    with pytest.raises(UsageError, match="has no events yet"):
        change_lake(source, small)


def test_events_of_another_server_version_are_not_made_again(
    history: History, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lake says that it was written on an older server; of single events this is not known."""
    other = "4.4.2" if major(SERVER_VERSION) == 5 else "5.0.4"
    source = history.source(collection="orders")
    state = CommitLog(small).state()
    for versions, said in (
        ((other,), f"holds events of MongoDB {other}, and the deployment is of"),
        ((other, SERVER_VERSION), "holds events of several server versions"),
        ((), "of a server version that its log does not name"),
    ):
        state.versions = tuple(WrittenVersion(version, history.start) for version in versions)
        with monkeypatch.context() as patch:
            patch.setattr(CommitLog, "state", lambda _: state)
            with pytest.raises(UsageError, match=said):
                change_lake(source, small, dry_run=True)
    assert change_lake(source, small, dry_run=True).backfills


def test_an_event_in_quarantine_stays_there_and_no_other_joins_it(history: History, tmp_path: Path) -> None:
    divided = {"$set": {"more": {"$divide": [1, {"$subtract": ["$documentKey._id", 7]}]}}}
    numbers = {"$match": {"operationType": "insert", "documentKey._id": {"$type": "number"}}}
    old, wider, wrong, right = (
        history.source(columns="event,token", collection=name, pipeline=json.dumps(stages))
        for name, stages in (
            ("orders", [numbers, {"$match": {"documentKey._id": {"$lt": 10}}}, divided]),
            ("orders", [numbers, divided]),
            ("orders", [{"$match": {"operationType": {"$in": ["insert", "update"]}}}, divided]),
            ("orders", [numbers, {"$match": {"documentKey._id": {"$ne": 7}}}, divided]),
        )
    )
    lake, fresh = tmp_path / "lake", tmp_path / "fresh"
    fill(old, lake, history.middle, quarantines=True)
    assert lake_status(lake).quarantined == 1
    with pytest.raises(UsageError, match="cannot be written: "):
        change_lake(wrong, lake)
    with pytest.raises(UsageError, match="is in the lake's quarantine, and the new stream does not put it aside"):
        change_lake(right, lake)
    change_lake(wider, lake)
    fill(wider, fresh, history.middle, quarantines=True)
    _equal(lake, fresh)
    assert lake_status(lake).quarantined == lake_status(fresh).quarantined == 1


def test_a_stream_that_goes_on_meanwhile_is_noticed(
    history: History, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, wider = (history.source(collection="orders", **more) for more in ({"pipeline": _match("insert")}, {}))
    carry_out = _ChangeWork.carry_out

    def late(change: _ChangeWork, *arguments: Any) -> Any:
        fill(old, small, history.until, checkpoint=small.with_name("another"))
        return carry_out(change, *arguments)

    monkeypatch.setattr(_ChangeWork, "carry_out", late)
    with pytest.raises(SinkError, match="was written while it was being changed"):
        change_lake(wider, small)
    fill(old, small.with_name("fresh"), history.until)
    _equal(small, small.with_name("fresh"))
