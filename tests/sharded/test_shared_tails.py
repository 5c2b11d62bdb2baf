"""Several streams of one client over a cluster share the read of each shard's oplog, and give what each gives alone."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bson.raw_bson import RawBSONDocument

import tailrace
from tailrace.embedded import ShardedCluster
from tests.sharded.waiting import PATIENCE_S, take, wait_for
from tests.sharded.workload import REGIONS, Writer, spread

pytestmark = pytest.mark.mongod

DATABASE = "together"
SCOPES: tuple[tuple[str, ...], ...] = ((DATABASE,), (DATABASE, "orders"), (DATABASE, "items"), (DATABASE, "none"), ())
_LAST = -1


def target_of(client: Any, scope: tuple[str, ...]) -> Any:
    for name in scope:
        client = client[name]
    return client


def events_of(stream: Any, until: Any) -> list[bytes]:
    """The raw events of the database up to the time that ``until`` gives, once it does."""
    events: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.closing(stream):
        while time.monotonic() < deadline:
            event = stream.try_next()
            if event is not None:
                deadline = time.monotonic() + PATIENCE_S
            if event is None:
                if until() is not None and str(stream.resume_token["_data"]) >= until():
                    return events
            elif event["ns"]["db"] == DATABASE:
                events.append(bytes(event.raw))
    raise AssertionError(f"{len(events)} events and no end")


def test_streams_over_a_cluster_read_together_and_give_what_each_gives_alone(sharded_cluster: ShardedCluster) -> None:
    options: dict[str, Any] = {"document_class": RawBSONDocument, "max_await_time_ms": 100}
    spread(sharded_cluster, DATABASE)
    with tailrace.connect(sharded_cluster.uri) as client, tailrace.connect(sharded_cluster.uri) as other:
        start = {"start_at_operation_time": client._deployment.operation_time(client).tick().to_timestamp()}
        end: list[str] = []
        with ThreadPoolExecutor(len(SCOPES)) as pool:
            streams = [target_of(client, scope).watch(**start, **options) for scope in SCOPES]
            outcomes = [pool.submit(events_of, stream, lambda: end[0] if end else None) for stream in streams]
            # Three shards, and the config server's oplog, for each stream.
            wait_for(lambda: client.tail_statistics.joined == 4 * len(SCOPES), "the streams do not read together")
            writers = [
                Writer(sharded_cluster.router, f"{DATABASE}.orders", region, second, 1000 * (place + 1))
                for place, (region, second) in enumerate(zip(REGIONS[::2], REGIONS[1::2], strict=True))
            ]
            before = client.tail_statistics
            for writer in writers:
                writer.start()
            wait_for(lambda: sum(len(writer.written) for writer in writers) > 60, "the writers are stuck")
            for writer in writers:
                writer.end()
            after = client.tail_statistics
            time_ = client._deployment.operation_time(client)
            end.append(
                tailrace.core.event.resume_token.ResumeToken.high_water_mark(time_, version=1).to_document()["_data"]
            )
            found = [outcome.result() for outcome in outcomes]
        written = sum(len(writer.written) for writer in writers)
        assert len(found[0]) == len(found[1]) == len(found[4]) == written > 30
        assert found[2] == found[3] == []
        for scope, events in zip(SCOPES[:2], found[:2], strict=True):
            with target_of(other, scope).watch(**start, **options) as alone:
                assert [bytes(event.raw) for event in take(alone, written)] == events
        assert other.tail_statistics.joined == 0
        assert after.entries - before.entries < 4 * written, "each shard is read once, not once for each stream"
        assert after.trouble is None
