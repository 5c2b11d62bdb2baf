"""Streams of a test, run to their end, and what the server's own stream gives over the same span."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo
from pyspark.sql import DataFrame, SparkSession

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tests.differential import native
from tests.differential.wire import Wire
from tests.golden.recording import token_time

#: How long a query may take that ends by itself. The first one of a session takes two minutes on a loaded machine.
PATIENCE_S = 600


@dataclass
class Batches:
    """The micro-batches of a query: their numbers, and their rows of (partition, event), in the order they came."""

    ids: list[int] = field(default_factory=list)
    rows: list[list[tuple[int, bytes]]] = field(default_factory=list)

    @property
    def events(self) -> list[bytes]:
        return [event for rows in self.rows for _, event in rows]

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.rows if rows]

    def take(self, frame: DataFrame, batch_id: int) -> None:
        rows = frame.selectExpr("spark_partition_id() as part", "event").collect()
        self.ids.append(batch_id)
        self.rows.append([(row.part, bytes(row.event)) for row in rows])


def available_now(
    spark: SparkSession, options: Mapping[str, str], checkpoint: Path, *, batches: Batches | None = None
) -> Batches:
    """Run a stream over the existing events, and stop."""
    batches = Batches() if batches is None else batches
    query = (
        spark.readStream.format("tailrace")
        .options(**{"columns": "event", **options})
        .load()
        .writeStream.foreachBatch(batches.take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(PATIENCE_S), "the stream does not end"
    finally:
        query.stop()
    return batches


def offsets(checkpoint: Path) -> list[dict[str, Any]]:
    """The source's offsets in a checkpoint, by micro-batch."""
    files = sorted((int(path.name), path) for path in (checkpoint / "offsets").iterdir() if path.name.isdecimal())
    return [json.loads(path.read_text().splitlines()[-1]) for _, path in files]


def newest(uri: str) -> ClusterTime:
    """The newest majority-committed cluster time."""
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        reply = client.admin.command("appendOplogNote", 1, data={"test": 1}, writeConcern={"w": "majority"})
        return ClusterTime.from_timestamp(reply["operationTime"])


def server_events(
    uri: str,
    scope: tuple[str, str | None],
    after: ClusterTime,
    until: ClusterTime,
    *,
    stage: Mapping[str, Any] | None = None,
    pipeline: tuple[Any, ...] = (),
) -> list[bytes]:
    """The raw events of the server's own stream with ``after`` < clusterTime <= ``until``."""
    options = {"startAtOperationTime": after.tick().to_timestamp(), **(stage or {})}
    with Wire.to(uri) as wire:
        stream = native.read(wire, *native.aggregate(scope, options, pipeline=pipeline), until)
    assert stream.error is None, stream.error
    return [event for event in stream.events if _time_of(event) <= until]


def _time_of(event: bytes) -> ClusterTime:
    # By the token, since a user's stage may have put anything under "clusterTime".
    token = raw_bson.find(event, b"_id")
    assert token is not None
    return token_time(raw_bson.value(event, token))
