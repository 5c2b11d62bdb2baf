"""A target of which one part was restored without the other, or which got another one's state: refused or equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, TailraceError
from tailrace.sync import Sync
from tests.lending import Lender
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held

pytestmark = pytest.mark.mongod
RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
Saved = dict[str, list[RawBSONDocument]]


@pytest.fixture(scope="module")
def servers(lender: Lender) -> Iterator[list[ReplicaSet]]:
    with lender.lent() as source, lender.lent() as target, lender.lent() as other:
        yield [source, target, other]


@pytest.fixture
def uris(servers: list[ReplicaSet]) -> tuple[str, str, str]:
    """A source with a collection, a target that has followed it, and another target, empty."""
    for one in servers:
        with MongoClient[Any](one.uri) as client:
            for name in client.list_database_names():
                if name not in ("admin", "config", "local"):
                    client.drop_database(name)
    source, target, other = (one.uri for one in servers)
    change(source, 0)
    once(source, target)
    return source, target, other


def once(source: str, target: str) -> None:
    with Sync(source, target, lease_s=4) as sync:
        sync.run(to_present=True)


def change(uri: str, number: int) -> None:
    """Changes that would show if they were applied again or left out."""
    with MongoClient[Any](uri) as client:
        orders = client.shop.orders
        orders.insert_many([{"_id": f"{number}.{one}", "n": 0, "a": [1, 2, 3], "b": {"c": 1}} for one in range(20)])
        orders.update_many({}, {"$inc": {"n": 1}, "$push": {"a": number}})
        orders.update_many({"n": {"$mod": [2, 0]}}, {"$unset": {"b": 1}, "$pop": {"a": -1}})
        orders.update_many({"n": {"$mod": [2, 1]}}, {"$set": {"b": {"d": number}}})


def saved(uri: str, database: str) -> Saved:
    with MongoClient[Any](uri) as client:
        there: Any = client.get_database(database, codec_options=RAW)
        return {name: list(there[name].find()) for name in there.list_collection_names()}


def restored(uri: str, database: str, documents: Saved, *, dropped: bool) -> None:
    """What a tool for backups does to a database; ``dropped``: it makes the collections anew."""
    with MongoClient[Any](uri) as client:
        if dropped:
            client.drop_database(database)
        for name, found in documents.items():
            client[database][name].delete_many({})
            if found:
                client[database][name].insert_many(found)


def unlike(source: str, target: str) -> list[str]:
    sides = [held(uri, but=[STATE_DB], selected=is_users) for uri in (source, target)]
    return differences(*sides, known=normal("", "", ages=False))


def test_a_state_that_is_older_than_changed_documents(uris: tuple[str, str, str]) -> None:
    """The changes are applied again, and give the same bytes."""
    source, target, _ = uris
    older = saved(target, STATE_DB)
    with MongoClient[Any](source) as client:
        client.shop.orders.update_many({}, {"$inc": {"n": 1}})
        client.shop.orders.update_many({}, {"$set": {"b.e": 5}})
    once(source, target)
    restored(target, STATE_DB, older, dropped=False)
    once(source, target)
    assert unlike(source, target) == []


def test_a_document_that_came_and_went_since_an_older_state(uris: tuple[str, str, str]) -> None:
    """Its insert and its delete cancelled each other out, and it stayed on the target, with exit status 0. Earlier
    tests had only changes that were applied again, and none for which there was nothing to apply."""
    source, target, _ = uris
    older = saved(target, STATE_DB)
    with MongoClient[Any](source) as client:
        client.shop.orders.insert_many([{"_id": "came"}, {"_id": "came and changed"}])
        once(source, target)
        client.shop.orders.update_one({"_id": "came and changed"}, {"$set": {"n": 1}})
        client.shop.orders.delete_many({"_id": {"$in": ["came", "came and changed"]}})
    restored(target, STATE_DB, older, dropped=False)
    once(source, target)
    assert unlike(source, target) == []


@pytest.mark.parametrize("deleted", [True, False])
def test_a_state_that_is_older_than_what_does_not_fit_it(uris: tuple[str, str, str], deleted: bool) -> None:
    source, target, _ = uris
    older = saved(target, STATE_DB)
    with MongoClient[Any](source) as client:
        if deleted:
            client.shop.orders.delete_one({"_id": "0.1"})
        else:
            change(source, 1)
    once(source, target)
    restored(target, STATE_DB, older, dropped=False)
    with pytest.raises(TailraceError) as raised:
        once(source, target)
    assert "Somebody else has written to the target" in str(raised.value)


def test_documents_that_are_older_than_the_state(uris: tuple[str, str, str]) -> None:
    """Nothing but their UUIDs shows that changes are missing."""
    source, target, _ = uris
    older = saved(target, "shop")
    change(source, 1)
    once(source, target)
    restored(target, "shop", older, dropped=True)
    change(source, 2)
    with pytest.raises(SinkError, match="is not the collection that the sync 'sync' has made"):
        once(source, target)


def test_documents_that_are_gone(uris: tuple[str, str, str]) -> None:
    source, target, _ = uris
    with MongoClient[Any](target) as client:
        client.shop.drop_collection("orders")
    change(source, 1)
    with pytest.raises(SinkError, match=r"shop\.orders of the sync 'sync' is not on the target"):
        once(source, target)
    with MongoClient[Any](target) as client:
        assert client.shop.list_collection_names() == []


def test_the_state_of_another_target(uris: tuple[str, str, str]) -> None:
    """Both have the source's UUIDs, and other positions."""
    source, target, other = uris
    once(source, other)
    change(source, 1)
    once(source, other)
    restored(target, STATE_DB, saved(other, STATE_DB), dropped=False)
    change(source, 2)
    with pytest.raises(SinkError, match="was written to another deployment than this target") as raised:
        once(source, target)
    assert "remove the field deployment" in str(raised.value.hint)


@pytest.mark.parametrize("name", ["ranges", "copies", "indexes", "collections"])
def test_a_copy_of_which_a_part_is_noted_no_more(uris: tuple[str, str, str], name: str) -> None:
    """What a missing range, copy or index stood for was left out, and the sync went on as if it were complete."""
    source, _, target = uris
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        client.shop.orders.create_index("n")
        client.shop.orders.create_index("b.d", expireAfterSeconds=10**9)
        with Sync(source, target, lease_s=4, documents_per_second=1) as sync:
            sync.run(lambda _: sync.stop())
        assert there[STATE_DB].syncs.find_one({}, {"phase": 1, "prepared": 1, "_id": 0}) == {
            "phase": "copy",
            "prepared": True,
        }
        kept = list(there[STATE_DB][name].find())
        there[STATE_DB][name].delete_one({})
        with pytest.raises(SinkError, match="what is noted about the copy of the sync 'sync' on the target is damaged"):
            once(source, target)
        there[STATE_DB][name].delete_many({})
        there[STATE_DB][name].insert_many(kept)
    once(source, target)
    assert unlike(source, target) == []
