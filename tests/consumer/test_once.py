"""Effects once for each change, though processes are killed between the effect and the commit of its position: with
marks in MongoDB, and with consumers of Kafka, which keeps what is published twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pymongo import MongoClient

from tailrace.act.consumer.messages.kafka import ID_HEADER
from tailrace.act.consumer.rules.errors import HandlerNotRun
from tailrace.consumer import SeenChanges
from tailrace.consumer.messages.kafka import SeenRecords
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tests.amounts import amount
from tests.consumer.brokers import KafkaBrokers
from tests.forked import Forked
from tests.pace import BETWEEN_LOOKS_S

pytestmark = pytest.mark.mongod
ROOT = Path(__file__).parents[2]
COUNT = amount(12, 60)
#: With fewer, a relay has them all in one batch, and is never killed between two of them.
RELAYED = amount(30, 60)


@pytest.fixture
def database(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    """While the server ends transactions after two seconds: one that was killed leaves its own open, and the next one
    waits for its end, which took a minute and a third of a processor."""
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        database = client[f"once_{abs(hash(request.node.nodeid)) % 10**9}"]
        before = client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=2)["was"]
        try:
            yield database
        finally:
            client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=before)
            client.drop_database(database.name)


def killed_until(holds: Callable[[], Any], *arguments: str) -> int:
    """Run the process, start it again whenever it was killed, and end it when all is done. Returns how often it was
    killed."""
    kills, end = 0, time.monotonic() + 300
    while True:
        process = Forked("tests.consumer.once_process", [*arguments, str(kills)], cwd=ROOT)
        while process.poll() is None:
            assert time.monotonic() < end, "it has not come so far"
            time.sleep(BETWEEN_LOOKS_S)
            if holds():
                process.kill()
                process.wait()
                return kills
        kills += 1


def all_committed(database: Any) -> Callable[[], bool]:
    """Whether the position is after a last insert, which is made after all the others."""
    last = database.client.admin.command("ping")["operationTime"]

    def holds() -> bool:
        lease = database["leases"].find_one({"_id": "once"})
        token = ((lease or {}).get("position") or {}).get("token")
        return token is not None and int(token["_data"][2:10], 16) * 2**32 + int(token["_data"][10:18], 16) >= (
            last.time * 2**32 + last.inc
        )

    return holds


def test_each_effect_in_mongodb_is_there_once_though_processes_are_killed(
    replica_set: ReplicaSet, database: Any
) -> None:
    database["orders"].insert_many([{"_id": number} for number in range(COUNT)])
    kills = killed_until(all_committed(database), "count", replica_set.uri, database.name, "")
    assert kills > 3, "nothing was shown"
    found = {one["_id"]: one["times"] for one in database["targets"].find()}
    assert found == dict.fromkeys(range(COUNT), 1)
    assert database["marks"].count_documents({"_id.name": "count", "version": {"$gte": 1}}) == COUNT


def polled(consumer: Consumer, enough: Callable[[list[Any]], bool]) -> Iterator[Any]:
    found: list[Any] = []
    end = time.monotonic() + 300
    while not enough(found):
        assert time.monotonic() < end, f"{len(found)} records have come"
        record = consumer.poll(0.2)
        if record is not None and record.error() is None:
            found.append(record)
            yield record


def identity(record: Any) -> str:
    return dict(record.headers())[ID_HEADER].decode()


def test_what_a_killed_relay_published_twice_is_acted_on_once(replica_set: ReplicaSet, database: Any) -> None:
    brokers = KafkaBrokers("orders")
    try:
        database["orders"].insert_many([{"_id": number} for number in range(RELAYED)])
        killed_until(all_committed(database), "relay", replica_set.uri, database.name, brokers.servers)
        settings = {"bootstrap.servers": brokers.servers, "group.id": "g", "auto.offset.reset": "earliest"}
        settings |= {"enable.auto.commit": False}
        plain = Consumer({**settings, "group.id": "all"})
        ends = {}
        for partition in range(4):
            _, ends[partition] = plain.get_watermark_offsets(TopicPartition("orders", partition), timeout=60)
        plain.close()
        total = sum(ends.values())
        assert total > RELAYED, "no relay was killed between the acknowledgement and the commit"
        acted: list[str] = []
        marks = SeenChanges(database["marks"], "consumer")
        for share in (total // 3, 2 * total // 3, total):  # the consumer is started anew, with nothing in its memory
            seen = SeenRecords()
            consumer = Consumer(settings)
            consumer.subscribe(["orders"], on_assign=seen.assigned)
            for record in polled(consumer, lambda found, share=share: at_ends(found, ends) or len(found) >= share):
                if seen.is_new(record):
                    acted.append(identity(record))
                    marks.once(identity(record), lambda session: database["acted"].insert_one({}, session=session))
                    consumer.commit(record, asynchronous=False)
            consumer.close()
        assert len(acted) == len(set(acted)) == RELAYED
        assert database["acted"].count_documents({}) == RELAYED
    finally:
        brokers.close()


def at_ends(found: list[Any], ends: dict[int, int]) -> bool:
    last = {record.partition(): record.offset() + 1 for record in found}
    return all(last.get(partition, 0) == end for partition, end in ends.items() if end)


def test_a_consumer_that_ends_before_its_commit_acts_once_with_a_mark(database: Any) -> None:
    marks = SeenChanges(database["marks"], "bills")

    def bill(session: Any) -> None:
        database["bills"].insert_one({}, session=session)

    assert [marks.once(one, bill) for one in ("82AA", "82AA", "82AB", "82AA")] == [True, False, True, False]
    assert SeenChanges(database["marks"], "other").once("82AA", bill), "each purpose has its own marks"
    assert database["bills"].count_documents({}) == 3


def test_an_effect_that_fails_leaves_no_mark(database: Any) -> None:
    marks = SeenChanges(database["marks"], "bills")

    def fails(session: Any) -> None:
        database["bills"].insert_one({}, session=session)
        raise ValueError("no")

    async def later(session: Any) -> None:
        database["bills"].insert_one({}, session=session)

    with pytest.raises(ValueError, match="no"):
        marks.once("82AA", fails)
    with pytest.raises(HandlerNotRun, match="the effect returned a coroutine"):
        marks.once("82AA", later)
    assert database["bills"].count_documents({}) == database["marks"].count_documents({}) == 0


def test_marks_that_are_kept_for_another_time_are_refused(database: Any) -> None:
    SeenChanges(database["marks"], "a", seconds=60).once("82AA", lambda session: None)
    with pytest.raises(UsageError, match=r"marks are kept for a different time than 120 s"):
        SeenChanges(database["marks"], "a", seconds=120).once("82AB", lambda session: None)
    with pytest.raises(UsageError, match="seconds must be a whole number above 0"):
        SeenChanges(database["marks"], "a", seconds=0)
