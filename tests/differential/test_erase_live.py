"""What ``erase`` leaves of a lake is what the server's own stream gives with the opposite ``$match``.

The documents have fields with the names of the lake's columns and of the oplog's fields (``count``, ``ts``,
``applyOps``, ``token``, ``_id._data``): no test of an erasure had such documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pyarrow.parquet as pq
import pymongo
import pytest
from bson.timestamp import Timestamp

from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.embedded import ReplicaSet
from tailrace.lake.store import quarantine
from tailrace.lake.store.commit_log import CommitLog
from tailrace.lake.store.committer import commit_batch
from tailrace.lake.store.erasure import erase
from tailrace.lake.store.erasure_preview import preview
from tailrace.lake.store.identity import open_lake
from tailrace.lake.store.manifest import PlannedRange
from tailrace.lake.store.part_writer import PartWriter
from tailrace.lake.store.verification import verify
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION
from tests.spark.streams import newest, server_events

pytestmark = pytest.mark.mongod

DATABASE = "erased"
STREAM = {"settings": {"scope": DATABASE}, "columns": ["event", "token"], "documents": "json"}
COLUMNS = [
    {"name": name, "type": kind, "nullable": True, "metadata": {}}
    for name, kind in (("event", "binary"), ("token", "string"))
]
MATCHES: list[dict[str, Any]] = [
    {"fullDocument.count": {"$gt": 1}},
    {"fullDocument.count": "three"},
    {"updateDescription.updatedFields.count": 7},
    {"fullDocument.ts": Timestamp(5, 5)},
    {"fullDocument.ts": {"$type": "timestamp"}},
    {"fullDocument.applyOps.ns": "shop.orders"},
    {"fullDocument.applyOps": []},
    {"fullDocument.token": "82AA"},
    {"fullDocument.event": bson.Binary(b"event")},
    {"documentKey._id._data": "82AA"},
    {"documentKey._id": {"_data": "82AA"}},
    {"fullDocument._id._data": {"$exists": True}},
    {"fullDocument.operationType": "delete"},
    {"fullDocument.ns": {"db": "other", "coll": "other"}},
    {"$or": [{"fullDocument.fullDocument.who": "anna"}, {"updateDescription.updatedFields.ts": 1}]},
    {"$expr": {"$eq": ["$fullDocument.count", "$fullDocument.ts"]}},
    # Fields of the event itself: its own tokens and times.
    {"token": {"$exists": True}},
    {"count": {"$exists": True}},
    {"_id._data": "82AA"},
]


@pytest.fixture(params=[SERVER_VERSION, IN_BETWEEN, "4.4.2"], scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == SERVER_VERSION:
        yield request.getfixturevalue("replica_set").uri
        return
    with ReplicaSet(1, version=request.param) as older:
        yield older.uri


def write(uri: str) -> None:
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        orders = client[DATABASE]["orders"]
        named: list[dict[str, Any]] = [
            {"count": 1},
            {"count": 2.5, "ts": 2.5},
            {"count": "three"},
            {"ts": Timestamp(5, 5), "t": 1, "v": 2},
            {"ts": 1, "op": "i", "o": {"_id": 1}, "o2": {"_id": 1}},
            {"applyOps": [{"ns": "shop.orders", "op": "i"}], "prepare": True, "partialTxn": True},
            {"applyOps": []},
            {"token": "82AA", "event": b"event", "wall": None},
            {"operationType": "delete", "documentKey": {"_id": 0}, "clusterTime": 1},
            {"ns": {"db": "other", "coll": "other"}},
            {"fullDocument": {"who": "anna"}, "updateDescription": {"updatedFields": {"count": 7}}},
            {"_data": "82AA"},
        ]
        orders.insert_many([{"_id": number, **fields} for number, fields in enumerate(named)])
        orders.insert_one({"_id": {"_data": "82AA"}, "count": 3})
        orders.insert_one({"_id": {"_data": "82AB"}})
        orders.update_many({"_id": {"$lt": 4}}, {"$set": {"count": 7, "applyOps": [1]}})
        orders.update_one({"_id": {"_data": "82AA"}}, {"$set": {"ts": 1, "token": "x"}, "$unset": {"count": 1}})
        with client.start_session() as session, session.start_transaction():
            orders.insert_many([{"_id": f"t{n}", "count": n, "prepare": False} for n in range(3)], session=session)
            orders.delete_one({"_id": {"_data": "82AB"}}, session=session)
            orders.replace_one({"_id": 5}, {"applyOps": [{"ns": "shop.orders"}]}, session=session)


def lake_of(root: Path, events: list[bytes], span: PlannedRange) -> None:
    """A lake of these events, as a stream would write it; every 5th is put aside."""
    claim = open_lake(root, root.with_name(f"{root.name}.checkpoint"), STREAM, COLUMNS).claim
    rows = [event for number, event in enumerate(events) if number % 5]
    tokens = [bson.decode(event)["_id"]["_data"] for event in rows]
    files = PartWriter(root, "s").write_all(
        [pa.record_batch({"event": pa.array(rows, pa.binary()), "token": pa.array(tokens, pa.string())})]
    )
    aside = [QuarantinedEvent.of_document(event, "a test", 2) for event in events[::5]]
    assert commit_batch(root, claim, 0, span, (*files, quarantine.stage(root, aside))) is not None


def events_in(root: Path) -> list[bytes]:
    files = [root / file.name for file in CommitLog(root).live_files()]
    files += (root / "_quarantine").glob("*.parquet")
    return [event for file in files for event in pq.read_table(file, partitioning=None).column("event").to_pylist()]


def test_what_is_left_is_the_servers_stream_without_what_matches(server: str, tmp_path: Path) -> None:
    start = newest(server)
    write(server)
    until = newest(server)
    every = server_events(server, (DATABASE, None), start, until)
    assert len(every) == 24
    found = 0
    for number, match in enumerate(MATCHES):
        root = tmp_path / str(number)
        lake_of(root, every, PlannedRange(start, until))
        left = server_events(server, (DATABASE, None), start, until, pipeline=({"$match": {"$nor": [match]}},))
        seen = preview(root, match)
        report = erase(root, match, vacuum=True)
        assert sorted(events_in(root)) == sorted(left), match
        assert (report.rows, report.quarantined) == (seen.rows, seen.quarantined), match
        assert report.rows + report.quarantined == len(every) - len(left), match
        assert verify(root, full=True).problems == []
        found += report.rows + report.quarantined > 0
    assert found >= 14
    with pymongo.MongoClient[dict[str, Any]](server) as client:
        client.drop_database(DATABASE)
