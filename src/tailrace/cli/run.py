"""``tailrace run pipeline.yaml``: change events into a lake of Parquet files, on Spark."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tailrace.base.health import whole
from tailrace.base.service_manager import ServiceManager, notifying
from tailrace.cli.console_beside import add_console_argument, check_console, console_beside
from tailrace.cli.copy_progress import CopyProgress, CopyWatch
from tailrace.cli.lake import print_compaction, print_verification
from tailrace.cli.lake_shown import named_catalogue, released, shown_in
from tailrace.cli.one_writer import only_writer
from tailrace.cli.output import say, show_progress, tell
from tailrace.cli.run_skipped import SkippedOperations
from tailrace.cli.sampled import add_compare_arguments, check_compare, collectors, sampled
from tailrace.cli.stopped_by_signals import stopped_by_signals
from tailrace.cli.stream_arguments import address_of
from tailrace.cli.usage import WrongUsageError
from tailrace.errors import TailraceError
from tailrace.read.source.uri import hide

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from tailrace.cli.run_messages import MessageStreams
    from tailrace.lake.spark.store.pipeline_file import PipelineSettings
    from tailrace.lake.tables.writer import TablesWriter
    from tailrace.read.archive.recorder import Recorder
    from tailrace.watch.compare.deployment import Streams
    from tailrace.watch.compare.sampling import SampledComparison

_DESCRIPTION = """\
Read a change stream of MongoDB with Spark and keep it in a directory of Parquet files: in order and exactly once, even
after a crash. Besides the lake, the file can ask for tables, an archive and messages. Stop it with Ctrl-C; when it is
started again, it continues where it stopped. The file is explained in examples/pipeline.yaml and
docs/how-to/lake.md."""
_LOOK_S = 0.25


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command ``run`` with its arguments."""
    parser = subparsers.add_parser(
        "run",
        help="write change events to a lake of Parquet files, with Spark",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pipeline", metavar="pipeline.yaml", nargs="?", help="the pipeline file")
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of pipeline files, for editors, and exit"
    )
    parser.add_argument(
        "--available-now", action="store_true", help="exit when the end of the oplog is reached, whatever the file says"
    )
    parser.add_argument(
        "--progress", choices=("line", "json", "none"), default="line", help="how to print the progress (default: line)"
    )
    parser.add_argument("--compact", action="store_true", help="merge the lake's small files and exit")
    parser.add_argument("--verify", action="store_true", help="check the lake's files, rows and order, and exit")
    parser.add_argument(
        "--full", action="store_true", help="with --verify: read every byte and compare it with the hash in the log"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be read and written, and what it costs the server; write nothing (with --progress json: "
        "as JSON lines)",
    )
    parser.add_argument(
        "--accept-gap",
        action="store_true",
        help="continue although the oplog has lost events that the lake does not have; the lake's log records the gap",
    )
    parser.add_argument(
        "--partition-by",
        metavar="day,hour,collection",
        help="what a new lake's files are divided by, whatever the file says (default: day, which is always included)",
    )
    parser.add_argument(
        "--iceberg",
        metavar="CATALOG",
        help="the lake, on a disk or in s3://, is an Iceberg table too, in the catalogue with this URI "
        "(sqlite:///FILE, https://HOST) or this name in .pyiceberg.yaml, whatever the file says (extra: iceberg)",
    )
    add_console_argument(parser)
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="serve statistics to Prometheus, /livez and /readyz (extra: metrics)"
    )
    add_compare_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="print Spark's own log too")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0 when the stream ended or was stopped, 1 when ``--verify`` found a problem; raises
    TailraceError for whatever else is wrong."""
    from tailrace.lake.iceberg.settings import check_place  # noqa: PLC0415
    from tailrace.lake.spark.store.pipeline_file import load  # noqa: PLC0415  so that --help needs no pyspark

    if args.schema:
        return _print_schema()
    if args.pipeline is None:
        raise WrongUsageError("the pipeline file is missing", hint="examples/pipeline.yaml explains one")
    _check_flags(args)
    settings = load(args.pipeline)
    if args.available_now:
        settings = replace(settings, available_now=True, processing_time=None)  # what is typed wins over the file
    if args.partition_by is not None:
        from tailrace.lake.store.partitioning import Partitioning  # noqa: PLC0415

        names = [name.strip() for name in args.partition_by.split(",")]
        settings = replace(settings, partition_by=Partitioning.of(names).names)
    if args.iceberg is not None:
        settings = replace(settings, iceberg=named_catalogue(args.iceberg))
        check_place(settings.lake, "a lake")
    if args.compact:
        policy = settings.compaction
        with shown_in(settings.lake, settings.iceberg) as mirror:
            return print_compaction(
                settings.lake, target_bytes=policy.target_bytes, retention=policy.retention, release=released(mirror)
            )
    if args.verify:
        return print_verification(
            settings.lake, full=args.full, checkpoint=settings.checkpoint, iceberg=settings.iceberg
        )
    if args.dry_run:
        from tailrace.cli.one_shard import warn_of_one_shard_at  # noqa: PLC0415
        from tailrace.cli.run_plan import print_plan  # noqa: PLC0415  PySpark

        warn_of_one_shard_at(settings.source["uri"])
        return print_plan(settings, accept_gap=args.accept_gap, as_json=args.progress == "json")
    return _stream(settings, args)


def _print_schema() -> int:
    from tailrace.lake.spark.store.pipeline_schema import pipeline_schema  # noqa: PLC0415

    say(json.dumps(pipeline_schema(), indent=2), lines=True)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raises WrongUsageError for flags that contradict each other."""
    jobs = [flag for flag in ("--compact", "--verify", "--dry-run") if getattr(args, flag[2:].replace("-", "_"))]
    jobs += [
        flag
        for flag in ("--available-now", "--accept-gap")
        if not args.dry_run and getattr(args, flag[2:].replace("-", "_"))
    ][:1]
    if len(jobs) > 1:
        raise WrongUsageError(f"{jobs[0]} and {jobs[1]} cannot be used together", hint="Run the command once for each")
    check_compare(args)
    if args.compare is not None and (args.compact or args.verify):
        raise WrongUsageError(f"{jobs[0]} follows no stream, so --compare has nothing to compare")
    check_console(args)
    if args.metrics is not None:
        address_of(args.metrics, "--metrics")  # checked first: Spark takes seconds to start
    if args.full and not args.verify:
        raise WrongUsageError("--full says how --verify works, but --verify is not given")


def _stream(settings: PipelineSettings, args: argparse.Namespace) -> int:
    # PySpark looks at pandas when it is imported, which the pipeline does not use.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    from tailrace.cli.one_shard import warn_of_one_shard_at  # noqa: PLC0415
    from tailrace.cli.run_archive import archiving, has_history  # noqa: PLC0415
    from tailrace.cli.run_tables import tabling  # noqa: PLC0415
    from tailrace.lake.spark.query import options as source_options  # noqa: PLC0415
    from tailrace.lake.spark.store.failure import hush_loss_of_java, query_error  # noqa: PLC0415
    from tailrace.lake.spark.store.gap import HISTORY_HINT  # noqa: PLC0415
    from tailrace.lake.spark.store.stream import stream_of, write_stream  # noqa: PLC0415
    from tailrace.lake.store.lake_root import state_of  # noqa: PLC0415
    from tailrace.lake.store.progress import GrowthWatch  # noqa: PLC0415

    if settings.archive is not None and "archive" not in settings.source and has_history(settings.archive.path):
        settings = replace(settings, source={**settings.source, "archive": str(settings.archive.path)})
    stream_of(settings.source)  # a wrong option or address is reported before Spark takes its seconds to start
    stop = threading.Event()
    hush_loss_of_java()
    with (
        only_writer(settings.lake, settings.checkpoint),
        _console(settings, args),
        _spark_log(args.verbose) as log,
        archiving(settings.source["uri"], settings.archive, stop, once=settings.available_now) as archive,
        tabling(settings.source["uri"], settings.tables, stop, once=settings.available_now) as tables,
        _messages(settings, stop, log) as messages,
        _sampled(settings, args, log) as comparison,
    ):
        if args.progress == "line":
            # It takes seconds, and says nothing. Standard error is Spark's log by now.
            tell(f"tailrace: starting Spark, to write {settings.lake}", stream=log.stderr)
        warn_of_one_shard_at(settings.source["uri"], stream=log.stderr)
        _tell_left(settings, log)
        spark = _session(settings, log)
        try:
            watch = GrowthWatch(settings.lake)
            with (
                _metrics(spark, args.metrics, tables, archive, messages=messages, comparison=comparison),
                stopped_by_signals(stop),
            ):
                query = write_stream(
                    spark,
                    settings.source,
                    str(settings.lake),
                    state=state_of(settings.lake),
                    checkpoint=settings.checkpoint,
                    processing_time=settings.processing_time,
                    available_now=settings.available_now,
                    compaction=settings.compaction,
                    accept_gap=settings.accept_gap or args.accept_gap,
                    partition_by=settings.partition_by,
                    on_error=settings.on_error,
                    iceberg=settings.iceberg,
                )
                show = _Shower(args.progress, log.stderr, log.path)
                fails = source_options.parse(settings.source).fails_on_invalidate
                ended = _follow(query, watch, stop, show, fails_on_invalidate=fails)
        except Exception as error:  # noqa: BLE001  whatever Spark raises becomes one sentence
            if not stop.is_set():
                failure = query_error(error)
                if failure.code == 286:
                    failure.hint = HISTORY_HINT
                log.keep_for(failure)
                raise failure from None
            ended = "Stopped."  # a signal to the whole group has stopped Spark's JVM before us
        finally:
            with contextlib.suppress(Exception):
                spark.stop()
    tell(f"{ended} {watch.events:,} events in {watch.batches:,} micro-batches were written to {settings.lake}")
    return 0


def _tell_left(settings: PipelineSettings, log: _SparkLog) -> None:
    """Say that a catalogue has the lake and is not given."""
    from tailrace.lake.iceberg.lake_mirror import left_behind  # noqa: PLC0415

    left = left_behind(settings.lake) if settings.iceberg is None else None
    if left is not None:
        tell(f"tailrace: {left}", stream=log.stderr)


def _session(settings: PipelineSettings, log: _SparkLog) -> Any:
    from tailrace.lake.spark.runtime.session import SparkNotStartedError, local_session  # noqa: PLC0415

    try:
        return local_session(
            "tailrace run", cores=settings.cores, memory=settings.memory, fast_start=True, config=settings.spark_config
        )
    except SparkNotStartedError as error:
        log.keep_for(error)
        raise


def _follow(
    query: StreamingQuery, watch: Any, stop: threading.Event, show: _Shower, *, fails_on_invalidate: bool
) -> str:
    """Tell the progress until the query ends or ``stop`` is set. Returns why it ended; raises what Spark raised."""
    copy = CopyWatch()
    while query.isActive and not stop.wait(_LOOK_S):
        show.grown(watch)
        show.copied(copy.look(_end_offset(query)))
        show.behind(query)
        show.skipped()
        if not fails_on_invalidate and _invalidated(query):
            query.stop()
            show.end(watch)
            return "The stream has ended: its collection or database was dropped or renamed (invalidate)."
    if query.isActive:
        query.stop()
        show.end(watch)
        return "Stopped."
    error = query.exception()
    show.end(watch)
    if error is not None and not stop.is_set():
        raise error
    return "Stopped." if stop.is_set() else "The end of the oplog is reached."


def _end_offset(query: StreamingQuery) -> str:
    progress = query.lastProgress
    return "{}" if progress is None or not progress.sources else progress.sources[0].endOffset or "{}"


def _invalidated(query: StreamingQuery) -> bool:
    try:
        offset = json.loads(_end_offset(query))
    except ValueError:
        return False
    return isinstance(offset, dict) and offset.get("invalidated") is True


class _Shower:
    """Writes the progress: a line that is rewritten on a terminal, a new one now and then elsewhere, or JSON lines."""

    def __init__(self, form: str, stderr: TextIO, log: Path | None = None) -> None:
        self._form = form
        self._skipped = SkippedOperations(log)
        self._stderr = stderr
        self._terminal = stderr.isatty()
        self._open = False
        self._lines = 0
        self._in_danger = False

    def grown(self, watch: Any) -> None:
        for growth in watch.look():
            if self._form == "json":
                say(json.dumps(growth.to_json()), flush=True)
            elif self._form == "line":
                self._line(str(growth))

    def copied(self, progress: CopyProgress | None) -> None:
        if progress is None:
            return
        if self._form == "json":
            say(json.dumps(progress.to_json()), flush=True)
        elif self._form == "line":
            self._line(str(progress))

    def behind(self, query: StreamingQuery) -> None:
        """Warn once when the oplog is about to overtake the query, and again only after it has caught up."""
        from tailrace.lake.spark.monitoring import backlog_of  # noqa: PLC0415

        progress = query.lastProgress
        backlog = None if progress is None else backlog_of(progress)
        if backlog is None or backlog.in_danger == self._in_danger:
            return
        self._in_danger = backlog.in_danger
        if backlog.in_danger:
            tell(f"tailrace: {backlog.warning()}", before=self._broken_line(), stream=self._stderr)

    def skipped(self) -> None:
        """Report kinds of entries that the workers do not know and have skipped."""
        for kind in self._skipped.look():
            words = f"oplog entries of the kind '{kind}' are skipped: this version does not know it"
            tell(f"tailrace: {words}", before=self._broken_line(), stream=self._stderr)

    def _broken_line(self) -> str:
        return "\n" if self._open else ""

    def _line(self, text: str) -> None:
        self._lines += 1
        if self._terminal:
            show_progress(text, stream=self._stderr)
            self._open = True
        elif self._lines % 20 == 1:
            tell(text, stream=self._stderr)

    def end(self, watch: Any) -> None:
        self.grown(watch)
        self.skipped()
        if self._open:
            tell(stream=self._stderr)


@contextlib.contextmanager
def _sampled(
    settings: PipelineSettings, args: argparse.Namespace, log: _SparkLog
) -> Iterator[SampledComparison | None]:
    """Compare a share of the source's stream while the body runs, if that was asked for."""
    from tailrace.lake.spark.query import options as source_options  # noqa: PLC0415

    read = source_options.parse(settings.source)

    def asked() -> tuple[Streams, list[str]]:
        from bson.raw_bson import RawBSONDocument  # noqa: PLC0415

        from tailrace.watch.compare.sampling import comparable  # noqa: PLC0415

        collation = None if read.collation is None else RawBSONDocument(read.collation)
        return comparable(read.stage, [RawBSONDocument(stage) for stage in read.stages], collation)

    def told(text: str) -> None:
        before = "\n" if log.stderr.isatty() else ""  # a line of progress may stand there
        tell(f"tailrace: {text}", before=before, stream=log.stderr)

    with sampled(args, read.uri, read.scope, asked, told=told) as comparison:
        yield comparison


def _messages(
    settings: PipelineSettings, stop: threading.Event, log: _SparkLog
) -> contextlib.AbstractContextManager[MessageStreams]:
    """Publish the messages of the pipeline while the body runs."""
    from tailrace.cli.run_messages import messaging  # noqa: PLC0415  so that --help does not load it

    return messaging(
        settings.source["uri"],
        settings.messages,
        stop,
        once=settings.available_now,
        archive=settings.source.get("archive"),
        told=None if log.path is None else log.stderr,
    )


def _console(settings: PipelineSettings, args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """The console with the lake, the tables, the archive and the leases of the pipeline."""
    tables, archive = settings.tables, settings.archive
    # It shows one collection of leases, of the deployment that it is of.
    here = [one for one in settings.messages if one.store_uri is None]
    shown = {"store": here[0].store} if here else {}
    letters = next((one.letters for one in here if one.letters is not None), None)
    if letters is not None:
        shown["letters"] = letters
    return console_beside(
        args,
        hide(settings.source["uri"]),
        None,
        lakes=[settings.lake],
        tables=[] if tables is None else [tables.root],
        archives=[] if archive is None else [archive.path],
        **shown,
    )


@contextlib.contextmanager
def _metrics(
    spark: Any,
    address: str | None,
    tables: TablesWriter | None,
    archive: Recorder | None,
    *,
    messages: MessageStreams,
    comparison: SampledComparison | None,
) -> Iterator[None]:
    """Serve the statistics of the query, of tables, of an archive, of messages and of what is compared while the body
    runs, if an address was given, and tell systemd how query and messages are doing, if that is there."""
    if address is None and not ServiceManager(os.environ).is_there:
        yield
        return
    from tailrace.lake.spark.monitoring import MetricsListener  # noqa: PLC0415

    beside: list[Any] = [*collectors(comparison)]
    if tables is not None:
        from tailrace.lake.tables.metrics import TablesCollector  # noqa: PLC0415

        beside.append(TablesCollector(tables))
    if archive is not None:
        from tailrace.read.archive.metrics import ArchiveCollector  # noqa: PLC0415

        beside.append(ArchiveCollector(archive))
    listener = MetricsListener()
    spark.streams.addListener(listener)
    with contextlib.ExitStack() as stack:
        health = listener.health
        if messages.streams:
            collector, theirs = stack.enter_context(messages.watched_over())
            beside.append(collector)
            health = lambda: whole([listener.health(), theirs()])  # noqa: E731
        if address is not None:
            served = listener.serve(*address_of(address, "--metrics"), beside=beside, health=health)
            stack.enter_context(served)
        stack.enter_context(notifying(health))
        yield


class _SparkLog:
    """Where Spark's own output goes. ``stderr`` is the command's standard error, for our lines."""

    def __init__(self, path: Path | None, stderr: TextIO) -> None:
        self.path = path
        self.stderr = stderr
        self.kept = False

    def keep_for(self, error: TailraceError) -> None:
        """Keep Spark's log and say in ``error`` where it is."""
        if self.path is not None:
            self.kept = True
            where = f"Spark's log: {self.path}"
            error.hint = where if error.hint is None else f"{error.hint}. {where}"


@contextlib.contextmanager
def _spark_log(verbose: bool) -> Iterator[_SparkLog]:
    """Send what Spark prints to a file: its JVM and Python workers inherit standard output and error from us, and
    PySpark's threads write tracebacks to ``sys.stderr`` when the JVM dies. Our own lines go to ``sys.stdout`` and
    ``log.stderr``. The file goes unless there was an error."""
    if verbose:
        yield _SparkLog(None, sys.stderr)
        return
    descriptor, name = tempfile.mkstemp(prefix="tailrace-spark-", suffix=".log")
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = os.dup(1), os.dup(2)
    sys.stdout = os.fdopen(out, "w", buffering=1)
    log = _SparkLog(Path(name), os.fdopen(err, "w", buffering=1))
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield log
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        log.stderr.flush()
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = sys.__stdout__
        if not log.kept:
            Path(name).unlink(missing_ok=True)
