"""Collations beside a running mongod: which are accepted, what the stages give, and that nothing else is affected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import bson
import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.core.expression import parse_collation
from tailrace.core.expression.values.collation import LOCALES
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tests.amounts import amount
from tests.differential import native
from tests.differential.fuzz_expressions import COLLATIONS, Server, fuzz
from tests.differential.icu import needs_icu
from tests.differential.wire import CommandError, Wire

pytestmark = pytest.mark.mongod

#: The values of each option, right and wrong, beside a locale.
VALUES: dict[str, list[Any]] = {
    "strength": [
        0,
        1,
        5,
        6,
        -1,
        2.5,
        0.5,
        -0.5,
        bson.Int64(2),
        1 << 33,
        -(1 << 40),
        float("nan"),
        float("-inf"),
        "2",
        True,
        None,
        bson.Decimal128("2.5"),
        bson.Decimal128("NaN"),
        bson.Decimal128("7"),
    ],
    "caseLevel": [True, False, 1, "x", None],
    "caseFirst": ["off", "upper", "lower", "Upper", "", 1, None],
    "numericOrdering": [True, 1.0, None],
    "alternate": ["non-ignorable", "shifted", "x", 1, None],
    "maxVariable": ["punct", "space", "currency", {}, None],
    "normalization": [True, False, [], None],
    "backwards": [True, False, 1, None],
    "version": ["57.1", "58", "", 1, None],
    "unknown": [1, None],
}
DOCUMENTS: list[dict[str, Any]] = [
    *({"locale": "en", name: value} for name, values in VALUES.items() for value in values),
    *({"locale": locale} for locale in sorted(LOCALES)),
    *({"locale": f"{locale}@collation=search"} for locale in ("en", "zh_Hant", "fr_CA")),
    # without "stroke": whether a mongod accepts it depends on which Chinese collations it was asked for before
    *({"locale": f"zh@collation={kind}"} for kind in ("pinyin", "big5han", "phonebook")),
    *(
        {"locale": x}
        for x in ("", "xx", "EN", "en-US", "en_us", "en_XX", "zh_TW", "zh_Hant_TW", "root", "no", "a\0b", "_")
    ),
    *({"locale": x} for x in ("en@numeric=yes", "de@collation=nope", "es__TRADITIONAL", "Simple", 5, None)),
    {},
    {"strength": 2},
    {"strength": 9, "locale": "xx"},
    {"locale": "xx", "unknown": 1},
    {"locale": "simple", "strength": 9},
    {"locale": "simple", "strength": 2, "backwards": True},
    {"version": "3", "locale": "xx"},
    {"locale": "en", "version": "3", "backwards": True, "strength": 1},
    {"locale": "en", "backwards": True, "strength": 1},
    {"locale": "en", "backwards": True, "strength": 2, "caseFirst": "upper"},
    {"locale": "en", "backwards": True, "strength": 1, "caseFirst": "upper"},
    {"locale": "en", "caseFirst": "lower", "strength": 2},
    {"locale": "en", "caseFirst": "lower", "strength": 1, "caseLevel": True},
    {"locale": "fr_CA", "strength": 1},
    {"locale": "fr_CA", "strength": 1, "backwards": False},
    {"locale": "da", "strength": 2},
    {"locale": "mt", "strength": 1, "caseFirst": "off"},
]


@pytest.fixture(scope="module")
def wire(replica_set: ReplicaSet) -> Iterator[Wire]:
    with Wire.to(replica_set.uri) as opened:
        yield opened


def test_a_collation_is_taken_or_refused_with_the_servers_code_and_words(wire: Wire) -> None:
    different = []
    for document in DOCUMENTS:
        theirs = ours = "taken"
        command = {"aggregate": "c", "pipeline": [{"$changeStream": {}}], "cursor": {}, "collation": document}
        try:
            cursor = wire.run("collation_live", command)["cursor"]
            wire.run("collation_live", {"killCursors": "c", "cursors": [bson.Int64(cursor["id"])]})
        except CommandError as error:
            theirs = f"{error.code} {error.details['errmsg']}"
        try:
            parse_collation(bson.encode(document))
        except UsageError as error:
            ours = f"{error.code} {error.message}"
        if ours != theirs:
            different.append((document, ours, theirs))
    assert different == []


@needs_icu
@pytest.mark.parametrize("seed", range(len(COLLATIONS)))
def test_random_stages_under_a_collation_give_the_servers_bytes(replica_set: ReplicaSet, seed: int) -> None:
    stages = amount(15, 30)
    totals = fuzz(Server(replica_set.uri), 3000 + seed, stages, size=12, collation=COLLATIONS[seed])
    assert totals.comparisons > 3 * stages
    assert totals.differences == []


BASE = {"locale": "en", "strength": 1}
PIPELINES: list[list[dict[str, Any]]] = [
    [],
    [{"$match": {"operationType": "INSERT"}}],
    [{"$match": {"operationType": {"$in": ["Insert", "DELETE"]}}}],
    [{"$match": {"operationType": {"$ne": "DROP"}, "ns.coll": {"$gte": "NAMES"}}}],
    [{"$match": {"ns.coll": "NAMES"}}],
    [{"$match": {"ns.coll": {"$regex": "^N"}}}],
    [{"$match": {"documentKey._id": "A"}}],
    [{"$match": {"fullDocument.name": {"$gt": "émile", "$lt": "ZOE"}}}],
    [{"$match": {"fullDocument.tags": {"$all": ["X", "y"]}}}],
    [{"$match": {"fullDocument.tags": {"$elemMatch": {"$eq": "Z"}}}}],
    [{"$match": {"fullDocument.at": {"city": "zurich"}}}],
    [{"$match": {"$expr": {"$in": ["EMILE", ["$fullDocument.name"]]}}}],
    [{"$match": {"$nor": [{"operationType": "INSERT"}, {"updateDescription.updatedFields.name": "ZOÉ"}]}}],
    [{"$set": {"same": {"$eq": ["$operationType", "INSERT"]}, "top": {"$max": ["$ns.coll", "NAMES"]}}}],
    [{"$set": {"place": {"$indexOfArray": ["$fullDocument.tags", "Y"]}}}],
    [{"$redact": {"$cond": [{"$eq": ["$operationType", "INSERT"]}, "$$KEEP", "$$DESCEND"]}}],
    [{"$project": {"op": "$operationType"}}, {"$match": {"op": "UPDATE"}}],
]


def write(client: pymongo.MongoClient[Any], name: str) -> None:
    """Collections whose names differ by case or accent alone, keys and names too, and what ends a stream."""
    database = client[name]
    database.names.insert_one({"_id": "a", "name": "Émile", "tags": ["x", "Y"], "at": {"city": "Zürich"}})
    database.names.insert_one({"_id": "A", "name": "zoe", "tags": ["ž"]})
    database.NAMES.insert_one({"_id": "a", "name": "emile"})
    database["námes"].insert_one({"_id": "A"})
    database.names.update_one({"_id": "a"}, {"$set": {"name": "zoé"}})
    with client.start_session() as session, session.start_transaction():
        database.names.delete_one({"_id": "A"}, session=session)
        database.NAMES.insert_one({"_id": "A"}, session=session)
    database["námes"].rename("námes2")
    database.NAMES.drop()
    database["námes2"].drop()
    database.names.delete_one({"_id": "a"})


def read_ours(client: tailrace.Client, until: ClusterTime, options: Mapping[str, Any]) -> list[bytes]:
    """Events of our stream up to a time."""
    raw = CodecOptions(document_class=RawBSONDocument)
    found: list[bytes] = []
    deadline = time.monotonic() + 300
    with client.watch(max_await_time_ms=20, codec_options=raw, **options) as stream:
        while time.monotonic() < deadline:
            event = stream.try_next()
            if event is not None:
                found.append(bytes(event.raw))
            elif not stream.alive or native.token_time(bytes(stream.resume_token.raw)) >= until:
                return found
    raise TimeoutError("the stream did not come to its end")


@needs_icu
@pytest.mark.parametrize("collection", ["names", None], ids=["collection", "database"])
def test_a_stream_under_a_collation_gives_the_servers_bytes(
    replica_set: ReplicaSet, wire: Wire, collection: Any
) -> None:
    name = f"collation_live_{collection}"
    with pymongo.MongoClient[Any](replica_set.uri) as client, tailrace.connect(replica_set.uri) as ours:
        begin = client.admin.command("appendOplogNote", 1, data={"t": 1}, writeConcern={"w": "majority"})
        write(client, name)
        end = client.admin.command("appendOplogNote", 1, data={"t": 2}, writeConcern={"w": "majority"})
        start, until = begin["operationTime"], ClusterTime.from_timestamp(end["operationTime"])
        target = ours[name] if collection is None else ours[name][collection]
        given = 0
        for stages in PIPELINES:
            stage = {"startAtOperationTime": start}
            database, command = native.aggregate((name, collection), stage, pipeline=tuple(stages))
            theirs = native.read(wire, database, {**command, "collation": BASE}, until)
            assert theirs.error is None
            options = {"pipeline": stages, "collation": BASE, "start_at_operation_time": start}
            assert read_ours(target, until, options) == theirs.events, stages
            given += len(theirs.events)
        assert given > 40
        # The scope and the tokens are those of a stream without a collation.
        plain = native.read(wire, *native.aggregate((name, collection), stage), until)
        collated = native.read(wire, name, {**native.aggregate((name, collection), stage)[1], "collation": BASE}, until)
        assert plain.events == collated.events
        client.drop_database(name)


@needs_icu
def test_let_and_a_resume_token_under_a_collation(replica_set: ReplicaSet, wire: Wire) -> None:
    """An event that the match hides under the collation is not found again, as on the server."""
    name = "collation_live_resume"
    with pymongo.MongoClient[Any](replica_set.uri) as client, tailrace.connect(replica_set.uri) as ours:
        begin = client.admin.command("appendOplogNote", 1, data={"t": 1}, writeConcern={"w": "majority"})
        client[name].c.insert_many([{"_id": 1, "n": "a"}, {"_id": 2, "n": "B"}, {"_id": 3, "n": "A"}])
        end = client.admin.command("appendOplogNote", 1, data={"t": 2}, writeConcern={"w": "majority"})
        until = ClusterTime.from_timestamp(end["operationTime"])
        database, command = native.aggregate((name, "c"), {"startAtOperationTime": begin["operationTime"]})
        first = native.read(wire, database, command, until).events[0]
        token = bson.decode(first)["_id"]
        for stages, codes in (
            ([{"$match": {"fullDocument.n": "Á"}}], None),
            ([{"$match": {"fullDocument.n": {"$ne": "A"}}}], 280),
        ):
            database, command = native.aggregate((name, "c"), {"resumeAfter": token}, pipeline=tuple(stages))
            theirs = native.read(wire, database, {**command, "collation": BASE}, until)
            options = {"pipeline": stages, "collation": BASE, "resume_after": token}
            if codes is None:
                assert theirs.error is None
                assert read_ours(ours[name].c, until, options) == theirs.events
                assert [bson.decode(event)["documentKey"]["_id"] for event in theirs.events] == [3]
            else:
                assert theirs.error is not None
                assert theirs.error.code == codes
                with pytest.raises(tailrace.ChangeStreamFatal):
                    read_ours(ours[name].c, until, options)
        client.drop_database(name)


def test_the_servers_engine_sends_the_collation_that_pymongos_own_stream_loses(replica_set: ReplicaSet) -> None:
    """PyMongo 4.20 accepts the parameter and does not send it; for that reason the engine had refused it."""
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        stages = [{"$match": {"fullDocument.n": "resume"}}]
        for engine in ("server", "oplog"):
            with (
                tailrace.connect(replica_set.uri, engine=engine) as ours,
                ours.collated.c.watch(stages, collation={"locale": "en", "strength": 1}) as stream,
            ):
                client.collated.c.insert_many([{"n": "other"}, {"n": "Résumé"}])
                assert stream.next()["fullDocument"]["n"] == "Résumé"
        client.drop_database("collated")
