"""Names that drivers refuse or that look like patterns, views, and values that Python cannot hold: the same as on the
server.

Earlier tests had not caught what these found: the fuzzer's collections have plain names that every driver accepts, and
its streams are opened on collections only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.namespace import Scope
from tailrace.embedded import ReplicaSet
from tailrace.errors import TailraceError, UsageError
from tailrace.watch.client import watch_scope
from tests import commands
from tests.differential import native
from tests.differential.execute import note as wire_note
from tests.differential.kernel_choice import kernel_use
from tests.differential.test_watch_live import both, note
from tests.differential.wire import CommandError, Wire, raw_command, raw_insert
from tests.products.truth import time_of
from tests.server_in_use import SERVER_VERSION, major

pytestmark = pytest.mark.mongod

Outcome = tuple[int | None, str] | None
NAMES: list[tuple[str, str | None]] = [
    *((name, None) for name in ("", "a b", "a/b", "a.b", "x" * 64, "a\0b", "$external", "x" * 63)),
    *((name, "c") for name in ("", "a\\b", 'a"b', "a.b", "x" * 64, "é" * 32, "é" * 31, "a*b", "$x", "a\0b", "x\n")),
    *(("x", name) for name in ("", ".c", "c.", "c..d", "$c", "$cmd.aggregate", "a\0b", "y" * 300, " c", "c\n")),
    ("x", "system."),
    ("admin", "$cmd.aggregate"),
    ("Admin", "c"),
]


@pytest.mark.parametrize("kernel", ["auto", "on"])
@pytest.mark.parametrize(
    "version", [SERVER_VERSION, *(pytest.param(older, marks=pytest.mark.slow) for older in ("5.0.4", "4.4.2"))]
)
def test_what_is_not_utf8_in_a_name_is_not_seen(
    request: pytest.FixtureRequest, start_replica_set: Callable[..., ReplicaSet], version: str, kernel: str
) -> None:
    """The server's regular expressions match no bytes that are not UTF-8: its streams of a database or the deployment
    show nothing of such a collection. Names came from drivers, which refuse these."""
    uri = (
        request.getfixturevalue("replica_set").uri
        if version == SERVER_VERSION
        else start_replica_set(version=version).uri
    )
    expanded = {"showExpandedEvents": True} if major(version) >= 6 else {}
    with Wire.to(uri) as wire, tailrace.connect(uri) as client, kernel_use(kernel):
        start = wire_note(wire, "begin").to_timestamp()
        for database, name in ((b"odd", b"\xff"), (b"odd", b"good"), (b"odd", "\u00e9".encode()), (b"odd\xfe", b"x")):
            wire.exchange(raw_insert(database, name, *({"_id": number} for number in range(3))))
            wire.exchange(raw_command("drop", database, name))
        wire.exchange(raw_command("dropDatabase", b"odd\xfe", b"x"))
        until = wire_note(wire, "end")
        for database in ("admin", "odd"):
            stage = {"startAtOperationTime": start, **expanded}
            theirs = native.read(wire, *native.aggregate((database, None), stage), until)
            watched: Any = client if database == "admin" else client[database]
            with watched.watch(
                start_at_operation_time=start,
                show_expanded_events=bool(expanded) or None,
                document_class=RawBSONDocument,
                max_await_time_ms=50,
            ) as stream:
                ours = []
                while (event := stream.try_next()) or ResumeToken.parse(stream.resume_token).cluster_time < until:
                    ours += [bytes(event.raw)] if event is not None else []
            assert ours == [event for event in theirs.events if time_of(event) <= until]
            assert len(ours) >= 8


def of_the_server(uri: str, database: str, collection: str | None) -> Outcome:
    command: dict[str, Any] = {
        "aggregate": 1 if collection is None else collection,
        "pipeline": [{"$changeStream": {}}],
        "cursor": {"batchSize": 0},
    }
    with Wire.to(uri) as wire:
        try:
            cursor = wire.run(database, command)["cursor"]
        except CommandError as error:
            return error.code, error.details["errmsg"]
        wire.run(database, {"killCursors": cursor["ns"].partition(".")[2], "cursors": [Int64(cursor["id"])]})
        return None


def of_ours(uri: str, database: Any, collection: Any) -> Outcome:
    with tailrace.connect(uri) as client:
        scope = Scope.of_database(database) if collection is None else Scope.of_collection(database, collection)
        try:
            watch_scope(client, scope).close()
        except TailraceError as error:
            return error.code, error.message
        return None


@pytest.mark.parametrize(("database", "collection"), NAMES, ids=ascii)
def test_a_name_is_taken_or_refused_in_the_servers_words(
    replica_set: ReplicaSet, database: str, collection: str | None
) -> None:
    expected = of_the_server(replica_set.uri, database, collection)
    assert in_words_of(replica_set.version, of_ours(replica_set.uri, database, collection)) == in_words_of(
        replica_set.version, expected
    )


def in_words_of(version: str, outcome: Outcome) -> Outcome:
    """From 7.0 on only the codes are the server's (docs/reference/differences.md), so the words are left out."""
    if outcome is None or int(version.partition(".")[0]) < 7:
        return outcome
    assert outcome[1]
    return outcome[0], ""


@pytest.mark.parametrize("name", [5, b"x", "\udcff"], ids=ascii)
@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_a_name_that_is_no_text_is_a_usage_error(replica_set: ReplicaSet, name: Any, engine: Any) -> None:
    with tailrace.connect(replica_set.uri, engine=engine) as client:
        for scope in (Scope.of_database(name), Scope.of_collection("x", name)):
            with pytest.raises(UsageError):
                watch_scope(client, scope)


def test_a_name_that_only_the_driver_refuses_is_a_usage_error_of_the_server_engine(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri, engine="server") as client, pytest.raises(UsageError):
        watch_scope(client, Scope.of_collection("x", "$c"))


def test_no_stream_is_opened_on_a_view_or_a_time_series(replica_set: ReplicaSet) -> None:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database("odd_views")
        client.odd_views.command("create", "view", viewOn="c", pipeline=[])
        client.odd_views.create_collection("series", timeseries={"timeField": "t"})
    for name in ("view", "series"):
        expected = of_the_server(replica_set.uri, "odd_views", name)
        assert expected is not None
        assert expected[0] == 166
        ours = of_ours(replica_set.uri, "odd_views", name)
        assert in_words_of(replica_set.version, ours) == in_words_of(replica_set.version, expected)


@pytest.mark.parametrize("command", ["drop", "rename", "rename to"])
def test_a_line_break_after_the_name_invalidates_too(replica_set: ReplicaSet, command: str) -> None:
    """The server's pattern for "c" also matches "c" followed by a line break, and what it matches invalidates the
    stream."""
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        database = client.odd_line_breaks
        client.drop_database("odd_line_breaks")
        start = note(client)
        database["c\n"].insert_one({"_id": 1})
        database["other"].insert_one({"_id": 1})
        if command == "drop":
            database["c\n"].drop()
        elif command == "rename":
            database["c\n"].rename("elsewhere")
        else:
            database["other"].rename("c\n", dropTarget=True)
        database["c"].insert_one({"_id": 2})
        end = note(client)
    expected, got = both(replica_set.uri, ("odd_line_breaks", "c"), end, start_at_operation_time=start)
    assert RawBSONDocument(expected[-1])["operationType"] == "invalidate"
    assert got == expected


def test_documents_of_collections_that_drivers_cannot_name_are_looked_up(replica_set: ReplicaSet) -> None:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        client.drop_database("odd_lookups")
        start = note(client)
        for name in ("c.", "c..d", "plain"):
            client.odd_lookups.command("insert", name, documents=[{"_id": 1}, {"_id": 2}])
            client.odd_lookups.command("update", name, updates=[{"q": {}, "u": {"$set": {"a": 1}}, "multi": True}])
        end = note(client)
    options: dict[str, Any] = {"start_at_operation_time": start, "full_document": "updateLookup"}
    expected, got = both(replica_set.uri, ("odd_lookups",), end, **options)
    assert len(expected) == 12
    assert got == expected


def test_the_command_watch_passes_on_dates_that_python_cannot_hold(replica_set: ReplicaSet) -> None:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        start = note(client)
        client.odd_dates.c.insert_one({"_id": 1, "when": DatetimeMS(2**60)})
    arguments = ["watch", replica_set.uri, "odd_dates", "--start-at-operation-time", f"{start.time},{start.inc}"]
    stages = ["--pipeline", '[{"$addFields": {"when": "$fullDocument.when"}}]', "--until", "1", "--format", "json"]
    done = commands.run(*arguments, *stages)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b'"when": {"$date": {"$numberLong": "1152921504606846976"}}}' in done.stdout
