"""What commands beside listeners say of their health."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.cli.tables import _health
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.lake.spark.monitoring import MetricsListener
from tailrace.lake.spark.planning.backlog import Backlog
from tailrace.lake.spark.query_numbers import QueryNumbers
from tailrace.lake.tables.progress import TablesProgress
from tailrace.read.tail.shared_tail import TailStatistics
from tailrace.watch.gateway import pulse
from tailrace.watch.gateway.pulse import Pulse


def test_a_gateway_whose_loop_stands_still_is_dead_and_one_that_cannot_read_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail = [TailStatistics.total([])]
    beating = Pulse(lambda: tail[0])
    assert beating.health().trouble is None
    tail[0] = replace(tail[0], trouble="nobody is there")
    found = beating.health()
    assert (found.dead, found.unready) == (None, "the deployment cannot be read: nobody is there")
    monkeypatch.setattr(pulse, "DEAD_AFTER_S", -1.0)
    assert "its event loop is blocked" in str(beating.health().dead)


def test_a_loop_that_turns_is_noted_until_it_is_stopped() -> None:
    async def run() -> float:
        stopped = asyncio.Event()
        beating = Pulse(lambda: TailStatistics.total([]))
        beating._at = -1e9
        task = asyncio.create_task(beating.beat_until(stopped))
        await asyncio.sleep(0)
        stopped.set()
        await task
        return beating._at

    assert asyncio.run(run()) <= time.monotonic()
    assert asyncio.run(run()) > 0


@pytest.mark.parametrize(
    ("at", "again", "words"),
    [
        (ClusterTime.of(1_700_000_000, 1), [], None),
        (ClusterTime.of(1_700_000_000, 1), ["shop.orders"], "collections that are being copied again: 1"),
        (None, [], "The tables do not equal their collections yet"),
    ],
)
def test_tables_are_ready_when_all_of_them_equal_their_collections(
    at: ClusterTime | None, again: list[str], words: str | None
) -> None:
    writer: Any = SimpleNamespace(progress=TablesProgress(1, 1, 1, at), resyncing=again)
    found = _health(writer)
    assert found.dead is None
    assert (found.trouble is None) == (words is None)
    assert words is None or words in str(found.trouble)


def test_a_query_that_has_ended_or_that_the_oplog_overtakes_is_not_ready() -> None:
    listener = MetricsListener()
    assert listener.health().trouble == "no query has started yet"
    query = listener._queries["q"] = QueryNumbers("q")
    assert listener.health().trouble is None
    query.backlog = Backlog(100, None, 10)
    assert str(listener.health().unready).startswith("q: the query is 100 s behind")
    query.active = False
    assert listener.health().unready == "the query q has ended"
    assert listener.health().dead is None
