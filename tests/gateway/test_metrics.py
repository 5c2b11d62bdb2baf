"""What a gateway counts is what Prometheus reads."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.base.metrics_server import serve_metrics
from tailrace.embedded import ReplicaSet
from tailrace.errors import CODE_NAMES
from tailrace.read.tail.shared_tail import TailStatistics
from tailrace.watch.gateway import collector
from tailrace.watch.gateway.collector import GatewayCollector
from tailrace.watch.gateway.metrics import GatewayMetrics
from tests.gateway.running import GatewayProcess


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
    metrics.errors[51024] += 2
    metrics.errors[40602] += 1

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
    assert found["errors_total other"] == 3
    assert found["fallbacks_total slow"] == 2
    assert found["lag_seconds"] == 7
    assert found["trouble"] == 1
    assert (found["unknown_entries_total command new"], found["unknown_entries_total xi"]) == (3, 1)
    numbers = set(GatewayMetrics.__slots__) - {"errors", "fallbacks"}
    assert numbers == {name.removesuffix("_total") for name in found if " " not in name}


def test_every_series_exists_before_anybody_was_served(
    replica_set: ReplicaSet, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """Only nine codes did, and every other error made a new series, whose rate misses its first error. Tests had only
    read a gateway that had already had errors."""
    found = start_gateway(replica_set.uri, "--metrics", "127.0.0.1:0").statistics()
    codes = {name.partition(" ")[2]: number for name, number in found.items() if name.startswith("errors_total ")}
    assert codes == dict.fromkeys((*map(str, CODE_NAMES), "other"), 0)
    reasons = {name: number for name, number in found.items() if name.startswith("fallbacks_total ")}
    assert reasons == {"fallbacks_total refused": 0, "fallbacks_total slow": 0}
    assert found["unknown_entries_total others"] == 0
    counters = {name for name in found if name.endswith("_total") or " " in name}
    assert not any(found[name] for name in counters if not name.startswith(("upstream_", "stage_cpu")))


def test_every_error_that_the_gateway_answers_has_a_series_of_its_own_or_is_counted_with_the_others() -> None:
    metrics = GatewayMetrics()
    before = errors_of(metrics)
    for code in (*CODE_NAMES, *range(0, 12_000, 7), 6347903, -1):
        metrics.errors[code] += 1
    after = errors_of(metrics)
    assert after.keys() == before.keys()
    assert sum(after.values()) == sum(metrics.errors.values())


def errors_of(metrics: GatewayMetrics) -> dict[str, float]:
    [family] = [one for one in GatewayCollector(metrics).collect() if one.name == "tailrace_gateway_errors"]
    return {sample.labels["code"]: sample.value for sample in family.samples}
