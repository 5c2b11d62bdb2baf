"""In front of a sharded cluster: one order over all shards, as ``tailrace.connect`` gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pymongo
import pytest
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo.errors import OperationFailure

import tailrace
from tailrace.embedded import ShardedCluster
from tailrace.errors import SourceError
from tests.gateway.fake_mongos import fake_mongos
from tests.gateway.gateways import RunningGateway, running_gateway
from tests.sharded.waiting import take
from tests.sharded.workload import REGIONS, spread

pytestmark = pytest.mark.mongod

DATABASE = "gateway"
RAW: Any = CodecOptions(document_class=RawBSONDocument)


@pytest.fixture(scope="module")
def mongos(sharded_cluster: ShardedCluster) -> Iterator[str]:
    spread(sharded_cluster, DATABASE)
    host, _, port = urlsplit(sharded_cluster.uri).netloc.split(",")[0].partition(":")
    with fake_mongos(host, int(port)) as uri:
        yield uri


@pytest.fixture(scope="module")
def running(mongos: str) -> Iterator[RunningGateway]:
    with running_gateway(mongos) as made:
        yield made


def insert(cluster: ShardedCluster, first: int, count: int) -> None:
    for number in range(first, first + count):
        region = REGIONS[number % len(REGIONS)]
        cluster.router.insert_one(f"{DATABASE}.orders", {"_id": number, "region": region})


def test_events_of_all_shards_come_in_one_order(sharded_cluster: ShardedCluster, running: RunningGateway) -> None:
    with (
        pymongo.MongoClient[dict[str, Any]](running.uri()) as client,
        tailrace.connect(sharded_cluster.uri) as other,
    ):
        assert client.is_mongos
        with (
            client[DATABASE].with_options(RAW).watch() as whole,
            client[DATABASE].orders.with_options(RAW).watch() as one,
            client[DATABASE].nothing.watch(max_await_time_ms=10) as none,
        ):
            insert(sharded_cluster, 0, 24)
            events, same = ([bytes(event.raw) for event in take(stream, 24)] for stream in (whole, one))
            token = one.resume_token
            assert none.try_next() is None
        assert same == events
        first = RawBSONDocument(events[0])["_id"]
        with other[DATABASE].watch(resume_after=first, document_class=RawBSONDocument) as merged:
            assert [bytes(event.raw) for event in take(merged, 23)] == events[1:]
        # A token of one is valid in the other.
        insert(sharded_cluster, 100, 6)
        with client[DATABASE].orders.watch(resume_after=token) as resumed:
            assert [event["documentKey"]["_id"] for event in take(resumed, 6)] == list(range(100, 106))


def test_images_are_looked_up_where_they_are(sharded_cluster: ShardedCluster, running: RunningGateway) -> None:
    with pymongo.MongoClient[dict[str, Any]](running.uri()) as client:
        insert(sharded_cluster, 200, 6)
        with client[DATABASE].orders.watch(full_document="updateLookup") as stream:
            for number in range(200, 206):
                key = {"region": REGIONS[number % len(REGIONS)], "_id": number}
                sharded_cluster.router.update_one(f"{DATABASE}.orders", key, {"$set": {"paid": True}})
            assert all(event["fullDocument"]["paid"] for event in take(stream, 6))


def test_errors_are_a_mongos_s(running: RunningGateway) -> None:
    with pymongo.MongoClient[dict[str, Any]](running.uri()) as client:
        with pytest.raises(OperationFailure) as caught:
            client[DATABASE].orders.watch([{"$nothing": {}}])
        assert caught.value.code == 40324


def test_a_config_server_is_refused_at_the_start(sharded_cluster: ShardedCluster) -> None:
    """It was accepted, since its shards can be found, and clients' writes went to the config server. No test had put a
    gateway in front of one."""
    with (
        pytest.raises(SourceError, match="config server of a cluster") as refused,
        running_gateway(sharded_cluster.uri),
    ):
        pass
    assert "mongos" in str(refused.value.hint)
