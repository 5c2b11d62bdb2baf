"""Which rights suffice for what: the roles that docs/how-to/security.md prints, whole and with each privilege left out.

No test had checked this: one claimed that ``read`` on ``local`` is enough, a page named a built-in role (``backup``)
that may not read pre-images, and any missing right on the config database was reported as a right to read pre-images.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pymongo
import pytest
from pymongo.errors import OperationFailure

import tailrace
from tailrace.cli.main import main
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.errors import SourceError
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.options import parse
from tests import commands
from tests.amounts import WHOLE
from tests.docs.runner import printed_roles
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION, major

ON_REPLICA_SET, ON_CLUSTER = (printed_roles()[name]["privileges"] for name in ("tailrace", "tailraceCluster"))

IMAGES = {"full_document_before_change": "required"}
LOOKUPS = {"full_document": "updateLookup"}

#: For each privilege: which streams need it, and what the error says where it is missing.
NEEDED: dict[str, tuple[tuple[str, ...], str]] = {
    "local.oplog.rs": (("plain", "images", "lookups", "spark"), r"the oplog .*role read on the database local"),
    "local.system.replset": (("spark",), r"\(local.system.replset\).*clusterMonitor"),
    "config.system.preimages": (("images",), r"pre-images .*createRole"),
    "shop": (("lookups",), r"the database shop.*role read on shop"),
    "config.shards": (("plain", "images", "lookups", "spark"), r"\(config.shards\).*role read on the database config"),
    "config.databases": (
        ("plain", "images", "lookups", "spark"),
        r"\(config.databases\).*role read on the database config",
    ),
    "config.collections": (("lookups",), r"\(config.collections\).*role read on the database config"),
    "config.version": (("spark",), r"\(config.version\).*role read on the database config"),
    "config.chunks": (("lookups",), r"\(config.chunks\).*role read on the database config"),
}


def named(privilege: Mapping[str, Any]) -> str:
    resource = privilege["resource"]
    return f"{resource['db']}.{resource['collection']}".rstrip(".")


class Guarded(NamedTuple):
    """A deployment with users: its replica sets, a root client for each, and what writes an update and an insert."""

    version: str
    parts: Sequence[ReplicaSet]
    roots: Sequence[pymongo.MongoClient[dict[str, Any]]]
    write: Callable[[int], None]

    def uri_with(self, privileges: Sequence[Mapping[str, Any]]) -> str:
        """The URI of a new user who has exactly these privileges, created on every part; it leads to the first one."""
        name = f"user{len(self.roots[0].admin.command('usersInfo')['users'])}"
        for root in self.roots:
            root.admin.command("createRole", f"{name}Role", privileges=list(privileges), roles=[])
            root.admin.command("createUser", name, pwd="pw", roles=[f"{name}Role"])
        return self.uri_of(name)

    def uri_of(self, user: str, part: int = 0) -> str:
        first = self.parts[part]
        hosts = ",".join(member.host for member in first.members)
        return f"mongodb://{user}:pw@{hosts}/?replicaSet={first.name}&authSource=admin"

    def streams(self) -> dict[str, dict[str, str]]:
        plain: dict[str, dict[str, str]] = {"plain": {}, "lookups": LOOKUPS, "spark": {}}
        return {**plain, "images": IMAGES} if major(self.version) >= 6 else plain

    def read(self, name: str, uri: str, number: int) -> list[dict[str, Any]]:
        """What a stream of this name gives: an update and an insert. For Spark, only what it asks before it reads."""
        if name == "spark":
            open_deployment(parse({"uri": uri, "database": "shop"})).close()
        return self.events(uri, self.streams()[name], number)

    def events(self, uri: str | list[str], asked: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
        with tailrace.connect(uri) as client, client["shop"]["orders"].watch(**asked) as stream:
            self.write(number)
            return [stream.next(), stream.next()]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(SourceError) as raised:
        act()
    assert raised.value.code == 13
    return f"{raised.value.message}. {raised.value.hint}"


def hold(guarded: Guarded, role: list[dict[str, Any]], needed: Mapping[str, tuple[tuple[str, ...], str]]) -> None:
    """The whole role suffices for every stream; leaving out a privilege stops the streams that need it, and no
    others."""
    number = 1
    whole = guarded.uri_with(role)
    for name in guarded.streams():
        number += 1
        update, _ = guarded.read(name, whole, number)
        assert update["operationType"] == "update"
        if name in ("lookups", "images"):
            image = update["fullDocument" if name == "lookups" else "fullDocumentBeforeChange"]
            assert image["n"] == (number if name == "lookups" else number - 1)
    for left_out in role:
        uri = guarded.uri_with([privilege for privilege in role if privilege is not left_out])
        needing, message = needed.get(named(left_out), ((), ""))
        others = [name for name in guarded.streams() if name not in needing]
        # A slice takes one of the streams that do not need it, in turn.
        for name in [
            *(name for name in guarded.streams() if name in needing),
            *(others if WHOLE else others[number % max(1, len(others)) :][:1]),
        ]:
            number += 1
            if name in needing:
                said = refusal(partial(guarded.read, name, uri, number))
                assert re.search(message, said), said
            else:
                assert len(guarded.read(name, uri, number)) == 2


@pytest.fixture(scope="module", params=[SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def replica_set(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    with (
        ReplicaSet(1, version=request.param, root_password="pw") as running,
        pymongo.MongoClient[dict[str, Any]](running.uri) as root,
    ):
        orders = root["shop"]["orders"]
        if major(request.param) >= 6:
            root["shop"].create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
        orders.insert_one({"_id": 0, "n": 1})

        def write(number: int) -> None:
            orders.update_one({"_id": 0}, {"$set": {"n": number}})
            orders.insert_one({"_id": number})

        yield Guarded(request.param, [running], [root], write)


#: Older ones are slow: the replica sets show that roles suffice there, and a cluster's own privileges are the same.
@pytest.fixture(
    scope="module",
    params=[SERVER_VERSION, *(pytest.param(older, marks=pytest.mark.slow) for older in ("5.0.4", "4.4.2"))],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Guarded]:
    with ShardedCluster(2, version=request.param, root_password="pw") as running, ExitStack() as stack:
        router = running.router
        router.create_database("shop", primary="shard0")
        router.shard_collection("shop.orders", {"_id": 1})
        router.split("shop.orders", at={"_id": 1})
        router.move_chunk("shop.orders", find={"_id": 1}, to="shard1")
        router.insert_one("shop.orders", {"_id": 0, "n": 1})
        if major(request.param) >= 6:
            router.coll_mod("shop.orders", changeStreamPreAndPostImages={"enabled": True})
        parts = [running.config, *running.shards.values()]
        roots = [stack.enter_context(pymongo.MongoClient[dict[str, Any]](part.uri)) for part in parts]

        def write(number: int) -> None:
            router.update_one("shop.orders", {"_id": 0}, {"$set": {"n": number}})
            router.insert_one("shop.orders", {"_id": number})

        yield Guarded(request.param, parts, roots, write)


def test_the_printed_role_suffices_on_a_replica_set_and_nothing_less_does(replica_set: Guarded) -> None:
    hold(replica_set, ON_REPLICA_SET, NEEDED)


def privilege(database: str, collection: str, *actions: str) -> dict[str, Any]:
    return {"resource": {"db": database, "collection": collection}, "actions": list(actions)}


OPLOG = privilege("local", "oplog.rs", "find")


def copied(uri: str, *path: str) -> set[str]:
    """The collections whose documents a copy of the deployment, a database or a collection has."""
    with tailrace.connect(uri) as client:
        watched: Any = client
        for name in path:
            watched = watched[name]
        with watched.watch(start="snapshot", max_await_time_ms=10) as stream:
            found = set()
            while (event := stream.try_next()) is not None:
                found.add(f"{event['ns']['db']}.{event['ns']['coll']}")
            return found


def test_a_copy_that_could_be_a_part_is_refused_and_the_least_right_is_named(replica_set: Guarded) -> None:
    """``listDatabases`` shows such a user only what it may see, so ``hr`` was left out silently, while the stream after
    the copy showed its changes. No test had copied as a user with few rights."""
    replica_set.roots[0]["hr"]["people"].insert_one({"_id": 1})
    of_shop = replica_set.uri_with([OPLOG, privilege("shop", "", "find", "listCollections")])
    said = refusal(partial(copied, of_shop))
    assert "could be incomplete" in said
    assert "listDatabases" in said
    assert copied(of_shop, "shop") == {"shop.orders"}
    everywhere = replica_set.uri_with([OPLOG, privilege("", "", "find", "listCollections")])
    assert copied(everywhere) == {"shop.orders", "hr.people"}
    of_one = replica_set.uri_with([OPLOG, privilege("shop", "orders", "find")])
    said = refusal(partial(copied, of_one, "shop", "orders"))
    assert "{resource: {db: 'shop', collection: ''}, actions: ['listCollections']}" in said
    lists = replica_set.uri_with([OPLOG, privilege("shop", "orders", "find"), privilege("shop", "", "listCollections")])
    assert copied(lists, "shop", "orders") == {"shop.orders"}
    replica_set.roots[0]["shop"]["prices"].insert_one({"_id": 1})
    said = refusal(partial(copied, lists, "shop"))  # it may list prices, but not read them
    assert "the database shop" in said
    replica_set.roots[0]["shop"]["prices"].drop()
    replica_set.roots[0].drop_database("hr")


def test_exact_images_of_a_part_are_refused(replica_set: Guarded, tmp_path: Path) -> None:
    replica_set.roots[0]["hr"]["people"].insert_one({"_id": 1})
    uri = replica_set.uri_with([OPLOG, privilege("shop", "", "find", "listCollections")])
    with tailrace.connect(uri, images=tmp_path) as client:
        said = refusal(partial(client.watch, full_document="exact"))
    assert "could be incomplete" in said


def test_a_comparison_names_the_right_that_it_lacks_and_needs_no_other(
    replica_set: Guarded, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rights: to read the oplog, and to open the server's own stream, whose refusal repeats a whole command."""
    watched = privilege("shop", "", "find", "changeStream")
    without_oplog, without_watched = replica_set.uri_with([watched]), replica_set.uri_with([OPLOG])
    assert main(["compare", without_oplog, "shop", "--duration", "0s"]) == 1
    said = capsys.readouterr().err
    assert "nothing can be compared: this user may not read the oplog" in said
    assert "role read on the database local" in said
    assert main(["compare", without_watched, "shop", "--duration", "0s"]) == 1
    said = capsys.readouterr().err
    assert (
        "may not open the server's own change stream on shop (13 Unauthorized). Grant it the role read on shop" in said
    )
    over = threading.Event()

    def write() -> None:
        number = 50_000
        while not over.wait(0.05):
            number += 1
            replica_set.write(number)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        assert main(["compare", replica_set.uri_with([OPLOG, watched]), "shop", "--events", "4"]) == 0
    finally:
        over.set()
        writer.join()
    assert capsys.readouterr().out.startswith("differences: 0 in 4 events")


def test_the_printed_role_suffices_on_a_cluster_and_nothing_less_does(cluster: Guarded) -> None:
    needed = dict(NEEDED)
    del needed["local.system.replset"]  # a cluster has an id of its own
    if cluster.version == "4.4.2":  # an insert's document key is made from the shard key in the catalog
        needed["config.collections"] = (("plain", "lookups", "spark"), NEEDED["config.collections"][1])
    hold(cluster, [*ON_REPLICA_SET, *ON_CLUSTER], needed)


def test_a_list_of_shards_needs_the_right_to_ask_for_the_config_server(cluster: Guarded) -> None:
    """The message spoke of a right to read the database admin, a role that nobody should be given for this."""
    user = cluster.uri_with([*ON_REPLICA_SET, *ON_CLUSTER]).partition("//")[2].partition(":")[0]
    shards = [cluster.uri_of(user, part) for part in range(1, len(cluster.parts))]
    said = refusal(lambda: cluster.events(shards, LOOKUPS, 1_000))
    assert "where the config server is (shardingState)" in said
    assert "clusterMonitor" in said


#: What each may read; ``identity`` is what Spark asks for besides.
BUILT_IN = {
    "read on local": ({"role": "read", "db": "local"}, {"oplog"}),
    "read on config": ({"role": "read", "db": "config"}, {"shards"}),
    "readAnyDatabase": ("readAnyDatabase", {"lookups"}),
    "clusterMonitor": ("clusterMonitor", {"oplog", "identity", "shards"}),
    "backup": ("backup", {"oplog", "lookups", "shards"}),
    "root": ("root", {"oplog", "identity", "images", "lookups", "shards"}),
}


@pytest.mark.parametrize("role", BUILT_IN)
def test_built_in_roles_hold_the_rights_that_the_page_says(replica_set: Guarded, role: str) -> None:
    granted, expected = BUILT_IN[role]
    user = "built-in " + role
    replica_set.roots[0].admin.command("createUser", user, pwd="pw", roles=[granted])
    reads = {
        "oplog": "local.oplog.rs",
        "identity": "local.system.replset",
        "lookups": "shop.orders",
        "shards": "config.shards",
    }
    if major(replica_set.version) >= 6:
        reads["images"] = "config.system.preimages"
    may = set()
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri_of(user.replace(" ", "%20"))) as client:
        for name, namespace in reads.items():
            database, _, collection = namespace.partition(".")
            with suppress(OperationFailure):
                client[database][collection].find_one({})
                may.add(name)
    assert may == expected & set(reads)


def test_an_archive_without_the_right_to_pre_images_says_how_to_do_without(
    replica_set: Guarded, tmp_path: Path
) -> None:
    """The hint was joined to the one before it without a full stop; no test had looked at it."""
    if major(replica_set.version) < 6:
        pytest.skip("servers keep pre-images from 6.0 on")
    uri = replica_set.uri_with([one for one in ON_REPLICA_SET if named(one) != "config.system.preimages"])
    done = commands.run_text("archive", uri, str(tmp_path / "kept"), "--once")
    assert done.returncode == 1
    last = done.stderr.rstrip("\n").splitlines()[-1]
    assert last.endswith("and grant it. Or leave them out: --no-pre-images."), done.stderr
    assert commands.run_text("archive", uri, str(tmp_path / "kept"), "--once", "--no-pre-images").returncode == 0


def test_who_may_read_the_oplog_sees_other_databases_and_the_keys_of_users(replica_set: Guarded) -> None:
    """What the page warns of."""
    root = replica_set.roots[0]
    root["payroll"]["salaries"].insert_one({"name": "Ann", "salary": 1})
    root.admin.command("createUser", "ann", pwd="secret", roles=[])
    uri = replica_set.uri_with(ON_REPLICA_SET[:1])
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        with pytest.raises(OperationFailure):
            client["payroll"]["salaries"].find_one({})
        seen = list(client["local"]["oplog.rs"].find({"ns": {"$in": ["payroll.salaries", "admin.system.users"]}}))
    assert any(entry["o"].get("salary") == 1 for entry in seen)
    made = next(entry["o"] for entry in seen if entry["o"].get("user") == "ann")
    assert made["credentials"]["SCRAM-SHA-256"]["storedKey"]


def test_doctor_names_what_is_missing_on_a_cluster(cluster: Guarded) -> None:
    uri = cluster.uri_with(ON_REPLICA_SET)
    done = commands.run_text("doctor", uri)
    assert done.returncode == 1
    assert "(config.shards)" in done.stdout
    assert "role read on the database config" in done.stdout
