"""``tailrace archive``: keep the oplog for longer than the deployment does."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tailrace.cli.output import say, show_progress, tell
from tailrace.cli.signal_calls import call_aside
from tailrace.cli.stream_arguments import address_of, parse_duration
from tailrace.cli.usage import WrongUsageError
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.user_text import byte_count
from tailrace.errors import SourceError, UsageError
from tailrace.read.source.uri import URI_VARIABLE, find_uri, is_uri_argument

if TYPE_CHECKING:
    from tailrace.read.archive.place import ArchivePlace
    from tailrace.read.archive.recorder import Recorder
    from tailrace.read.archive.verification import OplogReport
    from tailrace.read.archive.writer import ArchiveProgress

_DESCRIPTION = """\
Keep a deployment's oplog for longer than the deployment does. Every oplog entry is written to DIR once, unchanged, in
compressed Parquet files, and so are the stored pre-images. For a cluster, these are the oplogs of all shards and of the
config server. Run it again to continue where it stopped. "tailrace replay DIR" reads change streams from it. With
--archive DIR, or connect(uri, archive=DIR), a stream of the deployment may start before its oplog begins.

DIR may be s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX (extra: s3): then --state
names a local folder for the files on their way.

  tailrace archive URI DIR         archive until Ctrl-C or SIGTERM
  tailrace archive status DIR      how far an archive reaches
  tailrace archive verify DIR      read all of it, and name what is damaged or missing"""
_WORDS: Final = ("status", "verify")
_PROGRESS_S: Final = 10.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the main parser."""
    parser = subparsers.add_parser(
        "archive",
        help="keep the oplog for longer than the deployment does",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "uri",
        nargs="?",
        metavar="URI",
        help="mongodb://... of a replica set, or of a cluster's config server or mongos; @FILE reads it from a file "
        "(default: the environment variable TAILRACE_URI); or status, or verify",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        metavar="DIR",
        help="the archive: a directory, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX; "
        "a new one is begun",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="in a store: a local folder, the same one each time; it proves that the archive is this process's",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="in a store: go on with an archive whose state is lost; its writer is stopped, if it still runs",
    )
    parser.add_argument(
        "--once", action="store_true", help="stop when everything that was there at the start is archived"
    )
    parser.add_argument(
        "--from",
        dest="begin",
        choices=("oldest", "now"),
        default="oldest",
        help="where a new archive begins (default: with the oldest entry)",
    )
    parser.add_argument("--keep", metavar="30d", help="delete segments older than this (s, m, h, d; default: never)")
    parser.add_argument(
        "--keep-bytes", metavar="500g", help="delete the oldest segments of each oplog beyond this size"
    )
    parser.add_argument(
        "--segment-bytes", metavar="256m", default="256m", help="close a file when it holds this many bytes of entries"
    )
    parser.add_argument(
        "--segment-seconds", metavar="N", type=float, default=60.0, help="close a file after N seconds (default: 60)"
    )
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="serve statistics to Prometheus, /livez and /readyz (extra: metrics)"
    )
    parser.add_argument("--no-pre-images", action="store_true", help="leave out config.system.preimages")
    parser.set_defaults(run=run, positionals=("uri", "directory"))


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit code. Raises TailraceError."""
    if args.uri in _WORDS:
        if args.directory is None:
            raise UsageError(f"tailrace archive {args.uri} needs the archive's directory")
        from tailrace.read.archive.place import archive_place  # noqa: PLC0415  not for --help

        return _report(archive_place(args.directory), reads_all=args.uri == "verify")
    if args.directory is None and args.uri is not None and not is_uri_argument(args.uri):
        raise UsageError(
            f"the connection URI is missing: {args.uri} is not one",
            hint=f"tailrace archive URI DIR, or without URI where {URI_VARIABLE} is set",
        )
    if args.directory is None or args.directory in _WORDS:
        raise UsageError("the archive's directory is missing", hint=f"tailrace archive {args.directory or 'URI'} DIR")
    return _record(args)


def _record(args: argparse.Namespace) -> int:
    from tailrace.cli.one_shard import warn_of_one_shard  # noqa: PLC0415
    from tailrace.read.archive.recorder import ArchivePolicy, Recorder  # noqa: PLC0415  so that --help does not load it
    from tailrace.read.archive.retention import Retention  # noqa: PLC0415
    from tailrace.read.archive.writer import SegmentLimits  # noqa: PLC0415
    from tailrace.read.source.connection import open_client  # noqa: PLC0415
    from tailrace.read.source.topology import Cluster  # noqa: PLC0415

    if args.metrics is not None:
        address_of(args.metrics, "--metrics")  # checked first: nobody connects if it is wrong
    keep = None if args.keep is None else parse_duration("--keep", args.keep)
    policy = ArchivePolicy(
        from_oldest=args.begin == "oldest",
        once=args.once,
        take_over=args.take_over,
        images=not args.no_pre_images,
        limits=SegmentLimits(_size(args.segment_bytes, "--segment-bytes"), args.segment_seconds),
        retention=Retention(keep, None if args.keep_bytes is None else _size(args.keep_bytes, "--keep-bytes")),
    )
    folder = _place(args)
    uri = find_uri(args.uri)
    with open_client(uri) as client:
        cluster = Cluster.discover(client, uri, {})
        if cluster is None:
            warn_of_one_shard(client)
        recorder = Recorder(client, cluster, folder, policy)
        _stop_at_signals(recorder)
        tell(f"tailrace: archiving into {folder}")
        begun = time.monotonic()
        try:
            with _served(recorder, args.metrics):
                recorder.run(_progress(begun), every_s=_PROGRESS_S)
        finally:
            _print_progress(recorder.statistics(), begun)
            if cluster is not None:
                cluster.close()
    return 0


def _place(args: argparse.Namespace) -> ArchivePlace:
    """Where the archive is to be written."""
    from tailrace.base.object_place import URIS, ObjectPlace  # noqa: PLC0415  not for --help
    from tailrace.read.archive.place import archive_place  # noqa: PLC0415

    folder = archive_place(args.directory, args.state)
    if isinstance(folder, ObjectPlace) and args.state is None:
        raise WrongUsageError(
            "an archive in an object store needs --state",
            hint="--state FOLDER: a local folder, the same one each time",
        )
    if not isinstance(folder, ObjectPlace) and (args.state is not None or args.take_over):
        raise WrongUsageError(f"--state and --take-over belong to an archive in an object store ({URIS})")
    return folder


@contextmanager
def _served(recorder: Recorder, metrics: str | None) -> Iterator[None]:
    if metrics is None:
        yield
        return
    from tailrace.base.metrics_server import serve_metrics  # noqa: PLC0415
    from tailrace.read.archive.metrics import ArchiveCollector  # noqa: PLC0415

    with serve_metrics(ArchiveCollector(recorder), *address_of(metrics, "--metrics")) as url:
        tell(f"tailrace: statistics at {url}")
        yield


def _stop_at_signals(recorder: Recorder) -> None:
    """The first signal ends cleanly; a second one ends at once."""

    def stop(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        call_aside(recorder.stop)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


def _progress(begun: float) -> Callable[[dict[str, ArchiveProgress]], None]:
    return lambda written: _print_progress(written, begun)


def _print_progress(written: dict[str, ArchiveProgress], begun: float) -> None:
    entries = sum(one.entries for one in written.values())
    size = sum(one.bytes for one in written.values())
    seconds = max(0.001, time.monotonic() - begun)
    reached = [one.until for one in written.values() if one.until]
    behind = f", archived up to {min(reached)}" if reached else ""
    expired = sum(one.expired for one in written.values())
    gone = f", {expired} expired segments deleted" if expired else ""
    tell(f"tailrace: {entries:,} entries and {_bytes(size)} archived, {size / seconds / 1e6:.1f} MB/s{behind}{gone}")


def _report(folder: ArchivePlace, *, reads_all: bool) -> int:
    from tailrace.read.archive.verification import status, verify  # noqa: PLC0415

    def read(path: ArchivePlace) -> None:
        if sys.stderr.isatty():
            show_progress(f"reading {path.name}")

    reports = verify(folder, read) if reads_all else status(folder)
    if reads_all and sys.stderr.isatty():
        show_progress("")
    for report in reports:
        _print_report(report)
    faults = [fault for report in reports for fault in report.faults]
    for fault in faults:
        say(f"damaged: {fault}")
    if faults:
        raise SourceError(f"the archive {folder} has {len(faults)} fault{'s' if len(faults) > 1 else ''}")
    if reads_all:
        say("intact: every file is as it was written, and none is missing")
    return 0


def _print_report(report: OplogReport) -> None:
    if report.after is None or report.until is None:
        say(f"{report.name}: nothing archived yet")
        return
    images = f", {report.images:,} pre-images" if report.images else ""
    erased = f", {report.erased:,} of them erased by 'tailrace erase'" if report.erased else ""
    say(
        f"{report.name}: {report.entries:,} entries{erased}{images} in {report.segments:,} segments, "
        f"{_bytes(report.bytes)} stored for {_bytes(report.raw_bytes)}"
    )
    say(f"  from {ClusterTime(report.after + 1)}")
    say(f"  to   {report.until}")


def _bytes(count: int) -> str:
    size: float = count
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _size(text: str, flag: str) -> int:
    size = byte_count(text)
    if size is None:
        raise UsageError(f"{flag} {text} is not a size", hint="Such as 256m or 2g")
    return size
