"""Users with fewer rights than a sync needs are refused before anything is written. Those who only lack applyOps are
not, and their copies are equal apart from the UUIDs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, SourceError, UsageError
from tailrace.sync import Sync
from tests.sync.both import STATE_DB, is_users, normal
from tests.sync.equality import differences, held

pytestmark = pytest.mark.mongod
OPLOG = {"resource": {"db": "local", "collection": "oplog.rs"}, "actions": ["find"]}
LISTS = {"resource": {"db": "", "collection": ""}, "actions": ["listCollections", "listIndexes"]}
DATABASES = {"resource": {"cluster": True}, "actions": ["listDatabases"]}


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
    with ReplicaSet(root_password="secret") as source, ReplicaSet(root_password="secret") as target:
        yield source, target


@pytest.fixture
def filled(ends: tuple[ReplicaSet, ReplicaSet]) -> tuple[ReplicaSet, ReplicaSet]:
    """A source of two databases, and a target without any."""
    for one in ends:
        with MongoClient[Any](one.uri) as client:
            for name in client.list_database_names():
                if name not in ("admin", "config", "local"):
                    client.drop_database(name)
    with MongoClient[Any](ends[0].uri) as client:
        for database in ("shop", "blog"):
            client[database].a.insert_many([{"_id": number} for number in range(10)])
            client[database].b.insert_one({"_id": 1})
    return ends


def as_user(running: ReplicaSet, name: str, privileges: list[dict[str, Any]], roles: list[Any]) -> str:
    with MongoClient[Any](running.uri) as root:
        root.admin.command({"createRole": name, "privileges": privileges, "roles": roles})
        root.admin.command({"createUser": name, "pwd": "p", "roles": [name]})
    return f"mongodb://{name}:p@{running.uri.partition('@')[2]}"


def find_in(database: str, collection: str = "") -> dict[str, Any]:
    return {"resource": {"db": database, "collection": collection}, "actions": ["find"]}


@pytest.mark.parametrize(
    ("name", "privileges", "only"),
    [
        ("halfAll", [find_in("shop")], []),
        ("halfNamed", [find_in("shop")], ["shop.*", "blog.*"]),
        ("halfOfOne", [find_in("shop"), find_in("blog", "a")], ["shop.*", "blog.*"]),
    ],
)
def test_a_source_of_which_the_user_sees_a_half(
    filled: tuple[ReplicaSet, ReplicaSet], name: str, privileges: list[dict[str, Any]], only: list[str]
) -> None:
    source, target = filled
    uri = as_user(source, name, [OPLOG, LISTS, DATABASES, *privileges], [])
    with Sync(uri, target.uri, only=only) as sync:
        [refused] = sync.plan().refusals
        assert refused.startswith("the source's user may not read blog."), refused
        with pytest.raises(UsageError):
            sync.run(to_present=True)
    with MongoClient[Any](target.uri) as there:
        assert set(there.list_database_names()) == {"admin", "config", "local"}


def test_a_target_of_which_the_user_may_write_a_half(filled: tuple[ReplicaSet, ReplicaSet]) -> None:
    source, target = filled
    roles = [{"role": role, "db": "shop"} for role in ("readWrite", "dbAdmin")]
    uri = as_user(target, "writesHalf", [], [*roles, {"role": "readWrite", "db": STATE_DB}])
    with Sync(source.uri, uri, only=["shop.*", "blog.*"]) as sync:
        [refused] = sync.plan().refusals
        assert "in the database blog of the target" in refused
        with pytest.raises(UsageError, match="in the database blog of the target"):
            sync.run(to_present=True)
    with MongoClient[Any](target.uri) as there:
        assert set(there.list_database_names()) == {"admin", "config", "local"}


def test_without_the_right_to_apply_operations(filled: tuple[ReplicaSet, ReplicaSet]) -> None:
    """For every definition there is a plain command besides the one by UUID."""
    source, target = filled
    uri = as_user(target, "plain", [], ["readWriteAnyDatabase", "dbAdminAnyDatabase", "clusterMonitor"])
    with MongoClient[Any](source.uri) as client, Sync(source.uri, uri, lease_s=4) as sync:
        client.shop.create_collection("checked", validator={"n": {"$type": "int"}})
        client.shop.command({"create": "seen", "viewOn": "a", "pipeline": []})
        client.shop.a.create_index("n", unique=True, sparse=True)
        assert not sync.plan().keeps_uuids
        sync.run(to_present=True)
        assert unlike(source, target) == []
        shop = client.shop
        shop.a.create_index("m", expireAfterSeconds=3600)
        shop.a.drop_index("n_1")
        shop.a.update_many({}, {"$set": {"m": 1}})
        shop.b.rename("c")
        client.admin.command({"renameCollection": "shop.c", "to": "blog.c"})
        shop.command({"collMod": "a", "index": {"name": "m_1", "hidden": True}})
        shop.command({"collMod": "checked", "validationLevel": "moderate"})
        shop.create_collection("new", collation={"locale": "fr"})
        shop.new.insert_one({"_id": 1})
        shop.command({"collMod": "seen", "viewOn": "checked", "pipeline": [{"$match": {"n": 1}}]})
        shop.command({"create": "more", "viewOn": "a", "pipeline": [], "collation": {"locale": "sv"}})
        shop.command({"create": "gone", "viewOn": "a", "pipeline": []})
        shop.gone.drop()
        client.blog.a.drop()
        client.admin.command({"renameCollection": "blog.c", "to": "blog.b", "dropTarget": True})
        sync.run(to_present=True)
        assert unlike(source, target) == []
        assert sync.verify().good
        client.drop_database("blog")
        client.drop_database("shop")
        sync.run(to_present=True)
        assert unlike(source, target) == []


def test_a_verification_tells_at_which_side_a_right_is_missing(filled: tuple[ReplicaSet, ReplicaSet]) -> None:
    """Both replica sets have the same name, and the message had nothing else; and without useUUID a server answers as
    if the user may not read the database. No test had verified as a different user from the one who copied."""
    source, target = filled
    with Sync(source.uri, target.uri, lease_s=4) as sync:
        sync.run(to_present=True)
    roles = ["readAnyDatabase", {"role": "read", "db": "local"}, {"role": "readWrite", "db": STATE_DB}]
    by_uuid = {"resource": {"cluster": True}, "actions": ["useUUID"]}
    half = [OPLOG, LISTS, DATABASES, find_in("shop"), by_uuid]
    for side, other in ((source, target), (target, source)):
        name = "source" if side is source else "target"
        users = {
            f"the {name}'s user may not name collections by their UUIDs": as_user(side, "noUUID", [], roles),
            f"the {name}'s user may not read (a collection of )?the database blog": as_user(
                side, "half", half, roles[2:]
            ),
            f"the {name}'s user may not list all databases": as_user(side, "lists", [OPLOG, by_uuid], roles[2:]),
        }
        for told, uri in users.items():
            ends = (uri, other.uri) if side is source else (other.uri, uri)
            with Sync(*ends, lease_s=4) as sync, pytest.raises(SourceError, match=told) as raised:
                sync.verify()
            assert raised.value.code == 13
            assert ("Grant it the action useUUID" in str(raised.value.hint)) == ("UUIDs" in told)


def may(running: ReplicaSet, name: str, privilege: dict[str, Any], *, so: bool) -> None:
    command = "grantPrivilegesToRole" if so else "revokePrivilegesFromRole"
    with MongoClient[Any](running.uri) as root:
        root.admin.command({command: name, "privileges": [privilege]})


def refuses_writes(running: ReplicaSet) -> bool:
    with MongoClient[Any](running.uri) as root:
        return bool(root.admin.command("serverStatus")["repl"]["userWriteBlockMode"] == 2)


def test_the_right_to_block_writes_goes_away_during_a_cut_over(filled: tuple[ReplicaSet, ReplicaSet]) -> None:
    """Without this right a cut-over went on although nobody had stopped the writers; if it was taken away meanwhile,
    the source stayed blocked without a message. Tests of cut-overs had users with all rights."""
    source, target = filled
    mode = {"resource": {"cluster": True}, "actions": ["setUserWriteBlockMode"]}
    uri = as_user(source, "blocks", [], ["readAnyDatabase", "clusterMonitor"])
    with Sync(uri, target.uri, lease_s=4) as sync:
        sync.run(to_present=True)
        with pytest.raises(SourceError, match="cannot be blocked: not authorized") as refused:
            sync.cutover()
        assert "--writers-stopped" in str(refused.value.hint)
        assert sync.status().phase == "follow"
        may(source, "blocks", mode, so=True)
        with MongoClient[Any](target.uri) as there:
            there.shop.a.update_one({"_id": 7}, {"$set": {"planted": True}})
        with pytest.raises(SourceError, match=r"differs.*; and the source still refuses its users' writes") as left:
            sync.cutover(sample=None, told=lambda _: may(source, "blocks", mode, so=False))
        assert "setUserWriteBlockMode: 1, global: false" in str(left.value.hint)
        assert refuses_writes(source)
    with MongoClient[Any](source.uri) as root:
        root.admin.command("setUserWriteBlockMode", 1, **{"global": False})


def test_a_right_that_goes_away_when_limits_of_age_are_restored(filled: tuple[ReplicaSet, ReplicaSet]) -> None:
    """One was restored and another was not, and the sync went on: documents expired on the target during a sync. No
    test had ended a cut-over between the two."""
    source, target = filled
    alters = [{"resource": {"db": database, "collection": ""}, "actions": ["collMod"]} for database in ("blog", "shop")]
    others = {"resource": LISTS["resource"], "actions": ["bypassDocumentValidation"]}
    uri = as_user(target, "alters", [*alters, others], ["readWriteAnyDatabase", "clusterMonitor"])
    with MongoClient[Any](source.uri) as client, Sync(source.uri, uri, only=["shop.*", "blog.*"], lease_s=4) as sync:
        for database in (client.shop, client.blog):
            database.a.create_index("at", expireAfterSeconds=10**6)
        sync.run(to_present=True)

        def told(text: str) -> None:
            if text.startswith("the target equals"):
                may(target, "alters", alters[1], so=False)

        with pytest.raises(SinkError, match=r"the sync is cut over, but not every expireAfterSeconds .* is restored"):
            sync.cutover(told=told)
        assert refuses_writes(source)
        left = sync.status()  # it showed a finished cut-over
        assert (left.phase, left.held_limits) == ("cutOver", 1)
        assert "expireAfterSeconds not restored on 1 index of the target: run" in str(left)
        with pytest.raises(UsageError, match="has not restored every expireAfterSeconds"):
            sync.reverse()
        may(target, "alters", alters[1], so=True)
        sync.cutover()
        assert sync.status().to_json()["heldLimits"] == 0
        sides = [held(one.uri, but=[STATE_DB], selected=is_users) for one in (source, target)]
        assert differences(*sides, uuids=False, known=normal("", "", ages=True)) == []
        with pytest.raises(UsageError, match="already been cut over"):
            sync.cutover()
        client.admin.command("setUserWriteBlockMode", 1, **{"global": False})


def unlike(source: ReplicaSet, target: ReplicaSet) -> list[str]:
    sides = [held(one.uri, but=[STATE_DB], selected=is_users) for one in (source, target)]
    return differences(*sides, uuids=False, known=normal("", "", ages=False))
