"""The source against real replica sets: every majority-committed entry once and in order, whatever the members do."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from tailrace.core import raw_bson
from tailrace.core.event.image import PreImageKeys
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.request import DocumentLookup, OplogBatch, PreImageKey
from tailrace.embedded import ReplicaSet
from tailrace.errors import ChangeStreamHistoryLost, SourceError
from tailrace.read.archive.writer import OplogWriter
from tailrace.read.source.batch import entry_time
from tailrace.read.source.connection import Connection
from tailrace.read.source.mongod import MongodSource
from tests.amounts import amount
from tests.differential.tcp_proxy import TcpProxy
from tests.pace import BETWEEN_WRITES_S

pytestmark = pytest.mark.mongod

_PATIENCE_S = 300.0


def entries_of(batches: list[OplogBatch]) -> list[bytes]:
    return [entry for batch in batches for entry in raw_bson.split(batch.raw)]


def oplog_between(uri: str, after: ClusterTime, until: ClusterTime) -> list[bytes]:
    """The oplog's entries as the driver reads them, one by one."""
    with MongoClient[RawBSONDocument](uri, document_class=RawBSONDocument) as client:
        window = {"$gt": after.to_timestamp(), "$lte": until.to_timestamp()}
        return [entry.raw for entry in client.local["oplog.rs"].find({"ts": window})]


def tail_until(source: MongodSource, tail: Iterator[OplogBatch], until: ClusterTime) -> list[OplogBatch]:
    batches: list[OplogBatch] = []
    deadline = time.monotonic() + _PATIENCE_S
    for batch in tail:
        batches.append(batch)
        if batch.high_water >= until:
            return batches
        assert time.monotonic() < deadline, f"stuck at {batch.high_water}"
    raise AssertionError("the tail ended")


class Writer:
    """Inserts numbered documents at majority from a thread until it is stopped; retries as an application would."""

    def __init__(self, uri: str, database: str) -> None:
        self._client: MongoClient[dict[str, Any]] = MongoClient(uri, heartbeatFrequencyMS=500)
        majority = WriteConcern("majority")
        self._collection = self._client[database].get_collection("written", write_concern=majority)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0

    def _run(self) -> None:
        while not self._stopped.wait(BETWEEN_WRITES_S):
            with suppress(PyMongoError):
                self._collection.insert_one({"number": self.count, "filler": "x" * 200})
                self.count += 1

    def stop(self) -> ClusterTime:
        """Stop, and give the time of the last committed entry."""
        self._stopped.set()
        self._thread.join()
        reply = self._client.admin.command("appendOplogNote", 1, data={"end": 1}, writeConcern={"w": "majority"})
        self._client.close()
        return ClusterTime.from_timestamp(reply["operationTime"])

    def wait_for(self, more: int) -> None:
        goal = self.count + more
        deadline = time.monotonic() + _PATIENCE_S
        while self.count < goal:
            assert time.monotonic() < deadline, "the writer is stuck"
            time.sleep(0.01)

    @contextmanager
    def running(self) -> Iterator[Writer]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join()


@contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_range_is_given_whole_and_ends_with_its_bound(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        begin = source.newest()
        for number in range(5):
            source.client.source_range.c.insert_many([{"n": number, "x": i, "pad": "p" * 500} for i in range(100)])
        until = source.newest()
        whole = list(source.read(begin, until))
        pieces = list(source.read(begin, until, batch_bytes_max=10_000))
        expected = oplog_between(replica_set.uri, begin, until)
        middle = entry_time(expected[250])
        tail_end = list(source.read(middle, until))
        assert len(expected) >= 500
        assert entries_of(whole) == entries_of(pieces) == expected
        assert entries_of(tail_end) == expected[251:]
        assert whole[-1].high_water == pieces[-1].high_water == until
        assert max(len(batch.raw) for batch in pieces) <= 10_000
        assert len(pieces) > 20
        for batch in pieces:
            assert batch.high_water == entry_time(list(raw_bson.split(batch.raw))[-1])
        assert list(source.read(until, until)) == []


def test_a_range_to_a_time_without_an_entry_ends_with_an_empty_batch(quiet_replica_set: ReplicaSet) -> None:
    replica_set = quiet_replica_set
    with closing(MongodSource(replica_set.uri)) as source:
        begin = source.newest()
        source.client.source_range.gap.insert_one({})
        first = source.newest()
        time.sleep(1.1)
        source.client.source_range.gap.insert_one({})
        between = ClusterTime.of(first.seconds, first.increment + 1000)
        batches = list(source.read(begin, between))
        assert batches[-1] == OplogBatch(b"", between)
        assert entries_of(batches) == oplog_between(replica_set.uri, begin, first)


def test_a_tail_gives_control_back_and_closing_it_closes_the_servers_cursor(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        begin = source.newest()
        tail = source.tail(begin, await_ms=50, comment="close me")
        source.client.source_tail.c.insert_one({"_id": 1})
        batches = tail_until(source, tail, source.newest())
        while next(tail).raw:  # the server writes entries of its own at any time
            pass
        assert len(entries_of(batches)) >= 1

        def open_cursors() -> list[Any]:
            stages: list[dict[str, Any]] = [{"$currentOp": {"idleCursors": True}}]
            operations = source.client.admin.aggregate(stages)
            return [each for each in operations if each.get("cursor", {}).get("originatingCommand", {}).get("comment")]

        assert [each["cursor"]["originatingCommand"]["comment"] for each in open_cursors()] == ["close me"]
        tail.close()
        assert open_cursors() == []


def test_a_tail_may_begin_after_the_newest_entry(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        newest = source.newest()
        future = ClusterTime.of(newest.seconds + 2, 0)
        tail = source.tail(future, await_ms=100)
        assert next(tail) == OplogBatch(b"", future)
        source.client.source_tail.early.insert_one({"_id": "too early"})
        while source.newest() < future:
            time.sleep(0.2)
            source.client.source_tail.early.insert_one({})
        got = entries_of(tail_until(source, tail, source.newest()))
        assert entry_time(got[0]) > future
        assert got == oplog_between(replica_set.uri, future, entry_time(got[-1]))
        tail.close()


@pytest.mark.slow  # under streams: test_failures_live.py
@pytest.mark.parametrize("fault", [pytest.param("step_down", marks=pytest.mark.slow), "kill"])
def test_elections_and_dead_primaries_lose_and_repeat_nothing(
    fault: str, start_replica_set: Callable[..., ReplicaSet]
) -> None:
    replica_set, faults_made = start_replica_set(3), amount(1, 2)
    with closing(MongodSource(replica_set.uri, heartbeatFrequencyMS=500)) as source:
        begin = source.newest()
        batches: list[OplogBatch] = []
        end: list[ClusterTime] = []
        with Writer(replica_set.uri, "faults").running() as writer:

            def make_faults() -> None:
                for _ in range(faults_made):
                    writer.wait_for(100)
                    if fault == "step_down":
                        replica_set.step_down()
                    else:
                        number = replica_set.kill()
                        writer.wait_for(50)
                        replica_set.restart(number)
                writer.wait_for(100)
                end.append(writer.stop())

            faults = threading.Thread(target=make_faults)
            faults.start()
            for batch in source.tail(begin, await_ms=100):
                batches.append(batch)
                if end and batch.high_water >= end[0]:
                    break
                assert faults.is_alive() or end
            faults.join()
        assert entries_of(batches) == oplog_between(replica_set.uri, begin, batches[-1].high_water)
        assert writer.count >= 100 + 100 * faults_made
        repeated = entries_of(list(source.read(begin, end[0])))
        assert repeated == oplog_between(replica_set.uri, begin, end[0])


def test_a_killed_single_member_is_waited_for_and_named_in_the_log(
    start_replica_set: Callable[..., ReplicaSet], caplog: pytest.LogCaptureFixture
) -> None:
    replica_set = start_replica_set(1)
    with closing(MongodSource(replica_set.uri, serverSelectionTimeoutMS=500, heartbeatFrequencyMS=500)) as source:
        begin = source.newest()
        source.client.faults.c.insert_one({"_id": 1})
        tail = source.tail(begin, await_ms=50)
        before = tail_until(source, tail, source.newest())
        replica_set.kill(0)
        with caplog.at_level(logging.WARNING, logger="tailrace.source"):
            waiting = [next(tail) for _ in range(3)]
        assert [batch.raw for batch in waiting] == [b""] * 3
        assert replica_set.members[0].host in caplog.text
        assert "waiting for a member" in caplog.text
        replica_set.restart(0)
        with MongoClient[dict[str, Any]](replica_set.uri) as client:
            client.faults.c.insert_one({"_id": 2})
        after = tail_until(source, tail, source.newest())
        tail.close()
        got = entries_of(before + after)
        assert got == oplog_between(replica_set.uri, begin, entry_time(got[-1]))


def test_cut_connections_lose_and_repeat_nothing(replica_set: ReplicaSet) -> None:
    with TcpProxy(replica_set.members[0].host) as proxy:
        through = f"mongodb://{proxy.host}/?directConnection=true"
        with closing(MongodSource(through, heartbeatFrequencyMS=500, serverSelectionTimeoutMS=500)) as source:
            begin = source.newest()
            batches: list[OplogBatch] = []
            with Writer(replica_set.uri, "cuts").running() as writer:
                tail = source.tail(begin, await_ms=100)
                for _ in range(10):
                    goal = writer.count + 20
                    while writer.count < goal:
                        batches.append(next(tail))
                    proxy.cut()
                proxy.refuse()
                batches.append(next(tail))
                writer.wait_for(50)
                proxy.refuse(False)
                end = writer.stop()
            batches += tail_until(source, tail, end)
            tail.close()
            assert proxy.cuts > 10
            got = entries_of(batches)
            assert got == oplog_between(replica_set.uri, begin, entry_time(got[-1]))


def test_a_range_read_goes_on_after_a_cut_connection(replica_set: ReplicaSet) -> None:
    with (
        TcpProxy(replica_set.members[0].host) as proxy,
        closing(MongodSource(f"mongodb://{proxy.host}/?directConnection=true")) as source,
        MongoClient[dict[str, Any]](replica_set.uri) as client,
    ):
        begin = source.newest()
        for _ in range(8):
            client.cuts.bulk.insert_many([{"pad": "p" * 9000} for _ in range(500)])
        until = source.newest()
        batches = []
        for number, batch in enumerate(source.read(begin, until, batch_bytes_max=1 << 20)):
            batches.append(batch)
            if number in (1, 20):
                proxy.cut()
        assert proxy.cuts > 0
        assert batches[-1].high_water == until
        assert entries_of(batches) == oplog_between(replica_set.uri, begin, until)


def test_a_read_gives_up_when_nobody_answers_for_its_time(replica_set: ReplicaSet) -> None:
    with (
        TcpProxy(replica_set.members[0].host) as proxy,
        closing(
            MongodSource(
                f"mongodb://{proxy.host}/?directConnection=true", retry_seconds=4.0, serverSelectionTimeoutMS=2000
            )
        ) as source,
    ):
        begin = source.newest()
        proxy.refuse()
        with pytest.raises(SourceError, match=r"cannot reach 127\.0\.0\.1"):
            list(source.read(begin, begin.tick()))


def test_what_is_not_majority_committed_is_not_given_and_a_rollback_is_never_seen(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    replica_set = start_replica_set(3)
    primary = replica_set.primary
    others = [number for number in range(3) if number != primary]
    with closing(MongodSource(replica_set.uri, heartbeatFrequencyMS=500)) as source:
        begin = source.newest()
        source.client.rolled.c.insert_one({"_id": "kept"})
        tail = source.tail(begin, await_ms=200)
        batches = tail_until(source, tail, source.newest())
        # Killed and not frozen: a frozen member finds the entry in its socket when it goes on, and acknowledges it.
        for number in others:
            replica_set.kill(number)
        with MongoClient[dict[str, Any]](replica_set.members[primary].uri) as alone:
            alone.rolled.get_collection("c", write_concern=WriteConcern(1)).insert_one({"_id": "lost"})
            newest_here = alone.local["oplog.rs"].find(sort=[("$natural", -1)]).limit(1).next()
            assert newest_here["o"]["_id"] == "lost"
            assert source.newest() < ClusterTime.from_timestamp(newest_here["ts"])
        uncommitted = [next(tail) for _ in range(3)]
        assert b"lost" not in b"".join(batch.raw for batch in uncommitted)
        replica_set.kill(primary)
        for number in others:
            replica_set.restart(number)
        with MongoClient[dict[str, Any]](replica_set.uri) as client:
            majority = client.rolled.get_collection("c", write_concern=WriteConcern("majority"))
            majority.insert_one({"_id": "after"})
        replica_set.restart(primary)
        end = source.newest()
        got = entries_of(batches + uncommitted + tail_until(source, tail, end))
        tail.close()
        ids = [document["o"].get("_id") for document in map(bson.decode, got) if document["ns"] == "rolled.c"]
        assert ids == ["kept", "after"]
        assert got == oplog_between(replica_set.uri, begin, entry_time(got[-1]))
        with MongoClient[dict[str, Any]](replica_set.members[primary].uri) as back:
            # The member drops its connections while it rolls back.
            deadline, kept = time.monotonic() + _PATIENCE_S, []
            while kept != ["kept", "after"]:
                assert time.monotonic() < deadline, f"the member did not roll back: {kept}"
                with suppress(PyMongoError):
                    kept = [document["_id"] for document in back.rolled.c.find()]


@pytest.mark.slow  # the others need their heartbeat's ten seconds
def test_a_primary_that_hangs_is_left_for_the_next_one(start_replica_set: Callable[..., ReplicaSet]) -> None:
    replica_set = start_replica_set(3)
    timeouts = {"heartbeatFrequencyMS": 500, "connectTimeoutMS": 1000}
    with closing(MongodSource(replica_set.uri, **timeouts, socketTimeoutMS=2000)) as source:
        begin = source.newest()
        source.client.hangs.c.insert_one({"_id": 1})
        tail = source.tail(begin, await_ms=100)
        batches = tail_until(source, tail, source.newest())
        number = replica_set.primary
        with frozen(replica_set.members[number].pid):
            others = ",".join(
                member.host for member in replica_set.members if member.host not in (replica_set.members[number].host,)
            )
            with MongoClient[dict[str, Any]](f"mongodb://{others}/?replicaSet=rs0", **timeouts) as client:
                client.hangs.get_collection("c", write_concern=WriteConcern("majority")).insert_one({"_id": 2})
                newest = client.local["oplog.rs"].find(sort=[("$natural", -1)]).limit(1).next()["ts"]
            batches += tail_until(source, tail, ClusterTime.from_timestamp(newest))
        tail.close()
        replica_set.wait_until_ready()
        got = entries_of(batches)
        assert got == oplog_between(replica_set.uri, begin, entry_time(got[-1]))


def fill(client: MongoClient[Any], megabytes: int) -> None:
    for _ in range(megabytes):
        client.fill.c.insert_many([{"pad": os.urandom(50_000)} for _ in range(20)])


def wait_until_truncated(source: MongodSource, beyond: ClusterTime) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while source.oldest()[0] <= beyond:
        fill(source.client, 5)
        time.sleep(0.5)
        assert time.monotonic() < deadline, "the oplog is not truncated"


def test_a_truncated_oplog_is_history_lost_for_readers_new_and_old(
    start_replica_set: Callable[..., ReplicaSet], tmp_path: Path
) -> None:
    # The oplog is kept back to the last checkpoint, so checkpoints come every second.
    replica_set = start_replica_set(1, oplog_size_mb=8, arguments=("--syncdelay", "1"))
    with closing(MongodSource(replica_set.uri)) as source:
        first, complete = source.oldest()
        assert complete
        begin = source.newest()
        assert list(source.read(ClusterTime(0), begin))[-1].high_water == begin
        overtaken = source.tail(begin, await_ms=100, batch_size=1)
        source.client.lost.c.insert_one({"_id": 1})
        next(overtaken)
        small = source.newest()
        ranged = source.read(first, small, batch_bytes_max=1)
        next(ranged)
        wait_until_truncated(source, small)
        oldest, complete = source.oldest()
        assert oldest > small
        assert not complete
        with pytest.raises(ChangeStreamHistoryLost, match=r"286 ChangeStreamHistoryLost.*UTC \(\d+,\d+\)") as lost:
            tail_until(source, overtaken, source.newest())
        assert "Timestamp(" not in str(lost.value)
        archive = OplogWriter(source, tmp_path / "archive", begin=begin, until=source.newest(), images=False)
        with pytest.raises(ChangeStreamHistoryLost, match="archive into another directory"):
            archive.run()
        with pytest.raises(ChangeStreamHistoryLost):
            next(source.tail(begin))
        with pytest.raises(ChangeStreamHistoryLost):
            next(source.read(ClusterTime(0), source.newest()))
        assert next(source.read(ClusterTime(oldest - 1), source.newest())).raw
        assert source.entries([small, oldest])[0] is None


def test_another_oplog_under_the_same_address_is_not_taken_for_the_old_one(
    start_replica_set: Callable[..., ReplicaSet],
) -> None:
    first, second = start_replica_set(1), start_replica_set(1)
    with TcpProxy(first.members[0].host) as proxy:
        source = MongodSource(f"mongodb://{proxy.host}/?directConnection=true")
        source.client.foreign.c.insert_one({})
        tail = source.tail(ClusterTime(0), await_ms=50)
        tail_until(source, tail, source.newest())
        deadline = time.monotonic() + _PATIENCE_S
        with MongoClient[dict[str, Any]](second.uri) as client:
            while time.monotonic() < deadline and client.foreign.c.insert_one({}).acknowledged:
                newest = client.local["oplog.rs"].find(sort=[("$natural", -1)]).limit(1).next()["ts"]
                if ClusterTime.from_timestamp(newest) > source.newest():
                    break
        proxy.lead_to(second.members[0].host)
        proxy.cut()
        with pytest.raises(SourceError, match="does not hold the entry"):
            tail_until(source, tail, ClusterTime(source.newest() + (60 << 32)))
        source.close()


def test_entries_are_found_by_their_times(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        begin = source.newest()
        source.client.source_entries.c.insert_many([{"_id": number} for number in range(10)])
        all_entries = entries_of(list(source.read(begin, source.newest())))
        times = [entry_time(entry) for entry in all_entries]
        missing = ClusterTime.of(begin.seconds - 1, 4_000_000_000)
        asked = [times[3], missing, times[0], times[3]]
        assert source.entries(asked) == [all_entries[3], None, all_entries[0], all_entries[3]]


def test_pre_images_come_in_the_order_asked(replica_set: ReplicaSet) -> None:
    with closing(MongodSource(replica_set.uri)) as source:
        database = source.client.source_images
        database.create_collection("a", changeStreamPreAndPostImages={"enabled": True})
        database.create_collection("b", changeStreamPreAndPostImages={"enabled": True})
        for name in ("a", "b"):
            database[name].insert_many([{"_id": number, "of": name} for number in range(1200)])
            database[name].update_many({}, {"$set": {"x": 1}})
        stored = database.client.config["system.preimages"].find({"preImage.of": {"$in": ["a", "b"]}})
        expected = {
            PreImageKey(
                bytes(image["_id"]["nsUUID"]),
                ClusterTime.from_timestamp(image["_id"]["ts"]),
                image["_id"]["applyOpsIndex"],
            ): image["preImage"]
            for image in stored
        }
        assert len(expected) == 2400
        keys = [key for key, _ in sorted(expected.items(), key=lambda item: item[1]["_id"])]
        nowhere = PreImageKey(b"\x00" * 16, keys[0].cluster_time, 0)
        answers = source.pre_images([nowhere, *keys, nowhere])
        assert answers[0] is None
        assert answers[-1] is None
        assert [bson.decode(image) for image in answers[1:-1] if image] == [expected[key] for key in keys]
        assert source.pre_images([]) == []
        # As the kernel asks: the keys in columns.
        assert list(source.pre_images(PreImageKeys.of([nowhere, *keys, keys[5], nowhere]))) == [
            *answers[:-1],
            answers[6],
            None,
        ]


def test_a_read_waits_until_a_member_has_reached_the_time(replica_set: ReplicaSet) -> None:
    connection = Connection(replica_set.uri)
    with closing(connection.client):
        newest = MongodSource(connection.client).newest()
        concern = connection.majority("local", "oplog.rs", after=newest).read_concern.document
        assert concern == {"level": "majority", "afterClusterTime": newest.to_timestamp()}


@pytest.mark.parametrize("version", ["4.4.2", "5.0.4"])
def test_older_servers_are_read_the_same_way(version: str, start_replica_set: Callable[..., ReplicaSet]) -> None:
    replica_set = start_replica_set(1, version=version)
    with closing(MongodSource(replica_set.uri)) as source:
        assert source.server_version == version
        begin = source.newest()
        majority = WriteConcern("majority")  # 4.4 does not wait for it by default
        source.client.old.get_collection("c", write_concern=majority).insert_many([{"_id": n} for n in range(200)])
        until = source.newest()
        expected = oplog_between(replica_set.uri, begin, until)
        assert len(expected) >= 200
        assert entries_of(list(source.read(begin, until))) == expected
        with closing(source.tail(begin, await_ms=50)) as tail:  # type: ignore[type-var]
            tailed = entries_of(tail_until(source, tail, until))
        # A busy machine lets the server write an entry of its own (its keys) after ours into the same reply.
        assert [entry for entry in tailed if entry_time(entry) <= until] == expected
        assert source.entries([entry_time(expected[5])]) == [expected[5]]
        lookup = DocumentLookup("old", "c", bson.encode({"_id": 7}), until, None)
        assert source.documents([lookup]) == [bson.encode({"_id": 7})]
        assert source.pre_images([PreImageKey(b"\x01" * 16, until, 0)]) == [None]
