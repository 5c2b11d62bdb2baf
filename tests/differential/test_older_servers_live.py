"""What 4.4 and 5.0 do differently from 6.0, compared with all three: look-ups by UUID, and resuming where the pipeline
leaves out the token's event. The fuzzing had run on 6.0 only, so nothing had compared the older ones."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import bson
import bson.json_util
import pymongo
import pytest
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.stream import kernel_choice as pipeline_kernel
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamFatal
from tailrace.lake.spark.planning.input_partition import OplogSlice
from tailrace.lake.spark.query.offset import Resume
from tailrace.lake.spark.query.options import parse
from tailrace.lake.spark.reading.slice_reader import slice_events
from tailrace.read.source.mongod import MongodSource
from tests.amounts import WHOLE
from tests.bounded_lookups import bounded_lookups
from tests.differential.compare import Bench, Case, Compared
from tests.differential.cursors import Pair, Sides
from tests.differential.execute import note
from tests.differential.native import aggregate
from tests.differential.ours import SourceOplog, read_into_memory
from tests.differential.test_watch_live import both
from tests.differential.wire import ANY_VALUE, Wire
from tests.server_in_use import SERVER_VERSION, major

pytestmark = pytest.mark.mongod

_BY_NAME_SINCE = 6


class Server(NamedTuple):
    """A server of one version, and the ways to it."""

    version: str
    uri: str
    wire: Wire
    source: MongodSource
    mongo: pymongo.MongoClient[dict[str, Any]]

    def compare(self, case: Case, start: ClusterTime, end: ClusterTime) -> Compared:
        """The case's stream by the server and by us, from memory and live, with pushdown and without."""
        memory = read_into_memory(self.wire, self.source, ClusterTime(start - 1), end)
        bench = Bench(self.wire, memory, SourceOplog(self.source), self.version, end)
        for live in (False, True):
            result = bench.compare(Case(case.scope, case.stage, pipeline=case.pipeline, live=live))
            assert result.difference is None
        return result

    def cursor_events(self, case: Case) -> list[dict[str, Any]]:
        """What a cursor gives in two replies, which are the same bytes on both sides; nothing where it fails."""
        database, command = aggregate(case.scope, case.stage, pipeline=case.pipeline)
        pair = Sides(self.uri, self.wire, self.source).open(database, command)
        if not isinstance(pair, Pair):
            return []
        if not pair.closed:
            pair.get_more(maxTimeMS=1)
            if not pair.closed:
                pair.kill()
        return [bson.decode(event, ANY_VALUE) for event in pair.events]


@pytest.fixture(scope="module", params=[SERVER_VERSION, "5.0.4", "4.4.2"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with ReplicaSet(1, version=request.param) as running:
        source = MongodSource(running.uri)
        with Wire.to(running.uri) as wire, pymongo.MongoClient(running.uri) as mongo:
            yield Server(request.param, running.uri, wire, source, mongo)
        source.close()


def _updated(server: Server, namespace: str) -> Timestamp:
    """The time of an update of ``{_id: 1}`` in a new collection."""
    database, _, collection = namespace.partition(".")
    server.mongo[database][collection].insert_one({"_id": 1, "v": 0})
    update = {"q": {"_id": 1}, "u": {"$set": {"v": 1}}}
    reply = server.mongo[database].command("update", collection, updates=[update], writeConcern={"w": "majority"})
    time: Timestamp = reply["operationTime"]
    return time


def _rename(server: Server, source: str, target: str) -> None:
    server.mongo.admin.command("renameCollection", source, to=target)


OLD, NEW = {"_id": 1, "v": 1}, {"_id": 1, "made": "again"}


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("what", "by_name", "by_uuid"),
    [
        ("dropped", None, None),
        ("dropped and made again", NEW, None),
        ("renamed", None, OLD),
        ("renamed and made again", NEW, OLD),
        ("renamed to another database", None, None),
        ("the database dropped and made again", NEW, None),
        ("dropped, and a view now", 166, None),
        ("renamed, and a view now", 166, OLD),
    ],
)
def test_a_look_up_finds_what_the_servers_finds(
    server: Server, what: str, by_name: dict[str, Any] | int | None, by_uuid: dict[str, Any] | None
) -> None:
    database = "look" + "".join(word[0] for word in what.split()) + str(len(what))
    base = server.mongo[database]
    start = _updated(server, f"{database}.c")
    if "database dropped" in what:
        server.mongo.drop_database(database)
    elif "dropped" in what:
        base.drop_collection("c")
    elif "another" in what:
        _rename(server, f"{database}.c", f"{database}x.d")
    else:
        _rename(server, f"{database}.c", f"{database}.d")
    if "made again" in what:
        base.c.insert_one(dict(NEW))
    elif "view" in what:
        base.create_collection("c", viewOn="other", pipeline=[])
    end = note(server.wire, "end")
    expected = by_name if major(server.version) >= _BY_NAME_SINCE else by_uuid
    case = Case((database, None), {"startAtOperationTime": start, "fullDocument": "updateLookup"})
    result = server.compare(case, ClusterTime.from_timestamp(start), end)
    if isinstance(expected, int):
        assert [error.code for error in result.errors_met][:1] == [expected]
        return
    assert bson.decode(result.native.events[0])["fullDocument"] == expected
    assert server.cursor_events(case)[0]["fullDocument"] == expected
    watched = both(
        server.uri, (database,), end.to_timestamp(), start_at_operation_time=start, full_document="updateLookup"
    )
    assert watched[0] == watched[1]
    assert bson.decode(watched[1][0])["fullDocument"] == expected
    assert _slice(server, database, (ClusterTime.from_timestamp(start), end))[0]["fullDocument"] == expected


#: Parts of expressions: one that needs the look-up, and those whose value the server knows before it.
_OF_THE_DOCUMENT = {"$lte": ["$fullDocument.v", 0]}
_COMPARISONS = [{"$eq": ["$nope", 9]}, {"$gt": ["$operationType", "v"]}]
_OF_AN_ARRAY = {"$eq": ["$updateDescription.removedFields", "count"]}

#: A ``$match`` that leaves out the update, and what 6.0 ends the stream with: 166 where it looks the document up first.
_BEFORE_LOOK_UP: dict[str, tuple[dict[str, Any], int | None]] = {
    "a field of every event": ({"operationType": "insert"}, None),
    "an array in the key": ({"documentKey._id": {"$elemMatch": {"$exists": True}}}, None),
    "the size of the key": ({"documentKey._id": {"$size": 2}}, None),
    "the size of an updated field": ({"updateDescription.updatedFields.v": {"$size": 3}}, None),
    "the size of what was removed": ({"updateDescription.removedFields": {"$size": 3}}, 166),
    "an array in the operation's type": ({"operationType": {"$elemMatch": {"$eq": "insert"}}}, 166),
    "the size of the namespace": ({"ns.coll": {"$size": 1}}, 166),
    "the pre-image is less than null": ({"fullDocumentBeforeChange": {"$lt": None}}, None),
    "the pre-image": ({"fullDocumentBeforeChange.v": 9}, None),
    "an expression of the pre-image": ({"$expr": {"$eq": ["$fullDocumentBeforeChange.v", 9]}}, None),
    "the pre-image or the type": ({"$or": [{"fullDocumentBeforeChange.v": 9}, {"operationType": "insert"}]}, None),
    "the pre-image or the document": ({"$or": [{"fullDocumentBeforeChange.v": 9}, {"fullDocument.v": 9}]}, 166),
    "the size of the pre-image": ({"fullDocumentBeforeChange.v": {"$size": 1}}, 166),
    "the document": ({"fullDocument.v": 5}, 166),
    "an expression's comparison": ({"$expr": {"$and": [{"$eq": ["$nope", 9]}, _OF_THE_DOCUMENT]}}, None),
    "a constant compared": ({"$expr": {"$and": [{"$lt": [9, "$nope.v"]}, _OF_THE_DOCUMENT]}}, None),
    "an expression in an $or alone": ({"$or": [{"$expr": {"$and": [{"$eq": ["$nope", 9]}, _OF_THE_DOCUMENT]}}]}, None),
    "two comparisons": ({"$expr": {"$and": [{"$or": _COMPARISONS}, _OF_THE_DOCUMENT]}}, None),
    "a comparison with an array": ({"$expr": {"$and": [{"$eq": ["$nope", [9]]}, _OF_THE_DOCUMENT]}}, 166),
    "a comparison of two fields": ({"$expr": {"$and": [{"$eq": ["$nope", "$count"]}, _OF_THE_DOCUMENT]}}, 166),
    "a comparison of an array": ({"$expr": {"$and": [_OF_AN_ARRAY, _OF_THE_DOCUMENT]}}, 166),
    "a comparison or the document": ({"$expr": {"$or": [*_COMPARISONS, _OF_THE_DOCUMENT]}}, 166),
}
#: What 7.0 finds before it looks up.
_SPARED_SINCE_7_0 = {
    "the size of what was removed",
    "an array in the operation's type",
    "the size of the namespace",
    "the size of the pre-image",
}


def test_a_match_spares_the_look_up_that_fails_where_the_servers_does(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We looked up documents for events that a ``$match`` on the pre-image leaves out, and did not for those that some
    tests of arrays leave out. Random predicates had met collections that are views by now once in a thousand seeds, so
    nothing had compared this. Nor had anything compared comparisons inside an ``$expr``, which the server moves without
    the rest of it."""
    start = note(server.wire, "start")
    _updated(server, "spared.c")
    looks_up_by_name = major(server.version) >= _BY_NAME_SINCE
    server.mongo.spared.drop_collection("c")
    server.mongo.spared.create_collection("c", viewOn="other", pipeline=[])
    end = note(server.wire, "end")
    told: dict[str, Any] = {"startAtOperationTime": start.to_timestamp(), "fullDocument": "updateLookup"}
    for stage in (told, {**told, "fullDocumentBeforeChange": "whenAvailable"}):
        # With the kernel always and never; alternately in a slice.
        kernel = (0, sys.maxsize) if stage is told else (sys.maxsize, 0)
        every = itertools.product(kernel, _BEFORE_LOOK_UP.items())
        # Servers that look up by UUID end no stream here, whatever the predicate.
        some = itertools.islice(_BEFORE_LOOK_UP.items(), 0, None, 1 if looks_up_by_name else 4)
        by_turns = zip(itertools.cycle(kernel), some, strict=False)
        for kernel_bytes_min, (words, (predicate, code)) in every if WHOLE else by_turns:
            monkeypatch.setattr(pipeline_kernel, "KERNEL_BYTES_MIN", kernel_bytes_min)
            match = {"$match": predicate}
            server.compare(Case(("spared", None), stage, pipeline=({"$addFields": {"more": 1}}, match)), start, end)
            result = server.compare(Case(("spared", None), stage, pipeline=(match,)), start, end)
            codes = [error.code for error in result.errors_met]
            spared = code is None or (major(server.version) >= 7 and words in _SPARED_SINCE_7_0)
            assert codes == ([code] if looks_up_by_name and not spared else []), words


def _write_with_logged_images(
    server: Server, database: str, *, stored: bool = False
) -> tuple[ClusterTime, ClusterTime]:
    """Writes to two collections. ``on`` has its pre-images logged; ``later`` has so from its middle on, and until then
    has ``stored`` ones or none."""
    base = server.mongo[database]
    base.create_collection("on", recordPreImages=True)
    base.create_collection("later", **({"changeStreamPreAndPostImages": {"enabled": True}} if stored else {}))
    start = note(server.wire, "start")
    for name in ("on", "later"):
        collection = base[name]
        collection.insert_many([{"_id": number, "v": "x" * number} for number in range(6)])
        collection.update_one({"_id": 1}, {"$set": {"v": 2}})
        collection.replace_one({"_id": 1}, {"w": 1})
        if name == "later":
            base.command("collMod", "later", recordPreImages=True)
        collection.find_one_and_update({"_id": 1}, {"$set": {"q": [1]}})
        collection.delete_one({"_id": 1})
        with server.mongo.start_session() as session, session.start_transaction():
            collection.update_one({"_id": 2}, {"$set": {"t": 1}}, session=session)
            collection.update_one({"_id": 2}, {"$unset": {"t": 1}}, session=session)
            collection.insert_one({"_id": 9}, session=session)
            collection.delete_one({"_id": 3}, session=session)
        collection.update_many({}, {"$inc": {"n": 1}})
    return start, note(server.wire, "end")


_OF_IMAGES: dict[str, tuple[dict[str, Any], ...]] = {
    "nothing": (),
    "a match of the pre-image": ({"$match": {"fullDocumentBeforeChange.v": "xx"}},),
    "a match that needs none": ({"$match": {"operationType": {"$in": ["insert", "delete"]}}},),
    "a match of what is there": ({"$match": {"fullDocumentBeforeChange": {"$exists": True}}},),
    "left out": ({"$unset": "fullDocumentBeforeChange"},),
    "a stage in front": ({"$addFields": {"before": "$fullDocumentBeforeChange"}}, {"$match": {"before.v": 2}}),
}


@pytest.mark.parametrize("mode", ["whenAvailable", "required"])
def test_pre_images_in_the_oplog_are_shown_as_the_servers(
    server: Server, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Versions before 6.0 log the document before an operation as an entry (``recordPreImages``). We refused
    ``fullDocumentBeforeChange`` there, in the belief that it is newer than these servers, and nothing had compared it.
    6.0 still logs them if it is told to, and finds those that 5.0 logged: ours were null there, since this test left
    6.0 out."""
    if major(server.version) >= 7:
        pytest.skip("7.0 keeps pre-images in a collection alone")
    database = f"logged{mode}"
    start, end = _write_with_logged_images(server, database)
    told: dict[str, Any] = {"startAtOperationTime": start.to_timestamp(), "fullDocumentBeforeChange": mode}
    shown, codes = 0, set()
    monkeypatch.setattr(pipeline_kernel, "KERNEL_BYTES_MIN", 0)
    collections = (None,) if mode == "whenAvailable" else ("on", "later")
    for collection, (words, pipeline) in itertools.product(collections, _OF_IMAGES.items()):
        full = "updateLookup" if words == "nothing" else "default"
        case = Case((database, collection), {**told, "fullDocument": full}, pipeline=pipeline)
        result = server.compare(case, start, end)
        codes |= {(collection, words, error.code) for error in result.errors_met}
        shown += sum(b"fullDocumentBeforeChange" in event for event in result.native.events)
    assert shown > 0
    refused = 47 if major(server.version) >= 6 else 51770
    assert {code for _, _, code in codes} == ({refused} if mode == "required" else set())
    assert not any(collection == "on" for collection, _, _ in codes)
    watched = both(
        server.uri,
        (database, "on"),
        end.to_timestamp(),
        start_at_operation_time=start.to_timestamp(),
        full_document_before_change=mode,
    )
    assert watched[0] == watched[1]
    found = _slice(server, database, (start, end), collection="on", told={"fullDocumentBeforeChange": mode})
    assert found == [bson.decode(event) for event in watched[1]]


@pytest.mark.parametrize("server", ["6.0.27"], indirect=True)
@pytest.mark.parametrize("kernel_bytes_min", [0, sys.maxsize])
def test_images_of_6_0_are_made_of_logged_ones_and_of_stored_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch, kernel_bytes_min: int
) -> None:
    """A collection has one kind or the other, and a stream meets both."""
    monkeypatch.setattr(pipeline_kernel, "KERNEL_BYTES_MIN", kernel_bytes_min)
    database = f"mixed{min(kernel_bytes_min, 1)}"
    start, end = _write_with_logged_images(server, database, stored=True)
    for told in (
        {"fullDocumentBeforeChange": "whenAvailable"},
        {"fullDocument": "whenAvailable"},
        {"fullDocumentBeforeChange": "required", "fullDocument": "required"},
    ):
        stage = {"startAtOperationTime": start.to_timestamp(), **told}
        result = server.compare(Case((database, None), stage), start, end)
        assert not result.errors_met
        shown = [bson.decode(event) for event in result.native.events]
        changed = [event for event in shown if event["operationType"] in ("update", "replace", "delete")]
        assert len(changed) == 2 * 12
        for event in changed:
            for option in told:
                if option == "fullDocumentBeforeChange" or event["operationType"] == "update":
                    assert event[option] is not None


def _slice(
    server: Server,
    database: str,
    span: tuple[ClusterTime, ClusterTime],
    *,
    collection: str | None = None,
    told: dict[str, str] | None = None,
    pipeline: tuple[dict[str, Any], ...] = (),
    resume: Resume | None = None,
) -> list[dict[str, Any]]:
    """The events of one slice, as a worker of Spark reads it."""
    told = {"uri": server.uri, "database": database, **(told or {"fullDocument": "updateLookup"})}
    if collection is not None:
        told["collection"] = collection
    if pipeline:
        told["pipeline"] = bson.json_util.dumps(list(pipeline))
    slice_ = OplogSlice(ClusterTime(span[0] - 1), span[1], server.version, 1, resume)
    found: list[dict[str, Any]] = []
    for block in slice_events(parse(told), slice_, server.source):
        data = block.buffer.tobytes()
        ends = [int(offset) for offset in block.offsets]
        found += [bson.decode(data[first:last]) for first, last in itertools.pairwise(ends)]
    return found


_KEPT = [5, 6, 7]
_LEAVE_OUT: dict[str, tuple[dict[str, Any], ...]] = {
    "$match that is pushed down": ({"$match": {"documentKey._id": {"$gt": 4}}},),
    "$match of what is no field of an entry": ({"$match": {"$expr": {"$gt": ["$documentKey._id", 4]}}},),
    "$addFields and $match": (
        {"$addFields": {"big": {"$gt": ["$documentKey._id", 4]}}},
        {"$match": {"big": True}},
    ),
    "$redact": ({"$redact": {"$cond": [{"$gt": ["$documentKey._id", 4]}, "$$KEEP", "$$PRUNE"]}},),
    "a failing expression at the token's event": (
        {"$match": {"$expr": {"$gt": [{"$divide": [12, {"$subtract": ["$documentKey._id", 2]}]}, 0]}}},
        {"$match": {"documentKey._id": {"$gt": 4}}},
    ),
}


@pytest.mark.parametrize("how", ["resumeAfter", "startAfter"])
@pytest.mark.parametrize("leaves_out", _LEAVE_OUT)
def test_a_resume_goes_on_where_the_servers_does_although_the_pipeline_leaves_out_the_tokens_event(
    server: Server, leaves_out: str, how: str
) -> None:
    database, start, end = _numbered(server)
    token = _token_of(server, database, start, 2)
    pipeline = _LEAVE_OUT[leaves_out]
    case = Case((database, None), {how: token}, pipeline=pipeline)
    result = server.compare(case, start, end)
    options: dict[str, Any] = {"resume_after" if how == "resumeAfter" else "start_after": token}
    goes_on = major(server.version) < _BY_NAME_SINCE
    resume = Resume(how, ResumeToken.parse(bytes(token.raw)))
    shown = [event["documentKey"]["_id"] for event in server.cursor_events(case)]
    assert shown == (_KEPT if goes_on else [])
    assert (result.errors_met == []) == goes_on
    if goes_on:
        assert [bson.decode(event)["documentKey"]["_id"] for event in result.native.events] == shown
        theirs, mine = both(server.uri, (database,), end.to_timestamp(), pipeline=list(pipeline), **options)
        assert theirs == mine
        assert len(mine) == len(_KEPT)
        found = _slice(server, database, (start, end), pipeline=pipeline, resume=resume)
        assert [event["documentKey"]["_id"] for event in found] == _KEPT
    elif "failing" not in leaves_out:
        with pytest.raises(ChangeStreamFatal):
            _slice(server, database, (start, end), pipeline=pipeline, resume=resume)


def test_a_token_of_another_stream_ends_the_stream_at_the_servers_event(server: Server) -> None:
    """Before 6.0 at the first event after it, whatever the pipeline says of that one."""
    database, start, end = _numbered(server)
    server.mongo[database].other.insert_one({"_id": 2})
    end = note(server.wire, "end")
    token = _token_of(server, database, start, 3)
    for pipeline in _LEAVE_OUT.values():
        result = server.compare(Case((database, "other"), {"resumeAfter": token}, pipeline=pipeline), start, end)
        assert [error.code for error in result.errors_met] == ([] if major(server.version) >= _BY_NAME_SINCE else [280])


def _numbered(server: Server) -> tuple[str, ClusterTime, ClusterTime]:
    """A database with the inserts 1 to 7 into ``c``, and the times around them."""
    database = "numbers"
    server.mongo.drop_database(database)
    start = note(server.wire, "start")
    for number in range(1, 8):
        server.mongo[database].c.insert_one({"_id": number})
    return database, start, note(server.wire, "end")


def _token_of(server: Server, database: str, start: ClusterTime, number: int) -> RawBSONDocument:
    stage = {"$changeStream": {"startAtOperationTime": start.to_timestamp()}}
    reply = server.wire.run(database, {"aggregate": 1, "pipeline": [stage], "cursor": {}})
    events = [event for event in reply["cursor"]["firstBatch"] if event["operationType"] == "insert"]
    token: RawBSONDocument = events[number - 1]["_id"]
    return token


def test_documents_that_have_grown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first images are small, so many are asked for at once; the next ones are too large to be held together, so
    fewer are asked for. They used to be held whatever their size: no test had documents that grow."""
    refused = bounded_lookups(monkeypatch, 100_000)
    name, count = "older_grown", 400
    images: dict[str, Any] = {}
    if major(server.version) >= 6:
        images["changeStreamPreAndPostImages"] = {"enabled": True}
    collection = server.mongo[name].create_collection("c", **images)
    start = note(server.wire, "grown")
    collection.insert_many([{"_id": number, "v": 0} for number in range(count)])
    for text in ("", "x" * 1_000, "y" * 1_100):
        collection.bulk_write([pymongo.UpdateOne({"_id": n}, {"$set": {"text": text}}) for n in range(count)])
    collection.delete_many({"_id": {"$gte": count // 2}})
    end = note(server.wire, "grown and gone")
    stages: list[dict[str, Any]] = [{"fullDocument": "updateLookup"}]
    if images:
        both_images = {"fullDocument": "required", "fullDocumentBeforeChange": "required"}
        stages += [both_images, {"fullDocumentBeforeChange": "whenAvailable"}]
    for stage in stages:
        refused.clear()
        begin = {"startAtOperationTime": start.to_timestamp(), **stage}
        result = server.compare(Case((name, "c"), begin), start, end)
        assert len(result.native.events) == 4 * count + count // 2
        assert refused
