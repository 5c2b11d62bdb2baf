"""The catalogue, read, made again elsewhere, and compared, on real servers, by the bytes that they list."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson import Int64
from pymongo import MongoClient

from tailrace.act.sync import indexes
from tailrace.act.sync.catalog import DeploymentCatalog, difference, name_of, read_catalog, version_of
from tailrace.core.oplog.selection import Selection
from tailrace.embedded import ReplicaSet
from tests.differential.wire import Wire, raw_insert
from tests.server_in_use import IN_BETWEEN
from tests.sync import definitions_zoo as zoo

pytestmark = pytest.mark.used_servers
ALL = Selection.of(["zoo.*"])


def _made(
    source: MongoClient[Any], target: MongoClient[Any], *, hold: bool
) -> tuple[DeploymentCatalog, DeploymentCatalog]:
    """The source's catalogue made on the target by what is tested, and both read."""
    there = read_catalog(source, ALL)
    version = version_of(target)
    for one in there.collections.values():
        indexes.create(target, one, version)
        if one.indexes:
            indexes.build(target, one.namespace, one.indexes, version, has_collation=one.has_collation, hold=hold)
    return there, read_catalog(target, ALL)


@pytest.mark.parametrize("version", ["6.0.27", IN_BETWEEN, "4.4.2", "7.0.28"])
def test_every_kind_of_definition_arrives_byte_for_byte(
    start_replica_set: Callable[..., ReplicaSet], version: str
) -> None:
    source = MongoClient(start_replica_set(version=version).uri)
    target = MongoClient(start_replica_set(version=version).uri)
    assert zoo.fill(source, "zoo") > 70

    there, here = _made(source, target, hold=False)

    assert difference(there, here) == []
    for mine, theirs in zip(zoo.listed(source, "zoo"), zoo.listed(target, "zoo"), strict=True):
        if version == "4.4.2":  # which orders an index's fields as it likes
            assert _sorted(mine) == _sorted(theirs)
        else:
            assert mine == theirs
    uuids = {one.namespace: one.uuid for one in there.collections.values()}
    assert uuids == {one.namespace: one.uuid for one in here.collections.values()}


def _sorted(listed: tuple[str, bytes, list[bytes]]) -> tuple[str, bytes, list[list[tuple[str, str]]]]:
    """What is listed for a collection, with the fields of its indexes in any order, but with their keys in order."""
    name, options, specs = listed
    return name, options, [sorted((field, repr(value)) for field, value in bson.decode(one).items()) for one in specs]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("5.0.4", "6.0.27"),
        ("4.4.2", "6.0.27"),
        pytest.param("4.4.2", "5.0.4", marks=pytest.mark.slow),
        pytest.param("6.0.27", "7.0.28", marks=pytest.mark.slow),
        pytest.param("5.0.4", "7.0.28", marks=pytest.mark.slow),
    ],
)
def test_a_newer_server_changes_only_what_is_written_down(
    start_replica_set: Callable[..., ReplicaSet], older: str, newer: str
) -> None:
    source = MongoClient(start_replica_set(version=older).uri)
    target = MongoClient(start_replica_set(version=newer).uri)
    zoo.fill(source, "zoo")

    there, here = _made(source, target, hold=False)

    assert difference(there, here) == []
    if older != "4.4.2":
        options = {name: options for name, options, _ in zoo.listed(source, "zoo")}
        if newer == "7.0.28":
            options["images 5.0"] = bson.encode({})
        assert options == {name: options for name, options, _ in zoo.listed(target, "zoo")}
        specs = [listed for _, _, listed in zoo.listed(source, "zoo")]
        assert specs == [listed for _, _, listed in zoo.listed(target, "zoo")]


PLANTED: list[tuple[Callable[[MongoClient[Any]], Any], str]] = [
    (lambda c: c.zoo.drop_collection("schema"), "schema missing"),
    (lambda c: c.zoo.create_collection("new"), "new extra"),
    (lambda c: _altered(c, "validated", validator={"a": {"$gt": 1}}), "validated options"),
    (lambda c: _altered(c, "images", changeStreamPreAndPostImages={"enabled": False}), "images options"),
    (lambda c: _altered(c, "view", viewOn="plain", pipeline=[{"$match": {"a": 1}}]), "view options"),
    (lambda c: c.zoo.drop_collection("view of view"), "view of view missing"),
    (lambda c: c.zoo.plain.drop_index("a_1"), "plain index a_1"),
    (lambda c: c.zoo.plain.create_index("new"), "plain index new_1"),
    (lambda c: _altered(c, "plain", index={"name": "h_1", "hidden": False}), "plain index h_1"),
    (lambda c: _altered(c, "plain", index={"name": "e_1", "expireAfterSeconds": 61}), "plain index e_1"),
    (lambda c: _again(c, "double", {"b": 1}), "plain index double"),
    (lambda c: _again(c, "five", {"d": Int64(5)}), "plain index five"),
    (lambda c: _again(c, "a_1_b_-1", {"b": -1, "a": 1}, unique=True), "plain index a_1_b_-1"),
    (lambda c: _again(c, "b_-1", {"b": 1.5}), "plain index b_-1"),
    (lambda c: _again(c, "u1_1", {"u1": 1}), "plain index u1_1"),
    (lambda c: _again(c, "s_1", {"s": 1}), "plain index s_1"),
    (lambda c: _again(c, "p_1", {"p": 1}, partialFilterExpression={"x": {"$gt": 5}}), "plain index p_1"),
    (lambda c: _again(c, "k_1", {"k": 1}, collation={"locale": "fr", "strength": 2}), "plain index k_1"),
]


def _altered(client: MongoClient[Any], name: str, **changes: Any) -> None:
    client.zoo.command({"collMod": name, **changes})


def _again(client: MongoClient[Any], name: str, key: dict[str, Any], **options: Any) -> None:
    """Drop an index and make it again in another way."""
    client.zoo.plain.drop_index(name)
    client.zoo.command({"createIndexes": "plain", "indexes": [{"key": key, "name": name, **options}]})


def test_each_planted_difference_is_named(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    zoo.fill(source, "zoo")
    _made(source, target, hold=False)
    there = read_catalog(source, ALL)
    expected = set()
    for plant, named in PLANTED:
        plant(target)
        expected.add(f"zoo.{named}")
        found = {f"{one.namespace} {one.what}" for one in difference(there, read_catalog(target, ALL))}
        assert found == expected


def test_nothing_expires_on_the_target_before_the_cut_over(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    zoo.fill(source, "zoo")

    there, here = _made(source, target, hold=True)

    held = {name_of(spec): spec for spec in here.collections["zoo.plain"].indexes}
    for name in ("e_1", "e2_1", "e3_1", "e4_1"):
        assert bson.decode(held[name])["expireAfterSeconds"] == 2**31 - 1
    named = {f"{one.namespace} {one.what}" for one in difference(there, here)}
    assert named == {f"zoo.{where} index {e}_1" for where in ("plain", "collated") for e in ("e", "e2", "e3", "e4")}
    waiting = {
        (one.namespace, name_of(spec)): indexes.held_spec(spec)
        for one in there.collections.values()
        for spec in one.indexes
        if indexes.expires(spec)
    }
    assert difference(there, here, held=waiting) == []


@pytest.mark.parametrize("version", [IN_BETWEEN, "4.4.2"])
def test_an_older_target_holds_expiry_too_and_a_second_try_changes_nothing(
    start_replica_set: Callable[..., ReplicaSet], version: str
) -> None:
    source = MongoClient(start_replica_set(version=version).uri)
    target = MongoClient(start_replica_set(version=version).uri)
    source.zoo.plain.create_index("e", expireAfterSeconds=60)
    source.zoo.plain.create_index("f")

    _made(source, target, hold=True)
    _made(source, target, hold=True)

    listed = {one["name"]: one.get("expireAfterSeconds") for one in target.zoo.plain.list_indexes()}
    assert listed == {"_id_": None, "e_1": 2**31 - 1, "f_1": None}


def test_an_index_that_is_being_built_is_not_there_yet(start_replica_set: Callable[..., ReplicaSet]) -> None:
    running = start_replica_set(enable_test_commands=True)
    source = MongoClient(running.uri)
    source.zoo.plain.insert_one({"a": 1})
    point = "hangAfterStartingIndexBuild"
    source.admin.command({"configureFailPoint": point, "mode": "alwaysOn"})
    builder = threading.Thread(target=lambda: MongoClient(running.uri).zoo.plain.create_index("a"))
    builder.start()
    try:
        while not (seen := read_catalog(source, ALL).collections["zoo.plain"]).building:
            time.sleep(0.05)
        listed = [one["name"] for one in source.zoo.plain.list_indexes()]
    finally:
        source.admin.command({"configureFailPoint": point, "mode": "off"})
        builder.join()
    assert listed == ["_id_", "a_1"]  # so the server lists it, among those that are there
    assert (seen.indexes, [name_of(spec) for spec in seen.building]) == ((), ["a_1"])
    built = read_catalog(source, ALL).collections["zoo.plain"]
    assert ([name_of(spec) for spec in built.indexes], built.building) == (["a_1"], ())


def test_a_namespace_that_is_another_collection_is_refused(start_replica_set: Callable[..., ReplicaSet]) -> None:
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    source.zoo.create_collection("c", validator={"a": 1})
    target.zoo.create_collection("c")
    one = read_catalog(source, ALL).collections["zoo.c"]
    with pytest.raises(indexes.SinkError, match=r"the target's zoo.c differs from the source's.*--except"):
        indexes.create(target, one, (6, 0))


@pytest.mark.parametrize("options", [{}, {"validator": {"a": 2}}])
def test_a_collection_that_another_command_makes_after_the_look_is_judged_as_one_that_was_there(
    options: dict[str, Any], start_replica_set: Callable[..., ReplicaSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``create`` that an election interrupts is sent again, although it may have been carried out: the sync ended
    with the server's 48. If UUIDs are kept, a second one succeeds, and campaigns of kills on clusters are slow."""
    source = MongoClient(start_replica_set().uri)
    target = MongoClient(start_replica_set().uri)
    source.zoo.create_collection("c", validator={"a": 1})
    one = read_catalog(source, ALL).collections["zoo.c"]
    look, looks = indexes._there, list[str]()

    def late(*args: Any) -> Any:
        looks.append(args[2])
        if len(looks) > 1:
            return look(*args)
        target.zoo.create_collection("c", **(options or {"validator": {"a": 1}}))
        return None

    monkeypatch.setattr(indexes, "_there", late)
    monkeypatch.setattr(indexes, "_apply", lambda *_: False)
    if options:
        with pytest.raises(indexes.SinkError, match=r"the target's zoo.c differs from the source's"):
            indexes.create(target, one, (6, 0))
    else:
        uuid = indexes.create(target, one, (6, 0))
        [there] = target.zoo.list_collections()
        assert uuid == bytes(there["info"]["uuid"])
    assert looks == ["c", "c"]


def test_a_collection_whose_name_is_not_utf8_is_left_out_and_named(
    replica_set: ReplicaSet, caplog: pytest.LogCaptureFixture
) -> None:
    """It was silently left out: the tests looked only at what is copied."""
    with MongoClient[Any](replica_set.uri) as client, Wire.to(replica_set.uri) as wire:
        client["odd_sync"]["plain"].insert_one({"_id": 1})
        wire.exchange(raw_insert(b"odd_sync", b"odd\xfe", {"_id": 1}))
        found = read_catalog(client, Selection.of(["odd_sync.*"]))
        client.drop_database("odd_sync")
    assert list(found.collections) == ["odd_sync.plain"]
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("'odd_sync.odd\\xfe': left out of the copy")
