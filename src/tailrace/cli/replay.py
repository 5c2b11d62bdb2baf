"""``tailrace replay``: the change events of a dumped oplog."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.cli.event_writer import EventWriter, MaskingWriter, new_writer, say_skipped
from tailrace.cli.output import tell
from tailrace.cli.stream_arguments import (
    Until,
    add_stream_arguments,
    collation_of,
    pipeline_of,
    stage_of,
    token_argument,
)
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import PROFILES, ServerProfile, chosen_profile, for_people, profile_for
from tailrace.errors import TailraceError, UsageError

if TYPE_CHECKING:
    from tailrace.core.event.event_block import EventBlock
    from tailrace.core.plan.options import StreamOptions
    from tailrace.core.plan.plan import Plan
    from tailrace.read.archive.layout import Description, VersionSpan
    from tailrace.read.archive.replay import ArchiveReplay
    from tailrace.read.source.base import OplogSource
    from tailrace.read.source.dump import DumpSource
    from tailrace.read.source.dump_version import SaidVersion
    from tailrace.read.source.mask_file import Masks

_DESCRIPTION = """\
Print the change events that a running deployment would have given for the entries of an oplog dump: the oplog.bson of
"mongodump --oplog" (plain or gzipped), a dump directory, local/oplog.rs.bson, or what "mongodump --oplog --archive"
writes; or for those of an archive that "tailrace archive" made. None of these holds current documents, so
"--full-document updateLookup" gives null. Pre-images are found if they were archived, or if
config/system.preimages.bson was dumped too."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "replay",
        help="print the change events of an oplog dump or an archive",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "dump",
        metavar="DUMP",
        help="an oplog.bson, a dump directory, or an archive of mongodump or Tailrace, the latter also at "
        "s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX; - reads standard input",
    )
    add_stream_arguments(parser)
    parser.add_argument(
        "--server-version",
        metavar="V",
        help=f"give the events of this version, {PROFILES[0].name} or later (default: for an archive, the version that "
        "the servers had at each entry; for a dump, the one that its prelude.json or header names, or that its entries "
        "prove, or 6.0; standard error says which, and why)",
    )
    parser.add_argument(
        "--masks",
        metavar="FILE",
        help="drop, hash or tokenise fields of every event, as this file declares (extra: masks)",
    )
    parser.set_defaults(run=run, positionals=("dump", "namespace"))


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Raises TailraceError, after everything before any damage has been
    printed."""
    from tailrace.cli.explanation import print_explanation  # noqa: PLC0415
    from tailrace.core.pipeline.explain import explain  # noqa: PLC0415
    from tailrace.core.plan.options import StreamOptions  # noqa: PLC0415  so that --help does not load it
    from tailrace.core.plan.plan import build_plan  # noqa: PLC0415

    pipeline = pipeline_of(args)
    options = StreamOptions.parse(Scope.parse(args.namespace), stage_of(args), pipeline, collation=collation_of(args))
    masks = _masks(args.masks, options)
    archived = None if args.dump == "-" else _archived(args.dump)
    until = Until.parse(args.until, None)
    with contextlib.ExitStack() as stack:
        if archived is None:
            source, said = _dump(args.dump, stack, explains=args.explain)
            plan = build_plan(options, _profile_of_dump(args.server_version, source, said))
        elif args.explain:
            profile = _first_profile(args.server_version, archived.spans(options.start or ClusterTime(0)))
            plan = build_plan(options, profile)
        if args.explain:
            print_explanation(explain(plan, reads="dump"), args.format)
            return 0
        if archived is not None:
            blocks = _archive_blocks(options, args.dump, args.server_version, until)
        else:
            assert source is not None
            blocks = _blocks(plan, source, until)
        writer = new_writer(args.format)
        try:
            found = _print_events(blocks, writer if masks is None else MaskingWriter(writer, masks), until)
        except TailraceError as error:
            if masks is None:
                raise
            from tailrace.core.masking.events import without_values  # noqa: PLC0415  as below

            raise without_values(error) from None
        finally:
            writer.flush()
        if not found and args.namespace:
            tell(f"tailrace: no event of {args.namespace} was found in {args.dump}")
    return 0


def _masks(file: str | None, options: StreamOptions) -> Masks | None:
    """The masks that a file declares, for a stream whose pipeline goes together with them."""
    if file is None:
        return None
    from tailrace.core.masking.stages import check_stages  # noqa: PLC0415  so that --help does not load the engine
    from tailrace.read.source.mask_file import Masks  # noqa: PLC0415

    masks = Masks.load(file)
    check_stages(options.pipeline)
    _ = masks.compiled  # a key that is missing is reported first
    return masks


def _archived(where: str) -> Description | None:
    """What the archive at ``where`` says about itself; ``None`` where there is none. In an object store there must
    be."""
    from tailrace.base.object_place import check_tried, is_object_uri  # noqa: PLC0415  not for --help

    check_tried(where)
    if not is_object_uri(where) and not (Path(where) / "archive.json").is_file():
        return None
    from tailrace.read.archive.layout import existing  # noqa: PLC0415
    from tailrace.read.archive.place import archive_place  # noqa: PLC0415

    return existing(archive_place(where))


def _first_profile(chosen: str | None, spans: Sequence[VersionSpan]) -> ServerProfile:
    """The version that is named, or else the archive's at the start of the stream, which is then printed."""
    if chosen is not None:
        return chosen_profile(chosen)
    _tell_versions(spans)
    return profile_for(spans[0].version)


def _tell_versions(spans: Sequence[VersionSpan]) -> None:
    """Say which version's events an archive's entries are given as."""
    upgrades = "".join(f", after {before.until} of {for_people(span.version)}" for before, span in pairwise(spans))
    tell(f"tailrace: the events are those of MongoDB {for_people(spans[0].version)}{upgrades}: the archive says so")


def _dump(dump: str, stack: contextlib.ExitStack, *, explains: bool) -> tuple[DumpSource | None, SaidVersion | None]:
    """The dump, and what an archive says about its server's version. What is unpacked is there until ``stack`` is
    closed. To explain, it need not be there."""
    from tailrace.read.source.dump import DumpSource  # noqa: PLC0415
    from tailrace.read.source.dump_archive import is_archive, unpack  # noqa: PLC0415
    from tailrace.read.source.dump_version import SaidVersion  # noqa: PLC0415

    if explains and (dump == "-" or not Path(dump).exists()):
        return None, None
    path = Path(stack.enter_context(_standard_input()) if dump == "-" else dump)
    if not path.is_file() or not is_archive(path):
        return DumpSource(path), None
    called = "standard input" if dump == "-" else dump
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tailrace-replay-")))
    version = unpack(path, folder, name=called)
    return DumpSource(folder, name=called), SaidVersion(version, f"the header of {called}")


def _profile_of_dump(chosen: str | None, source: DumpSource | None, said: SaidVersion | None) -> ServerProfile:
    """The version that is named, or else the dump's own, which is then printed with the reason."""
    from tailrace.read.source.dump_version import ASSUMED, version_of  # noqa: PLC0415

    if chosen is not None:
        return chosen_profile(chosen)
    if source is None:
        tell(f"tailrace: the events are assumed to be those of MongoDB {ASSUMED}: no dump was examined")
        return chosen_profile(ASSUMED)
    source.oldest()  # says what is wrong with a file that holds no entries
    folder = Path(source.name)
    found = version_of(source.oplog_path, folder if folder.is_dir() else None, said)
    tell(f"tailrace: the events are those of MongoDB {for_people(found.version)}: {found.why}")
    return profile_for(found.version)


@contextlib.contextmanager
def _standard_input() -> Iterator[str]:
    """A file with what comes on standard input: a dump is read more than once."""
    with tempfile.NamedTemporaryFile(prefix="tailrace-replay-", suffix=".bson") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield file.name


def _archive_blocks(
    options: StreamOptions, where: str, chosen: str | None, until: Until
) -> Generator[EventBlock, None, None]:
    from tailrace.read.archive.place import archive_place  # noqa: PLC0415
    from tailrace.read.archive.replay import ArchiveReplay  # noqa: PLC0415

    profile = None if chosen is None else chosen_profile(chosen)
    replay = ArchiveReplay(archive_place(where), options, profile, until=until.time)
    if profile is None:
        _tell_versions(replay.spans)
    return _replayed(replay)


def _replayed(replay: ArchiveReplay) -> Generator[EventBlock, None, None]:
    try:
        yield from replay.blocks()
        _refuse_search(replay.searching)
    finally:
        say_skipped(replay.unknown_operations)


def _blocks(plan: Plan, source: OplogSource, until: Until) -> Generator[EventBlock, None, None]:
    from tailrace.core.stream.stream import ONE_OPLOG, open_stream  # noqa: PLC0415
    from tailrace.read.source.drive import answers_of, drive  # noqa: PLC0415

    plan = _begun(plan, *source.oldest())
    stream, answers = open_stream(plan), answers_of(source)
    try:
        for batch in source.tail(plan.read_after or ClusterTime(0)):
            stream.feed(ONE_OPLOG, batch)
            yield from drive(stream, answers)
            if stream.invalidated or (until.time is not None and batch.high_water >= until.time):
                return
        _refuse_search(stream.searching)
    finally:
        say_skipped(stream.statistics.unknown_operations)


def _begun(plan: Plan, oldest: ClusterTime, complete: bool) -> Plan:
    if plan.read_after is None:
        return plan.start_at(oldest)
    plan.confirm_history(oldest, complete)
    return plan


def _refuse_search(searching: bool) -> None:
    if searching:
        raise UsageError("the entries end before the resume token is found", hint="Replay a later dump")


def _print_events(blocks: Generator[EventBlock, None, None], writer: EventWriter, until: Until) -> bool:
    """Print the events up to ``until``; whether there was one."""
    with contextlib.closing(blocks):  # what it has to say comes now
        return _print_blocks(blocks, writer, until) is not None


def _print_blocks(blocks: Generator[EventBlock, None, None], writer: EventWriter, until: Until) -> bytes | None:
    written: bytes | None = None
    try:
        for block in blocks:
            for event, token in zip(block.events(), block.tokens(), strict=True):
                if until.all_counted or until.is_before(token):
                    return written
                writer.write(event)
                written = token
                until.count()
            writer.flush()
            if until.all_counted:
                return written
    except KeyboardInterrupt:  # SIGTERM too
        writer.flush()
        if written is not None:
            tell(f"tailrace: stopped. To go on: --resume-after {token_argument(written)}")
        raise
    return written
