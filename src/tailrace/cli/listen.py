"""``tailrace listen``: a user's handler, called with every change, in one process at a time."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Literal

from tailrace.cli.console_beside import ServiceNumbers, add_console_argument, check_console, console_beside
from tailrace.cli.handler_argument import LETTERS, STORE, load_handler, store_namespace
from tailrace.cli.output import tell
from tailrace.cli.signal_calls import call_aside
from tailrace.cli.standing import add_health_arguments, watched_over
from tailrace.cli.stream_arguments import add_lease_seconds, address_of, pipeline_of
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import UsageError
from tailrace.read.source.uri import find_uri

_DESCRIPTION: Final = """\
Call a handler with every change of a cluster, a database or a collection: in order, in one process at a time, from the
committed position on. Start it as often as you like: one process works, the others wait for its lease. SIGTERM and
Ctrl-C finish the change in hand, commit and release the lease."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "listen",
        help="call a handler with every change, in one process at a time",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("handler", metavar="MODULE:HANDLER", help="a function of one change; async def works too")
    parser.add_argument("--uri", metavar="URI", help="as for tailrace watch (default: TAILRACE_URI)")
    parser.add_argument("--database", metavar="DB", help="watch this database (default: the whole cluster)")
    parser.add_argument("--collection", metavar="COLL", help="watch this collection of the database")
    parser.add_argument("--resource", required=True, metavar="NAME", help="the lease's name: one for each purpose")
    parser.add_argument("--store", default=STORE, metavar="DB.COLL", help=f"where leases are kept (default: {STORE})")
    parser.add_argument("--store-uri", metavar="URI", help="the deployment that keeps them (default: the one watched)")
    parser.add_argument("--partitions", type=int, default=1, metavar="N", help="ordered lanes (default: 1)")
    parser.add_argument(
        "--lane-key",
        metavar="PATH",
        help="with --partitions: keep the order of events with the same value at this path, such as "
        "fullDocument.customer, instead of that of one document's changes",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="share the lanes among N processes, which start and stop together: for CPU-bound handlers (default: 1)",
    )
    parser.add_argument("--engine", choices=("oplog", "server"), default="oplog", help="default: oplog")
    add_watch_arguments(parser)
    add_commit_arguments(parser)
    add_console_argument(parser)
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve statistics to Prometheus, /livez and /readyz (extra: metrics); with --processes the second one "
        "serves at PORT + 1, ...",
    )
    add_health_arguments(parser)
    parser.set_defaults(run=run, is_part=False)


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about the stream."""
    parser.add_argument("--pipeline", metavar="JSON", help="stages after $changeStream, as an array, or @FILE with it")
    parser.add_argument("--full-document", metavar="MODE", help="updateLookup, whenAvailable or required")
    parser.add_argument("--full-document-before-change", metavar="MODE", help="whenAvailable or required")
    parser.add_argument("--show-expanded-events", action="store_true", help="DDL events too, such as createIndexes")
    parser.add_argument(
        "--start",
        choices=("oldest", "now", "snapshot"),
        default="oldest",
        help="where to begin the first time (default: the oldest entry of the oplog)",
    )
    parser.add_argument(
        "--on-history-lost",
        choices=("fail", "snapshot", "gap"),
        default="fail",
        help="when the oplog no longer reaches back to the position: end, copy again, or go on and note the gap",
    )
    parser.add_argument(
        "--on-invalidate",
        choices=("fail", "resume"),
        default="fail",
        help="when what is watched is dropped or renamed: end, or watch its name again (default: fail)",
    )


def add_commit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about leases, commits and errors."""
    parser.add_argument(
        "--commit-every",
        type=int,
        default=1,
        metavar="N",
        help="commit after N changes: faster, and up to N - 1 are handled again after a crash (default: 1)",
    )
    parser.add_argument("--commit-interval", type=float, metavar="S", help="commit after S seconds too")
    add_lease_seconds(parser)
    parser.add_argument(
        "--handler-timeout",
        type=float,
        metavar="S",
        help="give the lease back when the handler works on one change for more than S seconds",
    )
    add_retry_arguments(parser)
    parser.add_argument(
        "--dead-letters",
        metavar="DB.COLL",
        help="write a change whose handler has failed at every try, or that the stream cannot give, to this "
        "collection, beside the leases, and go on; "
        "tailrace dead-letters lists, shows and replays them",
    )
    parser.add_argument(
        "--after-dead-letter",
        choices=("skip", "stop"),
        default="skip",
        help="after a dead letter: go on, or end (default: skip)",
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    check_console(args)
    if args.processes == 1:
        return run_here(args)
    from tailrace.cli.processes import run_processes  # noqa: PLC0415  so that --help does not load it

    return run_processes(divided(args))


def divided(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of each of ``--processes``. Raises UsageError."""
    if not 1 <= args.processes <= args.partitions:
        raise UsageError(
            f"--processes must be between 1 and the number of partitions, {args.partitions}, not {args.processes}",
            hint="A lane is worked on by one process at a time: without a lane a process has nothing to do",
        )
    load_handler(args.handler)  # so that an error is reported once
    parts = [argparse.Namespace(**{**vars(args), "processes": 1, "is_part": True}) for _ in range(args.processes)]
    for part in parts[1:]:
        part.console = None  # one page shows the leases of all
    if args.metrics is not None:
        host, port = address_of(args.metrics, "--metrics")
        for number, part in enumerate(parts):
            part.metrics = f"[{host}]:{port and port + number}"
    return parts


def run_here(args: argparse.Namespace) -> int:
    """Listen in this process. Raises TailraceError."""
    from tailrace.act.consumer.async_listener import AsyncListener  # noqa: PLC0415
    from tailrace.act.consumer.listener import Listener  # noqa: PLC0415
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore  # noqa: PLC0415
    from tailrace.act.consumer.rules.unrun import is_coroutine_function  # noqa: PLC0415
    from tailrace.cli.one_shard import warn_of_one_shard  # noqa: PLC0415  so that --help does not load it
    from tailrace.cli.unknown import tell_unknown  # noqa: PLC0415
    from tailrace.watch.client import connect  # noqa: PLC0415

    handler = load_handler(args.handler)
    kind = AsyncListener if is_coroutine_function(handler) else Listener
    if args.collection and not args.database:
        raise UsageError("--collection needs --database")
    scope = Scope.parse(".".join(filter(None, (args.database, args.collection))))
    scope.check_names()
    uri = find_uri(args.uri)
    store_uri = find_uri(args.store_uri) if args.store_uri else uri
    with connect(uri, engine=args.engine) as client, connect(store_uri) as keeper:
        watched: Any = client
        for name in (scope.database, scope.collection):
            watched = watched[name] if name else watched
        database, collection = store_namespace(args.store)
        store = MongoLeaseStore(keeper[database][collection])
        listener = kind(
            watched,
            handler,
            resource=args.resource,
            store=store,
            partitions=args.partitions,
            lane_key=args.lane_key,
            commit_every=args.commit_every,
            commit_interval=args.commit_interval,
            start=args.start,
            on_history_lost=args.on_history_lost,
            on_invalidate=args.on_invalidate,
            **error_policy(args, keeper, then=args.after_dead_letter),
            handler_timeout=args.handler_timeout,
            lease_seconds=args.lease_seconds,
            pipeline=pipeline_of(args),
            full_document=args.full_document,
            full_document_before_change=args.full_document_before_change,
            show_expanded_events=args.show_expanded_events or None,
        )
        numbers = ServiceNumbers()
        with (
            watched_over([listener], client, store, args, numbers) as told,
            console_beside(args, uri, numbers, store=args.store, letters=args.dead_letters or LETTERS),
            _stopping_on_signals([told, listener.stop], args.is_part),
        ):
            tell(f"tailrace: listening as {listener.owner} on {args.resource}")
            warn_of_one_shard(client)
            tell_unknown(client, scope)
            if isinstance(listener, AsyncListener):
                asyncio.run(listener.run())
            else:
                listener.run()
    return 0


def add_retry_arguments(parser: argparse.ArgumentParser) -> None:
    """Add when a change that a handler has failed at is tried again."""
    parser.add_argument(
        "--retries", type=int, default=0, metavar="N", help="if the handler raises, call it up to N more times"
    )
    parser.add_argument(
        "--retry-first",
        type=float,
        default=0.05,
        metavar="S",
        help="wait S seconds before the first retry (default: 0.05)",
    )
    parser.add_argument(
        "--retry-factor",
        type=float,
        default=2.0,
        metavar="F",
        help="wait F times as long before each further retry (default: 2)",
    )
    parser.add_argument(
        "--retry-longest", type=float, default=5.0, metavar="S", help="never wait more than S seconds (default: 5)"
    )


def error_policy(args: argparse.Namespace, keeper: Any, *, then: Literal["skip", "stop"] = "skip") -> Any:
    """The options of a listener for ``--retries`` and ``--dead-letters``, which ``keeper`` keeps. Raises UsageError."""
    from tailrace.act.consumer.dead_letters import DeadLetters  # noqa: PLC0415
    from tailrace.act.consumer.rules.retry_schedule import RetrySchedule  # noqa: PLC0415

    retry = RetrySchedule(args.retries, args.retry_first, args.retry_factor, args.retry_longest)
    if args.dead_letters is None:
        return {"retries": retry}
    database, collection = store_namespace(args.dead_letters)
    letters = DeadLetters(keeper[database][collection], tries=args.retries + 1, then=then)
    return {"on_error": letters, "retries": replace(retry, retries=0)}


@contextmanager
def _stopping_on_signals(calls: Sequence[Callable[[], None]], is_part: bool) -> Iterator[None]:
    """SIGTERM and Ctrl-C stop the listener; a second signal ends it at once.

    A process of ``--processes`` (``is_part``) ignores further signals: the command tells it to stop, and a supervisor
    may do the same.
    """

    def on_signal(number: int, _frame: object) -> None:
        # Not SIG_IGN, which programs that the handler starts would inherit.
        signal.signal(number, (lambda *_: None) if is_part else before[signal.Signals(number)])
        tell("tailrace: stopping: the change in hand is finished first")
        for call in calls:
            call_aside(call)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not is_part:
                signal.signal(number, handler)
