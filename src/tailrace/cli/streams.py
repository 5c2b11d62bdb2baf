"""``tailrace streams``: what a gateway serves."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tailrace.errors import UsageError
from tailrace.source.uri import find_uri

if TYPE_CHECKING:
    from collections.abc import Mapping

_DESCRIPTION: Final = """\
List the change streams that a gateway serves: namespace, user, age, events sent, and whether it waits for more. The URI
is the gateway's. If the deployment has users, this needs the action inprog, which the role clusterMonitor grants."""
_COMMAND_NOT_FOUND: Final = 59


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "streams",
        help="list the change streams that a gateway serves",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("uri", nargs="?", metavar="URI", help="the gateway's (default: TAILRACE_URI); @FILE works")
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    from pymongo.errors import OperationFailure, PyMongoError  # noqa: PLC0415  so that --help does not load it

    from tailrace.source.connection import open_client  # noqa: PLC0415
    from tailrace.source.failure import source_error  # noqa: PLC0415

    with open_client(find_uri(args.uri)) as client:
        try:
            reply = client.admin.command("tailraceStreams")
        except PyMongoError as error:
            if isinstance(error, OperationFailure) and error.code == _COMMAND_NOT_FOUND:
                raise UsageError(
                    "that is a server, not a gateway", hint="Name the address that tailrace gateway listens at"
                ) from None
            raise source_error(error, client) from None
    if args.format == "json":
        print(json.dumps({"streams": reply["streams"], "gateway": reply["gateway"]}, default=_text, indent=2))
    else:
        _print_table(reply, datetime.now(UTC))
    return 0


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _print_table(reply: Mapping[str, Any], now: datetime) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    gateway, streams = reply["gateway"], reply["streams"]
    table = Table(box=None, pad_edge=False)
    for name in ("stream", "user", "open for", "events", "state"):
        table.add_column(name, justify="right" if name in ("open for", "events") else "left")
    for one in streams:
        age = now - one["openedAt"].replace(tzinfo=UTC)
        state = "waits" if one["waiting"] else "rests"
        table.add_row(
            one["ns"], ", ".join(one["users"]), f"{age.seconds + 86400 * age.days} s", f"{one['events']}", state
        )
    console = Console(width=max(100, Console().width), markup=False)
    if streams:
        console.print(table)
    text = (
        f"{len(streams)} streams, {gateway['connections']} connections; window {gateway['windowBytes'] / 1e6:.1f} MB, "
    )
    console.print(f"{text}lag {gateway['lagSeconds']} s, {gateway['fallbacks']} fallbacks")
    if gateway["trouble"]:
        console.print(f"the deployment cannot be read: {gateway['trouble']}")
