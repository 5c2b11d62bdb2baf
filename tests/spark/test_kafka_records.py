"""``kafka_records``: the columns for Spark's sink for Kafka hold what a listener publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pyspark.sql import SparkSession

from tailrace.consumer.messages import ChangeMessages, DebeziumMessages
from tailrace.consumer.messages.schema_registry import AvroConverter
from tailrace.embedded import ReplicaSet
from tailrace.errors import UsageError
from tailrace.spark import kafka_records
from tests.consumer.fake_registry import fake_registry
from tests.spark.lake_driving import options_for
from tests.spark.streams import newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]


@dataclass
class Event:
    raw: bytes


def test_records_are_those_that_a_listener_publishes(spark: SparkSession, replica_set: ReplicaSet) -> None:
    database = "kafka_records"
    start = newest(replica_set.uri)
    with MongoClient[dict[str, Any]](replica_set.uri) as client:
        orders = client[database]["orders"]
        orders.insert_many([{"_id": number, "text": "é" * number} for number in range(30)])
        orders.update_many({"_id": {"$lt": 10}}, {"$set": {"a.b": [1, {"c": None}]}})
        orders.delete_many({"_id": {"$gte": 20}})
    events = server_events(replica_set.uri, (database, "orders"), start, newest(replica_set.uri))
    assert len(events) == 50
    options = options_for(replica_set.uri, database, start, columns="token,event")
    frame = spark.read.format("tailrace").options(**options).load()
    with fake_registry() as registry:
        makers: list[Any] = [
            DebeziumMessages("cdc", clock=int),
            DebeziumMessages("cdc", clock=int, converter=AvroConverter(registry.url), cloud_events="binary"),
            ChangeMessages("orders", cloud_events="binary"),
        ]
        for make in makers:
            wanted = []
            for event in events:
                made = make(Event(RawBSONDocument(event).raw if isinstance(event, bytes) else event.raw))
                wanted += [made] if not isinstance(made, tuple) else made
            rows = kafka_records(frame, make).collect()
            found = [
                (row.topic, row.key, row.value, [(one.key, bytes(one.value)) for one in row.headers]) for row in rows
            ]
            assert found == [(one.topic, one.kafka_key(), one.body, one.kafka_headers()) for one in wanted]
    with pytest.raises(UsageError, match="column 'event'"):
        kafka_records(frame.select("token"), makers[0])
