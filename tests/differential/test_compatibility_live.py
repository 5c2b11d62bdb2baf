"""Servers whose feature compatibility version is the one before their own, and is changed while they are read: ours and
the server's own streams, byte for byte. No test had looked at what a lower setting does to the events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure

import tailrace
from tailrace.cli.examination import examine
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.read.archive.layout import existing
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.archive.replay import ArchiveReplay
from tailrace.read.archive.writer import OplogWriter
from tailrace.read.source.compatibility import ASK_AGAIN_S
from tailrace.read.source.mongod import MongodSource
from tests.gateway.gateways import running_gateway

pytestmark = pytest.mark.mongod

RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
VERSIONS = [("6.0.27", "5.0"), pytest.param("7.0.28", "6.0", marks=pytest.mark.slow)]
END_S = 120.0


def write(client: MongoClient[Any], first: int) -> int:
    """Writes; how many events of the collection they give."""
    orders = client.shop.orders
    orders.insert_one({"_id": first, "a": {"0": 1}})
    orders.update_one({"_id": first}, {"$set": {"a.0": 2}})
    orders.replace_one({"_id": first}, {"b": 1})
    with client.start_session() as session, session.start_transaction():
        orders.insert_one({"_id": first + 1}, session=session)
        orders.delete_one({"_id": first}, session=session)
    return 5


def taken(stream: Any, count: int) -> list[bytes]:
    events: list[bytes] = []
    deadline = time.monotonic() + END_S
    while len(events) < count:
        assert time.monotonic() < deadline, len(events)
        event = stream.try_next()
        if event is not None:
            events.append(bytes(event.raw))
    return events


def differ(version: str) -> str:
    """The field that a lower setting takes away, as it stands in an event's bytes."""
    return "wallTime" if version.startswith("6") else "disambiguatedPaths"


@pytest.mark.parametrize(("version", "lower"), VERSIONS)
@pytest.mark.parametrize("expanded", [False, True])
def test_streams_follow_the_setting_while_they_are_open_and_where_they_resume(
    version: str, lower: str, expanded: bool
) -> None:
    options: dict[str, Any] = {"max_await_time_ms": 100, "show_expanded_events": True} if expanded else {}
    with ReplicaSet(version=version) as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.create_collection("orders")
        start = client.admin.command("ping")["operationTime"]
        deployment.set_compatibility(lower)
        engines = {
            "server": stack.enter_context(tailrace.connect(deployment.uri, engine="server")),
            "alone": stack.enter_context(tailrace.connect(deployment.uri)),
            "together": stack.enter_context(tailrace.connect(deployment.uri)),
        }
        opened: dict[str, Callable[..., Any]] = {
            name: engine.shop.get_collection("orders", codec_options=RAW).watch for name, engine in engines.items()
        }
        opened["of all"] = engines["together"].get_database("shop", codec_options=RAW).watch
        streams = {name: stack.enter_context(watch(**options)) for name, watch in opened.items()}
        shown = []
        for number, setting in enumerate((lower, version[:3], lower, version[:3])):
            deployment.set_compatibility(setting)
            if number:
                time.sleep(ASK_AGAIN_S)  # nothing is written meanwhile, so no event is made under the old setting
                assert all(stream.try_next() is None for stream in streams.values())
            count = write(client, number * 10)
            given = {name: taken(stream, count) for name, stream in streams.items()}
            for name, events in given.items():
                assert events == given["server"], (name, setting)
            # The server gives older entries by what it is set to now.
            again = {name: opened[name](start_at_operation_time=start, **options) for name in ("server", "alone")}
            every = {name: taken(stream, count * (number + 1)) for name, stream in again.items()}
            assert every["alone"] == every["server"], setting
            resumed = opened["alone"](resume_after=bson.decode(given["server"][0])["_id"], **options)
            assert taken(resumed, count - 1) == given["server"][1:]
            for stream in (*again.values(), resumed):
                stream.close()
            shown.append(any(differ(version).encode() in event for event in given["server"]))
        always = expanded == (version[0] == "6")  # 6.0 has it in expanded events, and 7.0 in no others
        assert shown == ([expanded] * 4 if always else [False, True, False, True])


@pytest.mark.parametrize("before", ["off", "whenAvailable", "required"])
def test_6_0_at_5_0_refuses_and_gives_images_as_the_server(before: str) -> None:
    with ReplicaSet(version="6.0.27") as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        deployment.set_compatibility("5.0")
        start = client.admin.command("ping")["operationTime"]
        write(client, 0)
        said = []
        for engine in ("server", "oplog"):
            ours = stack.enter_context(tailrace.connect(deployment.uri, engine=engine))
            orders = ours.shop.get_collection("orders", codec_options=RAW)
            modes = ("whenAvailable", "required", "updateLookup") if before == "off" else (None,)
            said.append([_answer(orders, start, mode, None if before == "off" else before) for mode in modes])
    assert said[0] == said[1]


def _answer(orders: Any, start: Any, full: str | None, before: str | None) -> Any:
    """The outcome of a stream: its events, or the error's code and the server's message."""
    try:
        options = {"full_document": full, "full_document_before_change": before, "max_await_time_ms": 100}
        with orders.watch(start_at_operation_time=start, **options) as stream:
            return taken(stream, 5)
    except OperationFailure as error:
        sentence = str((error.details or {}).get("errmsg", error)).rpartition("caused by :: ")[2]
        return error.code, sentence.partition(" for event:")[0].partition(". ")[0]


def test_an_archive_keeps_the_setting_over_time_and_replays_by_it(tmp_path: Path) -> None:
    with ReplicaSet(version="6.0.27") as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.create_collection("orders")
        deployment.set_compatibility("5.0")
        begin = MongodSource(deployment.uri).newest()
        server = stack.enter_context(tailrace.connect(deployment.uri, engine="server"))
        stream = stack.enter_context(server.shop.get_collection("orders", codec_options=RAW).watch())
        recorder = Recorder(client, None, tmp_path, ArchivePolicy(images=False))
        thread = threading.Thread(target=recorder.run)
        thread.start()
        deadline = time.monotonic() + END_S
        while not (tmp_path / "archive.json").exists():
            assert time.monotonic() < deadline, "the archive begins"
            time.sleep(0.1)
        expected = taken(stream, write(client, 0))
        deployment.set_compatibility("6.0")
        expected += taken(stream, write(client, 10))
        while len(existing(tmp_path).versions) < 2:
            assert time.monotonic() < deadline, "the archive notes the change"
            time.sleep(0.1)
        recorder.stop()
        thread.join()
        setting = {"ns": "admin.system.version", "o.version": "6.0"}
        (*_, entry) = client.local["oplog.rs"].find(setting).sort("ts", 1)
    notes = existing(tmp_path).versions
    assert [note.version for note in notes] == ["6.0.27-fcv5.0", "6.0.27"]
    assert notes[1].since == ClusterTime.from_timestamp(entry["ts"]), "the entry itself says when"
    options = StreamOptions.parse(Scope.parse("shop.orders"), {"startAtOperationTime": begin.tick().to_timestamp()})
    replay = ArchiveReplay(tmp_path, options)
    given = [bytes(event) for block in replay.blocks() for event in block.events()]
    assert given == expected
    assert ["wallTime" in bson.decode(event) for event in given] == [False] * 5 + [True] * 5


def archived(client: MongoClient[Any], folder: Path) -> None:
    """Archive what there is, checking the version all the time."""
    recorder = Recorder(client, None, folder, ArchivePolicy(images=False, once=True))
    recorder.run(lambda _: None, every_s=0.005)


def check_notes(folder: Path, set_by: list[dict[str, Any]], begin: ClusterTime, expected: list[bytes]) -> None:
    """The archive notes 5.0, 6.0 and 5.0 at the entries that have set them, and its replay gives what was expected."""
    notes = existing(folder).versions
    assert [note.version for note in notes] == ["6.0.27", "6.0.27-fcv5.0", "6.0.27", "6.0.27-fcv5.0"]
    times = {ClusterTime.from_timestamp(entry["ts"]): entry["o"]["version"] for entry in set_by}
    assert [times[note.since] for note in notes[1:]] == ["5.0", "6.0", "5.0"]
    options = StreamOptions.parse(Scope.parse("shop.orders"), {"startAtOperationTime": begin.tick().to_timestamp()})
    assert [bytes(event) for block in ArchiveReplay(folder, options).blocks() for event in block.events()] == expected


def test_changes_that_an_archive_was_away_at_are_noted_where_their_entries_are(tmp_path: Path) -> None:
    """Two changes that cancel each other were not noted, and a change that was several batches ahead of the reader was
    noted where reading went on. In the earlier test the archive was running at the only change."""
    with ReplicaSet(version="6.0.27", oplog_size_mb=400) as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.create_collection("orders")
        archived(client, tmp_path)
        begin = MongodSource(deployment.uri).newest()
        server = stack.enter_context(tailrace.connect(deployment.uri, engine="server"))
        stream = stack.enter_context(server.shop.get_collection("orders", codec_options=RAW).watch())
        for _ in range(6):
            client.shop.large.insert_many([{"text": "x" * 1_000_000} for _ in range(10)])
        expected = taken(stream, write(client, 0))
        for number, setting in enumerate(("5.0", "6.0", "5.0"), 1):
            deployment.set_compatibility(setting)
            expected += taken(stream, write(client, 10 * number))
        archived(client, tmp_path)
        set_by = list(client.local["oplog.rs"].find({"ns": "admin.system.version"}).sort("ts", 1))
    check_notes(tmp_path, set_by, begin, expected)


def test_a_change_that_a_killed_recorder_has_archived_and_not_noted_is_noted_at_its_entry(tmp_path: Path) -> None:
    """It was noted where the next recorder went on to read. No test had killed one between the two writes."""
    with ReplicaSet(version="6.0.27") as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.create_collection("orders")
        archived(client, tmp_path)
        begin = MongodSource(deployment.uri).newest()
        server = stack.enter_context(tailrace.connect(deployment.uri, engine="server"))
        stream = stack.enter_context(server.shop.get_collection("orders", codec_options=RAW).watch())
        expected = taken(stream, write(client, 0))
        for number, setting in enumerate(("5.0", "6.0", "5.0"), 1):
            deployment.set_compatibility(setting)
            expected += taken(stream, write(client, 10 * number))
            if number < 3:  # the recorder's writer publishes, and the recorder does not live to note anything
                source = MongodSource(client)
                OplogWriter(source, tmp_path / source.name, until=source.newest(), images=False).run()
        assert [note.version for note in existing(tmp_path).versions] == ["6.0.27"]
        archived(client, tmp_path)
        set_by = list(client.local["oplog.rs"].find({"ns": "admin.system.version"}).sort("ts", 1))
    check_notes(tmp_path, set_by, begin, expected)


def test_a_user_who_may_not_ask_is_given_the_versions_own_events_and_doctor_says_so() -> None:
    with ReplicaSet(version="6.0.27", root_password="secret") as deployment, MongoClient[Any](deployment.uri) as root:
        deployment.set_compatibility("5.0")
        for name, privileges in (
            ("plain", []),
            ("document", [{"resource": {"db": "admin", "collection": "system.version"}, "actions": ["find"]}]),
            ("parameter", [{"resource": {"cluster": True}, "actions": ["getParameter"]}]),
        ):
            root.admin.command("createRole", name, privileges=privileges, roles=[])
            roles = [{"role": "read", "db": "local"}, {"role": name, "db": "admin"}]
            root.admin.command("createUser", name, pwd="secret", roles=roles)
            uri = deployment.uri.replace("root:secret@", f"{name}:secret@")
            found = [one for one in examine(MongodSource(uri)) if one.check == "version"]
            assert MongodSource(uri).server_version == ("6.0.27" if name == "plain" else "6.0.27-fcv5.0")
            assert ("find on admin.system.version" in found[0].advice) == (name == "plain")
            assert ("compatibility version 5.0" in found[0].found) == (name != "plain")


def test_a_gateways_streams_resume_when_the_setting_changes() -> None:
    with ReplicaSet(version="6.0.27") as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.create_collection("orders")
        deployment.set_compatibility("5.0")
        beyond = stack.enter_context(MongoClient[Any](stack.enter_context(running_gateway(deployment.uri)).uri()))
        streams = [
            stack.enter_context(one.shop.get_collection("orders", codec_options=RAW).watch(max_await_time_ms=100))
            for one in (client, beyond)
        ]
        for number, setting in enumerate(("5.0", "6.0", "5.0")):
            deployment.set_compatibility(setting)
            time.sleep(ASK_AGAIN_S if number else 0.0)
            assert [stream.try_next() for stream in streams] == [None, None]
            count = write(client, number * 10)
            server, ours = (taken(stream, count) for stream in streams)
            assert ours == server
            assert ["wallTime" in bson.decode(event) for event in ours] == [setting == "6.0"] * count


def test_a_cluster_follows_the_lowest_setting_of_its_shards() -> None:
    with ShardedCluster(shards=2, version="6.0.27") as cluster, ExitStack() as stack:
        clients = [stack.enter_context(MongoClient[Any](shard.uri)) for shard in cluster.shards.values()]
        stream = stack.enter_context(
            stack.enter_context(tailrace.connect(cluster.uri, document_class=RawBSONDocument)).watch()
        )
        shown = []
        for number, settings in enumerate((("6.0", "6.0"), ("6.0", "5.0"), ("5.0", "5.0"), ("6.0", "6.0"))):
            for shard, setting in zip(cluster.shards.values(), settings, strict=True):
                shard.set_compatibility(setting)
            time.sleep(ASK_AGAIN_S if number else 0.0)
            for place, client in enumerate(clients):
                client[f"shop{place}"].orders.insert_one({"_id": number})
            shown.append(["wallTime" in bson.decode(event) for event in taken(stream, 2)])
        assert shown == [[True] * 2, [False] * 2, [False] * 2, [True] * 2]
