"""``tailrace streams``: what a gateway serves."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from bson.int64 import Int64

from tailrace.cli.output import say, say_table
from tailrace.errors import UsageError
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pymongo import MongoClient

_DESCRIPTION: Final = """\
List the change streams that a gateway serves or is opening: namespace, user, age, events sent, whether each
waits for more, or how long its stages have been computing; and the processes that compute. The URI is the gateway's.
If the deployment has users, this needs the action inprog on the cluster (the role clusterMonitor grants it too, with
the right to read the oplog)."""
_COMMAND_NOT_FOUND: Final = 59
_COLUMNS: Final[dict[str, Literal["left", "right"]]] = {
    "stream": "left",
    "user": "left",
    "open for": "right",
    "events": "right",
    "state": "left",
    "cursor": "left",
}


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
    parser.add_argument(
        "--kill",
        type=int,
        metavar="CURSOR",
        help="close this stream, or stop opening it, and end what its stages compute (needs killAnyCursor where it is "
        "another user's)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    from tailrace.read.source.connection import open_client  # noqa: PLC0415  so that --help does not load it

    with open_client(find_uri(args.uri)) as client:
        reply = ask_streams(client)
        if args.kill is not None:
            return _kill(client, reply["streams"], args.kill)
    if args.format == "json":
        say(json.dumps({"streams": reply["streams"], "gateway": reply["gateway"]}, default=_text, indent=2), lines=True)
    else:
        _print_table(reply, datetime.now(UTC))
    return 0


def ask_streams(client: MongoClient[Any]) -> Mapping[str, Any]:
    """What the gateway that ``client`` leads to says about its streams. Raises UsageError where that is a server, and
    SourceError where it does not answer."""
    from pymongo.errors import OperationFailure, PyMongoError  # noqa: PLC0415  as in run()

    from tailrace.read.source.failure import source_error  # noqa: PLC0415

    try:
        reply: Mapping[str, Any] = client.admin.command("tailraceStreams")
    except PyMongoError as error:
        if isinstance(error, OperationFailure) and error.code == _COMMAND_NOT_FOUND:
            raise UsageError(
                "that is a server, not a gateway", hint="Name the address that tailrace gateway listens at"
            ) from None
        raise source_error(error, client) from None
    return reply


def _kill(client: MongoClient[Any], streams: Sequence[Mapping[str, Any]], cursor: int) -> int:
    """Close one of the streams. Raises UsageError and SourceError."""
    from pymongo.errors import PyMongoError  # noqa: PLC0415  as in run()

    from tailrace.read.source.failure import source_error  # noqa: PLC0415

    for one in streams:
        if one["cursor"] == cursor:
            database, _, collection = one["ns"].partition(".")
            try:
                client[database].command("killCursors", collection, cursors=[Int64(cursor)])
            except PyMongoError as error:
                raise source_error(error, client) from None
            say(f"closed the stream {cursor} on {one['ns']}")
            return 0
    raise UsageError(f"there is no stream {cursor}", hint="tailrace streams lists them")


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _print_table(reply: Mapping[str, Any], now: datetime) -> None:
    gateway, streams = reply["gateway"], reply["streams"]
    if streams:
        say_table(_COLUMNS, (_row(one, now) for one in streams))
    text = (
        f"{len(streams)} streams, {gateway['connections']} connections; window {gateway['windowBytes'] / 1e6:.1f} MB, "
    )
    say(f"{text}lag {gateway['lagSeconds']} s, {gateway['fallbacks']} fallbacks")
    for one in gateway["processes"]:
        doing = "idle"
        if one["computing"] is not None:
            doing = f"computes for {one['computingSeconds']:.1f} s for {one['computing']}"
        say(f"process {one['pid']}: {one['streams']} streams, {one['cpuSeconds']:.1f} s of CPU, {doing}")
    if gateway["trouble"]:
        say(f"the deployment cannot be read: {gateway['trouble']}")


def _row(stream: Mapping[str, Any], now: datetime) -> tuple[object, ...]:
    age = now - stream["openedAt"].replace(tzinfo=UTC)
    open_for = f"{age.seconds + 86400 * age.days} s"
    return stream["ns"], ", ".join(stream["users"]), open_for, stream["events"], state_of(stream), stream["cursor"]


def state_of(stream: Mapping[str, Any]) -> str:
    """What a stream is doing, in a word."""
    if stream["computingSeconds"] is not None:
        return f"computes for {stream['computingSeconds']:.1f} s"
    return "opens" if stream["opening"] else "waits" if stream["waiting"] else "rests"
