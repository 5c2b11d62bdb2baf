"""``tailrace leases``: who holds which lease, how far each has come, and what an operator does about it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tailrace.cli import dead_letters
from tailrace.cli.handler_argument import LETTERS, STORE, store_namespace
from tailrace.cli.lease_lines import belongs, lease_lines, say_details, say_json, say_lines, without_sealed
from tailrace.cli.output import say
from tailrace.cli.token import parse_time, parse_timestamp, read_token
from tailrace.errors import SourceError, UsageError
from tailrace.read.source.uri import URI_VARIABLE, find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.act.consumer.lease_operations import LeaseOperations
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore
    from tailrace.act.consumer.rules.position import StreamPosition

_DESCRIPTION: Final = """\
List the leases of listeners: owner, version, age, position and how many seconds each lags behind; or act on one. Every
action takes the name of a resource, and applies to all its lanes; NAME/2 is its lane 2 alone.

  list     all leases; sealed lanes, left from an earlier number of lanes, only with --sealed
  show     one resource, with its tokens and gaps
  pause    its listeners finish the change in hand, commit, give the lease back and begin no other; they log it, and
           their metric "paused" is 1. Waits until the lease is back (--wait); --now takes it away at once
  resume   let them continue
  seek     put the position at a time or after a token, older or newer. An owner at work loses the lease and commits
           nothing more; what is passed over is recorded as a gap
  skip     the next change, or the one that fails again and again, goes to the dead letters, and the position moves
           past it. Waits until a listener has done that; --withdraw withdraws the request
  release  take the lease from its owner, at once: what the owner does from then on is refused. With --to OWNER (an
           owner's id, or its part before a hyphen, such as the host's name) nobody else takes it for --within seconds
  delete   remove it for good, with its position. Refused while it is held, unless --force is given

"tailrace leases dead-letters" is the same as "tailrace dead-letters".

The exit status is 0 when the action is done, and 1 when it is not, or not within --wait, or when a record cannot be
read."""
#: What each action does, and the options that belong to it alone.
_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "list": ("sealed",),
    "show": ("sealed",),
    "pause": ("now", "wait"),
    "resume": (),
    "seek": ("time", "timestamp", "token", "source"),
    "skip": ("now", "wait", "letters", "all_lanes", "withdraw"),
    "release": ("to", "within"),
    "delete": ("force",),
}
#: The word in "which lease is to be ...?".
_DONE: Final = {
    "show": "shown",
    "pause": "paused",
    "resume": "resumed",
    "seek": "moved",
    "skip": "moved past a change",
    "release": "released",
    "delete": "deleted",
}
_WAIT_S: Final = 60.0
_WITHIN_S: Final = 60.0
_LOOK_S: Final = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "leases",
        help="list the leases of listeners; pause, move, hand over or delete one",
        usage="tailrace leases [list] [URI] [--sealed] [--json] [--store DB.COLL]\n"
        "       tailrace leases show RESOURCE [URI] [--json]\n"
        "       tailrace leases pause RESOURCE [URI] [--now] [--wait S]\n"
        "       tailrace leases resume RESOURCE [URI]\n"
        "       tailrace leases seek RESOURCE [URI] (--time ISO | --timestamp T,I | --token TOKEN) [--source URI]\n"
        "       tailrace leases skip RESOURCE [URI] [--all-lanes] [--now] [--wait S] [--letters DB.COLL] [--withdraw]\n"
        "       tailrace leases release RESOURCE [URI] [--to OWNER] [--within S]\n"
        "       tailrace leases delete RESOURCE [URI] [--force]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="...", help="an action (default: list), the RESOURCE; then the URI")
    parser.add_argument("--uri", metavar="URI", help=f"as for tailrace watch (default: {URI_VARIABLE})")
    parser.add_argument("--store", default=STORE, metavar="DB.COLL", help=f"where leases are kept (default: {STORE})")
    parser.add_argument("--format", choices=("pretty", "json"), default="pretty", help="default: pretty")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    parser.add_argument("--sealed", action="store_true", help="list, show: sealed lanes too")
    parser.add_argument("--now", action="store_true", help="pause, skip: do not wait for the change in hand")
    parser.add_argument(
        "--wait", type=float, metavar="S", help=f"pause, skip: wait at most S seconds (default: {_WAIT_S:g})"
    )
    parser.add_argument("--time", metavar="ISO", help='seek: a time, "2026-11-21T10:00:00Z"; without offset: UTC')
    parser.add_argument("--timestamp", metavar="T,I", help="seek: a BSON timestamp: seconds since 1970 and increment")
    parser.add_argument("--token", metavar="HEX|JSON", help="seek: a resume token; the change after it comes next")
    parser.add_argument("--source", metavar="URI", help="seek: the watched deployment, if it is another")
    parser.add_argument("--all-lanes", action="store_true", help="skip: the next change of each lane")
    parser.add_argument(
        "--withdraw",
        action="store_true",
        help="skip: withdraw the request, so that the next change is handled after all",
    )
    parser.add_argument("--to", metavar="OWNER", help="release: who gets the lease next")
    parser.add_argument(
        "--within",
        type=float,
        metavar="S",
        help=f"release: for S seconds only OWNER can take it (default: {_WITHIN_S:g})",
    )
    parser.add_argument("--force", action="store_true", help="delete: even while the lease is held")
    dead_letters.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out. Raises TailraceError."""
    words = list(args.words)
    if words and words[0] == "dead-letters":
        _refuse_options(args, "dead-letters", ("letters", "source"))
        return dead_letters.run(args, words[1:])
    action = words.pop(0) if words and words[0] in _OPTIONS else "list"
    dead_letters.refuse_arguments(args, but="letters")
    _refuse_options(args, action, _OPTIONS[action])
    resource = words.pop(0) if action != "list" and words and not is_uri_argument(words[0]) else ""
    if action != "list" and not resource:
        raise UsageError(f"which lease is to be {_DONE[action]}?", hint=f"tailrace leases {action} RESOURCE")
    uri = words.pop(0) if words and is_uri_argument(words[0]) and args.uri is None else args.uri
    if words:
        raise UsageError(f"{words[0]!r} is not understood here", hint="tailrace leases --help shows how")
    from tailrace.act.consumer.lease_operations import LeaseOperations  # noqa: PLC0415
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore  # noqa: PLC0415
    from tailrace.watch.client import connect  # noqa: PLC0415  so that --help does not load it

    database, collection = store_namespace(args.store)
    with connect(find_uri(uri)) as client:
        store = MongoLeaseStore(client[database][collection])
        if action in ("list", "show"):
            return _show(args, store, client, resource)
        wait = _WAIT_S if args.wait is None else args.wait
        operations = LeaseOperations(store, where=args.store, wait_seconds=wait)
        if action == "seek":
            return _seek(args, operations, client, resource)
        return _ACTIONS[action](args, operations, resource)


def _refuse_options(args: argparse.Namespace, action: str, allowed: tuple[str, ...]) -> None:
    for owner, names in _OPTIONS.items():
        for name in names:
            if name not in allowed and getattr(args, name) not in (None, False):
                option = name.replace("_", "-")
                raise UsageError(
                    f"--{option} belongs to {owner}, not to {action}", hint="tailrace leases --help shows how"
                )


def _show(args: argparse.Namespace, store: MongoLeaseStore, client: Any, resource: str) -> int:
    from tailrace.watch.client.client import operation_time  # noqa: PLC0415

    every = lease_lines(store.examine(), store.now(), operation_time(client))
    found = [line for line in every if not resource or belongs(line, resource)]
    if resource and not found:
        raise UsageError(
            f"there is no lease on {resource!r} in {args.store}", hint="tailrace leases lists those that are"
        )
    lines = found if args.sealed else without_sealed(found)
    if args.format == "json":
        say_json(lines, details=bool(resource))
    elif not found:
        say(f"no leases in {args.store}")
    else:
        say_lines(lines, len(found) - len(lines))
        for line in lines if resource else ():
            say_details(line)
    return 1 if any(line.trouble for line in lines) else 0


def _pause(args: argparse.Namespace, operations: LeaseOperations, resource: str) -> int:
    leases = operations.pause(resource, now=args.now)
    say(
        f"paused {resource}{_lanes(len(leases.lanes))}: nobody holds it. "
        f"tailrace leases resume {resource} lets it go on"
    )
    return 0


def _resume(_: argparse.Namespace, operations: LeaseOperations, resource: str) -> int:
    was = operations.resume(resource)
    say(f"resumed {resource}" if was else f"{resource} was not paused")
    return 0


def _release(args: argparse.Namespace, operations: LeaseOperations, resource: str) -> int:
    if args.to is None:
        if args.within is not None:
            raise UsageError("--within says how long it is left to the owner of --to", hint="Give --to OWNER")
        before = operations.release(resource)
    else:
        within = _WITHIN_S if args.within is None else args.within
        before = operations.release(resource, args.to, within)
    owners = sorted({record.owner for record in before if record.owner})
    say(f"released {resource}: " + (f"it was held by {', '.join(owners)}" if owners else "nobody held it"))
    if args.to is not None:
        say(f"for {within:g} s only {args.to} takes it, then anybody")
    return 0


def _delete(args: argparse.Namespace, operations: LeaseOperations, resource: str) -> int:
    names = operations.delete(resource, force=args.force)
    say(f"deleted {resource}" + (f" and {len(names) - 1} leases of its lanes and processes" if len(names) > 1 else ""))
    return 0


def _skip(args: argparse.Namespace, operations: LeaseOperations, resource: str) -> int:
    if args.withdraw:
        was = operations.withdraw_skip(resource)
        say(f"{resource}: " + ("the next change is handled after all" if was else "no change was to be left out"))
        return 0
    letters = args.letters or LETTERS
    store_namespace(letters)
    names = operations.skip(resource, letters, all_lanes=args.all_lanes, now=args.now)
    wait = _WAIT_S if args.wait is None else args.wait
    end = time.monotonic() + wait
    while (pending := operations.pending(names)) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    if pending:
        say(
            f"{', '.join(pending)}: the next change will be left out; no listener has reached one within {wait:g} s. "
            f"tailrace leases skip {resource} --withdraw withdraws that"
        )
        return 1
    say(f"skipped one change of {resource}{_lanes(len(names))}; tailrace dead-letters --resource {resource} shows it")
    return 0


def _lanes(count: int) -> str:
    return f", {count} lanes" if count > 1 else ""


def _seek(args: argparse.Namespace, operations: LeaseOperations, client: Any, resource: str) -> int:
    from tailrace.watch.client import connect  # noqa: PLC0415  as in run()

    target = _target(args)
    if args.source is None:
        oldest, newest = _reach(client)
    else:
        with connect(find_uri(args.source)) as source:
            oldest, newest = _reach(source)
    before = operations.seek(resource, target, oldest=oldest, newest=newest)
    come = "" if before is None else f"; it was at {before.cluster_time}"
    say(f"moved {resource} to {target.cluster_time}{come}")
    return 0


def _reach(client: Any) -> tuple[Any, Any]:
    """The oldest and the newest time that a stream may begin at; ``None`` where that cannot be known."""
    from tailrace.act.consumer.snapshots import oldest_reachable  # noqa: PLC0415
    from tailrace.watch.client.client import operation_time  # noqa: PLC0415  as in run()

    try:
        return oldest_reachable(client), operation_time(client)
    except SourceError:  # such as: the user may not read the oplog
        return None, None


def _target(args: argparse.Namespace) -> StreamPosition:
    from tailrace.act.consumer.rules.position import StreamPosition  # noqa: PLC0415  as in run()

    given = [name for name in ("time", "timestamp", "token") if getattr(args, name) is not None]
    if len(given) != 1:
        raise UsageError("the new position is missing", hint="Give one of --time, --timestamp and --token")
    if args.token is not None:
        token = read_token(args.token)
        return StreamPosition(token.to_document(), token.from_invalidate)
    at = parse_time(args.time) if args.time is not None else parse_timestamp(args.timestamp)
    return StreamPosition(at=at.to_timestamp())


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace, LeaseOperations, str], int]]] = {
    "pause": _pause,
    "resume": _resume,
    "skip": _skip,
    "release": _release,
    "delete": _delete,
}
