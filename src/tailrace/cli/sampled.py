"""``--compare SHARE`` of commands that follow a stream: a share of their time is compared with the server's own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.cli.output import tell
from tailrace.cli.usage import WrongUsageError
from tailrace.errors import TailraceError, UsageError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from tailrace.core.oplog.namespace import Scope
    from tailrace.watch.compare.deployment import Streams
    from tailrace.watch.compare.sampling import SampledComparison


def add_compare_arguments(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Add ``--compare`` and ``--compare-report`` to a command. ``note``: where it applies."""
    parser.add_argument(
        "--compare",
        metavar="SHARE",
        help=f"{note}for this share of the time, such as 1%% or 0.01, compare the server's own stream with ours in "
        "the background: some seconds at a time, at most 2,000 events a second",
    )
    parser.add_argument(
        "--compare-report",
        metavar="FILE",
        help="with --compare: where differences are written, masked (default: a file in the directory for temporary "
        "files)",
    )


def check_compare(args: argparse.Namespace) -> None:
    """Raises WrongUsageError where the arguments cannot be followed: before anything begins."""
    if args.compare is None:
        if args.compare_report is not None:
            raise WrongUsageError("--compare-report says where --compare writes, but --compare is not given")
        return
    _share_of(args)
    if args.compare_report is not None:
        report_path("--compare-report", args.compare_report)


def _share_of(args: argparse.Namespace) -> float:
    from tailrace.watch.compare.sampling import parse_share  # noqa: PLC0415  so that --help does not load it

    try:
        return parse_share(args.compare)
    except UsageError as error:
        raise WrongUsageError(f"--compare: {error.message}", hint=error.hint) from None


def report_path(option: str, text: str) -> Path:
    """Where the report goes. Tried now, so that an hour of work is not lost because the file cannot be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise WrongUsageError(f"{option} {text}: no file can be written there")
    return path


@contextmanager
def sampled(
    args: argparse.Namespace,
    uri: Any,
    scope: Scope | str | None,
    streams: Callable[[], tuple[Streams, list[str]]],
    *,
    told: Callable[[str], None] | None = None,
) -> Iterator[SampledComparison | None]:
    """Compare while the body runs, if ``--compare`` asks for it, and say at the end what came of it.

    ``streams``  what the command's stream is asked for, and the options of it that no server has
    ``told``     called with a text for each difference and failure, in place of warnings in the log
    """
    if args.compare is None:
        yield None
        return
    from tailrace.watch.compare.sampling import SampledComparison  # noqa: PLC0415  as above

    report = None if args.compare_report is None else report_path("--compare-report", args.compare_report)
    say = told or (lambda text: tell(f"tailrace: {text}"))
    asked, left_out = streams()
    for name in left_out:
        say(f"no server has exact images: the comparison leaves out {name}")
    with ExitStack() as stack:
        try:
            comparison = stack.enter_context(
                SampledComparison(uri, scope, asked, _share_of(args), report=report, tell=told)
            )
        except TailraceError as error:
            error.hint = f"{error.hint}. Or start without --compare" if error.hint else "Or start without --compare"
            raise
        try:
            yield comparison
        finally:
            say(f"compared with the server's own stream: {comparison.numbers}")


def collectors(comparison: SampledComparison | None) -> list[Collector]:
    """What serves the numbers in addition to a command's own."""
    if comparison is None:
        return []
    from tailrace.watch.compare.metrics import ComparisonCollector  # noqa: PLC0415  not without prometheus_client

    return [ComparisonCollector(comparison)]
