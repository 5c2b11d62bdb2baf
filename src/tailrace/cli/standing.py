"""What listeners report to whatever keeps them running: statistics and health over HTTP, and systemd."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tailrace.base.health import HUNG_AFTER_S
from tailrace.base.service_manager import ServiceManager, notifying
from tailrace.cli.output import tell
from tailrace.cli.stream_arguments import address_of
from tailrace.errors import UsageError

if TYPE_CHECKING:
    from tailrace.act.consumer.lease import LeaseStore
    from tailrace.act.consumer.listening import ListenerBase
    from tailrace.cli.console_beside import ServiceNumbers
    from tailrace.cli.processes import Beat


def add_health_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about health."""
    parser.add_argument(
        "--hung-after",
        type=float,
        default=HUNG_AFTER_S,
        metavar="S",
        help="/livez answers 503, and systemd's watchdog is not fed, when the handler has been at work on one "
        f"change for S seconds (default: {HUNG_AFTER_S:.0f})",
    )
    parser.add_argument(
        "--behind-after",
        type=float,
        metavar="S",
        help="/readyz answers 503 when the lag is above S seconds (default: only when the position is older "
        "than the oplog)",
    )


@contextmanager
def watched_over(
    listeners: Sequence[ListenerBase],
    client: Any,
    store: LeaseStore,
    args: argparse.Namespace,
    numbers: ServiceNumbers | None = None,
) -> Iterator[Callable[[], None]]:
    """Serve statistics and health, and tell systemd, while the body runs, as far as that is asked for. What is yielded
    is called when the process is asked to stop. ``numbers`` gets the statistics where a console shows them. Raises
    UsageError."""
    from tailrace.act.consumer.rules.health import HealthLimits  # noqa: PLC0415

    for name in ("hung_after", "behind_after"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be a number of seconds above 0, not {value:g}")
    beat: Beat | None = getattr(args, "beat", None)
    manager = ServiceManager(os.environ) if beat is None else beat
    is_shown = numbers is not None and args.console is not None
    if args.metrics is None and not is_shown and not manager.is_there:
        yield lambda: None
        return
    from tailrace.act.consumer.standing import Standing  # noqa: PLC0415

    with ExitStack() as stack:
        limits = HealthLimits(args.hung_after, args.behind_after)
        standing = stack.enter_context(Standing(listeners, client, store, limits=limits))
        if args.metrics is not None or is_shown:
            from tailrace.act.consumer.metrics import ListenerCollector  # noqa: PLC0415

            collector = ListenerCollector(listeners, standing.lag)
            if numbers is not None:
                numbers.collector = collector
        if args.metrics is not None:
            from tailrace.base.metrics_server import serve_metrics  # noqa: PLC0415

            served = serve_metrics(
                collector,
                *address_of(args.metrics, "--metrics"),
                health=standing.health,
            )
            tell(f"tailrace: statistics at {stack.enter_context(served)}")
        yield stack.enter_context(notifying(standing.health, manager))
