"""Statistics over HTTP, as Prometheus reads them. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.errors import SinkError

#: What every room says of the same number (``tailrace.oplog.entry_kinds``).
UNKNOWN_ENTRIES: Final = "Oplog entries, and operations inside entries, of unknown kinds, which give no event"


@contextmanager
def serve_metrics(collector: Collector, host: str, port: int, *, beside: Sequence[Collector] = ()) -> Iterator[str]:
    """Serve the statistics of ``collector``, and of others ``beside`` it, while the block runs, and yield the address.
    Port 0: a free one. Collectors are called in a thread of the server. Raises SinkError if the address cannot be
    used."""
    registry = CollectorRegistry()
    for one in (collector, *beside):
        registry.register(one)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise SinkError(f"statistics cannot be served at {host}:{port}: {error.strerror or error}") from None
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Families:
    """Makes the families of a collector. Their names begin with ``prefix``; with ``label`` each has a value for each
    value of that label."""

    def __init__(self, prefix: str, label: str | None = None) -> None:
        self._prefix = prefix
        self._labels = [] if label is None else [label]

    def counter(self, name: str, text: str, *values: tuple[str, float] | float) -> Metric:
        """A number that only grows. ``values``: one, or pairs of a label's value and a number."""
        return self._filled(CounterMetricFamily(self._named(name), text, labels=self._labels), values)

    def gauge(self, name: str, text: str, *values: tuple[str, float] | float) -> Metric:
        """A number that goes up and down."""
        return self._filled(GaugeMetricFamily(self._named(name), text, labels=self._labels), values)

    def _named(self, name: str) -> str:
        return f"{self._prefix}_{name}"

    @staticmethod
    def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[str, float] | float]) -> Metric:
        for value in values:
            label, number = value if isinstance(value, tuple) else (None, value)
            family.add_metric([] if label is None else [label], number)
        return family
