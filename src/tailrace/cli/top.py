"""``tailrace top``: what the console shows, in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli.console import add_target_arguments, ended_by_signals, targets_of
from tailrace.cli.output import Screen, say
from tailrace.cli.stream_arguments import add_uri_argument
from tailrace.cli.usage import WrongUsageError
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from tailrace.cli.panels.showing import Showing

_DESCRIPTION: Final = """\
Show a deployment in the terminal, refreshed in place: events by namespace and kind, lag and oplog of each shard,
leases, a gateway's streams, lakes, tables, archives and syncs, dead letters, and what tailrace doctor finds wrong. It
only reads, and changes nothing. Into a pipe, it prints one reading after another. Ctrl-C ends it."""
#: How long the first look waits for panels whose servers do not answer.
_FIRST_S: Final = 12.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "top",
        help="show the same in the terminal",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_uri_argument(parser)
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds per reading (default: 2)")
    parser.add_argument("--once", action="store_true", help="print one reading, after one interval, and exit")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON document per line for each reading")
    add_target_arguments(parser)
    parser.set_defaults(run=run, positionals=("uri",))


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    if not 0.1 <= args.interval <= 3600:
        raise WrongUsageError("--interval must be between 0.1 and 3600 seconds")
    from tailrace.cli.panels.showing import Showing  # noqa: PLC0415  so that --help does not load it
    from tailrace.watch.client import connect  # noqa: PLC0415

    targets, uri = targets_of(args), find_uri(args.uri)
    with ended_by_signals() as ended, connect(uri) as client:
        _check_there(client)
        showing = Showing(client, uri, targets, images=False)
        showing.start()
        showing.panels.watch(watched=True)
        try:
            _wait_for_all(showing, ended)
            with _screen(args) as shown:
                _look(args, showing, shown, ended)
        finally:
            showing.stop()
    return 0


def _check_there(client: Any) -> None:
    """A deployment that is not there is an error, and not an empty screen."""
    from pymongo.errors import PyMongoError  # noqa: PLC0415  as in run()

    from tailrace.read.source.failure import source_error  # noqa: PLC0415

    try:
        client.admin.command("ping")
    except PyMongoError as error:
        raise source_error(error, client) from None


def _wait_for_all(showing: Showing, ended: threading.Event) -> None:
    limit = time.monotonic() + _FIRST_S
    while len(showing.shown()) < len(showing.panels.panels) and time.monotonic() < limit:
        if ended.wait(0.05):
            return


def _look(args: argparse.Namespace, showing: Showing, shown: Screen | None, ended: threading.Event) -> None:
    from tailrace.cli.panels.screen import screen  # noqa: PLC0415

    before, at = showing.total, time.monotonic()
    while not ended.wait(args.interval):
        total, now = showing.total, time.monotonic()
        per_second, before, at = (total - before) / (now - at), total, now
        panels: dict[str, Any] = {name: json.loads(text) for name, text in showing.shown().items()}
        if args.json:
            say(json.dumps({"eventsPerSecond": round(per_second, 1), **panels}), flush=True)
        elif shown is not None:
            shown.show(list(screen(panels, per_second)))
        else:
            for line in screen(panels, per_second):
                say(line)
            say(flush=True)
        if args.once:
            return


@contextmanager
def _screen(args: argparse.Namespace) -> Iterator[Screen | None]:
    """The terminal's whole screen, given back afterwards; ``None`` for a pipe, and for a single look."""
    if args.once or args.json or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield None
        return
    shown = Screen(lambda: tuple(shutil.get_terminal_size()))
    try:
        yield shown
    finally:
        shown.close()
