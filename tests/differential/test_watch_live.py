"""``watch()`` and the commands beside the server's own change stream: the same bytes, the same tokens."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp
from pymongo import MongoClient

import tailrace
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamFatal, InvalidResumeToken, ServerError, TailraceError, UsageError
from tailrace.read.source.mongod import MongodSource
from tests import commands

pytestmark = pytest.mark.mongod

_PATIENCE_S = 300.0
Raw = MongoClient[RawBSONDocument]


def raw_client(uri: str) -> Raw:
    return MongoClient(uri, document_class=RawBSONDocument)


def note(client: MongoClient[Any]) -> Timestamp:
    """Write a no-op; its time, majority-committed."""
    reply = client.admin.command("appendOplogNote", 1, data={"mark": 1}, writeConcern={"w": "majority"})
    time_: Timestamp = reply["operationTime"]
    return time_


def drain(stream: Any, until: Timestamp) -> list[bytes]:
    """A stream's raw events up to ``until``: PyMongo's or ours."""
    events: list[bytes] = []
    deadline = time.monotonic() + _PATIENCE_S
    while stream.alive:
        event = stream.try_next()
        if event is not None:
            if ResumeToken.parse(bytes(event["_id"].raw)).cluster_time > ClusterTime.from_timestamp(until):
                break
            events.append(bytes(event.raw))
        elif ResumeToken.parse(bytes(stream.resume_token.raw)).cluster_time >= ClusterTime.from_timestamp(until):
            break
        assert time.monotonic() < deadline, "the stream does not come to its end"
    return events


def target_of(client: Any, namespace: tuple[str, ...]) -> Any:
    for name in namespace:
        client = client[name]
    return client


def both(uri: str, namespace: tuple[str, ...], until: Timestamp, **options: Any) -> tuple[list[bytes], list[bytes]]:
    """The server's events and ours."""
    with raw_client(uri) as native, target_of(native, namespace).watch(max_await_time_ms=50, **options) as stream:
        expected = drain(stream, until)
    with (
        tailrace.connect(uri) as client,
        target_of(client, namespace).watch(max_await_time_ms=50, document_class=RawBSONDocument, **options) as own,
    ):
        return expected, drain(own, until)


def work(client: MongoClient[Any], database: str) -> tuple[Timestamp, Timestamp]:
    """A little of everything in ``database``; the times before and after."""
    shop = client[database]
    client.drop_database(database)
    start = note(client)
    shop.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    shop.orders.insert_many([{"_id": number, "lines": [1, 2, 3], "when": bson.Int64(5)} for number in range(30)])
    shop.orders.update_many({"_id": {"$lt": 10}}, {"$set": {"state": "paid"}, "$push": {"lines": 4}})
    shop.orders.update_one({"_id": 3}, [{"$set": {"lines": {"$slice": ["$lines", 2]}}}])
    shop.orders.replace_one({"_id": 4}, {"new": True})
    shop.customers.insert_many([{"_id": bson.ObjectId(), "name": "Ann"}, {"_id": 2.5}, {"_id": "text"}])
    with client.start_session() as session, session.start_transaction():
        shop.orders.insert_one({"_id": "in a transaction"}, session=session)
        shop.orders.delete_one({"_id": 5}, session=session)
        shop.customers.update_one({"_id": 2.5}, {"$set": {"name": "Ben"}}, session=session)
    shop.orders.delete_many({"_id": {"$in": [6, 7]}})
    shop.customers.rename("people")
    shop.people.create_index("name")
    shop.people.drop()
    return start, note(client)


@pytest.fixture(scope="module")
def worked(replica_set: ReplicaSet) -> tuple[Timestamp, Timestamp]:
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        return work(client, "watch_live")


@pytest.mark.by_turns
@pytest.mark.parametrize("namespace", [(), ("watch_live",), ("watch_live", "orders")], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"show_expanded_events": True},
        {"full_document": "updateLookup"},
        {"full_document": "whenAvailable", "full_document_before_change": "whenAvailable"},
    ],
    ids=str,
)
def test_watch_gives_the_servers_bytes(
    replica_set: ReplicaSet,
    worked: tuple[Timestamp, Timestamp],
    namespace: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    start, end = worked
    expected, got = both(replica_set.uri, namespace, end, start_at_operation_time=start, **options)
    assert len(expected) > 40
    assert got == expected


def test_a_token_of_ours_resumes_the_servers_stream_and_the_other_way_round(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]
) -> None:
    start, end = worked
    namespace = ("watch_live",)
    expected, _ = both(replica_set.uri, namespace, end, start_at_operation_time=start)
    with raw_client(replica_set.uri) as native, tailrace.connect(replica_set.uri) as client:
        for count in (1, 7, 31, len(expected) - 4):
            own = target_of(client, namespace).watch(
                start_at_operation_time=start, document_class=RawBSONDocument, max_await_time_ms=50
            )
            for number in range(count):
                assert bytes(own.next().raw) == expected[number]
            token = own.resume_token
            own.close()
            with target_of(native, namespace).watch(resume_after=token, max_await_time_ms=50) as stream:
                rest = drain(stream, end)
            assert rest == expected[count:]
            with target_of(native, namespace).watch(start_at_operation_time=start, max_await_time_ms=50) as stream:
                for _ in range(count):
                    stream.next()
                token = stream.resume_token
            with target_of(client, namespace).watch(
                start_after=token, document_class=RawBSONDocument, max_await_time_ms=50
            ) as own:
                assert drain(own, end) == expected[count:]


def test_a_stream_without_a_start_begins_now_and_follows(quiet_replica_set: ReplicaSet) -> None:
    with tailrace.connect(quiet_replica_set.uri) as client:
        collection = client.watch_now.c
        collection.insert_one({"_id": "before"})
        with client["watch_now"]["c"].watch(max_await_time_ms=100) as stream:
            first = stream.resume_token
            assert stream.try_next() is None
            note(client)
            note(client)
            assert stream.try_next() is None
            quiet = stream.resume_token
            assert ResumeToken.parse(bson.encode(quiet)) > ResumeToken.parse(bson.encode(first))
            collection.insert_one({"_id": "after", "text": "é"})
            event = next(stream)
            assert event["fullDocument"] == {"_id": "after", "text": "é"}
            assert stream.resume_token == event["_id"]
            assert list(event)[:3] == ["_id", "operationType", "clusterTime"]
            assert stream.alive
        assert not stream.alive
        assert stream.try_next() is None
        with pytest.raises(StopIteration):
            stream.next()


def test_an_invalidation_ends_the_stream_after_its_event(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri) as client:
        database = client.watch_invalid
        database.c.insert_one({"_id": 1})
        with client.watch_invalid.c.watch(max_await_time_ms=100) as stream:
            database.c.insert_one({"_id": 2})
            database.c.drop()
            database.c.insert_one({"_id": 3})
            events = list(stream)
            assert [event["operationType"] for event in events] == ["insert", "drop", "invalidate"]
            assert not stream.alive
            assert stream.resume_token == events[-1]["_id"]
        with pytest.raises(InvalidResumeToken):
            client.watch_invalid.c.watch(resume_after=events[-1]["_id"])
        with client.watch_invalid.c.watch(start_after=events[-1]["_id"], max_await_time_ms=100) as stream:
            assert stream.next()["fullDocument"] == {"_id": 3}


def test_codec_options_are_honoured(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri, tz_aware=True) as client:
        start = note(client)
        moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
        client.watch_codec.c.insert_one({"_id": moment})

        def first(**options: Any) -> Any:
            with client.watch_codec.c.watch(start_at_operation_time=start, **options) as stream:
                return stream.next()

        assert first()["documentKey"]["_id"] == moment
        assert type(first()) is dict
        assert type(first(document_class=bson.SON)) is bson.SON
        assert isinstance(first(document_class=RawBSONDocument), RawBSONDocument)
        naive: CodecOptions[dict[str, Any]] = CodecOptions(tz_aware=False)
        assert first(codec_options=naive)["documentKey"]["_id"] == moment.replace(tzinfo=None)


def test_the_server_engine_has_the_same_face(replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]) -> None:
    start, end = worked
    for namespace in ((), ("watch_live",), ("watch_live", "orders")):
        expected, _ = both(replica_set.uri, namespace, end, start_at_operation_time=start)
        with tailrace.connect(replica_set.uri, engine="server") as client:
            parameters = {"start_at_operation_time": start, "max_await_time_ms": 50}
            with target_of(client, namespace).watch(document_class=RawBSONDocument, **parameters) as stream:
                assert drain(stream, end) == expected
            with target_of(client, namespace).watch(**parameters) as stream:
                event = stream.next()
                assert type(event) is dict
                assert stream.resume_token == event["_id"]
                assert type(stream.resume_token) is dict


@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_both_engines_raise_the_same_errors(replica_set: ReplicaSet, engine: Any) -> None:
    with tailrace.connect(replica_set.uri, engine=engine) as client:
        with pytest.raises(TailraceError) as caught:
            client.shop.c.watch([{"$out": "elsewhere"}])
        assert caught.value.code == 20
        with pytest.raises(TailraceError) as caught:
            client.shop.c.watch(resume_after={"_data": "zz"})
        assert caught.value.code == 9
        with pytest.raises(TailraceError) as caught:
            client.shop.c.watch(full_document="maybe")
        assert caught.value.code == 2
        name = f"watch_errors_{engine}"
        written, watched = client[name], client[name]
        start = note(client)
        written.c.insert_many([{"_id": 1}, {"_id": 2}])
        with watched.c.watch(start_at_operation_time=start) as stream:
            token = bson.decode(bson.encode(stream.next()["_id"]))
        written.other.insert_one({"_id": 3})
        # The server may raise as soon as it is asked for the stream.
        with pytest.raises(ChangeStreamFatal) as fatal:
            list(watched.other.watch(resume_after=token, max_await_time_ms=100))
        assert fatal.value.code == 280
        assert "the resume token was not found" in fatal.value.message
        written.c.update_one({"_id": 1}, {"$set": {"x": 1}})
        with pytest.raises(ServerError) as missing:
            list(watched.c.watch(start_after=token, full_document_before_change="required"))
        assert missing.value.code == 47


def test_bad_parameters_are_usage_errors(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri) as client:
        parameters: list[dict[str, Any]] = [
            {"pipeline": {"$match": {}}},
            {"pipeline": "x"},
            {"batch_size": -1},
            {"max_await_time_ms": "soon"},
            {"collation": {"locale": "Deutsch"}},
            {"session": object()},
            {"pipeline": [{"$match": {"x": object()}}]},
            {"options": {"noSuchOption": 1}},
            {"start_at_operation_time": 5},
            # None of these had been tried: they were reported as errors of PyMongo or Python.
            {"batch_size": 1 << 63},
            {"max_await_time_ms": 10**400},
            {"collation": 5},
            {"comment": object()},
            {"options": 5},
            {"document_class": int},
            {"codec_options": 5},
        ]
        for wrong in parameters:
            with pytest.raises(UsageError):
                client.shop.c.watch(**wrong)
    for wrong_uri in (5, [], [5], [None], b"mongodb://127.0.0.1"):
        with pytest.raises(UsageError):
            tailrace.connect(wrong_uri)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        tailrace.connect(replica_set.uri, datetime_conversion="datetime_ms")
    with pytest.raises(UsageError, match="no engine"):
        tailrace.connect(replica_set.uri, engine="other")  # type: ignore[arg-type]


def test_closing_a_stream_closes_its_cursor_on_the_server(replica_set: ReplicaSet) -> None:
    with tailrace.connect(replica_set.uri) as client:

        def cursors() -> int:
            operations = client.admin.aggregate([{"$currentOp": {"idleCursors": True}}])
            return sum(
                each.get("cursor", {}).get("originatingCommand", {}).get("comment") == "this one" for each in operations
            )

        stream = client.shop.c.watch(max_await_time_ms=10, comment="this one")
        assert stream.try_next() is None
        assert cursors() == 1
        stream.close()
        stream.close()
        assert cursors() == 0


@pytest.mark.slow  # elections in test_failures_live.py
def test_a_stream_goes_on_over_a_step_down(start_replica_set: Any) -> None:
    replica_set = start_replica_set(3)
    with tailrace.connect(replica_set.uri, heartbeatFrequencyMS=500) as client:
        collection = client.watch_election.c
        with client.watch_election.c.watch(max_await_time_ms=200) as stream:
            for number in range(3):
                collection.insert_one({"_id": number})
                assert stream.next()["documentKey"] == {"_id": number}
                replica_set.step_down()
            collection.insert_one({"_id": "last"})
            assert stream.next()["documentKey"] == {"_id": "last"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tailrace", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return commands.run(*arguments)


def at(start: Timestamp) -> list[str]:
    return ["--start-at-operation-time", f"{start.time},{start.inc}"]


@pytest.mark.parametrize("scope", ["", "watch_live", "watch_live.orders"])
@pytest.mark.parametrize("engine", ["oplog", "server"])
def test_the_command_watch_prints_the_servers_bytes(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp], scope: str, engine: str
) -> None:
    start, end = worked
    namespace = tuple(scope.split(".")) if scope else ()
    expected, _ = both(replica_set.uri, namespace, end, start_at_operation_time=start)
    until = f"{end.time},{end.inc}"
    shared = [replica_set.uri, *([scope] if scope else []), "--engine", engine, *at(start)]
    done = run("watch", *shared, "--format", "bson", "--until", until)
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(raw_bson.split(done.stdout)) == expected
    done = run("watch", *shared, "--format", "bson", "--until", "3")
    assert list(raw_bson.split(done.stdout)) == expected[:3]
    done = run("watch", *shared, "--until", "now")
    lines = done.stdout.decode().splitlines()
    assert [json.loads(line)["_id"]["_data"] for line in lines][: len(expected)] == [
        bson.decode(event)["_id"]["_data"] for event in expected
    ]


def test_the_command_watch_takes_tokens_stages_and_modes(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]
) -> None:
    start, end = worked
    options: dict[str, Any] = {"full_document": "updateLookup", "full_document_before_change": "whenAvailable"}
    expected, _ = both(replica_set.uri, ("watch_live", "orders"), end, start_at_operation_time=start, **options)
    token = bson.decode(expected[9])["_id"]
    shared = [replica_set.uri, "watch_live.orders", "--format", "bson", "--until", f"{end.time},{end.inc}"]
    shared += ["--full-document", "updateLookup", "--full-document-before-change", "whenAvailable"]
    for form in (token["_data"], json.dumps(token)):
        for flag in ("--resume-after", "--start-after"):
            assert list(raw_bson.split(run("watch", *shared, flag, form).stdout)) == expected[10:]
    matched = run("watch", *shared, *at(start), "--pipeline", '[{"$match": {"operationType": "delete"}}]')
    deletes = [event for event in expected if bson.decode(event)["operationType"] == "delete"]
    assert len(deletes) >= 3
    assert list(raw_bson.split(matched.stdout)) == deletes


def test_pretty_output_names_what_happened_where(replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]) -> None:
    done = run("watch", replica_set.uri, "watch_live.orders", *at(worked[0]), "--format", "pretty", "--until", "2")
    title = done.stdout.decode().splitlines()[0]
    assert " insert " in title
    assert 'watch_live.orders {"_id": 0}' in title
    assert done.stderr == b""


@contextlib.contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command("watch", *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def test_events_are_flushed_as_they_come_and_an_interrupt_ends_with_130(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]
) -> None:
    with watching(replica_set.uri, "watch_live.orders", *at(worked[0]), "--format", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["operationType"] == "insert"
        process.send_signal(signal.SIGINT)
        assert process.wait(_PATIENCE_S) == 130
        said = process.stderr.read().decode()
        assert re.fullmatch(r"tailrace: stopped\. To go on: --resume-after [0-9A-F]+\n", said)


def test_a_closed_pipe_ends_the_command_quietly(replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]) -> None:
    with watching(replica_set.uri, "watch_live.orders", *at(worked[0]), "--format", "json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(_PATIENCE_S) == 0
        assert process.stderr.read() == b""


def test_a_full_disk_is_told_in_one_sentence(replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    arguments = command("watch", replica_set.uri, "watch_live", *at(worked[0]), "--until", "now")
    with full.open("wb") as disk:
        done = subprocess.run(arguments, stdout=disk, stderr=subprocess.PIPE, timeout=_PATIENCE_S, check=False)
    assert done.returncode == 1
    assert done.stderr == b"tailrace: No space left on device.\n"


@pytest.fixture(scope="module")
def dump(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A dump directory as mongodump writes it: raw entries, and the pre-images. It begins a little before the work:
    what other tests wrote before would be read again by each replay."""
    folder = tmp_path_factory.mktemp("dump")
    (folder / "config").mkdir()
    source = MongodSource(replica_set.uri)
    start, end = worked
    before = max(source.oldest()[0], ClusterTime.of(start.time - 10, 0))
    entries = source.read(before, ClusterTime.from_timestamp(end))
    (folder / "oplog.bson").write_bytes(b"".join(batch.raw for batch in entries))
    with raw_client(replica_set.uri) as client:
        images = client.config["system.preimages"].find()
        (folder / "config" / "system.preimages.bson").write_bytes(b"".join(bytes(image.raw) for image in images))
    source.close()
    return folder


@pytest.mark.parametrize("scope", ["", "watch_live", "watch_live.orders"])
def test_a_replayed_dump_gives_the_servers_bytes(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp], dump: Path, scope: str
) -> None:
    start, end = worked
    namespace = tuple(scope.split(".")) if scope else ()
    options: dict[str, Any] = {
        "full_document": "whenAvailable",
        "full_document_before_change": "whenAvailable",
        "show_expanded_events": True,
    }
    expected, _ = both(replica_set.uri, namespace, end, start_at_operation_time=start, **options)
    flags = ["--full-document", "whenAvailable", "--full-document-before-change", "whenAvailable"]
    flags += ["--show-expanded-events", "--format", "bson", *([scope] if scope else [])]
    assumed = replica_set.version.startswith("6.")
    flags += [] if assumed else ["--server-version", replica_set.version]
    done = run("replay", str(dump), *flags, *at(start))
    assert (done.returncode, done.stderr.count(b"\n")) == (0, 1 if assumed else 0)
    assert not assumed or done.stderr.startswith(b"tailrace: the events are those of MongoDB 6.0")
    assert list(raw_bson.split(done.stdout)) == expected
    token = bson.decode(expected[20])["_id"]["_data"]
    done = run("replay", str(dump / "oplog.bson"), *flags, "--resume-after", token, "--until", "5")
    assert list(raw_bson.split(done.stdout)) == expected[21:26]


def test_a_damaged_dump_gives_the_events_before_the_damage_and_its_position(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp], dump: Path, tmp_path: Path
) -> None:
    whole = (dump / "oplog.bson").read_bytes()
    damaged = tmp_path / "oplog.bson"
    damaged.write_bytes(whole[:-200])
    flags = ["watch_live", "--format", "bson", *at(worked[0])]
    expected = list(raw_bson.split(run("replay", str(dump), *flags).stdout))
    done = run("replay", str(damaged), *flags)
    got = list(raw_bson.split(done.stdout))
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"At byte " in done.stderr
    assert len(expected) - 3 <= len(got) <= len(expected)
    assert got == expected[: len(got)]


def test_a_dump_that_does_not_reach_back_is_history_lost(dump: Path, tmp_path: Path) -> None:
    entries = list(raw_bson.split((dump / "oplog.bson").read_bytes()))
    late = tmp_path / "oplog.bson"
    late.write_bytes(b"".join(entries[10:]))
    done = run("replay", str(late), "--start-at-operation-time", "1,1")
    assert done.returncode == 1
    assert b"286 ChangeStreamHistoryLost" in done.stderr
    assert done.stdout == b""


@pytest.mark.parametrize("version", ["5.0", "7.0"])
def test_another_versions_events_are_made_where_the_version_is_said(
    replica_set: ReplicaSet, worked: tuple[Timestamp, Timestamp], version: str
) -> None:
    start, end = worked
    with tailrace.connect(replica_set.uri, server_version=version, document_class=RawBSONDocument) as client:
        events = [bson.decode(event) for event in drain(client.watch(start_at_operation_time=start), end)]
    assert events
    for event in events:
        assert ("wallTime" in event) == (version == "7.0")
        assert event["_id"]["_data"][18:22] == ("2B04" if version == "7.0" else "2B02")
    flags = ["--until", "3", "--format", "json", "--server-version", version, *at(start)]
    printed = [json.loads(line) for line in run("watch", replica_set.uri, *flags).stdout.splitlines()]
    assert [event["_id"] for event in printed] == [event["_id"] for event in events[:3]]
