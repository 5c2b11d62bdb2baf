"""A replica set that is upgraded while it is read: nothing is lost or given twice, and the events are those of the
member that is read, as the server's own stream resumes there. No test had changed a server's version under a stream, so
streams kept the version that they found when they were opened.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.act.consumer.memory_lease_store import MemoryLeaseStore
from tailrace.consumer import Change, Listener
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.embedded import ReplicaSet, ShardedCluster
from tailrace.lake.spark.planning.deployment import Deployment
from tailrace.lake.spark.planning.opening import open_deployment
from tailrace.lake.spark.query.offset import Offset
from tailrace.lake.spark.query.options import ReadOptions, parse
from tailrace.lake.spark.source.stream_reader import TailraceStreamReader
from tailrace.lake.tables.settings import TableRule, TableSettings
from tailrace.lake.tables.writer import TablesWriter
from tailrace.read.archive.layout import existing
from tailrace.read.archive.recorder import ArchivePolicy, Recorder
from tailrace.read.source.compatibility import ASK_AGAIN_S
from tailrace.read.source.mongod import MongodSource
from tests.commands import run
from tests.differential.upgrading import END_S, RAW, Background, Follower, Writer, key_of
from tests.gateway.gateways import running_gateway
from tests.spark.readers import kept_by_spark
from tests.tables.equality import assert_equal, in_collection

pytestmark = pytest.mark.mongod

#: The document that is inserted at the end.
LAST: dict[str, Any] = {"_id": "the last one", "n": 0}
IMAGE = "fullDocumentBeforeChange"


class Streams:
    """Streams over one deployment, beside the server's own, each with the events that it has given."""

    def __init__(self, uri: str, folder: Path, stack: ExitStack, *, options: dict[str, Any] | None = None) -> None:
        """``options``: of ``$changeStream``."""
        ours = stack.enter_context(tailrace.connect(uri, images=folder))
        server = stack.enter_context(tailrace.connect(uri, engine="server"))
        beyond = stack.enter_context(MongoClient[Any](stack.enter_context(running_gateway(uri)).uri()))
        alone = stack.enter_context(tailrace.connect(uri))
        told = options or {}
        options = {"document_class": RawBSONDocument, "max_await_time_ms": 100, "options": told or None}
        raw = bson.codec_options.CodecOptions(document_class=RawBSONDocument)
        self.streams: dict[str, Any] = {
            "server": server.watch(**options),
            "alone": alone.watch(**options),
            "together": ours.watch(**options),
            "together, a collection": ours.shop.orders.watch(**options),
            "exact": ours.shop.orders.watch(full_document_before_change="exact", **options),
        }
        if not told:  # PyMongo takes no other options of the stage
            orders = beyond.shop.get_collection("orders", codec_options=raw)
            self.streams["gateway"] = orders.watch(max_await_time_ms=100)
        self.events: dict[str, list[bytes]] = {name: [] for name in self.streams}
        for stream in self.streams.values():
            stack.callback(stream.close)

    def take(self) -> None:
        for name, stream in self.streams.items():
            while (event := stream.try_next()) is not None:
                self.events[name].append(bytes(event.raw))

    def settle(self, client: MongoClient[Any]) -> None:
        """Take all events up to a mark that is written now."""
        mark = {"_id": f"mark {time.monotonic()}"}
        client.shop.orders.insert_one(mark)
        deadline = time.monotonic() + END_S
        while any(not given or key_of(given[-1]) != mark for given in self.events.values()):
            assert time.monotonic() < deadline, {name: len(given) for name, given in self.events.items()}
            self.take()


def _is_order(event: bytes) -> bool:
    return bool(bson.decode(event)["ns"] == {"db": "shop", "coll": "orders"})


def _decoded(events: list[bytes], *names: str) -> list[dict[str, Any]]:
    """The events without some of their fields."""
    return [{name: value for name, value in bson.decode(one).items() if name not in names} for one in events]


def _write(client: MongoClient[Any], first: int) -> None:
    """Twenty documents, half of which are removed by one command."""
    orders = client.shop.orders
    orders.insert_many([{"_id": first + number, "n": 0} for number in range(20)])
    orders.update_many({"_id": {"$gte": first}}, {"$inc": {"n": 1}})
    orders.delete_many({"_id": {"$gte": first, "$lt": first + 10}})
    client.shop.other.insert_one({"_id": first})


def _compare(streams: Streams) -> None:
    theirs = streams.events["server"]
    for name, given in streams.events.items():
        of_all = name in ("server", "alone", "together")
        expected = theirs if of_all else [one for one in theirs if _is_order(one)]
        assert _decoded(given, "wallTime", IMAGE) == _decoded(expected, "wallTime"), name
        for event, ours in zip(expected, given, strict=True):
            if name != "exact":
                assert ours == event, name
    for event in map(bson.decode, streams.events["exact"]):
        if event["operationType"] == "delete":
            assert event[IMAGE] == {**event["documentKey"], "n": 1}


def _planned(spark: Deployment, start: Offset) -> str:
    """The server version whose events the workers of a micro-batch make."""
    newest = spark.newest()
    spark.settle(newest)
    (part,) = {slice_.server_version for slice_ in spark.slices(start, spark.end(start, newest, None))}
    return part


@pytest.mark.parametrize(
    ("older", "newer"),
    [("5.0.4", "6.0.27"), pytest.param("6.0.27", "7.0.28", marks=pytest.mark.slow)],
)
def test_each_stream_takes_the_version_of_the_member_that_it_reads(older: str, newer: str, tmp_path: Path) -> None:
    with ReplicaSet(version=older) as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.orders.insert_one({"_id": -1})
        streams = Streams(deployment.uri, tmp_path, stack)
        spark = open_deployment(parse({"uri": deployment.uri}))
        stack.callback(spark.close)
        _write(client, 0)
        assert _planned(spark, spark.start("oldest")) == older
        streams.settle(client)
        deployment.upgrade(0, newer)
        _write(client, 100)
        streams.settle(client)
        assert _planned(spark, spark.start("oldest")) == f"{newer}-fcv{older[:3]}"
        deployment.set_compatibility(newer[:3])
        time.sleep(ASK_AGAIN_S)  # nothing is written meanwhile, so no event is made under the old setting
        streams.take()
        _write(client, 200)
        streams.settle(client)
        assert _planned(spark, spark.start("oldest")) == newer
    _compare(streams)
    first, last = bson.decode(streams.events["alone"][0]), bson.decode(streams.events["alone"][-1])
    assert ("wallTime" in first) == (older >= "6")
    assert "wallTime" in last


def test_a_micro_batch_that_runs_again_after_an_upgrade_gives_the_same_bytes() -> None:
    """After a crash Spark runs the range of a planned micro-batch again. Each run used the version of its own time, so
    an upgrade between the two gave other rows."""
    with ReplicaSet(version="5.0.4") as deployment, MongoClient[Any](deployment.uri) as client:
        _write(client, 0)
        options = parse({"uri": deployment.uri, "startingFrom": "oldest", "columns": "event,token", "database": "shop"})
        first = TailraceStreamReader(options)
        start = kept_by_spark(first.initialOffset())
        assert first.latestOffset(start, first.getDefaultReadLimit()) == start  # empty: it keeps the start
        end = kept_by_spark(first.latestOffset(start, first.getDefaultReadLimit()))
        given = _rows(options, first, start, end)
        first.stop()
        deployment.upgrade(0, "6.0.27")
        deployment.set_compatibility("6.0")
        again = TailraceStreamReader(options)
        assert _rows(options, again, start, end) == given
        assert {"wallTime" in bson.decode(row["event"]) for row in given} == {False}
        # A plan of an earlier release does not name its version: then the present one is used.
        unsaid = {name: value for name, value in end.items() if name != "serverVersion"}
        assert {"wallTime" in bson.decode(row["event"]) for row in _rows(options, again, start, unsaid)} == {True}
        _write(client, 100)
        later = kept_by_spark(again.latestOffset(end, again.getDefaultReadLimit()))
        assert [one["serverVersion"] for one in (end, later)] == ["5.0.4", "6.0.27"]
        assert {"wallTime" in bson.decode(row["event"]) for row in _rows(options, again, end, later)} == {True}
        again.stop()


def _rows(
    options: ReadOptions, planner: TailraceStreamReader, start: dict[str, Any], end: dict[str, Any]
) -> list[dict[str, Any]]:
    """A micro-batch's rows, as workers make them."""
    parts = planner.partitions(start, end)
    return [row for part in parts for batch in TailraceStreamReader(options).read(part) for row in batch.to_pylist()]


@pytest.mark.slow
def test_a_patch_release_that_has_other_events_is_followed(tmp_path: Path) -> None:
    """7.0.28 has events of index builds, and 7.0.25 does not. Streams compared only the first number of the version, so
    they went on without these events."""
    shown: dict[str, Any] = {"showExpandedEvents": True, "showSystemEvents": True}
    with ReplicaSet(version="7.0.25") as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.orders.insert_one({"_id": -1})
        begin = MongodSource(deployment.uri).newest()
        streams = Streams(deployment.uri, tmp_path, stack, options=shown)
        spark = open_deployment(parse({"uri": deployment.uri}))
        stack.callback(spark.close)
        gateway = stack.enter_context(running_gateway(deployment.uri)).uri()
        recorder = Recorder(client, None, tmp_path / "archive", ArchivePolicy(images=False))
        thread = Background("archive", recorder.run)
        _write_and_index(client, 0)
        assert _planned(spark, spark.start("oldest")) == "7.0.25"
        streams.settle(client)
        deployment.upgrade(0, "7.0.28")
        _write_and_index(client, 100)
        streams.settle(client)
        assert _planned(spark, spark.start("oldest")) == "7.0.28"
        recorder.stop()
        thread.join()
        start = {"startAtOperationTime": begin.tick().to_timestamp(), "allChangesForCluster": True, **shown}
        again = [_first_reply(uri, start) for uri in (deployment.uri, gateway)]
    assert again[0] == again[1]
    assert _index_builds(again[0]) == 4, "an upgraded server has them of older entries, too"
    _compare(streams)
    assert _index_builds(streams.events["alone"]) == 2
    # Replay gives the original events, with the upgrade where the archive met it.
    assert [note.version for note in existing(tmp_path / "archive").versions] == ["7.0.25", "7.0.28"]
    flags = ("--show-expanded-events", "--show-system-events")
    at = f"--start-at-operation-time={begin.seconds},{begin.increment + 1}"
    said = run("replay", str(tmp_path / "archive"), at, *flags, "--format", "bson")
    assert said.returncode == 0, said.stderr
    assert list(raw_bson.split(said.stdout)) == streams.events["server"]


def _index_builds(events: list[bytes]) -> int:
    return sum(bson.decode(event)["operationType"] == "startIndexBuild" for event in events)


def _first_reply(uri: str, stage: dict[str, Any]) -> list[bytes]:
    """The events that a new stream has at once."""
    raw = bson.codec_options.CodecOptions(document_class=RawBSONDocument)
    with MongoClient[Any](uri) as client:
        admin = client.get_database("admin", codec_options=raw)
        with admin.aggregate([{"$changeStream": stage}], batchSize=1000) as cursor:
            return [bytes(event.raw) for event in iter(cursor.try_next, None)]


def _write_and_index(client: MongoClient[Any], first: int) -> None:
    """Documents, and two indexes that have to be built because the collection is not empty."""
    _write(client, first)
    client.shop.orders.create_index([(f"n{first}", 1)])
    client.shop.other.create_index([(f"n{first}", 1)])


@pytest.mark.slow
@pytest.mark.parametrize(("older", "newer"), [("5.0.4", "6.0.27"), ("6.0.27", "7.0.28")])
def test_nothing_is_lost_while_a_replica_set_is_upgraded_member_by_member(
    older: str, newer: str, tmp_path: Path
) -> None:
    with ReplicaSet(3, version=older) as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.orders.insert_one({"_id": -1, "n": 0})
        begin = MongodSource(deployment.uri).newest()
        everything = Everything(deployment.uri, tmp_path, stack)
        writer = Writer(deployment.uri)
        upgrade(deployment, newer, writer)
        writer.stop()
        client.shop.orders.insert_one(LAST)
        everything.end()
        end = MongodSource(deployment.uri).newest()
        check_streams(everything, writer.rounds)
        given = everything.followers["watch"].events
        check_archive(tmp_path / "archive", client, begin, [older, newer], given)
        assert_equal(tmp_path / "tables", {"shop.orders": in_collection(client.shop.orders)}, set())
        assert end > begin


def upgrade(deployment: ReplicaSet, newer: str, writer: Writer) -> None:
    """The secondaries, then the primary after it has stepped down, then the feature compatibility version."""
    last = deployment.primary
    for member in [*(one for one in range(3) if one != last), last]:
        if deployment.primary == member:
            deployment.step_down()
        deployment.upgrade(member, newer)
        _let_write(writer)
    deployment.set_compatibility(newer[:3])
    time.sleep(ASK_AGAIN_S)  # by then everything has followed
    _let_write(writer)


def steps(versions: list[str]) -> list[str]:
    """The versions that a replica set has one after the other, those at the feature compatibility version before."""
    below = [[f"{newer}-fcv{older[:3]}", newer] for older, newer in pairwise(versions)]
    return [versions[0], *chain.from_iterable(below)]


def _let_write(writer: Writer) -> None:
    rounds = writer.rounds
    while writer.rounds < rounds + 30:
        time.sleep(0.05)


class Everything:
    """Everything that reads a deployment, running."""

    def __init__(self, uri: str, folder: Path, stack: ExitStack) -> None:
        client = stack.enter_context(tailrace.connect(uri, images=folder / "images"))
        server = stack.enter_context(tailrace.connect(uri, engine="server"))
        other = stack.enter_context(tailrace.connect(uri))
        beyond = stack.enter_context(MongoClient[Any](stack.enter_context(running_gateway(uri)).uri()))
        raw = bson.codec_options.CodecOptions(document_class=RawBSONDocument)
        served = beyond.shop.get_collection("orders", codec_options=raw)
        orders, exact = client.shop.orders, {"full_document_before_change": "exact", **RAW}
        self.followers = {
            "server": Follower("server", lambda start: server.shop.orders.watch(**RAW, **start)),
            "watch": Follower("watch", lambda start: other.shop.orders.watch(**RAW, **start)),
            "watch, together": Follower("together", lambda start: other.shop.orders.watch(**RAW, **start)),
            "exact": Follower("exact", lambda start: orders.watch(**exact, **start)),
            "gateway": Follower("gateway", lambda start: served.watch(max_await_time_ms=200, **start)),
        }
        self.handled: list[Any] = []
        self.listener = Listener(
            client.shop.orders, self._handle, resource="orders", store=MemoryLeaseStore(), retries=1000
        ).start()
        plain = stack.enter_context(MongoClient[Any](uri))
        self.recorder = Recorder(plain, None, folder / "archive", ArchivePolicy(images=False))
        self._uri, self._settings = uri, TableSettings(folder / "tables", (TableRule("shop.orders"),))
        self.tables = TablesWriter(uri, self._settings)
        self.threads = [Background("archive", self.recorder.run), Background("tables", self.tables.run)]

    def _handle(self, change: Change) -> None:
        self.handled.append((change.event["clusterTime"], change.event.get("documentKey")))

    def end(self) -> None:
        for follower in self.followers.values():
            follower.end_at({"_id": LAST["_id"]})
        deadline = time.monotonic() + END_S
        while not self.handled or self.handled[-1][1] != {"_id": LAST["_id"]}:
            assert time.monotonic() < deadline, self.handled[-1:]
            time.sleep(0.05)
        self.listener.stop()
        self.recorder.stop()
        self.tables.stop()
        for thread in self.threads:
            thread.join()
        self.tables.close()
        with TablesWriter(self._uri, self._settings) as tables:
            tables.run_to_present()


def check_streams(everything: Everything, rounds: int) -> None:
    theirs = everything.followers["server"].events
    assert len(theirs) > rounds * 10
    told = _decoded(theirs, "wallTime", "_id")
    for name, follower in everything.followers.items():
        # Around each change of the member one stream may have read an event of the older one, and another not.
        assert _decoded(follower.events, "wallTime", "_id", IMAGE) == told, (name, follower.errors)
        assert _places(follower.events) == _places(theirs), name
        if name != "exact":
            assert follower.events[:5] == theirs[:5], name
            assert follower.events[-5:] == theirs[-5:], name
    for event in map(bson.decode, everything.followers["exact"].events):
        if event["operationType"] == "delete":
            assert event[IMAGE]["_id"] == event["documentKey"]["_id"]
    handled = [(event["clusterTime"], event["documentKey"]) for event in map(bson.decode, theirs)]
    assert [one for one in everything.handled if one[0] >= handled[0][0]] == handled


def _places(events: list[bytes]) -> list[Any]:
    """What the resume tokens say apart from their version, and without what only one version says."""
    tokens = [ResumeToken.from_hex(bson.decode(event)["_id"]["_data"]) for event in events]
    return [(token.cluster_time, token.txn_op_index, token.uuid) for token in tokens]


def check_archive(
    folder: Path, client: MongoClient[Any], begin: ClusterTime, versions: list[str], given: list[bytes]
) -> None:
    """Replay of the archive gives what was ``given`` meanwhile, and with one version for all what the upgraded server
    gives that resumes where the archive begins."""
    description = existing(folder)
    assert [note.version for note in description.versions] == steps(versions)
    raw = bson.codec_options.CodecOptions(document_class=RawBSONDocument)
    orders = client.shop.get_collection("orders", codec_options=raw)
    expected: list[bytes] = []
    with orders.watch(start_at_operation_time=begin.tick().to_timestamp()) as stream:
        while not expected or key_of(expected[-1]) != {"_id": LAST["_id"]}:
            expected.append(bytes(stream.next().raw))
    start = f"--start-at-operation-time={begin.seconds},{begin.increment + 1}"
    said = run("replay", str(folder), "shop.orders", start, "--format", "bson", "--server-version", versions[-1])
    assert said.returncode == 0, said.stderr
    assert list(raw_bson.split(said.stdout)) == expected
    said = run("replay", str(folder), "shop.orders", start, "--format", "bson")
    assert said.returncode == 0, said.stderr
    assert f"of {versions[-1]}: the archive says so".encode() in said.stderr
    replayed = list(raw_bson.split(said.stdout))
    assert _decoded(replayed, "wallTime", "_id") == _decoded(expected, "wallTime", "_id")
    # The archive and a stream do not switch to another member at the same entry; and a stream notices the next feature
    # compatibility version, which decides on wallTime here, up to 5 s after the entry.
    assert len(replayed) - len(given) in (0, 1), "the document before the streams were opened"
    pairs = zip(reversed(_decoded(replayed, "wallTime")), reversed(_decoded(given, "wallTime")), strict=False)
    same = sum(one == other for one, other in pairs)
    assert same > len(given) * 9 // 10
    assert replayed[-len(given) :][:50] == given[:50]
    assert replayed[-50:] == given[-50:]


@pytest.mark.slow
def test_a_clusters_streams_take_the_version_of_the_oldest_shard(tmp_path: Path) -> None:
    """5.0 to 6.0, the config server first, while a stream and a gateway's read both shards."""
    with ShardedCluster(shards=2, version="5.0.4") as cluster, ExitStack() as stack:
        clients = {name: MongoClient[Any](shard.uri) for name, shard in cluster.shards.items()}
        for client in clients.values():
            stack.enter_context(client)
        ours = stack.enter_context(tailrace.connect(cluster.uri, images=tmp_path))
        streams = {
            "watch": ours.watch(**RAW),
            "exact": ours.watch(full_document_before_change="exact", **RAW),
        }
        events: dict[str, list[bytes]] = {name: [] for name in streams}
        written: list[Any] = []

        def write_and_read() -> None:
            for number, (name, client) in enumerate(clients.items()):
                written.append({"_id": f"{name} {len(written)}"})
                client[f"shop{number}"].orders.insert_one(dict(written[-1]))
            deadline = time.monotonic() + END_S
            while any(len(given) < len(written) for given in events.values()):
                assert time.monotonic() < deadline, events
                for name, stream in streams.items():
                    if (event := stream.try_next()) is not None:
                        events[name].append(bytes(event.raw))

        write_and_read()
        for part in (cluster.config, *cluster.shards.values()):
            part.upgrade(0, "6.0.27")
            write_and_read()
        for shard in cluster.shards.values():
            shard.set_compatibility("6.0")
        time.sleep(ASK_AGAIN_S)
        write_and_read()
        for stream in streams.values():
            stream.close()
    for name, given in events.items():
        # The two writers do not know of each other's times, so the events of one round come in any order.
        assert sorted(key_of(event)["_id"] for event in given) == sorted(one["_id"] for one in written), name
        shown = ["wallTime" in bson.decode(event) for event in given]
        assert shown == [False] * 8 + [True] * 2, name
