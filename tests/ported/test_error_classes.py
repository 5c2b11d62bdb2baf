"""Each class of error that a stream raises is that of PyMongo in the same place too: the table on the page holds all of
them, and what PyMongo raises is provoked where it can be, on a replica set, on a cluster and in a copy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson.timestamp import Timestamp
from pymongo import errors as pymongo_errors

import tailrace
from tailrace import errors
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.read.source.driver_error import as_driver_error
from tests.sharded.native_router import NativeRouter

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "pymongo.md"
CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.TailraceError) and kind.__module__ == errors.__name__
}


def table() -> dict[str, tuple[str, str]]:
    """By class: PyMongo's class for an error without a code and for one with a code, as the page has them."""
    text = PAGE.read_text().split("<!-- errors -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", text, re.MULTILINE)
    return {name: (plain.strip("`"), coded.strip("`")) for name, plain, coded in rows}


def made(kind: type[errors.TailraceError], code: int | None) -> errors.TailraceError | None:
    """An error of the class as it is raised; ``None`` where the class has no such errors."""
    parameters = inspect.signature(kind.__init__).parameters
    if "code" in parameters:
        if parameters["code"].default is inspect.Parameter.empty and code is None:
            return None
        found = kind("x", code=code)
    else:
        found = kind("x")
    return found if (found.code is None) == (code is None) else None


def test_the_page_has_every_class() -> None:
    assert set(table()) == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_pymongo_s_too_as_the_page_says(name: str) -> None:
    for code, said in zip((None, 2), table()[name], strict=True):
        error = made(CLASSES[name], code)
        if said in ("—", "never"):
            assert error is None or not isinstance(as_driver_error(error), pymongo_errors.PyMongoError)
            assert (error is None) == (said == "—")
            continue
        assert error is not None
        assert as_driver_error(error).theirs is getattr(pymongo_errors, said)  # type: ignore[attr-defined]
        assert isinstance(error, CLASSES[name])


@pytest.mark.parametrize(
    ("code", "kind"), [(43, "CursorNotFound"), (50, "ExecutionTimeout"), (280, "OperationFailure")]
)
def test_two_codes_have_classes_of_their_own(code: int, kind: str) -> None:
    found = as_driver_error(errors.ServerError("x", code=code))
    assert found.theirs is getattr(pymongo_errors, kind)  # type: ignore[attr-defined]


# --- What PyMongo raises ---------------------------------------------------------------------------------------------


#: A stage fails at an event: the pipeline, and options of the stream.
AT_EVENTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a stage that fails": ([{"$project": {"x": {"$divide": [1, "$fullDocument.n"]}}}], {}),
    "a match that fails": ([{"$match": {"$expr": {"$divide": [1, "$fullDocument.n"]}}}], {}),
    "an _id that was taken away": ([{"$project": {"_id": 0}}], {}),
    "an _id that was changed": ([{"$addFields": {"_id.x": 1}}], {}),
    "an image that is required": (
        [{"$match": {"operationType": "update"}}],
        {"full_document_before_change": "required"},
    ),
}


def read_to_the_error(stream: Any) -> None:
    """The state afterwards is a part of the outcome."""
    try:
        while True:
            stream.next()
    except Exception as error:
        error.alive_after = stream.alive  # type: ignore[attr-defined]
        raise


def at_event(name: str) -> Callable[[Any], Any]:
    pipeline, options = AT_EVENTS[name]

    def run(collection: Any) -> Any:
        with collection.watch(pipeline, max_await_time_ms=100, **options) as stream:
            collection.insert_one({"n": 0})
            collection.update_one({}, {"$set": {"n": 0, "m": 1}})
            read_to_the_error(stream)

    return run


PLACES: dict[str, Callable[[Any], Any]] = {
    **{name: at_event(name) for name in AT_EVENTS},
    "a stage that is refused": lambda collection: collection.watch([{"$out": "x"}]),
    "a token that is none": lambda collection: collection.watch(resume_after={"_data": "zz"}),
    "a token of nothing": lambda collection: collection.watch(
        resume_after={"_data": "8265A0B1C2000000012B022C0100296E5A1004" + "00" * 16 + "04"}
    ).next(),
    "an option that is none": lambda collection: collection.watch(full_document="maybe"),
    "a type that is none": lambda collection: collection.watch(start_at_operation_time=5),
    "two places to begin": lambda collection: collection.watch(
        start_at_operation_time=Timestamp(1, 1), resume_after={"_data": "82"}
    ),
}


def outcome(place: Callable[[Any], Any], client: Any) -> Exception:
    client.drop_database("errors")
    client["errors"].create_collection("c")
    client["errors"]["c"].insert_one({"n": 1})  # a token is refused at the first event after it
    try:
        place(client["errors"]["c"])
    except Exception as error:  # noqa: BLE001
        return error
    pytest.fail("nothing was raised")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ShardedCluster]:
    with ShardedCluster(shards=2, enable_test_commands=True, version="6.0.27") as cluster:
        cluster.router.create_database("errors", primary="shard0")
        yield cluster


#: What a text says of this run alone: tokens, times, identities.
OF_THE_RUN = re.compile(r"[0-9A-F]{20,}|Timestamp\(\d+, \d+\)|ObjectId\('\w+'\)")


def text_of(error: Any) -> str:
    return OF_THE_RUN.sub("...", error.details["errmsg"])


def check(ours: Exception, theirs: Exception) -> None:
    assert isinstance(ours, errors.TailraceError)
    assert isinstance(ours, type(theirs)), (theirs, ours)
    assert ours.code == getattr(theirs, "code", None)
    assert getattr(ours, "alive_after", None) == getattr(theirs, "alive_after", None)
    if isinstance(theirs, pymongo_errors.OperationFailure):
        assert theirs.details is not None
        assert isinstance(ours, pymongo_errors.OperationFailure)
        assert ours.details is not None
        assert set(ours.details.get("errorLabels", ())) == set(theirs.details.get("errorLabels", ()))
        assert ours.details["codeName"] == theirs.details["codeName"]


@pytest.mark.mongod
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_what_is_raised_is_what_pymongo_raises(replica_set: ReplicaSet, engine: Any, place: str) -> None:
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        theirs = outcome(PLACES[place], client)
    with tailrace.connect(replica_set.uri, engine=engine) as client:
        ours = outcome(PLACES[place], client)
    check(ours, theirs)
    if hasattr(theirs, "alive_after"):
        assert text_of(ours) == text_of(theirs)


PREFIX = "Executor error during getMore :: caused by :: "
ADDRESS = re.compile(r"(?<=Error on remote shard )127\.0\.0\.1:\d+")


@pytest.mark.mongod
def test_a_cluster_s_stream_says_what_the_server_s_own_router_says(cluster: ShardedCluster) -> None:
    """Errors of a cluster had another text, without the command that had failed. The server names a shard by its
    address."""
    router = cluster.router
    with NativeRouter(cluster) as native, tailrace.connect(cluster.uri) as client:
        start = router.fence()
        router.insert_one("errors.c", {"_id": 1, "n": 0})
        router.update_one("errors.c", {"_id": 1}, {"$set": {"m": 1}})
        end = router.fence()
        stream: Any
        for pipeline, options in AT_EVENTS.values():
            stage = {"fullDocumentBeforeChange": "required"} if options else {}
            theirs = native.read("errors", "c", end, tuple(pipeline), startAtOperationTime=start, **stage).error
            assert theirs is not None
            with client["errors"]["c"].watch(pipeline, start_at_operation_time=start, **options) as stream:
                with pytest.raises(pymongo_errors.OperationFailure) as caught:
                    read_to_the_error(stream)
                assert not stream.alive
            ours: Any = caught.value
            assert (ours.code, ours.labels) == (theirs.code, theirs.labels)
            said = ADDRESS.sub("shard0", theirs.message)
            if ours.code == 280:  # we compare the _id after the merge, where no shard is at fault
                said = said.removeprefix("Error on remote shard shard0 :: caused by :: ")
            assert ours.details["errmsg"] == said
            assert said.count(PREFIX) == 1


@pytest.mark.mongod
@pytest.mark.parametrize("place", sorted(PLACES.keys() - AT_EVENTS.keys()))
def test_a_call_that_a_cluster_refuses_is_pymongo_s_error(
    replica_set: ReplicaSet, cluster: ShardedCluster, place: str
) -> None:
    with pymongo.MongoClient[Any](replica_set.uri) as client:
        theirs = outcome(PLACES[place], client)
    cluster.router.insert_one("errors.c", {"n": 1})
    with tailrace.connect(cluster.uri) as client, pytest.raises(errors.TailraceError) as caught:
        PLACES[place](client["errors"]["c"])
    check(caught.value, theirs)


@pytest.mark.mongod
@pytest.mark.parametrize("where", ["replica set", "cluster"])
def test_a_stage_that_fails_at_a_copied_document_says_it_as_at_an_event(
    replica_set: ReplicaSet, cluster: ShardedCluster, where: str
) -> None:
    uri = replica_set.uri if where == "replica set" else cluster.uri
    with tailrace.connect(uri) as client:
        if where == "cluster":
            cluster.router.insert_one("errors.copied", {"_id": 1, "n": 0})
        else:
            client["errors"]["copied"].replace_one({"_id": 1}, {"n": 0}, upsert=True)
        for pipeline, code in (
            ([{"$project": {"x": {"$divide": [1, "$fullDocument.n"]}}}], 2),
            ([{"$project": {"_id": 0}}], 280),
        ):
            with client["errors"]["copied"].watch(pipeline, start="snapshot", max_await_time_ms=100) as stream:
                with pytest.raises(pymongo_errors.OperationFailure, match=re.escape(PREFIX)) as caught:
                    stream.next()
                assert caught.value.code == code
                assert not stream.alive


def test_a_server_that_is_not_there_is_pymongo_s_error() -> None:
    uri = "mongodb://127.0.0.1:9/?replicaSet=rs&serverSelectionTimeoutMS=100"
    with pymongo.MongoClient[Any](uri) as client, pytest.raises(pymongo_errors.ServerSelectionTimeoutError):
        client.watch()
    for engine in ("oplog", "server"):
        with (
            tailrace.connect(uri, engine=engine) as client,
            pytest.raises(pymongo_errors.ServerSelectionTimeoutError) as caught,
        ):
            client.watch()
        assert isinstance(caught.value, errors.SourceError)
