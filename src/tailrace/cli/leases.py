"""``tailrace leases``: who holds which lease, how far each has come, and taking one away."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli import dead_letters
from tailrace.cli.listen import STORE, store_namespace
from tailrace.cli.output import say
from tailrace.errors import InvalidResumeToken, TailraceError, UsageError
from tailrace.event.resume_token import ResumeToken
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.source.uri import URI_VARIABLE, find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.consumer import Lease, MongoLeaseStore

_DESCRIPTION: Final = """\
List the leases of listeners: owner, version, age, position and how many seconds it lags behind. With release, take a
lease from its owner: what the owner does from then on is refused, and another listener takes over at once.

dead-letters lists the changes that listeners gave up (tailrace listen --dead-letters), with position and reason. With
replay, hand them to a handler, oldest first; each is removed when the handler returns. Choose one by the beginning of
its change id, or all of them with --all."""
_ACTIONS: Final = ("list", "release", "dead-letters")


@dataclass(frozen=True)
class LeaseLine:
    """One lease as it is shown. Ages and lags are in seconds; ``trouble`` says why a record cannot be read."""

    resource: str
    owner: str | None = None
    version: int | None = None
    state: str = ""
    age: float | None = None
    position: str | None = None
    lag: int | None = None
    gaps: int = 0
    trouble: str | None = None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "leases",
        help="list the leases of listeners, or take one away",
        usage="tailrace leases [list] [URI] [--store DB.COLL] [--format pretty|json]\n"
        "       tailrace leases release RESOURCE [URI] [--store DB.COLL]\n"
        "       tailrace leases dead-letters [list] [URI] [--letters DB.COLL] [--resource NAME] "
        "[--format pretty|json]\n"
        "       tailrace leases dead-letters replay MODULE:HANDLER [URI] (--change ID | --all) [--letters DB.COLL] "
        "[--resource NAME]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="*", metavar="...", help="list (the default), release RESOURCE or dead-letters; then the URI"
    )
    parser.add_argument("--uri", metavar="URI", help=f"as for tailrace watch (default: {URI_VARIABLE})")
    parser.add_argument("--store", default=STORE, metavar="DB.COLL", help=f"where leases are kept (default: {STORE})")
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    dead_letters.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out; 1 where a record cannot be read. Raises TailraceError."""
    from tailrace.client import connect  # noqa: PLC0415  so that --help does not load it
    from tailrace.consumer import MongoLeaseStore  # noqa: PLC0415

    words = list(args.words)
    action = words.pop(0) if words and words[0] in _ACTIONS else "list"
    if action == "dead-letters":
        return dead_letters.run(args, words)
    dead_letters.refuse_arguments(args)
    resource = words.pop(0) if action == "release" and words else None
    if action == "release" and resource is None:
        raise UsageError("which lease is to be released?", hint="tailrace leases release RESOURCE")
    uri = words.pop(0) if words and is_uri_argument(words[0]) and args.uri is None else args.uri
    if words:
        raise UsageError(f"{words[0]!r} is not understood here", hint="tailrace leases --help shows how")
    database, collection = store_namespace(args.store)
    with connect(find_uri(uri)) as client:
        store = MongoLeaseStore(client[database][collection])
        if resource is not None:
            return _release(store, resource, args.store)
        lines = [lease_line(name, found, store.now(), _newest(client)) for name, found in store.examine()]
    if args.format == "json":
        say(json.dumps([asdict(line) for line in lines], indent=2, ensure_ascii=False), lines=True)
    else:
        _print_table(lines, args.store)
    return 1 if any(line.trouble for line in lines) else 0


def _newest(client: Any) -> ClusterTime:
    reply = client.admin.command("ping")
    return ClusterTime.from_timestamp(reply["operationTime"])


def _release(store: MongoLeaseStore, resource: str, where: str) -> int:
    before = store.revoke(resource)
    if before is None:
        raise UsageError(f"there is no lease on {resource!r} in {where}", hint="tailrace leases lists those that are")
    say(f"released {resource}: " + (f"it was held by {before.owner}" if before.owner else "nobody held it"))
    return 0


def lease_line(resource: str, found: Lease | TailraceError, now: datetime, newest: ClusterTime) -> LeaseLine:
    """What is shown of a record, at the store's time ``now`` in a deployment that has come to ``newest``."""
    if isinstance(found, TailraceError):
        return LeaseLine(resource, state="unreadable", trouble=str(found))
    state = "free" if found.owner is None else "expired" if found.is_free(now) else "held"
    age = None if found.acquired_at is None or found.owner is None else (now - found.acquired_at).total_seconds()
    position = found.position
    if position is not None and "sealed" in position:
        state, position = "sealed", position["sealed"]  # a lane of an earlier number of lanes
    time = position_time(position)
    lanes = None if position is None else position.get("lanes")
    return LeaseLine(
        resource,
        found.owner,
        found.version,
        state,
        None if age is None else round(age, 1),
        None if time is None and lanes is None else f"{lanes} lanes" if time is None else str(time),
        None if time is None else max(0, newest.seconds - time.seconds),
        len((position or {}).get("gaps", ())),
    )


def position_time(position: Mapping[str, Any] | None) -> ClusterTime | None:
    """The cluster time that a committed position stands at; ``None`` where it has none."""
    if position is None:
        return None
    try:
        if position.get("token") is not None:
            return ResumeToken.parse(position["token"]).cluster_time
        return None if position.get("at") is None else ClusterTime.from_timestamp(position["at"])
    except (InvalidResumeToken, AttributeError, TypeError, ValueError):
        return None


def _print_table(lines: list[LeaseLine], where: str) -> None:
    if not lines:
        say(f"no leases in {where}")
        return
    rows = [("RESOURCE", "STATE", "VERSION", "AGE", "LAG", "POSITION", "OWNER")]
    for line in lines:
        rows.append(
            (
                line.resource,
                line.state,
                _text(line.version),
                _text(line.age, " s"),
                _text(line.lag, " s"),
                _position_text(line),
                _text(line.owner),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in lines:
        if line.trouble:
            say(f"{line.resource}: {line.trouble}")


def _text(value: object, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"


def _position_text(line: LeaseLine) -> str:
    return _text(line.position) + (f" ({line.gaps} gaps)" if line.gaps else "")
