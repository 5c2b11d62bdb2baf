"""Statistics over HTTP, as Prometheus reads them, and whether the process lives and works. Needs the extra
``metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.base.bind_failure import bind_failure
from tailrace.base.health import Health

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

#: What every room says about the same number (``tailrace.core.oplog.entry_kinds``).
UNKNOWN_ENTRIES: Final = "Oplog entries, and operations inside entries, of unknown kinds, which give no event"


@contextmanager
def serve_metrics(
    collector: Collector,
    host: str,
    port: int,
    *,
    beside: Sequence[Collector] = (),
    health: Callable[[], Health] = lambda: Health("the process answers"),
) -> Iterator[str]:
    """Serve the statistics of ``collector``, and of others ``beside`` it, while the block runs, and yield the address.
    ``/livez`` and ``/readyz`` are answered from ``health``, which must not wait for anything. Port 0: a free one.
    Collectors are called in a thread of the server. Raises SinkError if the address cannot be used."""
    registry = CollectorRegistry()
    for one in (collector, *beside):
        registry.register(one)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        another = "name another address (--metrics)"
        raise bind_failure("statistics cannot be served at", host, port, error, another) from None
    statistics = server.get_app()
    server.set_app(_with_health(statistics, health) if statistics is not None else None)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _with_health(statistics: WSGIApplication, health: Callable[[], Health]) -> WSGIApplication:
    """200 with a sentence, or 503 with one that says what is wrong."""

    def answer(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environment.get("PATH_INFO")
        if path not in ("/livez", "/readyz"):
            return statistics(environment, start)
        found = health()
        trouble = found.dead if path == "/livez" else found.trouble
        start(
            "200 OK" if trouble is None else "503 Service Unavailable",
            [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")],
        )
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [f"{trouble or found.said}\n".encode()]

    return answer


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
