"""Statistics over HTTP: one function for listeners and the gateway."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterable

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.errors import SinkError
from tailrace.metrics_server import serve_metrics


class Counting(Collector):
    """How often it was asked."""

    asked = 0

    def collect(self) -> Iterable[Metric]:
        self.asked += 1
        yield GaugeMetricFamily("asked", "Times", value=self.asked)


def test_a_collector_is_asked_at_each_request_and_the_port_is_free_afterwards() -> None:
    collector = Counting()
    with serve_metrics(collector, "127.0.0.1", 0) as address:
        for _ in range(2):
            with urllib.request.urlopen(address, timeout=300) as reply:
                assert f"asked {collector.asked}.0" in reply.read().decode()
    port = int(address.rpartition(":")[2].partition("/")[0])
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_that_is_taken_is_an_error_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SinkError, match=f"127.0.0.1:{port}"), serve_metrics(Counting(), "127.0.0.1", port):
            pass
