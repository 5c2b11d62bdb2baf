"""The demo's act on tables: at the end each equals its collection, and one is asked for an earlier time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from deltalake import DeltaTable

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SinkError, TailraceError
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.names import folder_of
from tailrace.lake.tables.state import TableState

_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a collection held at a cluster time, as the server said then."""

    namespace: str
    time: ClusterTime
    documents: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class TablesResult:
    """Rows by table, how many of them differ from the collections, and the ``as of`` query with its answer."""

    rows: Mapping[str, int]
    differences: int
    recorded: Recorded
    answered: int
    as_of_equal: bool

    @property
    def good(self) -> bool:
        """Whether everything is equal."""
        return not self.differences and self.as_of_equal


def record(client: pymongo.MongoClient[dict[str, Any]], database: str, collection: str) -> Recorded:
    """Record what a collection holds. Nobody may write to it meanwhile."""
    with client.start_session(causal_consistency=True) as session:
        found = frozenset(_documents(client, database, collection, session))
        now = session.operation_time
    assert now is not None
    return Recorded(f"{database}.{collection}", ClusterTime.from_timestamp(now), found)


def wait_for_tables(root: Path, until: Timestamp, patience_s: float, check: Any) -> None:
    """Wait until all tables have reached a cluster time. ``check`` raises if their writer has ended."""
    goal = ClusterTime.from_timestamp(until)
    deadline = time.monotonic() + patience_s
    while _stated(root) < goal:
        if time.monotonic() > deadline:
            raise TailraceError(f"the tables did not catch up in {patience_s:.0f} seconds")
        check()
        time.sleep(_LOOK_S)


def compare_tables(
    root: Path, client: pymongo.MongoClient[dict[str, Any]], database: str, recorded: Recorded, uri: str
) -> TablesResult:
    """Compare each table with its collection, byte for byte, and one table as of the recorded time."""
    rows: dict[str, int] = {}
    differences = 0
    for name in sorted(client[database].list_collection_names()):
        truth = _documents(client, database, name)
        table = DeltaTable((root / folder_of(f"{database}.{name}")).absolute().as_uri())
        found = table.to_pyarrow_table(columns=["_bson"]).column("_bson").to_pylist()
        rows[name] = len(found)
        differences += len(set(truth) ^ set(found)) + abs(len(found) - len(truth))
    answer = as_of(root, recorded.namespace, recorded.time, uri=uri).rows.column("_bson").to_pylist()
    return TablesResult(rows, differences, recorded, len(answer), sorted(answer) == sorted(recorded.documents))


def _documents(
    client: pymongo.MongoClient[dict[str, Any]], database: str, collection: str, session: Any = None
) -> list[bytes]:
    found: Any = client[database].get_collection(collection, codec_options=_RAW).find({}, session=session)
    return [raw_bson.bytes_of(one) for one in found]


def _stated(root: Path) -> ClusterTime:
    try:
        state = TableState(root / "_tailrace" / "state", readonly=True)
    except SinkError:
        return ClusterTime(0)
    try:
        position = state.position()
    finally:
        state.close()
    return ClusterTime(0) if position is None else position.stated
