"""``tailrace replay``: the change events of a dumped oplog."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.cli.event_writer import EventWriter, new_writer, say_skipped
from tailrace.cli.stream_arguments import Until, add_stream_arguments, collation_of, pipeline_of, stage_of
from tailrace.errors import UsageError
from tailrace.oplog.cluster_time import ClusterTime
from tailrace.oplog.namespace import Scope
from tailrace.plan.profile import PROFILES, ServerProfile, chosen_profile, profile_for

if TYPE_CHECKING:
    from tailrace.event.event_block import EventBlock
    from tailrace.pipeline.stream import Stream
    from tailrace.plan.plan import Plan
    from tailrace.source.base import OplogSource

_DESCRIPTION = """\
Print the change events that a running deployment would have given for the entries of an oplog dump: the oplog.bson of
"mongodump --oplog" (plain or gzipped), a dump directory, or local/oplog.rs.bson; or for those of an archive that
"tailrace archive" made. Neither holds current documents, so "--full-document updateLookup" gives null; pre-images are
found where they were archived, or config/system.preimages.bson was dumped too."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "replay",
        help="print the change events of an oplog dump or an archive",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "dump", metavar="DUMP", help="an oplog.bson, a dump directory or an archive; - reads standard input"
    )
    add_stream_arguments(parser)
    parser.add_argument(
        "--server-version",
        metavar="V",
        help=f"give the events of this version, from {PROFILES[0].name} on (default: the archive's own, or 6.0: a dump "
        "does not name it)",
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
    archived = None if args.dump == "-" else _archived_version(Path(args.dump))
    plan = build_plan(options, _profile(args.server_version, archived))
    if args.explain:
        print_explanation(explain(plan, reads="dump"), args.format)
        return 0
    until = Until.parse(args.until, None)
    writer = new_writer(args.format)
    try:
        if archived is not None:
            _print_events(_archive_blocks(plan, Path(args.dump), until), writer, until)
        else:
            with contextlib.ExitStack() as stack:
                source = DumpSource(stack.enter_context(_standard_input()) if args.dump == "-" else args.dump)
                _print_events(_blocks(plan, source, until), writer, until)
    finally:
        writer.flush()
    return 0


def _archived_version(folder: Path) -> str | None:
    """The server version of the archive at ``folder``; ``None`` where there is none."""
    if not (folder / "archive.json").is_file():
        return None
    from tailrace.archive.layout import existing  # noqa: PLC0415

    return existing(folder).server_version


def _profile(chosen: str | None, archived: str | None) -> ServerProfile:
    return profile_for(archived) if chosen is None and archived is not None else chosen_profile(chosen or "6.0")


@contextlib.contextmanager
def _standard_input() -> Iterator[str]:
    """A file with what comes on standard input: a dump is read more than once."""
    with tempfile.NamedTemporaryFile(prefix="tailrace-replay-", suffix=".bson") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield file.name


def _archive_blocks(plan: Plan, folder: Path, until: Until) -> Generator[EventBlock, None, None]:
    from tailrace.archive.cluster import ArchivedCluster  # noqa: PLC0415
    from tailrace.archive.layout import existing  # noqa: PLC0415
    from tailrace.archive.source import ArchiveSource  # noqa: PLC0415

    if not existing(folder).is_cluster:
        yield from _blocks(plan, ArchiveSource(folder), until)
        return
    cluster = ArchivedCluster(folder)
    archived = cluster.open(_begun(plan, cluster.oldest(), complete=False))
    try:
        yield from archived
        _refuse_search(archived.stream)
    finally:
        say_skipped(archived.stream.statistics.unknown_operations)


def _blocks(plan: Plan, source: OplogSource, until: Until) -> Generator[EventBlock, None, None]:
    from tailrace.pipeline.stream import ONE_OPLOG, open_stream  # noqa: PLC0415
    from tailrace.source.drive import answers_of, drive  # noqa: PLC0415

    plan = _begun(plan, *source.oldest())
    stream, answers = open_stream(plan), answers_of(source)
    try:
        for batch in source.tail(plan.read_after or ClusterTime(0)):
            stream.feed(ONE_OPLOG, batch)
            yield from drive(stream, answers)
            if stream.invalidated or (until.time is not None and batch.high_water >= until.time):
                return
        _refuse_search(stream)
    finally:
        say_skipped(stream.statistics.unknown_operations)


def _begun(plan: Plan, oldest: ClusterTime, complete: bool) -> Plan:
    if plan.read_after is None:
        return plan.start_at(oldest)
    plan.confirm_history(oldest, complete)
    return plan


def _refuse_search(stream: Stream) -> None:
    if stream.searching:
        raise UsageError("the entries end before the resume token is found", hint="Replay a later dump")


def _print_events(blocks: Generator[EventBlock, None, None], writer: EventWriter, until: Until) -> None:
    with contextlib.closing(blocks):  # what it has to say comes now
        _print_blocks(blocks, writer, until)


def _print_blocks(blocks: Generator[EventBlock, None, None], writer: EventWriter, until: Until) -> None:
    for block in blocks:
        for event, token in zip(block.events(), block.tokens(), strict=True):
            if until.all_counted or until.is_before(token):
                return
            writer.write(event)
            until.count()
        writer.flush()
        if until.all_counted:
            return
