"""Statistics over HTTP, as Prometheus reads them. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from tailrace.errors import SinkError


@contextmanager
def serve_metrics(collector: Collector, host: str, port: int) -> Iterator[str]:
    """Serve the statistics of ``collector`` while the block runs, and yield the address. Port 0: a free one. The
    collector is called in a thread of the server. Raises SinkError if the address cannot be used."""
    registry = CollectorRegistry()
    registry.register(collector)
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
