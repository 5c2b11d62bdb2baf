"""``--console`` of services: the console in the process that it shows, with what the service says about itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli.output import tell
from tailrace.cli.stream_arguments import address_of
from tailrace.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from tailrace.read.source.uri import ConnectionString

_OPTION: Final = "--console"


def add_console_argument(parser: argparse.ArgumentParser, before: str = "") -> None:
    """Add ``--console``."""
    parser.add_argument(
        _OPTION,
        metavar="[HOST:]PORT",
        help=f"{before}serve a page on this machine that shows the deployment and this service (extra: console)",
    )


def check_console(args: argparse.Namespace) -> None:
    """Raises UsageError where ``--console`` is no address of this machine."""
    if args.console is None:
        return
    from tailrace.cli.web.guard import is_loopback  # noqa: PLC0415  so that --help does not load it

    host, _ = _address(args.console)
    if not is_loopback(host):
        raise UsageError(
            f"{_OPTION} serves only this machine, and {host} is another address",
            hint="tailrace console, a process of its own, serves other machines, with TLS and a login",
        )


def _address(text: str) -> tuple[str, int]:
    return address_of(text if ":" in text else f"127.0.0.1:{text}", _OPTION)


class ServiceNumbers:
    """What a service says about itself: what its ``collector`` gives, once there is one."""

    def __init__(self, collector: Collector | None = None) -> None:
        self.collector = collector

    def read(self) -> list[dict[str, Any]]:
        """Every metric with its text and its values. Of those with a label, values of 0 are left out."""
        return [
            {
                "name": family.name,
                "text": family.documentation,
                "values": [
                    [", ".join(sample.labels.values()), sample.value]
                    for sample in family.samples
                    if sample.value or not sample.labels
                ],
            }
            for family in (() if self.collector is None else self.collector.collect())
        ]


@contextmanager
def console_beside(
    args: argparse.Namespace, uri: ConnectionString | None, numbers: ServiceNumbers | None, **targets: Any
) -> Iterator[None]:
    """Serve the console of the deployment at ``uri`` while the body runs, if ``--console`` was given. ``targets``: what
    is shown beside it, as of ``Targets``. Raises SinkError where it cannot listen."""
    if args.console is None or uri is None:
        yield
        return
    from tailrace.cli.panels.sources import Targets  # noqa: PLC0415  as in check_console()
    from tailrace.cli.web.server import ConsoleOptions, serving_console  # noqa: PLC0415

    host, port = _address(args.console)
    shown = Targets(**targets, service=None if numbers is None else numbers.read)
    with serving_console(uri, shown, ConsoleOptions(host, port)) as address:
        tell(f"tailrace: the console is at {address}")
        yield
