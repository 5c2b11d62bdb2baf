"""``tailrace replay``: the change events of a dumped oplog."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.cli.event_writer import EventWriter, new_writer, say_skipped
from tailrace.cli.stream_arguments import Until, add_stream_arguments, collation_of, pipeline_of, stage_of
from tailrace.errors import UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.profile import PROFILES, chosen_profile

if TYPE_CHECKING:
    from tailrace.pipeline.stream import Stream
    from tailrace.plan.plan import Plan
    from tailrace.source.drive import AnswerTo
    from tailrace.source.dump import DumpSource

_DESCRIPTION = """\
Print the change events that a running deployment would have given for the entries of an oplog dump: the oplog.bson of
"mongodump --oplog" (plain or gzipped), a dump directory, or local/oplog.rs.bson. A dump holds no current documents, so
"--full-document updateLookup" gives null; pre-images are found where config/system.preimages.bson was dumped too."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "replay",
        help="print the change events of an oplog dump",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dump", metavar="DUMP", help="an oplog.bson or a dump directory; - reads standard input")
    add_stream_arguments(parser)
    parser.add_argument(
        "--server-version",
        metavar="V",
        default="6.0",
        help=f"give the events of this version, from {PROFILES[0].name} on (default: 6.0); a dump does not name it",
    )
    parser.set_defaults(run=run, positionals=("dump", "namespace"))


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Raises TailraceError, after everything before any damage has been
    printed."""
    from tailrace.cli.explanation import print_explanation  # noqa: PLC0415
    from tailrace.pipeline.explain import explain  # noqa: PLC0415
    from tailrace.plan.options import StreamOptions  # noqa: PLC0415  so that --help does not load it
    from tailrace.plan.plan import build_plan  # noqa: PLC0415
    from tailrace.source.dump import DumpSource  # noqa: PLC0415

    options = StreamOptions.parse(
        Scope.parse(args.namespace), stage_of(args), pipeline_of(args), collation=collation_of(args)
    )
    plan = build_plan(options, chosen_profile(args.server_version))
    if args.explain:
        print_explanation(explain(plan, reads="dump"), args.format)
        return 0
    until = Until.parse(args.until, None)
    writer = new_writer(args.format)
    with contextlib.ExitStack() as stack:
        source = DumpSource(stack.enter_context(_standard_input()) if args.dump == "-" else args.dump)
        _replay(plan, source, writer, until)
    return 0


@contextlib.contextmanager
def _standard_input() -> Iterator[str]:
    """A file with what comes on standard input: a dump is read more than once."""
    with tempfile.NamedTemporaryFile(prefix="tailrace-replay-", suffix=".bson") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield file.name


def _replay(plan: Plan, source: DumpSource, writer: EventWriter, until: Until) -> None:
    oldest, complete = source.oldest()
    if plan.read_after is None:
        plan = plan.start_at(oldest)
    else:
        plan.confirm_history(oldest, complete)
    _print_events(plan, source, writer, until)


def _print_events(plan: Plan, source: DumpSource, writer: EventWriter, until: Until) -> None:
    from tailrace.pipeline.stream import open_stream  # noqa: PLC0415
    from tailrace.source.drive import answers_of  # noqa: PLC0415

    stream, answers = open_stream(plan), answers_of(source)
    try:
        _print_stream(stream, answers, source, writer, until)
    finally:
        writer.flush()
        say_skipped(stream.statistics.unknown_operations)


def _print_stream(stream: Stream, answers: AnswerTo, source: DumpSource, writer: EventWriter, until: Until) -> None:
    from tailrace.pipeline.stream import ONE_OPLOG  # noqa: PLC0415
    from tailrace.source.drive import drive  # noqa: PLC0415

    for batch in source.tail(stream.plan.read_after or ClusterTime(0)):
        stream.feed(ONE_OPLOG, batch)
        for block in drive(stream, answers):
            for event, token in zip(block.events(), block.tokens(), strict=True):
                if until.all_counted or until.is_before(token):
                    return
                writer.write(event)
                until.count()
            writer.flush()
        if stream.invalidated or until.all_counted or (until.time is not None and batch.high_water >= until.time):
            return
    if stream.searching:
        raise UsageError("the dump ends before the resume token is found", hint="Replay a later dump")
