"""``tailrace compare``: the server's own change stream next to ours, on a deployment of the user's own."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bson.json_util import RELAXED_JSON_OPTIONS, dumps

from tailrace.cli.output import say, tell
from tailrace.cli.sampled import report_path
from tailrace.cli.signal_calls import call_aside
from tailrace.cli.stream_arguments import (
    add_image_arguments,
    add_switches,
    add_uri_argument,
    parse_duration,
    pipeline_of,
    switches_of,
)
from tailrace.core.plan.profile import for_people
from tailrace.errors import TailraceError
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from tailrace.watch.compare.comparison import Compared
    from tailrace.watch.compare.deployment import DeploymentComparison

#: The exit status where the two streams differ: 1 is an error, and 2 wrong usage.
DIFFERENT: Final = 3
_DESCRIPTION = """\
Read the server's own change stream and Tailrace's side by side, on your deployment and with your writes, and compare
them byte for byte: events, resume tokens, their order, and what follows after resumes at random tokens. It only reads.

The exit status is 0 if nothing differs, 3 if something does, and 1 if the comparison could not be made. Each
kind of difference is shown once, with its oplog entries; all values and names in it are masked."""
_EXAMPLES = """\
examples:
  tailrace compare URI shop.orders --duration 1h
  tailrace compare URI --duration 5m --show-expanded-events --report report.json
  tailrace compare URI shop --events 10000 --events-per-second 500

rights: those of 'tailrace watch' (docs/how-to/security.md), and the actions find and changeStream on what is watched
(the role read on a database; readAnyDatabase for the whole deployment)."""
_SHOWN_MAX: Final = 2000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "compare",
        help="compare the server's own change stream with ours, on your deployment",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_uri_argument(parser)
    parser.add_argument(
        "namespace", nargs="?", metavar="db[.coll]", help="a database or a collection (default: everything)"
    )
    parser.add_argument("--duration", metavar="5m|1h", help="how long (s, m, h, d; default: until Ctrl-C or SIGTERM)")
    parser.add_argument("--events", type=_count, metavar="N", help="end after N events")
    for what, default in (("events", "2000"), ("mb", "8")):
        unit = "events" if what == "events" else "MB of events"
        parser.add_argument(
            f"--{what}-per-second",
            type=_rate,
            default=default,
            metavar="N|none",
            help=f"read at most N {unit} a second from each side (default: {default}); none: no limit",
        )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write what was compared and each kind of difference, masked: BSON where the name ends in .bson, "
        "else extended JSON",
    )
    parser.add_argument(
        "--show-names", action="store_true", help="leave field names and namespaces in the report; values stay masked"
    )
    parser.add_argument(
        "--pipeline", metavar="JSON", help="stages after $changeStream, as an array in extended JSON, or @FILE with it"
    )
    group = parser.add_argument_group("options of the change stream")
    add_image_arguments(group)
    add_switches(group)
    parser.set_defaults(run=run, positionals=("uri", "namespace"))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _rate(text: str) -> float | None:
    if text == "none":
        return None
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    duration = None if args.duration is None else parse_duration("--duration", args.duration)
    pipeline = pipeline_of(args)
    report = None if args.report is None else report_path("--report", args.report)
    uri = find_uri(args.uri)

    from tailrace.cli.one_shard import warn_of_one_shard  # noqa: PLC0415
    from tailrace.watch.compare.comparison import ComparisonLimits  # noqa: PLC0415  so that --help does not load it
    from tailrace.watch.compare.deployment import DeploymentComparison, Streams  # noqa: PLC0415

    switches = switches_of(args)
    streams = Streams(
        pipeline=pipeline,
        full_document=args.full_document,
        full_document_before_change=args.full_document_before_change,
        show_expanded_events=switches.pop("showExpandedEvents", False),
        options=switches,
    )
    limits = ComparisonLimits(
        duration_s=duration,
        events=args.events,
        events_per_second=args.events_per_second,
        bytes_per_second=None if args.mb_per_second is None else args.mb_per_second * (1 << 20),
    )
    with DeploymentComparison(uri, args.namespace, streams) as comparison, _stopped_by_signals(comparison):
        warn_of_one_shard(comparison.client)
        _say_begun(comparison, args)
        try:
            comparison.run(limits, progress=_tell_progress)
        except TailraceError:
            if comparison.compared is not None and (comparison.compared.events or comparison.compared.total):
                _give_result(comparison, args, report)  # what was found until then is not lost
            raise
        return _give_result(comparison, args, report)


def _give_result(comparison: DeploymentComparison, args: argparse.Namespace, path: Path | None) -> int:
    """Print the result, and write the report. Returns the exit status that the result means."""
    from tailrace.watch.compare.report import write_report  # noqa: PLC0415  as in run()

    report = comparison.report(show_names=args.show_names)
    if path is not None:
        write_report(report, path)
    assert comparison.compared is not None
    _print(report, comparison.compared, path)
    return DIFFERENT if comparison.compared.total else 0


@contextmanager
def _stopped_by_signals(comparison: DeploymentComparison) -> Iterator[None]:
    """The first signal ends the comparison with its result; a second one ends it at once."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def stop(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, before[each])
        call_aside(comparison.stop)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _say_begun(comparison: DeploymentComparison, args: argparse.Namespace) -> None:
    kind = "a sharded cluster, by its mongos" if comparison.is_cluster else "a replica set"
    known = {
        "measured": "measured",
        "derived": "derived, and not measured yet",
        "unknown": "those of the newest version that it knows: nothing is known about it",
    }[comparison.knowledge]
    tell(
        f"tailrace: comparing {args.namespace or 'everything'} on MongoDB {for_people(comparison.server_version)}, "
        f"{kind}. Tailrace's rules for this version are {known}."
    )
    if args.duration is None and args.events is None and sys.stderr is not None and sys.stderr.isatty():
        tell("tailrace: Ctrl-C ends the comparison and shows its result")


def _tell_progress(compared: Compared) -> None:
    tell(
        f"tailrace: {compared.events:,} events compared, {compared.resumes} resumes, "
        f"{compared.total:,} differences so far"
    )


def _print(report: Mapping[str, Any], compared: Compared, path: Path | None) -> None:
    for number, difference in enumerate(report["differences"], 1):
        _print_difference(number, difference)
    again = f" ({compared.again:,} of them again after {compared.resumes} resumes)" if compared.resumes else ""
    if not compared.events and not compared.total:
        say(f"differences: 0, but nothing was compared: MongoDB {report['server']} gave no event during this time")
        tell("tailrace: nothing was written that the streams show. Compare while your applications write.")
    else:
        seen = f": {compared.seen}" if compared.events else ""
        say(f"differences: {compared.total:,} in {compared.events:,} events of MongoDB {report['server']}{again}{seen}")
    for text in _remarks(compared):
        say(text)
    if path is not None:
        tell(f"tailrace: the report is in {path}")
    elif compared.total:
        tell("tailrace: --report FILE writes this to a file for a bug report")


def _print_difference(number: int, difference: Mapping[str, Any]) -> None:
    where = difference["path"] or difference["place"]
    what = difference["operation"] or "stream"
    say(
        f"difference {number}, {difference['count']:,} times: {difference['says']} ({what}"
        + (f", at {where}" if where else "")
        + (f"; {difference['text']}" if difference["text"] else "")
        + ")"
    )
    shown = [("server", difference["server"]), ("ours", difference["ours"])]
    shown += [("entry", entry["entry"]) for entry in difference["entries"]]
    for name, document in shown:
        if document is not None:
            text = dumps(document["shown"], json_options=RELAXED_JSON_OPTIONS)
            say(f"  {name}: {text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + ' ...'}")


def _remarks(compared: Compared) -> Iterator[str]:
    """What a reader of the result has to know about it."""
    if compared.unnamed:
        yield f"{compared.unnamed:,} more differences are of further kinds, which are not listed"
    if any(found.left_out for found in compared.differences):
        yield "not every difference is shown with its events: together they would take too much memory"
    if compared.behind_s:
        yield (
            f"the last {compared.behind_s:,} s of writes were not compared: more is written than the limits on events "
            "and bytes per second let through"
        )
    if compared.looked_up_apart:
        yield (
            f"the documents of {compared.looked_up_apart:,} updates were looked up at different moments, and were not "
            "compared; everything else in these events was"
        )
    for reason, count in compared.gaps.items():
        yield f"{reason}: both started again, {count} times; what was written in between was not compared"
    if compared.left:
        yield f"{compared.left:,} events at the very end were not compared"
    if compared.unknown_operations:
        kinds = ", ".join(f"'{kind}': {count}" for kind, count in sorted(compared.unknown_operations.items()))
        yield f"oplog entries of unknown kinds, which give no event here: {kinds}"
