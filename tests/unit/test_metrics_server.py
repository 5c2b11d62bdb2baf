"""Statistics over HTTP: one function for listeners and the gateway."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterable

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.base.health import Health
from tailrace.base.metrics_server import serve_metrics
from tailrace.errors import SinkError


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


def asked(address: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=300) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("health", "live", "ready"),
    [
        (Health("all is well"), (200, "all is well\n"), (200, "all is well\n")),
        (Health("it works", unready="behind"), (200, "it works\n"), (503, "behind\n")),
        (Health("it works", dead="hung", unready="behind"), (503, "hung\n"), (503, "hung\n")),
        (Health("it begins", begun=False), (200, "it begins\n"), (503, "it begins\n")),
    ],
)
def test_health_is_answered_beside_the_statistics(
    health: Health, live: tuple[int, str], ready: tuple[int, str]
) -> None:
    """Any request got the statistics, with status 200, whatever was wrong with it."""
    with serve_metrics(Counting(), "127.0.0.1", 0, health=lambda: health) as address:
        base = address.removesuffix("/metrics")
        assert (asked(f"{base}/livez"), asked(f"{base}/readyz")) == (live, ready)
        assert asked(f"{base}/livez", "HEAD") == (live[0], "")
        assert "asked 1.0" in asked(address)[1]


def test_a_process_that_says_nothing_of_its_health_lives_while_it_answers() -> None:
    with serve_metrics(Counting(), "127.0.0.1", 0) as address:
        assert asked(address.replace("metrics", "livez"))[0] == asked(address.replace("metrics", "readyz"))[0] == 200
