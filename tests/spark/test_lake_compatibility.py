"""A lake, and an archive beside it, across changes of the feature compatibility version: each event has the bytes that
the server's own streams gave at the time. Lakes had only been tested across upgrades, without comparing bytes.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bson
import pytest
from pymongo import MongoClient

import tailrace
from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.demo.comparison import lake_events
from tailrace.embedded import ReplicaSet
from tailrace.lake.store.status import lake_status
from tailrace.lake.store.verification import verify
from tailrace.read.archive.layout import existing
from tailrace.read.source.compatibility import ASK_AGAIN_S
from tailrace.read.source.mongod import MongodSource
from tests.commands import run
from tests.differential.test_compatibility_live import RAW, differ, taken, write
from tests.spark.running_lake import RunningLake

pytestmark = [pytest.mark.mongod, pytest.mark.spark]


@pytest.mark.slow  # tests/differential/test_compatibility_live.py has it without Spark, in the same reader
@pytest.mark.parametrize(("version", "lower"), [("6.0.27", "5.0"), ("7.0.28", "6.0")])
def test_each_event_has_the_bytes_that_the_server_gave_on_its_side_of_the_change(
    version: str, lower: str, tmp_path: Path
) -> None:
    expanded = version >= "7"  # there the setting affects only expanded events
    own, below = version, f"{version}-fcv{lower}"
    with ReplicaSet(version=version) as deployment, ExitStack() as stack:
        client = stack.enter_context(MongoClient[Any](deployment.uri))
        client.shop.create_collection("orders")
        deployment.set_compatibility(lower)
        begin = MongodSource(deployment.uri).newest()
        orders = stack.enter_context(tailrace.connect(deployment.uri, engine="server")).shop.get_collection(
            "orders", codec_options=RAW
        )
        asked: dict[str, Any] = {"max_await_time_ms": 100, "show_expanded_events": expanded}
        stream = stack.enter_context(orders.watch(**asked))

        def go_on(first: int) -> list[bytes]:
            return taken(stream, write(client, first))

        lake = _lake(deployment.uri, tmp_path, expanded=expanded)
        live = go_on(0)
        lake.wait_for(_time_of(live[-1]))
        deployment.set_compatibility(version[:3])
        time.sleep(ASK_AGAIN_S)  # nothing is written meanwhile, so no event is made under the old setting
        live += go_on(10)
        lake.wait_for(_time_of(live[-1]))
        lake.end()
        reached = len(live)
        live += go_on(20)
        deployment.set_compatibility(lower)
        live += go_on(30)
        # The lake was stopped during this change: like the server, it gives earlier entries by the present setting.
        with orders.watch(resume_after=bson.decode(live[reached - 1])["_id"], **asked) as resumed:
            expected = live[:reached] + taken(resumed, len(live) - reached)
        lake = _lake(deployment.uri, tmp_path, expanded=expanded)
        lake.wait_for(_time_of(live[-1]))
        lake.end()
    shown = [differ(version).encode() in event for event in expected]
    assert set(shown[:5]) | set(shown[reached:]) == {False}
    assert any(shown[5:reached])
    assert [event for event in lake_events(lake.path) if _time_of(event) > begin] == expected
    assert [note.version for note in lake_status(lake.path).versions] == [below, own, below]
    assert verify(lake.path, full=True).problems == []
    # The archive was stopped too, and has each entry under the setting of its own time.
    assert [note.version for note in existing(tmp_path / "kept").versions] == [below, own, below]
    assert _replayed(tmp_path / "kept", begin, expanded=expanded) == live


def _lake(uri: str, folder: Path, *, expanded: bool) -> RunningLake:
    source = ["showExpandedEvents: true"] if expanded else []
    return RunningLake(uri, folder, source=source, more="archive: {path: kept}\n")


def _replayed(archive: Path, after: ClusterTime, *, expanded: bool) -> list[bytes]:
    start = f"--start-at-operation-time={after.seconds},{after.increment + 1}"
    flags = ["--show-expanded-events"] if expanded else []
    said = run("replay", str(archive), "shop.orders", start, "--format", "bson", *flags)
    assert said.returncode == 0, said.stderr
    return list(raw_bson.split(said.stdout))


def _time_of(event: bytes) -> ClusterTime:
    return ClusterTime.from_timestamp(bson.decode(event)["clusterTime"])
