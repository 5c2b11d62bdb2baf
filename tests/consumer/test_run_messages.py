"""The section ``messages`` of a pipeline file, without the lake beside it: positions, leases, masks, crashes. It is
published to the brokers inside Kafka's client, and in slow tests to Tansu. ``tests/spark/test_run_in_session.py`` has
the whole command."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from pymongo import MongoClient

from tailrace.cli.run_messages import messaging
from tailrace.consumer import MongoLeaseStore
from tailrace.embedded import ReplicaSet
from tailrace.errors import SinkError, TailraceError
from tailrace.lake.spark.store.pipeline_file import load
from tailrace.read.source.mongod import MongodSource
from tests.consumer.brokers import HangingBrokers, KafkaBrokers
from tests.consumer.shops import until
from tests.consumer.test_brokers import stored_in_kafka
from tests.consumer.test_outages import check_order, number_of, write
from tests.forked import Forked
from tests.masks.random_updates import SECRET

pytestmark = pytest.mark.mongod
ROOT = Path(__file__).parents[2]


@pytest.fixture
def shop(replica_set: ReplicaSet, request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"runmessages_{abs(hash(request.node.nodeid)) % 10**9}"
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        yield client[name]
        client.drop_database(name)


#: With Tansu each look into a topic takes 23 s.
@pytest.fixture(params=["mock", pytest.param("tansu", marks=pytest.mark.slow)])
def kafka(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KafkaBrokers | HangingBrokers]:
    brokers = KafkaBrokers("orders") if request.param == "mock" else HangingBrokers("orders", tmp_path / "tansu")
    yield brokers
    brokers.close()


class PipelineFolder:
    """A folder with a pipeline file; ``more`` are further keys of its entry ``orders``."""

    def __init__(self, folder: Path, uri: str, shop: Any, servers: str) -> None:
        self.folder, self.uri, self.shop, self.servers = folder, uri, shop, servers
        self.running: list[Forked] = []

    def written(self, more: str = "", sections: str = "", form: str = "topic: orders") -> Path:
        path = self.folder / "pipeline.yaml"
        path.write_text(
            f"source: {{uri: '{self.uri}'}}\nlake: {{path: lake}}\n"
            f"messages:\n  orders: {{to: 'kafka://{self.servers}', collections: {self.shop.name}.orders, {form}, "
            f"leases: {self.shop.name}.leases, startingFrom: oldest, leaseTime: 2 seconds{more}}}\n{sections}"
        )
        return path

    def to_present(self, path: Path) -> None:
        """As ``tailrace run --available-now``."""
        settings = load(path)
        with messaging(settings.source["uri"], settings.messages, threading.Event(), once=True):
            pass

    def started(self, path: Path, number: int = 0) -> Forked:
        said = self.folder / f"said-{number}"
        said.touch()
        self.running.append(Forked("tests.consumer.messages_process", [str(path)], cwd=ROOT, errors=said))
        return self.running[-1]

    @property
    def position(self) -> Any:
        lease = self.shop.leases.find_one({"_id": "orders"})
        return None if lease is None else lease.get("position")


@pytest.fixture
def pipeline(
    tmp_path: Path, replica_set: ReplicaSet, shop: Any, kafka: KafkaBrokers | HangingBrokers
) -> Iterator[PipelineFolder]:
    made = PipelineFolder(tmp_path, replica_set.uri, shop, kafka.servers)
    yield made
    for process in made.running:
        process.kill()
        process.wait()


def lose_history(patched: pytest.MonkeyPatch) -> None:
    """Let the oplog look as if its first entry, that of a new replica set, had been removed."""
    oldest = MongodSource.oldest
    patched.setattr(MongodSource, "oldest", lambda self: (oldest(self)[0], False))


def ordered(found: list[Any]) -> list[Any]:
    """All of one key are in one partition, where offsets say in which order they came."""
    return sorted(found, key=lambda one: one.offset())


def test_a_run_to_the_present_publishes_what_is_there_and_the_next_one_what_is_new(
    pipeline: PipelineFolder, shop: Any, kafka: KafkaBrokers | HangingBrokers
) -> None:
    path = pipeline.written(", commitEvery: 7")
    write(shop, range(50))
    pipeline.to_present(path)
    first = pipeline.position
    write(shop, range(50, 80))
    pipeline.to_present(path)
    found = stored_in_kafka(kafka.servers, "orders", 80)
    check_order([number_of(one.value()) for one in ordered(found)], 80)
    assert pipeline.position["token"]["_data"] > first["token"]["_data"]
    # Nothing new came: the position moves forward all the same, so that it does not fall off the oplog.
    shop.others.insert_one({})
    second = pipeline.position
    pipeline.to_present(path)
    assert pipeline.position["token"]["_data"] > second["token"]["_data"]
    lease = MongoLeaseStore(shop.leases).read("orders")
    assert lease is not None
    assert lease.owner is None, "it is given back"


def test_lanes_and_a_snapshot_reach_the_present_too(
    pipeline: PipelineFolder, shop: Any, kafka: KafkaBrokers | HangingBrokers
) -> None:
    write(shop, range(7))
    path = pipeline.written(", partitions: 2", form="topic: orders").read_text()
    (pipeline.folder / "pipeline.yaml").write_text(path.replace("startingFrom: oldest", "startingFrom: snapshot"))
    pipeline.to_present(pipeline.folder / "pipeline.yaml")
    found = stored_in_kafka(kafka.servers, "orders", 7)
    assert [json.loads(one.value())["operationType"] for one in found] == ["snapshot"] * 7
    write(shop, range(7, 20))
    pipeline.to_present(pipeline.folder / "pipeline.yaml")
    found += stored_in_kafka(kafka.servers, "orders", 13)  # its group goes on where it was
    check_order([number_of(one.value()) for one in ordered(found)], 20)


def test_masks_of_the_file_hold_for_messages_in_each_format(
    pipeline: PipelineFolder, shop: Any, kafka: KafkaBrokers | HangingBrokers
) -> None:
    (pipeline.folder / "mask.key").write_bytes(SECRET)
    masks = f"masks: {{key: {{file: mask.key}}, rules: {{'{shop.name}.*': {{email: hash, notes: drop}}}}}}\n"
    shop.orders.insert_one({"_id": 1, "email": "MaRkEr-1", "notes": "MaRkEr-2", "total": 5})
    shop.orders.update_one({"_id": 1}, {"$set": {"email": "MaRkEr-3"}})
    forms = ("topic: orders", "topic: orders, format: bson", "topicPrefix: orders, format: debezium")
    for number, form in enumerate(forms):
        pipeline.to_present(pipeline.written(f", resource: r{number}, fullDocument: updateLookup", masks, form))
    found = stored_in_kafka(kafka.servers, "orders", 4)
    found += stored_in_kafka(kafka.servers, f"orders.{shop.name}.orders", 2)
    assert len(found) == 6
    for one in found:
        everything = one.value() + repr(one.headers()).encode() + one.key()
        assert b"MaRkEr" not in everything
        assert b"email" in everything, "it is hashed, not left out"
        assert b"notes" not in everything


def test_a_stage_that_moves_masked_values_is_refused(pipeline: PipelineFolder, shop: Any) -> None:
    masks = f"masks: {{rules: {{'{shop.name}.*': {{email: drop}}}}}}\n"
    with pytest.raises(TailraceError, match=r"the stage \$set may move values"):
        load(pipeline.written(", pipeline: [{$set: {other: $fullDocument.email}}]", masks))


def test_killed_again_and_again_every_change_is_there_in_order_and_positions_never_go_back(
    pipeline: PipelineFolder, shop: Any, kafka: KafkaBrokers | HangingBrokers
) -> None:
    path = pipeline.written(", commitEvery: 5")
    draw, positions, kills = random.Random(7), [], 0
    write(shop, range(40))
    count = 40
    while kills < 3:
        process = pipeline.started(path, kills)
        before = pipeline.position
        until(lambda at=before, its=process: its.poll() is not None or pipeline.position not in (None, at))
        assert process.poll() is None, (pipeline.folder / f"said-{kills}").read_text()
        write(shop, range(count, count + 40))
        count += 40
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
        kills += 1
        positions.append(pipeline.position)
    pipeline.to_present(path)
    positions.append(pipeline.position)
    times = [one["token"]["_data"] for one in positions if one.get("token")]
    assert times == sorted(times)
    found = stored_in_kafka(kafka.servers, "orders", count)
    while missing := count - len({number_of(one.value()) for one in found}):  # what was sent twice arrived twice
        more = stored_in_kafka(kafka.servers, "orders", missing, 60)
        assert more, f"{missing} are missing"
        found += more
    check_order([number_of(one.value()) for one in ordered(found)], count)


def test_a_second_run_stands_by_and_takes_over_when_the_first_one_stops(
    pipeline: PipelineFolder, shop: Any, kafka: KafkaBrokers | HangingBrokers
) -> None:
    path = pipeline.written()
    write(shop, range(5))
    first = pipeline.started(path, 1)
    until(lambda: pipeline.position is not None and "token" in pipeline.position)
    second = pipeline.started(path, 2)
    said = "messages.orders: another process holds the lease 'orders': this run stands by"
    until(lambda: said in (pipeline.folder / "said-2").read_text())
    assert said not in (pipeline.folder / "said-1").read_text()
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 0
    write(shop, range(5, 10))
    found = stored_in_kafka(kafka.servers, "orders", 10)
    check_order([number_of(one.value()) for one in ordered(found)], 10)
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 0


def test_what_ends_one_ends_the_run_with_a_sentence_of_the_file(
    pipeline: PipelineFolder, shop: Any, kafka: KafkaBrokers | HangingBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oplog that no longer reaches, another deployment, a broker that is away."""
    path = pipeline.written(", brokerTimeout: 1 second, config: {message.timeout.ms: 300}")
    write(shop, range(3))
    pipeline.to_present(path)
    good = shop.leases.find_one({"_id": "orders"})["position"]

    def fails(match: str) -> SinkError:
        settings, stop = load(path), threading.Event()
        with (
            pytest.raises(SinkError, match=match) as caught,
            messaging(settings.source["uri"], settings.messages, stop, once=False),
        ):
            assert stop.wait(300), "the run is told"
        return caught.value

    def set_position(position: Any) -> None:
        shop.leases.update_one({"_id": "orders"}, {"$set": {"position": position}})

    set_position({"at": bson.Timestamp(1_000_000_000, 1)})
    with monkeypatch.context() as patched:
        lose_history(patched)
        lost = fails("^messages.orders: ")
    assert (lost.code, str(lost.hint).startswith("onHistoryLost: snapshot publishes the documents again")) == (
        286,
        True,
    )
    set_position({**good, "deployment": "rs0/0123456789abcdef01234567"})
    assert "resource of its own" in str(fails("^messages.orders: the committed position is of another deploy").hint)
    set_position(good)
    kafka.stop()
    write(shop, range(3, 6))
    fails("^messages.orders: Kafka at .* did not take a message for the topic 'orders'")
    assert pipeline.position["token"]["_data"] == good["token"]["_data"], "nothing is committed that is not stored"
    kafka.start()
    pipeline.to_present(path)
    found = stored_in_kafka(kafka.servers, "orders", 6)
    check_order([number_of(one.value()) for one in ordered(found)], 6)
