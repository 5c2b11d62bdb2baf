"""Users' documents with fields named like an entry's, a command's, an event's, a token's or our columns', through every
reader that needs no Spark: the same bytes as the server's own stream.

No test had caught what such names break: the random documents had only two of these names, ``op`` and ``ns``, and the
Spark tests had none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.read.source.mongod import MongodSource
from tailrace.watch.client.change_stream import OplogChangeStream
from tailrace.watch.client.request import WatchRequest
from tests import commands
from tests.amounts import WHOLE
from tests.differential import named_fields
from tests.differential.cursors import Pair, Sides
from tests.differential.native import aggregate, read
from tests.differential.test_watch_live import drain, note
from tests.differential.wire import Wire
from tests.quiet import QUIET
from tests.server_in_use import IN_BETWEEN, SERVER_VERSION

pytestmark = [pytest.mark.mongod, pytest.mark.by_turns]

NAME = "named"
_IN_EVENTS = [name for name in named_fields.OF_EVENTS if name not in {"_id", "_data"}]
#: Stages that ask for such fields, and stages that move them to where the event's own fields stand.
PIPELINES: dict[str, tuple[dict[str, Any], ...]] = {
    "none": (),
    "a count": ({"$match": {"fullDocument.count": {"$type": "string"}}},),
    "an operation": ({"$match": {"fullDocument.op": {"$exists": True}, "operationType": {"$ne": "delete"}}},),
    "either": ({"$match": {"$or": [{"fullDocument.o.count": {"$gte": 1}}, {"documentKey._id.op": "three"}]}},),
    "a namespace": ({"$match": {"fullDocument.ns": {"$exists": True}, "ns.coll": "applyOps"}},),
    "a key": ({"$match": {"documentKey._id._data": {"$exists": True}}},),
    "updated": ({"$match": {"updateDescription.updatedFields.u": {"$exists": True}}},),
    "updated diff": ({"$match": {"updateDescription.updatedFields.diff": {"$exists": True}}},),
    "removed": ({"$match": {"updateDescription.removedFields": {"$in": ["i", "u", "applyOps", "_data"]}}},),
    "types": ({"$match": {"fullDocument.operationType": {"$exists": True, "$nin": ["insert", "three"]}}},),
    "sessions": ({"$match": {"lsid": {"$exists": False}, "fullDocument.lsid": {"$exists": True}}},),
    "an expression": ({"$match": {"$expr": {"$eq": ["$fullDocument.operationType", "$operationType"]}}},),
    "set over": ({"$set": {name: f"$fullDocument.{name}" for name in _IN_EVENTS if name != "fullDocument"}},),
    "merged over": (
        {"$match": {"fullDocument": {"$type": "object"}}},
        {"$replaceRoot": {"newRoot": {"$mergeObjects": ["$$ROOT", "$fullDocument", {"_id": "$_id"}]}}},
    ),
    "projected": ({"$project": {"fullDocument.o.applyOps": 1, "ns": "$fullDocument.ns", "event": "$$ROOT"}},),
}
SCOPES: dict[str, tuple[str, str | None]] = {"cluster": ("admin", None), "database": (NAME, None), "c": (NAME, "c")}
_RAW: CodecOptions[Any] = CodecOptions(
    document_class=RawBSONDocument, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
OPTIONS: dict[str, Any] = {"fullDocument": "updateLookup"}


@dataclass
class Written:
    """A server of one version with such documents between two cluster times."""

    uri: str
    server: str
    start: Timestamp
    end: Timestamp
    events: int

    @property
    def pushdowns(self) -> tuple[bool, ...]:
        """With pushdown and without: what the plain stages do alone is the same on all versions."""
        return (True, False) if WHOLE or self.server == SERVER_VERSION else (True,)

    def expected(
        self, scope: str = "database", options: dict[str, Any] | None = None, pipeline: tuple[Any, ...] = ()
    ) -> list[bytes]:
        """The server's own events."""
        stage = {"startAtOperationTime": self.start, **(options or {})}
        with Wire.to(self.uri) as wire:
            command = aggregate(SCOPES[scope], stage, pipeline=pipeline)
            stream = read(wire, *command, ClusterTime.from_timestamp(self.end))
        assert stream.error is None, stream.error
        return stream.events


@pytest.fixture(scope="module", params=[SERVER_VERSION, IN_BETWEEN, "4.4.2"])
def written(request: pytest.FixtureRequest) -> Iterator[Written]:
    # A server of its own: a dump holds all of the oplog, and cursors must meet the same end of it.
    with ReplicaSet(1, version=request.param, parameters=QUIET) as running:
        with MongoClient[dict[str, Any]](running.uri) as client, Wire.to(running.uri) as wire:
            start = note(client)
            events = named_fields.write(wire, NAME, request.param)
            end = note(client)
        yield Written(running.uri, request.param, start, end, events)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["default", "updateLookup"])
def test_watch_gives_the_servers_bytes(written: Written, scope: str, options: dict[str, Any]) -> None:
    expected = written.expected(scope, options)
    with ExitStack() as stack:
        source = stack.enter_context(closing(MongodSource(written.uri)))
        for pushes_down in written.pushdowns:
            assert _ours(source, written, scope, options, (), pushes_down=pushes_down) == expected
    assert scope != "database" or len(expected) == written.events


@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_that_asks_for_them_gives_the_servers_bytes(written: Written, case: str) -> None:
    pipeline = PIPELINES[case]
    expected = written.expected("database", OPTIONS, pipeline)
    with closing(MongodSource(written.uri)) as source:
        for pushes_down in written.pushdowns:
            assert _ours(source, written, "database", OPTIONS, pipeline, pushes_down=pushes_down) == expected
    assert expected, "the case must say something"


def _ours(
    source: MongodSource,
    written: Written,
    scope: str,
    options: dict[str, Any],
    pipeline: tuple[Any, ...],
    *,
    pushes_down: bool,
) -> list[bytes]:
    database, collection = SCOPES[scope]
    within = Scope.of_collection(database, collection) if collection else Scope.of_database(database)
    request = WatchRequest(
        scope=Scope.cluster() if scope == "cluster" else within,
        codec_options=_RAW,
        pipeline=list(pipeline),
        max_await_time_ms=50,
        start_at_operation_time=written.start,
        full_document=options.get("fullDocument"),
    )
    with closing(OplogChangeStream(source, request, pushes_down=pushes_down)) as stream:
        return drain(stream, written.end)


@pytest.mark.parametrize("case", ["none", "merged over"])
def test_replies_of_a_cursor_are_the_servers(written: Written, case: str) -> None:
    with Wire.to(written.uri) as wire, closing(MongodSource(written.uri)) as source:
        sides = Sides(written.uri, wire, source)
        stage = {"startAtOperationTime": written.start, **OPTIONS}
        database, command = aggregate((NAME, None), stage, pipeline=PIPELINES[case])
        pair = sides.open(database, command)
        assert isinstance(pair, Pair), pair
        count = 0
        while len(pair.events) > count:
            count = len(pair.events)
            pair.get_more(maxTimeMS=5)
        assert pair.events == written.expected("database", OPTIONS, PIPELINES[case])
        pair.kill()


@pytest.mark.parametrize("form", ["bson", "json", "pretty"])
def test_a_dump_replays_them(written: Written, tmp_path: Path, form: str) -> None:
    with MongoClient[RawBSONDocument](written.uri, document_class=RawBSONDocument) as client:
        entries = [bytes(entry.raw) for entry in client.local["oplog.rs"].find().sort("$natural", 1)]
    (tmp_path / "oplog.bson").write_bytes(b"".join(entries))
    start = f"{written.start.time},{written.start.inc}"
    command = ["replay", str(tmp_path), NAME, "--format", form]
    command += ["--server-version", written.server, "--start-at-operation-time", start]
    done = commands.run(*command)
    assert (done.returncode, done.stderr) == (0, b"")
    expected = written.expected()
    if form == "bson":
        assert done.stdout == b"".join(expected)
    else:
        assert done.stdout.count(b'"_data": "82') >= len(expected)


def test_a_token_of_such_a_document_is_where_a_stream_goes_on(written: Written) -> None:
    """Their keys are in the tokens; a resume must find each of them, and read on after it."""
    expected = written.expected()
    with closing(MongodSource(written.uri)) as source:
        for index in range(0, len(expected), max(1, len(expected) // 6)):
            token = bson.decode(bytes(RawBSONDocument(expected[index])["_id"].raw))
            request = WatchRequest(
                scope=Scope.of_database(NAME),
                codec_options=_RAW,
                resume_after=token,
                max_await_time_ms=50,
            )
            with closing(OplogChangeStream(source, request)) as stream:
                assert drain(stream, written.end) == expected[index + 1 :]
            with Wire.to(written.uri) as wire:
                reply = wire.run(*aggregate((NAME, None), {"resumeAfter": token}))
                wire.run(NAME, {"killCursors": "$cmd.aggregate", "cursors": [Int64(reply["cursor"]["id"])]})
                first = [bytes(event.raw) for event in reply["cursor"]["firstBatch"]]
                assert first == expected[index + 1 : index + 1 + len(first)]
