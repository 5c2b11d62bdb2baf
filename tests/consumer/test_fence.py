"""Fenced writes: once a newer owner has written, an older one changes nothing and is told so; nothing else is
refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import MongoClient, ReturnDocument
from pymongo.errors import DuplicateKeyError

from tailrace.consumer import Fence, Fenced, LeaseLost
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tests.server_in_use import IN_BETWEEN

pytestmark = pytest.mark.mongod


@pytest.fixture
def target(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        name = f"fence_{abs(hash(request.node.nodeid)) % 10**9}"
        yield client[name]["target"]
        client.drop_database(name)


OLD, NEW = Fence("orders", 6), Fence("orders", 7)

#: Writes through a fence: to the document 1, and to all documents.
WRITES: dict[str, Callable[[Fence, Any], Any]] = {
    "update_one": lambda fence, at: fence.update_one(at, {"_id": 1}, {"$set": {"by": fence.version}}),
    "update_one, upsert": lambda fence, at: fence.update_one(
        at, {"_id": 1}, {"$set": {"by": fence.version}}, upsert=True
    ),
    "update_one, pipeline": lambda fence, at: fence.update_one(at, {"_id": 1}, [{"$set": {"by": fence.version}}]),
    "update_many": lambda fence, at: fence.update_many(at, {}, {"$set": {"by": fence.version}}),
    "replace_one": lambda fence, at: fence.replace_one(at, {"_id": 1}, {"by": fence.version}),
    "replace_one, upsert": lambda fence, at: fence.replace_one(at, {"_id": 1}, {"by": fence.version}, upsert=True),
    "insert_one": lambda fence, at: fence.insert_one(at, {"_id": 1, "by": fence.version}),
    "find_one_and_update": lambda fence, at: fence.find_one_and_update(at, {"_id": 1}, {"$set": {"by": fence.version}}),
    "delete_one": lambda fence, at: fence.delete_one(at, {"_id": 1}),
}


def check_write(name: str, target: Any) -> None:
    target.delete_many({})
    target.insert_one({"_id": 1, "kept": 1, "_fence": {"bills": 99}})
    if name != "delete_one":
        for fence in (OLD, OLD, NEW, NEW):  # the same owner may write as often as it likes
            WRITES[name](fence, target)
            assert target.find_one()["by"] == fence.version
            assert target.find_one()["_fence"] == {"bills": 99, "orders": fence.version}
    else:
        NEW.update_one(target, {"_id": 1}, {"$set": {"by": 7}})
    before = target.find_one()
    with pytest.raises(Fenced, match=r"version 6 of the lease on 'orders'.* carries version"):
        WRITES[name](OLD, target)
    assert target.find_one() == before
    assert target.count_documents({}) == 1


@pytest.mark.parametrize("name", WRITES)
def test_an_older_owner_changes_nothing(name: str, target: Any) -> None:
    check_write(name, target)


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_an_older_owner_changes_nothing_on_older_servers(
    version: str, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    with MongoClient[dict[str, Any]](start_replica_set(1, version=version).uri) as client:
        for name in WRITES:
            check_write(name, client["fence"]["target"])


def test_a_filter_that_finds_nothing_is_no_fence(target: Any) -> None:
    target.insert_one({"_id": 1, "_fence": {"orders": 99}})
    assert OLD.update_one(target, {"_id": 2}, {"$set": {"x": 1}}).matched_count == 0
    assert OLD.delete_one(target, {"_id": 2}).deleted_count == 0
    assert OLD.find_one_and_update(target, {"_id": 2}, {"$set": {"x": 1}}) is None
    assert OLD.update_many(target, {"kind": "none"}, {"$set": {"x": 1}}).matched_count == 0
    assert OLD.update_one(target, {"_id": 2}, {"$set": {"x": 1}}, upsert=True).upserted_id == 2


def test_many_targets_are_changed_but_for_those_of_a_newer_owner(target: Any) -> None:
    target.insert_many([{"_id": 1}, {"_id": 2, "_fence": {"orders": 7}}, {"_id": 3}])
    with pytest.raises(Fenced):
        OLD.update_many(target, {}, {"$set": {"by": 6}})
    assert [found["_id"] for found in target.find({"by": 6})] == [1, 3]


def test_upserts_of_two_owners_at_once_leave_one_document_of_the_newer(target: Any) -> None:
    for number in range(30):
        barrier, outcomes = threading.Barrier(2), []

        def write(fence: Fence, barrier: Any = barrier, outcomes: Any = outcomes, number: int = number) -> None:
            barrier.wait()
            try:
                fence.update_one(target, {"_id": number}, {"$set": {"by": fence.version}}, upsert=True)
            except Fenced:
                outcomes.append("fenced")

        threads = [threading.Thread(target=write, args=(fence,)) for fence in (OLD, NEW)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(target.find({"_id": number})) == [{"_id": number, "by": 7, "_fence": {"orders": 7}}]


def test_another_unique_index_is_heard_of(target: Any) -> None:
    target.create_index("mail", unique=True)
    target.insert_one({"_id": 1, "mail": "a"})
    with pytest.raises(DuplicateKeyError):
        NEW.update_one(target, {"_id": 2}, {"$set": {"mail": "a"}}, upsert=True)


def test_a_resource_may_have_any_name(target: Any) -> None:
    for resource in ("a.b", "$a", "a%2Eb", "a/b 1", "ü"):
        old, new = Fence(resource, 1), Fence(resource, 2)
        new.update_one(target, {"_id": 1}, {"$set": {"x": 1}}, upsert=True)
        with pytest.raises(Fenced):
            old.update_one(target, {"_id": 1}, {"$set": {"x": 2}})
    assert len(target.find_one()["_fence"]) == 5


def test_the_field_can_be_chosen_and_the_document_after_an_upsert_is_returned(target: Any) -> None:
    fence = Fence("orders", 3, field="written")
    found = fence.find_one_and_update(
        target, {"_id": 1}, {"$inc": {"n": 1}}, upsert=True, return_document=ReturnDocument.AFTER
    )
    assert found == {"_id": 1, "n": 1, "written": {"orders": 3}}


def test_nothing_is_written_when_the_lease_is_known_to_be_lost(target: Any) -> None:
    def lost() -> None:
        raise LeaseLost("gone")

    fence = Fence("orders", 3, check=lost)
    for name, write in WRITES.items():
        with pytest.raises(LeaseLost, match="gone"):
            write(fence, target)
        assert target.count_documents({}) == 0, name


WRONG: dict[str, Callable[[Any], Any]] = {
    "a value for _id": lambda at: NEW.update_one(at, {"mail": "a"}, {"$set": {"x": 1}}, upsert=True),
    "value for _id": lambda at: NEW.update_one(at, {"_id": {"$gt": 1}}, {"$set": {"x": 1}}, upsert=True),
    "needs an _id": lambda at: NEW.insert_one(at, {"x": 1}),
    "operators such as": lambda at: NEW.update_one(at, {"_id": 1}, {"x": 1}),
    "must not contain operators": lambda at: NEW.replace_one(at, {"_id": 1}, {"$set": {"x": 1}}),
    "as it is after the update": lambda at: NEW.find_one_and_update(at, {"_id": 1}, {"$set": {"x": 1}}, upsert=True),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_fenced_is_refused(words: str, target: Any) -> None:
    with pytest.raises(UsageError, match=words):
        WRONG[words](target)
    assert target.count_documents({}) == 0
