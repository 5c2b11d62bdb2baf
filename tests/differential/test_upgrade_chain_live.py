"""One replica set from 5.0 through 6.0 to 7.0, member by member, while everything that reads it goes on: streams, exact
images, a listener, tables, an archive, the gateway, and `tailrace run` with Spark. Each step had been tried by itself,
without a lake and on data that no earlier version had written."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

import tailrace
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tailrace.read.source.mongod import MongodSource
from tests.differential.test_upgrades_live import LAST, Everything, check_archive, check_streams, steps, upgrade
from tests.differential.upgrading import RAW, Writer, key_of
from tests.gateway.gateways import running_gateway
from tests.spark.running_lake import RunningLake
from tests.tables.equality import assert_equal, in_collection

pytestmark = [pytest.mark.mongod, pytest.mark.spark, pytest.mark.slow]

VERSIONS = ["5.0.4", "6.0.27", "7.0.28"]


def test_from_5_0_over_6_0_to_7_0_nothing_is_lost_or_given_twice(tmp_path: Path) -> None:
    with ReplicaSet(3, version=VERSIONS[0]) as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.orders.insert_one({"_id": -1, "n": 0})
        begin = MongodSource(deployment.uri).newest()
        lake = RunningLake(deployment.uri, tmp_path)
        inserted = client.local["oplog.rs"].find_one({"ns": "shop.orders", "op": "i"})
        assert inserted is not None
        lake.wait_for(ClusterTime.from_timestamp(inserted["ts"]))  # there may be a no-op after it
        everything = Everything(deployment.uri, tmp_path, stack)
        writer = Writer(deployment.uri)
        for version in VERSIONS[1:]:
            upgrade(deployment, version, writer)
            lake.wait_for(MongodSource(deployment.uri).newest())
        writer.stop()
        client.shop.orders.insert_one(LAST)
        everything.end()
        lake.wait_for(_time_of(everything.followers["server"].events[-1]))
        lake.end()
        check_streams(everything, writer.rounds)
        given = everything.followers["watch"].events
        check_archive(tmp_path / "archive", client, begin, VERSIONS, given)
        assert_equal(tmp_path / "tables", {"shop.orders": in_collection(client.shop.orders)}, set())
        _check_lake(lake.path, given)
        _check_tokens(deployment.uri, given)
        print(_table(everything, lake.path))  # the table of docs/how-to/operations.md: run with -s


def _time_of(event: bytes) -> ClusterTime:
    return ClusterTime.from_timestamp(bson.decode(event)["clusterTime"])


def _check_lake(lake: Path, given: list[bytes]) -> None:
    """The lake has each event once, as of the version that its micro-batch was planned with."""
    found = [event for event in lake_events(lake) if _time_of(event) >= _time_of(given[0])]
    assert [_shown(event) for event in found] == [_shown(event) for event in given]
    assert found[:50] == given[:50]
    assert found[-50:] == given[-50:]
    status = lake_status(lake)
    assert [note.version for note in status.versions] == steps(VERSIONS)
    assert verify(lake, full=True).problems == []
    # The whole of a micro-batch has one version.
    edges = [note.after for note in status.versions[1:]]
    of = [sum(_time_of(event) > edge for edge in edges) for event in found]
    assert ["wallTime" in bson.decode(event) for event in found] == [number > 1 for number in of]
    assert [_token_version(event) for event in found] == [2 if number > 2 else 1 for number in of]


def _table(everything: Everything, lake: Path) -> str:
    """What each product gave at each step of the upgrade, by the cluster times at which the lake noted the steps."""
    given = {name: follower.events for name, follower in everything.followers.items()}
    first = min(map(_time_of, given["server"]))
    given["lake"] = [event for event in lake_events(lake) if _time_of(event) >= first]
    edges = [note.after for note in lake_status(lake).versions[1:]]
    lines = [
        f"| the lake's version | {' | '.join(given)} | listener |",
        f"|---|{'---|' * (len(given) + 1)}",
    ]
    for number, version in enumerate(steps(VERSIONS)):
        cells = [_cell([event for event in events if _step(event, edges) == number]) for events in given.values()]
        handled = [ClusterTime.from_timestamp(time) for time, _key in everything.handled]
        count = sum(time >= first and sum(time > edge for edge in edges) == number for time in handled)
        lines.append(f"| {version} | {' | '.join(cells)} | {count:,} |")
    errors = " | ".join(f"{len(follower.errors)}" for follower in everything.followers.values())
    return "\n".join([*lines, f"| errors after which a stream was resumed | {errors} | 0 | 0 |"])


def _step(event: bytes, edges: list[ClusterTime]) -> int:
    return sum(_time_of(event) > edge for edge in edges)


def _cell(events: list[bytes]) -> str:
    """``events / with wallTime / with a resume token of version 2``."""
    timed = sum("wallTime" in bson.decode(event) for event in events)
    newer = sum(_token_version(event) == 2 for event in events)
    return f"{len(events):,} / {timed:,} / {newer:,}"


def _shown(event: bytes) -> dict[str, Any]:
    return {name: value for name, value in bson.decode(event).items() if name not in ("_id", "wallTime")}


def _token_version(event: bytes) -> int:
    return ResumeToken.parse(bson.decode(event)["_id"]).version


def _check_tokens(uri: str, given: list[bytes]) -> None:
    """7.0 resumes at tokens of version 1 that 5.0 and 6.0 gave; so do we, and the gateway: the same bytes."""
    rng = random.Random(7)
    without = [event for event in given if "wallTime" not in bson.decode(event)]
    older = [event for event in given if _token_version(event) == 1 and "wallTime" in bson.decode(event)]
    newer = [event for event in given if _token_version(event) == 2]
    with ExitStack() as stack:
        raw = bson.codec_options.CodecOptions(document_class=RawBSONDocument)
        ours = stack.enter_context(tailrace.connect(uri))
        server = stack.enter_context(tailrace.connect(uri, engine="server"))
        gateway = stack.enter_context(MongoClient[Any](stack.enter_context(running_gateway(uri)).uri()))
        served = gateway.shop.get_collection("orders", codec_options=raw)
        for event in [one for part in (without, older, newer) for one in rng.sample(part, 8)]:
            token = bson.decode(event)["_id"]
            for start in ({"resume_after": token}, {"start_after": token}):
                expected = _some(server.shop.orders.watch(**RAW, **start))
                assert expected
                assert _some(ours.shop.orders.watch(**RAW, **start)) == expected
                assert _some(served.watch(max_await_time_ms=200, **start)) == expected


def _some(stream: Any) -> list[bytes]:
    """The next events, up to the last one or twenty."""
    events: list[bytes] = []
    with stream:
        while len(events) < 20 and (not events or key_of(events[-1]) != {"_id": LAST["_id"]}):
            events.append(bytes(stream.next().raw))
    return events
