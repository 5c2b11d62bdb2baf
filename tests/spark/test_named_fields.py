"""Users' documents with fields named like an entry's, a command's, an event's, a token's or our columns', through the
stream, the batch read and the lake: they give the server's bytes, and limits work.

No test had caught that an ordinary document could stop a stream for good or switch its limit off: no document of the
Spark tests had such a field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.lake import verify
from tailrace.lake.spark.query.options import COLUMNS
from tailrace.lake.spark.store.stream import write_stream
from tests.differential import named_fields
from tests.differential.test_named_fields_live import PIPELINES
from tests.differential.wire import Wire
from tests.server_in_use import IN_BETWEEN
from tests.spark.streams import available_now, newest, server_events

pytestmark = [pytest.mark.spark, pytest.mark.mongod]

NAME = "named"
LIMIT = 300
Span = tuple[str, ClusterTime, ClusterTime]


# For 4.4, tests/differential/test_named_fields_live.py covers these without Spark.
@pytest.fixture(scope="module", params=["6.0.27", IN_BETWEEN, pytest.param("4.4.2", marks=pytest.mark.slow)])
def span(request: pytest.FixtureRequest) -> Iterator[Span]:
    """A server's URI, and two cluster times with such documents between them."""
    with ReplicaSet(1, version=request.param) as running:
        start = newest(running.uri)
        with Wire.to(running.uri) as wire:
            named_fields.write(wire, NAME, request.param)
        yield running.uri, start, newest(running.uri)


def _options(span: Span, **more: str) -> dict[str, str]:
    uri, start, _ = span
    first = start.tick()
    return {
        "uri": uri,
        "database": NAME,
        "startAtOperationTime": f"{first.seconds},{first.increment}",
        "columns": ",".join(COLUMNS),
        "partitions": "3",
        **more,
    }


def test_a_stream_gives_the_servers_bytes_and_its_limit_holds(spark: SparkSession, span: Span, tmp_path: Path) -> None:
    batches = available_now(spark, _options(span, maxEventsPerTrigger=str(LIMIT)), tmp_path / "checkpoint")
    assert batches.events == server_events(span[0], (NAME, None), *span[1:])
    assert max(batches.sizes) <= LIMIT
    assert len(batches.sizes) > 3


@pytest.mark.parametrize("form", ["variant", "json", "bson"])
def test_a_batch_gives_them_in_every_form(spark: SparkSession, span: Span, form: str) -> None:
    """The pipeline moves users' fields to the places of the event's own, whatever their types."""
    stages = PIPELINES["merged over"]
    more = {"pipeline": json.dumps(stages), "endAtOperationTime": f"{span[2].seconds},{span[2].increment}"}
    frame = spark.read.format("tailrace").options(**_options(span, documents=form, **more)).load()
    found = [bytes(row.event) for row in frame.collect()]
    assert found == server_events(span[0], (NAME, None), *span[1:], pipeline=stages)
    assert found


@pytest.mark.slow  # the stream, the batch: the tests above; a lake of a stream: test_lake.py
def test_a_lake_holds_the_servers_bytes(spark: SparkSession, span: Span, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    options: dict[str, Any] = _options(span, maxEventsPerTrigger=str(LIMIT))
    query = write_stream(spark, options, lake, available_now=True)
    try:
        query.awaitTermination()
    finally:
        query.stop()
    assert list(lake_events(lake)) == server_events(span[0], (NAME, None), *span[1:])
    assert verify(lake).problems == []
