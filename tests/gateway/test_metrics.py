"""What a gateway counts is what Prometheus reads."""

from __future__ import annotations

import urllib.request
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.gateway import collector
from tailrace.gateway.collector import GatewayCollector
from tailrace.gateway.metrics import GatewayMetrics
from tailrace.metrics_server import serve_metrics
from tailrace.tail.shared_tail import TailStatistics


def read(address: str) -> dict[str, float]:
    with urllib.request.urlopen(address, timeout=300) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            sample.name.removeprefix("tailrace_gateway_")
            + "".join(f" {value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def test_every_number_is_served_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "PASSED_OVER", Counter({"command new": 3, "xi": 1}))
    metrics = GatewayMetrics(streams=2, events=5, event_bytes=700)
    metrics.errors[43] += 3
    metrics.fallbacks["collation"] += 1

    def refresh() -> None:
        metrics.saw_tail(TailStatistics(joined=1, window_bytes=9, fallbacks=2, lag_seconds=7, trouble="nobody answers"))

    with serve_metrics(GatewayCollector(metrics, refresh), "127.0.0.1", 0) as address:
        found = read(address)
        metrics.events += 1
        later = read(address)
    assert found["streams"] == 2
    assert found["events_total"] == 5
    assert later["events_total"] == 6
    assert found["event_bytes_total"] == 700
    assert found["window_bytes"] == 9
    assert found["tails"] == 1
    assert found["errors_total 43"] == 3
    assert found["fallbacks_total collation"] == 1
    assert found["fallbacks_total slow"] == 2
    assert found["lag_seconds"] == 7
    assert found["trouble"] == 1
    assert (found["unknown_entries_total command new"], found["unknown_entries_total xi"]) == (3, 1)
    numbers = set(GatewayMetrics.__slots__) - {"errors", "fallbacks"}
    assert numbers == {name.removesuffix("_total") for name in found if " " not in name}
