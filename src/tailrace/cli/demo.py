"""``tailrace demo``: the main job on an embedded MongoDB, crash included, compared with the server byte for byte."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from tailrace.cli.output import say, show_progress
from tailrace.cli.stopped_by_signals import stopped_by_signals

_DESCRIPTION = """\
Start a real MongoDB, run a simulated shop on it, and keep its changes in a lake of Parquet files with Spark. Kill the
Spark process once in the middle and start it again. At the end compare the lake with the server's own change stream
over the same time, and the tables with their collections, byte for byte. Then move another shop from MongoDB 5.0 to 6.0
with tailrace sync while it is in use, and compare the two. The exit status is 0 only if there is no difference and the
crash happened."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "demo",
        help="run everything on this machine: MongoDB, Spark, a crash, a comparison",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=_positive, default=60.0, help="how long the shop runs (default: 60)")
    parser.add_argument("--rate", type=_positive, default=300.0, help="operations a second (default: 300)")
    parser.add_argument("--keep-running", action="store_true", help="run the shop until Ctrl-C, then compare")
    parser.add_argument("--no-crash", action="store_true", help="do not kill the Spark process")
    parser.add_argument("--no-upgrade", action="store_true", help="leave out the upgrade from 5.0 to 6.0 at the end")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to put the lake (default: a temporary directory)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the shop's decisions (default: 1)")
    parser.add_argument("--mongod-version", metavar="V", help="one of the embedded versions (default: 6.0.27)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when everything is as it should be, else 1; raises TailraceError where a part is not
    available."""
    from tailrace.demo.conductor import Demo, DemoSettings  # noqa: PLC0415  so that --help needs nothing
    from tailrace.demo.summary import print_summary  # noqa: PLC0415

    settings = DemoSettings(
        seconds=None if args.keep_running else args.seconds,
        rate=args.rate,
        crash=not args.no_crash,
        upgrade=not args.no_upgrade,
        directory=args.directory,
        seed=args.seed,
        version=args.mongod_version,
    )
    stop = threading.Event()
    screen = _Screen()
    try:
        if args.keep_running:
            screen.say("The shop runs until Ctrl-C")
        with stopped_by_signals(stop):
            result = Demo(settings, say=screen.say, show=screen.show, stop=stop).run()
    finally:
        screen.end_line()
    print_summary(result)
    return 0 if result.good else 1


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError("expected a number above 0")
    return value


class _Screen:
    """Sentences, and between them one progress line that is rewritten on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False
        self._count = 0

    def say(self, sentence: str) -> None:
        self.end_line()
        say(f"{sentence}.", flush=True)

    def show(self, line: str) -> None:
        self._count += 1
        if self._terminal:
            show_progress(line, stream=sys.stdout)
            self._open = True
        elif self._count % 10 == 1:
            say(line, flush=True)

    def end_line(self) -> None:
        if self._open:
            say(flush=True)
            self._open = False
