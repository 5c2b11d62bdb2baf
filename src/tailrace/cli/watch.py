"""``tailrace watch``: change events of a running deployment, as they come."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from bson.json_util import CANONICAL_JSON_OPTIONS, dumps
from bson.raw_bson import RawBSONDocument

from tailrace.cli.event_writer import EventWriter, new_writer, say_skipped
from tailrace.cli.output import tell
from tailrace.cli.sampled import add_compare_arguments, check_compare, sampled
from tailrace.cli.stream_arguments import (
    Until,
    add_stream_arguments,
    add_uri_argument,
    collation_of,
    pipeline_of,
    stage_of,
    token_argument,
)
from tailrace.cli.usage import WrongUsageError
from tailrace.core import raw_bson
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.oplog.namespace import Scope
from tailrace.errors import invariant
from tailrace.read.source.uri import find_uri

if TYPE_CHECKING:
    from tailrace.watch.client import ChangeStream

_DESCRIPTION = """\
Print the change events of a cluster, a database or a collection as they come. They are made here, from the oplog,
unless --engine server asks for the server's own change stream. Ends at an invalidate event, at --until or on Ctrl-C."""
#: With an end in sight, looks are short.
_AWAIT_MS_WITH_END: Final = 100
#: After how long without an event the command says what is watched.
_QUIET_S: Final = 2.0
#: What resume tokens from the middle of a copy hold.
SNAPSHOT: Final = "snapshot"
#: The stage's options that watch() has parameters for.
_STARTS: Final = {"startAtOperationTime", "resumeAfter", "startAfter"}
_PARAMETERS = {
    "fullDocument": "full_document",
    "fullDocumentBeforeChange": "full_document_before_change",
    "resumeAfter": "resume_after",
    "startAfter": "start_after",
    "startAtOperationTime": "start_at_operation_time",
    "showExpandedEvents": "show_expanded_events",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "watch",
        help="print change events as they come",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_uri_argument(parser)
    add_stream_arguments(parser, more_modes=("exact", "exactWhenAvailable"))
    parser.add_argument(
        "--start",
        choices=("snapshot",),
        help="snapshot: first an event for each existing document, then every change since (default: now)",
    )
    parser.add_argument(
        "--snapshot-documents-per-second",
        type=float,
        metavar="N",
        help="copy at most N documents a second (default: no limit)",
    )
    parser.add_argument(
        "--images",
        metavar="DIR",
        help="where the stream keeps what exact images are computed from (--full-document exact)",
    )
    parser.add_argument(
        "--archive",
        metavar="DIR",
        help="the deployment's archive ('tailrace archive'), a directory, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or "
        "gs://BUCKET/PREFIX, for a start before the oplog begins",
    )
    parser.add_argument("--engine", choices=("oplog", "server"), default="oplog", help="default: oplog")
    parser.add_argument(
        "--server-version", metavar="V", help="make the events of this version (default: the deployment's)"
    )
    parser.add_argument(
        "--max-await-time-ms", type=int, metavar="MS", help="how long one read waits for events (default: 1000)"
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="entries (engine server: events) read at a time")
    add_compare_arguments(parser)
    parser.set_defaults(run=run, positionals=("uri", "namespace"))


def run(args: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises TailraceError."""
    from tailrace.cli.explanation import print_explanation  # noqa: PLC0415
    from tailrace.cli.one_shard import warn_of_one_shard  # noqa: PLC0415
    from tailrace.cli.unknown import tell_unknown  # noqa: PLC0415
    from tailrace.watch.client import connect, operation_time, watch_scope  # noqa: PLC0415  so that --help does not load it

    _check_compare(args)
    scope, stage, pipeline = Scope.parse(args.namespace), stage_of(args), pipeline_of(args)
    uri, asked = find_uri(args.uri), dict(stage)
    begins_now = args.start is None and not _STARTS & stage.keys()
    until = Until.parse(args.until, None)
    writer = new_writer(args.format)
    with connect(
        uri,
        engine=args.engine,
        server_version=args.server_version,
        archive=args.archive,
        images=args.images,
    ) as client:
        if args.until == "now":
            until.time = operation_time(client)
        await_ms = args.max_await_time_ms
        if await_ms is None and until.time is not None:
            await_ms = _AWAIT_MS_WITH_END
        parameters = {_PARAMETERS[name]: stage.pop(name) for name in list(stage) if name in _PARAMETERS}
        with closing(
            watch_scope(
                client,
                scope,
                pipeline=pipeline,
                document_class=RawBSONDocument,
                options=stage or None,
                max_await_time_ms=await_ms,
                batch_size=args.batch_size,
                collation=collation_of(args),
                start=args.start,
                snapshot_documents_per_second=args.snapshot_documents_per_second,
                **parameters,
            )
        ) as stream:
            warn_of_one_shard(client)
            if begins_now:
                tell_unknown(client, scope)
            if args.explain:
                print_explanation(stream.explain(), args.format)
            else:
                with sampled(args, uri, scope, lambda: _comparable(asked, pipeline, args)):
                    _print_events(stream, writer, until, str(scope) if args.namespace else "the whole deployment")
    return 0


def _check_compare(args: argparse.Namespace) -> None:
    check_compare(args)
    if args.compare is None:
        return
    if args.explain:
        raise WrongUsageError("--explain gives no events, so --compare has nothing to compare")
    if args.engine == "server" or args.server_version is not None:
        other = "--engine server" if args.engine == "server" else "--server-version"
        raise WrongUsageError(f"--compare compares our events with those of the server, and {other} asks for others")


def _comparable(stage: dict[str, Any], pipeline: list[dict[str, Any]], args: argparse.Namespace) -> Any:
    from tailrace.watch.compare.sampling import comparable  # noqa: PLC0415  as in run()

    return comparable(stage, pipeline, collation_of(args))


def _print_events(stream: ChangeStream, writer: EventWriter, until: Until, what: str) -> None:
    from tailrace.watch.client.patience import try_next_patiently  # noqa: PLC0415  as in run()

    first, found_nothing = stream.resume_token, False
    shown = None if first is None else raw_bson.bytes_of(first)
    copying = _copy_of(first) is not None
    quiet_since: float | None = time.monotonic()
    try:
        while stream.alive and not until.all_counted and not _is_past(stream, until, first if found_nothing else None):
            event = try_next_patiently(stream)
            found_nothing = event is None
            if event is None:
                writer.flush()
                if writer.reader_is_gone():
                    break
                token = stream.resume_token
                shown = shown if token is None else raw_bson.bytes_of(token)
                copying = _copy_of(token) is not None
                if quiet_since is not None and time.monotonic() - quiet_since >= _QUIET_S:
                    quiet_since = None
                    _say_watching(what)
                continue
            quiet_since = None
            raw = raw_bson.bytes_of(event)
            if until.is_before(_token_of(raw)):
                break
            writer.write(raw)
            if not copying:
                shown = _token_of(raw)
            elif not stream.has_next:  # at the end of a chunk; resuming in the middle of one repeats some of its events
                shown = raw_bson.bytes_of(stream.resume_token)
                copying = _copy_of(stream.resume_token) is not None
            until.count()
            if not stream.has_next:
                writer.flush()
    except KeyboardInterrupt:
        writer.flush()
        if shown is not None:
            tell(f"tailrace: stopped. To go on: --resume-after {_token_argument(shown)}")
        raise
    finally:
        writer.flush()
        say_skipped(stream.statistics.unknown_operations)


def _say_watching(what: str) -> None:
    """So that nobody takes a quiet terminal for one that hangs; a log or a script need not hear it."""
    if sys.stderr is not None and sys.stderr.isatty():
        tell(f"tailrace: watching {what}; nothing has happened yet (Ctrl-C ends)")


def _token_argument(token: bytes) -> str:
    """As ``token_argument``, also for a token from the middle of a copy."""
    copy = _copy_of(RawBSONDocument(token))
    if copy is not None:
        return shlex.quote(dumps({SNAPSHOT: copy}, json_options=CANONICAL_JSON_OPTIONS))
    return token_argument(token)


def _copy_of(token: Any) -> Any:
    """What a token from the middle of a copy says about it; ``None`` for any other token."""
    return None if token is None else token.get(SNAPSHOT)


def _token_of(event: bytes) -> bytes:
    """The event's token, found in its bytes: decoding the event would fail at a value that Python cannot hold."""
    element = raw_bson.find(event, b"_id")
    invariant(element is not None, "an event without its token")
    return b"" if element is None else raw_bson.value(event, element)


def _is_past(stream: ChangeStream, until: Until, first: Any) -> bool:
    """Whether everything up to the end was given. ``first`` is the stream's first token when the last look found
    nothing, else ``None``: only then may events at the end's own time not still come, and not even then while the
    stream stands at a high-water mark that it has begun with."""
    token = None if until.time is None else stream.resume_token
    if until.time is None or token is None or _copy_of(token) is not None:
        return False
    reached = ResumeToken.parse(raw_bson.bytes_of(token))
    if reached.cluster_time != until.time or first is None:
        return reached.cluster_time > until.time
    return token != first or not reached.is_high_water_mark
