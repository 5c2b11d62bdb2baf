"""What the target has besides the sync's own data: it stays as it is, and anything that is in the way ends the sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.act.sync.writer import TargetMismatchError
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError
from tailrace.sync import Sync
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held

pytestmark = [pytest.mark.mongod, pytest.mark.used_servers]
Start = Callable[..., ReplicaSet]
OLDER = [pytest.param(version, marks=pytest.mark.slow) for version in ("5.0.4", "4.4.2")]
VERSIONS = ["6.0.27", *OLDER]


def reached(source: str, target: str, **options: Any) -> None:
    with Sync(source, target, lease_s=4.0, **options) as sync:
        sync.run(to_present=True)


def unlike(source: str, target: str) -> list[str]:
    sides = [held(uri, but=[STATE_DB], selected=is_users) for uri in (source, target)]
    return differences(*sides, known=normal("", "", ages=False))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_name_that_is_taken_on_the_target_ends_the_sync(version: str, start_replica_set: Start) -> None:
    """With ``applyOps`` the server gave the name to the new collection, and another name to the one that had it: there
    was no error, and with ``--rename`` the sync's own collection lost its documents."""
    source, target = (start_replica_set(version=version).uri for _ in range(2))
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        client.shop.a.insert_one({"_id": 1})
        client.blog.a.insert_one({"_id": 1})
        reached(source, target, only=["shop.*"], rename={"shop.a": "shop.b"})
        reached(source, target, only=["blog.*"], name="blog")
        client.shop.b.insert_one({"_id": "of another"})
        there.blog.taken.insert_one({"_id": "foreign"})
        client.blog.a.rename("taken")
        with pytest.raises(TargetMismatchError, match=r"cannot create shop\.b: it has another shop\.b already"):
            reached(source, target, only=["shop.*"], rename={"shop.a": "shop.b"})
        with pytest.raises(TargetMismatchError, match=r"cannot rename blog\.a to blog\.taken"):
            reached(source, target, only=["blog.*"], name="blog")
        assert list(there.shop.b.find()) == [{"_id": 1}]
        assert list(there.blog.taken.find()) == [{"_id": "foreign"}]
        assert there.shop.list_collection_names() == ["b"]
        assert sorted(there.blog.list_collection_names()) == ["a", "taken"]
        there.blog.taken.rename("kept")
        reached(source, target, only=["blog.*"], name="blog")
        assert list(there.blog.taken.find()) == [{"_id": 1}]


@pytest.mark.parametrize("version", VERSIONS)
def test_databases_whose_names_differ_in_case_alone(version: str, start_replica_set: Start) -> None:
    """They can be followed one after the other. One that the target has in addition ends the sync; it used to end the
    server."""
    source, target = (start_replica_set(version=version).uri for _ in range(2))
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        client.shop.a.insert_one({"_id": 1})
        client.shop.command({"create": "seen", "viewOn": "a", "pipeline": []})
        reached(source, target)
        client.drop_database("shop")
        client.Shop.a.insert_one({"_id": 2})
        client.drop_database("Shop")
        client.shop.command({"create": "seen", "viewOn": "a", "pipeline": []})
        reached(source, target)
        assert unlike(source, target) == []
        there.BLOG.a.insert_one({"_id": "foreign"})
        client.blog.a.insert_one({"_id": 1})
        with pytest.raises(SinkError, match="different case") as raised:
            reached(source, target)
        assert raised.value.code == 13297
        assert there.list_database_names() == ["BLOG", "admin", "config", "local", "shop", STATE_DB]


def test_a_copy_beside_a_database_that_has_nothing_left_but_its_name(start_replica_set: Start) -> None:
    """No list shows it."""
    source, target = (start_replica_set().uri for _ in range(2))
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        there.SHOP.a.insert_one({"_id": 1})
        there.SHOP.a.drop()
        client.shop.a.insert_one({"_id": 1})
        reached(source, target)
        assert unlike(source, target) == []


def test_views_of_others_stay_when_the_database_is_dropped(start_replica_set: Start) -> None:
    source, target = (start_replica_set().uri for _ in range(2))
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        client.shop.a.insert_one({"_id": 1})
        for name in ("mine", "another"):
            client.shop.command({"create": name, "viewOn": "a", "pipeline": []})
        reached(source, target, only=["shop.a", "shop.mine"])
        there.shop.command({"create": "foreign", "viewOn": "a", "pipeline": []})
        client.drop_database("shop")
        reached(source, target, only=["shop.a", "shop.mine"])
        assert sorted(there.shop.list_collection_names()) == ["foreign", "system.views"]


def test_a_collection_that_somebody_drops_meanwhile_ends_the_sync(start_replica_set: Start) -> None:
    """A transaction made it anew, without its options, and nobody noticed before the next start."""
    source, target = (start_replica_set().uri for _ in range(2))
    with MongoClient[Any](source) as client, MongoClient[Any](target) as there:
        client.shop.a.insert_many([{"_id": 1}, {"_id": 2}])
        reached(source, target)
        dropped = False

        def drop(_: object) -> None:
            nonlocal dropped
            if not dropped:
                dropped = True
                there.shop.a.drop()
                client.shop.a.insert_one({"_id": 3})

        client.shop.a.insert_one({"_id": "more"})
        with Sync(source, target, lease_s=4.0) as sync, pytest.raises(SinkError, match=r"shop\.a on the target is not"):
            sync.run(drop)
