"""A transaction over several shards that moves documents between them: the shards commit in any order.

No test had found it, although the random workload on clusters has such transactions: its shards nearly always commit in
the order in which the transaction reached them, which is that of the delete and the insert.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import bson
import pytest

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ShardedCluster
from tailrace.embedded.sharding import Transaction
from tailrace.lake.tables.as_of import as_of
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.state import TabledCollection
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.window.apply import DELETE_OF, INSERT, DocumentWork, has_document_key
from tailrace.read.window.shard_commit import net_operations
from tests.snapshot.test_snapshot_sharded import REGIONS, spread_over
from tests.tables.equality import in_table
from tests.tables.test_as_of import rows_of
from tests.tables.test_sharded_equality import truth

HERE, THERE = REGIONS[0], REGIONS[1]  # of the first and of the second shard
MOVED, CHANGED_AND_MOVED, BACK_AGAIN, DELETED, INSERTED, PASSING = range(1, 7)


def statements(transaction: Transaction, namespace: str, turn: int) -> None:
    def delete(region: str, number: int) -> None:
        transaction.delete_one(namespace, {"region": region, "_id": number})

    def insert(region: str, number: int, value: int) -> None:
        transaction.insert_one(namespace, {"_id": number, "region": region, "v": value, "turn": turn})

    delete(HERE, MOVED)
    insert(THERE, MOVED, 1)
    transaction.update_one(namespace, {"region": HERE, "_id": CHANGED_AND_MOVED}, {"$set": {"v": 7, "gone": 1}})
    delete(HERE, CHANGED_AND_MOVED)
    insert(THERE, CHANGED_AND_MOVED, 2)
    delete(HERE, BACK_AGAIN)
    insert(THERE, BACK_AGAIN, 3)
    delete(THERE, BACK_AGAIN)
    insert(HERE, BACK_AGAIN, 4)
    delete(HERE, DELETED)
    insert(THERE, INSERTED, 5)
    insert(THERE, PASSING, 6)
    delete(THERE, PASSING)


@pytest.mark.mongod
@pytest.mark.parametrize("apart", [False, True], ids=["in one micro-batch", "in two"])
def test_tables_hold_what_moved_between_shards_whichever_commits_first(
    sharded_cluster: ShardedCluster, tmp_path: Path, apart: bool
) -> None:
    router = sharded_cluster.router
    namespace = spread_over(sharded_cluster, "shard_commits", {"region": 1, "_id": 1})
    settings = TableSettings(tmp_path / "t", (TableRule("shard_commits.*"),))
    try:
        for turn, order in enumerate(permutations(("shard0", "shard1"))):
            for one in router.find(namespace):
                router.delete_one(namespace, {"region": one["region"], "_id": one["_id"]})
            for number in (MOVED, CHANGED_AND_MOVED, BACK_AGAIN, DELETED):
                router.insert_one(namespace, {"_id": number, "region": HERE, "v": 0})
            with TablesWriter(sharded_cluster.uri, settings) as writer:
                writer.run_to_present()
                transaction = router.transaction()
                statements(transaction, namespace, turn)
                at = transaction.prepare()
                for shard in order:
                    transaction._end(shard, "commitTransaction", commitTimestamp=at)
                    if apart:
                        writer.run_to_present()
                transaction._ended = True
                held, time = truth(sharded_cluster, namespace), ClusterTime.from_timestamp(router.fence())
                if apart:
                    assert in_table(settings.root, namespace) == held, order
                for one in router.find(namespace):
                    query = {"region": one["region"], "_id": one["_id"]}
                    router.update_one(namespace, query, {"$set": {"later": turn}})
                writer.run_to_present()
            assert in_table(settings.root, namespace) == truth(sharded_cluster, namespace), order
            found = as_of(settings.root, namespace, time, uri=sharded_cluster.uri)
            assert rows_of(found.rows) == held
    finally:
        router.drop_database("shard_commits")


def work(held: dict[str, Any] | None, *changes: tuple[int, dict[str, Any]]) -> DocumentWork[TabledCollection]:
    collection = TabledCollection("0" * 32, 1, "shop.orders")
    known = None if held is None else bson.encode(held)
    done = DocumentWork(
        collection, b"k", known, [(op, bson.encode(body), time) for time, (op, body) in enumerate(changes, 1)]
    )
    for change in done.changes:
        done.apply(change)
    return done


def test_a_delete_of_another_shards_document_leaves_this_one() -> None:
    there, here = {"_id": 1, "a": {"b": "there"}}, {"_id": 1, "a": {"b": "here"}}
    key = {"_id": 1, "a.b": "here"}
    late = work(here, (INSERT, there), (DELETE_OF, key))
    assert (late.document, late.changed) == (bson.encode(there), 1)
    early = work(here, (DELETE_OF, key), (INSERT, there))
    assert (early.document, early.changed) == (bson.encode(there), 2)
    own = work(here, (DELETE_OF, key))
    assert (own.document, own.changed) == (None, 1)
    foreign = work(there, (DELETE_OF, key))
    assert (foreign.document, foreign.changed) == (bson.encode(there), None)


@pytest.mark.parametrize(
    ("document", "document_key", "has"),
    [
        ({"_id": 1, "a": 1}, {"a": 1, "_id": 1}, True),
        ({"_id": 1, "a": 1}, {"a": 1.0, "_id": 1}, False),
        ({"_id": 1}, {"_id": 1}, True),
        ({"_id": 1}, {"a": None, "_id": 1}, False),
        ({"_id": 1, "a": {"b": {"c": "x"}}}, {"a.b.c": "x", "_id": 1}, True),
        ({"_id": 1, "a": {"b": {"c": "y"}}}, {"a.b.c": "x", "_id": 1}, False),
        ({"_id": 1, "a": [{"b": "x"}]}, {"a.b": "x", "_id": 1}, False),
    ],
)
def test_a_document_has_a_document_key(document: dict[str, Any], document_key: dict[str, Any], has: bool) -> None:
    assert has_document_key(bson.encode(document), bson.encode(document_key)) is has


class _Operation:
    """The relevant part of an operation."""

    collection_uuid = b"u"

    def __init__(self, operation: str, o: dict[str, Any], o2: dict[str, Any] | None = None) -> None:
        self.operation = operation
        self.o = bson.encode(o)
        self.o2 = None if o2 is None else bson.encode(o2)


def test_what_a_part_leaves_behind() -> None:
    """A document's shard key value may also change on its shard, before the document is deleted there."""
    one, other = {"region": "a", "_id": 1}, {"region": "b", "_id": 1}
    update = _Operation("u", {"$v": 2, "diff": {}}, one)
    again = _Operation("u", {"$v": 2, "diff": {}}, other)
    insert, delete, last = _Operation("i", other), _Operation("d", other), _Operation("i", one)

    def left(*operations: _Operation) -> list[tuple[_Operation, bytes | None]]:
        return list(net_operations(operations))  # type: ignore[arg-type]

    assert left(update, again) == [(update, None), (again, None)]
    assert left(update, delete) == [(delete, bson.encode(one))]
    assert left(insert, delete) == []
    assert left(insert, again, delete) == []
    assert left(delete, insert, again, delete) == [(delete, bson.encode(other))]
    assert left(delete, last) == [(delete, bson.encode(other)), (last, None)]
    assert left(insert, delete, last) == [(last, None)]
